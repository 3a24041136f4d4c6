"""Copies that train alone and move together, against a plain loop over all copies in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from torch import Tensor, nn

from scrimp.config import OptimizerConfig, OuterConfig
from scrimp.models import EMBEDDING_WEIGHT
from scrimp.optim import AdamW, OuterOptimizer
from scrimp.optim.outer import GROUP
from scrimp.profiler.collectives import counting_collectives

LR, STEPS = 0.01, 13
SHAPES = {"matrix": (37, 11), "vector": (5,), EMBEDDING_WEIGHT: (3, 4)}
INNER = OptimizerConfig(
    lr=LR, embedding_lr_ratio=2.0, master_weights=False, moments="fp32", weight_decay=0.0, beta2=0.95
)
RATES = {name: LR * (2.0 if name == EMBEDDING_WEIGHT else 1.0) for name in SHAPES}
MASTERS = replace(INNER, master_weights=True)
CASES = {
    "mean of the copies": OuterConfig(every=4, lr=1.0, momentum=0.0),
    "diloco": OuterConfig(every=4),
    "every step": OuterConfig(every=1),
    "stale": OuterConfig(every=3, overlap=True, lr=1.0, momentum=0.5),
    "clipped": OuterConfig(every=3, overlap=True, lr=1.0, momentum=0.9, clip=0.1),
}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradient(name: str, copy: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * copy + len(name))
    return torch.randn(SHAPES[name], generator=generator) + 0.5


def trained(
    rank: int, cases: dict[str, tuple[OuterConfig, OptimizerConfig]], meets: tuple[int, ...] = ()
) -> dict[str, dict[str, Tensor]]:
    """Weights of this copy after the last step, and after it has met the others."""
    found, group = {}, dist.new_group()
    for name, (settings, inner) in cases.items():
        dtype = torch.bfloat16 if inner.master_weights else torch.float32
        parameters = {one: nn.Parameter(w.to(dtype)) for one, w in weights().items()}
        optimizer = AdamW(parameters, inner)
        outer = OuterOptimizer(optimizer, settings, group, LR)
        for step in range(STEPS):
            outer.before_step()
            for one, parameter in optimizer.targets().items():
                parameter.grad = gradient(one, rank, step)
            optimizer.step(LR)
            outer.after_step()
            if step in meets:
                outer.meet()
        outer.meet(states=True)
        outer.close()
        state = {f"state.{key}": part.local.clone() for key, part in optimizer.parts()}
        found[name] = {one: target.detach().clone() for one, target in optimizer.targets().items()} | state
        found[name] |= {f"parameter.{one}": p.detach().clone() for one, p in parameters.items()}
    return found


class Copies:
    """All copies one after another, in float64, with torch's AdamW."""

    def __init__(self, settings: OuterConfig, copies: int) -> None:
        self.settings = settings
        self.start = {name: w.double() for name, w in weights().items()}
        self.local = [
            {name: nn.Parameter(w.clone()) for name, w in self.start.items()} for _ in range(copies)
        ]
        self.inner = [
            torch.optim.AdamW(
                [{"params": [p], "lr": RATES[name]} for name, p in one.items()],
                betas=(0.9, 0.95),
                eps=INNER.eps,
                weight_decay=0.0,
            )
            for one in self.local
        ]
        self.momentum = {name: torch.zeros_like(w) for name, w in self.start.items()}
        self.waiting: dict[str, Tensor] = {}
        self.gaps: list[float] = []
        self.steps = 0

    def train(self, step: int) -> None:
        for copy, (one, optimizer) in enumerate(zip(self.local, self.inner, strict=True)):
            for name, parameter in one.items():
                parameter.grad = gradient(name, copy, step).double()
            optimizer.step()
        self.steps += 1
        if self.steps == self.settings.every:
            self.end_round()

    def end_round(self) -> None:
        own = self.displacement()
        if not self.settings.overlap:
            self.move(own)
        elif self.waiting:
            self.move_by_stale()
        self.waiting = own if self.settings.overlap else {}
        self.begin()

    def meet(self) -> None:
        own = self.displacement() if self.steps else {}
        if self.waiting:
            self.move_by_stale()
        if own:
            self.move(own)
        self.waiting = {}
        self.begin()

    def displacement(self) -> dict[str, Tensor]:
        copies = len(self.local)
        return {n: w - sum(one[n].detach() for one in self.local) / copies for n, w in self.start.items()}

    def move_by_stale(self) -> None:
        self.move(self.waiting, max(1.0, self.gaps[-1] / self.gaps[0]) if self.gaps else 1.0)

    def move(self, mean: dict[str, Tensor], penalty: float = 1.0) -> None:
        settings, moved = self.settings, 0.0
        for name, w in self.start.items():
            momentum = settings.momentum * self.momentum[name] + mean[name] / penalty
            if settings.overlap:
                bound = settings.clip * RATES[name] * settings.every
                momentum.clamp_(-bound, bound)
            self.momentum[name] = momentum
            by = settings.lr * (momentum if settings.overlap else mean[name] + settings.momentum * momentum)
            self.start[name] = w - by
            moved += float(by.abs().sum())
        self.gaps.append(moved)

    def begin(self) -> None:
        self.steps = 0
        for one in self.local:
            for name, parameter in one.items():
                parameter.data.copy_(self.start[name])


def expected(settings: OuterConfig, copies: int = 2, meets: tuple[int, ...] = ()) -> dict[str, Tensor]:
    found = Copies(settings, copies)
    for step in range(STEPS):
        found.train(step)
        if step in meets:
            found.meet()
    found.meet()
    return found.start


def test_copies_move_as_the_formulas_say(tmp_path: Path) -> None:
    cases = {name: (settings, INNER) for name, settings in CASES.items()}
    cases["masters"] = (CASES["diloco"], MASTERS)
    ranks = spawn(2, trained, tmp_path, cases, (6,))
    for name, settings in CASES.items():
        wanted = expected(settings, meets=(6,))
        for key, value in ranks[0][name].items():
            assert torch.equal(value, ranks[1][name][key]), f"{name}: copies differ in {key}"
        for key, value in wanted.items():
            assert (ranks[0][name][key].double() - value).abs().max() < 2e-6, f"{name}: {key}"
    found = ranks[0]["masters"]
    for key in SHAPES:
        assert found[key].dtype == torch.float32
        assert torch.equal(found[f"parameter.{key}"], found[key].bfloat16())


def test_one_copy_needs_nobody() -> None:
    parameters = {name: nn.Parameter(w) for name, w in weights().items()}
    optimizer = AdamW(parameters, INNER)
    outer = OuterOptimizer(optimizer, CASES["diloco"], None, LR)
    for step in range(STEPS):
        outer.before_step()
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, 0, step)
        optimizer.step(LR)
        outer.after_step()
    outer.meet(states=True)
    wanted = expected(CASES["diloco"], copies=1)
    for name, value in wanted.items():
        assert (parameters[name].double() - value).abs().max() < 2e-6


def exchanged(rank: int, exchange: str) -> tuple[Tensor, Tensor, float]:
    """A displacement, the mean that this rank found, and the bytes it sent."""
    size = 8 * GROUP
    parameters = {"w": nn.Parameter(torch.zeros(size))}
    settings = OuterConfig(every=1, lr=1.0, momentum=0.0, exchange=exchange)  # type: ignore[arg-type]
    optimizer = AdamW(parameters, INNER)
    outer = OuterOptimizer(optimizer, settings, dist.new_group(), LR)
    outer.before_step()
    own = torch.randn(size, generator=torch.Generator().manual_seed(rank)) * torch.logspace(-6, 2, size)
    with torch.no_grad():
        parameters["w"].copy_(own)
    with counting_collectives() as collectives:
        outer.after_step()
    outer.close()
    return own, parameters["w"].detach().clone(), collectives.sent()


def test_an_exchange_in_bytes_is_near_and_a_quarter(tmp_path: Path) -> None:
    found: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    for exchange in ("fp32", "fp8"):
        (tmp_path / exchange).mkdir()
        found[exchange] = spawn(2, exchanged, tmp_path / exchange, exchange)
    mean = (found["fp32"][0][0] + found["fp32"][1][0]) / 2
    assert torch.allclose(found["fp32"][0][1], mean, rtol=1e-6, atol=0)
    exact, coded = found["fp32"][0], found["fp8"][0]
    assert torch.equal(coded[1], found["fp8"][1][1])
    # Each number is rounded twice, by at most 1/16 of itself, or by half of the least step of its group.
    largest = torch.stack([one[0].abs() for one in found["fp8"]]).amax(0).view(-1, GROUP).amax(1)
    error = (coded[1] - mean).abs().view(-1, GROUP)
    assert (error <= 2 * largest[:, None] / 16).all()
    assert float((error / largest[:, None]).max()) > 0
    assert math.isclose(coded[2], exact[2] * (1 + 4 / GROUP) / 4)


@pytest.mark.parametrize("exchange", ["fp32", "fp8"])
def test_no_displacement_stays_none(exchange: str) -> None:
    parameters = {"w": nn.Parameter(torch.ones(3))}
    optimizer = AdamW(parameters, INNER)
    settings = OuterConfig(every=2, exchange=exchange)  # type: ignore[arg-type]
    outer = OuterOptimizer(optimizer, settings, None, LR)
    for _ in range(2):
        outer.before_step()
        outer.after_step()
    assert torch.equal(parameters["w"], torch.ones(3))
