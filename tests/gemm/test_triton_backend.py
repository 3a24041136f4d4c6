"""Triton's back end gives the reference's codes, and products within the error of their sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import DEVICE, sums_step, written_codes

from scrimp.errors import PlanError
from scrimp.formats import Noise, QuantizedTensor, fake_quantize
from scrimp.gemm.backends import ReferenceBackend, TritonBackend
from scrimp.gemm.backends.operands import is_kernel_pair
from scrimp.gemm.kernels.launch import RestOfTiles
from scrimp.gemm.problem import AXES, COLUMNS, ROWS, Shape, Use, operands_of, shape_of
from scrimp.precision import GEMMS, Operand

BACKEND, REFERENCE = TritonBackend(), ReferenceBackend()
TILED, GROUPED = ("fp8", "fp4", "int8", "int8_fallback", "int8_hadamard"), ("mxfp8", "mxfp4", "nvfp4")
SIZES = (40, 144, 200)
"""Tokens, inputs, outputs: none a multiple of 128, and tokens of no 16."""
WHERE = torch.device(DEVICE)


def case(gemm: str, recipe: str) -> list[tuple[Tensor, Use]]:
    tokens, inputs, outputs = SIZES
    shapes = {
        "fprop": ((tokens, inputs), (outputs, inputs)),
        "dgrad": ((tokens, outputs), (outputs, inputs)),
        "wgrad": ((tokens, outputs), (tokens, inputs)),
    }
    generator = torch.Generator().manual_seed(1)
    uses = [
        Use(operand, axis, Noise(number + 1))
        for number, (operand, axis) in enumerate(zip(operands_of(gemm, recipe), AXES[gemm], strict=True))
    ]
    # Multiples of 1/16, of which a rotation's sums are exact.
    numbers = [(torch.randn(shape, generator=generator) * 16).round() / 16 for shape in shapes[gemm]]
    return [(x.bfloat16().to(DEVICE), use) for x, use in zip(numbers, uses, strict=True)]


def exact(cases: list[tuple[Tensor, Use]]) -> tuple[Tensor, Tensor]:
    """The product of what the operands round to, and that of its magnitudes, in float64."""
    sides = []
    for x, use in cases:
        assert use.operand is not None
        values = fake_quantize(
            x.cpu(), use.operand, use.axis, noise=use.noise, keep_rotation=True
        ).dequantize()
        sides.append((values if use.axis == -1 else values.T).double())
    return sides[0] @ sides[1].T, sides[0].abs() @ sides[1].abs().T


def parts_of(operand: Any) -> list[Tensor]:
    """The tensors of an operand, but for second codes that are not written."""
    found = []
    for part in vars(operand).values():
        if isinstance(part, RestOfTiles):
            found += [written_codes(part), part.scales, part.blocks]
        elif part is not None:
            found.append(part)
    return found


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", TILED + GROUPED)
@pytest.mark.every(9)
def test_a_product_is_within_the_error_of_its_sums(gemm: str, recipe: str) -> None:
    assert BACKEND.refusal(gemm, recipe, shape_of(gemm, *SIZES), WHERE) is None
    cases = case(gemm, recipe)
    a, b = (BACKEND.prepare(x, use) for x, use in cases)
    expected, magnitudes = exact(cases)
    y = BACKEND.multiply(gemm, a, b, torch.float32).cpu()
    # A rotation sums in an order that nobody promises: a code may fall to the other side of a tie.
    unit = 2.0**-8 if recipe == "nvfp4" and gemm == "wgrad" else 220 * 2.0**-24
    if recipe == "fp8":
        unit += sums_step()
    assert bool(((y.double() - expected).abs() <= unit * magnitudes).all())
    short = BACKEND.multiply(gemm, a, b, torch.bfloat16)
    assert short.dtype == torch.bfloat16
    assert bool(((short.cpu().double() - expected).abs() <= (unit + 2.0**-8) * magnitudes).all())


def bytes_of(codes: QuantizedTensor) -> list[Tensor]:
    parts = [codes.payload, codes.scales, codes.tensor_scale]
    return [part.contiguous().reshape(-1).view(torch.uint8).cpu() for part in parts if part is not None]


@pytest.mark.parametrize("recipe", TILED + GROUPED)
@pytest.mark.every(3)
def test_stored_codes_are_the_references(recipe: str) -> None:
    _, (x, use) = case("wgrad", recipe)
    ours, theirs = BACKEND.store(x, use), REFERENCE.store(x, use)
    assert (ours.operand, ours.axis, ours.shape, ours.nbytes) == (
        theirs.operand,
        theirs.axis,
        theirs.shape,
        theirs.nbytes,
    )
    assert ours.payload.shape == theirs.payload.shape
    for mine, reference in zip(bytes_of(ours), bytes_of(theirs), strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("recipe", TILED + GROUPED)
@pytest.mark.every(5)
def test_stored_codes_give_the_product_of_the_tensor(recipe: str) -> None:
    (g, g_use), (x, use) = case("wgrad", recipe)
    a = BACKEND.prepare(g, g_use)
    from_codes = BACKEND.multiply("wgrad", a, BACKEND.load(REFERENCE.store(x, use)), torch.float32)
    direct = BACKEND.multiply("wgrad", a, BACKEND.prepare(x, use), torch.float32)
    # Rotated values lie within a unit of the rotation's sum, see maxima.py.
    tolerance = 1e-2 if recipe == "nvfp4" else 0.0
    assert torch.allclose(from_codes, direct, rtol=0, atol=tolerance * float(direct.abs().max()))


@pytest.mark.parametrize("recipe", GROUPED)
def test_a_pair_that_saves_no_pass_is_declined(recipe: str) -> None:
    (g, first), _ = case("dgrad", recipe)
    assert BACKEND.prepare_pair(g, first, case("wgrad", recipe)[0][1]) is None


@pytest.mark.parametrize("recipe", TILED)
@pytest.mark.every(2)
def test_a_pair_is_the_two_operands(recipe: str) -> None:
    (g, first), _ = case("dgrad", recipe)
    _, second = case("wgrad", recipe)[0]
    second = Use(second.operand, second.axis, Noise(77))
    pair = BACKEND.prepare_pair(g, first, second)
    for ours, use in zip(pair, (first, second), strict=True):
        alone = BACKEND.prepare(g, use)
        for left, right in zip(parts_of(ours), parts_of(alone), strict=True):
            assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("recipe", TILED + GROUPED)
@pytest.mark.every(3)
def test_preparing_and_storing_in_one_pass_are_the_two(recipe: str) -> None:
    (x, use), _ = case("fprop", recipe)
    saved = case("wgrad", recipe)[1][1]
    operand, codes = BACKEND.prepare_and_store(x, use, saved)
    alone = BACKEND.prepare(x, use)
    assert (len(parts_of(operand)) == 5) == (recipe == "int8_fallback")
    for ours, theirs in zip(parts_of(operand), parts_of(alone), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    for ours, theirs in zip(bytes_of(codes), bytes_of(REFERENCE.store(x, saved)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", GROUPED)
def test_values_and_codes_of_groups_take_one_launch(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    from scrimp.gemm.kernels import groups, maxima

    launches: list[str] = []
    for module in (groups, maxima):
        real = module.run

        def run(kernel: Any, *arguments: Any, real: Any = real, **constants: Any) -> None:
            launches.append(kernel.fn.__name__)
            real(kernel, *arguments, **constants)

        monkeypatch.setattr(module, "run", run)
    (x, use), saved = case("fprop", recipe)[0], case("wgrad", recipe)[1][1]
    BACKEND.prepare_and_store(x, use, saved)
    assert launches == ["largest_magnitude_kernel"] * (recipe == "nvfp4") + ["quantize_groups_kernel"]


@pytest.mark.parametrize("recipe", TILED)
def test_tiles_along_both_axes_take_one_launch(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    from scrimp.gemm import kernels

    launches = []
    real = kernels.quantize_tiles
    monkeypatch.setattr(
        kernels, "quantize_tiles", lambda *a, **k: launches.append(1) or real(*a, **k), raising=False
    )
    (g, first), second = case("dgrad", recipe)[0], case("wgrad", recipe)[0][1]
    BACKEND.prepare_pair(g, first, Use(second.operand, second.axis, Noise(9)))
    (x, use), saved = case("fprop", recipe)[0], case("wgrad", recipe)[1][1]
    BACKEND.prepare_and_store(x, use, saved)
    assert len(launches) == 2


def test_a_whole_scale_is_the_maximum_over_shards() -> None:
    (x, use), _ = case("fprop", "nvfp4")

    def widen(amax: Tensor) -> None:
        amax.fill_(1000.0)

    shared = Use(use.operand, use.axis, use.noise, widen)
    found, codes = BACKEND.prepare(x, shared), BACKEND.store(x, shared)
    assert float(found.outer) == float(codes.tensor_scale) == pytest.approx(1000 / (6 * 448), rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("fp8_tensor", "tensor scales"), ("fp8_row", "row scales"), ("bf16", "high precision")],
)
def test_formats_without_a_kernel_are_refused(recipe: str, words: str) -> None:
    assert words in (BACKEND.refusal("fprop", recipe, Shape(16, 16, 16), WHERE) or "")


def test_second_codes_along_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = Operand("int8", "tile", fallback=True)
    pairs = {"wgrad": (twice, Operand("int8", "tile"))}
    monkeypatch.setattr("scrimp.gemm.backends.triton.operands_of", lambda gemm, recipe: pairs[gemm])
    assert BACKEND.refusal("wgrad", "ours", None, WHERE) == "no kernel makes second codes along rows"
    along_rows = Use(twice, ROWS, Noise())
    assert not is_kernel_pair(Use(twice, COLUMNS, Noise()), along_rows)
    with pytest.raises(PlanError, match="fall back"):
        BACKEND.prepare(torch.ones(4, 6, device=DEVICE), along_rows)


def test_without_a_gpu_and_the_interpreter_everything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert "CUDA" in (BACKEND.refusal("fprop", "fp8", None, torch.device("cpu")) or "")
    assert BACKEND.refusal("fprop", "fp8", None, torch.device("cuda")) is None


def test_without_triton_everything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrimp.gemm.backends.triton.has_triton", lambda: False)
    assert BACKEND.refusal("fprop", "fp8", None, torch.device("cuda")) == "triton is not installed"
