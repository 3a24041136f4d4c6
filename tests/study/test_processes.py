"""A run's files and what is read from them, and processes that end in every way, with a stand-in for `scrimp train`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scrimp.config import load_config
from scrimp.errors import ConfigError
from scrimp.study import processes
from scrimp.study.job import MOST_POINTS, Job, finished_row, row_of
from scrimp.study.processes import LocalPlaces, Process, last_step, prepare_folder

STANDS_IN = """
import json, os, sys, time
folder = next(word.partition("=")[2] for word in sys.argv if word.startswith("--run.dir="))
os.makedirs(folder)
open(os.path.join(folder, "config.toml"), "w").write("[run]\\nseed = 0\\n")
log = open(os.path.join(folder, "metrics.jsonl"), "a")
for step in range(1, 9):
    log.write(json.dumps({{"step": step, "loss": 1.0 / step, "eval_loss": 2.0 / step, "tokens_per_s": step}}) + "\\n")
    log.flush()
{ends}
"""
FINISHES = """
open(os.path.join(folder, "events.jsonl"), "w").write(
    json.dumps({"kind": "finish", "step": 8, "reason": "all steps done"}) + "\\n")
print(os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES"))
"""
FAILS = """
print("error: it went wrong\\n  got      this\\n  do       that")
sys.exit(2)
"""
WAITS = "time.sleep(60)"


def job_of(folder: Path, **more: Any) -> Job:
    known = {
        "variant": "fp8",
        "seed": 3,
        "digest": "d",
        "steps": 8,
        "folder": folder,
        "figure": "held_out_loss",
    }
    settings = {
        "train.steps": 8,
        "precision": "fp8,*.wgrad=bf16",
        "optimizer.lr": 1e-3,
        "data.mask_documents": False,
    }
    return Job(**known | {"settings": settings} | more)  # type: ignore[arg-type]


def write_run(job: Job, steps: int, *, finished: bool) -> None:
    job.run_folder.mkdir(parents=True)
    rows = [{"step": step, "loss": float(step), "tokens_per_s": 10.0 * step} for step in range(1, steps + 1)]
    rows[-1]["eval_loss"] = 0.5
    (job.run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reason = "all steps done" if finished else "the loss is not finite"
    start = {"kind": "start", "step": 0, "device": "a CPU", "environment": {"torch": "2"}}
    events = [start, {"kind": "finish", "step": steps, "reason": reason}]
    (job.run_folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (job.run_folder / "run.json").write_text('{"scrimp_run": 1, "data": "abc"}')


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Has processes run a script instead of Scrimp; told how it ends."""
    real = subprocess.Popen

    def use(ends: str) -> None:
        script = tmp_path / "stand_in.py"
        script.write_text(STANDS_IN.format(ends=ends))

        def popen(words: list[str], **options: Any) -> Any:
            return real([sys.executable, str(script), *words[4:]], **options)

        monkeypatch.setattr(processes.subprocess, "Popen", popen)

    return use


def ended(process: Process, seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while (row := process.row()) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    return row


def test_the_file_of_a_run_says_its_settings(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert prepare_folder(job) is False
    config = load_config(tmp_path / "fp8-seed3.toml")
    assert (config.train.steps, config.precision, config.optimizer.lr) == (8, "fp8,*.wgrad=bf16", 1e-3)
    assert config.data.mask_documents is False


def test_a_folder_that_was_begun_with_other_settings_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    prepare_folder(job)
    other = replace(job, settings=dict(job.settings) | {"train.steps": 9})
    assert prepare_folder(other) is False  # nothing was begun yet
    other.run_folder.mkdir()
    (other.run_folder / "config.toml").write_text("")
    assert prepare_folder(other) is False  # killed before its first checkpoint
    assert not other.run_folder.exists()
    (other.run_folder / "checkpoints" / "step-4").mkdir(parents=True)
    assert prepare_folder(other) is True
    with pytest.raises(ConfigError) as refusal:
        prepare_folder(job)
    assert "train.steps = 9" in str(refusal.value.got)


def test_a_finished_run_of_other_settings_has_no_row(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    prepare_folder(job)
    write_run(job, 8, finished=True)
    (job.run_folder / "config.toml").write_text("")
    assert finished_row(job) is not None
    other = replace(job, settings=dict(job.settings) | {"optimizer.lr": 2e-3})
    with pytest.raises(ConfigError, match="was begun with other settings"):
        finished_row(other)
    job.settings_file.unlink()  # nothing says what it was begun with
    with pytest.raises(ConfigError, match="was begun with other settings"):
        finished_row(job)


def test_a_folder_with_nothing_to_go_on_with_is_begun_anew(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (job.run_folder / "tokenizer").mkdir(parents=True)
    assert prepare_folder(job) is False
    assert not job.run_folder.exists()


def test_figures_are_read_at_their_step(tmp_path: Path) -> None:
    job = job_of(tmp_path, steps=20)
    write_run(job, 20, finished=True)
    row = row_of(job, seconds=1.5)
    assert row.error is None
    assert row.figures == {"held_out_loss": 0.5, "training_loss": 18.0, "tokens_per_second": 115.0}
    assert (row.data, row.environment) == ("abc", {"torch": "2", "device": "a CPU"})
    assert row.held_out is not None
    assert (row.held_out.steps, row.held_out.values) == ([20.0], [0.5])
    earlier = row_of(replace(job, steps=10), seconds=1.0)
    assert earlier.error == "the run has no held out loss at step 10"
    assert earlier.training is not None
    assert earlier.training.steps[-1] == 10


def test_curves_of_long_runs_are_means_of_equal_parts(tmp_path: Path) -> None:
    job = job_of(tmp_path, steps=1000)
    write_run(job, 1000, finished=True)
    curve = row_of(job, seconds=0).training
    assert curve is not None
    assert len(curve.steps) == MOST_POINTS
    assert (curve.steps[0], curve.values[0]) == (5, 3.0)


def test_only_a_run_that_finished_well_has_a_row_already(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert finished_row(job) is None
    write_run(job, 8, finished=False)
    assert finished_row(job) is None
    good = replace(job, seed=4)
    write_run(good, 8, finished=True)
    assert finished_row(good) is not None
    assert finished_row(replace(good, steps=9)) is None
    assert (
        finished_row(replace(job, steps=8, stops_there=True)) is not None
    )  # a round needs no end of the run


@pytest.mark.parametrize(("text", "step"), [("", 0), ('{"step": 3}\n{"ste', 3), ("torn", 0)])
def test_the_last_step_of_a_log(tmp_path: Path, text: str, step: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert last_step(tmp_path) == step
    assert last_step(tmp_path / "none") == 0


def test_a_run_that_ends_well_gives_its_place_back(tmp_path: Path, stand_in: Any) -> None:
    stand_in(FINISHES)
    places = LocalPlaces([{"CUDA_VISIBLE_DEVICES": "7"}])
    assert places.count == 1
    places.start(job_of(tmp_path, threads=2))
    found: list[Any] = []
    while not found:
        found = places.ended()
    assert found[0][1].figures["held_out_loss"] == 0.25
    assert (tmp_path / "fp8-seed3.log").read_text().split() == ["2", "7"]
    places.start(job_of(tmp_path, seed=4))
    places.close()
    assert places.steps() == {}


def test_a_run_that_fails_tells_why(tmp_path: Path, stand_in: Any) -> None:
    stand_in(FAILS)
    row = ended(Process(job_of(tmp_path)))
    assert row.error == "error: it went wrong got this do that"
    assert row.figures == {}


def test_a_run_that_is_killed_is_an_error(tmp_path: Path, stand_in: Any) -> None:
    stand_in("os.kill(os.getpid(), 9)")
    assert ended(Process(job_of(tmp_path))).error == "killed by SIGKILL"
    stand_in("sys.exit(7)")
    assert ended(Process(job_of(tmp_path, seed=5))).error == "ended with exit code 7; see fp8-seed5.log"


def test_an_error_of_an_earlier_attempt_is_not_told_again(tmp_path: Path, stand_in: Any) -> None:
    stand_in("sys.exit(7)")
    (tmp_path / "fp8-seed3.log").write_text("error: an earlier attempt\n")
    assert ended(Process(job_of(tmp_path))).error == "ended with exit code 7; see fp8-seed3.log"


def test_a_signal_without_a_name_has_its_number(tmp_path: Path, stand_in: Any) -> None:
    stand_in("os.kill(os.getpid(), 40)")
    assert ended(Process(job_of(tmp_path))).error == "killed by signal 40"


def test_runs_that_do_not_end_are_killed_and_the_others_end(
    tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        "import signal, pathlib\n"
        "slow = 'seed3' in folder or 'seed4' in folder\n"
        "end = lambda *_: (time.sleep(0.3), open(os.path.join(folder, 'wrote'), 'w').close(), os._exit(143))\n"
        "signal.signal(15, signal.SIG_IGN if slow else end)\n"
        "open(os.path.join(folder, 'ready'), 'w').close()\n" + WAITS
    )
    monkeypatch.setattr(processes, "_GRACE_S", 2.0)
    said: list[str] = []
    places = LocalPlaces([{}, {}, {}], said.append)
    jobs = [job_of(tmp_path, seed=seed) for seed in (3, 4, 5)]
    for job in jobs:
        places.start(job)
    limit = time.monotonic() + 30
    while not all((job.run_folder / "ready").exists() for job in jobs):
        assert time.monotonic() < limit
        time.sleep(0.02)
    began = time.monotonic()
    places.close()
    assert time.monotonic() - began < 3.5  # one time for all
    assert [line.split()[0] for line in said] == ["fp8-seed3", "fp8-seed4"]
    assert (jobs[2].run_folder / "wrote").exists()


def test_a_run_is_told_to_end_where_its_round_ends(tmp_path: Path, stand_in: Any) -> None:
    stand_in("import signal; signal.signal(15, lambda *_: os._exit(143)); " + WAITS)
    row = ended(Process(job_of(tmp_path, steps=4, stops_there=True)))
    assert row.error is None
    assert (row.steps, row.figures["held_out_loss"]) == (4, 0.5)


def test_a_process_does_not_outlive_the_one_that_started_it(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys, time, os
words = [sys.executable, "-m", "scrimp.study.tethered", str(os.getpid()), "chat", "--help"]
child = subprocess.Popen([sys.executable, "-c", '''
import sys, runpy, time
runpy.run_module = lambda *a, **k: (open({str(tmp_path / "up")!r}, "w").close(), time.sleep(60))
sys.argv = ["x", "''' + str(os.getpid()) + '''"]
from scrimp.study.tethered import main
main()
'''])
print(child.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    end = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while _is_alive(child):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_whose_parent_is_gone_already_ends_itself() -> None:
    code = subprocess.run(
        [sys.executable, "-m", "scrimp.study.tethered", "1", "--version"], check=False
    ).returncode
    assert code == 128 + signal.SIGKILL


def _is_alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0]
    except OSError:
        return os.path.exists(f"/proc/{process}")
