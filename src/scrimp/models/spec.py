"""The specification of a model: all that code outside of a model's own file may know of it.

Problem  Planner, profiler, runtime, statistics and exports need a model's matrices, FLOPs, bytes and names. If each
         knew how a decoder is made, another kind of decoder would be an edit in each.
Method   A `ModelSpec` says what a model consists of: blocks that add to a residual stream, one after the other, between
         an embedding and a head. Each block lists its linear layers (`LinearSpec`), its attention (`AttentionSpec`),
         and the traffic of what is neither (`Traffic`). FLOPs and bytes are arithmetic over these; see
         `scrimp.planner.flops` and `scrimp.planner.layout.block_times`.
Names    A linear layer is called ``blocks.3.mlp.down``: the block's number, then its name in the block. The head is
         called ``head``. `full_name` and `place` are the only two functions that know this form. Layers of other
         people's models keep the names that they have there.
Kinds    Each is one file in `scrimp.models.kinds`, chosen by `Architecture.family`.
Factors  Where `Architecture.rank` says so, a layer W is trained as a product B A of two layers, ``mlp.down.A`` and
         ``mlp.down.B``. A kind knows nothing of it: `block` and `build_block` are of layers that are one matrix, as
         they are exchanged too; `blocks` and the model have the factors. With `Architecture.sparse_share` W is B A + S
         and made for each product: then it stays one layer, of which `LinearSpec.made_of` says what is trained.
Experts  A block may have layers of which each token meets only some: a `LinearSpec` with `experts` is as many matrices,
         one below the other, and runs as one grouped product (`scrimp.gemm.grouped`). How tokens choose, the model's
         `RoutingSpec` says.
Adapters Where the architecture has them (`Architecture.adapter`), weights are frozen, and linear layers with a `rank`
         have two matrices beside theirs, which are trained. Then not all GEMMs run: `ModelSpec.gemms` says which do.
Limits   Layers of the same name have the same shape in every block: a plan records one back end for each name.
Checked  tests/models/test_spec.py: against the parameters and the linear layers of the modules themselves.

Pure: importing it needs no torch; `build_block` and `build_norm` do.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from scrimp.config.activations import LEVELS
from scrimp.config.architecture import Architecture, RopeScaling
from scrimp.errors import ModelError
from scrimp.precision import GEMMS, HEAD, InputOrigin, Split, is_router, stored_in

if TYPE_CHECKING:
    from scrimp.models.blocks import Block, Place, RMSNorm
    from scrimp.models.huggingface.keys import Keys

_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")

EMBEDDING_WEIGHT = "embedding.weight"
"""The parameter that has a row for each token; of a tied head too."""


def full_name(block: int, name: str) -> str:
    """A layer's name in a plan, by its block's number and its name there."""
    return f"blocks.{block}.{name}"


def place(layer: str) -> tuple[int | None, str]:
    """A layer's block and its name there; of the head, and of layers of other models, None and the whole name."""
    found = _IN_BLOCK.fullmatch(layer)
    return (None, layer) if found is None else (int(found[1]), found[2])


@dataclass(frozen=True)
class SparseLowRank:
    """What a matrix is made of that is B A + S."""

    rank: int
    """Rows of A, and columns of B."""
    entries: int
    """Numbers of S in each row."""


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer: Y = X W^T, W of (outputs, inputs)."""

    name: str
    """In its block, such as mlp.down; of the head, head."""
    outputs: int
    inputs: int
    origin: InputOrigin = "alone"
    """Where its input comes from: whether backward may make it again (`scrimp.precision`)."""
    again: str = ""
    """Level of recomputation from which on backward multiplies it again; empty: never."""
    rows: tuple[int, ...] = ()
    """Outputs of each layer that is stacked in it, in the order of `Elsewhere.huggingface`; empty: one has all."""
    experts: int = 1
    """Matrices of these outputs and inputs, one below the other: a grouped product where there are several."""
    chosen: int = 1
    """How many of the experts each token uses."""
    cut: Split | None = None
    """What ranks that share the layer have their part of: outputs, of each layer that is stacked in it, or inputs.
    None: each of them runs all of it on its own tokens."""
    rank: int = 0
    """Rank of its adapter, or of that of each layer that is stacked in it; 0: none."""
    made_of: SparseLowRank | None = None
    """What W is made of, for each product (`scrimp.gemm.sparse_low_rank`); None: it is a parameter itself."""
    stored: str = ""
    """Recipe in whose codes its frozen weight lies (`scrimp.gemm.stored_weight`); empty: as it is."""
    gate: Literal["", "before", "after"] = ""
    """Whether it makes a gate and what the gate multiplies, side by side, or reads their product."""

    @property
    def is_storable(self) -> bool:
        """Whether its frozen weight may be stored, in a block: experts and routers stay as they are."""
        return self.experts == 1 and not is_router(self.name)

    @property
    def adapter_parameters(self) -> int:
        """Elements of A and B, of all layers that are stacked in it."""
        return self.rank * (len(self.stacked) * self.inputs + self.outputs)

    @property
    def parameters(self) -> int:
        """Elements of W, of all experts; of what it is made of, where that is trained in its place."""
        if self.made_of is not None:
            return self.made_of.rank * (self.outputs + self.inputs) + self.made_of.entries * self.outputs
        return self.experts * self.outputs * self.inputs

    @property
    def parameters_per_token(self) -> int:
        """Elements of W that one token is multiplied with."""
        return self.chosen * self.outputs * self.inputs

    @property
    def stacked(self) -> tuple[int, ...]:
        """Outputs of each layer that is stacked in it, of all experts."""
        return (self.rows or (self.outputs,)) * self.experts

    def factors(self, rank: int) -> tuple[LinearSpec, LinearSpec]:
        """A (rank, inputs) and B (outputs, rank), whose product is a layer of this shape."""
        first = dataclasses.replace(
            self,
            name=f"{self.name}.A",
            outputs=rank,
            gate="",
            rows=(),
            again=self.again or "block",  # B is the last product then
            cut="inputs" if self.cut == "inputs" else None,
        )
        second = dataclasses.replace(
            self,
            name=f"{self.name}.B",
            inputs=rank,
            origin="alone",
            gate="",
            cut="outputs" if self.cut == "outputs" else None,
        )
        return first, second

    def pieces(self, ranks: int) -> tuple[tuple[range, ...], ...]:
        """The outputs, or inputs, that each of so many ranks has of it, or of each of its experts."""
        sizes = (self.rows or (self.outputs,)) if self.cut == "outputs" else (self.inputs,)
        starts = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        return tuple(
            tuple(
                range(start + size * rank // ranks, start + size * (rank + 1) // ranks)
                for start, size in zip(starts, sizes, strict=True)
            )
            for rank in range(ranks)
        )

    def piece_sizes(self, ranks: int) -> tuple[int, int]:
        """Inputs and outputs of the piece of one of so many ranks, the first."""
        if self.cut is None:
            return self.inputs, self.outputs
        features = sum(map(len, self.pieces(ranks)[0]))
        return (self.inputs, features) if self.cut == "outputs" else (features, self.outputs)


@dataclass(frozen=True)
class VectorSpec:
    """A parameter that is no matrix: the weight of a norm, or a bias."""

    name: str
    """In its block, such as attention_norm.weight."""
    stacked: tuple[tuple[str, int], ...]
    """Names in its block in Hugging Face's models of what is stacked in it, and their elements."""

    @property
    def parameters(self) -> int:
        """Its elements."""
        return sum(size for _, size in self.stacked)


@dataclass(frozen=True)
class Rope:
    """Rotary positions."""

    theta: float
    """Base of the frequencies."""
    scaling: RopeScaling | None = None
    """Llama 3's stretch of the low frequencies."""
    factor: float = 1.0
    """All frequencies are divided by it (transformers' rope_type "linear")."""


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention of one block."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key heads, and as many value heads."""
    head_size: int
    rope: Rope
    window: int | None = None
    """Tokens that a position may look back on, itself included; None is unlimited."""
    value_size: int | None = None
    """Size of a head's values, where it is not that of its queries and keys."""

    @property
    def width(self) -> int:
        """All query heads side by side."""
        return self.num_heads * self.head_size

    def keys(self, sequence: int) -> tuple[float, int]:
        """Keys that a token meets on average: those it may look at, and all that a full square of scores holds.

        A window w < s replaces s/2 by w - w^2 / 2s, and s by w.
        """
        window = min(self.window or sequence, sequence)
        causal = window / 2 if window == sequence else window - window**2 / (2 * sequence)
        return causal, window


@dataclass(frozen=True)
class RoutingSpec:
    """How tokens choose experts, in all blocks that have any."""

    experts: int
    chosen: int
    """Experts that a token meets."""
    normalises: bool = True
    """Whether the weights of a token's experts add up to 1."""
    balance: float = 0.0
    """Weight of the auxiliary loss that keeps experts equally busy."""
    capacity_factor: float = 0.0
    """Most tokens of an expert in training, by their mean; 0: all that choose it."""


@dataclass(frozen=True)
class Traffic:
    """Operations that read and write whole activations and multiply no matrices: norms, gates, rotation, sums."""

    forward: int
    """Elements per token, read and written."""
    backward: int
    again: str = ""
    """Level of recomputation from which on backward runs them again; empty: never."""

    @property
    def on_stream(self) -> bool:
        """Whether they work on the residual stream, which ranks of tp share under sequence parallelism alone."""
        return self.again in ("norms", "block", "")


@dataclass(frozen=True)
class BlockSpec:
    """One block. Blocks that are equal cost the same."""

    layers: tuple[LinearSpec | VectorSpec, ...]
    """Everything that has parameters, in the order in which it runs."""
    attention: AttentionSpec
    traffic: tuple[Traffic, ...]

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Its linear layers."""
        return tuple(one for one in self.layers if isinstance(one, LinearSpec))

    def factored(self, rank: int) -> BlockSpec:
        """The same, each linear layer as the two factors of a product; its bias, where it has one, is B's."""
        layers: list[LinearSpec | VectorSpec] = []
        for one in self.layers:
            if isinstance(one, LinearSpec):
                layers += one.factors(rank)
            else:
                name = re.sub(r"\.bias$", ".B.bias", one.name)
                layers.append(dataclasses.replace(one, name=name))
        return dataclasses.replace(self, layers=tuple(layers))

    def sparse(self, architecture: Architecture) -> BlockSpec:
        """The same, each linear layer's matrix made of two factors and a sparse matrix for each product."""
        assert architecture.rank is not None
        layers: list[LinearSpec | VectorSpec] = []
        for one in self.layers:
            if isinstance(one, LinearSpec):
                made_of = SparseLowRank(architecture.rank, architecture.sparse_entries(one.inputs))
                layers.append(dataclasses.replace(one, made_of=made_of))
            else:
                layers.append(one)
        return dataclasses.replace(self, layers=tuple(layers))

    @property
    def parameters_per_token(self) -> int:
        """Elements of its weight matrices that one token is multiplied with."""
        return sum(linear.parameters_per_token for linear in self.linears)

    @cached_property
    def parameters(self) -> int:
        """All of its parameters."""
        return sum(one.parameters for one in self.layers) + self.adapter_parameters

    @cached_property
    def adapter_parameters(self) -> int:
        """Those of its adapters."""
        return sum(linear.adapter_parameters for linear in self.linears)

    @cached_property
    def routed_parameters(self) -> int:
        """Those of routed experts."""
        return sum(linear.parameters for linear in self.linears if linear.experts > 1)


@dataclass(frozen=True)
class Elsewhere:
    """What a linear layer is called in other libraries, within its block there."""

    huggingface: tuple[str, ...]
    """Those that are stacked in it, in order; of experts with their number's place, {expert}."""
    megatron: str


@dataclass(frozen=True)
class ModelSpec(ABC):
    """A model of one kind and one size. `spec_of` makes it."""

    architecture: Architecture

    names_elsewhere: ClassVar[Mapping[str, Elsewhere]]
    """Name in a block to names in other libraries."""
    huggingface_classes: ClassVar[Mapping[str, str]]
    """Family to the class of transformers that loads it."""
    levels: ClassVar[tuple[str, ...]] = LEVELS
    """Levels of recomputation that its blocks know (`scrimp.config.activations`), in their order."""

    @abstractmethod
    def block(self, index: int) -> BlockSpec:
        """What one block consists of, each of its layers as one matrix."""

    @classmethod
    @abstractmethod
    def read_config(cls, keys: Keys, family: str) -> Architecture:
        """From a config.json of one of its families.

        Raises:
            ModelError: by the key of what is not supported.
        """

    @abstractmethod
    def write_config(self) -> dict[str, Any]:
        """The keys of its config.json, but for those that name the model's class, format and tokens.

        Raises:
            ModelError: transformers' class of the family cannot express it.
        """

    @abstractmethod
    def build_block(self, index: int, place: Place) -> Block:
        """The module of one block, each of its layers as one matrix, its parameters uninitialised."""

    @abstractmethod
    def build_norm(self, place: Place) -> RMSNorm:
        """A norm of the residual stream, as the final one is."""

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        return self.architecture.num_layers

    @property
    def routing(self) -> RoutingSpec | None:
        """How tokens choose experts; None: there are none."""
        return None

    def weight_names(self, linear: LinearSpec) -> tuple[str, ...]:
        """Names within a block, in Hugging Face's files, of the weights that are stacked in a layer's."""
        names = self.names_elsewhere[linear.name].huggingface
        return tuple(f"{name.format(expert=e)}.weight" for e in range(linear.experts) for name in names)

    @property
    def embedding_scale(self) -> float:
        """What the embedding's rows are multiplied by."""
        return 1.0

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """All of them, in order, as they are trained."""
        a, found = self.architecture, tuple(self.block(index) for index in range(self.num_blocks))
        if a.adapter is not None:
            return tuple(self._adapted(index, one) for index, one in enumerate(found))
        if a.rank is None:
            return found
        is_sparse, rank = a.sparse_share is not None, a.rank
        of = {one: one.sparse(a) if is_sparse else one.factored(rank) for one in dict.fromkeys(found)}
        return tuple(of[one] for one in found)

    def _adapted(self, index: int, block: BlockSpec) -> BlockSpec:
        adapter = self.architecture.adapter
        assert adapter is not None

        def adapted(one: LinearSpec) -> LinearSpec:
            rank = adapter.rank if adapter.has(one.name) else 0
            is_stored = adapter.base and one.is_storable
            stored = stored_in(adapter.base, full_name(index, one.name)) if is_stored else ""
            return replace(one, rank=rank, stored=stored)

        layers = (adapted(one) if isinstance(one, LinearSpec) else one for one in block.layers)
        return replace(block, layers=tuple(layers))

    @cached_property
    def equal_blocks(self) -> dict[BlockSpec, int]:
        """Blocks that differ, and how many there are of each."""
        return dict(Counter(self.blocks))

    @property
    def head(self) -> LinearSpec:
        """The layer that gives the logits."""
        return LinearSpec(HEAD, self.architecture.vocab_size, self.architecture.width, cut="outputs")

    @cached_property
    def adapter_parameters(self) -> int:
        """Those of all adapters."""
        return sum(block.adapter_parameters for block in self.blocks)

    @property
    def trained_parameters(self) -> int:
        """Those that are trained: all, or the adapters'."""
        return self.parameters if self.architecture.adapter is None else self.adapter_parameters

    @property
    def parameters(self) -> int:
        """All parameters: embedding, blocks, final norm, and the head unless it is the embedding."""
        matrices = self.head.parameters * (1 if self.architecture.tied_embeddings else 2)
        return matrices + sum(block.parameters for block in self.blocks) + self.architecture.width

    def layers(self) -> dict[str, LinearSpec]:
        """All linear layers by their names in a plan: those of each block, then the head."""
        return dict(self._layers())

    def _layers(self) -> Iterator[tuple[str, LinearSpec]]:
        for index, block in enumerate(self.blocks):
            for linear in block.linears:
                yield full_name(index, linear.name), linear
        yield HEAD, self.head

    @cached_property
    def gemms(self) -> dict[str, tuple[str, ...]]:
        """Which of their GEMMs linear layers run, by their names in a plan.

        Frozen weights have no wgrad. Up to the first adapter nothing before it is trained: no input needs a gradient.
        """
        if self.architecture.adapter is None:
            return dict.fromkeys(self.layers(), GEMMS)
        found: dict[str, tuple[str, ...]] = {}
        needs_gradient = False
        for name, linear in self.layers().items():
            found[name] = ("fprop", "dgrad") if needs_gradient else ("fprop",)
            needs_gradient |= linear.rank > 0
        return found

    def adapter_products(self, layer: str) -> int:
        """Products that the adapter of a layer, by its name in a plan, runs for the tokens of a pass and its gradients:
        that of A for all that is stacked, those of B for each."""
        products = 1 + len(self.linear(layer).stacked)
        # Where the input needs no gradient, A makes none.
        return 3 * products - ("dgrad" not in self.gemms[layer])

    @cached_property
    def origins(self) -> dict[str, InputOrigin]:
        """Where the input of each linear layer comes from: what rules of precision are given to."""
        return {name: linear.origin for name, linear in self.layers().items()}

    @cached_property
    def shapes(self) -> dict[str, LinearSpec]:
        """Linear layers by their names in a block, each once, then the head."""
        found = {linear.name: linear for block in self.equal_blocks for linear in block.linears}
        return {**found, HEAD: self.head}

    def linear(self, layer: str) -> LinearSpec:
        """A layer by its name in a plan, or in its block.

        Raises:
            ModelError: the model has no such layer.
        """
        name = place(layer)[1]
        if name not in self.shapes:
            raise ModelError(
                "the model has no such linear layer", got=repr(layer), expected=", ".join(self.shapes)
            )
        return self.shapes[name]
