"""A profile of any model: complete, the same however passes are arranged, refused where it would mean nothing."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from models import Batch, MlpModel, batch, bench, decoder, linear_names
from torch import Tensor, nn

from scrimp.config import OptimizerConfig
from scrimp.errors import ModelError, PlanError, TrainingError
from scrimp.gemm import LinearPrecision, swap_in
from scrimp.gemm.layer import Shard
from scrimp.optim import AdamW
from scrimp.optim.foreign import TorchOptimizer
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.statistics import GAINS, Ranks, Subject, collect, fingerprint
from scrimp.statistics.inventory import Inventory

FORMATS = ("bf16", "fp8", "fp4")
module = importlib.import_module("scrimp.statistics.collect")


def same(one: PrecisionProfile, other: PrecisionProfile, *, but: Sequence[str] = ()) -> None:
    """All statistics, bit for bit."""
    assert len(one.batches) == len(other.batches)
    for a, b in zip(one.batches, other.batches, strict=True):
        for name, value in vars(a).items():
            if name not in but:
                assert np.array_equal(value, getattr(b, name)), name


# -- what it holds -----------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.every(3)
def test_a_profile_is_complete_and_finite(gains: str, compute: str) -> None:
    made = bench(decoder(qkv_bias=True), steps=3, compute=compute)
    profile = made.collect(500, FORMATS, gains=gains)
    names = linear_names(made.model)
    assert profile.layers == tuple(names)
    assert [profile.weights[owner] for owner in profile.owners] == [f"{name}.weight" for name in names]
    assert profile.shapes == tuple(tuple(made.model.get_submodule(n).weight.shape) for n in names)
    assert {"embedding.weight", "head.weight"} <= set(profile.weights)
    assert (profile.tokens, profile.formats, profile.gains) == (2 * 2 * 48, FORMATS, gains)
    assert (profile.optimizer, profile.device, profile.step) == ("adamw", "cpu", 0)
    assert not profile.unusable()
    (found,) = profile.batches
    assert all((getattr(found, name) > 0).all() for name in ("x", "w", "y", "g", "gx", "gw", "update"))
    assert (found.errors[:, :, 0] == 0).all()
    assert (found.errors[:, :, 2] > 2 * found.errors[:, :, 1]).all()  # 4 bits against 8
    assert (found.sensitivity > 0).all()


def test_losses_gradients_and_updates_are_those_of_the_step() -> None:
    made = bench(MlpModel(bias=False), steps=5)
    profile = made.collect(500, FORMATS)
    (found,) = profile.batches
    loss, rules = 0.0, {name: made.view.rule(name) for name in profile.weights}
    weights = {name: made.model.get_parameter(name).detach().clone() for name in profile.weights}
    for part in made.losses(batch(500)):
        part.backward()
        loss += float(part.detach())
    gradients = {name: g.double() for name, g in made.view.gradients().items()}
    norm = nn.utils.clip_grad_norm_(made.model.parameters(), made.max_norm)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    for layer, owner in enumerate(profile.owners):
        assert found.gw[layer] == pytest.approx(float(gradients[profile.weights[owner]].norm()), rel=1e-5)
    made.optimizer.step()
    group = made.optimizer.param_groups[0]
    for index, name in enumerate(profile.weights):
        after, w = made.model.get_parameter(name).detach().double(), weights[name].double()
        step = (after - w * (1 - group["lr"] * group["weight_decay"])) / group["lr"]
        assert found.update[index] == pytest.approx(float(step.norm() / w.norm()), rel=1e-3)
    assert float(norm) > made.max_norm * 0.5  # clipping is at work
    assert all(rule.lr == group["lr"] for rule in rules.values())


def test_schedules_count_relative_to_the_largest() -> None:
    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        first, *rest = list(parameters)
        return torch.optim.AdamW([{"params": [first], "lr": lr / 10}, {"params": rest}], lr=lr)

    one, other = (bench(MlpModel(), make=kind) for kind in (torch.optim.AdamW, make))
    first, second = (made.collect(500, FORMATS).batches[0] for made in (one, other))
    assert second.update[0] == pytest.approx(first.update[0] / 10)
    assert np.array_equal(second.update[1:], first.update[1:])


def test_every_batch_has_statistics_of_its_own() -> None:
    made, seen = bench(MlpModel(), steps=2), list[int]()
    profile = collect(made.subject(), [batch(500), batch(501)], FORMATS, on_batch=seen.append)
    assert seen == [0, 1]
    same(made.collect(500, FORMATS), PrecisionProfile(**{**vars(profile), "batches": profile.batches[:1]}))
    assert profile.batches[0].loss != profile.batches[1].loss
    assert np.array_equal(profile.batches[0].w, profile.batches[1].w)
    assert np.array_equal(profile.batches[0].errors[:, 0, :, 1], profile.batches[1].errors[:, 0, :, 1])


def test_micro_batches_are_one_batch() -> None:
    made = bench(MlpModel(), steps=2)
    whole: Batch = [tuple(torch.cat(parts) for parts in zip(*batch(500), strict=True))]  # type: ignore[list-item]
    apart, together = (collect(made.subject(), [one], FORMATS).batches[0] for one in (batch(500), whole))
    for name in ("loss", "x", "w", "y", "g", "gx", "gw", "update"):
        assert np.allclose(getattr(apart, name), getattr(together, name), rtol=1e-5), name
    fprop, dgrad = apart.errors[:, :2], together.errors[:, :2]
    assert np.allclose(fprop[:, 0], dgrad[:, 0], rtol=1e-4)  # 1 x 128 tiles, and W once
    assert np.allclose(fprop[:, 1, :, 1], dgrad[:, 1, :, 1], rtol=1e-4)
    for name in ("forward", "backward"):
        ratios = getattr(apart, name)[:, 0] / np.maximum(getattr(together, name)[:, 0], 1e-12)
        assert 0.8 < np.median(ratios[ratios > 0]) < 1.25


@pytest.mark.slow
def test_layers_that_are_left_out_change_nothing_of_the_others() -> None:
    made = bench(decoder(), steps=2)
    whole = made.collect(500, FORMATS)
    part = made.collect(500, FORMATS, layers=whole.layers[1:3])
    assert part.layers == whole.layers[1:3]
    assert part.weights == whole.weights
    one, other = part.batches[0], whole.batches[0]
    for name in ("x", "w", "y", "g", "gx", "gw", "errors", "results", "curvature"):
        assert np.array_equal(getattr(one, name), getattr(other, name)[1:3]), name
    assert np.array_equal(one.backward, other.backward[..., 1:3])
    # Rates of the updates are of the layers that are measured.
    assert np.array_equal(one.forward[:, 0], other.forward[:, 0, :, 1:3])


@pytest.mark.slow
def test_tied_embeddings_are_one_weight_before_the_stream() -> None:
    made = bench(MlpModel(tied=True), steps=2)
    profile = made.collect(500, FORMATS)
    assert profile.gains == "ratios"
    assert [name for name in profile.weights if "blocks" not in name] == ["embedding.weight"]
    assert (profile.batches[0].backward[:, :, 0] > 0).all()
    with_head = bench(MlpModel(tied=True), layers=[*linear_names(MlpModel()), "head"]).collect(500, FORMATS)
    assert with_head.gains == "exact"  # the head does not lie on the stream
    assert with_head.weights[with_head.owners[-1]] == "embedding.weight"


def test_the_fingerprint_is_of_names_and_shapes() -> None:
    assert fingerprint(["a", "b"], [(1, 2), (3, 4)]) == fingerprint(["a", "b"], [(1, 2), (3, 4)])
    others = [(["a", "c"], [(1, 2), (3, 4)]), (["a", "b"], [(2, 1), (3, 4)]), (["b", "a"], [(1, 2), (3, 4)])]
    found = {fingerprint(*pair) for pair in others}
    assert len(found | {fingerprint(["a", "b"], [(1, 2), (3, 4)])}) == 4


# -- equal passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.parametrize(
    ("model", "compute"),
    [
        (lambda: decoder(qkv_bias=True), "bf16"),
        (lambda: MlpModel(bias=True), "bf16"),
        (lambda: MlpModel(inner_dropout=0.3), "fp32"),
        (lambda: MlpModel(batch_norm=True), "fp32"),
        (lambda: MlpModel(checkpointed=True), "bf16"),
    ],
)
@pytest.mark.every(7)
def test_without_noise_a_pass_changes_nothing(
    model: Any, compute: str, gains: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(model(), steps=1, compute=compute)
    moved: list[np.ndarray] = []
    real = module._Measurement._disturbed

    def disturbed(self: Any, *arguments: Any) -> Any:
        moved.append(real(self, *arguments))
        return moved[-1]

    monkeypatch.setattr(module._Measurement, "_disturbed", disturbed)
    made.collect(500, ("bf16",), gains=gains, noise=0.0)
    assert len(moved) > 5
    assert all((one == 0).all() for one in moved)


@pytest.mark.slow
def test_dropout_draws_the_same_masks_in_every_pass() -> None:
    made = bench(MlpModel(dropout=0.3), steps=5)
    profile = made.collect(500, FORMATS)
    assert profile.gains == "exact"
    small = made.collect(500, FORMATS, noise=0.01).batches[0].forward[:, 0]
    ratios = profile.batches[0].forward[:, 0] / small
    assert (
        (ratios > 0.8) & (ratios < 1.25)
    ).mean() > 0.9  # masks of its own would add a change without noise


def test_batches_draw_different_masks() -> None:
    made = bench(MlpModel(dropout=0.3))
    profile = collect(made.subject(), [batch(500), batch(500)], FORMATS)
    assert profile.batches[0].loss != profile.batches[1].loss


@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.every(3)
def test_checkpointed_activations_give_the_same_profile(gains: str) -> None:
    plain, checkpointed = (
        bench(MlpModel(checkpointed=flag), steps=2).collect(500, FORMATS, gains=gains)
        for flag in (False, True)
    )
    same(plain, checkpointed)


def test_measuring_again_gives_the_same_profile() -> None:
    made = bench(decoder(), steps=2)
    same(made.collect(500, FORMATS), made.collect(500, FORMATS))
    with pytest.raises(AssertionError):
        same(made.collect(500, FORMATS), made.collect(500, FORMATS, seed=1))


@pytest.mark.slow
def test_it_does_not_matter_in_which_precision_the_model_runs() -> None:
    made = bench(decoder(), steps=2)
    expected = made.collect(500, FORMATS)
    made.planned.replan(LinearPrecision.of("nvfp4"))
    same(expected, made.collect(500, FORMATS))


# -- refusals ----------------------------------------------------------------------------------


def test_a_layer_that_is_not_trained_is_refused_by_name() -> None:
    made = bench(decoder())
    made.model.get_submodule("blocks.1.mlp.down").weight.requires_grad_(False)
    with pytest.raises(ModelError, match=r"not trained - got blocks\.1\.mlp\.down$"):
        made.collect(500, FORMATS)
    others = [name for name in linear_names(made.model) if name != "blocks.1.mlp.down"]
    assert not made.collect(500, FORMATS, layers=others).unusable()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gains": "guessed"}, "gains cannot be found that way - got guessed"),
        ({"layers": ["blocks.0.up", "blocks.7.up"]}, "only planned layers can be measured - got blocks.7.up"),
        ({"formats": ("fp8", "fp5")}, "there is no such recipe - got 'fp5'"),
    ],
)
def test_unknown_names_are_refused(how: dict[str, Any], message: str) -> None:
    made = bench(MlpModel())
    with pytest.raises(PlanError, match=message):
        made.collect(500, **{"formats": FORMATS, **how})


@pytest.mark.parametrize("gains", ["ratios", "blocks"])
def test_a_stream_is_not_followed_where_there_is_none(gains: str) -> None:
    with pytest.raises(PlanError, match=r"no residual stream .* use gains=exact"):
        bench(MlpModel(dropout=0.5)).collect(500, FORMATS, gains=gains)


def test_no_batch_is_refused() -> None:
    made = bench(MlpModel())
    with pytest.raises(PlanError, match="no batch"):
        collect(made.subject(), [], FORMATS)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    made = bench(MlpModel())

    def losses(micro_batches: Batch) -> Iterator[Tensor]:
        for loss in made.losses(micro_batches):
            yield loss * math.inf

    with pytest.raises(TrainingError, match="not finite"):
        collect(made.subject(losses), [batch(500)], FORMATS)


def test_gradients_of_an_unfinished_step_are_refused_where_the_optimizer_keeps_them() -> None:
    made = bench(MlpModel())
    train = OptimizerConfig(master_weights=True, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8, clip=1.0)
    optimizer = AdamW(dict(made.model.named_parameters()), train)
    subject = Subject(made.model, made.planned, optimizer, made.losses, "fp32")
    next(made.losses(batch(1))).backward()
    kept = {name: g.clone() for name, g in optimizer.gradients().items()}
    with pytest.raises(TrainingError, match="measure between two steps"):
        collect(subject, [batch(500)], FORMATS)
    assert kept
    assert all(torch.equal(g, kept[name]) for name, g in optimizer.gradients().items())
    optimizer.zero_grad()
    assert not collect(subject, [batch(500)], FORMATS).unusable()


def test_other_optimizers_can_be_measured_by_their_gradients() -> None:
    made = bench(MlpModel())
    rmsprop = torch.optim.RMSprop(made.model.parameters(), lr=1e-3)
    view = TorchOptimizer.as_gradients(rmsprop, made.model)
    profile = collect(Subject(made.model, made.planned, view, made.losses, "fp32"), [batch(500)], FORMATS)
    assert profile.optimizer == "gradient"
    assert not profile.unusable()
    assert (profile.batches[0].sensitivity > 0).all()


def test_a_piece_of_a_layer_counts_with_the_shape_of_the_whole() -> None:
    model = MlpModel()
    planned = swap_in(model, dict.fromkeys(linear_names(model), LinearPrecision.of("fp32")))
    names = list(planned.layers)
    first, second = names[:2]
    group: Any = None  # nothing is exchanged here
    planned.layers[first].share(Shard("outputs", group, (range(3), range(8, 11)), frozenset({0, 8}), 77))
    planned.layers[second].share(Shard("inputs", group, (range(5),), frozenset({0}), 99))
    alone = {name: tuple(model.get_submodule(name).weight.shape) for name in names}
    found = Inventory.of(model, planned, names, Ranks()).shapes
    assert found[first] == (77, alone[first][1])
    assert found[second] == (alone[second][0], 99)
    assert {name: found[name] for name in names[2:]} == {name: alone[name] for name in names[2:]}
