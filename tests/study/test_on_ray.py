"""Runs of a study on Ray: a cluster of this machine alone, started by the study."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import PROBE, study_of
from test_study_runs import children_of, figures, study, wait_until, write_study
from tiny_run import records, write_corpus

from scrimp.errors import ConfigError
from scrimp.study import on_ray
from scrimp.study.on_ray import ray_places
from scrimp.study.rows import read_rows

HAS_RAY = True
try:
    import ray  # noqa: F401
except ImportError:
    HAS_RAY = False
needs_ray = pytest.mark.skipif(
    not HAS_RAY, reason="NOT RUN: Ray is not installed (pip install 'scrimp[ray]')"
)


@needs_ray
@pytest.mark.slow
def test_runs_on_ray_are_those_of_this_machine(tmp_path: Path) -> None:
    file = write_study(tmp_path, write_corpus(tmp_path))
    file.write_text(file.read_text().replace("seeds = 2", "seeds = 1"))
    here = study(file, "--out", tmp_path / "here")
    assert here.returncode == 0, here.stderr
    there = study(file, "--out", tmp_path / "there", "--ray", "local")
    assert there.returncode == 0, there.stderr + there.stdout
    assert "the cluster's machines" in there.stderr or "there are no more runs" in there.stderr
    assert figures(tmp_path / "there") == figures(tmp_path / "here")


@needs_ray
@pytest.mark.slow
def test_a_study_on_ray_that_is_killed_goes_on_to_the_same_rows(tmp_path: Path) -> None:
    file = write_study(tmp_path, write_corpus(tmp_path))
    # Ray takes some seconds to end what a driver that is gone had begun.
    text = file.read_text().replace("seeds = 2", "seeds = 1").replace("train.steps = 24", "train.steps = 600")
    file.write_text(text.replace("checkpoint.every = 4", "checkpoint.every = 20"))
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert study(file, "--out", whole).returncode == 0
    out.mkdir()
    shutil.copy(whole / "probes.json", out / "probes.json")
    words = [sys.executable, "-m", "scrimp", "study", file, "--out", out, "--ray", "local", "--at-once", "1"]
    process = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    second = out / "runs" / "fast-seed0"
    wait_until(lambda: list((second / "checkpoints").glob("step-*")))
    process.kill()
    process.wait()
    wait_until(lambda: not children_of(out), 30.0)  # Ray ends its workers once their driver is gone
    assert len(read_rows(out)) == 1
    again = study(file, "--out", out, "--ray", "local")
    assert again.returncode == 0, again.stderr + again.stdout
    assert any(event["kind"] == "resume" for event in records(second, "events.jsonl"))
    assert figures(out) == figures(whole)


@needs_ray
def test_a_cluster_that_is_not_there_is_refused() -> None:
    with (
        pytest.raises(ConfigError) as refusal,
        ray_places(study_of(), {"a": PROBE}, 1, None, "not an address"),
    ):
        pass
    assert "ray start" in (refusal.value.do or "")


def test_timed_runs_are_refused() -> None:
    timed = study_of(head='figure = "tokens_per_second"')
    with pytest.raises(ConfigError, match="timed"), ray_places(timed, {"a": PROBE}, 1, None, "local"):
        pass


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError) as refusal:
        on_ray._ray()
    assert "scrimp[ray]" in (refusal.value.do or "")
