"""States on the host, visiting or updated there: predicted bytes of both sides against what was really taken."""

from __future__ import annotations

import dataclasses

import pytest
from allocator import allocator_peak
from late_link import LateLink
from losses import next_token_loss
from real_steps import CPU, RealStep, Setting
from test_peaks import FORMATS, LLAMA, in_products

from scrimp.config import OptimizerConfig
from scrimp.optim import StreamedAdamW
from scrimp.optim.streaming import Homes
from scrimp.planner.memory.account import account_step
from scrimp.planner.memory.placement import Placement, States
from scrimp.profiler.memory_trace import TracedStep
from scrimp.runtime.memory import BlockMemory, HostArena, HostWeights
from scrimp.runtime.memory.arena import ALIGNMENT

DEEP = dataclasses.replace(LLAMA, num_layers=6)
PLACES = {
    "visiting": States.split(6, optimizer=6),
    "all visiting": States.split(6, optimizer=6, weights=6, gradients=6),
    "gradients": States.split(6, gradients=6),
    "on the cpu": States.split(6, optimizer=6, update="cpu"),
    "some on the cpu": States.split(6, weights=3, gradients=5, optimizer=2, update="cpu"),
}


class HostedStep(RealStep):
    """A step whose states live where a placement says."""

    def place(self, states: States) -> None:
        """Move them there."""
        self.arena, link = HostArena(2**26, CPU), LateLink(CPU)
        numbers = range(len(states.weights))
        weights = HostWeights(
            {i: list(self.model.blocks[i].parameters()) for i in numbers if states.weights[i]},
            self.arena,
            link,
        )
        homes = Homes(
            self.arena,
            link,
            lambda name: int(name.split(".")[1]) if name.startswith("blocks.") else None,
            weights,
            frozenset(i for i in numbers if states.gradients[i]),
            frozenset(i for i in numbers if states.optimizer[i] and not states.on_cpu(i)),
            frozenset(i for i in numbers if states.on_cpu(i)),
        )
        for parameter in self.model.parameters():
            parameter._post_accumulate_grad_hooks = None  # of the resident optimizer
        train = OptimizerConfig(master_weights=self.setting.master_weights)
        self.optimizer = StreamedAdamW(dict(self.model.named_parameters()), train, homes)
        self.memory = BlockMemory(len(numbers), weights=weights, gradients=self.optimizer.host_gradients)
        self.model.run_block = self.memory

    def __call__(self) -> None:
        """As `scrimp.training.loop` does it."""
        for tokens in self.tokens:
            with self.autocast():
                sums = next_token_loss(self.model, tokens, tokens, None, chunk=self.setting.loss_chunk)
            (sums.total / tokens.numel()).backward()
            del sums  # as the loop does: the graph holds masks and tables
            self.memory.end_backward()
        self.optimizer.clip(self.optimizer.gradient_norm(), 1.0)
        self.optimizer.step(1e-3)
        self.optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("format_", ["fp32", "masters", "autocast"])
@pytest.mark.parametrize("name", PLACES)
def test_predicted_bytes_of_device_and_host_are_those_that_are_taken(
    name: str, format_: str, micro_batches: int
) -> None:
    states = PLACES[name]
    setting = Setting(DEEP, micro_batches=micro_batches, **FORMATS[format_])
    costs = TracedStep(setting.architecture, activations=("keep",), **setting.arguments).costs()
    step = HostedStep(setting)
    step.place(states)
    account = account_step(costs, Placement(("keep",) * 6, states), accumulates=micro_batches > 1)
    real = allocator_peak(step)
    step.optimizer.close()
    num_places = 6 * 9 * len(list(step.model.blocks[0].parameters()))
    assert account.host_peak <= step.arena.peak <= account.host_peak + num_places * ALIGNMENT
    parts = [costs.classes[number] for number in costs.blocks]
    there = costs.ends.weights + costs.ends.optimizer + 2 * 8 * setting.rows * setting.sequence
    there += sum(part.weights for part, host in zip(parts, states.weights, strict=True) if not host)
    there += sum(part.optimizer for part, host in zip(parts, states.optimizer, strict=True) if not host)
    assert real <= account.peak - there <= 1.01 * real + in_products(setting)
