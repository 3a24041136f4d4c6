"""What a model costs follows from its sizes: those of ours, or of any model that was ever published.

Problem  A published run names layers, widths and experts of models that Scrimp need not be able to train.
Method   `ModelShape` is what a file of a shape says; its blocks are `BlockSpec`s, as those of our own kinds are, so
         that one cost model reads both. `sizes_of` gives those of a model of ours.
Limits   Norms of a shape do not count: a ten-thousandth of the parameters.
Names    D width, H query heads, N key heads, K head size, F ffn width, V vocabulary, E experts of which k are chosen.
Source   Latent attention: DeepSeek-V2, arXiv 2405.04434; shared experts: DeepSeekMoE, arXiv 2401.06066
Checked  tests/models/test_shapes.py: printed sizes of published models, and our own kinds
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from scrimp.models import BlockSpec, LinearSpec, ModelSpec
from scrimp.models.spec import AttentionSpec, Rope, Traffic, VectorSpec

QKV, OUT, GATE_UP, UP, DOWN, ROUTER = (
    "attention.qkv",
    "attention.out",
    "gate_up",
    "up",
    "down",
    "router",
)
_ROPE = Rope(10_000.0)


@dataclass(frozen=True)
class ModelSizes:
    """What the cost of a model follows from."""

    blocks: tuple[BlockSpec, ...]
    width: int
    vocab_size: int
    tied: bool = False
    """The head is the embedding's matrix."""
    learned_positions: int = 0
    """Rows of their table."""
    heads: int = 1
    """Times that a pass runs head and loss: once for each token that is predicted at a position."""

    @property
    def head_parameters(self) -> int:
        """Numbers of the head's matrix, its own or the embedding's."""
        return self.vocab_size * self.width

    @property
    def embedding_parameters(self) -> int:
        """Numbers of words and learned positions."""
        return (self.vocab_size + self.learned_positions) * self.width

    @cached_property
    def equal_blocks(self) -> dict[BlockSpec, int]:
        """Blocks that differ, and how many there are of each."""
        return dict(Counter(self.blocks))

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """For each block the number of the first one that is as it."""
        first: dict[BlockSpec, int] = {}
        return tuple(first.setdefault(block, number) for number, block in enumerate(self.blocks))

    @cached_property
    def parameters_before(self) -> tuple[list[int], list[int]]:
        """Parameters of all blocks before each, and of all: those of routed experts apart, as the second list."""
        dense, routed = [0], [0]
        for block in self.blocks:
            dense.append(dense[-1] + block.parameters - block.routed_parameters)
            routed.append(routed[-1] + block.routed_parameters)
        return dense, routed

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        blocks = sum(block.parameters * count for block, count in self.equal_blocks.items())
        return blocks + self.embedding_parameters + (0 if self.tied else self.head_parameters)

    def flops_per_token(self, sequence: int) -> float:
        """FLOPs of a trained token, scores counted causally: 6 for each parameter that it meets, and for each key that
        it sees 6 for each number of its queries and results."""
        found = 6.0 * self.head_parameters * self.heads
        for block, count in self.equal_blocks.items():
            keys, _ = block.attention.keys(sequence)
            widths = block.attention.width + value_width(block.attention)
            found += count * (6.0 * block.parameters_per_token + 6.0 * widths * keys)
        return found


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Queries, keys and values by way of narrow ones."""

    kv_rank: int
    nope_size: int
    """Size of a head's queries and keys without positions."""
    rope_size: int
    """Size of their part with positions; all heads share one such key."""
    value_size: int
    q_rank: int = 0
    """0: queries are made at once."""


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """MLPs of which each token meets some."""

    count: int
    chosen: int
    width: int
    """F of one expert."""
    shared: int = 0
    """Experts that every token meets besides."""
    shared_width: int = 0
    """F of one of these; 0: as the others."""
    first_dense_layers: int = 0
    """Blocks at the beginning that have an ordinary MLP."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder, as a file says it."""

    layers: int
    width: int
    heads: int
    ffn_width: int
    """F of ordinary MLPs."""
    vocab_size: int
    kv_heads: int = 0
    """0: as many as heads. Latent attention has as many in any case."""
    head_size: int = 0
    """0: width / heads. Latent attention has sizes of its own."""
    gated: bool = True
    tied: bool = False
    learned_positions: int = 0
    """Rows of their table; 0: positions are rotated."""
    window: int = 0
    """Tokens that a position sees, in blocks that have a window; 0: none has."""
    window_every: int = 1
    """Every so many blocks one has the window."""
    biases: bool = False
    """Whether every linear layer has one."""
    query_key_value_biases: bool = False
    next_token_modules: int = 0
    """Blocks that predict tokens after the next one (DeepSeek-V3, arXiv 2412.19437), each with a pass of the head."""
    latent_attention: LatentAttention | None = None
    experts: RoutedExperts | None = None
    source: str = ""
    """Where the numbers are from."""

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads if self.kv_heads and self.latent_attention is None else self.heads

    @property
    def sizes(self) -> ModelSizes:
        """Its blocks and ends."""
        number = self.next_token_modules
        blocks = tuple(self._block(index) for index in range(self.layers + number))
        join = LinearSpec("join", self.width, 2 * self.width)
        ahead = [dataclasses.replace(one, layers=(join, *one.layers)) for one in blocks[self.layers :]]
        return ModelSizes(
            (*blocks[: self.layers], *ahead),
            self.width,
            self.vocab_size,
            self.tied,
            self.learned_positions,
            heads=1 + number,
        )

    def _block(self, number: int) -> BlockSpec:
        attention, D = self._attention(number), self.width
        experts = self.experts if self.experts and number >= self.experts.first_dense_layers else None
        if experts is None:
            mlp, traffic = self._mlp("mlp", self.ffn_width), self._mlp_traffic(self.ffn_width)
        else:
            mlp, traffic = self._routed(experts)
        queries = attention.width + attention.num_kv_heads * attention.head_size
        linears = [*self._projections(attention), *mlp]
        biased = [one for one in linears if self.biases or (self.query_key_value_biases and one.name == QKV)]
        biases = [VectorSpec(f"{one.name}.bias", ((one.name, one.experts * one.outputs),)) for one in biased]
        return BlockSpec(
            layers=(*linears, *biases),
            attention=attention,
            traffic=(
                Traffic(2 * D, 4 * D, "norms"),
                Traffic(2 * D, 4 * D, "norms"),
                Traffic(3 * D, 3 * D, "block"),
                Traffic(3 * D, 3 * D),
                *([] if self.learned_positions else [Traffic(2 * queries, 2 * queries, "qkv")]),
                *traffic,
            ),
        )

    def _attention(self, number: int) -> AttentionSpec:
        window = self.window if self.window and number % self.window_every == 0 else None
        latent = self.latent_attention
        if latent is None:
            size = self.head_size or self.width // self.heads
            return AttentionSpec(self.heads, self.key_heads, size, _ROPE, window)
        size = latent.nope_size + latent.rope_size
        return AttentionSpec(self.heads, self.heads, size, _ROPE, window, value_size=latent.value_size)

    def _projections(self, attention: AttentionSpec) -> list[LinearSpec]:
        latent, D, A = self.latent_attention, self.width, attention.width
        out = LinearSpec(OUT, D, value_width(attention), origin="kept", again="block", cut="inputs")
        if latent is None:
            keys = attention.num_kv_heads * attention.head_size
            qkv = LinearSpec(QKV, A + 2 * keys, D, "made", "qkv", rows=(A, keys, keys), cut="outputs")
            return [qkv, out]
        found = [LinearSpec("attention.q_down", latent.q_rank, D)] if latent.q_rank else []
        pairs = self.heads * (latent.nope_size + latent.value_size)
        return [
            *found,
            LinearSpec("attention.q", A, latent.q_rank or D, cut="outputs"),
            LinearSpec("attention.kv_down", latent.kv_rank + latent.rope_size, D),
            LinearSpec("attention.kv", pairs, latent.kv_rank, cut="outputs"),
            out,
        ]

    def _mlp(self, name: str, inner: int, experts: int = 1, chosen: int = 1) -> list[LinearSpec]:
        D, rows = self.width, (inner, inner) if self.gated else ()
        up = f"{name}.{GATE_UP if self.gated else UP}"
        outputs = inner * (1 + self.gated)
        return [
            LinearSpec(
                up,
                outputs,
                D,
                "made",
                "mlp",
                rows,
                experts,
                chosen,
                cut="outputs",
                gate="before" if self.gated and not self.biases else "",
            ),
            # What experts give is kept until it is summed up by their weights.
            LinearSpec(
                f"{name}.{DOWN}",
                D,
                inner,
                "made",
                "mlp" if experts > 1 else "",
                experts=experts,
                chosen=chosen,
                cut="inputs",
                gate="after" if self.gated and not self.biases else "",
            ),
        ]

    def _mlp_traffic(self, inner: int) -> list[Traffic]:
        gates = (3, 5) if self.gated else (2, 3)
        return [Traffic(gates[0] * inner, gates[1] * inner, "swiglu")]

    def _routed(self, experts: RoutedExperts) -> tuple[list[LinearSpec], list[Traffic]]:
        D, k, E = self.width, experts.chosen, experts.count
        layers = [LinearSpec(f"mlp.{ROUTER}", E, D, "made", "mlp")]
        layers += self._mlp("mlp.experts", experts.width, E, k)
        traffic = self._mlp_traffic(k * experts.width)
        # Copies for the experts, and the sum of what they give.
        traffic += [Traffic(2 * k * D, 4 * k * D, "mlp"), Traffic((k + 1) * D, (3 * k + 1) * D, "mlp")]
        traffic.append(Traffic(4 * E, 4 * E, "mlp"))
        if experts.shared:
            inner = experts.shared * (experts.shared_width or experts.width)
            layers += self._mlp("mlp.shared", inner)
            traffic += self._mlp_traffic(inner)
        return layers, traffic


def value_width(attention: AttentionSpec) -> int:
    """Numbers of a token's results of attention, all heads."""
    return attention.num_heads * (attention.value_size or attention.head_size)


def sizes_of(spec: ModelSpec) -> ModelSizes:
    """Sizes of one of Scrimp's own models."""
    architecture = spec.architecture
    return ModelSizes(spec.blocks, architecture.width, architecture.vocab_size, architecture.tied_embeddings)
