"""The command where something about its process is odd: one clear sentence, soon, and exit code 2 if it fails."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.errors import LONGEST

QUICK = 60.0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("hostile")
    words = flags(write_corpus(folder), folder / "run", "--train.steps=2", "--model.context=4096")
    assert main(words) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def model_dir(run_dir: Path) -> Path:
    """The run as a Hugging Face folder."""
    out = run_dir.parent / "model"
    assert main(["export", str(run_dir), str(out)]) == 0
    return out


def called(words: list[str | bytes], **options: Any) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | options.pop("env", {})
    command = [sys.executable, "-m", "scrimp", *words]
    return subprocess.run(
        command, capture_output=True, timeout=QUICK, check=False, env=environment, **options
    )


def refusal(done: subprocess.CompletedProcess[bytes]) -> str:
    return short_refusal(done.returncode, done.stderr.decode())


def short_refusal(code: int, told: str) -> str:
    assert code == 2, told
    assert "Traceback" not in told
    assert len(told) < 5000
    return told


# -- the process -------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.every(6)
def test_a_closed_standard_stream_changes_no_exit_code(closed: tuple[int, ...], tmp_path: Path) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    assert called(["report", str(tmp_path)], preexec_fn=close).returncode == 2
    done = called(["--version"], preexec_fn=close)
    assert done.returncode == 0
    assert done.stdout.startswith(b"scrimp ") == (1 not in closed)


@pytest.mark.slow
def test_messages_never_end_in_a_file_that_took_a_closed_streams_number(tmp_path: Path) -> None:
    source = write_corpus(tmp_path)
    words = ["prepare", str(source), str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert called(words, preexec_fn=lambda: os.close(2)).returncode == 0
    assert called(["verify", str(tmp_path / "out")]).returncode == 0


def test_a_deleted_working_folder_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'cd "$1" && rmdir "$1" && exec "$2" -m scrimp plan'
    done = subprocess.run(
        ["bash", "-c", script, "bash", str(gone), sys.executable],
        capture_output=True,
        timeout=QUICK,
        check=False,
    )
    assert "the working folder was deleted" in refusal(done)


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [400, 600])
def test_a_limit_of_the_address_space_is_named(mebibytes: int, run_dir: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))

    words: list[str | bytes] = ["generate", str(run_dir), "--prompt", "def", "--tokens", "2"]
    assert "the system gives no more memory" in refusal(called(words, preexec_fn=limit))


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["0", "1", "2", "3", "5", "x"])
def test_help_and_tables_can_be_read_in_few_columns(columns: str) -> None:
    done = called(["eval", "--help"], env={"COLUMNS": columns})
    assert done.returncode == 0, done.stderr
    assert b"--sequence" in done.stdout
    done = called(["plan", "--device=cpu", "--model.preset=llama-3m"], env={"COLUMNS": columns})
    assert done.returncode == 0, done.stderr
    assert b"parameters" in done.stdout


# -- the command line --------------------------------------------------------------------------


# These run in the process of the test: nothing about a process of its own is odd.


def test_an_empty_path_is_not_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["train", "--run.dir", ""], ["train", "--run.dir="], ["report", ""], ["train", ""]):
        assert "is empty" in short_refusal(main(words), capsys.readouterr().err)
    (tmp_path / "a.toml").write_text('[run]\ndir = ""\n')
    assert "run.dir in a.toml is empty" in short_refusal(main(["train", "a.toml"]), capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


def test_a_named_pipe_is_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "a.toml")
    code = main(["train", str(tmp_path / "a.toml")])
    assert "a named pipe instead of a file" in short_refusal(code, capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        ["LONG"],
        ["train", "LONG"],
        ["train", "--LONG"],
        ["train", "--data.source", "LONG"],
        ["generate", "LONG", "--prompt", "a"],
        ["generate", "run", "--prompt", "a", "--tokens", "LONG"],
        ["generate", "run", "--promt", "LONG"],
    ],
)
def test_a_long_word_is_not_printed_whole(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([word.replace("LONG", "x" * 10_000) for word in words])
    told = short_refusal(code, capsys.readouterr().err)
    assert max(map(len, re.findall("x+", told)), default=0) <= LONGEST


# -- prompts -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prompt_that_is_not_utf8_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = os.fsdecode(b"ab\xff")  # as Python hands bytes of a command line over
    code = main(["generate", str(run_dir), "--prompt", prompt, "--tokens", "2"])
    assert "the prompt is not UTF-8 text" in short_refusal(code, capsys.readouterr().err)


def test_of_a_long_prompt_the_end_is_printed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run_dir), "--prompt", "a" * 3000 + "the end", "--tokens", "2"]) == 0
    text = capsys.readouterr().out
    assert "the end" in text
    assert len(text) < 2200
    code = main(["generate", str(run_dir), "--prompt", "a" * 100_000, "--tokens", "2"])
    short_refusal(code, capsys.readouterr().err)


@pytest.mark.slow
def test_control_characters_never_reach_the_terminal(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run_dir), "--prompt", "a\x1b[2J\x07\x9b1m\u202eb\n", "--tokens", "200"]
    capsys.readouterr()
    assert main([*words, "--temperature", "5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("a\\x1b[2J\\x07\\x9b1m\\u202eb\n")
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text if letter not in "\n\t")


# -- model folders -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 2**40),
        ("intermediate_size", 2**60),
        ("vocab_size", 2**62),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 2**61),
        ("head_dim", 2**40),
        ("max_position_embeddings", 2**62),
    ],
)
@pytest.mark.parametrize("command", ["generate", "plan"])
def test_sizes_are_held_against_the_stored_tensors(
    key: str, value: int, command: str, model_dir: Path, tmp_path: Path
) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((model_dir / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = {
        "generate": ["generate", str(tmp_path), "--prompt", "a", "--tokens", "1"],
        "plan": ["plan", "--model.weights", str(tmp_path)],
    }
    done = called(list(words[command]))
    if key == "max_position_embeddings":  # bounds positions, and no tensor
        assert done.returncode in (0, 2), done.stderr
    else:
        refusal(done)
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_a_config_of_gigabytes_is_not_read(model_dir: Path, tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(3 * 2**30)
    done = called(["generate", str(tmp_path), "--prompt", "a"])
    assert "config.json is too large" in refusal(done)
