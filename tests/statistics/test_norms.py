"""Norms and errors of every GEMM against quantized copies and loops in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scrimp.formats import quantize
from scrimp.gemm import Execution, PlannedLayer, observing, swap_in
from scrimp.gemm.layer import reference_only
from scrimp.gemm.problem import AXES
from scrimp.precision import GEMMS, OPERANDS, RECIPES
from scrimp.statistics.norms import NormWatch, WeightKey, squared_error

TOKENS, INPUTS, OUTPUTS = 24, 40, 18  # ragged: no multiple of 16
QUANTIZED = [name for name, entry in RECIPES.items() if entry.fprop is not None]
_SUMMED = {"fprop": ("ti,oi->to", INPUTS), "dgrad": ("to,oi->ti", OUTPUTS), "wgrad": ("to,ti->oi", TOKENS)}


class Watched:
    """One layer over some micro-batches, with all that its GEMMs read."""

    def __init__(
        self, micro_batches: int = 1, *, recipes: list[str] | None = None, checkpointed: bool = False
    ):
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            outliers = torch.randn(shape[-1], generator=generator).exp()
            return torch.randn(shape, generator=generator) * outliers

        self.layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.layer.weight.data = random(OUTPUTS, INPUTS)
        self.model = nn.Sequential(self.layer)
        self.planned_model = swap_in(self.model, "fp32", seed=5, choose=reference_only)
        self.recipes = QUANTIZED if recipes is None else recipes
        self.watch = NormWatch(self.planned_model.layers, ["bf16", *self.recipes])
        self.operands: list[dict[str, Tensor]] = []
        self.times: list[tuple[int, int]] = []
        with observing(self.watch, plain=True):
            for _ in range(micro_batches):
                x, g = random(TOKENS, INPUTS).requires_grad_(), random(TOKENS, OUTPUTS)
                y = checkpoint(self.model, x, use_reentrant=False) if checkpointed else self.model(x)
                self.times.append(self.planned_model.clock.now)
                y.backward(g)
                w = self.layer.weight.detach()
                named = {"x": x.detach(), "w": w, "g": g, "y": x.detach() @ w.T, "gx": g @ w}
                self.operands.append(named)
        self.watch.join({"0": (OUTPUTS, INPUTS)})

    @property
    def planned(self) -> PlannedLayer:
        return self.planned_model.layers["0"]

    def errors(self, gemm: str, recipe: str, operand: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Q(A) - A by packed codes in float64, and the other operand, of each micro-batch."""
        for now, tensors in zip(self.times, self.operands, strict=True):
            value = tensors[OPERANDS[gemm][operand]]
            use = self.planned.uses(gemm, now, recipe)[operand]
            assert use.operand is not None
            entry = use.operand
            codes = quantize(
                value,
                entry.element,
                entry.scaling,
                AXES[gemm][operand],
                entry.rounding,
                hadamard=entry.hadamard,
                fallback=entry.fallback,
                noise=use.noise,
            )
            other = tensors[OPERANDS[gemm][1 - operand]]
            yield codes.dequantize().double() - value.double(), other.double()


@pytest.fixture(scope="module")
def watched() -> Watched:
    """Two micro-batches."""
    return Watched(2)


@pytest.mark.parametrize("name", ["x", "y", "g", "gx"])
def test_norms_add_over_micro_batches(watched: Watched, name: str) -> None:
    expected = sum(float(tensors[name].double().square().sum()) for tensors in watched.operands)
    assert watched.watch.squares["0", name] == pytest.approx(expected, rel=1e-5)


def test_the_weight_is_counted_once(watched: Watched) -> None:
    expected = float(watched.layer.weight.double().square().sum())
    assert watched.watch.squares["0", "w"] == pytest.approx(expected, rel=1e-5)
    assert watched.watch.tokens["0"] == 2 * TOKENS


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("gemm", GEMMS)
def test_errors_are_those_of_quantized_copies(watched: Watched, gemm: str, recipe: str) -> None:
    for operand, name in enumerate(OPERANDS[gemm]):
        squares = [float(error.square().sum()) for error, _ in watched.errors(gemm, recipe, operand)]
        expected = squares[0] if name == "w" else sum(squares)
        assert watched.watch.errors["0", gemm, recipe, operand] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_errors_of_results_are_summed_index_by_index(watched: Watched, gemm: str, recipe: str) -> None:
    for operand in range(2):
        total = 0.0
        for error, other in watched.errors(gemm, recipe, operand):
            axes = AXES[gemm]
            mine = error if axes[operand] == -1 else error.T  # [.., K]
            theirs = other if axes[1 - operand] == -1 else other.T
            for k in range(_SUMMED[gemm][1]):
                total += float((mine[:, k] ** 2).sum()) * float((theirs[:, k] ** 2).sum())
        assert watched.watch.results["0", gemm, recipe, operand] == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("gemm", GEMMS)
def test_that_is_the_mean_over_errors_of_random_signs(watched: Watched, gemm: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for operand in range(2):
        mean = 0.0
        for error, other in watched.errors(gemm, "fp4", operand):
            draws = []
            for _ in range(300):
                signs = torch.randint(0, 2, error.shape, generator=generator).double() * 2 - 1
                pair = (signs * error, other) if operand == 0 else (other, signs * error)
                draws.append(float(torch.einsum(_SUMMED[gemm][0], *pair).square().sum()))
            mean += float(np.mean(draws))
        assert watched.watch.results["0", gemm, "fp4", operand] == pytest.approx(mean, rel=0.1)


def test_formats_that_quantize_nothing_cost_nothing(watched: Watched) -> None:
    assert not [key for key in watched.watch.errors if key[2] == "bf16"]


def test_errors_of_weights_are_computed_once_for_all_batches() -> None:
    first = Watched(1, recipes=["fp8"])
    kept: dict[WeightKey, Tensor] = {}
    for _ in range(2):
        watch = NormWatch(first.planned_model.layers, ["fp8"], kept)
        with observing(watch, plain=True):
            x = first.operands[0]["x"].clone().requires_grad_()
            first.model(x).backward(first.operands[0]["g"])
        watch.join({"0": (OUTPUTS, INPUTS)})
        assert dict(watch.errors) == dict(first.watch.errors)
        assert dict(watch.results) == dict(first.watch.results)
    assert {key[1:] for key, _ in kept} == {("fprop", "fp8", 1), ("dgrad", "fp8", 1)}


def test_recomputed_products_are_counted_once() -> None:
    plain, again = (Watched(2, recipes=["fp8"], checkpointed=flag) for flag in (False, True))
    assert plain.watch.squares == again.watch.squares
    assert plain.watch.errors == again.watch.errors
    assert plain.watch.results == again.watch.results
    assert plain.watch.tokens == again.watch.tokens


def test_stochastic_errors_are_drawn_anew_in_every_step() -> None:
    layer = Watched(1, recipes=["fp4"])
    value = layer.operands[0]["g"]
    first, second = (
        squared_error(value, layer.planned.uses("dgrad", (step, 0), "fp4")[0]) for step in (1, 2)
    )
    assert not torch.equal(first, second)
    nearest = [squared_error(value, layer.planned.uses("dgrad", (step, 0), "fp8")[0]) for step in (1, 2)]
    assert torch.equal(*nearest)


def test_errors_of_a_weights_gradient_lie_where_features_are_large(watched: Watched) -> None:
    g, x = (torch.cat([tensors[name] for tensors in watched.operands]).double() for name in "gx")
    expected = torch.outer(g.norm(dim=0), x.norm(dim=0))
    expected /= expected.square().mean().sqrt()
    found = watched.watch.error_shape("0")
    assert found is not None
    assert torch.allclose(found.double(), expected, rtol=1e-4)
    assert float(found.square().mean()) == pytest.approx(1.0, rel=1e-4)
    assert watched.watch.error_shape("elsewhere") is None


def test_layers_that_are_not_asked_for_are_passed_over() -> None:
    watch = NormWatch({}, ["fp8"])
    layer = Watched(1, recipes=["fp8"])
    with observing(watch, plain=True):
        layer.model(layer.operands[0]["x"])
    assert not watch.squares
    assert not watch.errors


def test_only_those_who_ask_see_layers_in_the_compute_format() -> None:
    layer = Watched(1, recipes=["fp8"])
    seen: dict[str, list[Execution]] = {"planned": [], "plain": []}
    x = layer.operands[0]["x"]
    with observing(seen["planned"].append):
        alone = layer.model(x)
    assert not seen["planned"]
    with observing(seen["plain"].append, plain=True):
        watched_y = layer.model(x)
    assert [(one.layer, one.gemm, one.recipe) for one in seen["plain"]] == [("0", "fprop", "fp32")]
    assert torch.equal(alone, watched_y)
    with observing(seen["planned"].append):
        layer.model(x)
    assert not seen["planned"]
