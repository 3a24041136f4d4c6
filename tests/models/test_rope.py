"""RoPE against rotations of complex numbers in float64, and against its defining property."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoder_reference import FAMILIES, LLAMA, _frequencies
from kernel_ways import BOTH, Way
from torch import Tensor

from scrimp.config.architecture import Architecture, RopeScaling
from scrimp.models import AttentionSpec, spec_of
from scrimp.models.rope import frequencies, rope_tables, rotate, rotate_into

ROPE = (spec_of(LLAMA).block(0).attention.rope, LLAMA.head_size)


def _angles(architecture: Architecture) -> Tensor:
    attends: AttentionSpec = spec_of(architecture).block(0).attention
    return frequencies(attends.rope, attends.head_size)


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen3"])
def test_frequencies_equal_the_formula_in_float64(family: str) -> None:
    architecture = FAMILIES[family]
    torch.testing.assert_close(_angles(architecture).double(), _frequencies(architecture), rtol=1e-6, atol=0)


def test_llama3_scaling_stretches_long_wavelengths_only() -> None:
    scaling = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain = replace(LLAMA, head_size=64, rope_theta=500_000.0)
    ratio = _angles(plain) / _angles(replace(plain, rope_scaling=scaling))
    assert ratio[0] == 1
    torch.testing.assert_close(ratio[-1], torch.tensor(32.0))
    assert bool((ratio.diff() >= 0).all())
    assert bool(((ratio > 1.01) & (ratio < 31.9)).any())


def test_scores_depend_on_distance_alone() -> None:
    tables = rope_tables(*ROPE, 0, 64, device=torch.device("cpu"))
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    turned_q, turned_k = (rotate(x.expand(1, 64, 1, 8), *tables)[0, :, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    for distance in (0, 3, 20):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_tables_of_a_later_start_are_the_end_of_the_tables_from_zero() -> None:
    cpu = torch.device("cpu")
    for whole, late in zip(
        rope_tables(*ROPE, 0, 30, device=cpu), rope_tables(*ROPE, 17, 30, device=cpu), strict=True
    ):
        assert torch.equal(whole[17:], late)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_into_a_buffer_equals_plain_rotation_and_back_undoes_it(dtype: torch.dtype, way: Way) -> None:
    tables = rope_tables(*ROPE, 0, 10, device=torch.device("cpu"))
    # Heads of a wider tensor, and tokens behind heads: neither lies in one piece.
    x = torch.randn(2, 10, 5, 8).to(dtype)[:, :, 1:4]
    turned, back = torch.empty(2, 3, 10, 8, dtype=dtype).transpose(1, 2), torch.empty_like(x)
    with way():
        rotate_into(turned, x, *tables)
        rotate_into(back, turned, *tables, back=True)
    torch.testing.assert_close(turned, rotate(x, *tables))
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.03)


def test_a_factor_divides_every_frequency() -> None:
    rope, size = ROPE
    assert torch.equal(frequencies(replace(rope, factor=8.0), size) * 8, frequencies(rope, size))


def test_tables_of_one_token_turn_all_as_operators_do() -> None:
    x, tables = torch.randn(2, 5, 3, 8), rope_tables(*ROPE, 3, 4, device=torch.device("cpu"))
    turned = torch.empty_like(x)
    rotate_into(turned, x, *tables)
    torch.testing.assert_close(turned, rotate(x, *tables))
    with pytest.raises(RuntimeError):
        rotate_into(turned, x, *rope_tables(*ROPE, 0, 4, device=torch.device("cpu")))
