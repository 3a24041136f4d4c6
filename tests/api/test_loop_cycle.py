"""The cycle in a plain loop: on one process, on two ranks, and from the state that an earlier version kept."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from distributed import spawn
from small_nets import adamw, batch, loss, net
from torch import nn

from scrimp.api.loop_cycle import LoopCycle
from scrimp.cycle import CycleSettings, precision_cycle
from scrimp.planner.precision import Budget, PrecisionPlan
from scrimp.world import World

OF_BEFORE = Path(__file__).parent / "cycle_of_before.json"
SETTINGS = CycleSettings(
    budget=Budget(0.5), formats=("fp8", "nvfp4"), first=2, every=3, delay=2, batches=2, start="fp8"
)
STEPS, STOP = 9, 6
"""Plans are measured after 2, 5 and 8, and begin after 4 and 7."""


def losses(model: nn.Module, tokens: Any) -> Any:
    yield loss(model, tokens)


class Loop:
    """A plain loop with the cycle in it."""

    def __init__(self, model: nn.Module, saved: dict[str, Any] | None = None) -> None:
        self.model, self.optimizer = model, adamw(model)
        self.cycle = LoopCycle(SETTINGS)
        self.cycle.begin(model, self.optimizer, losses, steps=STEPS, saved=saved)

    def train(self, steps: range) -> list[float]:
        found = []
        for step in steps:
            value = loss(self.model, self.batch(step))
            value.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(value.item())
            self.cycle.after_update(step, (self.batch(each) for each in (step - 1, step)))
        return found

    def batch(self, step: int) -> Any:
        """Losses of this rank's own rows."""
        return batch(10 * step + World.current().rank)

    def formats(self) -> dict[str, str]:
        assert self.cycle.planned is not None
        return {name: str(layer.precision) for name, layer in self.cycle.planned.layers.items()}


def plans(cycle: LoopCycle) -> list[dict[str, Any]]:
    """The record, without how long things took."""
    return [{k: v for k, v in one.items() if not k.endswith("_seconds")} for one in cycle.history]


def run(rank: int) -> dict[str, Any]:
    """A loop under DistributedDataParallel, which keeps its state on the way."""
    solved, ask = [], precision_cycle.ask

    def noted(*args: Any) -> Any:
        solved.append(rank)
        return ask(*args)

    precision_cycle.ask = noted
    loop = Loop(nn.parallel.DistributedDataParallel(net()))
    found = loop.train(range(1, STOP + 1))
    saved = loop.cycle.to_state() if rank == 0 else {}  # as loops do that save on one rank alone
    found += loop.train(range(STOP + 1, STEPS + 1))
    weights = hashlib.sha256()
    for parameter in loop.model.parameters():
        weights.update(parameter.detach().numpy().tobytes())
    return {
        "losses": found,
        "solved": len(solved),
        "saved": saved,
        "formats": loop.formats(),
        "plans": plans(loop.cycle),
        "weights": weights.hexdigest(),
    }


@pytest.mark.slow
def test_the_first_of_two_ranks_solves_and_both_run_by_its_plans(tmp_path: Path) -> None:
    first, second = spawn(2, run, tmp_path)
    assert (first["solved"], second["solved"]) == (2, 0)
    assert [one["step"] for one in first["plans"]] == [4, 7]
    assert first["losses"] != second["losses"]
    for name in ("formats", "plans", "weights"):
        assert first[name] == second[name]
    assert len(set(first["formats"].values())) > 1
    waiting = first["saved"]["waiting"]
    assert waiting["at"] == 7
    assert waiting["plan"] is not None


def test_a_loop_that_is_resumed_goes_on_the_same() -> None:
    loop = Loop(net())
    loop.train(range(1, STOP + 1))
    saved = json.loads(json.dumps(loop.cycle.to_state()))
    weights = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    moments = copy.deepcopy(loop.optimizer.state_dict())
    rest = loop.train(range(STOP + 1, STEPS + 1))
    model = net()
    model.load_state_dict(weights)
    again = Loop(model, saved)
    again.optimizer.load_state_dict(moments)
    assert again.train(range(STOP + 1, STEPS + 1)) == rest
    assert plans(again.cycle) == plans(loop.cycle)
    assert again.formats() == loop.formats()


def test_the_state_of_an_earlier_version_resumes() -> None:
    """It had two cycles, a plan after 4 and one that waits for 7; the file was written before there was one cycle."""
    saved = json.loads(OF_BEFORE.read_text())
    now, waiting = (PrecisionPlan.from_json(saved[name]) for name in ("plan", "waiting"))
    loop = Loop(net(blocks=1), saved)
    assert loop.cycle.plan == now
    assert loop.cycle.planned is not None
    assert {name: layer.precision for name, layer in loop.cycle.planned.layers.items()} == now.precisions
    assert list(loop.cycle.planned.clock.now) == saved["clock"]
    loop.train(range(STOP + 1, STEPS + 1))
    assert loop.cycle.plan is not None
    assert (loop.cycle.plan.step, loop.cycle.plan.precisions) == (7, waiting.precisions)
    assert [one["step"] for one in loop.cycle.history] == [4, 7]
    assert loop.cycle.history[-1]["measure_seconds"] == saved["measure_seconds"]
