"""`scrimp demonstrate`: rows to conversations that a run trains on, by words, embeddings, draws or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import sft_flags, write_chats
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.cli.trained import load_executable
from scrimp.tasks.embedding import embeddings
from scrimp.training.trained_weights import open_target

ROWS = [
    {"question": f"Which {thing} has {number} legs?", "answer": f"{thing} {number}", "task": thing}
    for thing in ("table", "spider", "dog")
    for number in range(6)
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def written(path: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def test_the_file_trains_and_is_evaluated_by_its_last_answers(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = file.parent
    assert main(["demonstrate", str(file), str(folder / "chats.jsonl"), "--count=2", "--tasks=same"]) == 0
    assert "18 conversations, 2 demonstrations before each\n" in capsys.readouterr().out
    chats = written(folder / "chats.jsonl")
    assert [chat[-2]["content"] for chat in chats] == [row["question"] for row in ROWS]
    for chat, row in zip(chats, ROWS, strict=True):
        assert [one.get("weight") for one in chat if one["role"] == "assistant"] == [0, 0, None]
        assert all(one["content"].startswith(str(row["task"])) for one in chat if one["role"] == "assistant")
    kept = (folder / "chats.jsonl").read_bytes()
    (folder / "with-template").mkdir()
    write_chats(folder / "with-template")
    (folder / "with-template" / "chats.jsonl").write_bytes(kept)
    run = folder / "run"
    more = ["--train.steps=1", "--train.sequence=256", "--data.held-out=0"]
    assert main(sft_flags(folder / "with-template", run, *more)) == 0
    capsys.readouterr()
    data = str(folder / "with-template" / "chats.jsonl")
    assert main(["eval", str(run), "--data", data, "--conversations", "--device=cpu"]) == 0
    answers = sum(len(str(row["answer"])) + 1 for row in ROWS)  # bytes, and an end
    assert f"{answers} in 18 documents" in capsys.readouterr().out
    assert main(["demonstrate", str(file), data]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Path(data).read_bytes() == kept


def test_of_a_bank_the_nearest_by_the_model_s_own_embeddings(file: Path) -> None:
    folder = file.parent
    assert main(flags(write_corpus(folder), folder / "run", "--train.steps=2")) == 0
    bank = folder / "bank.jsonl"
    bank.write_text("".join(json.dumps(row) + "\n" for row in ROWS[3:]))
    out = folder / "out.jsonl"
    words = [
        "--bank",
        str(bank),
        "--by=embedding",
        "--model",
        str(folder / "run"),
        "--count=3",
        "--device=cpu",
    ]
    assert main(["demonstrate", str(file), str(out), *words]) == 0
    target = open_target(folder / "run")
    found = embeddings(
        load_executable(target, "cpu"), target.tokenizer, [str(row["question"]) for row in ROWS]
    )
    for number, chat in enumerate(written(out)):
        cosines = found[3:] @ found[number]
        order = [3 + int(one) for one in np.argsort(-cosines, kind="stable") if 3 + one != number]
        assert [one["content"] for one in chat[:-2:2]] == [ROWS[one]["question"] for one in order[:3][::-1]]


def test_draws_and_none(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outs = {name: file.parent / f"{name}.jsonl" for name in ("a", "b", "c", "none", "other")}
    for name, words in {
        "a": ["--by=random"],
        "b": ["--by=random", "--seed=0"],
        "c": ["--by=random", "--seed=1"],
        "none": ["--by=none"],
        "other": ["--tasks=other", "--count=13"],
    }.items():
        assert main(["demonstrate", str(file), str(outs[name]), *words]) == 0
    assert "18 have fewer, since no more fit (mean 12.0)" in capsys.readouterr().out
    assert outs["a"].read_bytes() == outs["b"].read_bytes() != outs["c"].read_bytes()
    assert [len(chat) for chat in written(outs["none"])] == [2] * 18
    assert {len(chat) for chat in written(outs["other"])} == {26}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by=embedding"], "--by embedding needs --model"),
        (["--model=runs/x"], "--model needs --by embedding"),
        (["--seed=1"], "--seed has no effect with --by bm25"),
        (["--by=random", "--device=cpu"], "--device has no effect with --by random"),
        (["--count=0"], "--count"),
        (["--tasks=same", "--bank=untasked.jsonl"], "untasked.jsonl, line 1 has no task"),
    ],
)
def test_what_does_not_go_together_is_refused_and_nothing_is_written(
    words: list[str],
    message: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(file.parent)
    Path("untasked.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    assert main(["demonstrate", "tasks.jsonl", "out.jsonl", *words]) == 2
    assert message in capsys.readouterr().err
    assert main(["demonstrate", "tasks.jsonl", "out.txt"]) == 2
    assert sorted(one.name for one in file.parent.iterdir()) == ["tasks.jsonl", "untasked.jsonl"]
