"""Conversations out of the standard library: what a docstring says is what the assistant says."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from pathlib import Path

import pytest

from scrimp.data import ChatTemplate, load_tokenizer
from scrimp.data.conversations import messages_of
from scrimp.data.corpus_text import CorpusSpec
from scrimp.data.find_source import open_source
from scrimp.data.prepare import chat_tokenizer, open_text_source
from scrimp.data.standard_chats import TEMPLATE
from scrimp.data.streams import Meter
from scrimp.errors import DataError

DOCSTRINGS, SIGNATURES = "stdlib-docstrings", "stdlib-signatures"


def answers(name: str) -> set[tuple[str, str]]:
    source = open_source(name, "messages", conversations=True)
    chats = [messages_of(text) for text in source.texts(Meter())]
    assert all([one["role"] for one in chat] == ["user", "assistant"] for chat in chats)
    assert len(chats) > 2000
    return {(chat[0]["content"], chat[1]["content"]) for chat in chats}


@pytest.mark.slow
def test_answers_are_what_python_itself_says_of_its_functions() -> None:
    docstrings, signatures = answers(DOCSTRINGS), answers(SIGNATURES)
    for function in (shutil.copyfile, textwrap.dedent, inspect.getdoc, textwrap.fill):
        signature = f"{function.__name__}{inspect.signature(function)}"
        summary = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        assert (f"What does {signature} do?", summary) in docstrings
        assert (f"Which function does this? {summary}", signature) in signatures


def test_the_two_kinds_are_other_data() -> None:
    one, other = (open_source(name, "messages", conversations=True) for name in (DOCSTRINGS, SIGNATURES))
    assert one.fingerprint() != other.fingerprint()
    assert one.fingerprint() == open_source(DOCSTRINGS, "messages", conversations=True).fingerprint()


def test_a_tokenizer_without_a_template_gets_one_for_these_alone() -> None:
    spec = CorpusSpec(source=DOCSTRINGS, conversations=True, tokenizer="bytes")
    _, given = open_text_source(spec)
    assert given is not None
    template = ChatTemplate(given)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    found = template.encode(messages, "here")
    assert template.tokenizer.decode(found.tokens.tolist()) == "user: Hi\nassistant: Hello\n"
    assert template.tokenizer.decode(found.tokens[found.answers].tolist()) == "Hello"
    assert set(found.tokens[found.answers].tolist()[-1:]) == template.end_ids
    own = load_tokenizer("bytes").with_chat_template(TEMPLATE.replace("user", "human") + "!")
    assert chat_tokenizer(spec, own, TEMPLATE).chat_template == own.chat_template


def test_it_is_no_text_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="holds conversations, not text") as refusal:
        open_source(SIGNATURES, "text")
    assert "--objective.name sft" in str(refusal.value.do)
    with pytest.raises(DataError, match="holds text, not conversations"):
        open_source("stdlib", "messages", conversations=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / DOCSTRINGS).mkdir()
    with pytest.raises(DataError, match="is a source of conversations, and a file or folder here"):
        open_source(DOCSTRINGS, "messages", conversations=True)
