"""What each block, the head and the optimizer step of a model cost in bytes, from a trace of the code that will run.

Problem  Formulas for saved and temporary tensors are wrong as soon as the code changes, and peaks lie inside
         operations that nobody listed.
Method   The real model (`scrimp.models`, planned layers, the objective's loss) runs on tensors without memory
         (`meta_mode`), so the time does not depend on the size. Equal blocks of equal formats are one class; one block
         of each class runs alone, per choice of activations and with new and existing gradients (`passes`);
         embedding, norm and loss run without blocks. `scrimp.planner.memory.states` adds the differences up.
         A choice "+offload" is derived: what autograd saves of a block waits on the host instead, its input
         included (`saved`).
         How many documents a row holds is not known: traced is what takes most (`documents`). A CPU's eager blocks
         attend segment by segment; the worst are documents that fill their rows. Where documents need masks, each row
         has one.
         Of a model with adapters gradients and states are those of what is trained.
Limits   Beside adapters the first block keeps less than the others, whose inputs need a gradient: it counts as they do.
         Planned layers are traced in the reference back end, an upper bound for fused ones. Kernels' own memory:
         `workspace`.
Checked  tests/profiler/memory_trace: within 2 % of torch's profiler in real steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from scrimp.config import Architecture
from scrimp.config.activations import Activations
from scrimp.formats import hadamard
from scrimp.formats.grouping import ends_alone
from scrimp.gemm import PlannedLayer, swap_in
from scrimp.gemm.clock import Clock
from scrimp.gemm.problem import DTYPES
from scrimp.gemm.recompute import running_again_by
from scrimp.models import HEAD, AttentionSpec, BlockSpec, ModelSpec, full_name, spec_of
from scrimp.models.attention import AttentionLayout, fuses_attention
from scrimp.models.blocks import Block
from scrimp.models.flash import Gpu
from scrimp.models.model import Model, ModelPart, build_model
from scrimp.objectives import Objective
from scrimp.objectives.next_token import NEXT_TOKEN
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.precision import LinearPrecision
from scrimp.profiler.memory_trace.block_passes import (
    Autocast,
    BlockTrace,
    gradients_of,
    planned_weights,
    trace_block,
    trace_ends,
    weight_operands,
)
from scrimp.profiler.memory_trace.meta_mode import MetaMode
from scrimp.profiler.memory_trace.offloaded import saved_bytes
from scrimp.profiler.memory_trace.optimizer_memory import GradientSums, OptimizerMemory
from scrimp.profiler.memory_trace.remembered import RememberedBackend
from scrimp.profiler.memory_trace.second_run import second_run
from scrimp.profiler.memory_trace.stand_ins import (
    GRANULES,
    DeviceFunctions,
    standing_for,
    workspace_rule,
)
from scrimp.profiler.memory_trace.tracker import StorageTracker

CPU = torch.device("cpu")
_Class = tuple[BlockSpec, tuple[LinearPrecision, ...]]
KnownBlocks = dict[tuple[_Class, Activations], BlockCost]
"""Blocks under one choice that have been traced: what a run asks again for another vocabulary, or for more choices."""
LOSS_SCALARS = 16
"""Numbers of a loss that are on the device at once: its sums, the total of a step, what is differentiated."""


def _formats(
    linears: Mapping[str, LinearPrecision], plain: LinearPrecision, spec: ModelSpec
) -> tuple[list[_Class], LinearPrecision]:
    """Each block with the formats of its layers, in their order, and those of the head."""
    blocks = [
        (block, tuple(linears.get(full_name(index, one.name), plain) for one in block.linears))
        for index, block in enumerate(spec.blocks)
    ]
    return blocks, linears.get(HEAD, plain)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Tensors without memory, none of the caller's modes, and of what is cut into pieces only the ends."""
    for inverse in (False, True):
        hadamard.rotate(
            torch.zeros(1, hadamard.SIZE), -1, inverse=inverse
        )  # its kept matrix must be a real one
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _outside_autocast(),
        ends_alone(),
        MetaMode(),
        running_again_by(second_run),
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


class StillClock(Clock):
    """Noise at one address: tensors without memory cannot be read."""

    @property
    def now(self) -> tuple[int, int]:
        return 0, 0


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step of one device that holds the whole model."""

    architecture: Architecture
    precision: str
    """Compute format, fp32 or bf16: of the activations, and of GEMMs that `linears` does not name."""
    parameters: str
    """Format of the parameters; adapters are fp32."""
    optimizer: OptimizerMemory
    """What the optimizer says of its memory (`scrimp.optim.memory_of`)."""
    micro_batch: int
    """Sequences per forward pass."""
    sequence: int
    """Tokens per sequence."""
    loss_chunk: int
    """Tokens whose logits exist at once; 0 for all."""
    objective: Objective = NEXT_TOKEN
    """Whose loss is traced."""
    linears: Mapping[str, LinearPrecision] = dataclasses.field(default_factory=dict)
    """Layer name (``blocks.0.mlp.down``, ``head``) to its formats, where they are not those of `precision`."""
    activations: Sequence[str] = ("keep",)
    """The choices that each block may have (`scrimp.config.activations`)."""
    device_functions: DeviceFunctions = "cpu"
    """Which device's way through the model is traced."""
    gpu: Gpu = dataclasses.field(default_factory=Gpu)
    """Where that is cuda: whether attention is fused follows from its compute capability, and what its backward pass
    takes from its multiprocessors, and from whether it is to repeat itself."""
    documents: bool = False
    """Rows may hold several documents, which attention keeps apart."""
    compiled: bool = False
    """torch.compile runs the blocks, which decides how attention keeps documents apart."""
    by_reference: bool = False
    """The reference quantizes, though faster kernels may be there."""
    known: KnownBlocks = dataclasses.field(default_factory=dict)
    """Blocks of steps that differed in vocabulary, layers' formats or choices alone; those traced here are added."""
    backend: RememberedBackend = dataclasses.field(default_factory=RememberedBackend, init=False)

    def __post_init__(self) -> None:
        self.backend.is_reference = self.by_reference

    def costs(self) -> StepCosts:
        """Bytes of all parts of the step; seconds are left 0.

        Raises:
            PlanError: an unknown choice.
            ModelError: a sequence beyond the model's context.
        """
        choices = [Activations.parse(text) for text in self.activations]
        plain = LinearPrecision.of(self.precision)
        plans, head = _formats(self.linears, plain, spec_of(self.architecture))
        classes = list(dict.fromkeys(plans))
        with _apart():
            model = self._build([plans.index(one) for one in classes], classes, head)
            ends, update_peak = self._ends(model), self._update_peak(model.trained())
            norm_peak = self._norm_peak(model.trained().values())
            traced = tuple(
                self._block_class(model, block, kind, choices)
                for block, kind in zip(model.each_block(), classes, strict=True)
            )
            boundary, tables = self._stream().nbytes, self._table_bytes(model)
            operands = [self._operand_bytes(block, planned_weights(block)) for block in model.each_block()]
            if model.planned_head is not None:
                operands.append(self._operand_bytes(model, [(model.planned_head, model.head_weight)]))
        # Tokens, targets, numbers of the loss.
        batch = batch_bytes(*self.shape) + self._scalars(LOSS_SCALARS)
        return StepCosts(
            classes=traced,
            blocks=tuple(classes.index(plan) for plan in plans),
            ends=ends,
            boundary=boundary,
            optimizer_peak=update_peak,
            norm_peak=norm_peak,
            resident=batch + tables,
            tables=tables,
            operands=sum(operands[classes.index(plan)] for plan in plans) + sum(operands[len(classes) :]),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and tokens of each."""
        return self.micro_batch, self.sequence

    @property
    def _autocast(self) -> Autocast:
        if self.precision == self.parameters:
            return contextlib.nullcontext
        return partial(torch.autocast, "cpu", DTYPES[self.precision])

    def _build(self, blocks: Sequence[int], classes: Sequence[_Class], head: LinearPrecision) -> Model:
        """A model with one block of each class.

        Args:
            blocks: the first of each class.
        """
        model = build_model(
            self.architecture, device=CPU, dtype=DTYPES[self.parameters], part=ModelPart(blocks)
        ).eval()
        clock, plain = StillClock(), LinearPrecision.of(self.precision)
        if head != plain:
            model.planned_head = PlannedLayer(HEAD, head, clock, self.backend.choose)
        for block, (spec, formats) in zip(model.blocks, classes, strict=True):
            names = [one.name for one in spec.linears]
            changed = {name: choice for name, choice in zip(names, formats, strict=True) if choice != plain}
            if changed:
                for layer in swap_in(block, changed, choose=self.backend.choose).layers.values():
                    layer.clock = clock
        return model

    def _ends(self, model: Model) -> EndsCost:
        """All that is no block."""
        bare = nn.ModuleList(model.ends)
        tokens = torch.zeros(self.shape, dtype=torch.int64, device=CPU)
        found = []
        for exist in (False, True):
            with self._tracing(bare, exist=exist) as tracker:
                found.append(
                    trace_ends(
                        model,
                        self.objective,
                        tokens,
                        chunk=self.loss_chunk,
                        tracker=tracker,
                        autocast=self._autocast,
                    )
                )
        new, added = found
        return EndsCost(
            **self._states(_named(model, bare)),
            head_peak=new.head_peak,
            head_gradients=new.head_gradients,
            embedding_peak=new.embedding_peak,
            waiting=added.head_gradients,
            accumulating_head_peak=added.head_peak,
            accumulating_embedding_peak=added.embedding_peak,
        )

    def _block_class(
        self, model: Model, block: Block, kind: _Class, choices: Sequence[Activations]
    ) -> BlockClass:
        """One block of a model under all choices."""
        named = _named(model, block)
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        for choice in choices:
            self._learn(block, kind, choice)
        return BlockClass(
            **self._states(named),
            choices={str(choice): self.known[kind, choice] for choice in choices},
            parameters=sum(parameter.numel() for parameter in trained.values()),
            routed=sum(one.parameters for one in kind[0].linears if one.experts > 1) if trained else 0,
            update_peak=self._update_peak(trained),
            norm_peak=max((self._norm_peak([parameter]) for parameter in trained.values()), default=0),
            norms=sum(self._scalars(1) for _ in trained),
        )

    def _operand_bytes(self, block: nn.Module, planned: Iterable[tuple[PlannedLayer, Tensor]]) -> int:
        """Bytes of what is kept of the weights of a block, or of the head."""
        with self._tracing(block, exist=False) as tracker:
            before, kept = tracker.live, weight_operands(planned, DTYPES[self.precision])
            return tracker.live - before if kept else 0

    def _learn(self, block: Block, kind: _Class, choice: Activations) -> None:
        """Trace one block under one choice, unless that is known."""
        if (kind, choice) in self.known:
            return
        block.activations = Activations(choice.level)
        if choice.is_offloaded:
            kept = Activations(choice.level)
            self._learn(block, kind, kept)
            self.known[kind, choice] = self._offloaded(block, self.known[kind, kept])
            return
        new, added = (self._block(block, exist=exist) for exist in (False, True))
        self.known[kind, choice] = BlockCost(
            new.kept,
            new.forward_peak,
            new.backward_peak,
            accumulating_peak=added.backward_peak,
            cast=new.cast,
        )

    def _block(self, block: Block, *, exist: bool) -> BlockTrace:
        layout, stream = self._layout(block.attends), self._stream()
        with self._tracing(block, exist=exist, attends=block.attends) as tracker:
            return trace_block(partial(block, layout=layout), stream, tracker, self._autocast)

    def _offloaded(self, block: Block, kept: BlockCost) -> BlockCost:
        """A block whose saved tensors wait on the host."""
        layout, stream = self._layout(block.attends), self._stream()
        resident = [*layout.rope, *([] if layout.mask is None else [layout.mask])]
        with self._tracing(block, exist=True, attends=block.attends):
            saved = saved_bytes(partial(block, layout=layout), stream, block, self._autocast, resident)
        return dataclasses.replace(
            kept,
            kept=kept.kept - saved.moved - saved.casts,
            cast=kept.cast + saved.casts,
            host=saved.moved,
        )

    @contextlib.contextmanager
    def _tracing(
        self, module: nn.Module, *, exist: bool, attends: AttentionSpec | None = None
    ) -> Iterator[StorageTracker]:
        """A new tracker, on the device's way through the model, with gradients new or existing."""
        device = self.device_functions
        rule = workspace_rule(device, self.gpu)
        tracker = StorageTracker(granule=GRANULES[device], workspace=rule)
        gradients = gradients_of(module, self._sums, exist=exist)
        self.backend.tracker, self.backend.stands_for_cuda = tracker, device == "cuda"
        with self._standing(attends), gradients, tracker:
            yield tracker

    def _standing(self, attends: AttentionSpec | None) -> contextlib.AbstractContextManager[None]:
        """The device's way through the model, and through attention where there is any."""
        fuses = attends is None or fuses_attention(
            attends,
            DTYPES[self.precision],
            self.gpu.capability,
            masks=self.documents or (attends.window is not None and attends.window < self.shape[1]),
        )
        return standing_for(self.device_functions, fuses_attention=fuses, gpu=self.gpu)

    @property
    def _sums(self) -> GradientSums:
        return self.optimizer.sums(self.device_functions)

    def _states(self, named: Mapping[str, Tensor]) -> dict[str, int]:
        """Weights of some parameters, and gradients and optimizer states of those that are trained."""
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        sums = self._sums.dtype
        return {
            "weights": sum(parameter.nbytes for parameter in named.values()),
            "frozen": sum(parameter.nbytes for name, parameter in named.items() if name not in trained),
            "gradients": sum(one.numel() * (sums or one.dtype).itemsize for one in trained.values()),
            "optimizer": self.optimizer.state_bytes(trained),
        }

    def _stream(self) -> Tensor:
        """The residual stream between two blocks."""
        size = (*self.shape, self.architecture.width)
        return torch.empty(size, dtype=DTYPES[self.parameters], device=CPU)

    def _layout(self, attends: AttentionSpec) -> AttentionLayout:
        """That of rows which need most."""
        with self._standing(attends):
            return AttentionLayout.worst(
                attends,
                torch.zeros(self.shape, dtype=torch.int64, device=CPU),
                dtype=DTYPES[self.precision],
                documents=self.documents,
                stands_for_gpu=self.device_functions != "cpu",
                compiled=self.compiled,
            )

    def _table_bytes(self, model: Model) -> int:
        """Rotation tables and masks, of each kind of attention that the model has."""
        kinds = dict.fromkeys(block.attends for block in model.each_block())
        return sum(tensor.nbytes for kind in kinds for tensor in self._layout(kind).tensors)

    def _scalars(self, count: int) -> int:
        """Bytes of so many numbers that are tensors of their own."""
        return count * max(4, GRANULES[self.device_functions])

    def _norm_peak(self, parameters: Iterable[Tensor]) -> int:
        """Temporary memory of the norm of these parameters' gradients."""
        gradients = [torch.zeros_like(parameter, dtype=self._sums.dtype) for parameter in parameters]
        with self._tracing(nn.Module(), exist=False) as tracker:
            torch._foreach_norm(gradients, 2, dtype=torch.float32)
        return tracker.peak

    def _update_peak(self, named: Mapping[str, Tensor]) -> int:
        """Temporary memory of the update of some parameters."""
        return self.optimizer.update_peak(
            named, self.device_functions, lambda: self._tracing(nn.Module(), exist=False)
        )


def batch_bytes(rows: int, length: int) -> int:
    """Tokens and targets of a micro-batch."""
    return 2 * 8 * rows * length


def _named(model: nn.Module, part: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a part of a model, by their names in the whole."""
    own = set(part.parameters())
    return {name: parameter for name, parameter in model.named_parameters() if parameter in own}
