"""FLOP counts against published figures and against torch's own counter."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scrimp.config import Architecture, preset
from scrimp.errors import PlanError
from scrimp.models import spec_of
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.planner import Peaks, count_flops, ideal_seconds_per_token, mfu, peak_of_recipe
from scrimp.precision import RECIPES, LinearPrecision

SMALL = Architecture(
    family="llama",
    vocab_size=96,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_width=64,
    context=64,
)


@pytest.mark.parametrize(
    ("name", "sequence", "gigaflops"),
    [
        ("qwen2.5-0.5b", 1024, 3.10),
        ("qwen2.5-1.5b", 1024, 9.53),
        ("qwen2.5-3b", 1024, 18.97),
        ("qwen2.5-7b", 1024, 43.04),
        ("llama-3.2-1b", 2048, 7.82),
        ("llama-3.2-1b", 8192, 9.03),
        ("llama-3-8b", 4096, 48.2),
    ],
)
def test_causal_flops_equal_the_published_figures(name: str, sequence: int, gigaflops: float) -> None:
    assert count_flops(spec_of(preset(name)), sequence).causal / 1e9 == pytest.approx(gigaflops, rel=2e-3)


OLMO2 = replace(SMALL, family="olmo2", qk_norm=True)
GEMMA3 = replace(SMALL, family="gemma3_text", qk_norm=True, sliding_window=16, options=(("full_every", 2.0),))


@pytest.mark.parametrize("architecture", [SMALL, OLMO2, GEMMA3], ids=lambda a: a.family)
def test_matrix_flops_equal_torchs_counter(architecture: Architecture) -> None:
    model = build_model(architecture)
    initialise(model, 0)
    tokens = torch.arange(32).view(1, 32)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(tokens)).sum().backward()
    products = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm")
    )
    flops = count_flops(spec_of(architecture), 32)
    assert products == 32 * (flops.blocks + flops.head)


def test_a_window_costs_what_a_count_of_the_pairs_says() -> None:
    windowed = Architecture(**{**SMALL.__dict__, "sliding_window": 16})
    pairs = sum(min(query + 1, 16) for query in range(64))
    counted = 12 * SMALL.num_layers * SMALL.attention_width * pairs / 64
    # The convention counts half of the diagonal, as the causal form of the whole sequence does.
    assert count_flops(spec_of(windowed), 64).attention_causal == pytest.approx(counted, rel=0.05)
    assert (
        count_flops(spec_of(windowed), 8).attention_causal == count_flops(spec_of(SMALL), 8).attention_causal
    )


def test_windows_count_in_the_blocks_that_have_one() -> None:
    windowed, full = (
        count_flops(spec_of(replace(SMALL, sliding_window=window)), 64) for window in (16, None)
    )
    mixed = count_flops(spec_of(GEMMA3), 64)
    assert mixed.attention_causal == (windowed.attention_causal + full.attention_causal) / 2
    assert mixed.attention_full == (windowed.attention_full + full.attention_full) / 2


def test_speed_of_light_weighs_every_gemm_by_its_format() -> None:
    layers = spec_of(SMALL).layers()
    peaks = Peaks({"fp32": 1e9, "bf16": 2e9}, "test")
    slow = dict.fromkeys(layers, LinearPrecision.of("fp32"))
    fast = dict.fromkeys(layers, LinearPrecision.of("bf16"))
    flops = count_flops(spec_of(SMALL), 32)
    assert ideal_seconds_per_token(spec_of(SMALL), 32, slow, peaks) == pytest.approx(flops.causal / 1e9)
    assert ideal_seconds_per_token(spec_of(SMALL), 32, fast, peaks) == pytest.approx(flops.causal / 2e9)
    mixed = fast | {"blocks.1.mlp.down": LinearPrecision("bf16", "bf16", "fp32", "bf16")}
    extra = 2 * SMALL.width * SMALL.ffn_width / 2e9
    assert ideal_seconds_per_token(spec_of(SMALL), 32, mixed, peaks) == pytest.approx(
        flops.causal / 2e9 + extra
    )


def test_mfu_is_a_share_of_the_bf16_peak() -> None:
    assert mfu(43.04e9, 13_850, Peaks({"bf16": 989.4e12}, "H100")) == pytest.approx(0.6025, abs=1e-3)


def test_an_unknown_format_has_no_peak() -> None:
    with pytest.raises(PlanError, match="fp4"):
        Peaks({"bf16": 1.0}, "test")["fp4"]


A100 = Peaks({"fp32": 1.0, "bf16": 16.0, "int8": 32.0}, "A100")
H100 = Peaks({"fp32": 1.0, "bf16": 16.0, "fp8": 32.0}, "H100")
B200 = Peaks({"fp32": 1.0, "bf16": 16.0, "fp8": 32.0, "fp4": 64.0}, "B200")


@pytest.mark.parametrize(
    ("recipe", "a100", "h100", "b200"),
    [
        ("fp32", 1, 1, 1),
        ("bf16", 16, 16, 16),
        ("fp8", 16, 32, 32),
        ("fp8_tensor", 16, 32, 32),
        ("fp8_row", 16, 32, 32),
        # E2M1 is exact in E4M3, but no unit multiplies it under fp32 tile scales.
        ("fp4", 16, 32, 32),
        # Scales of small blocks: Blackwell's units, else products of bf16 values.
        ("mxfp8", 16, 16, 32),
        # Units for integers, where they are known.
        ("int8", 32, 16, 16),
        ("int8_fallback", 32, 16, 16),
        ("int8_hadamard", 32, 16, 16),
        ("nvfp4", 16, 16, 64),
        ("mxfp4", 16, 16, 64),
    ],
)
def test_a_recipe_runs_at_the_rate_of_units_that_apply_its_scales(recipe, a100, h100, b200) -> None:
    assert [peak_of_recipe(peaks, recipe) for peaks in (A100, H100, B200)] == [a100, h100, b200]


def test_every_recipe_has_a_speed_of_light() -> None:
    flops = count_flops(spec_of(SMALL), 32)
    for name in RECIPES:
        gemms = dict.fromkeys(spec_of(SMALL).layers(), LinearPrecision.of(name))
        rate = {"fp32": 1, "fp8": 32, "fp8_tensor": 32, "fp8_row": 32, "fp4": 32}.get(name, 16)
        expected = (flops.blocks + flops.head) / rate + flops.attention_causal / (1 if name == "fp32" else 16)
        assert ideal_seconds_per_token(spec_of(SMALL), 32, gemms, H100) == pytest.approx(expected)


def test_attention_runs_in_the_compute_format_whatever_the_head_does() -> None:
    gemms = dict.fromkeys(spec_of(SMALL).layers(), LinearPrecision.of("fp8"))
    fp32, bf16 = (
        ideal_seconds_per_token(spec_of(SMALL), 32, gemms, H100, compute) for compute in ("fp32", "bf16")
    )
    assert fp32 - bf16 == pytest.approx(count_flops(spec_of(SMALL), 32).attention_causal * (1 - 1 / 16))
