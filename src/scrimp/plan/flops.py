"""FLOPs per token, model FLOP utilisation and the speed of light: the one place they are counted.

Problem  A rate in tokens per second says nothing about how well a device is used. Two figures
         do, and they answer different questions.
Method   Matrices cost 2 FLOPs per weight and token forward, 4 backward; the embedding look-up
         costs none. With N_mm = all block matrices + the LM head once (tied or not), A the
         attention width, s the sequence and L the layers, per trained token::

             full    6 N_mm + 12 L A s       (PaLM, TorchTitan)
             causal  6 N_mm +  6 L A s       (Megatron-Bridge, LLMQ): half the scores are masked

         A sliding window w < s replaces s by w (full) and s/2 by w - w^2 / 2s (causal).
         MFU is causal FLOPs per second over the device's BF16 peak. The speed of light (SOL)
         is ideal time over measured time, where the ideal runs every GEMM at the peak of the
         format that it has in the plan, and attention at the BF16 peak (fp32 in an fp32 plan)::

             ideal = sum over GEMM groups of FLOP / peak(format)

Limits   No credit for recomputation, none for tokens that a document mask hides: both would
         make a slower program look better. Under FP8 or FP4 the BF16 MFU may pass 80 %, and
         SOL falls: print both.
Sources  PaLM (arXiv 2204.02311) appendix B; LLMQ's speed-of-light definition.
Checked  tests/plan/test_flops.py: published GFLOP per token, and torch's own FLOP counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scrimp.config import Architecture
from scrimp.errors import PlanError

GEMM_NAMES = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")


@dataclass(frozen=True)
class Flops:
    """FLOPs per trained token (forward and backward), by what does them."""

    blocks: float
    """The matrices of all blocks."""
    head: float
    """The LM head."""
    attention_causal: float
    """Scores and their product with the values, masked half left out."""
    attention_full: float
    """The same with every score counted."""

    @property
    def causal(self) -> float:
        """Total in the causal form: the one that MFU and SOL use."""
        return self.blocks + self.head + self.attention_causal

    @property
    def full(self) -> float:
        """Total in the full form, for comparison with systems that print it."""
        return self.blocks + self.head + self.attention_full


@dataclass(frozen=True)
class Peaks:
    """What a device can do at best, in FLOP/s per format, and how that is known."""

    flops_per_s: Mapping[str, float]
    """Format name (fp32, bf16, fp8, ...) to dense FLOP/s."""
    origin: str
    """'spec sheet of ...' or 'measured here ...'."""

    def __getitem__(self, fmt: str) -> float:
        try:
            return self.flops_per_s[fmt]
        except KeyError:
            known = ", ".join(sorted(self.flops_per_s))
            raise PlanError(f"no peak rate is known for {fmt}", got=fmt, expected=known) from None


def count_flops(architecture: Architecture, sequence: int) -> Flops:
    """FLOPs per trained token of a decoder at one sequence length (tokens)."""
    window = min(architecture.sliding_window or sequence, sequence)
    causal_keys = sequence / 2 if window == sequence else window - window**2 / (2 * sequence)
    per_key = 12.0 * architecture.num_layers * architecture.attention_width
    return Flops(
        blocks=6.0 * architecture.num_layers * architecture.block_matmul_parameters,
        head=6.0 * architecture.head_parameters,
        attention_causal=per_key * causal_keys,
        attention_full=per_key * window,
    )


def gemm_parameters(architecture: Architecture) -> dict[str, int]:
    """Weight elements of each linear layer of one block, by its name in the plan."""
    a = architecture
    sizes = (
        a.width * a.qkv_width,
        a.attention_width * a.width,
        2 * a.width * a.ffn_width,
        a.ffn_width * a.width,
    )
    return dict(zip(GEMM_NAMES, sizes, strict=True))


def ideal_seconds_per_token(
    architecture: Architecture,
    sequence: int,
    gemm_formats: Mapping[str, Mapping[str, str]],
    peaks: Peaks,
) -> float:
    """Seconds per token at the speed of light.

    Args:
        gemm_formats: layer name (``blocks.0.mlp.down``, ``head``) to the format of each of its
            three GEMMs (``fprop``, ``dgrad``, ``wgrad``).
    """
    flops = count_flops(architecture, sequence)
    sizes = gemm_parameters(architecture)
    seconds = 0.0
    for layer, formats in gemm_formats.items():
        size = architecture.head_parameters if layer == "head" else sizes[layer.split(".", 2)[2]]
        seconds += sum(2.0 * size / peaks[formats[gemm]] for gemm in ("fprop", "dgrad", "wgrad"))
    head = gemm_formats.get("head", {"fprop": "bf16"})
    attention_format = "fp32" if head["fprop"] == "fp32" else "bf16"
    return seconds + flops.attention_causal / peaks[attention_format]


def mfu(flops_per_token: float, tokens_per_s: float, peaks: Peaks) -> float:
    """Model FLOP utilisation as a share (1.0 is the BF16 peak of the device)."""
    return flops_per_token * tokens_per_s / peaks["bf16"]
