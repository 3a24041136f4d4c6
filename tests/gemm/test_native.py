"""torch's kernels: numbers against float64 where a CPU has them, else calls against the rules of ScaledBlas.cpp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from triton_cases import DEVICE

from scrimp.errors import DeviceError, PlanError
from scrimp.formats import Noise, quantize
from scrimp.formats.codes import decode
from scrimp.gemm.backends import ReferenceBackend, TorchBackend, native
from scrimp.gemm.backends.operands import GROUPS
from scrimp.gemm.problem import AXES, Shape, Use, operands_of
from scrimp.precision import GEMMS, RECIPES, GemmRecipe, Operand, Recipe, lookup_element

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKEND, REFERENCE = TorchBackend(), ReferenceBackend()


def operands(gemm: str, recipe: str, m: int, n: int, k: int) -> list[tuple[Tensor, Use]]:
    generator = torch.Generator().manual_seed(3)
    result = []
    for rows, use_axis, operand in zip((m, n), AXES[gemm], operands_of(gemm, recipe), strict=True):
        x = torch.randn(rows, k, generator=generator) * torch.exp2(torch.randint(-6, 7, (rows, 1)).float())
        x = x if use_axis == -1 else x.T.contiguous()
        result.append((x, Use(operand, use_axis, Noise(len(result) + 1))))
    return result


def true_values(x: Tensor, use: Use) -> Tensor:
    """float64 [rows, K] of what an operand rounds to."""
    o = use.operand
    assert o is not None
    assert not o.hadamard
    found = quantize(x, o.element, o.scaling, use.axis, o.rounding, noise=use.noise)
    values = found.dequantize(torch.float64)
    return values if use.axis == -1 else values.T


def prepared(
    gemm: str, recipe: str, m: int, n: int, k: int, device: str = "cpu"
) -> tuple[Any, Any, Tensor, Tensor]:
    (a, a_use), (b, b_use) = operands(gemm, recipe, m, n, k)
    left, right = true_values(a, a_use).to(device), true_values(b, b_use).to(device)
    return BACKEND.prepare(a.to(device), a_use), BACKEND.prepare(b.to(device), b_use), left, right


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_row"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_on_a_cpu_is_within_the_error_of_its_sums(gemm: str, recipe: str, out: torch.dtype) -> None:
    a, b, left, right = prepared(gemm, recipe, 24, 32, 48)
    y = BACKEND.multiply(gemm, a, b, out)
    unit = 50 * 2.0**-24 + (2.0**-8 if out == torch.bfloat16 else 0)
    assert y.dtype == out
    assert bool(((y.double() - left @ right.T).abs() <= unit * (left.abs() @ right.abs().T)).all())


def test_only_fprop_accumulates_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def record(a: Tensor, b: Tensor, *scales: Tensor, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
        seen.append(use_fast_accum)
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    for gemm in GEMMS:
        a, b, *_ = prepared(gemm, "fp8_tensor", 16, 16, 16)
        BACKEND.multiply(gemm, a, b, torch.float32)
    assert seen == [True, False, False]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize(
    ("gemm", "shape", "words"),
    [
        ("fprop", Shape(16, 16, 24), "K must be a multiple of 16"),
        ("wgrad", Shape(16, 24, 16), "N must be a multiple of 16"),
    ],
)
def test_a_cpu_refuses_the_shapes_that_a_gpu_refuses(
    device: torch.device, gemm: str, shape: Shape, words: str
) -> None:
    assert words in (BACKEND.refusal(gemm, "fp8_tensor", shape, device) or "")
    assert BACKEND.refusal(gemm, "fp8_tensor", Shape(3, 16, 16), device) is None
    assert BACKEND.refusal(gemm, "fp8_tensor", None, device) is None


def test_tiles_need_128_along_k_and_groups_32() -> None:
    assert "128" in (BACKEND.refusal("fprop", "fp8", Shape(16, 16, 64), CUDA) or "")
    assert BACKEND.refusal("fprop", "fp8", Shape(3, 16, 128), CUDA) is None
    assert "32" in (BACKEND.refusal("fprop", "nvfp4", Shape(16, 16, 48), CUDA) or "")
    assert BACKEND.refusal("fprop", "mxfp8", Shape(16, 16, 64), CUDA) is None


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_pairs_without_a_kernel_are_refused_everywhere(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    pairs = {
        "E5M2 by E5M2": (Operand("e5m2", "tensor"), Operand("e5m2", "tensor")),
        "tensor by row": (Operand("e4m3", "tensor"), Operand("e4m3", "row")),
        "block by block": (Operand("e4m3", "block"), Operand("e4m3", "block")),
        "INT8 codes with tile": (Operand("int8", "tile"), Operand("int8", "block")),
        "E2M1 codes with tile": (Operand("e2m1", "tile"), Operand("e2m1", "tile")),
        "e4m3 by e2m1": (Operand("e4m3", "mx"), Operand("e2m1", "mx")),
    }
    for words, pair in pairs.items():
        entry = GemmRecipe(*pair)
        monkeypatch.setitem(RECIPES, "odd", Recipe("odd", entry, entry, entry, 8, ""))
        assert words in (BACKEND.refusal("fprop", "odd", None, device) or ""), words


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4", "mxfp4"])
def test_a_cpu_has_no_kernel_for_groups(recipe: str) -> None:
    assert "CPU" in (BACKEND.refusal("fprop", recipe, None, CPU) or "")
    assert BACKEND.refusal("fprop", recipe, None, CUDA) is None
    assert "mps" in (BACKEND.refusal("fprop", recipe, None, torch.device("mps")) or "")


def test_a_refused_shape_never_reaches_the_kernel() -> None:
    a, b, *_ = prepared("fprop", "fp8_tensor", 16, 24, 16)
    with pytest.raises(PlanError, match="N must be a multiple of 16"):
        BACKEND.multiply("fprop", a, b, torch.float32)


def test_operands_on_two_devices_are_refused() -> None:
    a, b, *_ = prepared("fprop", "fp8_tensor", 16, 16, 16)
    elsewhere = native._Codes(b.payload.to("meta"), b.scales.to("meta"), None, b.operand, b.k)
    with pytest.raises(DeviceError, match="different devices"):
        BACKEND.multiply("fprop", a, elsewhere, torch.float32)


# -- calls of kernels that are not here, against a stand-in that checks as torch does -----------


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Element by element as cuBLAS's manual has it: offset (r % 32) 16 + (r % 128 / 32) 4 + c % 4 in its tile."""
    codes, out = scales.view(torch.uint8), torch.empty(rows, columns, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * ceil(columns, 4) + c // 4
            out[r, c] = codes[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4]
    return out


def kernel(
    a: Tensor,
    b: Tensor,
    scale_a: Any,
    kind_a: Any,
    scale_b: Any,
    kind_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    *,
    output_dtype: torch.dtype,
) -> Tensor:
    """F.scaled_mm with the checks of ScaledBlas.cpp, in float64."""
    assert a.is_contiguous()
    assert b.stride()[0] == 1
    assert b.stride()[1] == b.shape[0]
    sides = []
    for codes, scale, kind, order, is_b in (
        (a, scale_a, kind_a, swizzle_a, False),
        (b.t(), scale_b, kind_b, swizzle_b, True),
    ):
        rows, k = codes.shape
        if codes.dtype == torch.float4_e2m1fn_x2:
            k *= 2
            values = decode(codes.view(torch.uint8), lookup_element("e2m1"), k)
        else:
            values = codes.float()
        assert k % 16 == 0
        assert not is_b or rows % 16 == 0
        if kind == ScalingType.BlockWise1x128:
            assert rows % 4 == 0 or is_b
            assert tuple(scale.shape) == (rows, ceil(k, 128))
            assert scale.stride(0) == 1
            assert scale.stride(1) == rows
            spread = scale.repeat_interleave(128, 1)
        elif kind == ScalingType.BlockWise128x128:
            padded = ceil(ceil(k, 128), 4) * 4
            assert tuple(scale.shape) == (padded, ceil(rows, 128))
            assert scale.stride(0) == 1
            assert scale.stride(1) == padded
            spread = scale.t().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
        else:
            spread = group_scales(scale, kind, order, rows, k)
        sides.append(values.double() * spread[:, :k].double())
    return (sides[0] @ sides[1].T).to(output_dtype)


def group_scales(scale: Any, kind: Any, order: Any, rows: int, k: int) -> Tensor:
    whole, size = 1.0, 32
    if isinstance(kind, list):
        assert kind == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        assert order == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        (scale, whole), size = scale, 16
    else:
        assert (kind, order) == (ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4)
        assert scale.dtype == torch.float8_e8m0fnu
    groups = ceil(k, size)
    assert scale.is_contiguous()
    assert scale.numel() == ceil(rows, 128) * 128 * ceil(groups, 4) * 4
    found = unswizzled(scale, rows, groups).view(scale.dtype).float() * whole
    return found.repeat_interleave(size, 1)


def unrotated(monkeypatch: pytest.MonkeyPatch, recipe: str, gemm: str) -> None:
    """NVFP4's wgrad as its fprop: of rotated operands the product is that of other numbers."""
    if recipe == "nvfp4" and gemm == "wgrad":
        entry = RECIPES["nvfp4"].fprop
        monkeypatch.setitem(RECIPES, "nvfp4", Recipe("nvfp4", entry, entry, entry, 4, ""))


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("sizes", [(70, 144, 640), (1, 16, 128)], ids=str)
def test_codes_and_scales_lie_as_torchs_kernels_demand(
    monkeypatch: pytest.MonkeyPatch, gemm: str, recipe: str, sizes: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(native.F, "scaled_mm", kernel)
    unrotated(monkeypatch, recipe, gemm)
    a, b, left, right = prepared(gemm, recipe, *sizes)
    product = native._PRODUCTS[native._FAMILIES[a.operand.scaling]]
    y = product(gemm, a, b, torch.float32).double()
    expected = left @ right.T
    # MXFP4's kernel gives bf16; the stand-in's own arithmetic is float64.
    unit = 2.0**-8 if recipe == "mxfp4" else 2.0**-22
    assert bool(((y - expected).abs() <= unit * (left.abs() @ right.abs().T)).all())


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.every(5)
def test_codes_of_tritons_quantizers_serve_torchs_kernels(
    monkeypatch: pytest.MonkeyPatch, gemm: str, recipe: str
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(native.F, "scaled_mm", kernel)
    monkeypatch.setattr(native, "_is_on_gpu", lambda x: True)
    unrotated(monkeypatch, recipe, gemm)
    a, b, left, right = prepared(gemm, recipe, 70, 144, 256, DEVICE)
    assert a.is_swizzled == b.is_swizzled == (recipe != "fp8")
    y = native._PRODUCTS[native._FAMILIES[a.operand.scaling]](gemm, a, b, torch.float32).double()
    unit = 2.0**-8 if recipe == "mxfp4" else 2.0**-22
    assert bool(((y - left @ right.T).abs() <= unit * (left.abs() @ right.abs().T)).all())


@pytest.mark.parametrize("scaling", ["tile", "row", "tensor", "mx", "nvfp4"])
@pytest.mark.every(4)
def test_one_call_gives_both_operands_and_stored_codes(monkeypatch: pytest.MonkeyPatch, scaling: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    x = torch.randn(70, 144, device=DEVICE)
    element = "e2m1" if scaling == "nvfp4" else "e4m3"
    uses = [Use(Operand(element, scaling), axis, Noise(1)) for axis in (-1, -2)]
    alone = [BACKEND.load(REFERENCE.store(x, use)) for use in uses]
    monkeypatch.setattr(native, "_has_kernel", lambda x, use: True)
    first, codes = BACKEND.prepare_and_store(x, *uses)
    for ours, theirs in zip(
        (*BACKEND.prepare_pair(x, *uses), first, BACKEND.load(codes)), alone * 2, strict=True
    ):
        assert isinstance(ours, native._Codes)
        assert isinstance(theirs, native._Codes)
        assert (ours.k, ours.operand) == (theirs.k, theirs.operand)
        assert torch.equal(ours.payload.view(torch.uint8), theirs.payload.view(torch.uint8))
        scales = [native._swizzled(one) if scaling in GROUPS else one.scales for one in (ours, theirs)]
        assert torch.equal(*(one.float() for one in scales))
        assert scaling != "nvfp4" or torch.equal(ours.tensor_scale, theirs.tensor_scale)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_row"])
@pytest.mark.every(2)
def test_scales_of_rows_and_tensors_are_the_same_by_triton(
    monkeypatch: pytest.MonkeyPatch, gemm: str, recipe: str
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    cases = [(x.to(DEVICE), use) for x, use in operands(gemm, recipe, 24, 32, 48)]
    a, b = (BACKEND.load(REFERENCE.store(x, use)) for x, use in cases)
    expected = BACKEND.multiply(gemm, a, b, torch.bfloat16)
    monkeypatch.setattr(native, "_has_kernel", lambda x, use: True)
    a, b = (BACKEND.prepare(x, use) for x, use in cases)
    assert torch.equal(BACKEND.multiply(gemm, a, b, torch.bfloat16), expected)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_a_maximum_over_ranks_is_the_references(monkeypatch: pytest.MonkeyPatch, scaling: str) -> None:
    """No kernel asks the other ranks: of two uses the one that does is made alone."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(native, "_is_on_gpu", lambda x: True)
    x = torch.randn(24, 32, device=DEVICE)
    alone = Use(Operand("e4m3", scaling), -1, Noise())
    shared = Use(Operand("e4m3", scaling), -2, Noise(), lambda amax: amax.fill_(448.0))
    assert BACKEND.prepare_pair(x, alone, shared) is None
    _, codes = BACKEND.prepare_and_store(x, alone, shared)
    assert bool((codes.scales == 1).all())
    assert bool((BACKEND.prepare(x, shared).scales == 1).all())


def test_a_maximum_over_ranks_is_taken_before_groups_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    x, operand = torch.randn(24, 32, device=DEVICE), Operand("e2m1", "nvfp4")
    uses = [Use(operand, axis, Noise(), lambda amax: amax.fill_(100.0)) for axis in (-1, -2)]
    expected = [BACKEND.load(REFERENCE.store(x, use)) for use in uses]
    monkeypatch.setattr(native, "_is_on_gpu", lambda x: True)
    for ours, theirs in zip(BACKEND.prepare_pair(x, *uses), expected, strict=True):
        assert torch.equal(ours.payload, theirs.payload)
        assert float(ours.tensor_scale) == float(theirs.tensor_scale) == pytest.approx(100 / 2688)


def test_four_over_six_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(native, "_is_on_gpu", lambda x: True)
    x, use = (
        torch.randn(16, 64, device=DEVICE),
        Use(Operand("e2m1", "nvfp4", four_over_six=True), -1, Noise()),
    )
    expected = REFERENCE.store(x, use)
    assert torch.equal(BACKEND.store(x, use).payload, expected.payload)
    assert torch.equal(BACKEND.prepare(x, use).payload, expected.payload)


@pytest.mark.parametrize("size", [(1, 1), (128, 4), (130, 5), (300, 9)], ids=str)
def test_the_swizzle_is_torchaos(size: tuple[int, int]) -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils", reason="torchao is not installed")
    scales = torch.randint(0, 255, size, dtype=torch.uint8)
    expected = utils.to_blocked(scales, use_triton_kernel=False).flatten()
    assert torch.equal(native.swizzle(scales), expected)
    assert torch.equal(unswizzled(native.swizzle(scales), *size), scales)
