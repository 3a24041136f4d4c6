"""Bad input, tried for real: each ends with exit code 2, one message that names it, no traceback,
and every file that was there before still as it was."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import TINY, flags, scrimp, write_corpus

from scrimp.cli import main


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("bad-input"))


@pytest.fixture(scope="module")
def run_dir(corpus: Path) -> Path:
    """A finished run that the cases below must not harm."""
    folder = corpus.parent / "run"
    assert main(flags(corpus, folder, "--train.steps=4", "--checkpoint.every=2")) == 0
    return folder


@pytest.fixture(scope="module")
def exported(run_dir: Path) -> Path:
    folder = run_dir.parent / "exported"
    assert main(["export", str(run_dir), str(folder)]) == 0
    return folder


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def snapshot(folder: Path) -> dict[str, str]:
    """Path to hash of every file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


Case = Callable[[Path, Path, Path, Path], list[str]]
"""(scratch folder, corpus, run, exported model) to a command line."""


def source(scratch: Path, name: str, content: bytes, *more: str) -> list[str]:
    """Train on a file with this content."""
    path = scratch / name
    path.write_bytes(content)
    return ["train", *TINY, f"--data.source={path}", f"--run.dir={scratch / 'new'}", "--train.steps=2", *more]


def other_model(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    """A run whose configuration says another width than its checkpoint."""
    copy = scratch / "copy"
    shutil.copytree(run, copy)
    for step in (copy / "checkpoints").iterdir():
        shutil.rmtree(step)
    wider = scratch / "wider"
    assert main(flags(corpus, wider, "--train.steps=2", "--model.width=64")) == 0
    shutil.copytree(wider / "checkpoints", copy / "checkpoints", dirs_exist_ok=True)
    return ["train", f"--run.dir={copy}", "--resume"]


def other_tokenizer_on_resume(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    return ["train", f"--run.dir={run}", "--resume", "--data.tokenizer=bpe"]


def shards_of_another_tokenizer(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    shards = scratch / "shards"
    assert main(["prepare", str(corpus), str(shards), "--tokenizer=bpe", "--bpe-vocab-size=300"]) == 0
    return [
        "train",
        f"--model.weights={exported}",
        f"--data.source={shards}",
        f"--run.dir={scratch / 'new'}",
        "--train.sequence=64",
        "--train.batch-tokens=256",
    ]


def too_large_vocabulary(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    return flags(corpus, scratch / "new", "--model.vocab-size=100", "--train.steps=2")


def no_space(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    small = scratch / "small-disk"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("NOT RUN: this user cannot mount a small file system")
    return flags(corpus, small / "new", "--train.steps=4", "--checkpoint.every=2")


def no_permission(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    # /proc refuses new folders to everybody, root included.
    return flags(corpus, Path("/proc/scrimp-run"), "--train.steps=2")


def config_typo(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    path = scratch / "my.toml"
    path.write_text("[train]\nstepz = 5\n", encoding="utf-8")
    return ["train", str(path)]


def truncated_shard(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    shards = scratch / "shards"
    assert main(["prepare", str(corpus), str(shards), "--tokenizer=bytes"]) == 0
    victim = max(shards.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
    os.truncate(victim, victim.stat().st_size - 1000)
    return ["train", *TINY[:1], *TINY[2:], f"--data.source={shards}", f"--run.dir={scratch / 'new'}"]


def all_checkpoints_damaged(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    copy = scratch / "copy"
    shutil.copytree(run, copy)
    for state in (copy / "checkpoints").glob("*/state.json"):
        state.write_bytes(state.read_bytes().replace(b"0", b"1"))
    return ["train", f"--run.dir={copy}", "--resume"]


def not_a_model(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    return ["generate", str(scratch), "--prompt=x"]


def unsupported_model(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    copy = scratch / "gpt2"
    shutil.copytree(exported, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}), encoding="utf-8")
    return ["generate", str(copy), "--prompt=x"]


def tokenizer_of_another_model(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    shards, copy = scratch / "shards", scratch / "model"
    assert main(["prepare", str(corpus), str(shards), "--tokenizer=bpe", "--bpe-vocab-size=2000"]) == 0
    shutil.copytree(exported, copy)
    (copy / "tokenizer.json").unlink()
    shutil.copyfile(next(shards.rglob("tokenizer.json")), copy / "tokenizer.json")
    return ["eval", str(copy), f"--data={corpus}"]


def export_over_something(scratch: Path, corpus: Path, run: Path, exported: Path) -> list[str]:
    return ["export", str(run), str(exported)]


CASES: dict[str, tuple[Case, str]] = {
    "empty file": (lambda s, c, r, e: source(s, "empty.txt", b""), "empty.txt"),
    "binary file": (lambda s, c, r, e: source(s, "binary.txt", b"text\n\0\x01\xff" * 100), "binary.txt"),
    "file that is not UTF-8": (lambda s, c, r, e: source(s, "latin.txt", b"caf\xe9 " * 500), "latin.txt"),
    "one-token corpus": (lambda s, c, r, e: source(s, "one.txt", b"a"), "too small"),
    "corpus below one sequence": (
        lambda s, c, r, e: source(s, "short.txt", b"a b\n\nc d\n\n", "--data.held-out=0"),
        "sequence",
    ),
    "missing column": (
        lambda s, c, r, e: source(s, "rows.jsonl", b'{"body": "text"}\n' * 9),
        "body",
    ),
    "JSON that is cut off": (
        lambda s, c, r, e: source(s, "rows.jsonl", b'{"text": "a"}\n{"te'),
        "rows.jsonl",
    ),
    "missing source": (lambda s, c, r, e: ["train", *TINY, f"--data.source={s / 'no.txt'}"], "no.txt"),
    "hub without a network": (
        lambda s, c, r, e: ["train", *TINY, "--data.source=hf:nobody/nothing", f"--run.dir={s / 'new'}"],
        "nobody/nothing",
    ),
    "other tokenizer on resume": (other_tokenizer_on_resume, "data.tokenizer"),
    "shards of another tokenizer": (shards_of_another_tokenizer, "tokenizer"),
    "other tokenizer than the weights'": (
        lambda s, c, r, e: [
            *["train", "--device=cpu", f"--model.weights={e}", f"--data.source={c}", "--data.tokenizer=bpe"],
            *[f"--data.cache={s / 'c'}", f"--run.dir={s / 'new'}", "--train.sequence=64"],
        ],
        "mean nothing",
    ),
    "tokenizer of another model": (tokenizer_of_another_model, "tokenizer"),
    "vocabulary mismatch": (too_large_vocabulary, "embedding rows"),
    "run folder that exists": (lambda s, c, r, e: flags(c, r, "--train.steps=4"), "--resume"),
    "resume without a run": (lambda s, c, r, e: ["train", f"--run.dir={s / 'no'}", "--resume"], "no run"),
    "resume with another setting": (
        lambda s, c, r, e: ["train", f"--run.dir={r}", "--resume", "--run.seed=7"],
        "run.seed",
    ),
    "no disk space": (no_space, "space"),
    "no permission": (no_permission, "/proc/scrimp-run"),
    "checkpoint of another model": (other_model, "model.width"),
    "every checkpoint damaged": (all_checkpoints_damaged, "state.json"),
    "truncated shard": (truncated_shard, "truncated"),
    "config typo": (config_typo, "train.steps"),
    "flag typo": (lambda s, c, r, e: ["train", "--train.stepz=5"], "--train.steps"),
    "sequence beyond the context": (
        lambda s, c, r, e: flags(c, s / "new", "--train.sequence=4096", "--train.batch-tokens=4096"),
        "context",
    ),
    "batch that does not divide": (
        lambda s, c, r, e: flags(c, s / "new", "--train.batch-tokens=300"),
        "multiple",
    ),
    "heads that do not divide": (lambda s, c, r, e: flags(c, s / "new", "--model.num-heads=5"), "num_heads"),
    "device that is not there": (lambda s, c, r, e: ["train", "--device=cuda:77"], "cuda:77"),
    "folder that is no model": (not_a_model, "neither"),
    "budget too small": (
        lambda s, c, r, e: flags(c, s / "new", "--budget.device-memory=1MB"),
        "does not fit",
    ),
    "model of another kind": (unsupported_model, "gpt2"),
    "weights that are missing": (
        lambda s, c, r, e: ["train", f"--model.weights={s / 'no'}"],
        "does not exist",
    ),
    "prompt beyond the context": (
        lambda s, c, r, e: ["generate", str(r), f"--prompt={'x' * 2000}"],
        "context",
    ),
    "export over something": (export_over_something, "exists already"),
    "report of no run": (lambda s, c, r, e: ["report", str(s)], "run"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_bad_input_is_named_and_nothing_is_lost(
    name: str,
    tmp_path: Path,
    corpus: Path,
    run_dir: Path,
    exported: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make, named = CASES[name]
    words = make(tmp_path, corpus, run_dir, exported)
    small = tmp_path / "small-disk"
    before = snapshot(run_dir), snapshot(exported)
    capfd.readouterr()
    try:
        code = main(words)
    finally:
        if small.exists():
            subprocess.run(["umount", str(small)], check=False)
    errors = capfd.readouterr().err
    assert code == 2, errors
    assert "error:" in errors
    assert named in errors
    assert "Traceback" not in errors
    assert (snapshot(run_dir), snapshot(exported)) == before
    if (tmp_path / "new").exists():
        assert not (tmp_path / "new" / "config.toml").exists(), "a refused run left a run behind"


@pytest.mark.slow
def test_a_process_ends_with_the_code_and_prints_no_traceback(tmp_path: Path) -> None:
    done = scrimp("train", f"--data.source={tmp_path / 'nothing.txt'}", "--device=cpu")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "nothing.txt" in done.stderr


def test_a_file_in_the_way_of_the_run_folder_stays(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder", encoding="utf-8")
    assert main(["train", f"--run.dir={in_the_way}", "--device=cpu"]) == 2
    assert in_the_way.read_text(encoding="utf-8") == "not a folder"
