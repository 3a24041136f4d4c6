"""The guide to fine-tuning: what it shows runs as it stands, on a model small enough for a test."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.data import ChatTemplate, load_tokenizer

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "finetuning.md").read_text(encoding="utf-8")
SMALLER = [
    "--device=cpu",
    "--train.steps=2",
    "--train.sequence=256",
    "--train.batch-tokens=512",
    "--data.held-out=0",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's files, and two models: a base model, and one with a chat template."""
    (conversations,), (template,) = blocks("json"), blocks("jinja")
    (tmp_path / "chats.jsonl").write_text(conversations, encoding="utf-8")
    (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
    (tmp_path / "tasks.jsonl").write_text(blocks("jsonl")[0], encoding="utf-8")
    assert (
        main(flags(write_corpus(tmp_path), tmp_path / "small", "--train.steps=1", "--model.context=256")) == 0
    )
    for name in ("base", "Qwen2.5-0.5B-Instruct"):
        assert main(["export", str(tmp_path / "small"), str(tmp_path / name)]) == 0
    (tmp_path / "Qwen2.5-0.5B-Instruct" / "chat_template.jinja").write_text(template, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.slow
def test_the_commands_of_the_guide_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [shlex.split(line)[1:] for block in blocks("sh") for line in block.splitlines()]
    assert [words[0] for words in commands] == [
        "train",
        "chat",
        "eval",
        "export",
        *["train", "chat", "export", "export"],
        "train",
        *["demonstrate", "demonstrate", "train", "eval"],
    ]
    for words in commands:
        more = {"train": SMALLER, "chat": ["--tokens=4", "--device=cpu"], "eval": ["--device=cpu"]}
        monkeypatch.setattr("sys.stdin", io.StringIO("Who are you?\n/quit\n"))
        assert main([*words, *more.get(words[0], [])]) == 0, capsys.readouterr().err
    assert (folder / "tuned" / "chat_template.jinja").is_file()
    assert (folder / "adapted" / "model.safetensors").is_file()
    assert (folder / "peft-adapter" / "adapter_model.safetensors").is_file()
    assert (folder / "runs" / "first" / "tokenizer" / "chat_template.jinja").is_file()


def test_the_template_of_the_guide_marks_answers_and_their_ends() -> None:
    template = ChatTemplate(load_tokenizer("bytes").with_chat_template(blocks("jinja")[0]))
    assert template.has_markers
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    found = template.encode(messages, "here")
    assert template.tokenizer.decode(found.tokens.tolist()) == "user: Hi\nassistant: Hello!\n"
    ids = found.tokens[found.answers].tolist()
    assert template.tokenizer.decode(ids) == "Hello!"
    assert set(ids[-1:]) == template.end_ids
    assert template.tokenizer.decode(template.prompt(messages[:1])) == "user: Hi\nassistant: "
