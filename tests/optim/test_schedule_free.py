"""Schedule-free AdamW: its three points in float64, what is evaluated, its rule, and its bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from allocator import allocator_peak
from distributed import spawn
from parity import Case, check_parity, made
from states import states_of
from torch import Tensor, nn

from scrimp.config import OptimizerConfig
from scrimp.optim import schedule_free
from scrimp.optim.schedule_free import ScheduleFree, memory
from scrimp.parts import TensorPart
from scrimp.world import World

SETTINGS = OptimizerConfig(name="schedule-free", master_weights=False, weight_decay=0.1, beta1=0.8, beta2=0.9)
RATES = [0.01 * min(1.0, (step + 1) / 4) for step in range(10)]
"""A warm-up of four steps."""


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    shapes = {"matrix": (6, 5), "bias": (5,)}
    return {
        name: nn.Parameter(normal(number, *shape).to(dtype))
        for number, (name, shape) in enumerate(shapes.items())
    }


def pull(name: str, at: Tensor, step: int) -> Tensor:
    """The gradient of a bowl whose lowest point moves: it is another one at each of the three points."""
    return at - normal(100 * step + len(name), *at.shape).to(at.dtype)


def stepped(named: dict[str, nn.Parameter], optimizer: ScheduleFree, step: int) -> None:
    for name, one in named.items():
        (one * pull(name, one.detach(), step)).sum().backward()
    optimizer.step(RATES[step])
    optimizer.zero_grad()


@dataclass
class Point:
    """Algorithm 1 of the paper, of one parameter in float64, with v corrected by its start."""

    z: Tensor
    x: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.x, self.v = self.z.clone(), torch.zeros_like(self.z)

    @property
    def y(self) -> Tensor:
        return 0.2 * self.z + 0.8 * self.x

    def step(self, name: str, number: int) -> None:
        y = self.y
        g = pull(name, y, number)
        self.v = 0.9 * self.v + 0.1 * g * g
        root = (self.v / (1 - 0.9 ** (number + 1))).sqrt() + 1e-8
        decay = 0.1 if y.ndim > 1 else 0.0
        self.z = self.z - RATES[number] * (g / root + decay * y)
        share = RATES[number] ** 2 / sum(rate**2 for rate in RATES[: number + 1])
        self.x = (1 - share) * self.x + share * self.z


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_every_step_is_the_papers_in_float64_at_all_three_points() -> None:
    named = parameters()
    optimizer = ScheduleFree(named, SETTINGS)
    points = {name: Point(one.detach().double()) for name, one in named.items()}
    for step in range(len(RATES)):
        stepped(named, optimizer, step)
        states = states_of(optimizer)
        for name, point in points.items():
            point.step(name, step)
            close(named[name], point.y)
            close(states[f"{name}.z"], point.z)
        with optimizer.evaluating():
            for name, point in points.items():
                close(named[name], point.x)
    assert (points["matrix"].x - points["matrix"].y).abs().max() > 1e-3, "the points are apart"
    assert float(states_of(optimizer)["lr_squares"]) == pytest.approx(sum(rate**2 for rate in RATES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_trained_is_back_bit_for_bit_whatever_happens_while_it_is_evaluated(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = parameters(dtype)
    optimizer = ScheduleFree(named, dataclasses.replace(SETTINGS, master_weights=dtype == torch.bfloat16))
    for step in range(4):
        stepped(named, optimizer, step)
    before = {name: one.detach().clone() for name, one in (*named.items(), *states_of(optimizer).items())}
    with contextlib.suppress(RuntimeError), optimizer.evaluating():
        assert not torch.equal(named["matrix"], before["matrix"])
        raise RuntimeError("out of memory")
    after = {**named, **states_of(optimizer)}
    assert all(torch.equal(after[name], one) for name, one in before.items())
    average, calls = schedule_free.evaluated, iter(range(9))

    def second_fails(*given: object) -> torch.Tensor:
        if next(calls):
            raise RuntimeError("out of memory")
        return average(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(schedule_free, "evaluated", second_fails)
    with pytest.raises(RuntimeError), optimizer.evaluating():
        pass
    assert next(calls) == 2
    assert all(torch.equal(after[name], one) for name, one in before.items())


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_the_rules_direction_is_what_z_moves_along(steps: int) -> None:
    named = parameters()
    optimizer = ScheduleFree(named, dataclasses.replace(SETTINGS, weight_decay=0.0))
    for step in range(steps):
        stepped(named, optimizer, step)
    before = {name: states_of(optimizer)[f"{name}.z"].clone() for name in named}
    found = {
        name: optimizer.rule(name).direction(pull(name, one.detach(), steps)) for name, one in named.items()
    }
    stepped(named, optimizer, steps)
    for name in named:
        moved = (before[name] - states_of(optimizer)[f"{name}.z"]) / RATES[steps]
        torch.testing.assert_close(moved, found[name], rtol=1e-3, atol=1e-4)


def test_masters_are_trained_and_what_is_evaluated_is_of_them_rounded() -> None:
    named = parameters(torch.bfloat16)
    optimizer = ScheduleFree(named, dataclasses.replace(SETTINGS, master_weights=True))
    for step in range(3):
        stepped(named, optimizer, step)
    states = states_of(optimizer)
    for name, one in named.items():
        y, z = states[f"{name}.master"], states[f"{name}.z"]
        assert y.dtype == z.dtype == torch.float32
        assert torch.equal(one.detach(), y.bfloat16())
        with optimizer.evaluating():
            x = (y.double() - 0.2 * z.double()) / 0.8
            torch.testing.assert_close(one.detach().double(), x, rtol=2**-8, atol=1e-6)


def test_the_account_foretells_states_and_the_peak_of_the_update() -> None:
    named = {"large": nn.Parameter(normal(0, 300, 200)), "small": nn.Parameter(normal(1, 200, 200))}
    optimizer = ScheduleFree(named, SETTINGS)
    costs = memory(None, SETTINGS, "fp32")  # type: ignore[arg-type]
    states = states_of(optimizer)
    assert costs.state_bytes(named) == sum(state.nbytes for state in states.values() if state.ndim)
    for name, one in named.items():
        one.grad = pull(name, one.detach(), 1)
    peak = costs.update_peak(named, "cpu", None)  # type: ignore[arg-type]
    assert peak == pytest.approx(allocator_peak(lambda: optimizer.step(0.01)), rel=1e-3)


FREE = {"optimizer.name": "schedule-free", "optimizer.lr": 1e-3, "model.num_layers": 2}
TWO = {
    "shards": Case(settings=FREE, with_documents=True),
    "pieces of layers": Case({"tp": 2}, FREE),
    "stages": Case({"pp": 2}, FREE),
    "experts": Case({"ep": 2}, FREE, "mixtral-8m", routers=10.0),
    "rows that do not divide": Case(settings={**FREE, "model.ffn_width": 121}),
}


@pytest.mark.slow
def test_ranks_train_as_one_process(tmp_path: Path) -> None:
    check_parity(2, TWO, tmp_path)


def by_given_gradients(world: World, ranks: int) -> dict[str, TensorPart]:
    """Weights as they are evaluated and states, of two steps by the same whole gradients on every rank."""
    _, executable, optimizer, lr = made(TWO["rows that do not divide"], world, ranks)
    for number in range(2):
        for name, part in executable.parameters():
            parameter = executable.model.get_parameter(name)
            parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            rows = slice(part.offsets[0], part.offsets[0] + part.local.shape[0])
            grad.copy_(normal(number + len(name), *part.shape)[rows])
        optimizer.step(lr * (number + 1))
        optimizer.zero_grad()
    found = dict(optimizer.parts())
    with optimizer.evaluating():
        for name, part in executable.parameters():
            found[name] = dataclasses.replace(part, local=part.local.detach().clone())
    return found


def on_a_rank(rank: int) -> dict[str, TensorPart]:
    return by_given_gradients(World(rank, 2), 2)


@pytest.mark.slow
def test_the_same_gradients_give_the_bits_of_one_process(tmp_path: Path) -> None:
    expected = by_given_gradients(World(), 1)
    ranks = spawn(2, on_a_rank, tmp_path)
    for name, whole in expected.items():
        found, written = torch.full_like(whole.local, math.nan), 0
        for rank in ranks:
            part = rank[name]
            for box in part.boxes() if part.is_writer else ():
                found[box.place] = box.local
                written += box.local.numel()
        assert torch.equal(found, whole.local), name
        assert written == whole.whole_numel, name
