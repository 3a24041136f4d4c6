"""kill -9 while a run's first files are written: the next start in the folder leaves its own files, and no others."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from checkpoint_victim import die_before_call
from tiny_run import TINY, flags, write_corpus

from scrimp.cli import main
from scrimp.data import load_tokenizer
from scrimp.errors import CheckpointError
from scrimp.training import session
from scrimp.training.start import Start


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Two command lines, but for the run: a text and a tokenizer that declares another end; another text and bytes."""
    root = tmp_path_factory.mktemp("killed")
    text = write_corpus(root)
    load_tokenizer("bytes").save(root / "own")
    (root / "own" / "generation_config.json").write_text(json.dumps({"eos_token_id": 65}), encoding="utf-8")
    other = root / "other.txt"
    other.write_text(text.read_text(encoding="utf-8").replace("self", "that"), encoding="utf-8")
    first = [word for word in flags(text, root / "unused", "--train.steps=2") if word != TINY[1]]
    second = flags(other, root / "unused", "--train.steps=2")
    return [
        [word for word in words if not word.startswith("--run.dir")]
        for words in ([*first, f"--data.tokenizer={root / 'own'}"], second)
    ]


def starts(texts: list[list[str]], run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[Start]:
    """What the two command lines decide, each stopped just before it writes its first file."""
    found = []

    def capture(run_dir: Path, start: Start) -> dict[str, str]:
        found.append(start)
        raise CheckpointError("nothing is written")

    with monkeypatch.context() as patch:
        patch.setattr(session, "_write_decisions", capture)
        for words in texts:
            assert main([*words, f"--run.dir={run_dir}"]) == 2
    return found


def killed_before(call: int, run_dir: Path, start: Start) -> bool:
    """Write the first files in a process that kills itself; whether it came that far."""
    victim = os.fork()
    if victim == 0:
        try:
            die_before_call(call)
            session._write_decisions(run_dir, start)
        finally:
            os._exit(0)
    _, status = os.waitpid(victim, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def contents(run_dir: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in run_dir.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.name != "report.html"
    }


@pytest.mark.slow
def test_a_start_after_a_kill_before_any_file_operation_leaves_its_own_files(
    texts: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = starts(texts, tmp_path / "run", monkeypatch)
    session._write_decisions(tmp_path / "run", second)
    expected = contents(tmp_path / "run")
    call, kills, left = 1, 0, False
    while not left:
        run_dir = tmp_path / f"run-{call}"
        run_dir.mkdir()
        assert killed_before(call, run_dir, first), "the configuration is there before the last operation"
        left = (run_dir / "config.toml").exists()
        if not left:
            killed_before(call, run_dir, second)
            if not (run_dir / "config.toml").exists():
                session._write_decisions(run_dir, second)
            assert contents(run_dir) == expected, call
            kills += 1
        call += 1
    assert kills > 10


@pytest.mark.slow
def test_a_run_that_began_in_the_folder_of_a_killed_one_is_sound(
    texts: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    first, _ = starts(texts, run_dir, monkeypatch)
    session._write_decisions(run_dir, first)
    (run_dir / "config.toml").unlink()
    assert main([*texts[1], f"--run.dir={run_dir}"]) == 0
    assert not (run_dir / "tokenizer" / "generation_config.json").exists()
    assert main(["verify", str(run_dir)]) == 0
    assert main(["generate", str(run_dir), "--prompt=def", "--tokens=2", "--device=cpu"]) == 0
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
