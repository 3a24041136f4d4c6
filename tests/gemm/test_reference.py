"""The reference back end against float64: what every recipe means, and how far it is from no quantization.

Two oracles. The first knows the formats only through `quantize(...).dequantize()` and multiplies in float64. The
second knows no format's code: it bounds what quantization may change, from the definition of the format.

Bound of one operand   An element with m mantissa bits has the spacing 2^(e - m) in the binade e, and
                       2^(e0 - m) below its smallest normal 2^e0. So with a decode scale s rounding to nearest
                       moves x by at most

                           d(x) <= |x| 2^-(m+1) + s 2^(e0 - m - 1)

                       and stochastic rounding by at most twice that. MX's floor rule lets x / s reach
                       2^(emax + 1), which saturates: up to 1 - qmax / 2^(emax + 1) of x, a quarter of an
                       E2M1 value (no more than its spacing) and an eighth of an E4M3 value. NVFP4's scale is itself
                       rounded, to E4M3: s <= amax / 6 (1 + 2^-4) + g 2^-10, where g is the tensor's
                       scale; if it rounds down, the largest elements saturate by as much, within the first term
                       and 6 g 2^-10.
Bound of a product     A B with operands moved by at most D and E moves by at most D|B| + |A|E + DE (elementwise), plus
                       (K + 8) 2^-24 |A||B| for sums in fp32. Where all those errors are independent,
                       their squares add: the norm moves by no more than the root of the sum of the
                       squares of the three terms, which is tighter by about the root of K.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planned_cases import QUANTIZED, linear, planned, random, run
from torch import Tensor

from scrimp.formats import Noise, fake_quantize, quantize
from scrimp.formats.hadamard import rotate
from scrimp.gemm.backends import ReferenceBackend, block_sums, reference
from scrimp.gemm.problem import AXES, COLUMNS, Use, operands_of
from scrimp.precision import GEMMS, OPERANDS, Operand, lookup_element, lookup_scaling

SIZES = ((37, 100, 130), (130, 37, 100), (1, 16, 300))
"""Tokens, inputs, outputs: ragged for every group size."""
FP32, BF16 = 2.0**-24, 2.0**-8
"""Unit roundoffs."""


def matrices(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """X with outlying columns, W, and G with rows of very different size."""
    x, w, g = random(tokens, inputs, seed=1), random(outputs, inputs, seed=2), random(tokens, outputs, seed=3)
    x[:, ::9] *= 20
    g *= torch.exp2(random(tokens, 1, seed=4))
    return {"x": x.to(dtype), "w": w.to(dtype), "g": (g * 1e-3).to(dtype)}


def upright(matrix: Tensor, axis: int) -> Tensor:
    """The summed axis last."""
    return matrix if axis == COLUMNS else matrix.T


def padded(x: Tensor, axis: int, multiple: int = 16) -> Tensor:
    """Zeros after the end of the summed axis: rotated groups are whole."""
    extra = -x.shape[axis] % multiple
    return F.pad(x, (0, extra) if axis == COLUMNS else (0, 0, 0, extra))


def dequantized(x: Tensor, operand: Operand, axis: int, noise: Noise) -> Tensor:
    """[rows, K] in float64, by way of stored codes."""
    x = padded(x, axis) if operand.hadamard else x
    codes = quantize(
        x,
        operand.element,
        operand.scaling,
        axis,
        operand.rounding,
        hadamard=operand.hadamard,
        fallback=operand.fallback,
        noise=noise,
    )
    return upright(codes.dequantize(), axis).double()


def through_reference(
    gemm: str, recipe: str, tensors: dict[str, Tensor], out: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The back end's product, and the float64 values of both operands."""
    backend = ReferenceBackend()
    prepared, expected = [], []
    for index, (tensor, operand) in enumerate(zip(OPERANDS[gemm], operands_of(gemm, recipe), strict=True)):
        noise, axis = Noise(17).derive(index), AXES[gemm][index]
        prepared.append(backend.prepare(tensors[tensor], Use(operand, axis, noise)))
        if operand is None:
            expected.append(upright(tensors[tensor], axis).double())
        else:
            expected.append(dequantized(tensors[tensor], operand, axis, noise))
    return backend.multiply(gemm, *prepared, out), *expected


def magnitude(values: Tensor, operand: Operand | None) -> Tensor:
    """|values|; where they are multiplied rotated, the size of their group, which no rotation exceeds."""
    if operand is None or not operand.hadamard:
        return values.abs()
    return values.unflatten(-1, (-1, 16)).norm(dim=-1).repeat_interleave(16, -1)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", [*QUANTIZED, "fp32"])
@pytest.mark.every(5)
def test_fp32_products_are_those_of_the_dequantized_operands(
    recipe: str, gemm: str, sizes: tuple[int, int, int]
) -> None:
    y, a, b = through_reference(gemm, recipe, matrices(*sizes, torch.float32), torch.float32)
    size = [magnitude(v, o) for v, o in zip((a, b), operands_of(gemm, recipe), strict=True)]
    assert y.dtype == torch.float32
    # K + 8: the sum, scales on both sides; 48 more for two rotations of 16 numbers and one back.
    bound = (a.shape[1] + 56) * FP32 * (size[0] @ size[1].T)
    assert bool(((y - a @ b.T).abs() <= bound).all())


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", [*QUANTIZED, "bf16", "fp32"])
@pytest.mark.every(5)
def test_bf16_products_add_two_roundings_of_the_result_at_most(
    recipe: str, gemm: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast CPU returns products in bf16, before scales are applied: one rounding more of each block."""
    monkeypatch.setattr(reference, "multiplies_bf16_fast", lambda device: is_fast)
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    y, a, b = through_reference(gemm, recipe, matrices(37, 100, 130, dtype), torch.bfloat16)
    size = [magnitude(v, o) for v, o in zip((a, b), operands_of(gemm, recipe), strict=True)]
    assert y.dtype == torch.bfloat16
    exact = a @ b.T
    rounded = exact.abs()
    if is_fast and recipe not in ("bf16", "fp32"):
        step = 128 if recipe in ("fp8", "fp4") or recipe.startswith("int8") else a.shape[1]
        for payload in payloads(gemm, recipe, a, dtype):
            rounded = rounded + sum(
                (x @ y.T).abs() for x, y in zip(payload.split(step, 1), b.split(step, 1), strict=True)
            )
    left_out = (a.shape[1] + 56) * FP32
    bound = BF16 * (1 + BF16) * rounded + left_out * (size[0] @ size[1].T)
    assert bool(((y - exact).abs() <= bound).all())


def payloads(gemm: str, recipe: str, a: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """What the first operand is the sum of: the values of each payload."""
    operand = operands_of(gemm, recipe)[0]
    if operand is None or not operand.fallback:
        return [a]
    first = dequantized(
        matrices(37, 100, 130, dtype)["x"], replace(operand, fallback=False), COLUMNS, Noise()
    )
    assert not torch.equal(a, first)
    return [first, a - first]


def products_of(
    recipe: str, gemm: str, out: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[torch.dtype]:
    """Types of the products that the back end makes."""
    types: list[torch.dtype] = []
    plain = reference.multiply

    def spy(a: Tensor, a_axis: int, b: Tensor, b_axis: int) -> Tensor:
        assert a.dtype == b.dtype
        types.append(a.dtype)
        return plain(a, a_axis, b, b_axis)

    monkeypatch.setattr(reference, "multiply", spy)
    through_reference(gemm, recipe, matrices(20, 30, 40, torch.bfloat16), out)
    return types


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_the_carrier_is_the_cheapest_that_is_exact(
    recipe: str, gemm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "multiplies_bf16_fast", lambda device: True)
    twice = recipe == "int8_fallback" and gemm == "fprop"  # X has outliers
    assert products_of(recipe, gemm, torch.bfloat16, monkeypatch) == [torch.bfloat16] * (1 + twice)
    assert products_of(recipe, gemm, torch.float32, monkeypatch)[-1:] == [torch.float32]
    monkeypatch.setattr(reference, "multiplies_bf16_fast", lambda device: False)
    assert products_of(recipe, gemm, torch.bfloat16, monkeypatch)[-1:] == [torch.float32]


def test_only_blocks_with_tiles_that_fell_back_are_multiplied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By count of products; by numbers it makes no difference to multiply them all."""
    monkeypatch.setattr(reference, "multiplies_bf16_fast", lambda device: True)
    backend, w = ReferenceBackend(), random(40, 400, seed=1).bfloat16()
    x_operand, w_operand = operands_of("fprop", "int8_fallback")
    x = random(20, 400, seed=2)
    x[3, 200], x[5, 399] = 1e4, -300.0
    sums, plain = [], reference.bf16_product
    for is_asked in (True, False):
        widths: list[int] = []

        def counted(a: Tensor, *rest: Any, widths: list[int] = widths) -> Tensor:
            widths.append(a.shape[1])
            return plain(a, *rest)

        monkeypatch.setattr(reference, "bf16_product", counted)
        if not is_asked:
            monkeypatch.setattr(block_sums, "_is_rest", lambda scales: True)
        operands = (
            backend.prepare(x.bfloat16(), Use(x_operand, COLUMNS, Noise())),
            backend.prepare(w, Use(w_operand, COLUMNS, Noise())),
        )
        sums.append(backend.multiply("fprop", *operands, torch.bfloat16))
        assert widths == ([128, 128, 128, 128, 16, 16] if is_asked else [128] * 6 + [16] * 2)
    assert torch.equal(*sums)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_bf16_carriers_are_exact_with_their_scales(recipe: str, gemm: str) -> None:
    tensors = matrices(37, 100, 130, torch.bfloat16)
    for index, tensor in enumerate(OPERANDS[gemm]):
        operand, axis = operands_of(gemm, recipe)[index], AXES[gemm][index]
        assert operand is not None
        x = tensors[tensor]
        wide = fake_quantize(x, operand, axis, noise=Noise(3), keep_rotation=True)
        found = fake_quantize(x, operand, axis, noise=Noise(3), keep_rotation=True, carrier=torch.bfloat16)
        assert found.values.dtype == torch.bfloat16
        assert (found.inner is not None) == (operand.scaling in ("tile", "block"))
        assert torch.equal(found.wide(), wide.values)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_kept_codes_are_multiplied_like_a_fresh_operand(recipe: str) -> None:
    operand = operands_of("wgrad", recipe)[1]
    assert operand is not None
    use, backend = Use(operand, AXES["wgrad"][1], Noise(4)), ReferenceBackend()
    tensors = matrices(37, 100, 130, torch.float32)
    g_use = Use(operands_of("wgrad", recipe)[0], AXES["wgrad"][0], Noise(5))
    g = backend.prepare(tensors["g"], g_use)
    fresh = backend.multiply("wgrad", g, backend.prepare(tensors["x"], use), torch.float32)
    kept = backend.multiply("wgrad", g, backend.load(backend.store(tensors["x"], use)), torch.float32)
    assert torch.equal(fresh, kept)


# ---- against no quantization at all


def group_amax(x: Tensor, operand: Operand) -> Tensor:
    """For every element of a float64 matrix [rows, K] the largest magnitude of its group."""
    kind = lookup_scaling(operand.scaling)
    rows, columns = kind.rows or x.shape[0], kind.columns or x.shape[1]
    whole = F.pad(x.abs(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    groups = whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    spread = groups.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return spread[: x.shape[0], : x.shape[1]]


def largest_move(x: Tensor, operand: Operand | None) -> Tensor:
    """The bound of the module's docstring on what quantization does to each element of [rows, K]."""
    if operand is None:
        return torch.zeros_like(x)
    element, kind = lookup_element(operand.element), lookup_scaling(operand.scaling)
    stochastic = operand.rounding == "stochastic"
    relative, amax = 2.0 ** -(element.mantissa_bits + 1), group_amax(x, operand)
    scale, extra = amax / element.max_value, 0.0
    if kind.scale_type == "e8m0":
        scale = 2 * scale if stochastic else amax / 2.0**element.max_exponent
        saturated = 1 - element.max_value / 2.0 ** (element.max_exponent + 1)
        relative = relative if stochastic else max(relative, saturated)
    if kind.has_tensor_scale:
        g = float(x.abs().max()) / (6 * 448)
        scale = scale * (1 + 2.0**-3 if stochastic else 1 + 2.0**-4) + g * 2.0**-9
        extra = 6 * g * 2.0**-9
    step = 2.0 ** (element.min_exponent - element.mantissa_bits - 1) * scale
    return (x.abs() * relative + step) * (2 if stochastic else 1) + extra


def assert_within_the_formats_error(
    result: Tensor, a: Tensor, b: Tensor, operands: tuple[Operand | None, Operand | None]
) -> None:
    """A float32 result against a b^T of float64 [rows, K] operands before quantization."""
    exact = a @ b.T
    if operands[0] is not None and operands[0].hadamard:
        a, b = (rotate(padded(v, COLUMNS).float(), -1).double() for v in (a, b))
    moved_a, moved_b = largest_move(a, operands[0]), largest_move(b, operands[1])
    accumulation = (a.shape[1] + 56) * FP32 * (a.abs() + moved_a) @ (b.abs() + moved_b).T
    error = (result - exact).abs()
    worst = moved_a @ b.abs().T + a.abs() @ moved_b.T + moved_a @ moved_b.T
    assert bool((error <= worst + accumulation).all())
    independent = (moved_a**2) @ (b**2).T + (a**2) @ (moved_b**2).T + (moved_a**2) @ (moved_b**2).T
    assert error.norm() <= math.sqrt(independent.sum()) + accumulation.norm()
    if operands != (None, None):
        assert error.norm() > 2.0**-10 * exact.norm()  # more than bf16 does: it was quantized


@pytest.mark.parametrize("sizes", SIZES[:2])
@pytest.mark.parametrize("recipe", [*QUANTIZED, "fp32"])
def test_a_layers_result_and_gradients_are_within_the_formats_error(
    recipe: str, sizes: tuple[int, int, int]
) -> None:
    tokens, inputs, outputs = sizes
    layer = planned(recipe, inputs, outputs, bias=False)
    x = random(tokens, inputs, seed=1)
    passed = run(layer, x)
    x, w, g = x.double(), layer.weight.detach().double(), random(tokens, outputs, seed=9).double()
    assert_within_the_formats_error(passed.y, x, w, operands_of("fprop", recipe))
    assert_within_the_formats_error(passed.x_grad, g, w.T, operands_of("dgrad", recipe))
    assert_within_the_formats_error(passed.weight_grad, g.T, x.T, operands_of("wgrad", recipe))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_every_recipe_differs_from_bf16_in_all_three_gemms(recipe: str) -> None:
    x = random(40, 100, dtype=torch.bfloat16)
    ours = run(planned(recipe, dtype=torch.bfloat16), x)
    plain = run(linear(dtype=torch.bfloat16), x)
    for name in ("y", "x_grad", "weight_grad"):
        a, b = getattr(ours, name).float(), getattr(plain, name).float()
        assert 2.0**-7 < (a - b).norm() / b.norm() < 0.5
    assert torch.equal(ours.bias_grad, plain.bias_grad)  # type: ignore[arg-type]


def test_bf16_in_an_fp32_layer_rounds_operands_and_result_to_bf16() -> None:
    """Half a spacing of an 8-bit significand for each operand and for the result: 2^-8 of each."""
    layer, x = planned("bf16", bias=False), random(40, 100)
    passed = run(layer, x)
    for result, a, b in (
        (passed.y, x, layer.weight.detach()),
        (passed.x_grad, random(40, 37, seed=9), layer.weight.detach().T),
        (passed.weight_grad, random(40, 37, seed=9).T, x.T),
    ):
        exact, size = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        error = (result - exact).abs()
        assert bool((error <= 2.1 * BF16 * size + BF16 * exact.abs()).all())
        assert torch.equal(result, result.bfloat16().float())
        assert error.norm() > 0
