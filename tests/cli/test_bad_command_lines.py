"""What is wrong on a command line or in a configuration ends with 2 and a short message.

A message names the key, what was given, what is allowed, and the nearest known key; it is never
a traceback, and nothing has been started.
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.cli import main

OPTIONS = [
    (["train", "--train.stepz", "5"], ["--train.stepz", "--train.steps"]),
    (["train", "--train.step", "5"], ["--train.step", "--train.steps"]),
    (["train", "--train.stepz=5"], ["--train.stepz", "--train.steps"]),
    (["train", "--steps", "5"], ["--steps", "--train.steps"]),
    (["train", "--run.steps", "5"], ["--run.steps", "--train.steps"]),
    (["train", "--seed", "5"], ["--seed", "--run.seed"]),
    (["train", "-x"], ["-x"]),
    (["train", "steps=5"], ["steps=5", "--train.steps 5"]),
    (["train", "--resum"], ["--resum", "--resume"]),
    (["train", "--resume=yes"], ["--resume", "takes no value"]),
    (["train", "--train.steps", "abc"], ["--train.steps", "'abc'", "a whole number"]),
    (["train", "--train.steps", "5.0"], ["--train.steps", "'5.0'", "a whole number"]),
    (["train", "--train.steps"], ["--train.steps", "no value"]),
    (["train", "--train.steps", "--resume"], ["--train.steps", "no value"]),
    (["train", "--optimizer.lr", "fast"], ["--optimizer.lr", "'fast'", "a number"]),
    (["train", "--optimizer.master-weights", "maybe"], ["--optimizer.master-weights", "true or false"]),
    (["train", "--precision", "bf61"], ["precision names an unknown recipe", "did you mean bf16"]),
    (["train", "--precision", "bf16,fp8"], ["no pattern and is not the first rule"]),
    (["train", "--schedule.name", "cosin"], ["--schedule.name", "did you mean cosine"]),
    (
        ["train", "--data.mask-documents", "false"],
        ["--data.mask-documents takes no value", "'false'", "no-mask-documents"],
    ),
    (["train", "--resume", "absent.toml"], ["'absent.toml'", "does not exist"]),
    (["train", "a.toml", "b.toml"], ["'b.toml'"]),
    (["train", "--train.steps", "0"], ["train.steps", "got", "1 or more"]),
    (["train", "--train.steps", "-5"], ["train.steps", "-5", "1 or more"]),
    (["train", "--optimizer.lr", "nan"], ["optimizer.lr", "nan"]),
    (["train", "--optimizer.lr", "-1e-3"], ["optimizer.lr", "-0.001"]),
    (["train", "--data.held-out", "1"], ["data.held_out", "below 1"]),
    (["train", "--optimizer.beta2", "1.5"], ["optimizer.beta2", "1.5"]),
    (["train", "--run.seed", "-1"], ["run.seed", "-1"]),
    (["train", "--budget.device-memory", "16"], ["budget.device_memory", "16GB", "16GiB"]),
    (["train", "--device", "gpu"], ["device", "'gpu'", "cuda:N"]),
    (["train", "--data.source", ""], ["data.source", "empty"]),
    (["train", "--model.preset", "llama-60"], ["model.preset", "'llama-60'", "llama-60m", "qwen2.5-0.5b"]),
    (["plan", "--train.stepz", "5"], ["--train.stepz", "--train.steps"]),
    (["trian"], ["trian", "train"]),
    (["data"], ["unknown command 'data'"]),
    (["data", "verify"], ["data verify", "write `scrimp verify FOLDER`"]),
    (["verfy", "x"], ["verfy", "did you mean `scrimp verify`?"]),
    (["--train.steps", "5"], ["--train.steps", "scrimp train"]),
    (["prepare", "corpus.txt"], ["OUT", "missing"]),
    (["prepare"], ["SRC", "missing"]),
    (["prepare", "a", "b", "--tokenizr", "bpe"], ["--tokenizr", "--tokenizer"]),
    (["prepare", "a", "b", "--bpe-vocab-size", "10"], ["--bpe-vocab-size", "10", "257"]),
    (["prepare", "a", "b", "--held-out", "2"], ["--held-out", "below 1"]),
    (["prepare", "a", "b", "--workers", "0"], ["--workers", "1 to 1,024"]),
    (["eval", "run"], ["--data", "missing"]),
    (["eval", "run", "--data", "x", "--device", "tpu"], ["--device", "tpu"]),
    (["generate", "run"], ["--prompt", "missing"]),
    (["generate", "run", "--prompt", "a", "--tokens", "0"], ["--tokens", "1 or more"]),
    (["generate", "run", "--prompt", "a", "--temperature", "-1"], ["--temperature", "-1.0"]),
    (["generate", "run", "--prompt", "a", "--top-p", "0"], ["--top-p", "above 0"]),
    (["generate", "run", "--prompt", "a", "--top-k", "-1"], ["--top-k", "-1"]),
    (["export", "run"], ["OUT", "missing"]),
    (["export", "run", "out", "more"], ["'more'"]),
    (["report"], ["RUN", "missing"]),
]

FILES = [
    ("[train]\nstepz = 5\n", ["train.stepz", "train.steps"]),
    ("steps = 5\n", ["steps", "train.steps", "under [train]"]),
    ("[train]\nprecision = 'bf16'\n", ["train.precision", "precision", "before the first"]),
    ("[train]\nsteps = 'five'\n", ["train.steps", "'five'", "a whole number"]),
    ("[train]\nsteps = 0\n", ["train.steps", "1 or more"]),
    ("[schedule]\nname = 'cosin'\n", ["schedule.name", "'cosine'"]),
    ("[trian]\nsteps = 5\n", ["[trian]", "[train]"]),
    ("[train\nsteps = 5\n", ["not valid TOML", "line 1"]),
    ("[budget]\nhost_memory = '64'\n", ["budget.host_memory", "16GB"]),
    ("[data]\nsource = ''\n", ["data.source", "empty"]),
    ('[run]\ndir = "a\\u0000b"\n', ["run.dir", "NUL"]),
]


def check(words: list[str], parts: list[str], calls, capsys) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert "Traceback" not in shown.err
    assert "\x1b" not in shown.err
    for part in parts:
        assert part in shown.err
    assert calls == []


@pytest.mark.parametrize(("words", "parts"), OPTIONS, ids=lambda value: " ".join(value))
@pytest.mark.every(2)
def test_options(words, parts, calls, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(words, parts, calls, capsys)


@pytest.mark.parametrize(("text", "parts"), FILES, ids=[text for text, _ in FILES])
def test_files(text, parts, calls, capsys, tmp_path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(text)
    check(["train", str(file)], parts, calls, capsys)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda folder: folder / "absent.toml", "does not exist"),
        (lambda folder: folder, "is a folder"),
        (lambda folder: _written(folder, b"\xff\xfe\x00"), "not UTF-8"),
        (lambda folder: _written(folder, b"Once upon a time"), "--data.source"),
    ],
)
def test_what_is_no_configuration_file(make, part, calls, capsys, tmp_path) -> None:
    path = make(tmp_path)
    check(["train", str(path)], [str(path), part], calls, capsys)


def test_an_option_cannot_hide_a_mistake_in_the_file(calls, capsys, tmp_path) -> None:
    file = _written(tmp_path, b"[train]\nstepz = 5\n")
    check(["train", str(file), "--train.steps", "5"], ["train.stepz"], calls, capsys)


WORDS = st.sampled_from(
    ["--train.steps", "--optimizer.lr", "--resume", "--data.no-mask-documents", "--precision"]
)
GARBAGE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)
LOOSE = st.sampled_from(
    ["5", "-1", "1e-3", "bf16", "=", "--", "-", "--=", "--train", "--train.", "--no-resume", "[]"]
)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS | LOOSE | GARBAGE | GARBAGE.map(lambda text: "--" + text), max_size=5))
def test_any_words_at_all_train_or_are_refused(words, calls, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with redirect_stderr(io.StringIO()) as err, redirect_stdout(io.StringIO()) as out:
        code = main(["train", *words])
    assert code in (0, 2)
    assert "Traceback" not in err.getvalue()
    asked_for_help = {"-h", "--help"} & set(words)
    assert asked_for_help or (code == 0) == (out.getvalue() == err.getvalue() == "")


def _written(folder: Path, content: bytes) -> Path:
    file = folder / "my.toml"
    file.write_bytes(content)
    return file


def test_commands_in_advice_are_quoted_for_a_shell(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "my shards"
    assert main(["data", "verify", str(folder)]) == 2
    advice = re.search(r"`scrimp (.*)`", capsys.readouterr().err)
    assert advice is not None
    assert shlex.split(advice[1]) == ["verify", str(folder)]
    assert main(["data", "prepare", "a", "b"]) == 2
    assert "scrimp verify" not in capsys.readouterr().err
