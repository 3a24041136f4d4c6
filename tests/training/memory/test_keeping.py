"""Where everything fits, everything is kept, whatever the noise of the timings; unless something is clearly faster."""

from __future__ import annotations

import dataclasses

import pytest

from scrimp.config import Config, MemoryConfig, ModelConfig, TrainConfig
from scrimp.config.activations import LEVELS
from scrimp.planner.memory.costs import LevelSeconds
from scrimp.planner.memory.search import find
from scrimp.training.memory import block_seconds as times
from scrimp.training.memory.decide import CLEARLY, Problem
from scrimp.training.setup import Decisions, decide

# States are the user's, so that blocks are timed though everything fits.
GIVEN = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=5),
    train=TrainConfig(steps=4, sequence=64, batch_tokens=512, micro_batch=2),
    memory=MemoryConfig(optimizer="device"),
)
KEPT = ("keep",) * 5


def measured(again: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> Decisions:
    """The decision where timing blocks gave so many milliseconds to make again, of 30 that keeping takes."""
    seconds = {level: LevelSeconds(0.01, 0.02, 1e-3 * again.get(level, 10.0)) for level in LEVELS}
    monkeypatch.setattr(times, "_blocks_once", lambda *_: (seconds,))
    monkeypatch.setattr(times, "_ends_once", lambda *_: 0.02)
    monkeypatch.setattr(times, "LIMIT_S", 1e9)
    return decide(GIVEN)


@pytest.mark.parametrize("again", [0.0, -0.3, 0.3])
@pytest.mark.slow
def test_noise_chooses_no_recomputation(again: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured({"keep": 0.0, "swiglu": again, "norms": again}, monkeypatch)
    assert found.memory.costs.seconds_origin == "measured"
    assert found.memory.placement.activations == KEPT


@pytest.mark.slow
def test_levels_that_tie_do_not_let_every_block_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = measured({"keep": 0.0, "swiglu": 0.0}, monkeypatch).memory
    least = memory.account.peak - 1
    tight = dataclasses.replace(memory.machine, device_bytes=least)
    found = find(memory.costs, tight, memory.setup)
    assert found is not None
    assert found.account.peak <= least
    assert sum(name != "keep" for name in found.placement.activations) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("faster", "is_kept"), [(0.5 * CLEARLY, True), (3 * CLEARLY, False)])
def test_what_is_clearly_faster_still_wins(
    faster: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = measured({"keep": 0.0}, monkeypatch).memory
    [kind] = memory.costs.classes
    keep = kind.choices["keep"]
    step = memory.timeline.seconds / memory.setup.micro_batches / len(KEPT)
    quick = dataclasses.replace(
        kind.choices["swiglu"],
        forward_seconds=keep.forward_seconds,
        backward_seconds=keep.backward_seconds - faster * step,
    )
    classes = (dataclasses.replace(kind, choices={**kind.choices, "swiglu": quick}),)
    costs = dataclasses.replace(memory.costs, classes=classes)
    found = Problem(costs, memory.machine, memory.setup, split=None).fastest()
    assert found is not None
    assert (found.placement.activations == KEPT) is is_kept
