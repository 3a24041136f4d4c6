"""Grouped linear layers against loops over ordinary ones: plain in float64, planned bit for bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrimp.errors import ModelError, PlanError
from scrimp.gemm import PlannedLayer, observing, planned_linear, swap_in
from scrimp.gemm.grouped import GroupedLinear, grouped_product, regrouped
from scrimp.precision import LinearPrecision

EXPERTS, INPUTS, OUTPUTS = 5, 48, 32
RUNS = {
    "one without tokens": (7, 0, 20, 1, 12),
    "all to the last": (0, 0, 0, 0, 24),
    "no token": (0, 0, 0, 0, 0),
}


def made(
    counts: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[GroupedLinear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layer = GroupedLinear(EXPERTS, INPUTS, OUTPUTS, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    x = torch.randn(sum(counts), INPUTS, generator=generator).to(dtype).requires_grad_()
    return layer, x, torch.tensor(counts).cumsum(0).int()


def slices(counts: tuple[int, ...]) -> list[slice]:
    ends = list(itertools.accumulate(counts))
    return [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]


@pytest.mark.parametrize("counts", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("again", [False, True])
def test_every_run_is_multiplied_with_its_experts_matrix(counts: tuple[int, ...], again: bool) -> None:
    layer, x, ends = made(counts)
    y = regrouped(layer, torch.tanh, x, ends_E=ends, again=again)
    g = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(9))
    y.backward(g)
    weight, inputs = layer.weight.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    expected = torch.cat(
        [
            F.linear(torch.tanh(inputs[rows]), matrix)
            for rows, matrix in zip(slices(counts), weight.view(EXPERTS, OUTPUTS, INPUTS), strict=True)
        ]
    )
    expected.backward(g)
    for found, wanted in ((y, expected), (x.grad, inputs.grad), (layer.weight.grad, weight.grad)):
        torch.testing.assert_close(found, wanted if wanted is not None else torch.zeros_like(found))


def test_rows_after_the_last_run_are_zero_and_give_no_gradient() -> None:
    layer, x, ends = made((4, 0, 3, 2, 1))
    longer = torch.cat([x.detach(), torch.full((3, INPUTS), torch.nan, dtype=x.dtype)]).requires_grad_()
    y = layer(longer, ends)
    assert torch.equal(y[10:], torch.zeros(3, OUTPUTS, dtype=x.dtype))
    y.sum().backward()
    assert torch.equal(longer.grad[10:], torch.zeros(3, INPUTS, dtype=x.dtype))
    assert layer.weight.grad.isfinite().all()


def test_autocast_multiplies_in_bf16_and_sums_gradients_in_the_weights_type() -> None:
    layer, x, ends = made((9, 0, 5, 1, 17), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, ends)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert (layer.weight.grad.dtype, x.grad.dtype) == (torch.float32, torch.float32)
    expected = torch.mm(x[:9].bfloat16(), layer.weight[:OUTPUTS].bfloat16().t())
    assert torch.equal(y[:9], expected)


def test_tokens_that_do_not_fit_are_refused() -> None:
    layer, x, ends = made((9, 0, 5, 1, 17))
    with pytest.raises(ModelError, match="do not fit"):
        layer(x[:, 1:], ends)
    with pytest.raises(ModelError, match="do not fit"):
        layer(x, ends[1:])


def test_a_product_is_one_operator_whose_shapes_need_no_data() -> None:
    layer, x, ends = made((9, 0, 5, 1, 17))
    torch.library.opcheck(
        grouped_product,
        ("fprop", x.detach(), layer.weight.detach().view(EXPERTS, OUTPUTS, INPUTS), ends),
        test_utils=("test_schema", "test_faketensor"),
    )


class Holder(nn.Module):
    """A model with one grouped layer of two products' worth."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__()
        self.experts = layer

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return regrouped(self.experts, torch.tanh, x, ends_E=ends)


FORMATS = {
    "fp8": LinearPrecision("fp8", "fp8", "fp8", "fp8"),
    "fp8, input saved": LinearPrecision("fp8", "fp8", "fp8", "bf16"),
    "fp8, input made again": LinearPrecision("fp8", "fp8", "fp8", "recompute"),
    "nvfp4": LinearPrecision("nvfp4", "nvfp4", "nvfp4", "nvfp4"),
    "mixed": LinearPrecision("nvfp4", "fp8", "bf16", "fp8"),
}


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    "counts", [RUNS["one without tokens"], pytest.param((130, 3, 0, 128, 1), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_planned_group_is_a_loop_of_planned_layers_bit_for_bit(
    formats: LinearPrecision, counts: tuple[int, ...], compiled: bool
) -> None:
    layer, x, ends = made(counts, torch.bfloat16)
    model = Holder(layer)
    weight, inputs = layer.weight.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    planned = swap_in(model, {"experts": formats}, seed=3)
    planned.clock.begin(7, 40)
    if compiled:
        torch._dynamo.reset()
        model.compile(fullgraph=True)
    y = model(x, ends)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    y.backward(g)

    saved = formats if formats.saved != "recompute" else LinearPrecision(*formats.recipes, "bf16")
    rows = [
        planned_linear(
            torch.tanh(inputs[part]),
            matrix,
            None,
            PlannedLayer(f"experts.{expert}", saved, planned.clock, planned.layers["experts"].choose),
        )
        for expert, (part, matrix) in enumerate(
            zip(slices(counts), weight.view(EXPERTS, OUTPUTS, INPUTS), strict=True)
        )
        if part.start < part.stop
    ]
    expected = torch.cat(rows)
    expected.backward(g)
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, inputs.grad)
    assert torch.equal(layer.weight.grad, weight.grad)


def test_plans_of_groups_change_are_copied_and_taken_back() -> None:
    layer, x, ends = made((9, 0, 5, 1, 17), torch.bfloat16)
    model = Holder(layer)
    plain = model(x, ends)
    planned = swap_in(model, "bf16")
    assert torch.equal(model(x, ends), plain)
    planned.replan("fp8")
    fp8 = model(x, ends)
    assert not torch.equal(fp8, plain)
    copied = copy.deepcopy(model)
    planned.replan("nvfp4")
    assert not torch.equal(model(x, ends), fp8)
    assert torch.equal(copied(x, ends), fp8), "a copy has a plan of its own"
    planned.swap_out()
    assert type(layer) is GroupedLinear
    assert torch.equal(model(x, ends), plain)


def test_watchers_are_told_of_one_run_of_a_pass() -> None:
    layer, x, ends = made((0, 3, 5, 1, 17), torch.bfloat16)
    model = Holder(layer)
    swap_in(model, "fp8")
    seen = []
    with observing(seen.append):
        model(x, ends).sum().backward()
    assert [(one.layer, one.gemm, len(one.a)) for one in seen if one.gemm != "wgrad"] == [
        ("experts", "fprop", 3),
        ("experts", "dgrad", 3),
    ]
    assert [one.gemm for one in seen] == ["fprop", "dgrad", "wgrad"]


def test_an_input_that_nobody_makes_again_is_refused() -> None:
    layer, x, ends = made((9, 0, 5, 1, 17), torch.bfloat16)
    model = Holder(layer)
    swap_in(model, FORMATS["fp8, input made again"])
    with pytest.raises(PlanError, match="planned to recompute"):
        layer(x, ends)
