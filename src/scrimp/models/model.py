"""A model: embedding, blocks, final norm and head, whatever kind its blocks are.

Whoever trains, traces, times or measures a model asks this class alone: `embed`, the blocks one by one with the layout
of their attention, `finish`, and the head's matrix. What a kind of decoder adds is in its specification
(`scrimp.models.spec`), which builds the blocks.

Parameters  A new model's are uninitialised memory: call `initialise` or `load_weights`.
Precision   The residual stream keeps the embedding's type: float32 under autocast, bfloat16 with bfloat16 parameters.
            Norms compute in float32 and hand the GEMMs their type.
Documents   Rows may hold several documents; see attention.py. Blocks whose attention is alike share one layout, which
            is prepared once per forward pass.
Adapters    An architecture with `adapter` gives layers of blocks adapters (`scrimp.gemm.adapted`). These alone need
            gradients then: what trains, `requires_grad` of a parameter says, and `trained` gives.
Checked     tests/models/test_decoder.py: logits and gradients against a float64 reference.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError
from scrimp.gemm import PlannedLayer, adapt, compute_dtype, store
from scrimp.models.attention import AttentionLayout
from scrimp.models.blocks import Block, Embedding, Linear, Place, with_factors, with_sparse
from scrimp.models.context_parallel import ContextParallel
from scrimp.models.experts import RoutedBlock, added_up
from scrimp.models.kinds import spec_of
from scrimp.models.spec import EMBEDDING_WEIGHT, AttentionSpec, ModelSpec, place

if TYPE_CHECKING:
    import torch.distributed as dist

    from scrimp.models.tensor_ranks import TensorRanks

Layouts = Mapping[AttentionSpec, AttentionLayout]
ADAPTER = (".lora_a", ".lora_b")
"""Ends of the names of adapters' matrices."""


class BlockRunner(Protocol):
    """Runs the blocks of a model instead of the model itself: whoever moves their memory."""

    def __call__(self, index: int, block: Block, x_BTD: Tensor, layout: AttentionLayout) -> Tensor:
        """The output of a block, given its number, its input and the layout."""

    def at_hand(self, index: int) -> contextlib.AbstractContextManager[object]:
        """Inside, a block's weights can be read."""


@runtime_checkable
class _Shared(Protocol):
    """What FSDP2 makes of a module."""

    def unshard(self) -> object:
        """Gather its weights."""

    def reshard(self) -> None:
        """Let go of what was gathered."""


class NumberedBlocks(nn.ModuleList):
    """Some blocks of a model, by their numbers in it."""

    def __init__(self, numbers: Iterable[int], build: Callable[[int], nn.Module]) -> None:
        super().__init__()
        for number in numbers:
            self.add_module(str(number), build(number))

    def __getitem__(self, number: Any) -> Any:
        """The block of a number; of a slice, blocks in a list."""
        return list(self)[number] if isinstance(number, slice) else self._modules[str(number)]


@dataclass(frozen=True)
class ModelPart:
    """What a process has of a model."""

    blocks: Sequence[int]
    """Their numbers."""
    is_first: bool = True
    """It has the embedding."""
    is_last: bool = True
    """It has the final norm and the head; where that is the embedding, a copy of it."""


@dataclass(frozen=True)
class StagePass:
    """What a forward pass runs of a model, some of whose blocks other ranks have."""

    blocks: range
    x_BTD: Tensor | None = None  # noqa: N815
    """The residual stream before them; None: the pass begins with the embedding."""
    sums_2E: Tensor | None = None  # noqa: N815
    """What blocks with experts before them have routed (`Model.take_routing`); None: nothing, or there are none."""


class Model(nn.Module):
    """Tokens in, hidden states or logits out. `build_model` makes one.

    Args:
        spec: what it is.
        place: where the parameters live.
        part: what is made of it; None: all.
    """

    embedding: Embedding
    final_norm: nn.Module

    def __init__(self, spec: ModelSpec, place: Place, part: ModelPart | None = None) -> None:
        super().__init__()
        a = spec.architecture
        self.spec, self.part = spec, part or ModelPart(range(spec.num_blocks))
        if self.part.is_first or (self.part.is_last and a.tied_embeddings):
            self.embedding = Embedding(a.vocab_size, a.width, device=place.device, dtype=place.dtype)
        self.blocks = NumberedBlocks(self.part.blocks, lambda number: _built(spec, number, place))
        self.head: Linear | None = None
        if self.part.is_last:
            self.final_norm = spec.build_norm(place)
            if not a.tied_embeddings:
                self.head = Linear(a.width, a.vocab_size, bias=False, device=place.device, dtype=place.dtype)
        if a.adapter is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.endswith(ADAPTER))
        self.stage: StagePass | None = None
        """What the next forward pass runs; None: all."""
        self.run_block: BlockRunner | None = None
        """None: blocks are simply called."""
        self.context_parallel: ContextParallel | None = None
        """The ranks that share rows; None: this process has whole ones."""
        self.tensor_ranks: TensorRanks | None = None
        """The ranks that share layers, each with its own heads and words; None: this process has all."""
        self.planned_head: PlannedLayer | None = None
        """Formats of the head's GEMMs in the loss; None: the compute type."""

    @property
    def architecture(self) -> Architecture:
        """Its sizes and switches."""
        return self.spec.architecture

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name: those here that are not frozen."""
        return {name: one for name, one in self.named_parameters() if one.requires_grad}

    def of_base(self) -> dict[str, nn.Parameter]:
        """The parameters that the model has without adapters too, by name."""
        return {name: one for name, one in self.named_parameters() if not name.endswith(ADAPTER)}

    def has_here(self, parameter: str) -> bool:
        """Whether this process has a parameter of the whole model, by its name."""
        number = place(parameter)[0]
        if number is not None:
            return number in self.part.blocks
        if parameter == EMBEDDING_WEIGHT:
            return hasattr(self, "embedding")
        return self.part.is_last

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix, shape (V, D): the embedding's own where the two are tied."""
        assert self.part.is_last, "the head is on another rank"
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return next(self.parameters()).dtype

    @property
    def ends(self) -> list[nn.Module]:
        """The modules that are no block."""
        return [module for name, module in self.named_children() if name != "blocks"]

    def each_block(self) -> Iterator[Block]:
        """The blocks, in order."""
        return iter(cast("Iterable[Block]", self.blocks))

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """x_BTD, the residual stream before the first block."""
        x_BTD: Tensor = self.embedding(tokens_BT)
        scale = self.spec.embedding_scale
        # A factor of the stream's own type, rounded to it, as models were trained with.
        return x_BTD if scale == 1.0 else x_BTD * x_BTD.new_full((), scale)

    def finish(self, x_BTD: Tensor) -> Tensor:
        """hidden_BTD, what the head reads, of the residual stream after the last block."""
        return cast(Tensor, self.final_norm(x_BTD))

    def layouts(
        self, tokens_BT: Tensor, document_starts: Tensor | None, *, dtype: torch.dtype, compiled: bool = False
    ) -> Layouts:
        """How the blocks attend in these rows; arguments as of `AttentionLayout.prepare`.

        Raises:
            ModelError: rows are longer than the model's context.
            ConfigError, DeviceError: the ranks of `context_parallel` cannot share them.
        """
        parallel = self.context_parallel
        length = tokens_BT.shape[1] * (1 if parallel is None else parallel.size)
        if length > self.architecture.context:
            raise ModelError(
                "sequence is longer than the model's context",
                got=f"{length} tokens",
                expected=f"at most {self.architecture.context}",
                do="use shorter sequences or a model with a longer context",
            )
        return {
            attends: AttentionLayout.prepare(
                attends, tokens_BT, document_starts, dtype=dtype, compiled=compiled, parallel=parallel
            )
            for attends in dict.fromkeys(block.attends for block in self.each_block())
        }

    def forward(self, tokens_BT: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """hidden_BTD after the final norm; of a `stage` that is not the last, the residual stream after its blocks.

        Args:
            tokens_BT: token ids; T at most the architecture's context. With `context_parallel`, this
                rank's part of each row, and so are the hidden states.
            document_starts: int32 on the CPU, the documents' first positions in the flattened
                B*T, rising from 0, ending with B*T, every row's start among them. None: each
                row is one document. With `context_parallel`, of whole rows.
        """
        stage = self.stage or StagePass(range(self.spec.num_blocks))
        x_BTD = self.embed(tokens_BT) if stage.x_BTD is None else stage.x_BTD
        compiled = torch.compiler.is_compiling() or any(block.is_compiled for block in self.each_block())
        layouts = self.layouts(tokens_BT, document_starts, dtype=compute_dtype(x_BTD), compiled=compiled)
        for number in self.part.blocks if self.stage is None else stage.blocks:
            block: Block = self.blocks[number]
            run = block if self.run_block is None else partial(self.run_block, number, block)
            x_BTD = run(x_BTD, layouts[block.attends])
        return self.finish(x_BTD) if stage.blocks.stop == self.spec.num_blocks else x_BTD

    @contextlib.contextmanager
    def block_at_hand(self, index: int) -> Iterator[None]:
        """Around what reads a block's weights without running the block."""
        moved = contextlib.nullcontext() if self.run_block is None else self.run_block.at_hand(index)
        with moved, _gathered(self.blocks[index]):
            yield

    def whole_rows(self) -> contextlib.AbstractContextManager[object]:
        """Around passes over any number of tokens, without gradients, where ranks share layers and cut rows."""
        return contextlib.nullcontext() if self.tensor_ranks is None else self.tensor_ranks.whole_rows()

    def ends_at_hand(self) -> contextlib.AbstractContextManager[object]:
        """Around what reads the weights of embedding, final norm or head without running the model."""
        return _gathered(self)

    def take_routing(self) -> Tensor | None:
        """What the last forward pass routed, sums_L2E of the blocks with experts (`scrimp.models.experts`), for the one
        who asks first; None: the model has no experts. Of the stages before one, their sum is one more block."""
        found = self._routed()
        if not found:
            return None
        sums_L2E = torch.stack(found)
        for group in self.row_groups():
            sums_L2E = added_up(sums_L2E, group)
        return sums_L2E

    def routing_so_far(self) -> Tensor | None:
        """sums_2E for the next stage, of this rank's tokens; None: the model has no experts."""
        found = self._routed()
        if not found:
            routing = self.spec.routing
            return (
                None
                if routing is None
                else torch.zeros(2, routing.experts, device=next(self.parameters()).device)
            )
        return torch.stack(found).sum(0)

    def _routed(self) -> list[Tensor]:
        found = [] if self.stage is None or self.stage.sums_2E is None else [self.stage.sums_2E]
        for block in self.each_block():
            if isinstance(block, RoutedBlock) and block.routing is not None:
                found.append(block.routing)
                block.routing = None
        return found

    def row_groups(self) -> list[dist.ProcessGroup]:
        """The ranks that share the tokens of rows with this one."""
        sharing = (self.tensor_ranks, self.context_parallel)
        return [ranks.group for ranks in sharing if ranks is not None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary entry for hidden states of any leading shape."""
        logits, ranks = F.linear(hidden, self.head_weight), self.tensor_ranks
        return logits if ranks is None else ranks.joined(logits, self.architecture.vocab_size)


def _built(spec: ModelSpec, number: int, place: Place) -> Block:
    """A block as it is trained: of factors, or with adapters beside frozen weights, which may be stored as codes."""
    block, a = spec.build_block(number, place), spec.architecture
    if a.sparse_share is not None:
        return with_sparse(block, number, spec.blocks[number].linears, place)
    if a.rank is not None:
        return with_factors(block, spec.block(number).linears, a.rank, place)
    if a.adapter is not None:
        for linear in spec.blocks[number].linears:
            layer = cast(nn.Linear, block.get_submodule(linear.name))
            if linear.stored:
                store(layer, linear.stored)
            if linear.rank:
                adapt(layer, linear.rank, linear.stacked, a.adapter.scale)
    return block


@contextlib.contextmanager
def _gathered(module: nn.Module) -> Iterator[None]:
    """Gather all weights of a module that ranks share (FSDP2's `fully_shard`); every rank must ask."""
    if not isinstance(module, _Shared):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def build_model(
    architecture: Architecture,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    part: ModelPart | None = None,
) -> Model:
    """The model of an architecture, its parameters uninitialised.

    Args:
        device: where the parameters live; `meta` gives shapes without memory.
        dtype: type of the parameters.
        part: what is made of it; None: all.

    Raises:
        ModelError: its family is unknown.
    """
    return Model(spec_of(architecture), Place(device, dtype), part)
