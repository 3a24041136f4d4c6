"""Trouble for real: a model whose planned GEMMs are broken in the middle of a run is promoted, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_run import flags, losses, records, write_corpus
from torch import Tensor

from scrimp.cli import main
from scrimp.gemm import Clock
from scrimp.gemm.backends import ReferenceBackend
from scrimp.planner import Plan
from scrimp.precision import RECIPES

WORDS = [
    "--precision=snip",
    "--train.steps=12",
    "--snip.first=1",
    "--snip.every=0",
    "--snip.delay=1",
    "--snip.probe-every=5",
]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))


BREAKS_AT = 4
"""After the first plan was proven in its first step: what is broken from there on stops no run as a lie."""


def broken(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Tensor], Tensor]) -> None:
    """From a later step on four-bit gradients are wrong."""
    prepare, begin, now = ReferenceBackend.prepare, Clock.begin, [0]

    def noted(self: Clock, step: int, first_row: int = 0) -> None:
        now[0] = step
        begin(self, step, first_row)

    def damaged(self: ReferenceBackend, x: Tensor, use: object) -> object:
        operand = getattr(use, "operand", None)
        is_gradient = operand is not None and operand.element == "e2m1" and operand.rounding == "stochastic"
        if is_gradient and now[0] >= BREAKS_AT:
            x = damage(x)
        return prepare(self, x, use)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceBackend, "prepare", damaged)
    monkeypatch.setattr("scrimp.gemm.backends.numba.has_numba", lambda: False)
    monkeypatch.setattr(Clock, "begin", noted)


def run(tmp_path: Path, *more: str) -> Path:
    corpus = write_corpus(tmp_path)
    assert main(flags(corpus, tmp_path / "run", *WORDS, *more)) == 0
    return tmp_path / "run"


def events(run_dir: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in records(run_dir, "events.jsonl") if event["kind"] == kind]


@pytest.mark.slow
def test_a_probe_finds_noise_that_drowns_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(
        monkeypatch,
        lambda x: x + 30 * x.std() * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
    )
    run_dir = run(tmp_path)
    found = events(run_dir, "promotion")
    assert found
    assert "quantization noise" in str(found[0]["reason"])
    assert found[0]["changed"]
    assert len(losses(run_dir)) == 12


@pytest.mark.slow
def test_steps_that_are_not_finite_promote_at_once_until_nothing_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, lambda x: x * torch.nan)
    run_dir = run(tmp_path)
    assert [event["alarm"] for event in events(run_dir, "promotion")][:2] == [1, 2]
    gemms = Plan.read(run_dir / "plan.json").gemms
    gradients = {
        name for layer, choice in gemms.items() for name in (choice.dgrad, choice.wgrad) if layer != "head"
    }
    assert min(RECIPES[name].bits for name in gradients) >= 8
    assert len(events(run_dir, "skipped")) < 12
