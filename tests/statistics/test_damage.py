"""Predicted against real damage: every GEMM alone in four bits, and what it does to the loss and the next update.

Nothing of the profiler takes part in the measured side: gradients of a quantized model, and the optimizer's own step.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models import Bench, batch, spearman, trained_decoder
from torch import Tensor, nn

from scrimp.gemm import LinearPrecision
from scrimp.planner.precision.divergence import SNIP, Divergence, Method, mean_divergence
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import GEMMS
from scrimp.statistics import collect

FORMATS = ("bf16", "fp8", "nvfp4", "fp4")
MEASURED, UNSEEN = range(500, 503), range(600, 604)


@dataclass
class Real:
    """What quantization really did; the signed change of one batch is chance, the root mean square over several not."""

    profile: PrecisionProfile
    loss: np.ndarray
    """[L, 3]."""
    update: np.ndarray
    """[L, 3]."""
    plans: list[tuple[np.ndarray, float]]
    """Random plans, [L, 3] booleans of what is quantized, with the change of the update."""


def stepped(made: Bench, number: int) -> tuple[float, dict[str, Tensor]]:
    """Loss of a batch, and the update that a copy of the optimizer makes of it, without decay and learning rate."""
    made.planned.clock.begin(number)
    total = 0.0
    for loss in made.losses(batch(number)):
        loss.backward()
        total += float(loss.detach())
    nn.utils.clip_grad_norm_(made.model.parameters(), made.max_norm)
    moments = copy.deepcopy(made.optimizer.state_dict())
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    group = made.optimizer.param_groups[0]
    made.optimizer.step()
    updates = {}
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            decayed = before[name].double() * (1 - group["lr"] * group["weight_decay"])
            updates[name] = (decayed - parameter.double()) / group["lr"]
            parameter.copy_(before[name])
    made.optimizer.load_state_dict(moments)
    made.optimizer.zero_grad()
    return total, updates


def moved(made: Bench, clean: dict[str, Tensor], noisy: dict[str, Tensor]) -> float:
    """Root of the sum over matrices of (|change of h| / |W|)^2."""
    matrices = {name: p.detach().double() for name, p in made.model.named_parameters() if p.ndim >= 2}
    squares = [float((noisy[n] - clean[n]).norm() / w.norm()) ** 2 for n, w in matrices.items()]
    return math.sqrt(sum(squares))


def apply(made: Bench, names: tuple[str, ...], quantized: np.ndarray, fmt: str) -> None:
    """Run the marked GEMMs [L, 3] in a format; inputs are saved so that no other number changes."""
    made.planned.replan(
        {
            name: LinearPrecision(*(fmt if flag else "fp32" for flag in row), saved="fp32")
            for name, row in zip(names, quantized.tolist(), strict=True)
        }
    )


def measure(fmt: str) -> Real:
    made = trained_decoder()
    profile = collect(made.subject(), [batch(number) for number in MEASURED], FORMATS)
    shape = (len(profile.layers), len(GEMMS))
    losses, updates = np.zeros((len(UNSEEN), *shape)), np.zeros((len(UNSEEN), *shape))
    generator = np.random.default_rng(0)
    plans = [(generator.random(shape) < share, list[float]()) for share in (0.3, 0.6, 1.0)]
    for index, number in enumerate(UNSEEN):
        apply(made, profile.layers, np.zeros(shape, dtype=bool), fmt)
        loss, clean = stepped(made, number)
        for i, j in np.ndindex(shape):
            alone = np.zeros(shape, dtype=bool)
            alone[i, j] = True
            apply(made, profile.layers, alone, fmt)
            noisy_loss, noisy = stepped(made, number)
            losses[index, i, j] = (noisy_loss - loss) / loss
            updates[index, i, j] = moved(made, clean, noisy)
        for quantized, found in plans:
            apply(made, profile.layers, quantized, fmt)
            found.append(moved(made, clean, stepped(made, number)[1]))
    root = [np.sqrt((values**2).mean(0)) for values in (losses, updates)]
    whole = [(quantized, float(np.sqrt(np.mean(np.square(found))))) for quantized, found in plans]
    return Real(profile, root[0], root[1], whole)


@pytest.fixture(scope="module", params=["fp4", "nvfp4"])
def real(request: pytest.FixtureRequest) -> tuple[str, Real]:
    return request.param, measure(request.param)


def predicted(real: tuple[str, Real], method: Method | None = None) -> tuple[Divergence, int]:
    return mean_divergence(real[1].profile, method), FORMATS.index(real[0])


@pytest.mark.slow
def test_the_damage_to_the_update_is_ranked_over_all_gemms(real: tuple[str, Real]) -> None:
    found, p = predicted(real)
    assert spearman(found.update[:, :, p], real[1].update) >= 0.9
    for j in range(len(GEMMS)):
        assert spearman(found.update[:, j, p], real[1].update[:, j]) >= 0.6


@pytest.mark.every(2)
@pytest.mark.slow
def test_its_size_is_right_within_a_factor(real: tuple[str, Real]) -> None:
    found, p = predicted(real)
    ratios = found.update[:, :, p] / real[1].update
    assert 0.8 < np.median(ratios) < 1.25
    assert ratios.min() > 0.25
    assert ratios.max() < 2.5


@pytest.mark.every(2)
@pytest.mark.slow
def test_the_loss_hears_of_fprop_alone_and_by_about_what_is_predicted(real: tuple[str, Real]) -> None:
    found, p = predicted(real)
    assert np.abs(real[1].loss[:, 1:]).max() < 1e-6
    ratios = found.loss[:, p] / real[1].loss[:, 0]
    assert 0.5 < np.median(ratios) < 2.0
    assert spearman(found.loss[:, p], real[1].loss[:, 0]) > 0.4


@pytest.mark.every(2)
@pytest.mark.slow
def test_damages_of_several_gemms_add_in_squares(real: tuple[str, Real]) -> None:
    found, p = predicted(real)
    for quantized, update in real[1].plans:
        alone = math.sqrt((real[1].update[quantized] ** 2).sum())
        assert update == pytest.approx(alone, rel=0.25)
        assert update == pytest.approx(math.sqrt((found.update[:, :, p][quantized] ** 2).sum()), rel=0.35)


@pytest.mark.slow
def test_it_ranks_better_than_local_errors_and_than_the_reconstruction_of_snip(
    real: tuple[str, Real],
) -> None:
    p, measured = FORMATS.index(real[0]), real[1].update
    ours, snips = (spearman(predicted(real, way)[0].update[:, :, p], measured) for way in (None, SNIP))
    absolute = spearman(real[1].profile.batches[0].errors[:, :, p].sum(-1), measured)
    assert ours > snips + 0.1
    assert ours > absolute + 0.15
