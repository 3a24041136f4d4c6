"""Probes: the figures of one batch in two precisions, against the gradients themselves."""

from __future__ import annotations

import math

import models
import pytest
import torch

from scrimp.gemm import LinearPrecision
from scrimp.statistics import Probe, probe


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def test_a_plan_in_the_compute_format_is_no_different() -> None:
    subject = models.trained_decoder().subject()
    subject.planned.replan(LinearPrecision.of(subject.compute))
    found = probe(subject, models.batch(50))
    assert found.loss_gap == 0.0
    assert found.gradient_cosine == pytest.approx(1.0)
    assert found.gradient_to_noise == math.inf
    assert found.update_change == 0.0


def test_figures_are_those_of_both_gradients() -> None:
    subject = models.trained_decoder().subject()
    plan = LinearPrecision("nvfp4", "fp4", "mxfp4", "mxfp4")
    subject.planned.replan(plan)
    found = probe(subject, models.batch(50))
    assert all(layer.precision == plan for layer in subject.planned.layers.values())
    assert not subject.optimizer.gradients()
    gradients, losses = [], []
    for precision in (plan, LinearPrecision.of(subject.compute)):
        subject.planned.replan(precision)
        loss = sum(subject.losses(models.batch(50)))
        loss.backward()
        gradients.append(flat({name: g.clone() for name, g in subject.optimizer.gradients().items()}))
        losses.append(float(loss.detach()))
        subject.optimizer.zero_grad()
    noisy, clean = gradients
    assert found.loss == pytest.approx(losses[1], rel=1e-6)
    assert found.loss_gap == pytest.approx((losses[0] - losses[1]) / losses[1], abs=2e-7)
    assert found.gradient_cosine == pytest.approx(
        float(torch.cosine_similarity(noisy, clean, dim=0)), rel=1e-4
    )
    assert found.gradient_to_noise == pytest.approx(float(clean.norm() / (noisy - clean).norm()), rel=1e-4)
    assert 0 < found.update_change < 2


def test_numbers_that_are_none_are_told_apart() -> None:
    assert not Probe(2.0, math.nan, 1.0, 1.0, 0.0).is_finite
    assert Probe(2.0, 0.1, 1.0, math.inf, 0.0).is_finite
