"""Fused kernels: values within one unit of the eager functions, codes exactly those of the values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import DEVICE, assert_same_codes

from scrimp.errors import PlanError
from scrimp.formats import quantize
from scrimp.gemm.kernels import bytes_moved, rms_norm_quantize, swiglu_quantize
from scrimp.models.functions import swiglu

TYPES = (torch.bfloat16, torch.float32)


def bfloat16_distance(ours: Tensor, theirs: Tensor) -> int:
    """Most units in the last place between two bfloat16 tensors."""
    ordered = []
    for x in (ours, theirs):
        bits = x.cpu().bfloat16().view(torch.int16).int()
        ordered.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return int((ordered[0] - ordered[1]).abs().max())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("by_column", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_norms_codes_are_those_of_its_bfloat16_values(
    dtype: torch.dtype, weight_type: torch.dtype, by_column: bool
) -> None:
    x = (normal(140, 200) * torch.exp2(normal(140, 1, seed=1) * 4)).to(dtype)
    x[7] = 0
    weight = (1 + normal(200, seed=2) / 4).to(weight_type)
    done = rms_norm_quantize(
        x.to(DEVICE), weight.to(DEVICE), 1e-5, "e4m3", by_column=by_column, keep_values=True
    )
    assert done.row is not None
    assert done.values is not None
    assert done.rstd is not None
    values = done.values.cpu()
    eager = F.rms_norm(x.double(), (200,), weight.double(), 1e-5)
    assert bfloat16_distance(values, eager.bfloat16()) <= 1
    assert float((values != eager.bfloat16()).float().mean()) < 0.001
    rstd = (x.double().square().mean(1) + 1e-5).rsqrt()
    torch.testing.assert_close(done.rstd.cpu().double(), rstd, rtol=2**-21, atol=0)
    assert_same_codes(done.row.codes, done.row.scales, quantize(values, "e4m3", "tile", -1))
    assert (done.column is not None) == by_column
    if done.column is not None:
        assert_same_codes(done.column.codes, done.column.scales, quantize(values, "e4m3", "tile", -2))


@pytest.mark.parametrize("element", ["e2m1", "e4m3"])
@pytest.mark.parametrize("dtype", TYPES)
def test_swiglus_codes_are_those_of_its_values(dtype: torch.dtype, element: str) -> None:
    gate_up = (normal(140, 400) * 3).to(dtype)
    gate_up[3, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    done = swiglu_quantize(gate_up.to(DEVICE), element, keep_values=True)
    assert done.row is not None
    assert done.column is not None
    assert done.values is not None
    values, eager = done.values.cpu(), swiglu(gate_up)
    assert values.dtype == eager.dtype
    if dtype == torch.bfloat16:
        assert bfloat16_distance(values, eager) <= 1
        assert float((values != eager).float().mean()) < 0.001
    else:
        torch.testing.assert_close(values, eager, rtol=2**-20, atol=1e-37)
    assert_same_codes(done.row.codes, done.row.scales, quantize(values, element, "tile", -1))
    assert_same_codes(done.column.codes, done.column.scales, quantize(values, element, "tile", -2))


def test_swiglu_rounds_silu_to_bfloat16_before_the_product_as_eager_code_does() -> None:
    gate_up = torch.cat([normal(64, 128), normal(64, 128, seed=1)], 1).bfloat16()
    done = swiglu_quantize(gate_up.to(DEVICE), "e4m3", by_column=False, keep_values=True)
    gate, up = gate_up.double().chunk(2, -1)
    once = (F.silu(gate) * up).bfloat16()
    twice = (F.silu(gate).bfloat16().double() * up).bfloat16()
    assert done.values is not None
    values = done.values.cpu()
    assert int((values != twice).sum()) * 20 < int((values != once).sum())


def test_values_and_tiles_that_nobody_asked_for_are_not_made() -> None:
    x, weight = torch.ones(4, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    normed = rms_norm_quantize(x, weight, 0.0, "e4m3")
    assert (normed.column, normed.values) == (None, None)
    gated = swiglu_quantize(x, "e4m3", by_row=False)
    assert (gated.row, gated.values, gated.rstd) == (None, None, None)


def test_the_floor_of_memory_traffic_counts_the_activation_only_where_it_is_kept() -> None:
    gate_up = normal(130, 400).bfloat16().to(DEVICE)
    done = swiglu_quantize(gate_up, "e4m3", keep_values=True)
    assert done.row is not None
    assert done.column is not None
    assert done.values is not None
    tiles = (gate_up, done.row.codes, done.row.scales, done.column.codes, done.column.scales)
    floor = sum(tensor.nbytes for tensor in tiles)
    assert bytes_moved("swiglu_quantize", 130, 200, 2) == floor
    assert bytes_moved("swiglu_quantize", 130, 200, 2, keep_values=True) == floor + done.values.nbytes
    x, weight = normal(130, 200).bfloat16().to(DEVICE), torch.ones(200, device=DEVICE)
    normed = rms_norm_quantize(x, weight, 1e-6, "e4m3")
    assert normed.row is not None
    assert normed.rstd is not None
    tensors = (x, weight, normed.row.codes, normed.row.scales, normed.rstd)
    assert bytes_moved("rms_norm_quantize", 130, 200, 2) == sum(tensor.nbytes for tensor in tensors)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    x = torch.ones(4, 7, device=DEVICE)
    with pytest.raises(PlanError, match="weight does not fit"):
        rms_norm_quantize(x, torch.ones(6, device=DEVICE), 1e-6, "e4m3")
    with pytest.raises(PlanError, match="weight does not fit"):
        rms_norm_quantize(x, torch.ones(7, dtype=torch.float64, device=DEVICE), 1e-6, "e4m3")
    with pytest.raises(PlanError, match="float64"):
        rms_norm_quantize(x.double(), torch.ones(7, device=DEVICE), 1e-6, "e4m3")
    with pytest.raises(PlanError, match="differ in width"):
        swiglu_quantize(x, "e4m3")
    with pytest.raises(PlanError, match="nothing to quantize"):
        swiglu_quantize(x[:, :6].contiguous(), "e4m3", by_row=False, by_column=False)
