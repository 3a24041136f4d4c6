"""Which weights could be gathered as codes: shards quantize as the whole does, and one copy serves fprop and dgrad."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scrimp.formats import Noise, QuantizedTensor, quantize
from scrimp.formats.quantize import AmaxReducer
from scrimp.gemm.backends import ReferenceBackend
from scrimp.gemm.problem import AXES, Use
from scrimp.precision.recipes import RECIPES, GemmRecipe

TYPES = (torch.float32, torch.bfloat16)
WHOLE = (512, 384)


def recipe_of(name: str, gemm: str) -> GemmRecipe:
    recipe = RECIPES[name].gemm(gemm)
    assert recipe is not None
    return recipe


def codes_of(weight: Tensor, name: str, gemm: str, reduce_amax: AmaxReducer | None = None) -> QuantizedTensor:
    operand = recipe_of(name, gemm).b
    return quantize(weight, operand.element, operand.scaling, AXES[gemm][1], reduce_amax=reduce_amax)


def bits(codes: QuantizedTensor) -> Tensor:
    """Codes in the weight's own layout."""
    return codes.payload.view(torch.uint8).movedim(-1, codes.axis)


def of_shards(weight: Tensor, name: str, rows: int) -> Tensor:
    top = weight.abs().max()

    def reduce(amax: Tensor) -> None:
        amax.copy_(torch.maximum(amax, top.to(amax.dtype)))

    reducer = reduce if name == "fp8_tensor" else None
    return torch.cat([bits(codes_of(shard, name, "dgrad", reducer)) for shard in weight.split(rows)])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["fp8", "fp8_tensor"])
def test_shards_of_whole_tiles_have_the_codes_of_the_whole_for_both_gemms(
    name: str, dtype: torch.dtype
) -> None:
    weight = torch.randn(WHOLE, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = bits(codes_of(weight, name, "fprop"))
    assert torch.equal(bits(codes_of(weight, name, "dgrad")), expected)
    assert torch.equal(of_shards(weight, name, 256), expected)


@pytest.mark.parametrize(("name", "rows"), [("fp8", 192), ("fp8_row", 256)])
def test_shards_that_cut_a_scale_have_other_codes(name: str, rows: int) -> None:
    weight = torch.randn(WHOLE, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(of_shards(weight, name, rows), bits(codes_of(weight, name, "dgrad")))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad"])
@pytest.mark.parametrize("name", ["fp8", "fp8_tensor"])
def test_the_reference_multiplies_codes_as_it_does_the_weight(
    name: str, gemm: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WHOLE, generator=generator).to(dtype)
    summed = WHOLE[AXES[gemm][1]]
    other = torch.randn(64, summed, generator=generator).to(dtype)
    recipe, backend = recipe_of(name, gemm), ReferenceBackend()
    a_axis, b_axis = AXES[gemm]
    left, right = Use(recipe.a, a_axis, Noise(), None), Use(recipe.b, b_axis, Noise(), None)
    a = backend.prepare(other, left)
    today = backend.multiply(gemm, a, backend.prepare(weight, right), dtype)
    loaded = backend.multiply(gemm, a, backend.load(codes_of(weight, name, gemm)), dtype)
    assert torch.equal(loaded, today)
