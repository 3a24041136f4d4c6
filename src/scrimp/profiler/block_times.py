"""Seconds of a block's passes and of the model's ends, measured on the device before the plan is made.

Problem  A plan weighs making again against moving. What is predicted (`scrimp.planner.layout.block_times`) knows
         a device by a few rates: on a machine that was not looked at before it can be wrong by half.
Method   One real block of each class of formats, then the model without its blocks (embedding, final norm, head, loss),
         with random weights in the micro-batch's shapes and gradients that exist already. Forward and backward of
         every level in turn, in rounds, so that a machine that is slower for a while is so for all of them; `CHAIN`
         blocks one behind the other on a GPU, so that its queue is as full as in training. Then::

             forward         = median of all forward passes: every level does the same there
             backward(level) = the rising sequence nearest (least squares) to the medians of the levels
             again(level)    = backward(level) - backward(keep)

         since a level makes again what the one before does, and more: noise must not say otherwise.
         Blocks run as they train: compiled where the run compiles them (the first pass of each level, which
         compiles it, does not count); by the kernels of `train.deterministic`, which the caller sees to.
Limits   Rows hold one document each. What needs more memory than there is is not measured. Compiling is not part of
         the time that the caller foresees: it takes seconds a level, once, and the compiler's cache serves the run.
Checked  tests/profiler/test_block_times.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from scrimp.config import Architecture
from scrimp.config.activations import Activations
from scrimp.data import Batch
from scrimp.gemm import BackendChooser, PlannedLayer, swap_in
from scrimp.gemm.problem import DTYPES
from scrimp.models.blocks import Block, defer_gates
from scrimp.models.compiled import MOST_GRAPHS, compile_blocks, forget_compiled, is_compiler_error
from scrimp.models.model import Model, ModelPart, build_model
from scrimp.objectives import Objective
from scrimp.objectives.next_token import NEXT_TOKEN
from scrimp.planner.memory.costs import LevelSeconds
from scrimp.precision import LinearPrecision
from scrimp.profiler.memory_trace.block_passes import gradients_of
from scrimp.profiler.memory_trace.optimizer_memory import GradientSums
from scrimp.timing import now, seconds_of

Result = TypeVar("Result")
CHAIN = {"cpu": 1, "cuda": 3}
"""Blocks that run one behind the other."""
ROUNDS = 5
_STANDARD_DEVIATION = 0.02


@dataclass(frozen=True)
class Timed:
    """What is measured: one micro-batch of a model in the formats of a plan."""

    architecture: Architecture
    blocks: Sequence[int]
    """The first block of every class of blocks."""
    classes: Sequence[Sequence[LinearPrecision]]
    """Formats of a block's layers, in their order, of every class of blocks."""
    head: LinearPrecision
    compute: str
    """Working format, fp32 or bf16."""
    parameters: str
    master_weights: bool
    micro_batch: int
    sequence: int
    loss_chunk: int
    objective: Objective = NEXT_TOKEN
    compiled: bool = False
    """Whether training compiles its blocks."""


def measure_blocks(
    timed: Timed,
    levels: Sequence[str],
    device: torch.device,
    choose: BackendChooser,
    *,
    rounds: int = ROUNDS,
) -> tuple[Mapping[str, LevelSeconds], ...] | None:
    """Level to seconds, of every class of blocks; None where memory does not suffice, or the compiler does not work.
    Vocabulary and head are not used.

    Args:
        levels: in their order, "keep" first (`scrimp.config.activations`).
        choose: what runs each GEMM.
        rounds: passes of each level that count, after one that does not.
    """
    small = dataclasses.replace(timed.architecture, vocab_size=1)

    def measured() -> tuple[Mapping[str, LevelSeconds], ...]:
        bench = _Bench(dataclasses.replace(timed, architecture=small), device, choose, rounds)
        if timed.compiled:
            compile_blocks(bench.model, graphs=2 * len(levels) * len(timed.classes) + MOST_GRAPHS)
        return tuple(bench.block(block, levels) for block in bench.model.each_block())

    try:
        return _within_memory(device, measured)
    finally:
        if timed.compiled:
            forget_compiled()


def measure_ends(
    timed: Timed, device: torch.device, choose: BackendChooser, *, rounds: int = ROUNDS
) -> float | None:
    """Seconds of forward and backward of all that is no block; None where memory does not suffice."""
    return _within_memory(
        device,
        lambda: _Bench(dataclasses.replace(timed, blocks=(), classes=()), device, choose, rounds).ends(),
    )


def _within_memory(device: torch.device, measured: Callable[[], Result]) -> Result | None:
    """What was measured; None where it cannot be. Nothing of it stays, nor is cached."""
    try:
        found = measured()
    except RuntimeError as error:
        is_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not is_memory and not is_compiler_error(error):
            raise
        error.__traceback__ = None  # its frames hold what was measured
        found = None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


class _Bench:
    def __init__(self, timed: Timed, device: torch.device, choose: BackendChooser, rounds: int) -> None:
        self.timed, self.device, self.rounds = timed, device, rounds
        self.dtype = DTYPES[timed.parameters]
        self.generator = torch.Generator(device).manual_seed(0)
        self.model = self._build(choose)
        tokens = torch.zeros(timed.micro_batch, timed.sequence, dtype=torch.int64, device=device)
        self.tokens = tokens.random_(timed.architecture.vocab_size, generator=self.generator)

    def _build(self, choose: BackendChooser) -> Model:
        timed, plain = self.timed, LinearPrecision.of(self.timed.compute)
        model = build_model(
            timed.architecture, device=self.device, dtype=self.dtype, part=ModelPart(timed.blocks)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, _STANDARD_DEVIATION, generator=self.generator)
        # Training plans all layers, or none.
        if any(one != plain for formats in timed.classes for one in formats):
            for number, block, formats in zip(timed.blocks, model.blocks, timed.classes, strict=True):
                names = [linear.name for linear in model.spec.blocks[number].linears]
                swap_in(block, dict(zip(names, formats, strict=True)), choose=choose)
            defer_gates(model, self.device)
        if timed.head != plain:
            model.planned_head = PlannedLayer("head", timed.head, choose=choose)
        return model

    @property
    def _sums(self) -> GradientSums:
        return GradientSums(torch.float32 if self.timed.master_weights else None)

    def block(self, block: Block, levels: Sequence[str]) -> Mapping[str, LevelSeconds]:
        """Level to seconds of one block."""
        forward: list[float] = []
        backward: dict[str, list[float]] = {level: [] for level in levels}
        with gradients_of(block, self._sums, exist=True), self._autocast():
            layouts = self.model.layouts(
                self.tokens, None, dtype=DTYPES[self.timed.compute], compiled=self.timed.compiled
            )
            for number in range(self.rounds + 1):
                for level in levels:
                    block.activations = Activations.parse(level)
                    seconds = self._passes(partial(block, layout=layouts[block.attends]))
                    if number:  # the first warms up
                        forward.append(seconds[0])
                        backward[level].append(seconds[1])
        return _in_order(statistics.median(forward), {k: statistics.median(v) for k, v in backward.items()})

    def _passes(self, block: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """Seconds of forward and backward of one block, by those of a chain."""
        size = (self.timed.micro_batch, self.timed.sequence, self.timed.architecture.width)
        leaf = torch.randn(size, dtype=self.dtype, device=self.device, generator=self.generator)
        gradient, chain = torch.ones_like(leaf), CHAIN[self.device.type]
        x = leaf.requires_grad_()
        began = now(self.device)
        for _ in range(chain):
            x = block(x)
        turned = now(self.device)
        torch.autograd.backward(x, gradient)
        return (turned - began) / chain, (now(self.device) - turned) / chain

    def ends(self) -> float:
        """Seconds of the model, which has no blocks."""
        batch = Batch.of(self.tokens, self.tokens)

        def once() -> None:
            with self._autocast():
                sums = self.timed.objective.loss(self.model, batch, chunk=self.timed.loss_chunk)
            torch.autograd.backward(sums.total / self.tokens.numel())

        # Of a frozen embedding too: what blocks give the head needs a gradient.
        self.model.embedding.register_forward_hook(lambda module, given, x: x.requires_grad_())
        with gradients_of(self.model, self._sums, exist=True):
            seconds = [seconds_of(once, self.device) for _ in range(self.rounds + 1)]
        return statistics.median(seconds[1:])  # the first warms up

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.timed.compute == self.timed.parameters:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.timed.compute])


def _in_order(forward: float, backward: Mapping[str, float]) -> dict[str, LevelSeconds]:
    """By level, with what is made again never less than at the level before."""
    rising = nearest_rising(list(backward.values()))
    return {
        level: LevelSeconds(forward, rising[0], seconds - rising[0])
        for level, seconds in zip(backward, rising, strict=True)
    }


def nearest_rising(values: Sequence[float]) -> list[float]:
    """The never falling sequence with the least squared distance: neighbours that fall become their mean."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [statistics.fmean(pool) for pool in pools for _ in pool]
