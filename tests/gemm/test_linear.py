"""The planned layer as a layer: shapes, types, what it keeps, what it computes, what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from planned_cases import QUANTIZED, linear, planned, random, run, same, start, watching_gemms, watching_saved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scrimp.errors import DeviceError, ModelError, PlanError
from scrimp.formats import quantize
from scrimp.gemm import PlannedLinear, recomputed, reference_only, swap_in
from scrimp.precision import GEMMS, LinearPrecision, recipe, storage_bytes

MIXED = LinearPrecision("fp8_row", "nvfp4", "mxfp4", "fp8")


# ---- shapes and types


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_leading_axes_are_rows_of_one_matrix(name: str, bias: bool) -> None:
    flat = random(24, 100)
    expected = run(planned(name, bias=bias), flat)
    for shape in ((2, 12, 100), (2, 3, 4, 100)):
        layer = planned(name, bias=bias)
        x = flat.view(shape).detach().requires_grad_()
        y = layer(x)
        assert y.shape == (*shape[:-1], 37)
        y.backward(random(24, 37, seed=9).view(y.shape))
        assert x.grad is not None
        assert torch.equal(y.view(24, 37), expected.y)
        assert torch.equal(x.grad.view(24, 100), expected.x_grad)
        assert torch.equal(layer.weight.grad, expected.weight_grad)  # type: ignore[arg-type]


def test_one_row_without_leading_axes_is_a_matrix_of_one_row() -> None:
    row = run(planned("fp8"), random(100))
    matrix = run(planned("fp8"), random(100)[None])
    assert row.y.shape == (37,)
    assert row.x_grad.shape == (100,)
    assert torch.equal(row.y, matrix.y[0])
    assert torch.equal(row.x_grad, matrix.x_grad[0])


def test_the_bias_is_added_to_the_result_in_the_compute_type() -> None:
    x = random(24, 100, dtype=torch.bfloat16)
    layer = planned("fp8", dtype=torch.bfloat16)
    without = planned("fp8", dtype=torch.bfloat16, bias=False)
    assert torch.equal(layer(x), without(x) + layer.bias)
    passed = run(layer, x)
    g = random(24, 37, seed=9, dtype=torch.bfloat16)
    torch.testing.assert_close(passed.bias_grad, g.sum(0))


@pytest.mark.parametrize("name", QUANTIZED)
def test_autocast_computes_as_a_bf16_layer_does_and_keeps_gradients_in_the_parameters_type(name: str) -> None:
    x = random(24, 100)
    low = run(planned(name, dtype=torch.bfloat16), x.bfloat16())
    layer = planned(name)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(random(24, 37, seed=9, dtype=torch.bfloat16))
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert torch.equal(y, low.y)
    assert torch.equal(x.grad, low.x_grad.float())
    assert torch.equal(layer.weight.grad, low.weight_grad.float())


def test_autocast_in_backward_changes_nothing() -> None:
    expected = run(planned("nvfp4"), random(24, 100))
    layer = planned("nvfp4")
    y = layer(random(24, 100))
    with torch.autocast("cpu", torch.bfloat16):
        y.backward(random(24, 37, seed=9))
    assert torch.equal(layer.weight.grad, expected.weight_grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_in_the_compute_type_is_torchs_own_layer_bit_for_bit(dtype: torch.dtype) -> None:
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    x = random(2, 12, 100, dtype=dtype)
    assert run(planned(name, dtype=dtype), x).equals(run(linear(dtype=dtype), x))


def test_an_fp32_plan_for_a_bf16_layer_multiplies_in_fp32_and_rounds_once() -> None:
    layer, x = planned("fp32", bias=False, dtype=torch.bfloat16), random(24, 100, dtype=torch.bfloat16)
    expected = F.linear(x.float(), layer.weight.float()).bfloat16()
    assert torch.equal(layer(x), expected)


def test_autocast_does_not_reach_into_a_gemm_that_the_plan_runs_in_fp32() -> None:
    layer, x = planned("fp32"), random(24, 100)
    expected = F.linear(x, layer.weight).bfloat16() + layer.bias.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    rounded = F.linear(x.bfloat16().float(), layer.weight.bfloat16().float())
    assert torch.equal(y, expected)
    assert not torch.equal(y, rounded.bfloat16() + layer.bias.bfloat16())


@pytest.mark.parametrize("name", QUANTIZED)
def test_memory_layouts_change_no_number(name: str) -> None:
    x = random(24, 100)
    expected = run(planned(name), x)
    layer = planned(name)
    strided = torch.zeros(100, 24).T.copy_(x).requires_grad_()
    assert not strided.is_contiguous()
    y = layer(strided)
    g = torch.zeros(37, 24).T.copy_(random(24, 37, seed=9))
    y.backward(g)
    assert strided.grad is not None
    assert torch.equal(y, expected.y)
    assert torch.equal(strided.grad, expected.x_grad)
    assert torch.equal(layer.weight.grad, expected.weight_grad)  # type: ignore[arg-type]


def test_an_expanded_gradient_is_read_as_its_values() -> None:
    first, second = planned("fp8"), planned("fp8")
    first(random(24, 100)).sum().backward()
    second(random(24, 100)).backward(torch.ones(24, 37))
    assert torch.equal(first.weight.grad, second.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 100), (3, 0, 100)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_no_tokens_give_an_empty_result_and_zero_gradients(name: str, shape: tuple[int, ...]) -> None:
    layer = planned(name)
    passed = run(layer, torch.zeros(shape))
    assert passed.y.shape == (*shape[:-1], 37)
    assert passed.x_grad.shape == shape
    assert torch.equal(passed.weight_grad, torch.zeros_like(layer.weight))


def test_no_features_give_the_bias() -> None:
    layer = nn.Linear(1, 3)
    layer.weight = nn.Parameter(torch.zeros(3, 0))
    start(layer, "fp8")
    assert torch.equal(layer(torch.zeros(2, 0)), layer.bias.expand(2, 3))


# ---- gradients


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_gradients_of_two_passes_add_up(name: str) -> None:
    layer = planned(name)
    parts = []
    for seed in (1, 2):
        layer.zero_grad()
        layer(random(24, 100, seed=seed)).backward(random(24, 37, seed=9))
        parts.append((layer.weight.grad, layer.bias.grad))
    layer.zero_grad()
    for seed in (1, 2):
        layer(random(24, 100, seed=seed)).backward(random(24, 37, seed=9))
    assert torch.equal(layer.weight.grad, parts[0][0] + parts[1][0])  # type: ignore[arg-type, operator]
    assert torch.equal(layer.bias.grad, parts[0][1] + parts[1][1])  # type: ignore[arg-type, operator]


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("precision", [same("nvfp4"), MIXED])
def test_only_the_gradients_that_are_needed_are_computed_and_they_stay_the_same(
    precision: LinearPrecision, needs: tuple[bool, bool]
) -> None:
    expected = run(planned(precision), random(24, 100))
    layer, x = planned(precision), random(24, 100).requires_grad_(needs[0])
    layer.weight.requires_grad_(needs[1])
    with watching_gemms() as ran:
        layer(x).backward(random(24, 37, seed=9))
    gemms = ["fprop", *(["dgrad"] if needs[0] else []), *(["wgrad"] if needs[1] else [])]
    assert [execution.gemm for execution in ran] == gemms
    if needs[0]:
        assert torch.equal(x.grad, expected.x_grad)  # type: ignore[arg-type]
    if needs[1]:
        assert torch.equal(layer.weight.grad, expected.weight_grad)  # type: ignore[arg-type]


def test_passes_without_gradients_keep_nothing_and_give_the_same_result() -> None:
    layer, x = planned("fp8"), random(24, 100)
    expected = layer(x)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), watching_saved() as kept:
            y = layer(x)
        assert not y.requires_grad
        assert not kept.tensors
        assert torch.equal(y, expected)


def test_a_frozen_weight_keeps_neither_input_nor_codes() -> None:
    for saved in ("fp8", "fp32"):
        layer = planned(same("fp8", saved), bias=False)
        layer.weight.requires_grad_(False)
        with watching_saved() as kept:
            layer(random(24, 100).requires_grad_())
        assert not kept.tensors


def test_the_graph_can_be_walked_twice() -> None:
    layer = planned("nvfp4")
    y = layer(random(24, 100))
    g = random(24, 37, seed=9)
    y.backward(g, retain_graph=True)
    assert layer.weight.grad is not None
    once = layer.weight.grad.clone()
    y.backward(g)
    assert torch.equal(layer.weight.grad, 2 * once)


def test_gradients_of_gradients_are_refused() -> None:
    layer, x = planned("fp8"), random(24, 100).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_each_gemm_takes_the_recipe_that_the_plan_names() -> None:
    x = random(40, 100)
    mixed = run(planned(LinearPrecision("fp8_row", "nvfp4", "mxfp4", "fp32")), x)
    assert torch.equal(mixed.y, run(planned("fp8_row"), x).y)
    assert torch.equal(mixed.x_grad, run(planned("nvfp4"), x).x_grad)
    assert torch.equal(mixed.weight_grad, run(planned(same("mxfp4", "fp32")), x).weight_grad)
    with watching_gemms() as ran:
        run(planned(MIXED), x)
    expected = list(zip(GEMMS, ("fp8_row", "nvfp4", "mxfp4"), ["reference"] * 3, strict=True))
    assert [(e.gemm, e.recipe, e.backend) for e in ran] == expected


# ---- what is kept for the backward pass


def bytes_by_plan(saved: str, tokens: int, features: int) -> int:
    """Bytes of a saved X [tokens, features], by the accounting."""
    if saved in ("bf16", "fp32"):
        return tokens * features * (2 if saved == "bf16" else 4)
    entry = recipe(saved).wgrad
    assert entry is not None
    if entry.b.hadamard:
        tokens += -tokens % 16
    return storage_bytes((features, tokens), entry.b.element, entry.b.scaling)


@pytest.mark.parametrize("tokens", [37, 256])
@pytest.mark.parametrize("saved", [*QUANTIZED, "bf16", "fp32"])
def test_the_bytes_kept_are_those_of_the_memory_accounting(saved: str, tokens: int) -> None:
    layer = planned(LinearPrecision("fp8", "fp8", "fp8", saved))
    with watching_saved() as kept:
        layer(random(tokens, 100).requires_grad_())
    found = kept.nbytes()
    assert sum(found.values()) == bytes_by_plan(saved, tokens, 100)
    high = {"bf16": torch.bfloat16, "fp32": torch.float32}
    narrow = {8: torch.int8 if saved.startswith("int8") else torch.float8_e4m3fn, 4: torch.uint8}
    assert (high[saved] if saved in high else narrow[recipe(saved).bits]) in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_kept_give_the_gradients_that_the_input_kept_gives(name: str, dtype: torch.dtype) -> None:
    high = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    x = random(37, 100, dtype=dtype)
    codes, whole = (run(planned(same(name, saved), dtype=dtype), x) for saved in (name, high))
    assert codes.equals(whole)


@pytest.mark.parametrize("fprop", ["fp32", "bf16"])
def test_codes_are_made_of_the_input_in_the_compute_type_whatever_fprop_reads(fprop: str) -> None:
    for is_cast in (True, False):
        outcomes = []
        for saved in ("mxfp4", "bf16" if is_cast else "fp32"):
            layer = planned(LinearPrecision(fprop, "mxfp4", "mxfp4", saved))
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                y = layer(random(37, 100))
            y.backward(random(37, 37, seed=9, dtype=y.dtype))
            outcomes.append(layer.weight.grad)
        assert torch.equal(*outcomes)  # type: ignore[arg-type]


def test_other_codes_kept_are_read_as_their_values() -> None:
    """wgrad in fp32 from an X that was kept in fp8."""
    x = random(37, 100)
    passed = run(planned(LinearPrecision("fp32", "fp32", "fp32", "fp8")), x)
    values = quantize(x, "e4m3", "tile", -2).dequantize()
    expected = random(37, 37, seed=9).T @ values
    torch.testing.assert_close(passed.weight_grad, expected, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(passed.weight_grad, random(37, 37, seed=9).T @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp4"])
def test_activation_checkpointing_changes_no_bit(name: str, is_reentrant: bool) -> None:
    x = random(24, 100)
    expected = run(planned(name), x)
    layer = planned(name)
    with watching_saved() as kept:
        y_x = x.requires_grad_()
        y = checkpoint(layer, y_x, use_reentrant=is_reentrant)
    assert {t.data_ptr() for t in kept.tensors} <= {x.data_ptr()}
    y.backward(random(24, 37, seed=9))
    assert torch.equal(y, expected.y)
    assert torch.equal(x.grad, expected.x_grad)  # type: ignore[arg-type]
    assert torch.equal(layer.weight.grad, expected.weight_grad)  # type: ignore[arg-type]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """A product of a cheap producer."""
    return F.silu(gate) * up


def run_produced(layer: nn.Linear) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Result and gradients of recomputed(layer, swiglu, ...), what was kept, and the GEMMs that ran."""
    gate, up = random(24, 100, seed=1).requires_grad_(), random(24, 100, seed=2).requires_grad_()
    with watching_gemms() as ran:
        with watching_saved() as kept:
            y = recomputed(layer, swiglu, gate, up)
        y.backward(random(24, 37, seed=9))
    assert gate.grad is not None
    assert up.grad is not None
    assert layer.weight.grad is not None
    others = [t for t in kept.tensors if t.data_ptr() not in (gate.data_ptr(), up.data_ptr())]
    grads = [y.detach(), gate.grad, up.grad, layer.weight.grad, layer.bias.grad]
    return [g for g in grads if g is not None], others, [e.gemm for e in ran]


@pytest.mark.parametrize("name", [*QUANTIZED, "bf16"])
def test_recomputed_inputs_are_not_kept_and_no_bit_changes(name: str) -> None:
    expected, _, _ = run_produced(planned(same(name, "fp32")))
    found, kept, gemms = run_produced(planned(same(name, "recompute")))
    assert not kept
    assert gemms == ["fprop", "dgrad", "wgrad"]  # the product itself is not made again
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_recomputed_is_a_plain_call_of_other_plans_and_of_ordinary_layers() -> None:
    expected, kept, _ = run_produced(linear())
    assert kept
    found, kept, _ = run_produced(planned("fp32"))
    assert kept
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_recomputed_under_autocast_recomputes_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        outcomes = []
        for saved in ("bf16", "recompute"):
            layer = planned(same("fp8", saved))
            gate, up = random(24, 100, seed=1).requires_grad_(), random(24, 100, seed=2)
            y = recomputed(layer, swiglu, gate, up)
            with torch.autocast("cpu", enabled=False):
                y.backward(random(24, 37, seed=9, dtype=torch.bfloat16))
            outcomes.append((y.detach(), gate.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))  # type: ignore[arg-type]


# ---- bad input


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_not_finite_spreads_as_nan_and_never_becomes_a_number(name: str, poison: float) -> None:
    x, g = random(24, 100), random(24, 37, seed=9)
    bad_x, bad_g = x.clone(), g.clone()
    bad_x[3, 5], bad_g[4, 6] = poison, poison
    assert run(planned(name), bad_x).y[3].isnan().all()
    layer = planned(name)
    layer(bad_x).backward(g)
    assert layer.weight.grad is not None
    assert layer.weight.grad[:, 5].isnan().all()
    layer, x = planned(name), x.requires_grad_()
    layer(x).backward(bad_g)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert x.grad[4].isnan().all()
    assert layer.weight.grad[6].isnan().all()
    layer = planned(name)
    with torch.no_grad():
        layer.weight[7, 8] = poison
    assert layer(x)[:, 7].isnan().all()


@pytest.mark.parametrize("shape", [(3, 99), (3, 100, 1), (99,), ()])
def test_a_wrong_width_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="does not fit the weight") as error:
        planned("fp8")(torch.zeros(shape))
    assert "(..., 100)" in str(error.value)
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.complex64])
def test_types_that_planned_layers_do_not_compute_in_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match="float32 or bfloat16"):
        planned("fp8")(torch.ones(3, 100, dtype=dtype))


def test_whole_numbers_are_refused_under_autocast_too() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError, match=r"int64"):
        planned("fp8")(torch.ones(3, 100, dtype=torch.int64))


def test_input_and_weight_of_two_types_are_refused_without_autocast() -> None:
    with pytest.raises(ModelError, match="different types"):
        planned("fp8")(torch.ones(3, 100, dtype=torch.bfloat16))


def test_autocast_in_a_type_that_no_planned_layer_has_is_refused() -> None:
    with torch.autocast("cpu", torch.float16), pytest.raises(ModelError, match="float16"):
        planned("fp8")(torch.ones(3, 100))


def test_an_input_on_another_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="different devices"):
        planned("fp8")(torch.ones(3, 100, device="meta"))


def test_a_layer_that_nobody_can_recompute_for_is_refused() -> None:
    linear = nn.Linear(16, 16)
    swap_in(linear, LinearPrecision("fp8", "fp8", "fp8", "recompute"), choose=reference_only)
    with pytest.raises(PlanError, match=r"nothing tells it how.*add .*saved=bf16 to the precision"):
        linear(torch.randn(4, 16))
    with torch.no_grad():
        assert linear(torch.randn(4, 16)).shape == (4, 16)


def test_a_planned_linear_without_a_plan_says_so() -> None:
    with pytest.raises(ModelError, match="has no plan"):
        PlannedLinear(4, 4)(torch.randn(2, 4))
