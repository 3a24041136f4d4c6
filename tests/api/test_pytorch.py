"""The library door in a plain loop: what is measured, of which models, and that nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_nets import LAYERS, WIDTH, adamw, batch, is_plain, loss, loss_in_bf16, net, train, trained
from torch import Tensor, nn

import scrimp
from scrimp.api.pytorch import measure_accumulated
from scrimp.errors import PlanError
from scrimp.planner.precision import PrecisionProfile
from scrimp.planner.precision.profile import BatchStatistics


@pytest.fixture(scope="module")
def profile() -> PrecisionProfile:
    model, optimizer = trained()
    return scrimp.measure(model, optimizer, [batch(0), batch(1)], loss)


def assert_equal(a: PrecisionProfile, b: PrecisionProfile) -> None:
    assert (a.layers, a.shapes, a.formats, a.weights, a.model) == (
        b.layers,
        b.shapes,
        b.formats,
        b.weights,
        b.model,
    )
    for one, other in zip(a.batches, b.batches, strict=True):
        for name in BatchStatistics.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


# -- import ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_importing_scrimp_imports_no_torch_and_its_names_come_when_asked_for() -> None:
    code = (
        "import sys, scrimp\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert {'measure', 'plan', 'apply', 'Budget'} <= set(dir(scrimp))\n"
        "from scrimp.api import pytorch\n"
        "assert scrimp.measure is pytorch.measure and scrimp.apply is pytorch.apply\n"
        "assert 'transformers' not in sys.modules\n"
        "assert scrimp.Budget(fp4_flops=0.5).fp4_flops == 0.5\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = scrimp.no_such_name  # type: ignore[attr-defined]


# -- measure -----------------------------------------------------------------------------------


def test_a_run_that_is_measured_goes_on_bit_for_bit_as_if_it_had_not_been() -> None:
    runs = []
    for measures in (False, True):
        model = net(dropout=0.2)
        optimizer = adamw(model)
        losses = train(model, optimizer, range(3))
        if measures:
            scrimp.measure(model, optimizer, [batch(0), batch(1)], loss)
            assert is_plain(model)
        losses += train(model, optimizer, range(3, 6))
        runs.append((losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
    assert torch.equal(runs[0][2], runs[1][2])


def test_batches_that_draw_from_torchs_random_state_leave_it_as_it_was() -> None:
    model, optimizer = trained()
    data = torch.utils.data.DataLoader([batch(0)[0], batch(1)[0]], batch_size=1, shuffle=True)
    before = torch.get_rng_state()
    scrimp.measure(model, optimizer, data, loss)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_runs_by_a_plan_gives_the_profile_of_the_plain_one(profile: PrecisionProfile) -> None:
    model, optimizer = trained()
    planned = scrimp.apply(model, scrimp.plan(profile, 0.75))
    before = {name: layer.precision for name, layer in planned.layers.items()}
    assert_equal(scrimp.measure(model, optimizer, [batch(0), batch(1)], loss), profile)
    assert {name: layer.precision for name, layer in planned.layers.items()} == before


def test_the_profile_is_of_the_step_and_of_all_layers_but_the_head(profile: PrecisionProfile) -> None:
    assert profile.layers == LAYERS
    assert profile.shapes == ((32, WIDTH), (WIDTH, 32)) * 2
    assert profile.tokens == 32
    assert profile.step == 3
    assert (profile.optimizer, profile.gains) == ("adamw", "ratios")
    assert len(profile.batches) == 2


@pytest.mark.parametrize("of", [loss, loss_in_bf16])
def test_the_compute_type_is_that_of_the_loss(of: Callable[..., Tensor]) -> None:
    model, optimizer = trained()
    expected = of(model, batch(0)).item()
    assert scrimp.measure(model, optimizer, [batch(0)], of).batches[0].loss == expected
    assert loss(model, batch(0)).item() != loss_in_bf16(model, batch(0)).item()


def test_micro_batches_that_share_a_step_are_one_statistics_batch() -> None:
    model, optimizer = trained()
    halves = batch(0).split(2)

    def shares(inner: nn.Module, parts: tuple[Tensor, ...]) -> Iterator[Tensor]:
        return (loss(inner, part) / len(parts) for part in parts)

    found = measure_accumulated(model, optimizer, [halves], shares)
    whole = scrimp.measure(model, optimizer, [batch(0)], loss)
    assert found.tokens == whole.tokens
    np.testing.assert_allclose(found.batches[0].loss, whole.batches[0].loss, rtol=1e-6)
    np.testing.assert_allclose(found.batches[0].gw, whole.batches[0].gw, rtol=1e-4)


def test_layers_by_name_and_by_predicate_are_the_same() -> None:
    model, optimizer = trained()
    by_name = scrimp.measure(model, optimizer, [batch(0)], loss, layers=["blocks.1.down", "blocks.0.down"])
    by_rule = scrimp.measure(
        model, optimizer, [batch(0)], loss, layers=lambda name, layer: layer.in_features == 32
    )
    assert by_name.layers == ("blocks.0.down", "blocks.1.down")
    assert by_name.gains == "ratios"  # the stream is found though half of its layers are not measured
    assert_equal(by_name, by_rule)


@pytest.mark.slow
def test_a_compiled_model_is_measured_as_the_plain_one(profile: PrecisionProfile) -> None:
    model, optimizer = trained()
    compiled = torch.compile(model, backend="eager")
    compiled(batch(3)[:, :-1])
    assert_equal(scrimp.measure(compiled, optimizer, [batch(0), batch(1)], loss), profile)
    plan = scrimp.plan(profile, 0.75)
    planned = scrimp.apply(compiled, plan)
    assert planned is scrimp.apply(model, plan)
    planned.clock.begin(0)
    torch.testing.assert_close(compiled(batch(3)[:, :-1]), model(batch(3)[:, :-1]))


def test_a_model_under_ddp_is_measured_as_the_plain_one(profile: PrecisionProfile, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model, optimizer = trained()
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert_equal(scrimp.measure(wrapped, optimizer, [batch(0), batch(1)], loss), profile)
    finally:
        dist.destroy_process_group()


def test_an_optimizer_of_unknown_rule_is_refused_and_taken_by_its_gradients() -> None:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    train(model, optimizer, range(2))
    with pytest.raises(PlanError, match=r'RMSprop.*sensitivity="gradient"'):
        scrimp.measure(model, optimizer, [batch(0)], loss)
    assert is_plain(model)
    found = scrimp.measure(model, optimizer, [batch(0)], loss, sensitivity="gradient")
    assert found.optimizer == "gradient"
    assert scrimp.plan(found, 0.75).predicted["fp4_flops"] >= 0.75
