"""Fingerprints find one lying layer among many, whatever it lies about, and never accuse one that tells the truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from planned_cases import QUANTIZED, linear, random, same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scrimp.errors import TrainingError
from scrimp.formats import Noise, Operand, project, quantize
from scrimp.formats.grouping import PIECE_ELEMENTS
from scrimp.formats.quantize import rotated_whole
from scrimp.gemm import (
    Backend,
    Fingerprints,
    PlannedModel,
    fingerprints,
    observing,
    reference_only,
    swap_in,
    without_witnesses,
)
from scrimp.gemm.backends import ReferenceBackend
from scrimp.gemm.problem import AXES, Use, operands_of
from scrimp.precision import GEMMS, RECIPES, LinearPrecision

WIDTH, TOKENS, LAYERS = 96, 80, 5
PIECE = 2**14
LIAR = "3"


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    layers = nn.Sequential(*(linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)))
    for number, layer in enumerate(layers):
        layer.weight.data.mul_(1 + 0.1 * random(WIDTH, WIDTH, seed=number).to(dtype))  # type: ignore[operator, union-attr]
    return layers


def planned(
    recipe: str | LinearPrecision, dtype: torch.dtype = torch.float32
) -> tuple[nn.Sequential, PlannedModel]:
    layers = model(dtype)
    found = swap_in(layers, recipe, seed=3, choose=reference_only)
    found.clock.begin(1)
    return layers, found


def step(layers: nn.Module, *, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
    """One forward and backward pass, bf16 under autocast."""
    x = (random(TOKENS, WIDTH, seed=9) * scale).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        layers(x).square().mean().backward()


def told(planned: PlannedModel, **options: Any) -> Fingerprints:
    found = Fingerprints({k: v.precision for k, v in planned.layers.items()}, **options)
    found.watch(planned.layers)
    return found


# ---- the truth


@pytest.mark.parametrize("saved", ["recipe", "high", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.every(11)
def test_layers_that_do_as_planned_are_proven(recipe: str, dtype: torch.dtype, saved: str) -> None:
    high = "bf16" if dtype == torch.bfloat16 else "fp32"
    kept = {"recipe": recipe, "high": high}.get(saved, saved)
    layers, plan = planned(same(recipe, kept))
    proof = told(plan)
    step(layers, dtype=dtype)
    proof.check()
    assert not fingerprints._signs.cache_info().currsize  # no later step holds them
    assert proof.proven == {(name, gemm) for name in plan.layers for gemm in GEMMS}
    assert not proof.pending


@pytest.mark.parametrize("scale", [1e-20, 1e-4, 1e6])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "mxfp4"])
@pytest.mark.every(4)
def test_outliers_and_sizes_raise_no_false_alarm(recipe: str, scale: float) -> None:
    layers, plan = planned(recipe)
    with torch.no_grad():
        for layer in layers:
            layer.weight[:, 5] *= 300  # type: ignore[index, operator, union-attr]
            layer.weight[7] *= 40  # type: ignore[index, operator, union-attr]
            layer.weight.mul_(0.02)  # type: ignore[operator, union-attr]
    proof = told(plan)
    step(layers, scale=scale)
    proof.check()


def test_tokens_that_a_rotation_pads_raise_no_false_alarm() -> None:
    layers, plan = planned("nvfp4", torch.float32)
    proof = told(plan)
    layers(random(37, WIDTH, seed=9).requires_grad_()).square().mean().backward()
    proof.check()
    assert not proof.pending


@pytest.mark.parametrize("first", [0, -1])
def test_many_forward_passes_may_wait_for_the_backward_pass_of_the_first_or_of_the_last(first: int) -> None:
    layers, plan = planned("fp8")
    proof, most = told(plan), fingerprints.MOST_WAITING + 3
    waiting = [layers(random(TOKENS, WIDTH, seed=number).requires_grad_()) for number in range(most)]
    waiting[first].square().mean().backward()
    proof.check()
    assert not proof.pending


@pytest.mark.slow
def test_what_shows_nothing_is_left_after_some_runs_and_zeros_never_are() -> None:
    layers, plan = planned("fp8")
    proof = told(plan)
    for _ in range(20):
        step(layers, scale=float("inf"))
    assert not proof.pending
    assert len(proof.undecided) == LAYERS * len(GEMMS)
    proof = told(plan)
    for _ in range(20):
        step(layers, scale=0.0)
    assert len(proof.pending) == LAYERS * len(GEMMS)
    proof.check()


def test_zeros_and_overflows_prove_nothing_and_the_next_run_may() -> None:
    layers, plan = planned("fp8")
    proof = told(plan)
    step(layers, scale=0.0)
    step(layers, scale=float("inf"))
    proof.check()
    assert len(proof.pending) == LAYERS * len(GEMMS)
    step(layers)
    assert not proof.pending


def test_two_forward_passes_before_their_backward_passes() -> None:
    layers, plan = planned("nvfp4")
    proof = told(plan)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (layers(random(TOKENS, WIDTH, seed=n)).square().mean() for n in (1, 2))
    first.backward()
    second.backward()
    proof.check()
    assert not [gemm for gemm in proof.pending if gemm != ("0", "dgrad")]  # its input needs no gradient


def test_nothing_is_changed_and_proven_layers_are_left_alone() -> None:
    gradients = []
    for watches in (False, True):
        layers, plan = planned("nvfp4")
        proof = told(plan) if watches else None
        torch.manual_seed(0)
        state = torch.get_rng_state()
        step(layers)
        assert torch.equal(state, torch.get_rng_state())
        gradients.append([layer.weight.grad.clone() for layer in layers])  # type: ignore[operator, union-attr]
        if proof is not None:
            seen = set(proof.seen)
            proof.seen.clear()
            step(layers)
            assert seen
            assert not proof.seen
    assert all(map(torch.equal, *gradients))


def test_other_formats_that_are_tried_are_no_lies() -> None:
    layers, plan = planned("nvfp4")
    proof = told(plan, at_once=True)
    with without_witnesses():
        plan.replan("fp8")
        step(layers)
        plan.replan("nvfp4")
    assert not proof.seen


# ---- lies


class Skips(ReferenceBackend):
    """Leaves the first operand of each GEMM as it is, the second, or both."""

    def __init__(self, *operands: int) -> None:
        self._operands, self._count = operands or (0, 1), 0

    def prepare(self, x: Tensor, use: Use) -> Any:
        number, self._count = self._count % 2, self._count + 1
        if number not in self._operands:
            return super().prepare(x, use)
        if use.operand is not None and use.operand.hadamard:  # the other operand is rotated
            x = rotated_whole(x, use.axis).to(x.dtype)
        return super().prepare(x, dataclasses.replace(use, operand=None))

    def prepare_and_store(self, x: Tensor, use: Use, saved: Use) -> tuple[Any, Any]:
        return self.prepare(x, use), self.store(x, saved)


def with_backend(backend: Backend, only: str) -> Callable[..., Backend]:
    return lambda recipe, gemm, shape, device: backend if gemm == only else ReferenceBackend()


def found_in(
    layers: nn.Module, plan: PlannedModel, dtype: torch.dtype = torch.bfloat16
) -> set[tuple[str, str]]:
    proof = told(plan)
    step(layers, dtype=dtype)
    assert len(proof.proven) + len(proof.lies) == LAYERS * len(GEMMS)
    return {(lie.layer, lie.gemm) for lie in proof.lies}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.every(11)
def test_one_layer_that_skips_its_quantizers_is_found(recipe: str, gemm: str, dtype: torch.dtype) -> None:
    layers, plan = planned(same(recipe, "bf16" if dtype == torch.bfloat16 else "fp32"))
    plan.layers[LIAR].choose = with_backend(Skips(), gemm)
    assert found_in(layers, plan, dtype) == {(LIAR, gemm)}


@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", ["fp8", "fp8_tensor", "mxfp8", "fp4", "nvfp4", "int8_hadamard"])
@pytest.mark.every(7)
def test_one_operand_that_stays_bf16_is_found_and_named(recipe: str, gemm: str, operand: int) -> None:
    layers, plan = planned(same(recipe, "bf16"))
    plan.layers[LIAR].choose = with_backend(Skips(operand), gemm)
    proof = told(plan)
    step(layers)
    (lie,) = proof.lies
    assert (lie.layer, lie.gemm) == (LIAR, gemm)
    name = {"fprop": "XW", "dgrad": "GW", "wgrad": "GX"}[gemm][operand]
    assert lie.found == f"{name} as if it had not been quantized"


def test_a_lie_that_hides_below_the_rounding_of_the_result_is_found() -> None:
    """An outlier that its scale maps exactly makes the result: what quantization does to the rest is lost in it."""
    layers, plan = planned(same("fp8", "bf16"))
    plan.layers["0"].choose = with_backend(Skips(0), "fprop")
    proof = told(plan)
    x = random(TOKENS, WIDTH, seed=9)
    x[:, 11] = 8.0
    with torch.no_grad():
        layers[0].weight[:, 11] = 2.0  # type: ignore[index, operator]
    with torch.autocast("cpu", torch.bfloat16):
        layers[0](x)
    (lie,) = proof.lies
    assert lie.found == "X as if it had not been quantized"


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
@pytest.mark.parametrize("wrong", ["mxfp8", "mxfp4", "bf16"])
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.every(5)
def test_a_layer_that_reports_one_recipe_and_runs_another_is_found(
    gemm: str, wrong: str, recipe: str
) -> None:
    layers, plan = planned(same(recipe, "bf16"))
    liar = plan.layers[LIAR]
    honest = liar._use

    def use(asked: str, operand: int, now: tuple[int, int], other: str | None) -> Use:
        return honest(asked, operand, now, wrong if asked == gemm else other)

    liar._use = use  # type: ignore[method-assign]
    assert found_in(layers, plan) == {(LIAR, gemm)}


def test_a_plan_that_did_not_reach_one_layer_is_found() -> None:
    layers, plan = planned("fp8")
    before = {name: layer.precision for name, layer in plan.layers.items()}
    plan.replan("nvfp4")
    plan.layers[LIAR].precision = before[LIAR]
    proof = Fingerprints(dict.fromkeys(plan.layers, same("nvfp4")))
    proof.watch(plan.layers)
    step(layers)
    assert {(lie.layer, lie.gemm, lie.found) for lie in proof.lies} == {
        (LIAR, gemm, "it ran in fp8") for gemm in GEMMS
    }


def test_codes_that_lie_are_found_in_the_layer_that_keeps_them() -> None:
    class Halves(ReferenceBackend):
        def store(self, x: Tensor, use: Use) -> Any:
            return super().store(x / 2, use)

    layers, plan = planned("nvfp4")
    plan.layers[LIAR].choose = lambda *site: _HALVES
    _HALVES = Halves()
    assert found_in(layers, plan) == {(LIAR, "wgrad")}


def test_the_error_names_every_lie() -> None:
    layers, plan = planned(same("fp8", "bf16"))
    for name in ("1", LIAR):
        plan.layers[name].choose = with_backend(Skips(), "dgrad")
    proof = told(plan)
    step(layers)
    with pytest.raises(TrainingError, match=r"1\.dgrad did not run in fp8 .*nor did 1 others") as caught:
        proof.check()
    assert f"{LIAR}.dgrad: G as if it had not been quantized and W as if" in str(caught.value)


@pytest.mark.parametrize("gemm", GEMMS)
def test_in_a_library_the_first_lie_stops_the_pass(gemm: str) -> None:
    layers, plan = planned(same("fp8", "bf16"))
    plan.layers[LIAR].choose = with_backend(Skips(), gemm)
    plan.prove({})
    with pytest.raises(TrainingError, match=rf"{LIAR}\.{gemm} did not run in fp8"):
        step(layers)


@pytest.mark.parametrize("gemm", GEMMS)
def test_only_what_a_plan_changes_is_proven(gemm: str) -> None:
    layers, plan = planned(same("fp8", "bf16"))
    before = {name: layer.precision for name, layer in plan.layers.items()}
    plan.replan({"2": dataclasses.replace(before["2"], **{gemm: "mxfp8"})})
    proof = plan.prove(before)
    assert proof.pending == {("2", gemm)}
    step(layers)
    assert proof.proven == {("2", gemm)}


# ---- compiled, and by Triton's kernels


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("gemm", [None, *GEMMS])
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.every(6)
def test_compiled_layers_are_proven_and_nothing_compiles_anew(gemm: str | None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    layers, plan = planned("nvfp4")
    counter = CompileCounterWithBackend("aot_eager")
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
    step(layers)
    graphs = counter.frame_count
    if gemm is not None:
        plan.layers[LIAR].choose = with_backend(Skips(), gemm)
    proof = told(plan)
    step(layers)
    assert {(lie.layer, lie.gemm) for lie in proof.lies} == (set() if gemm is None else {(LIAR, gemm)})
    assert len(proof.proven) == LAYERS * len(GEMMS) - len(proof.lies)
    assert counter.frame_count == graphs


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "fp4", "mxfp8", "nvfp4"])
def test_lies_of_triton_kernels_are_found(recipe: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    import triton_cases  # noqa: F401  (the interpreter)

    from scrimp.gemm.backends import TritonBackend

    class SkipsOne(TritonBackend):
        """Quantizes G to fewer numbers than it should."""

        def prepare(self, x: Tensor, use: Use) -> Any:
            return super().prepare(x.sign() * x.abs().amax() if use.axis == -1 else x, use)

        def prepare_pair(self, x: Tensor, first: Use, second: Use) -> None:
            return None

    layers, plan = planned(recipe)
    for name, layer in plan.layers.items():
        backend = SkipsOne() if name == LIAR else TritonBackend()
        layer.choose = lambda *site, backend=backend: backend  # type: ignore[misc]
    proof = told(plan)
    step(layers)
    assert {(lie.layer, lie.backend) for lie in proof.lies} == {(LIAR, "triton")}
    assert {lie.gemm for lie in proof.lies} == {"fprop", "dgrad"}
    assert len(proof.proven) == LAYERS * len(GEMMS) - 2


# ---- what they are made of


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "operand",
    sorted(
        {o for r in RECIPES.values() for g in GEMMS for o in operands_of(g, r.name) if o is not None}, key=str
    ),
    ids=str,
)
def test_a_projection_is_the_quantized_matrix_times_vectors(
    operand: Operand, axis: int, transposed: bool
) -> None:
    x, noise = random(45, 70).bfloat16(), Noise(7)
    vectors = random(45 if transposed else 70, 4, seed=2).double()
    values = quantize(
        x,
        operand.element,
        operand.scaling,
        axis,
        operand.rounding,
        hadamard=operand.hadamard,
        fallback=operand.fallback,
        noise=noise,
    ).dequantize(torch.float64)
    wanted = (values.T if transposed else values) @ vectors
    found = project(x, operand, axis, vectors, transposed=transposed, noise=noise)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.every(4)
def test_a_proof_makes_no_tensor_larger_than_a_piece(
    gemm: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", PIECE)
    layers, plan = planned(recipe)
    executions: list[Any] = []
    with observing(executions.append):
        x = random(1024, WIDTH, seed=9).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            layers[0](x).square().mean().backward()
    proof = told(plan)
    with Largest() as largest:
        for execution in executions:
            if execution.gemm in ("fprop", gemm):
                proof(execution)
    assert ("0", gemm) in proof.proven
    results = 16 * 8 * 1024  # by 16 vectors, in float64
    assert largest.bytes <= max(8 * PIECE, results)
    assert 2 * largest.bytes < 4 * x.numel()


def test_no_recipe_rounds_what_is_saved_by_chance() -> None:
    """Else the codes of X would need the noise of wgrad's second operand."""
    layers, _ = planned("nvfp4")
    executions: list[Any] = []
    with observing(executions.append):
        step(layers)
    kept = [execution.kept for execution in executions if execution.gemm == "fprop"]
    assert all(pair is not None and pair[0].axis == AXES["wgrad"][1] for pair in kept)
