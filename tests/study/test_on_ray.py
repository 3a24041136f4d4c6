"""Runs of a study on Ray: a cluster of this machine alone, started by the study."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import PROBE, study_of
from test_study_runs import figures, study, write_study
from tiny_run import write_corpus

from scrimp.errors import ConfigError
from scrimp.study import on_ray
from scrimp.study.on_ray import ray_places

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
