"""Whole studies of real runs: the command end to end, killed in the middle, with halving, and its page again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, records, scrimp, write_corpus

from scrimp.study.rows import ROWS, read_rows

pytestmark = pytest.mark.slow

STEPS = 24


def write_study(folder: Path, corpus: Path, head: str = "", tail: str = "", more: str = "") -> Path:
    """A study of two variants and two seeds in a file of a folder."""
    settings = [word.removeprefix("--").replace("-", "_").split("=") for word in TINY if "=" in word]
    lines = [f"{key} = {value if value.isdecimal() else json.dumps(value)}" for key, value in settings]
    text = f"""
seeds = 2
{head}
[settings]
{chr(10).join(lines)}
data.source = "{corpus}"
data.cache = "{corpus.parent / "cache"}"
train.steps = {STEPS}
checkpoint.every = 4
{more}
[[variants]]
name = "slow"
optimizer.lr = 1e-4
[[variants]]
name = "fast"
optimizer.lr = 5e-3
{tail}
"""
    file = folder / "rates.toml"
    file.write_text(text, encoding="utf-8")
    return file


def figures(folder: Path) -> dict[tuple[str, int, int], dict[str, float | None]]:
    """All figures but those of time, by variant, seed and step."""
    return {
        key: {name: value for name, value in row.figures.items() if name != "tokens_per_second"}
        for key, row in read_rows(folder).items()
    }


def study(*words: object, timeout: float = 400.0) -> subprocess.CompletedProcess[str]:
    return scrimp("study", *map(str, words), timeout=timeout)


def children_of(folder: Path) -> list[int]:
    """Processes that train below a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(folder) in words and "tethered" in words:
                found.append(int(entry.name))
    return found


def wait_until(condition: Any, seconds: float = 200.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    """A study that nothing interrupted: its file, its folder, and what it said."""
    folder = tmp_path_factory.mktemp("study")
    file = write_study(folder, write_corpus(folder))
    return file, folder / "whole", study(file, "--out", folder / "whole")


def test_a_study_says_what_it_takes_runs_and_tells(done: Any) -> None:
    _, folder, ended = done
    assert ended.returncode == 0, ended.stderr
    assert "2 variants x 2 seeds = 4 runs of 24 steps" in ended.stderr
    assert "for what is left (predicted from first steps" in ended.stderr
    assert "smallest visible difference: " in ended.stderr
    assert ended.stdout.count("held-out loss") >= 4
    assert "lower by" in ended.stdout
    assert set(figures(folder)) == {(name, seed, STEPS) for name in ("slow", "fast") for seed in (0, 1)}
    page = (folder / "study.html").read_text(encoding="utf-8")
    assert "lower by" in page
    assert page.count("data-chart=") == 3


def test_runs_of_one_seed_have_the_same_weights_and_batches(done: Any) -> None:
    _, folder, _ = done
    runs = {
        (name, seed): records(folder / "runs" / f"{name}-seed{seed}")
        for name in ("slow", "fast")
        for seed in (0, 1)
    }
    first = {key: rows[0]["loss"] for key, rows in runs.items()}
    assert first["slow", 0] == first["fast", 0]
    assert first["slow", 1] == first["fast", 1]
    assert first["slow", 0] != first["slow", 1]
    assert len({row.data for row in read_rows(folder).values()}) == 1


def test_a_finished_study_runs_nothing_again(done: Any) -> None:
    file, folder, _ = done
    before = (folder / ROWS).read_bytes()
    again = study(file, "--out", folder)
    assert again.returncode == 0, again.stderr
    assert "4 of them are done" in again.stderr
    assert "scatter" in again.stderr
    assert (folder / ROWS).read_bytes() == before


def test_the_page_comes_from_the_rows_alone(done: Any, tmp_path: Path) -> None:
    file, folder, _ = done
    for name in (ROWS, "study.toml"):
        shutil.copy(folder / name, tmp_path / name)
    made = study(tmp_path)
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "study.html").read_text(encoding="utf-8")
    assert page.replace(tmp_path.name, folder.name) == (folder / "study.html").read_text().replace(
        file.stem, folder.name
    )


def test_a_study_that_is_killed_goes_on_to_the_same_rows(done: Any, tmp_path: Path) -> None:
    file, whole, _ = done
    out = tmp_path / "killed"
    out.mkdir()
    shutil.copy(whole / "probes.json", out / "probes.json")
    words = [sys.executable, "-m", "scrimp", "study", str(file), "--out", str(out), "--at-once", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, env=environment)
        second = out / "runs" / "fast-seed0"
        wait_until(lambda: list((second / "checkpoints").glob("step-*")))
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not children_of(out), 5.0)
    assert len(read_rows(out)) == 1
    with (out / ROWS).open("ab") as file_of_rows:
        file_of_rows.write(b'{"scrimp_study_row":1,"var')  # killed as it wrote
    again = study(file, "--out", out)
    assert again.returncode == 0, again.stderr
    assert "1 of them are done" in again.stderr
    assert any(event["kind"] == "resume" for event in records(second, "events.jsonl"))
    assert figures(out) == figures(whole)


def test_a_student_goes_on_to_the_same_loss_where_its_study_was_moved(done: Any, tmp_path: Path) -> None:
    file, _, _ = done
    text = (
        write_study(tmp_path, file.parent / "corpus.txt")
        .read_text()
        .replace("seeds = 2", "seeds = 1")
        .replace("optimizer.lr = 5e-3", 'objective.name = "distill"\nobjective.teachers = "run:slow"')
    )
    (tmp_path / "taught.toml").write_text(text)
    here, there = tmp_path / "here", tmp_path / "there"
    words = [sys.executable, "-m", "scrimp", "study", str(tmp_path / "taught.toml"), "--out", str(here)]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"})
        student = here / "runs" / "fast-seed0"
        wait_until(lambda: list((student / "checkpoints").glob("step-*")))
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not children_of(here), 5.0)
    assert set(read_rows(here)) == {("slow", 0, STEPS)}
    shutil.copytree(here, tmp_path / "copy")
    ended = study(tmp_path / "taught.toml", "--out", here)
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "copy").rename(there)
    here.rename(tmp_path / "gone")
    ended = study(tmp_path / "taught.toml", "--out", there)
    assert ended.returncode == 0, ended.stderr
    assert any(event["kind"] == "resume" for event in records(there / "runs" / "fast-seed0", "events.jsonl"))
    assert figures(there) == figures(tmp_path / "gone")


def test_an_interrupted_study_ends_its_runs_with_a_checkpoint(done: Any, tmp_path: Path) -> None:
    file, whole, _ = done
    out = tmp_path / "ended"
    out.mkdir()
    shutil.copy(whole / "probes.json", out / "probes.json")
    text = (
        file.read_text()
        .replace(f"train.steps = {STEPS}", "train.steps = 4000")
        .replace("every = 4", "every = 0")
    )
    longer = tmp_path / "longer.toml"
    longer.write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-m", "scrimp", "study", str(longer), "--out", str(out), "--at-once", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    run = out / "runs" / "slow-seed0"
    wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 1000)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not children_of(out)
    assert list((run / "checkpoints").glob("step-*"))
    assert read_rows(out) == {}


def test_a_run_that_fails_is_told_and_the_others_go_on(done: Any, tmp_path: Path) -> None:
    file, whole, _ = done
    out = tmp_path / "failing"
    out.mkdir()
    shutil.copy(whole / "probes.json", out / "probes.json")
    text = file.read_text().replace("seeds = 2", "seeds = 1")
    # Neither changes what a step costs, so that the probes hold; the second cannot be met by the data.
    text = text.replace(
        "optimizer.lr = 5e-3", "optimizer.lr = 5e-3\noptimizer.eps = 1e-8\nschedule.warmup_steps = 9999"
    )
    failing = tmp_path / "failing.toml"
    failing.write_text(text)
    ended = study(failing, "--out", out)
    assert ended.returncode == 1
    assert "fast, seed 0, failed: error: " in ended.stdout
    assert "warmup_steps" in ended.stdout
    rows = read_rows(out)
    assert rows["slow", 0, STEPS].error is None
    assert "warmup" in (rows["fast", 0, STEPS].error or "")


def test_halving_stops_runs_between_rounds_and_goes_on_with_the_best(done: Any, tmp_path: Path) -> None:
    file, whole, _ = done
    more = '[[variants]]\nname = "slowest"\noptimizer.lr = 1e-6\n[halving]\nfactor = 2\nrounds = 1\n'
    study_file = write_study(tmp_path, file.parent / "corpus.txt", tail=more)
    text = (
        study_file.read_text()
        .replace("seeds = 2", "seeds = 1")
        .replace("checkpoint.every = 4", "checkpoint.every = 0")
    )
    study_file.write_text(text)
    out = tmp_path / "halved"
    out.mkdir()
    shutil.copy(whole / "probes.json", out / "probes.json")
    ended = study(study_file, "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert "dropped after step 12: slowest" in ended.stdout
    found = figures(out)
    assert set(found) == {
        *((name, 0, STEPS // 2) for name in ("slow", "fast", "slowest")),
        *((name, 0, STEPS) for name in ("slow", "fast")),
    }
    # A run that was stopped between rounds is the run that was not.
    assert found["fast", 0, STEPS] == figures(whole)["fast", 0, STEPS]


def test_runs_go_on_from_the_weights_and_moments_of_their_trunk(done: Any, tmp_path: Path) -> None:
    file, _, _ = done
    more = 'schedule.name = "constant"\nschedule.warmup_steps = 1\n'
    text = (
        write_study(tmp_path, file.parent / "corpus.txt", more=more)
        .read_text()
        .replace("seeds = 2", "seeds = 1")
    )
    trunk = "[trunk]\ntrain.steps = 12\noptimizer.lr = 5e-3\n"
    branched = tmp_path / "branched.toml"
    branched.write_text(text.replace("[[variants]]", trunk + "[[variants]]", 1))
    out = tmp_path / "out"
    ended = study(branched, "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert "all runs of a seed go on from one run of 12 steps" in ended.stderr
    found = figures(out)
    assert set(found) == {("trunk", 0, 12), ("slow", 0, STEPS), ("fast", 0, STEPS)}
    runs = {name: records(out / "runs" / f"{name}-seed0") for name in ("trunk", "slow", "fast")}
    assert runs["slow"][0]["loss"] == runs["fast"][0]["loss"] < runs["trunk"][0]["loss"] - 0.5
    assert (found["fast", 0, STEPS]["held_out_loss"] or 9) < (found["trunk", 0, 12]["held_out_loss"] or 0)


def test_hours_choose_the_seeds(done: Any, tmp_path: Path) -> None:
    """By the first steps that are there, in one place: runs of both variants for each seed."""
    file, whole, _ = done
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    probes = json.loads((folder / "probes.json").read_text(encoding="utf-8"))
    for probe in probes.values():
        probe |= {"startup_seconds": 1.0, "step_seconds": 0.25}
    (folder / "probes.json").write_text(json.dumps(probes), encoding="utf-8")
    hours = 4.5 * 2 * (1 + 0.25 * STEPS) / 3600
    asked = study(file, "--out", folder, "--at-once", 1, "--hours", hours, "--dry-run")
    assert asked.returncode == 0, asked.stderr
    assert "2 variants x 4 seeds = 8 runs" in asked.stderr
    assert "4 of them are done" in asked.stderr
