"""Two payloads of tiles with outliers: against numpy group by group, at the edge of the rule, and alone as together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from slow_oracle import Array, cast, f32, one_group
from torch import Tensor

from scrimp.formats import Operand, QuantizedTensor, fake_quantize, quantize

OPERAND = Operand("int8", "tile", fallback=True)


def of_group(x: Array) -> tuple[Array, float]:
    """A tile's values by the rule of the module, and the scale of its second payload."""
    values, scale = one_group(x, "int8", "tile", f32(1), None)
    codes = cast(x / f32(scale), "int8")
    if not 0 < np.abs(codes.astype(np.float64)).sum() < 1024:
        return values, 0.0
    left = x - values
    rest, rest_scale = one_group(left, "int8", "tile", f32(1), None)
    return values + rest, rest_scale if left.any() else 0.0


def slowly(x: Tensor) -> tuple[Array, Array]:
    """Values of a matrix in tiles along its columns, and the scales of second payloads."""
    numbers = x.numpy()
    values, scales = np.empty_like(numbers), np.empty((len(x), -(-x.shape[1] // 128)), np.float32)
    with np.errstate(invalid="ignore"):
        for row in range(len(x)):
            for group in range(scales.shape[1]):
                part = row, slice(group * 128, group * 128 + 128)
                values[part], scales[row, group] = of_group(numbers[part])
    return values, scales


def twice(x: Tensor, axis: int = -1) -> QuantizedTensor:
    found = quantize(x, "int8", "tile", axis, fallback=True)
    assert found.rest is not None
    return found


def scales_of_rest(x: Tensor) -> Tensor:
    rest = twice(x).rest
    assert rest is not None
    return rest.scales


@examples(40)
@given(
    st.integers(1, 20),
    st.sampled_from([1, 5, 127, 128, 129, 300]),
    st.sampled_from([2, 4, 9]),
    st.sampled_from([1.0, 1e-30, 1e-37, 1e-43, 1e30]),
    st.integers(0, 2**31),
)
def test_tiles_are_those_of_numpy(rows: int, columns: int, tail: int, size: float, seed: int) -> None:
    """Powers of normal numbers: the higher, the more outliers."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x = x.sign() * x.abs() ** tail * size
    values, scales = slowly(x)
    for axis, given_x in ((-1, x), (-2, x.T.contiguous())):
        ours = twice(given_x, axis)
        assert ours.rest is not None
        fake = fake_quantize(given_x, OPERAND, axis)
        carried = fake_quantize(given_x, OPERAND, axis, carrier=torch.bfloat16)
        for found in (ours, fake, carried):
            upright = found.dequantize() if axis == -1 else found.dequantize().T
            np.testing.assert_array_equal(upright.numpy(), values)
        np.testing.assert_array_equal(ours.rest.scales.numpy(), scales)
        assert (ours.rest.payload[ours.rest.scales.repeat_interleave(128, 1)[:, :columns] == 0] == 0).all()
        assert ours.nbytes == 2 * quantize(given_x, "int8", "tile", axis).nbytes


def test_a_tile_falls_back_below_a_mean_code_of_8() -> None:
    """Whole numbers under the scale 1 are their own codes, and a quarter more is left of each."""
    codes = torch.full((3, 128), 7.0)
    codes[:, 0] = 127
    codes[:, 1:9] = 8  # 127 + 8 * 8 + 119 * 7 = 1024
    codes[1, 9] = 6
    codes[2, 9:30] = -codes[2, 9:30]
    assert codes.abs().sum(1).tolist() == [1024, 1023, 1024]
    x = codes + 0.25 * (codes != 127)
    assert scales_of_rest(x).flatten().tolist() == [0, f32(0.25) / f32(127), 0]
    assert torch.equal(twice(x).dequantize()[1], x[1])
    assert torch.equal(twice(x).dequantize()[[0, 2]], codes[[0, 2]])
    exact = torch.zeros(1, 128)
    exact[0, :3] = torch.tensor([127.0, -3.0, 5.0])
    assert scales_of_rest(exact).item() == 0  # nothing is left


def test_numbers_beside_an_outlier_are_rounded_as_without_it() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    alone = (quantize(x, "int8", "tile").dequantize() - x).abs().mean()
    x[:, 5], x[:, 200] = 3e4, -1e3
    kept = x.abs() < 100
    errors = {
        fallback: (quantize(x, "int8", "tile", fallback=fallback).dequantize() - x).abs()[kept]
        for fallback in (False, True)
    }
    assert float(errors[False].mean()) > 0.75  # mean |x| is 0.8: hardly anything is left of them
    assert float(errors[True].mean()) < 1.2 * float(alone)
    # Half a step of what is left, the largest of which is half a step of the outlier or the largest of the others.
    assert float(errors[True].max()) <= float(x[kept].abs().max()) / 254 * 1.001


def test_normal_numbers_and_zeros_do_not_fall_back() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    x[7] = 0
    assert not scales_of_rest(x).any()
    assert torch.equal(twice(x).dequantize(), quantize(x, "int8", "tile").dequantize())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_poisons_its_tile_and_no_other(poison: float) -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    x[2, 0] = x[3, 256] = 1e4
    clean = twice(x).dequantize()
    x[2, 5] = poison
    ours = twice(x)
    assert ours.rest is not None
    assert ours.rest.scales.count_nonzero() == 1
    assert not ours.rest.scales.isnan().any()
    assert ours.rest.payload[2, :128].eq(0).all()
    for found in (ours.dequantize(), fake_quantize(x, OPERAND, -1, carrier=torch.bfloat16).dequantize()):
        assert found.isnan().nonzero().tolist() == [[2, column] for column in range(128)]
        assert torch.equal(found.nan_to_num(0), clean.where(~found.isnan(), 0))


def test_rows_decide_alone() -> None:
    x = torch.randn(50, 384, generator=torch.Generator().manual_seed(2)) ** 3
    whole = twice(x)
    assert whole.rest is not None
    assert 0.1 < float((whole.rest.scales > 0).float().mean()) < 0.9
    parts = torch.cat([twice(part).dequantize() for part in x.split([1, 20, 29])])
    columns = torch.cat([twice(part).dequantize() for part in x.split(128, 1)], 1)
    assert torch.equal(whole.dequantize(), parts)
    assert torch.equal(whole.dequantize(), columns)
    assert torch.equal(whole.of_rows(slice(3, 9)).dequantize(), whole.dequantize()[3:9])
