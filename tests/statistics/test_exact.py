"""Exact gains against a float64 model whose outputs and gradients are disturbed by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch.nn.functional as F
from models import Bench, MlpModel, batch, bench, decoder
from torch import Tensor, nn

from scrimp.errors import ModelError
from scrimp.planner.precision.profile import BatchStatistics, PrecisionProfile
from scrimp.statistics.gains import NOISES
from scrimp.statistics.stream import gaussian, generator_of

SEED, SHARE = 11, 0.05
MICRO_BATCHES = batch(500)


class ByHand:
    """The model in float64, with additions to layers' outputs and to the gradients of their inputs."""

    def __init__(self, made: Bench, plain: nn.Module) -> None:
        plain.load_state_dict(made.model.state_dict())
        self.model = plain.double()
        self.made = made
        self.rules = {name: made.view.rule(name) for name, _ in plain.named_parameters()}
        self.clean = self.gradients()
        norm = math.sqrt(sum(float(g.square().sum()) for g in self.clean.values()))
        self.clip = made.view.clip_factor(norm)

    def gradients(
        self,
        add_to_output: Mapping[str, list[Tensor]] | None = None,
        add_to_gradient: Mapping[str, list[Tensor]] | None = None,
    ) -> dict[str, Tensor]:
        """Summed over micro-batches; additions are by layer, one for each micro-batch."""
        model = copy.deepcopy(self.model)
        self.seen: dict[tuple[str, str], list[Tensor]] = {}
        extra: list[Tensor] = []
        number = 0

        def hook(layer: str):  # type: ignore[no-untyped-def]
            def forward(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                self.seen.setdefault((layer, "y"), []).append(output.detach())
                if add_to_gradient and layer in add_to_gradient:
                    # d/dx of <z, x> is z: it joins whatever gradient arrives there.
                    extra.append((add_to_gradient[layer][number] * inputs[0]).sum())
                z = 0 if add_to_output is None else add_to_output.get(layer, [0, 0])[number]
                result = output + z
                result.register_hook(lambda g: self.seen.setdefault((layer, "g"), []).append(g))
                return result

            return forward

        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(hook(name))
        targets = sum(goal.numel() for _, goal in MICRO_BATCHES)
        for tokens, goal in MICRO_BATCHES:
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, goal.flatten(), reduction="sum") / targets
            (loss + sum(extra)).backward()
            extra.clear()
            number += 1
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def moved(self, noisy: Mapping[str, Tensor], weights: tuple[str, ...]) -> np.ndarray:
        """[2, K] norms of the changes of gradients and of relative updates."""
        parameters = dict(self.model.named_parameters())
        found = np.zeros((2, len(weights)))
        for k, name in enumerate(weights):
            found[0, k] = float((noisy[name] - self.clean[name]).norm())
            h, h_clean = (self.rules[name].direction(g * self.clip) for g in (noisy[name], self.clean[name]))
            found[1, k] = float((h - h_clean).norm() / parameters[name].norm())
        return found

    def noise(self, like: list[Tensor], kind: str, key: int) -> list[Tensor]:
        """What the profiler draws for these tensors."""
        keys = [0, 0] if kind == "weights" else [0, 1]
        return [
            gaussian(x.float(), SHARE, kind, generator_of(x.device, SEED, key, number)).double()
            for x, number in zip(like, keys, strict=True)
        ]


def statistics(made: Bench) -> tuple[PrecisionProfile, BatchStatistics]:
    profile = made.collect(500, ("fp32",), gains="exact", seed=SEED, noise=SHARE)
    return profile, profile.batches[0]


@pytest.fixture(scope="module")
def measured() -> tuple[ByHand, PrecisionProfile, BatchStatistics]:
    """A model that has trained a little, so that the optimizer has a history."""
    made = bench(MlpModel(), steps=10)
    return ByHand(made, MlpModel()), *statistics(made)


@pytest.mark.parametrize("row", [0, 1])
def test_forward_gains_are_those_of_outputs_changed_by_hand(
    measured: tuple[ByHand, PrecisionProfile, BatchStatistics], row: int
) -> None:
    by_hand, profile, found = measured
    for index, layer in enumerate(profile.layers):
        by_hand.gradients()
        z = by_hand.noise(by_hand.seen[layer, "y"], NOISES[row], 2 * index + 1)
        moved = by_hand.moved(by_hand.gradients(add_to_output={layer: z}), profile.weights)
        expected = moved / math.sqrt(sum(float(part.square().sum()) for part in z))
        assert np.allclose(found.forward[row, :, :, index], expected, rtol=2e-3, atol=1e-4 * expected.max())


@pytest.mark.parametrize("row", [0, 1])
def test_backward_gains_are_those_of_gradients_changed_by_hand(
    measured: tuple[ByHand, PrecisionProfile, BatchStatistics], row: int
) -> None:
    by_hand, profile, found = measured
    for index, layer in enumerate(profile.layers):
        by_hand.gradients()
        weight = by_hand.model.get_submodule(layer).weight.detach()
        through_layer = [g @ weight for g in by_hand.seen[layer, "g"]]
        z = by_hand.noise(through_layer, NOISES[row], 2 * index)
        moved = by_hand.moved(by_hand.gradients(add_to_gradient={layer: z}), profile.weights)
        expected = moved / math.sqrt(sum(float(part.square().sum()) for part in z))
        assert np.allclose(found.backward[row, :, :, index], expected, rtol=2e-3, atol=1e-4 * expected.max())


def test_an_error_of_a_gradient_does_not_reach_later_layers(
    measured: tuple[ByHand, PrecisionProfile, BatchStatistics],
) -> None:
    _, profile, found = measured
    for index, owner in enumerate(profile.owners):
        assert (found.backward[:, :, owner:, index] == 0).all()
        assert (found.forward[:, :, 0, index] > 0).all()


def test_the_curvature_is_that_of_the_hessian(
    measured: tuple[ByHand, PrecisionProfile, BatchStatistics],
) -> None:
    by_hand, profile, found = measured
    for index, layer in enumerate(profile.layers):
        by_hand.gradients()
        z = by_hand.noise(by_hand.seen[layer, "y"], "tokens", 2 * index + 1)
        step = 1e-3
        slopes = []
        for sign in (1, -1):
            by_hand.gradients(add_to_output={layer: [sign * step * part for part in z]})
            slopes.append(sum(float((a * b).sum()) for a, b in zip(z, by_hand.seen[layer, "g"], strict=True)))
        expected = (slopes[0] - slopes[1]) / (2 * step) / sum(float(part.square().sum()) for part in z)
        assert found.curvature[index] == pytest.approx(expected, rel=0.05, abs=1e-4)


def test_layers_that_share_an_input_share_their_backward_gains() -> None:
    class Two(MlpModel):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.final_norm(self.embedding(tokens))
            one, other = self.blocks
            return self.head(other.down(F.gelu(other.up(x))) + one.down(F.gelu(one.up(x))))

    made = bench(Two(), steps=2)
    _, found = statistics(made)
    first, second = 0, 2  # both up
    assert np.array_equal(found.backward[..., first], found.backward[..., second])
    assert not np.array_equal(found.forward[..., first], found.forward[..., second])


def test_a_layer_that_gives_zero_has_no_gains_and_one_that_never_runs_is_refused() -> None:
    model = MlpModel(bias=False)
    nn.init.zeros_(model.blocks[0].down.weight)  # type: ignore[union-attr, arg-type]
    profile, found = statistics(bench(model))
    zero = profile.layers.index("blocks.0.down")
    assert (found.forward[..., zero] == 0).all()
    assert found.curvature[zero] == 0
    assert not profile.unusable()
    idle = MlpModel(bias=False)
    idle.spare = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"spare \(its forward is replaced, or never called\)"):
        statistics(bench(idle))


@pytest.mark.slow
def test_recomputed_blocks_give_the_same_gains() -> None:
    found = [statistics(bench(MlpModel(checkpointed=flag), steps=2))[1] for flag in (False, True)]
    assert np.array_equal(found[0].forward, found[1].forward)
    assert np.array_equal(found[0].backward, found[1].backward)
    assert np.array_equal(found[0].curvature, found[1].curvature)


@pytest.mark.slow
def test_reentrant_checkpoints_give_the_same_gains_too() -> None:
    found = [
        statistics(bench(MlpModel(checkpointed=flag, reentrant=flag), steps=2))[1] for flag in (False, True)
    ]
    assert np.allclose(found[0].forward, found[1].forward, rtol=1e-5)
    assert np.allclose(found[0].backward, found[1].backward, rtol=1e-5)


@pytest.mark.slow
def test_the_size_of_the_noise_hardly_matters() -> None:
    made = bench(decoder(), steps=20)
    small, large = (
        made.collect(500, ("fp32",), gains="exact", seed=SEED, noise=noise).batches[0]
        for noise in (0.01, 0.1)
    )
    # Gradients are nearly linear in it; updates are not where AdamW has hardly any history.
    for one, other in (
        (small.forward[:, 0], large.forward[:, 0]),
        (small.backward[:, 0], large.backward[:, 0]),
    ):
        ratios = other[one > 1e-9] / one[one > 1e-9]
        assert 0.8 < np.quantile(ratios, 0.05) <= np.quantile(ratios, 0.95) < 1.25
