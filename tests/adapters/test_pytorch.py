"""The library door: measured, planned and applied in a plain loop; what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import scrimp
from scrimp.adapters.arguments import MOST_BATCHES, budget_from
from scrimp.adapters.modules import choose_layers, unwrap
from scrimp.adapters.pytorch import measure_accumulated
from scrimp.errors import ModelError, PlanError, ScrimpError, TrainingError
from scrimp.gemm import Execution, observing
from scrimp.planner.bits import PrecisionPlan, PrecisionProfile
from scrimp.planner.bits.profile import BatchStatistics
from scrimp.precision import GEMMS

WIDTH, VOCABULARY = 16, 32


class Block(nn.Module):
    """Pre-norm MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


LAYERS = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(seed: int) -> Tensor:
    """Sequences in which every token decides the next one."""
    tokens = [torch.randint(VOCABULARY, (4,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(8):
        tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
    return torch.stack(tokens, dim=1)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def loss_in_bf16(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, tokens)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: range, of: Callable[..., Tensor] = loss) -> list[float]:
    losses = []
    for step in steps:
        value = of(model, batch(100 + step))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def trained(seed: int = 0, **options: Any) -> tuple[Net, torch.optim.AdamW]:
    model = net(seed, **options)
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    return model, optimizer


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


def is_plain(model: nn.Module) -> bool:
    """No planned layer, and no hook left behind."""
    return not any(
        hasattr(module, "planned") or module._forward_hooks or module._forward_pre_hooks
        for module in model.modules()
    )


# -- import ------------------------------------------------------------------------------------


def test_importing_scrimp_imports_no_torch_and_its_names_come_when_asked_for() -> None:
    code = (
        "import sys, scrimp\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert {'measure', 'plan', 'apply', 'Budget'} <= set(dir(scrimp))\n"
        "from scrimp.adapters import pytorch\n"
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


# -- which layers ------------------------------------------------------------------------------


def reasons(model: nn.Module) -> dict[str, str]:
    return choose_layers(model, lambda weight: weight.requires_grad).left_out


def test_the_head_is_known_by_its_name_its_weight_or_its_place() -> None:
    model = net()
    assert list(reasons(model)) == ["head"]
    model.to_logits, model.head = model.head, nn.Identity()  # type: ignore[assignment]
    assert reasons(model) == {"to_logits": "the head: the last layer, outside the blocks"}
    tied = net()
    del tied.head
    tied.first = nn.Linear(WIDTH, VOCABULARY)
    tied.later = nn.Linear(WIDTH, WIDTH)
    tied.first.weight = tied.embedding.weight
    assert reasons(tied) == {"first": "the head: it shares the embedding's weight"}


def test_bodies_without_a_head_and_plain_stacks_are_planned_whole() -> None:
    body = net()
    del body.head
    assert reasons(body) == {}
    assert reasons(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == {}


def test_what_cannot_be_planned_is_left_out_with_its_reason() -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(WIDTH, 2),
            "own": type("Own", (nn.Linear,), {"forward": lambda self, x: x})(WIDTH, WIDTH),
            "frozen": nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            "router": nn.Linear(WIDTH, 4),
            "good": nn.Linear(WIDTH, WIDTH),
        }
    )
    found = reasons(model)
    assert list(found) == ["attention.out_proj", "own", "frozen", "router"]
    assert [
        re.search(word, found[name]) is not None
        for word, name in zip(
            ("never calls it", "Own has a forward", "not trained", "router"), found, strict=True
        )
    ] == [True] * 4


def test_the_measurement_says_which_layers_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    with caplog.at_level(logging.INFO, "scrimp"):
        scrimp.measure(model, optimizer, [batch(0)], loss)
    assert "head is left out of the plan: the head, by its name" in caplog.text


# -- refusals of measure -----------------------------------------------------------------------


def without_linears() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY))


def in_half() -> nn.Module:
    return net().half()


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def with_an_idle_layer() -> nn.Module:
    model = net()
    model.blocks[0].idle = nn.Linear(WIDTH, WIDTH)
    return model


def half_in_bf16() -> nn.Module:
    """Autocast in one block only."""
    model = net()
    block = model.blocks[0]
    forward = block.forward
    block.forward = torch.autocast("cpu", torch.bfloat16)(forward)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (without_linears, ModelError, "no linear layer"),
        (in_half, ModelError, "float32 or bfloat16"),
        (frozen, ModelError, "can be planned.*not trained"),
        (with_an_idle_layer, ModelError, "take no part in the loss.*blocks.0.idle"),
        (half_in_bf16, ModelError, "two types.*blocks.0.up"),
        (lambda: nn.DataParallel(net()), ModelError, r"DataParallel.*\.module"),
    ],
)
def test_models_that_cannot_be_measured_are_refused(
    make: Callable[[], nn.Module], error: type[ScrimpError], words: str
) -> None:
    model = make()
    optimizer = torch.optim.SGD(list(model.parameters()) or [nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(error, match=words):
        scrimp.measure(model, optimizer, [batch(0)], loss)
    assert is_plain(model)


def exhausted() -> Iterator[Tensor]:
    batches = iter([batch(0)])
    next(batches)
    return batches


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "no batch"),
        (exhausted(), "no batch.*read to its end"),
        (batch(0), "one Tensor.*in a list"),
        (3, "one int"),
        ([batch(0)] * (MOST_BATCHES + 1), "got 65.*islice"),
        (itertools.repeat(batch(0)), "got more.*islice"),
    ],
)
def test_batches_that_are_none_or_a_whole_data_set_are_refused(batches: Any, words: str) -> None:
    model, optimizer = trained()
    with pytest.raises(PlanError, match=words):
        scrimp.measure(model, optimizer, batches, loss, gains="ratios", layers=["blocks.0.up"])
    assert is_plain(model)


@pytest.mark.parametrize(
    ("of", "error", "words"),
    [
        (lambda model, tokens: model(tokens), PlanError, r"no scalar.*\(4, 9, 32\).*mean"),
        (lambda model, tokens: loss(model, tokens).item(), PlanError, "no scalar.*float.*output.loss"),
        (lambda model, tokens: loss(model, tokens).detach(), PlanError, "no gradient"),
        (lambda model, tokens: loss(model, tokens) * float("nan"), TrainingError, "not finite"),
    ],
)
def test_losses_that_are_none_are_refused(of: Any, error: type[ScrimpError], words: str) -> None:
    model, optimizer = trained()
    before = torch.get_rng_state()
    with pytest.raises(error, match=words):
        scrimp.measure(model, optimizer, [batch(0)], of)
    assert is_plain(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"formats": ("bf16",)}, PlanError, "nothing to choose.*bf16"),
        ({"formats": ()}, PlanError, "nothing to choose.*none"),
        ({"formats": ("fp8", "fp8")}, PlanError, "each once"),
        ({"formats": ("fp8", "nvfp5")}, PlanError, "did you mean nvfp4"),
        ({"gains": "guessed"}, PlanError, "guessed"),
        ({"sensitivity": "adam"}, PlanError, "auto or gradient"),
        ({"layers": ["blocks.7.up"]}, PlanError, "blocks.7.up.*blocks.0.up"),
        ({"layers": lambda name, layer: False}, PlanError, "no layer was chosen"),
    ],
)
def test_arguments_of_measure_that_fit_nothing_are_refused(
    options: Any, error: type[ScrimpError], words: str
) -> None:
    model, optimizer = trained()
    with pytest.raises(error, match=words):
        scrimp.measure(model, optimizer, [batch(0)], loss, **options)
    assert is_plain(model)


def test_layers_that_this_optimizer_does_not_update_are_refused_by_name() -> None:
    model, _ = trained()
    some = torch.optim.AdamW(model.blocks[0].parameters())
    with pytest.raises(ModelError, match=r"not trained by this optimizer.*blocks.1.up"):
        scrimp.measure(model, some, [batch(0)], loss, layers=["blocks.1.up"])
    assert scrimp.measure(model, some, [batch(0)], loss).layers == ("blocks.0.up", "blocks.0.down")
    with pytest.raises(PlanError, match="no optimizer"):
        scrimp.measure(model, None, [batch(0)], loss)


def test_several_ranks_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(PlanError, match=r"4 ranks.*apply it on every rank"):
        scrimp.measure(model, optimizer, [batch(0)], loss)


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


@settings(max_examples=50, deadline=None)
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
        scrimp.plan(profile, {"seconds": 1.0})
    with pytest.raises(PlanError, match=r"pipeline stage.*4 numbers"):
        scrimp.plan(profile, 0.5, stages=[0, 1])
    with pytest.raises(PlanError, match=r"not measured.*nvfp4"):
        scrimp.plan(profile.select(("fp8",)), 0.0, current=scrimp.plan(profile, 1.0))
    other, optimizer = trained(blocks=3)
    deeper = scrimp.measure(other, optimizer, [batch(0)], loss)
    with pytest.raises(PlanError, match=r"other layers.*blocks.2"):
        scrimp.plan(profile, 0.5, current=scrimp.plan(deeper, 0.5))


def test_a_budget_in_seconds_takes_measured_times(profile: PrecisionProfile) -> None:
    seconds = np.ones((len(LAYERS), 3, 2))
    seconds[:, :, profile.formats.index("nvfp4")] = 0.5
    plan = scrimp.plan(profile, {"seconds": 9.0}, seconds=seconds)
    assert plan.predicted["step_seconds"] <= 9.0


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
        (lambda: nn.Sequential(nn.Linear(4, 4)), "another model.*blocks.0.up.*names such as 0"),
        (lambda: net(blocks=1), "another model.*2 of its layers.*blocks.1.up, blocks.1.down"),
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
    with pytest.raises(PlanError, match=r"other shapes: blocks.1.up, blocks.1.down -"):
        scrimp.apply(model, scrimp.plan(profile.select(("fp8", "nvfp4")), 0.5))
    assert is_plain(model)


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
    with pytest.raises(PlanError, match=r"in one of them only: blocks.0.down, blocks.1.down.*swap_out"):
        scrimp.apply(model, some)
    planned.swap_out()
    assert set(scrimp.apply(model, some).layers) == {"blocks.0.up", "blocks.1.up"}


def test_a_deeper_model_of_the_same_names_is_noticed(
    profile: PrecisionProfile, caplog: pytest.LogCaptureFixture
) -> None:
    scrimp.apply(net(blocks=3), scrimp.plan(profile, 0.5))
    assert "2 linear layers are not in the plan" in caplog.text
    assert "blocks.2.up, blocks.2.down" in caplog.text


def test_only_plans_and_modules_are_taken(profile: PrecisionProfile) -> None:
    with pytest.raises(PlanError, match="got dict"):
        scrimp.apply(net(), {})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="only modules"):
        unwrap("model")  # type: ignore[arg-type]
