"""Seconds of a block's passes, from its work and the device's rates: what recomputation costs before anything has run.

Problem  Whether to keep, recompute or offload depends on how long a block computes. A plan for a device that is
         not here, or for a model that does not fit before it is planned, cannot measure that.
Method   A roofline without overlap: products at a share `efficiency` of the peak of their format, everything
         else at the memory's bandwidth::

             seconds = FLOPs / (efficiency * peak) + bytes / bandwidth

         per token and block, b bytes an element, D width, A attention width, C width of qkv, F of the FFN:

             products            2 C D (qkv), 2 A D (out), 4 F D (gate_up), 2 F D (down); three times with backward
             attention           4 A keys forward, 10 A keys backward (flash attention makes the scores again),
                                 keys: those that a token may look at, on average half of a sequence
             norm                2 D b, backward 4 D b
             SwiGLU              3 F b, backward 5 F b
             rotation            2 C b, backward the same
             residual sum        3 D b each, twice; backward the same

         embedding, norm     10 D b with backward; head 6 D V; softmax and loss 4 passes over V logits of 4 bytes

         What a level makes again is its part of the forward pass; the last product of a part is left out
         (`scrimp.gemm.recompute`).
Limits   Predicted. The profiler replaces these seconds by measured ones where the model runs.
Source   FLOPs as in `scrimp.planner.flops`; attention's backward: Dao, FlashAttention-2 (arXiv 2307.08691), 2.5 times
         its forward pass.
Checked  tests/planner/memory/test_work.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scrimp.config import Architecture
from scrimp.config.activations import Activations
from scrimp.planner.flops import GEMM_NAMES, Peaks, linear_shapes, peak_of_recipe
from scrimp.precision import LinearPrecision

LOGIT_PASSES, STREAM_PASSES = 4, 10
"""Times that the loss reads or writes fp32 logits, and embedding and norm the residual stream, with backward."""
COMPUTE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Rates:
    """What a device does per second."""

    peaks: Peaks
    bandwidth: float
    """Bytes per second of its memory."""
    efficiency: float = 0.6
    """Share of a peak that products reach."""


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one block's passes over one micro-batch."""

    forward: float
    backward: float
    """Without what is made again."""
    again: float
    """What the level makes again in backward."""


def block_seconds(
    architecture: Architecture,
    linears: Mapping[str, LinearPrecision],
    activations: Activations,
    rates: Rates,
    *,
    tokens: int,
    sequence: int,
    compute: str,
) -> PassSeconds:
    """Seconds of a block's passes over one micro-batch.

    Args:
        linears: name within the block (mlp.down) to the formats of its GEMMs.
        tokens: of a micro-batch.
        sequence: tokens of a row.
        compute: working format, fp32 or bf16.
    """
    parts = _Parts(architecture, linears, rates, sequence, compute)
    forward = parts.products(("fprop",)) + parts.attention + parts.elementwise
    backward = parts.products(("dgrad", "wgrad")) + 2.5 * parts.attention + parts.elementwise_backward
    return PassSeconds(tokens * forward, tokens * backward, tokens * parts.again(activations))


def ends_seconds(
    architecture: Architecture, head: LinearPrecision, rates: Rates, *, tokens: int, compute: str
) -> float:
    """Seconds of both passes of embedding, final norm, head and loss over one micro-batch.

    Args:
        head: formats of its GEMMs.
        tokens: of a micro-batch.
        compute: working format, fp32 or bf16.
    """
    a = architecture
    products = sum(
        2.0 * a.vocab_size * a.width / (rates.efficiency * peak_of_recipe(rates.peaks, head.gemm(gemm)))
        for gemm in ("fprop", "dgrad", "wgrad")
    )
    logits = 4.0 * a.vocab_size * LOGIT_PASSES / rates.bandwidth
    stream = STREAM_PASSES * a.width * COMPUTE_BYTES[compute] / rates.bandwidth
    return tokens * (products + logits + stream)


@dataclass(frozen=True)
class _Parts:
    """Seconds per token of the parts of a block."""

    architecture: Architecture
    linears: Mapping[str, LinearPrecision]
    rates: Rates
    sequence: int
    compute: str

    def product(self, name: str, gemm: str) -> float:
        outputs, inputs = linear_shapes(self.architecture)[name]
        peak = peak_of_recipe(self.rates.peaks, self.linears[name].gemm(gemm))
        return 2.0 * outputs * inputs / (self.rates.efficiency * peak)

    def products(self, gemms: tuple[str, ...]) -> float:
        return sum(self.product(name, gemm) for name in GEMM_NAMES for gemm in gemms)

    def moved(self, elements: float) -> float:
        """Seconds for reading and writing so many elements."""
        return elements * COMPUTE_BYTES[self.compute] / self.rates.bandwidth

    @property
    def attention(self) -> float:
        a = self.architecture
        window = min(a.sliding_window or self.sequence, self.sequence)
        keys = window / 2 if window == self.sequence else window - window**2 / (2 * self.sequence)
        return 4.0 * a.attention_width * keys / (self.rates.efficiency * self.rates.peaks[self.compute])

    @property
    def norm(self) -> float:
        return self.moved(2 * self.architecture.width)

    @property
    def swiglu(self) -> float:
        return self.moved(3 * self.architecture.ffn_width)

    @property
    def rotation(self) -> float:
        return self.moved(2 * self.architecture.qkv_width)

    @property
    def residual(self) -> float:
        return self.moved(3 * self.architecture.width)

    @property
    def elementwise(self) -> float:
        return 2 * self.norm + self.swiglu + self.rotation + 2 * self.residual

    @property
    def elementwise_backward(self) -> float:
        return 4 * self.norm + 5 / 3 * self.swiglu + self.rotation + 2 * self.residual

    def again(self, activations: Activations) -> float:
        """What a level makes again."""
        parts = (
            ("swiglu", self.swiglu),
            ("norms", 2 * self.norm),
            ("mlp", self.product("mlp.gate_up", "fprop")),
            ("qkv", self.product("attention.qkv", "fprop") + self.rotation),
            ("attention", self.attention),
            ("block", self.product("attention.out", "fprop") + self.residual),
        )
        return sum(seconds for level, seconds in parts if activations.recomputes(level))
