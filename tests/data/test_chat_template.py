"""Conversations in tokens, and who wrote them: against transformers' apply_chat_template."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from scrimp.data import ChatTemplate, load_tokenizer
from scrimp.data.bpe import train_bpe
from scrimp.data.tokenizer import own_tokenizer
from scrimp.errors import DataError, ModelError

WORDS = [
    "river",
    "Straße",
    "naïve",
    "数学",
    "🙂",
    "two  spaces",
    "a\nline",
    "{{ braces }}",
    "<b>",
    "it's",
    "1234",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}OPEN{{ message['content'] + "
    "'<|im_end|>' }}CLOSE{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKETS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content']"
    " + ' [/INST]' }}{% elif message['role'] == 'system' %}{{ message['content'] }}{% else %}OPEN{{ ' ' + "
    "message['content'] | trim + eos_token }}CLOSE{% endif %}{% endfor %}"
)
"""Two that are in wide use: of Qwen and of Mistral. OPEN and CLOSE stand where an answer begins and ends."""


def marked(template: str, *, markers: bool) -> str:
    """The template with generation markers, or without."""
    if "if message['role'] == 'user'" in template:
        opened, closed = ("{% generation %}", "{% endgeneration %}") if markers else ("", "")
    elif markers:
        body = template[template.index("OPEN") + 4 : template.index("CLOSE")]
        whole = f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{body}{{% endgeneration %}}"
        return template.replace(f"OPEN{body}CLOSE", f"{whole}{{% else %}}{body}{{% endif %}}")
    else:
        opened = closed = ""
    return template.replace("OPEN", opened).replace("CLOSE", closed)


Load = Callable[[str], tuple[PreTrainedTokenizerFast, ChatTemplate]]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE with the control tokens of both templates, as transformers saves it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    own_tokenizer(train_bpe([" ".join(WORDS)] * 3, 400, "<|endoftext|>"), "bpe").save(folder / "own")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "own")
    tokenizer.add_special_tokens(
        {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": SPECIAL[:2] + SPECIAL[4:]}
    )
    tokenizer.save_pretrained(folder / "whole")
    return folder / "whole"


@pytest.fixture
def load(bare: Path, tmp_path: Path) -> Load:
    """The tokenizer with a template, by transformers and by Scrimp."""

    def loaded(template: str) -> tuple[PreTrainedTokenizerFast, ChatTemplate]:
        theirs = PreTrainedTokenizerFast.from_pretrained(bare)
        theirs.chat_template = template
        theirs.save_pretrained(tmp_path / "with")
        return theirs, ChatTemplate(load_tokenizer(tmp_path / "with"))

    return loaded


def conversations(count: int, *, system: bool) -> list[list[dict[str, Any]]]:
    draw = random.Random(7)
    found = []
    for number in range(count):
        messages = [{"role": "system", "content": "Be short."}] if system and number % 3 == 0 else []
        for turn in range(draw.randint(1, 4)):
            for role in ("user", "assistant"):
                words = draw.choices(WORDS, k=draw.randint(1, 9))
                messages.append({"role": role, "content": f"{turn} " + " ".join(words) + "."})
        found.append(messages)
    return found


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("template", [CHATML, BRACKETS], ids=["chatml", "brackets"])
def test_tokens_and_answers_are_those_of_transformers(template: str, markers: bool, load: Load) -> None:
    """Without markers, answers are found by rendering prefixes: the same as the markers say."""
    theirs, _ = load(marked(template, markers=True))
    _, ours = load(marked(template, markers=markers))
    assert ours.has_markers == markers
    for messages in conversations(30, system=True):
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        found = ours.encode(messages, "here")
        assert found.tokens.tolist() == expected["input_ids"]
        assert found.answers.astype(int).tolist() == expected["assistant_masks"]
        text = theirs.decode(found.tokens[found.answers].tolist())
        assert found.answer_bytes == len(text.encode())


@pytest.mark.slow
def test_threads_do_not_mix_their_answers(load: Load) -> None:
    _, ours = load(marked(CHATML, markers=True))
    chats = conversations(60, system=True) * 10
    alone = [ours.encode(messages, "here").answers.tolist() for messages in chats]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda messages: ours.encode(messages, "here").answers.tolist(), chats))
    finally:
        sys.setswitchinterval(before)
    assert together == alone


@pytest.mark.parametrize("template", [CHATML, BRACKETS], ids=["chatml", "brackets"])
def test_a_prompt_is_that_of_transformers(template: str, load: Load) -> None:
    theirs, ours = load(marked(template, markers=False))
    for messages in conversations(10, system=True):
        expected = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        assert ours.prompt(messages[:-1]) == expected


def test_a_turn_ends_with_the_first_control_token_behind_an_answer(load: Load) -> None:
    theirs, ours = load(marked(CHATML, markers=False))
    eos, end = theirs.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    assert ours.end_ids == {eos, end}
    _, ours = load(marked(BRACKETS, markers=False))
    assert ours.end_ids == {eos}
    _, ours = load("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert ours.end_ids == {eos}


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name(load: Load) -> None:
    """As Qwen 3's does, which drops the thoughts of all answers but the last."""
    last = "{% if loop.last and message['role'] == 'assistant' %}<think></think>{% endif %}"
    thoughts = CHATML.replace("OPEN", last).replace("CLOSE", "")
    _, ours = load(thoughts)
    one, two = conversations(30, system=False)[0][:2], conversations(30, system=False)[0][:2] * 2
    assert ours.encode(one, "row 1").answers.any()
    with pytest.raises(DataError, match="cannot be found by the chat template") as caught:
        ours.encode(two, "row 2")
    assert "row 2" in caught.value.what
    assert "generation" in str(caught.value.do)


def test_what_a_template_may_not_do(load: Load) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    for text, message in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}", "__class__"),
        ("{{ strftime_now('%Y') }}", "today's date"),
        ("{{ messages[7].content }}", "no element 7"),
    ):
        _, ours = load(text)
        with pytest.raises(DataError) as caught:
            ours.encode(messages, "here")
        assert message in str(caught.value), text
    with pytest.raises(ModelError, match="no Jinja template"):
        load("{% for m in messages %}")
    _, ours = load("{% for m in messages %}{{ m.role }}{% endfor %}{% generation %}{% endgeneration %}")
    with pytest.raises(DataError, match="marks nothing"):
        ours.encode(messages, "here")


def test_the_date_is_known_in_a_chat_alone(load: Load) -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}then{% endif %}" + CHATML
    _, ours = load(marked(template, markers=True))
    messages = conversations(1, system=False)[0]
    ids = ours.encode(messages, "here").tokens.tolist()
    assert ours.tokenizer.decode(ids).startswith("then")
    assert ours.tokenizer.decode(ours.prompt(messages)).startswith("20")


def test_a_tokenizer_without_a_template_is_refused(bare: Path) -> None:
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate(load_tokenizer(bare))


def test_the_template_of_older_folders_is_read_and_another_one_can_be_given(load: Load) -> None:
    tokenizer = load(marked(CHATML, markers=False))[1].tokenizer
    files = {
        "tokenizer_config.json": '{"eos_token": "</s>", "chat_template": [{"name": "default", "template": "A"}]}'
    }
    older = type(tokenizer)(tokenizer.files()["tokenizer.json"], files, name="older")
    assert older.chat_template == "A"
    other = older.with_chat_template("B")
    assert (other.chat_template, other.digest) == ("B", older.digest)
    assert np.array_equal(other.encode("text"), older.encode("text"))
