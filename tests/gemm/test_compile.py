"""Compiled planned layers: no graph breaks, the numbers of eager mode, and new plans that compile nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planned_cases import (
    QUANTIZED,
    assert_all_equal,
    blocks,
    planned,
    random,
    run,
    run_model,
    same,
    start,
    watching_gemms,
    watching_saved,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from scrimp.gemm import recomputed, reference_only, register_flop_formulas, swap_in
from scrimp.precision import LinearPrecision, capacity


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """In one graph, with the kernels of eager mode."""
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def counting_blocks(model: nn.Sequential) -> CompileCounterWithBackend:
    """Compiles each block on its own and counts the graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    return counter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.every(3)
def test_graphs_give_the_bits_of_eager_mode(name: str, dtype: torch.dtype) -> None:
    x = random(37, 100, dtype=dtype)
    layer = planned(name, dtype=dtype)
    assert run(compiled(layer), x, weight=layer).equals(run(planned(name, dtype=dtype), x))


@pytest.mark.parametrize("saved", ["fp32", "bf16", "mxfp8", "fp4"])
@pytest.mark.every(2)
def test_whatever_is_saved_graphs_give_the_bits_of_eager_mode(saved: str) -> None:
    precision, x = LinearPrecision("fp8", "nvfp4", "fp8_row", saved), random(2, 20, 100)
    layer = planned(precision)
    assert run(compiled(layer), x, weight=layer).equals(run(planned(precision), x))


def test_a_plan_in_the_compute_type_compiles_to_the_plain_layers_numbers() -> None:
    x, layer = random(24, 100), planned("fp32")
    found, expected = run(compiled(layer), x, weight=layer), run(planned("fp32"), x)
    for name in ("y", "x_grad", "weight_grad", "bias_grad"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


def test_autocast_inside_a_graph_gives_the_bits_of_eager_mode() -> None:
    x = random(24, 100)
    layer, twin = planned("nvfp4"), planned("nvfp4")

    def call(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)  # type: ignore[no-any-return]

    found = run(lambda x: compiled(call)(layer, x), x, weight=layer)  # type: ignore[arg-type]
    expected = run(lambda x: call(twin, x), x, weight=twin)  # type: ignore[arg-type]
    assert found.y.dtype == torch.bfloat16
    assert found.equals(expected)


def test_graphs_report_their_gemms_like_eager_mode() -> None:
    precision = LinearPrecision("fp8", "nvfp4", "mxfp4", "mxfp4")
    layer = planned(precision)
    with watching_gemms() as ran:
        run(compiled(layer), random(24, 100), weight=layer)
    assert [(e.gemm, e.recipe) for e in ran] == [("fprop", "fp8"), ("dgrad", "nvfp4"), ("wgrad", "mxfp4")]


# ---- memory


def test_graphs_keep_codes_and_no_input() -> None:
    layer, x = planned("nvfp4"), random(256, 100).requires_grad_()
    with watching_saved() as kept:
        compiled(layer)(x)
    others = [t for t in kept.tensors if t.nbytes > 64 and t.shape != layer.weight.shape]
    assert [(t.dtype, t.nbytes) for t in others] == [(torch.uint8, capacity(256, 100))]


def test_graphs_with_a_frozen_weight_keep_neither_input_nor_codes() -> None:
    for saved in ("fp8", "fp32"):
        layer = planned(same("fp8", saved), bias=False)
        layer.weight.requires_grad_(False)
        x = random(64, 100).requires_grad_()
        with watching_saved() as kept:
            y = compiled(layer)(x)
        assert all(t.nbytes <= 64 or t.shape == layer.weight.shape for t in kept.tensors)
        y.sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("shape", [(0, 100), (2, 0, 100)])
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.every(7)
def test_no_tokens_give_an_empty_result_and_zero_gradients(name: str, shape: tuple[int, ...]) -> None:
    layer = planned(name)
    passed = run(compiled(layer), torch.zeros(shape), weight=layer)
    assert passed.y.shape == (*shape[:-1], 37)
    assert torch.equal(passed.weight_grad, torch.zeros_like(layer.weight))


@pytest.mark.slow
def test_recomputed_inputs_are_made_again_and_the_product_is_not() -> None:
    x = random(24, 100)
    outcomes, gemms = [], []
    for saved, is_compiled in (("fp32", False), ("recompute", True)):
        layer = planned(same("fp8", saved))

        def call(x: Tensor, layer: nn.Linear = layer) -> Tensor:
            return recomputed(layer, lambda t: 2 * F.silu(t), x)

        call = compiled(call) if is_compiled else call
        with watching_gemms() as ran:
            outcomes.append(run(call, x, weight=layer))  # type: ignore[arg-type]
        gemms.append([e.gemm for e in ran])
        with watching_saved() as kept:
            call(x.clone().requires_grad_())
    assert gemms == [["fprop", "dgrad", "wgrad"]] * 2
    assert outcomes[0].equals(outcomes[1])
    assert sum(t.nbytes for t in kept.tensors if t.shape != layer.weight.shape) <= x.nbytes + 64


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.every(2)
def test_activation_checkpointing_inside_a_graph_changes_no_bit(name: str) -> None:
    x = random(24, 64)
    model, twin = blocks(1), blocks(1)
    start(model, name)
    start(twin, name)
    wrapped = compiled(lambda x: checkpoint(model[0], x, use_reentrant=False))
    x = x.requires_grad_()
    y = wrapped(x)
    y.backward(random(24, 64, seed=9))
    expected = run_model(twin, x)
    assert torch.equal(y, expected[0])
    assert torch.equal(x.grad, expected[1])  # type: ignore[arg-type]
    assert_all_equal([p.grad for p in model.parameters() if p.grad is not None], expected[2:])


# ---- how often it compiles


def test_equal_blocks_share_their_graphs_whatever_their_recipes() -> None:
    model, x = blocks(6), random(24, 64)
    plan = start(model, "fp8")
    plan.replan({f"{i}.up": same(QUANTIZED[i], "fp8") for i in range(6)})
    counter = counting_blocks(model)
    run_model(model, x)
    # Which blocks there are is not what is compiled; the autograd state of their inputs is.
    assert counter.frame_count == 1


@pytest.mark.slow
def test_a_new_plan_for_half_of_the_layers_compiles_nothing() -> None:
    model, x = blocks(4), random(24, 64)
    plan = start(model, "nvfp4")
    counter = counting_blocks(model)
    run_model(model, x)
    before = counter.frame_count
    names = list(plan.layers)
    for number, recipe in enumerate(("fp4", "mxfp4", "fp8")):
        precision = LinearPrecision(recipe, "fp8_row", recipe, "mxfp4")
        plan.replan(dict.fromkeys(names[number % 2 :: 2], precision))
        found = run_model(model, x)
        twin = blocks(4)
        start(twin, {name: layer.precision for name, layer in plan.layers.items()})  # type: ignore[arg-type]
        assert_all_equal(found, run_model(twin, x))
    assert counter.frame_count == before


@pytest.mark.slow
def test_another_kind_of_saved_input_compiles_one_more_graph_and_going_back_none() -> None:
    model, x = blocks(4), random(24, 64)
    plan = start(model, "fp8")
    counter = counting_blocks(model)
    run_model(model, x)
    before = counter.frame_count
    up = [name for name in plan.layers if name.endswith("up")]
    for saved, more in (
        ("fp4", 0),
        ("nvfp4", 0),
        ("mxfp8", 0),
        ("fp32", 1),
        ("bf16", 2),
        ("fp8", 2),
        ("fp4", 2),
    ):
        plan.replan(dict.fromkeys(up, same("fp8", saved)))
        run_model(model, x)
        assert counter.frame_count == before + more


@pytest.mark.slow
def test_steps_compile_nothing_with_a_clock_that_is_set_or_not() -> None:
    """In a graph a step is a number that it reads: the noise of compiled and eager steps is the same."""
    x = random(24, 64)
    found: dict[bool, list[list[Tensor]]] = {}
    for is_compiled in (False, True):
        model = blocks(2)
        clock = start(model, "nvfp4").clock
        clock.is_set = False
        counter = CompileCounterWithBackend("aot_eager")
        call = torch.compile(model, backend=counter, fullgraph=True) if is_compiled else model
        found[is_compiled] = []
        for step in range(6):
            if step >= 3:
                clock.begin(100 + step, first_row=7 * step)
            x_here = x.clone().requires_grad_()
            model.zero_grad()
            call(x_here).square().sum().backward()
            assert x_here.grad is not None
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found[is_compiled].append([x_here.grad, *grads])
        assert clock.now == (105, 35)
    assert counter.frame_count <= 2  # a second when the loop takes over the clock
    for eager, graph in zip(found[False], found[True], strict=True):
        assert_all_equal(eager, graph)
    firsts = [step[0] for step in found[True]]
    assert not any(torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])


@pytest.mark.slow
def test_a_new_batch_size_compiles_one_dynamic_graph_for_all_later_ones() -> None:
    layer, twin = planned("nvfp4"), planned("nvfp4")
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(layer, backend=counter, fullgraph=True)
    for tokens in (24, 40, 33, 129, 200):
        x = random(tokens, 100)
        assert run(call, x, weight=layer).equals(run(twin, x))
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_inductor_gives_the_numbers_of_eager_mode(name: str) -> None:
    """Its norms and activations round otherwise, which moves some codes: a hundredth of the result."""
    x = random(24, 64)
    model, twin = blocks(2), blocks(2)
    start(model, name)
    start(twin, name)
    call = torch.compile(model, fullgraph=True)
    y = call(x)
    y.backward(random(24, 64, seed=9))
    expected = run_model(twin, x)
    for found, wanted in zip(
        [y, *(p.grad for p in model.parameters())], [expected[0], *expected[2:]], strict=True
    ):
        assert found is not None
        assert (found - wanted).norm() <= 0.01 * wanted.norm()


def test_torchs_flop_counter_counts_compiled_gemms() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    register_flop_formulas()
    linear = nn.Linear(64, 96)
    swap_in(linear, "fp8", choose=reference_only)
    x = torch.randn(128, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        torch.compile(linear, backend="aot_eager")(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 128 * 64 * 96


@pytest.mark.slow
def test_layers_that_move_from_8_to_4_bits_one_by_one_compile_nothing() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))
    planned = swap_in(model, "fp8", choose=reference_only)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(64, 32, requires_grad=True)
    for name in planned.layers:
        compiled(x).sum().backward()
        planned.replan({name: LinearPrecision.of("fp4")})
    compiled(x).sum().backward()
    assert counter.frame_count == 1
