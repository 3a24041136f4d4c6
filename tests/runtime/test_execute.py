"""A plan on a model: which layers run in which recipe, on which back end, with parameters that stay what they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_proof import ARCHITECTURE, UNTIED, realised
from torch import Tensor

from scrimp.data import Batch
from scrimp.errors import PlanError
from scrimp.gemm import BackendChooser, Execution, observing, reference_only
from scrimp.gemm.backends import ReferenceBackend
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.planner import Plan
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.plan import rows_of
from scrimp.precision import GEMMS
from scrimp.runtime import Executable, choose_backends, compile_blocks, describe_backends, quantizes, realise
from scrimp.runtime.memory import take_room

CPU = torch.device("cpu")
NUM_BLOCKS = ARCHITECTURE.num_layers
_, FIRST_WEIGHTS_ON_HOST = rows_of(Placement(("keep",) * NUM_BLOCKS, States.split(NUM_BLOCKS, weights=1)), "")


def batch(rows: int = 2, length: int = 64) -> tuple[Tensor, Tensor]:
    """Tokens and their successors, of which a few are ignored."""
    stream = torch.randint(64, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    targets = stream[:, 1:].clone()
    targets[:, ::9] = -100
    return stream[:, :-1], targets


def passed(executable: Executable) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one micro-batch."""
    executable.model.zero_grad()
    loss = executable.loss(Batch.of(*batch())).total
    loss.backward()
    found = {name: p.grad for name, p in executable.model.named_parameters()}
    return loss.detach(), {name: grad for name, grad in found.items() if grad is not None}


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, by norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ---- parameters


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
def test_weights_that_live_on_the_host_are_filled_where_they_live(parameters: str) -> None:
    """Never twice in host memory: of a 7B model the copy alone would be 13 GB."""
    plan, plain = realised("bf16", parameters, ARCHITECTURE)
    hosted = dataclasses.replace(plan, states=FIRST_WEIGHTS_ON_HOST)
    filled: dict[str, int] = {}

    def fill(model: Model) -> None:
        initialise(model, 0)
        filled.update({name: parameter.data_ptr() for name, parameter in model.named_parameters()})

    executable = realise(
        hosted,
        ARCHITECTURE,
        fill,
        device=CPU,
        parameters=parameters,
        compute="bf16",
        room=take_room(hosted.placement, CPU, host_bytes=2**20),
    )
    assert executable.host is not None
    at_home = executable.host.weights.at_home()
    assert len(at_home) == len(list(executable.model.blocks[0].parameters()))
    for name, parameter in executable.model.named_parameters():
        if parameter in at_home:
            assert at_home[parameter].data_ptr() == filled[name]
    theirs = dict(plain.model.named_parameters())
    for name, mine in executable.parameters():
        assert torch.equal(mine.local, theirs[name]), name


def test_activations_do_not_leave_where_no_host_memory_was_taken() -> None:
    plan, executable = realised("bf16", "bf16", ARCHITECTURE)
    leaves = dataclasses.replace(plan.blocks["0"], activations="keep+offload")
    with pytest.raises(PlanError, match="taken no host memory"):
        executable.change_activations(dataclasses.replace(plan, blocks={**plan.blocks, "0": leaves}))


def test_a_micro_batch_beyond_the_planned_one_is_refused_before_it_runs() -> None:
    _, executable = realised("bf16", "bf16", ARCHITECTURE)
    small = dataclasses.replace(executable, most_tokens=2 * 64, longest=64)
    assert torch.isfinite(small.loss(Batch.of(*batch(2, 64))).total)
    for rows, length, says in ((3, 64, "larger than the plan"), (1, 128, "longer than the planned one")):
        with pytest.raises(PlanError, match=says):
            small.loss(Batch.of(*batch(rows, length)))


def test_a_plan_with_a_part_on_the_host_is_no_model_without_room_there() -> None:
    plan, _ = realised("bf16", "bf16", ARCHITECTURE)
    hosted = dataclasses.replace(plan, states=FIRST_WEIGHTS_ON_HOST)
    with pytest.raises(PlanError, match="no room was taken"):
        realise(hosted, ARCHITECTURE, lambda model: None, device=CPU, parameters="bf16", compute="bf16")


@pytest.mark.parametrize("architecture", [ARCHITECTURE, UNTIED], ids=["tied-bias", "untied"])
def test_a_planned_model_has_the_parameters_names_and_state_of_a_plain_one(architecture) -> None:
    _, plain = realised("bf16", "fp32", architecture)
    _, planned = realised("nvfp4,head=fp8", "fp32", architecture)
    assert plain.planned is None
    assert planned.planned is not None
    mine, theirs = planned.model.state_dict(), plain.model.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor)
        assert mine[name].dtype == tensor.dtype
    assert [n for n, _ in planned.model.named_parameters()] == [n for n, _ in plain.model.named_parameters()]
    assert [n for n, _ in planned.model.named_buffers()] == [n for n, _ in plain.model.named_buffers()]
    assert list(dict(planned.model.named_modules())) == list(dict(plain.model.named_modules()))
    fresh = build_model(architecture)
    fresh.load_state_dict(mine)
    assert torch.equal(fresh.head_weight, planned.model.head_weight)


# ---- what runs


@pytest.mark.parametrize(
    ("precision", "compute", "expected"),
    [
        ("bf16", "bf16", False),
        ("fp32", "fp32", False),
        ("fp8", "bf16", True),
        ("bf16,head=fp8", "bf16", True),
        ("bf16,blocks.0.mlp.down.wgrad=fp8", "bf16", True),
        ("bf16,*.mlp.down.saved=fp8", "bf16", True),
        ("bf16,*.mlp.down.saved=recompute", "bf16", True),
        ("bf16,*.mlp.down=fp32", "bf16", True),
    ],
)
def test_layers_are_planned_where_any_gemm_differs_from_the_working_format(
    precision: str, compute: str, expected: bool
) -> None:
    plan, executable = realised(precision, "fp32", UNTIED)
    assert quantizes(plan, compute) == expected
    assert (executable.planned is not None) == expected


def ran_in(executable: Executable) -> dict[str, set[str]]:
    """Layer and GEMM to the recipes that were seen."""
    seen: dict[str, set[str]] = {}

    def watch(execution: Execution) -> None:
        seen.setdefault(f"{execution.layer}.{execution.gemm}", set()).add(execution.recipe)

    with observing(watch):
        passed(executable)
    return seen


def test_every_gemm_runs_in_its_own_recipe() -> None:
    precision = "fp8,*.wgrad=bf16,blocks.1.mlp.*=fp4/nvfp4/mxfp4,head=fp8_row,blocks.0.attention.out=bf16"
    plan, executable = realised(precision, "fp32", UNTIED)
    ran = ran_in(executable)
    expected = {
        f"{layer}.{gemm}": {getattr(choice, gemm)} for layer, choice in plan.gemms.items() for gemm in GEMMS
    }
    for plain in [name for name in expected if name.startswith("blocks.0.attention.out")]:
        assert expected.pop(plain) == {"bf16"}  # torch's own path, unobserved
    assert ran == expected
    assert ran["blocks.1.mlp.down.wgrad"] == {"mxfp4"}
    assert ran["blocks.0.mlp.down.wgrad"] == {"bf16"}
    assert ran["head.dgrad"] == {"fp8_row"}


def test_a_head_alone_can_be_quantized() -> None:
    _, executable = realised("bf16,head=fp8", "fp32", UNTIED)
    assert set(ran_in(executable)) == {"head.fprop", "head.dgrad", "head.wgrad"}


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
def test_gradients_have_the_type_of_their_parameters_and_are_near_the_plain_ones(parameters: str) -> None:
    _, plain = realised("bf16", parameters, UNTIED)
    _, planned = realised("fp8,head=fp8", parameters, UNTIED)
    loss, expected = passed(plain)
    found_loss, found = passed(planned)
    assert float(found_loss) == pytest.approx(float(loss), rel=0.01)
    assert found_loss != loss
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert grad.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[parameters]
        # Three hundred elements of the first norm, behind all quantized layers, are the worst.
        assert distance(grad, expected[name]) < 0.35, name


# ---- what is saved


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
def test_recomputing_an_input_changes_no_number(parameters: str) -> None:
    _, kept = realised("nvfp4,*.saved=bf16", parameters, UNTIED)
    recompute = "*.mlp.down.saved=recompute,*.mlp.gate_up.saved=recompute,*.attention.qkv.saved=recompute"
    _, recomputed = realised(f"nvfp4,*.saved=bf16,{recompute}", parameters, UNTIED)
    for executable in (kept, recomputed):
        executable.begin(3, 128)
    loss, expected = passed(kept)
    found_loss, found = passed(recomputed)
    assert torch.equal(loss, found_loss)
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


# ---- time


def test_begin_sets_the_clock_of_every_layer_and_of_the_head() -> None:
    _, executable = realised("nvfp4,head=fp4", "fp32", UNTIED)
    assert executable.planned is not None
    assert executable.model.planned_head is not None
    executable.begin(7, 512)
    clocks = [layer.clock for layer in executable.planned.layers.values()]
    assert {clock.now for clock in [*clocks, executable.model.planned_head.clock]} == {(7, 512)}
    _, first = passed(executable)
    _, again = passed(executable)  # a forward pass does not move a clock that is set
    executable.begin(7, 640)
    _, elsewhere = passed(executable)
    executable.begin(8, 512)
    _, later = passed(executable)
    name = "blocks.0.mlp.down.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], elsewhere[name])
    assert not torch.equal(first[name], later[name])


def test_beginning_a_micro_batch_of_a_plain_model_does_nothing() -> None:
    _, executable = realised("bf16", "fp32", UNTIED)
    executable.begin(1, 0)
    assert executable.planned is None


# ---- back ends


def described(plan: Plan, choose: BackendChooser) -> str:
    return describe_backends(plan, UNTIED, choose, CPU, tokens=256)


def test_the_log_says_which_recipes_are_emulated() -> None:
    plan, _ = realised("fp8,*.mlp.*=nvfp4,*.wgrad=bf16", "fp32", UNTIED)
    assert described(plan, reference_only) == "fp8 by reference (emulated), nvfp4 by reference (emulated)"

    class Native(ReferenceBackend):
        name = "torch"

        def emulates(self, recipe: str) -> bool:
            return False

    def mixed(recipe: str, *site: object) -> ReferenceBackend:
        return Native() if recipe == "fp8" else ReferenceBackend()

    assert described(plan, mixed) == "fp8 by torch, nvfp4 by reference (emulated)"
    plain, _ = realised("bf16", "fp32", UNTIED)
    assert described(plain, reference_only) == ""


def backends_of(precision: str, backend: str = "auto") -> tuple[Plan, str]:
    """What this CPU chooses, spelled."""
    plan, _ = realised(precision, "fp32", UNTIED)
    return plan, described(plan, choose_backends(plan, UNTIED, CPU, tokens=256, backend=backend))


def test_formats_that_no_cpu_multiplies_are_emulated_and_said_to_be() -> None:
    for recipe in ("nvfp4", "mxfp4", "fp4"):
        assert backends_of(recipe)[1] == f"{recipe} by numba (emulated)"
    assert backends_of("fp8", "reference")[1] == "fp8 by reference (emulated)"


def test_a_back_end_that_cannot_run_the_plan_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="nvfp4"):
        backends_of("nvfp4", "torch")


# ---- compiled


@pytest.mark.parametrize(
    "precision", [pytest.param("fp8", marks=pytest.mark.slow), "nvfp4,head=fp8,*.mlp.down.saved=recompute"]
)
@pytest.mark.slow
def test_compiled_blocks_give_the_loss_and_gradients_of_eager_ones(precision: str) -> None:
    _, eager = realised(precision, "fp32", UNTIED)
    _, compiled = realised(precision, "fp32", UNTIED)
    torch._dynamo.reset()
    for executable in (eager, compiled):
        executable.begin(2, 0)
    for block in compiled.model.blocks:
        block.compile(backend="aot_eager")
    loss, expected = passed(eager)
    found_loss, found = passed(compiled)
    assert float(found_loss) == pytest.approx(float(loss), rel=2e-3)
    for name, grad in found.items():
        assert distance(grad, expected[name]) < 0.05, name
    assert ran_in(compiled) == ran_in(eager)


def test_compiling_marks_every_block() -> None:
    _, executable = realised("fp8", "fp32", UNTIED)
    compile_blocks(executable.model)  # nothing is compiled before the first pass
    assert all(block.is_compiled for block in executable.model.blocks)
