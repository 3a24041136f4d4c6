"""What each block, the head and the optimizer step of a model cost in bytes, from a trace of the code that will run.

Problem  Formulas for saved and temporary tensors are wrong as soon as the code changes, and peaks lie inside
         operations that nobody listed.
Method   The real model (`scrimp.model.Decoder`, planned layers, the chunked loss) runs on fake tensors: shapes
         without memory, so the time does not depend on the size. Blocks of equal formats are one class; one
         block of each class runs alone, per choice of activations and with new and existing gradients (`passes`);
         embedding, norm and loss run without blocks. `scrimp.planner.bytes.states` adds the differences up.
         A choice "+offload" is derived: what autograd saves of a block waits on the host instead, its input
         included (`saved`).
Limits   Rows hold one document each: attention by documents or masks holds a little more. Planned layers are traced in
         the reference back end, an upper bound for fused ones. Kernels' own memory: `workspace`.
Checked  tests/profiler/memory_trace: within 2 % of torch's profiler in real steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from scrimp.config import Architecture
from scrimp.config.activations import Activations
from scrimp.formats import hadamard
from scrimp.gemm import PlannedLayer, swap_in
from scrimp.gemm.clock import Clock
from scrimp.model import Decoder
from scrimp.model.attention import AttentionLayout
from scrimp.planner.bytes.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.planner.flops import GEMM_NAMES
from scrimp.planner.memory import BYTES, MOMENT_BLOCK
from scrimp.precision import LinearPrecision
from scrimp.profiler.memory_trace.passes import (
    Autocast,
    BlockTrace,
    gradients_of,
    trace_block,
    trace_ends,
)
from scrimp.profiler.memory_trace.remembered import RememberedBackend
from scrimp.profiler.memory_trace.saved import saved_bytes
from scrimp.profiler.memory_trace.stand_ins import (
    GRANULES,
    WORKSPACES,
    DeviceFunctions,
    fuses_attention,
    standing_for,
)
from scrimp.profiler.memory_trace.tracker import StorageTracker

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
UPDATE_PIECE = {"cpu": 2**17, "cuda": 2**20}
"""Elements that an update which is no fused one works on at once."""
UPDATE_BYTES = 30
"""Of each: seven fp32 arrays and noise."""


def trace_costs(
    architecture: Architecture,
    *,
    precision: str,
    parameters: str,
    master_weights: bool,
    moments: str = "auto",
    micro_batch: int,
    sequence: int,
    loss_chunk: int,
    linears: Mapping[str, LinearPrecision] | None = None,
    activations: Sequence[str] = ("keep",),
    device_functions: DeviceFunctions = "cpu",
) -> StepCosts:
    """Bytes of a step of one device that holds the whole model; seconds are left 0.

    Args:
        precision: compute format: of the activations, and of GEMMs that `linears` does not name (fp32, bf16).
        parameters: format of the trained parameters.
        master_weights: fp32 copies and gradient sums beside bf16 parameters.
        moments: format of AdamW's averages (fp32, bf16, 8bit); auto: that of the weights they move.
        micro_batch: sequences per forward pass.
        sequence: tokens per sequence.
        loss_chunk: tokens whose logits exist at once; 0 for all.
        linears: layer name (``blocks.0.mlp.down``, ``head``) to choice; None: all in `precision`.
        activations: the choices that each block may have (`scrimp.config.activations`).
        device_functions: which device's way through the model is traced (cpu, cuda).

    Raises:
        PlanError: an unknown choice.
        ModelError: a sequence beyond the model's context.
    """
    choices = [Activations.parse(text) for text in activations]
    step = _Step(
        architecture,
        precision,
        parameters,
        master_weights,
        (micro_batch, sequence),
        device_functions,
        moments,
    )
    plans, head = _formats(linears or {}, LinearPrecision.of(precision), architecture.num_layers)
    classes = list(dict.fromkeys(plans))
    with _apart():
        model = step.build(classes, head)
        ends, optimizer_peak = step.ends(model, loss_chunk), step.optimizer_peak(model)
        traced = tuple(step.block_class(block, choices) for block in list(model.blocks))
        boundary, resident = step.stream_bytes(), step.resident_bytes()
    return StepCosts(
        classes=traced,
        blocks=tuple(classes.index(plan) for plan in plans),
        ends=ends,
        boundary=boundary,
        optimizer_peak=optimizer_peak,
        resident=resident,
    )


def _formats(
    linears: Mapping[str, LinearPrecision], plain: LinearPrecision, num_blocks: int
) -> tuple[list[tuple[LinearPrecision, ...]], LinearPrecision]:
    """Of each block's layers, in the order of `GEMM_NAMES`, and of the head."""
    blocks = [
        tuple(linears.get(f"blocks.{i}.{name}", plain) for name in GEMM_NAMES) for i in range(num_blocks)
    ]
    return blocks, linears.get("head", plain)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Fake tensors, and none of the caller's modes."""
    for inverse in (False, True):
        hadamard.rotate(
            torch.zeros(1, hadamard.SIZE), -1, inverse=inverse
        )  # its kept matrix must be a real one
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _outside_autocast(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


@contextlib.contextmanager
def _outside_autocast() -> Iterator[None]:
    """As if no autocast were entered: casts are kept until the outermost one is left."""
    depth = torch.autocast_increment_nesting() - 1
    was_enabled = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()
        torch.set_autocast_enabled("cpu", was_enabled)


class _StillClock(Clock):
    """Noise at one address: fake tensors cannot be read."""

    @property
    def now(self) -> tuple[int, int]:
        return 0, 0


@dataclasses.dataclass(frozen=True)
class _Step:
    """What all traces of a step have in common; arguments as of `trace_costs`."""

    architecture: Architecture
    precision: str
    parameters: str
    master_weights: bool
    shape: tuple[int, int]
    """Micro-batch and sequence."""
    device_functions: DeviceFunctions
    moments: str
    backend: RememberedBackend = dataclasses.field(default_factory=RememberedBackend)

    @property
    def autocast(self) -> Autocast:
        if self.precision == self.parameters:
            return contextlib.nullcontext
        return partial(torch.autocast, "cpu", DTYPES[self.precision])

    def build(self, classes: Sequence[tuple[LinearPrecision, ...]], head: LinearPrecision) -> Decoder:
        """A model with one block of each class."""
        architecture = dataclasses.replace(self.architecture, num_layers=len(classes))
        model = Decoder(architecture, device=CPU, dtype=DTYPES[self.parameters]).eval()
        clock, plain = _StillClock(), LinearPrecision.of(self.precision)
        if head != plain:
            model.planned_head = PlannedLayer("head", head, clock, self.backend.choose)
        for block, plan in zip(model.blocks, classes, strict=True):
            changed = {name: choice for name, choice in zip(GEMM_NAMES, plan, strict=True) if choice != plain}
            if changed:
                for layer in swap_in(block, changed, choose=self.backend.choose).layers.values():
                    layer.clock = clock
        return model

    def ends(self, model: Decoder, loss_chunk: int) -> EndsCost:
        """All that is no block."""
        bare = _without_blocks(model)
        tokens = torch.zeros(self.shape, dtype=torch.int64, device=CPU)
        found = []
        for exist in (False, True):
            with self._tracing(bare, exist=exist) as tracker:
                found.append(
                    trace_ends(bare, tokens, chunk=loss_chunk, tracker=tracker, autocast=self.autocast)
                )
        new, added = found
        return EndsCost(
            **self._states(bare),
            head_peak=new.head_peak,
            head_gradients=new.head_gradients,
            embedding_peak=new.embedding_peak,
            waiting=added.head_gradients,
            accumulating_head_peak=added.head_peak,
            accumulating_embedding_peak=added.embedding_peak,
        )

    def block_class(self, block: nn.Module, choices: Sequence[Activations]) -> BlockClass:
        """One block under all choices."""
        costs: dict[str, BlockCost] = {}
        for level in dict.fromkeys(choice.level for choice in choices):
            block.activations = Activations(level)  # type: ignore[assignment]
            new, added = (self._block(block, exist=exist) for exist in (False, True))
            kept = BlockCost(
                new.kept,
                new.forward_peak,
                new.backward_peak,
                accumulating_peak=added.backward_peak,
                cast=new.cast,
            )
            costs[level] = kept
            if Activations(level, is_offloaded=True) in choices:
                costs[f"{level}+offload"] = self._offloaded(block, kept)
        return BlockClass(
            **self._states(block),
            choices={str(choice): costs[str(choice)] for choice in choices},
            parameters=sum(parameter.numel() for parameter in block.parameters()),
        )

    def _block(self, block: nn.Module, *, exist: bool) -> BlockTrace:
        layout, stream = self._layout(), self._stream()
        with self._tracing(block, exist=exist) as tracker:
            return trace_block(partial(block, layout=layout), stream, tracker, self.autocast)

    def _offloaded(self, block: nn.Module, kept: BlockCost) -> BlockCost:
        """A block whose saved tensors wait on the host."""
        layout, stream = self._layout(), self._stream()
        resident = [*layout.rope, *([] if layout.mask is None else [layout.mask])]
        with self._tracing(block, exist=True):
            saved = saved_bytes(partial(block, layout=layout), stream, block, self.autocast, resident)
        return dataclasses.replace(
            kept,
            kept=kept.kept - saved.moved - saved.casts,
            cast=kept.cast + saved.casts,
            host=saved.moved,
        )

    @contextlib.contextmanager
    def _tracing(self, module: nn.Module, *, exist: bool) -> Iterator[StorageTracker]:
        """A new tracker, on the device's way through the model, with gradients new or existing."""
        device = self.device_functions
        tracker = StorageTracker(granule=GRANULES[device], workspace=WORKSPACES[device])
        gradients = gradients_of(module, master_weights=self.master_weights, exist=exist)
        self.backend.tracker = tracker
        fuses = fuses_attention(self.architecture, self.precision)
        with standing_for(device, fuses_attention=fuses), gradients, tracker:
            yield tracker

    def _states(self, module: nn.Module) -> dict[str, int]:
        """Weights, gradients and optimizer states of a module, as `scrimp.train.optimizer` holds them."""
        count = sum(parameter.numel() for parameter in module.parameters())
        own = DTYPES[self.parameters].itemsize
        state = 4 if self.master_weights else own
        masters = 4 * count if self.master_weights else 0
        moments = sum(self._moments(parameter, state) for parameter in module.parameters())
        return {"weights": count * own, "gradients": count * state, "optimizer": moments + masters}

    def _moments(self, parameter: Tensor, state: int) -> int:
        """Both averages of a parameter."""
        if self.moments != "8bit":
            return 2 * parameter.numel() * BYTES.get(self.moments, state)
        if parameter.dim() < 2:
            return 2 * 4 * parameter.numel()
        rows, columns = parameter.shape
        return 2 * rows * (columns + 2 * math.ceil(columns / MOMENT_BLOCK))

    def _stream(self) -> Tensor:
        """The residual stream between two blocks."""
        size = (*self.shape, self.architecture.width)
        return torch.empty(size, dtype=DTYPES[self.parameters], device=CPU)

    def _layout(self) -> AttentionLayout:
        tokens = torch.zeros(self.shape, dtype=torch.int64, device=CPU)
        with standing_for(self.device_functions):
            return AttentionLayout.prepare(self.architecture, tokens, None, dtype=DTYPES[self.precision])

    def stream_bytes(self) -> int:
        """The boundary."""
        return self._stream().nbytes

    def resident_bytes(self) -> int:
        """Tokens, targets, rotation tables and a mask."""
        layout = self._layout()
        mask = 0 if layout.mask is None else layout.mask.nbytes
        return 2 * 8 * self.shape[0] * self.shape[1] + sum(table.nbytes for table in layout.rope) + mask

    def optimizer_peak(self, model: Decoder) -> int:
        """Of the gradients' norm, or of an update that is no fused one; fused AdamW and copies from master weights
        take nothing."""
        dtype = torch.float32 if self.master_weights else DTYPES[self.parameters]
        gradients = [torch.zeros_like(parameter, dtype=dtype) for parameter in model.parameters()]
        with self._tracing(nn.Module(), exist=False) as tracker:
            torch._foreach_norm(gradients, 2, dtype=torch.float32)
        largest = max(parameter.numel() for parameter in model.parameters())
        return max(tracker.peak, self._update_scratch(largest))

    def _update_scratch(self, largest: int) -> int:
        """Of the arrays that `scrimp.train.optimizer.update` works in, for the largest parameter."""
        is_fused = (self.master_weights or self.parameters == "fp32") and self.moments in ("auto", "fp32")
        return 0 if is_fused else UPDATE_BYTES * min(UPDATE_PIECE[self.device_functions], largest)


def _without_blocks(model: Decoder) -> Decoder:
    """The same embedding, norm and head."""
    bare: Any = object.__new__(Decoder)
    bare.__dict__.update(model.__dict__)
    bare._modules = {**model._modules, "blocks": nn.ModuleList()}
    return bare  # type: ignore[no-any-return]
