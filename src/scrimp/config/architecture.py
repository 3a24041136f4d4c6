"""The shape of a decoder: the numbers that decide its parameters, FLOPs and bytes.

One frozen dataclass for all kinds of decoders: what settings, presets and checkpoints hold. It is pure data. What a
decoder of this shape consists of, its kind says (`scrimp.models.spec_of`), by `family`; numbers that only one kind has
are in `options`.

Notation used everywhere: L layers, D width, H query heads, N KV heads, K head size,
F ffn width, V vocabulary, A = H * K attention width.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from scrimp.errors import ConfigError

ALL = "all"
"""Adapters beside every linear layer of a block."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretch of RoPE (transformers' rope_type "llama3")."""

    factor: float
    """How much the low frequencies are slowed down."""
    low_freq_factor: float
    """Wavelengths longer than original_context / low_freq_factor are stretched fully."""
    high_freq_factor: float
    """Wavelengths shorter than original_context / high_freq_factor are left alone."""
    original_context: int
    """Context length in tokens before the stretch."""


@dataclass(frozen=True)
class Adapter:
    """Adapters of a model."""

    rank: int
    alpha: float
    targets: str = ALL
    """Names of linear layers in a block, separated by commas; all: every one."""
    base: str = ""
    """Formats that frozen weights lie in, as rules; empty: that of the parameters."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise ConfigError(
                "an adapter has a positive rank and alpha",
                got=f"rank {self.rank}, alpha {self.alpha:g}",
                expected="a rank of 1 or more, and an alpha above 0",
            )

    @property
    def scale(self) -> float:
        """What the product of both matrices is multiplied by."""
        return self.alpha / self.rank

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `targets`; none where these are all."""
        return () if self.targets == ALL else tuple(name.strip() for name in self.targets.split(","))

    def has(self, layer: str) -> bool:
        """Whether a linear layer has an adapter, by its name in its block."""
        return self.targets == ALL or layer in self.names


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and switches of one decoder."""

    family: str
    """The transformers `model_type` it is exchanged as, such as llama: which kind of decoder it is."""
    vocab_size: int
    """Rows of the embedding."""
    num_layers: int
    """Decoder blocks."""
    width: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    head_size: int
    """Width of one head; num_heads * head_size need not equal width (Qwen 3)."""
    ffn_width: int
    """Inner width of the gated MLP."""
    context: int
    """Longest sequence in tokens that positions are defined for."""
    rope_theta: float = 10_000.0
    """RoPE base."""
    rope_scaling: RopeScaling | None = None
    """Llama 3 RoPE scaling, or None."""
    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen 2.5)."""
    qk_norm: bool = False
    """RMSNorm over queries and keys before RoPE (over each head in Qwen 3)."""
    tied_embeddings: bool = False
    """The head uses the embedding's weight."""
    sliding_window: int | None = None
    """Tokens each position may look back on, itself included, in blocks that have a window; None is unlimited."""
    rank: int | None = None
    """Each linear layer of a block is a product of two factors of this rank; None: it is one matrix."""
    sparse_share: float | None = None
    """Share of a sparse matrix's places that have a number, one beside each product of two factors; None: there are no
    such matrices."""
    options: tuple[tuple[str, float], ...] = ()
    """Numbers that only its family has, by name; a name that is not here has the family's usual value."""
    adapter: Adapter | None = None
    """Adapters, which are trained alone; None: every weight is trained."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads", "head_size")
        for name in (*sizes, "ffn_width", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model.{name} is not positive", got=getattr(self, name), expected="1 or more"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "model.num_kv_heads does not divide model.num_heads",
                got=f"{self.num_heads} query heads over {self.num_kv_heads} KV heads",
                expected=f"a divisor of {self.num_heads}",
                do="choose num_kv_heads so that every KV head serves the same number of query heads",
            )
        if self.head_size % 2:
            raise ConfigError(
                "head size is odd",
                got=self.head_size,
                expected="an even number, since RoPE rotates pairs",
                do="change model.width or model.num_heads",
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(
                "model.sliding_window is not positive", got=self.sliding_window, expected="1 or more"
            )
        if self.rank is not None:
            self._check_rank(self.rank)
        elif self.sparse_share is not None:
            raise ConfigError(
                "model.sparse_share is of a matrix beside the product of two factors",
                got=f"{self.sparse_share:g}, and layers of full rank",
                do="set model.rank, or leave model.sparse_share out",
            )

    def _check_rank(self, rank: int) -> None:
        largest = min(self.width, self.attention_width, self.ffn_width)
        if not 1 <= rank <= largest:
            raise ConfigError(
                "model.rank is no rank of the model's linear layers",
                got=f"{rank:,}",
                expected=f"1 to {largest:,}, the smaller side of the smallest of them",
                do="leave model.rank out for layers of full rank",
            )
        if self.option("experts", 0) > 0:
            raise ConfigError(
                "model.rank is not carried out for models with routed experts yet",
                got=f"{rank:,} beside a {self.family} model",
                do="leave model.rank out, or take a preset without experts",
            )

    @property
    def attention_width(self) -> int:
        """A: all query heads side by side."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """All key (or value) heads side by side."""
        return self.num_kv_heads * self.head_size

    @property
    def matrix_parameters(self) -> int:
        """Elements of embedding, head, attention and gated MLPs, of routed experts those that a token meets: by this
        the size of a run is chosen. All parameters of a model counts `ModelSpec.parameters`."""
        inner = self.option("experts_per_token", 1.0) * self.option("expert_width", self.ffn_width)
        block = self.width * (2 * self.attention_width + 2 * self.kv_width + 3 * int(inner))
        if self.rank is not None:  # of every layer the sum of its sides instead of their product
            sides = 4 * self.width + 2 * self.attention_width + 2 * self.kv_width + 3 * self.ffn_width
            block = self.rank * sides + self._sparse_parameters
        ends = self.vocab_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * block + self.width * ends

    @property
    def _sparse_parameters(self) -> int:
        """Elements of the sparse matrices of a block."""
        of_width = (self.attention_width + 2 * self.kv_width + 2 * self.ffn_width) * self.sparse_entries(
            self.width
        )
        of_others = self.sparse_entries(self.attention_width) + self.sparse_entries(self.ffn_width)
        return of_width + self.width * of_others

    def sparse_entries(self, inputs: int) -> int:
        """Numbers that a row of so many inputs has in a sparse matrix; 0: there are no sparse matrices."""
        return 0 if self.sparse_share is None else max(1, round(self.sparse_share * inputs))

    def to_json(self) -> dict[str, Any]:
        """Plain values, without options, factors and adapters where there are none: as before there were any."""
        values = dataclasses.asdict(self)
        options, adapter = values.pop("options"), values.pop("adapter")
        values = {k: v for k, v in values.items() if v is not None or k not in ("rank", "sparse_share")}
        numbers = [[name, float(number)] for name, number in options]  # as a file that is read gives them
        return values | ({"options": numbers} if options else {}) | ({"adapter": adapter} if adapter else {})

    @property
    def base(self) -> Architecture:
        """The same without adapters: what a folder of merged weights holds."""
        return dataclasses.replace(self, adapter=None)

    def option(self, name: str, usual: float) -> float:
        """A number that only its family has."""
        return dict(self.options).get(name, usual)
