"""Plans from a profile, and models that run by them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from small_nets import LAYERS, WIDTH, batch, is_plain, loss, loss_in_bf16, net, train, trained
from torch import Tensor, nn

import scrimp
from scrimp.api.arguments import budget_from
from scrimp.errors import PlanError, TrainingError
from scrimp.gemm import Backend, Execution, PlannedModel, observing
from scrimp.gemm.backends import ReferenceBackend
from scrimp.gemm.problem import Use
from scrimp.planner.precision import PrecisionPlan, PrecisionProfile
from scrimp.precision import GEMMS
from scrimp.profiler.gemm_times import measure_gemm_times


@pytest.fixture(scope="module")
def profile() -> PrecisionProfile:
    model, optimizer = trained()
    return scrimp.measure(model, optimizer, [batch(0), batch(1)], loss)


# -- plan --------------------------------------------------------------------------------------


def test_a_budget_is_a_share_a_mapping_or_a_budget(profile: PrecisionProfile) -> None:
    plans = [scrimp.plan(profile, given) for given in (0.75, {"fp4_flops": 0.75}, scrimp.Budget(0.75))]
    assert plans[0].precisions == plans[1].precisions == plans[2].precisions
    low = sum(
        layer.flops_share / 3
        for layer in plans[0].layers.values()
        for gemm in GEMMS
        if layer.gemms[gemm].choice == "nvfp4"
    )
    assert low == pytest.approx(plans[0].predicted["fp4_flops"])
    assert low >= 0.75 - 1e-9


@examples(50)
@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_is_a_budget_exactly_if_it_is_a_share(share: float) -> None:
    if 0 <= share <= 1:
        assert budget_from(share).fp4_flops == share
    else:
        with pytest.raises(PlanError, match="share from 0 to 1"):
            budget_from(share)


@pytest.mark.parametrize("budget", [{}, {"fp4": 0.5}, {"fp4_flops": "most"}, "0.75", True, None])
def test_what_is_no_budget_is_refused(profile: PrecisionProfile, budget: Any) -> None:
    with pytest.raises(PlanError, match="budget"):
        scrimp.plan(profile, budget)


def test_a_plan_goes_on_from_the_current_one(profile: PrecisionProfile) -> None:
    first = scrimp.plan(profile, 0.75)
    again = scrimp.plan(profile, 0.75, current=first, step=7)
    assert again.precisions == first.precisions
    assert (again.reason, again.step, first.step) == ("the same plan again", 7, profile.step)


def test_plans_that_cannot_be_are_refused(profile: PrecisionProfile) -> None:
    with pytest.raises(PlanError, match="share of FLOPs in 4 bits"):
        scrimp.plan(profile.select(("fp8",)), 0.5)
    with pytest.raises(PlanError, match="measured times"):
        scrimp.plan(profile, {"step_seconds": 1.0})
    with pytest.raises(PlanError, match=r"pipeline stage.*4 numbers"):
        scrimp.plan(profile, 0.5, stages=[0, 1])
    with pytest.raises(PlanError, match=r"not measured.*nvfp4"):
        scrimp.plan(profile.select(("fp8",)), 0.0, current=scrimp.plan(profile, 1.0))
    other, optimizer = trained(blocks=3)
    deeper = scrimp.measure(other, optimizer, [batch(0)], loss)
    with pytest.raises(PlanError, match=r"other layers.*'blocks\.2\.down'"):
        scrimp.plan(profile, 0.5, current=scrimp.plan(deeper, 0.5))


def test_a_budget_in_seconds_takes_measured_times(profile: PrecisionProfile) -> None:
    seconds = np.ones((len(LAYERS), 3, 2))
    seconds[:, :, profile.formats.index("nvfp4")] = 0.5
    plan = scrimp.plan(profile, {"step_seconds": 9.0}, seconds=seconds)
    assert plan.predicted["step_seconds"] <= 9.0


@pytest.mark.slow
def test_a_speedup_is_planned_by_the_table_of_this_device(tmp_path: Path, monkeypatch: Any) -> None:
    """As the guide says: Scrimp's GEMM table, with bf16 among the formats."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, optimizer = trained()
    made = scrimp.measure(model, optimizer, [batch(0)], loss, formats=("bf16", "fp8", "nvfp4"))
    times = measure_gemm_times(
        made.shapes, made.formats, tokens=made.tokens, device=torch.device("cpu"), repeats=1, limit_s=5
    )
    seconds = times.table(made.shapes, made.formats)
    plan = scrimp.plan(made, {"speedup": 1.0}, seconds=seconds.tolist())
    assert plan.budget == {"speedup": 1.0}
    assert plan.predicted["step_seconds"] <= seconds[:, :, 0].sum() * (1 + 1e-9)
    best = seconds[:, :, 0].sum() / seconds.min(axis=2).sum()
    with pytest.raises(PlanError, match=rf"speedup of {2 * best:g} over"):
        scrimp.plan(made, {"speedup": 2 * best}, seconds=seconds)


TIMES = np.ones((len(LAYERS), 3, 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"seconds": TIMES[:1]},
            r"seconds has a wrong shape - got \[1, 3, 2\], expected .*\[4, 3, 2\].*fp8, nvfp4",
        ),
        ({"seconds": [[1.0, 2.0], [1.0]]}, "seconds is no table - got list"),
        ({"seconds": "soon"}, "seconds is no table - got str"),
        ({"seconds": -TIMES}, r"seconds of blocks.0.\w+.fprop in fp8 are no time - got -1.0"),
        ({"seconds": TIMES * np.nan}, "are no time - got nan"),
        ({"other_seconds": -1}, "other_seconds is no time - got -1"),
        ({"stages": "0011"}, "every layer needs a pipeline stage - got '0011', expected 4 numbers"),
        ({"stages": 2}, "every layer needs a pipeline stage - got 2, expected 4 numbers"),
        ({"stages": [0, 0, -1, 7]}, "this is no pipeline stage - got -1"),
        ({"stages": [0, 0, 0.5, 1]}, "this is no pipeline stage - got 0.5"),
        ({"policy": None}, "policy is of another type - got None, expected str"),
        ({"weights": (1.0, 1.0)}, "weights is of another type"),
        ({"current": {"blocks.0.up": "fp8"}}, "the current plan is none - got dict"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(
    profile: PrecisionProfile, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        scrimp.plan(profile, 0.5, **arguments)


@pytest.mark.parametrize("other", [None, 0.5, {"layers": 3}])
def test_only_profiles_are_planned(profile: PrecisionProfile, other: Any) -> None:
    for value in (other, scrimp.plan(profile, 0.5)):
        with pytest.raises(
            PlanError, match=r"made from a profile - got \w+, expected what scrimp.measure gives"
        ):
            scrimp.plan(value, 0.5)


def test_stages_may_be_any_sequence_of_numbers(profile: PrecisionProfile) -> None:
    plans = [scrimp.plan(profile, 0.5, stages=given) for given in ([0, 0, 1, 1], np.array([0, 0, 1, 1]))]
    assert plans[0].layers == plans[1].layers
    assert [row.stage for row in plans[0].layers.values()] == [0, 0, 1, 1]


# -- apply -------------------------------------------------------------------------------------


def recipes_that_run(model: nn.Module) -> dict[tuple[str, str], str]:
    """What a forward and backward pass really executes."""
    ran: dict[tuple[str, str], str] = {}

    def look(execution: Execution) -> None:
        ran[execution.layer, execution.gemm] = execution.recipe

    with observing(look, plain=True):
        loss(model, batch(5)).backward()
    model.zero_grad()
    return ran


def planned_recipes(plan: PrecisionPlan) -> dict[tuple[str, str], str]:
    return {
        (layer, gemm): precision.gemm(gemm) for layer, precision in plan.precisions.items() for gemm in GEMMS
    }


def test_what_runs_is_the_plan_and_the_state_dict_stays(profile: PrecisionProfile) -> None:
    model, _ = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = scrimp.plan(profile, 0.75), scrimp.plan(profile, 0.25)
    planned = scrimp.apply(model, first)
    assert recipes_that_run(model) == planned_recipes(first)
    assert scrimp.apply(model, second) is planned
    assert recipes_that_run(model) == planned_recipes(second)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    planned.swap_out()
    assert is_plain(model)
    assert scrimp.apply(model, first) is not planned


def test_a_copy_of_a_model_has_a_plan_of_its_own(profile: PrecisionProfile) -> None:
    model, _ = trained()
    first, second = scrimp.plan(profile, 1.0), scrimp.plan(profile, 0.25)
    planned = scrimp.apply(model, first)
    twin = copy.deepcopy(model)
    assert scrimp.apply(twin, second) is not planned
    assert recipes_that_run(twin) == planned_recipes(second)
    assert recipes_that_run(model) == planned_recipes(first)


def test_training_continues_through_plans(profile: PrecisionProfile) -> None:
    model, optimizer = trained()
    scrimp.apply(model, scrimp.plan(profile, 0.75))
    losses = train(model, optimizer, range(30))
    scrimp.apply(model, scrimp.plan(profile, 1.0))
    losses += train(model, optimizer, range(30, 60))
    assert losses[30] < 0.7 * losses[0]
    assert losses[-1] < 0.5 * losses[30]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), "another model.*blocks.0.up.*names such as '0'"),
        (lambda: net(blocks=1), "another model.*2 of its layers.*'blocks.1.up', 'blocks.1.down'"),
    ],
)
def test_a_plan_of_a_model_with_other_names_is_refused(
    profile: PrecisionProfile, make: Callable[[], nn.Module], words: str
) -> None:
    model = make()
    with pytest.raises(PlanError, match=words):
        scrimp.apply(model, scrimp.plan(profile, 0.5))
    assert is_plain(model)


def test_a_plan_of_a_model_with_other_shapes_names_them(profile: PrecisionProfile) -> None:
    model = net()
    model.blocks[1].up, model.blocks[1].down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
    with pytest.raises(PlanError, match=r"not all their shapes: here .*'blocks.1.up' \(48, "):
        scrimp.apply(model, scrimp.plan(profile.select(("fp8", "nvfp4")), 0.5))
    assert is_plain(model)


def test_of_a_model_whose_layers_all_have_other_shapes_none_is_called_right(
    profile: PrecisionProfile,
) -> None:
    """Their sizes are in the proportions of the plan: which of them differ, nothing says."""
    model = net()
    for block in model.blocks:
        block.up, block.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
    with pytest.raises(PlanError) as error:
        scrimp.apply(model, scrimp.plan(profile, 0.5))
    shown = f"here 'blocks.0.up' (48, {WIDTH}), 'blocks.0.down' ({WIDTH}, 48)"
    assert error.value.got == f"its layers' names, but not all their shapes: {shown}"


def test_a_plan_of_another_device_is_refused_unless_it_is_wanted(profile: PrecisionProfile) -> None:
    text = scrimp.plan(profile, 0.5).to_json().replace(f'"device": "{profile.device}"', '"device": "TPU"')
    plan = PrecisionPlan.from_json(text)
    model, _ = trained()
    with pytest.raises(PlanError, match=r"another device - got TPU.*other_device=True"):
        scrimp.apply(model, plan)
    assert is_plain(model)
    scrimp.apply(model, plan, other_device=True)
    assert recipes_that_run(model) == planned_recipes(plan)


def test_a_plan_of_other_layers_of_the_model_is_refused_until_it_is_swapped_out(
    profile: PrecisionProfile,
) -> None:
    model, optimizer = trained()
    some = scrimp.plan(
        scrimp.measure(model, optimizer, [batch(0)], loss, layers=["blocks.0.up", "blocks.1.up"]), 0.5
    )
    planned = scrimp.apply(model, scrimp.plan(profile, 0.5))
    with pytest.raises(PlanError, match=r"in one of them only: 'blocks.0.down', 'blocks.1.down'.*swap_out"):
        scrimp.apply(model, some)
    planned.swap_out()
    assert set(scrimp.apply(model, some).layers) == {"blocks.0.up", "blocks.1.up"}


def test_a_deeper_model_of_the_same_names_is_noticed(
    profile: PrecisionProfile, caplog: pytest.LogCaptureFixture
) -> None:
    scrimp.apply(net(blocks=3), scrimp.plan(profile, 0.5))
    assert "2 linear layers are not in the plan" in caplog.text
    assert "'blocks.2.up', 'blocks.2.down'" in caplog.text


def test_only_plans_are_taken(profile: PrecisionProfile) -> None:
    with pytest.raises(PlanError, match="got dict"):
        scrimp.apply(net(), {})  # type: ignore[arg-type]


# -- the proof of what was applied -------------------------------------------------------------


class KeepsBf16(ReferenceBackend):
    """Leaves operands as they are."""

    def prepare(self, x: Tensor, use: Use) -> Any:
        return super().prepare(x, dataclasses.replace(use, operand=None))

    def prepare_and_store(self, x: Tensor, use: Use, saved: Use) -> tuple[Any, Any]:
        return self.prepare(x, use), self.store(x, saved)


def let_lie(planned: PlannedModel, layer: str, gemm: str) -> None:
    def choose(recipe: str, asked: str, shape: object, device: object) -> Backend:
        return KeepsBf16() if asked == gemm else ReferenceBackend()

    planned.layers[layer].choose = choose


def test_every_gemm_of_a_plan_is_proven_in_the_next_step(profile: PrecisionProfile) -> None:
    model, optimizer = trained()
    planned = scrimp.apply(model, scrimp.plan(profile, 0.75))
    train(model, optimizer, range(1), loss_in_bf16)
    assert planned.proof is not None
    assert planned.proof.proven == {(layer, gemm) for layer in LAYERS for gemm in GEMMS}
    scrimp.apply(model, scrimp.plan(profile, 1.0))
    changed = set(planned.proof.pending)
    assert 0 < len(changed) < len(LAYERS) * len(GEMMS)
    train(model, optimizer, range(1), loss_in_bf16)
    assert planned.proof.proven == changed


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.every(5)
def test_a_layer_that_lies_in_a_loop_stops_it_by_name(
    layer: str, gemm: str, profile: PrecisionProfile
) -> None:
    model, optimizer = trained()
    planned = scrimp.apply(model, scrimp.plan(profile, 0.0))
    train(model, optimizer, range(1), loss_in_bf16)
    let_lie(planned, layer, gemm)
    scrimp.apply(model, scrimp.plan(profile, 1.0))
    with pytest.raises(TrainingError, match=rf"{layer}\.{gemm} did not run in nvfp4"):
        train(model, optimizer, range(1), loss_in_bf16)


def test_measuring_proves_nothing_and_accuses_nobody(profile: PrecisionProfile) -> None:
    model, optimizer = trained()
    planned = scrimp.apply(model, scrimp.plan(profile, 1.0))
    scrimp.measure(model, optimizer, [batch(0)], loss_in_bf16)
    assert planned.proof is not None
    assert not planned.proof.seen
    train(model, optimizer, range(1), loss_in_bf16)
    assert len(planned.proof.proven) == len(LAYERS) * len(GEMMS)


def test_copies_and_plain_models_are_watched_by_nobody(profile: PrecisionProfile) -> None:
    model, optimizer = trained()
    planned = scrimp.apply(model, scrimp.plan(profile, 1.0))
    copied = copy.deepcopy(model)
    loss_in_bf16(copied, batch(3)).backward()
    assert planned.proof is not None
    assert not planned.proof.seen
    planned.swap_out()
    train(model, optimizer, range(1), loss_in_bf16)
    assert not planned.proof.seen
