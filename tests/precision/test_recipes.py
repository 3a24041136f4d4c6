"""Recipes: every operand quantizes, products stay products, and shards quantize as the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats import Noise, Operand, QuantizedTensor, fake_quantize, quantize
from scrimp.precision import GEMMS, HIGH_PRECISION, OPERANDS, RECIPES, GemmRecipe, Recipe, recipe

R = TypeVar("R")
SHAPES = {"x": (40, 150), "w": (70, 150), "g": (40, 70)}
SUMMED = {"fprop": (-1, -1), "dgrad": (-1, -2), "wgrad": (-2, -2)}
"""Where the axis that a GEMM sums over lies in its two operands."""
QUANTIZED = [name for name in RECIPES if name not in HIGH_PRECISION]
EACH_RECIPE = pytest.mark.parametrize("name", QUANTIZED)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors() -> dict[str, Tensor]:
    return {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(SHAPES.items())}


def operands_of(name: str) -> Iterator[tuple[str, GemmRecipe]]:
    for gemm in GEMMS:
        entry = RECIPES[name].gemm(gemm)
        assert entry is not None
        yield gemm, entry


def product(gemm: str, a: Tensor, b: Tensor) -> Tensor:
    return {"fprop": lambda: a @ b.T, "dgrad": lambda: a @ b, "wgrad": lambda: a.T @ b}[gemm]()


@EACH_RECIPE
def test_every_operand_quantizes_and_every_gemm_is_near_the_exact_one(name: str) -> None:
    inputs = tensors()
    for gemm, entry in operands_of(name):
        exact, ours = [], []
        for tensor, operand, axis in zip(OPERANDS[gemm], (entry.a, entry.b), SUMMED[gemm], strict=True):
            x = inputs[tensor]
            exact.append(x)
            ours.append(fake_quantize(x, operand, axis, keep_rotation=True).dequantize())
            packed = quantize(
                x,
                operand.element,
                operand.scaling,
                axis,
                operand.rounding,
                hadamard=operand.hadamard,
                fallback=operand.fallback,
            )
            assert packed.dequantize().shape == x.shape
            assert RECIPES[name].bits == {"e2m1": 4, "e4m3": 8, "e5m2": 8, "int8": 8}[operand.element]
        wanted = product(gemm, exact[0], exact[1])
        error = ((product(gemm, ours[0], ours[1]) - wanted).norm() / wanted.norm()).item()
        low, high = (0.05, 0.35) if RECIPES[name].bits == 4 else (0.005, 0.08)
        assert low < error < high


@EACH_RECIPE
def test_both_operands_of_a_gemm_are_rotated_or_none(name: str) -> None:
    for _, entry in operands_of(name):
        assert entry.a.hadamard == entry.b.hadamard


def test_wgrad_of_nvfp4_and_one_recipe_of_integers_rotate() -> None:
    rotated = [(name, gemm) for name in QUANTIZED for gemm, entry in operands_of(name) if entry.a.hadamard]
    assert rotated == [*(("int8_hadamard", gemm) for gemm in GEMMS), ("nvfp4", "wgrad")]


@EACH_RECIPE
def test_only_gradients_are_rounded_stochastically_and_in_four_bits_and_integers_they_are(name: str) -> None:
    for gemm, entry in operands_of(name):
        for tensor, operand in zip(OPERANDS[gemm], (entry.a, entry.b), strict=True):
            is_coarse = RECIPES[name].bits == 4 or operand.element == "int8"
            assert (operand.rounding == "stochastic") == (tensor == "g" and is_coarse)


@EACH_RECIPE
def test_weights_are_the_same_forward_and_backward_where_square_groups_are_not_rotated(
    name: str,
) -> None:
    fprop, dgrad = RECIPES[name].fprop, RECIPES[name].dgrad
    assert fprop is not None
    assert dgrad is not None
    assert fprop.b == dgrad.b
    w = tensors()["w"]
    forward, backward = (fake_quantize(w, fprop.b, axis).dequantize() for axis in (-1, -2))
    is_square = fprop.b.scaling in ("tensor", "block", "nvfp4_2d")
    assert forward.equal(backward) == (is_square and not fprop.b.hadamard)


def test_high_precision_recipes_quantize_nothing_and_keep_the_input() -> None:
    assert HIGH_PRECISION == ("fp32", "bf16")
    for name, entry in RECIPES.items():
        assert entry.name == name
        assert entry.summary
        gemms = [entry.gemm(gemm) for gemm in GEMMS]
        assert all(gemm is None for gemm in gemms) == (name in HIGH_PRECISION)
        assert any(gemm is None for gemm in gemms) == (name in HIGH_PRECISION)
        assert entry.saved == ("input" if name in HIGH_PRECISION else "quantized")


def test_a_recipe_is_found_by_name_and_a_wrong_one_names_the_nearest() -> None:
    for name, entry in RECIPES.items():
        assert recipe(name) is entry
        assert isinstance(entry, Recipe)
    for wrong, nearest in (("mxfp6", "mxfp"), ("nvfp", "nvfp4"), ("fp8row", "fp8_row"), ("bf61", "bf16")):
        with pytest.raises(PlanError, match=f"did you mean {nearest}"):
            recipe(wrong)
    for wrong in ("", "quantum"):
        with pytest.raises(PlanError, match="expected fp32, bf16") as refused:
            recipe(wrong)
        assert "did you mean" not in str(refused.value)


def test_operands_that_no_format_defines_are_refused() -> None:
    for wrong, allowed in (
        (lambda: Operand("fp4", "tile"), "e2m1"),
        (lambda: Operand("e2m1", "vector"), "tile"),
        (lambda: Operand("e4m3", "nvfp4_2d"), "e2m1"),
        (lambda: Operand("e2m1", "mx", four_over_six=True), "nvfp4"),
        (lambda: Operand("e2m1", "mx", "random"), "nearest, stochastic"),  # type: ignore[arg-type]
    ):
        with pytest.raises(PlanError, match=allowed):
            wrong()


# Shards


class Shards:
    """Ranks as threads: `reduce` waits for all of them and leaves the maximum everywhere, in place."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=20)
        self.values: list[Tensor] = []
        self.calls = 0

    def reduce(self, amax: Tensor) -> None:
        self.values.append(amax)
        self.barrier.wait()
        largest = torch.stack([value.clone() for value in self.values]).amax(0)
        if self.barrier.wait() == 0:
            self.values.clear()
            self.calls += 1
        self.barrier.wait()
        amax.copy_(largest)

    def run(self, work: list[Callable[[], R]]) -> list[R]:
        results: dict[int, R] = {}

        def run_one(index: int) -> None:
            results[index] = work[index]()

        threads = [threading.Thread(target=run_one, args=(index,)) for index in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[index] for index in range(len(work))]


SHARDED = [
    (scaling, element, cut, axis)
    for scaling, element in (("tensor", "e4m3"), ("row", "e5m2"), ("nvfp4", "e2m1"), ("nvfp4_2d", "e2m1"))
    for cut in (0, 1)
    for axis in (-1, -2)
    # Rows that lie whole on one rank need no reduction.
    if scaling != "row" or cut == axis % 2
]


@pytest.mark.parametrize(("scaling", "element", "cut", "axis"), SHARDED)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("sizes", [(48, 48), (16, 80), (96, 0)])
@pytest.mark.every(5)
def test_shards_with_a_common_maximum_quantize_as_the_whole(
    scaling: str, element: str, cut: int, axis: int, rounding: str, hadamard: bool, sizes: tuple[int, int]
) -> None:
    x = normal(96, 96)
    x[90, 90] = 30.0
    operand = Operand(element, scaling, rounding, hadamard)  # type: ignore[arg-type]
    parts = x.split(sizes, cut)
    offsets = [{("first_row", "first_column")[cut]: start} for start in (0, sizes[0])]
    noises = [Noise(5, **offset) for offset in offsets]

    def fake(part: Tensor, noise: Noise, shards: Shards) -> Callable[[], Tensor]:
        return lambda: fake_quantize(part, operand, axis, noise=noise, reduce_amax=shards.reduce).dequantize()

    def packed(part: Tensor, noise: Noise, shards: Shards) -> Callable[[], QuantizedTensor]:
        return lambda: quantize(
            part,
            element,
            scaling,
            axis,
            operand.rounding,
            hadamard=hadamard,
            noise=noise,
            reduce_amax=shards.reduce,
        )

    whole = fake_quantize(x, operand, axis, noise=Noise(5)).dequantize()
    shards = Shards(2)
    ours = shards.run([fake(*each, shards) for each in zip(parts, noises, strict=True)])
    assert shards.calls == 1
    assert torch.cat(ours, cut).equal(whole)
    again = shards.run([packed(*each, shards) for each in zip(parts, noises, strict=True)])
    assert shards.calls == 2
    assert torch.cat([part.dequantize() for part in again], cut).equal(whole)


@pytest.mark.parametrize(("scaling", "element"), [("tensor", "e4m3"), ("row", "e4m3"), ("nvfp4", "e2m1")])
def test_shards_without_a_common_maximum_do_not(scaling: str, element: str) -> None:
    x = normal(96, 96)
    x[:, 90] = 30.0
    operand = Operand(element, scaling)
    alone = torch.cat([fake_quantize(part, operand, -1).dequantize() for part in x.split(48, 1)], 1)
    assert not alone.equal(fake_quantize(x, operand, -1).dequantize())


@pytest.mark.parametrize("scaling", ["tile", "block", "mx"])
def test_small_groups_ask_for_no_reduction(scaling: str) -> None:
    def refuse(amax: Tensor) -> None:
        raise AssertionError("nothing spans the shards")

    x = normal(256, 256)
    operand = Operand("e4m3", scaling)
    parts = [fake_quantize(part, operand, -1, reduce_amax=refuse).dequantize() for part in x.split(128, 1)]
    assert torch.cat(parts, 1).equal(fake_quantize(x, operand, -1).dequantize())


def test_what_no_format_defines_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="biased under stochastic rounding"):
        Operand("e2m1", "nvfp4", "stochastic", four_over_six=True)
    with pytest.raises(PlanError, match="one operand is rotated"):
        GemmRecipe(Operand("e2m1", "nvfp4", hadamard=True), Operand("e2m1", "nvfp4"))
    for wrong in (
        lambda: Operand("e4m3", "tile", fallback=True),
        lambda: Operand("int8", "block", fallback=True),
        lambda: Operand("int8", "tile", "stochastic", fallback=True),
        lambda: Operand("int8", "tile", hadamard=True, fallback=True),
    ):
        with pytest.raises(PlanError, match="only tiles of integers that are rounded to nearest fall back"):
            wrong()
    twice = Operand("int8", "tile", fallback=True)
    with pytest.raises(PlanError, match="only the first operand of a product falls back"):
        GemmRecipe(Operand("int8", "tile"), twice)
