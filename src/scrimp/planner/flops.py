"""FLOPs per token, model FLOP utilisation and the speed of light: the one place they are counted.

Problem  A rate in tokens per second says nothing about how well a device is used. Two figures
         do, and they answer different questions.
Method   Matrices cost 2 FLOPs per weight and token forward, 4 backward; the embedding look-up
         costs none. With N_mm = all block matrices (of routed experts those that a token meets)
         + the LM head once (tied or not), A the attention width, s the sequence and L the layers,
         all of them from the model's specification (`scrimp.models`), per trained token::

             full    6 N_mm + 12 L A s       (PaLM, TorchTitan)
             causal  6 N_mm +  6 L A s       (Megatron-Bridge, LLMQ): half the scores are masked

         Of frozen weights beside adapters (`ModelSpec.gemms`) each GEMM that runs counts 2 N alone; adapters, of
         N_a elements, count 6 N_a.
         A sliding window w < s replaces s by w (full) and s/2 by w - w^2 / 2s (causal), in the
         blocks that have one.
         MFU is causal FLOPs per second over the device's BF16 peak. The speed of light (SOL)
         is ideal time over measured time, where the ideal runs every GEMM at the peak of the
         recipe that it has in the plan, and attention at the peak of the compute format::

             ideal = sum over GEMM groups of FLOP / peak(recipe)

         A recipe runs at the best rate that the device has of those that can run its products::

             fp32 scales (fp8, fp8_tensor, fp8_row, fp4)    fp8, bf16
             the same, of integers (int8 and its kin)       int8, bf16
             scales of small blocks (mxfp8)                 fp8 beside fp4 units, bf16
             the same, of 4-bit elements (mxfp4, nvfp4)     fp4, bf16

         No unit multiplies E2M1 under fp32 tile scales, but every E2M1 value is exact in E4M3. Scales of
         small blocks are applied by units that came with FP4's (Blackwell); code times scale is exact
         in bf16, so other devices run them as bf16 products.

Limits   No credit for recomputation, none for tokens that a document mask hides: both would
         make a slower program look better. int8_fallback counts each product once: no shape says how
         much falls back. Under FP8 or FP4 the BF16 MFU may pass 80 %, and
         SOL falls: print both.
Sources  PaLM (arXiv 2204.02311) appendix B; LLMQ's speed-of-light definition.
Checked  tests/planner/test_flops.py: published GFLOP per token, and torch's own FLOP counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scrimp.errors import PlanError
from scrimp.models import HEAD, ModelSpec
from scrimp.precision import RECIPES, LinearPrecision, lookup_scaling, recipe

_WIDTHS = ("fp32", "bf16", "int8", "fp8", "fp4")


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
    """Width (fp32, bf16, int8, fp8, fp4) to dense FLOP/s; only those that the device has units for."""
    origin: str
    """'spec sheet of ...' or 'measured here ...'."""

    def __getitem__(self, fmt: str) -> float:
        try:
            return self.flops_per_s[fmt]
        except KeyError:
            known = ", ".join(sorted(self.flops_per_s))
            raise PlanError(f"no peak rate is known for {fmt}", got=fmt, expected=known) from None

    @property
    def description(self) -> str:
        """The origin, the native widths, and the recipes that count at another rate than that of their width."""
        native = "native " + " ".join(width for width in _WIDTHS if width in self.flops_per_s)
        others: dict[str, list[str]] = {}
        for name, entry in RECIPES.items():
            rate = rate_of_recipe(self, name)
            if entry.fprop is not None and rate not in (f"fp{entry.bits}", entry.fprop.a.element):
                others.setdefault(rate, []).append(name)
        emulated = [f"{' '.join(names)} at the {rate} rate" for rate, names in others.items()]
        return f"{self.origin}; {', '.join([native, *emulated])}"


def rate_of_recipe(peaks: Peaks, name: str) -> str:
    """The width (fp32, bf16, int8, fp8, fp4) whose peak a GEMM in a recipe can reach; see the module."""
    entry = recipe(name)
    if entry.fprop is None:
        return name
    scalings = [lookup_scaling(operand.scaling) for operand in (entry.fprop.a, entry.fprop.b)]
    if entry.fprop.a.element == "int8":
        rate = needed = "int8"
    elif all(scaling.scale_type == "fp32" for scaling in scalings):
        rate = needed = "fp8"
    else:
        rate, needed = f"fp{entry.bits}", "fp4"
    return rate if needed in peaks.flops_per_s else "bf16"


def peak_of_recipe(peaks: Peaks, name: str) -> float:
    """FLOP/s at best of a GEMM in a recipe.

    Raises:
        PlanError: an unknown recipe, or a device without a rate for fp32 or bf16.
    """
    return peaks[rate_of_recipe(peaks, name)]


def count_flops(spec: ModelSpec, sequence: int) -> Flops:
    """FLOPs per trained token of a model at one sequence length (tokens)."""
    causal, full = 0.0, 0.0
    for block, count in spec.equal_blocks.items():
        causal_keys, all_keys = block.attention.keys(sequence)
        per_key = 12.0 * count * block.attention.width
        causal += per_key * causal_keys
        full += per_key * all_keys
    matrices, head = _of_matrices(spec)
    return Flops(
        blocks=matrices,
        head=head,
        attention_causal=causal,
        attention_full=full,
    )


def _of_matrices(spec: ModelSpec) -> tuple[float, float]:
    """FLOPs per token of the blocks' matrices, and of the head."""
    if spec.architecture.adapter is None:
        blocks = sum(count * block.parameters_per_token for block, count in spec.equal_blocks.items())
        return 6.0 * blocks, 6.0 * spec.head.parameters
    found = dict.fromkeys((HEAD, ""), 0.0)
    for layer, linear in spec.layers().items():
        found[HEAD if layer == HEAD else ""] += 2.0 * len(spec.gemms[layer]) * linear.parameters_per_token
    return found[""] + 6.0 * spec.adapter_parameters, found[HEAD]


def ideal_seconds_per_token(
    spec: ModelSpec,
    sequence: int,
    gemms: Mapping[str, LinearPrecision],
    peaks: Peaks,
    compute: str | None = None,
) -> float:
    """Seconds per token at the speed of light.

    Args:
        gemms: layer name (``blocks.0.mlp.down``, ``head``) to its formats, as in a plan.
        compute: working format, which attention and adapters run in: fp32 or bf16. None: fp32 where the head's
            fprop is, as in every plan whose rules leave the head alone.
    """
    flops = count_flops(spec, sequence)
    seconds = 0.0
    for layer, formats in gemms.items():
        size = 2.0 * spec.linear(layer).parameters_per_token
        ran = (formats.gemm(gemm) for gemm in spec.gemms[layer])
        seconds += sum(size / peak_of_recipe(peaks, recipe) for recipe in ran)
    head = gemms.get(HEAD, LinearPrecision.of("bf16"))
    working = compute or ("fp32" if head.fprop == "fp32" else "bf16")
    return seconds + (flops.attention_causal + 6.0 * spec.adapter_parameters) / peaks[working]


def mfu(flops_per_token: float, tokens_per_s: float, peaks: Peaks) -> float:
    """Model FLOP utilisation as a share (1.0 is the BF16 peak of the device)."""
    return flops_per_token * tokens_per_s / peaks["bf16"]
