"""The specification's equations, written out once more with loops over plain numbers."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import profile, profiles, with_statistics
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.planner.precision.divergence import (
    SNIP,
    Divergence,
    Method,
    Weights,
    divergence,
    gemm_costs,
    gemm_parts,
    layer_costs,
    local_errors,
    mean_divergence,
    reference_format,
)
from scrimp.planner.precision.profile import BatchStatistics, PrecisionProfile

FAST = examples(25)
WEIGHTS = st.builds(Weights, *[st.floats(0, 5)] * 3)


class Naive:
    """One batch of a profile by the formulas of the specification; n a layer, p a format, k a weight."""

    def __init__(self, profile: PrecisionProfile, batch: BatchStatistics) -> None:
        self.profile, self.s = profile, batch

    def e(self, gemm: int, operand: int, n: int, p: int) -> float:
        return float(self.s.errors[n, gemm, p, operand])

    def local(self, gemm: int, n: int, p: int) -> float:
        """e_f, e_b, e_w of equation (4)."""
        o, i = self.profile.shapes[n]
        x, w, g = self.s.x[n], self.s.w[n], self.s.g[n]
        a, b, summed = [(x, w, i), (g, w, o), (g, x, self.profile.tokens)][gemm]
        return math.sqrt((self.e(gemm, 0, n, p) ** 2 * b**2 + a**2 * self.e(gemm, 1, n, p) ** 2) / summed)

    def ld(self, n: int, p: int) -> float:
        """Equation (1)."""
        o, i = self.profile.shapes[n]
        of_x = (self.s.gx[n] * self.e(0, 0, n, p)) ** 2 / (self.profile.tokens * i)
        of_w = (self.s.gw[n] * self.e(0, 1, n, p)) ** 2 / (o * i)
        return math.sqrt(of_x + of_w) / abs(self.s.loss)

    def ld2(self, n: int, p: int) -> float:
        """Equation (2)."""
        return 0.5 * self.local(0, n, p) ** 2 * float(self.s.curvature[n]) / abs(self.s.loss)

    def c(self, k: int) -> float:
        """lr rms(h'_k) / |W_k|."""
        return float(self.s.sensitivity[0, k])

    def f(self, k: int, n: int) -> float:
        return float(self.s.forward[0, 0, k, n])

    def b(self, k: int, n: int) -> float:
        return float(self.s.backward[0, 0, k, n])

    def wd(self, n: int, p: int) -> float:
        """Equation (6)."""
        total = 0.0
        for k in range(len(self.profile.weights)):
            own = self.local(2, n, p) ** 2 if self.profile.owners[n] == k else 0.0
            travelling = (self.b(k, n) * self.local(1, n, p)) ** 2 + (self.f(k, n) * self.local(0, n, p)) ** 2
            total += self.c(k) * math.sqrt(own + travelling)
        return total

    def u(self, gemm: int, n: int, p: int) -> float:
        """The terms of a GEMM in equation (8)."""
        if gemm == 2:
            return self.c(self.profile.owners[n]) * self.local(2, n, p)
        gain = self.f if gemm == 0 else self.b
        squares = [
            (self.c(k) * gain(k, n) * self.local(gemm, n, p)) ** 2 for k in range(len(self.profile.weights))
        ]
        return math.sqrt(sum(squares))


def cells(profile: PrecisionProfile) -> list[tuple[int, int]]:
    return [(n, p) for n in range(len(profile.layers)) for p in range(len(profile.formats))]


@FAST
@given(profiles())
def test_snip_is_the_specification_literally(given_profile: PrecisionProfile) -> None:
    (batch,) = given_profile.batches
    naive, found = Naive(given_profile, batch), divergence(given_profile, batch, SNIP)
    for n, p in cells(given_profile):
        assert found.loss[n, p] == pytest.approx(naive.ld(n, p))
        assert found.curvature[n, p] == pytest.approx(naive.ld2(n, p))
        assert found.layer_update[n, p] == pytest.approx(naive.wd(n, p))
        for gemm in range(3):
            assert found.update[n, gemm, p] == pytest.approx(naive.u(gemm, n, p))
            by_operand = local_errors(given_profile, batch, SNIP)[gemm][n, p]
            assert math.hypot(*by_operand) == pytest.approx(naive.local(gemm, n, p))


@FAST
@given(profiles(), WEIGHTS)
def test_costs_of_layers_are_equation_7(given_profile: PrecisionProfile, weights: Weights) -> None:
    (batch,) = given_profile.batches
    naive, low = Naive(given_profile, batch), 2
    layers = range(len(given_profile.layers))
    found = layer_costs(given_profile, divergence(given_profile, batch, SNIP), weights)
    sums = [sum(term(n, low) for n in layers) for term in (naive.ld, naive.wd)]
    mean = sum(max(naive.ld2(n, low), 0.0) for n in layers) or 1.0
    for n, p in cells(given_profile):
        expected = weights.loss * naive.ld(n, p) / sums[0] + weights.update * naive.wd(n, p) / sums[1]
        expected += weights.curvature * max(naive.ld2(n, p), 0.0) / mean
        assert found[n, p] == pytest.approx(expected)


@FAST
@given(profiles(), WEIGHTS)
def test_costs_of_gemms_are_equation_8(given_profile: PrecisionProfile, weights: Weights) -> None:
    (batch,) = given_profile.batches
    naive, low = Naive(given_profile, batch), 2
    layers = range(len(given_profile.layers))
    found = gemm_costs(given_profile, divergence(given_profile, batch, SNIP), weights)
    of_loss = sum(naive.ld(n, low) ** 2 for n in layers)
    of_update = sum(naive.u(gemm, n, low) ** 2 for n in layers for gemm in range(3))
    mean = sum(max(naive.ld2(n, low), 0.0) for n in layers) or 1.0
    for n, p in cells(given_profile):
        for gemm in range(3):
            expected = weights.update * naive.u(gemm, n, p) ** 2 / of_update
            if gemm == 0:
                expected += weights.loss * naive.ld(n, p) ** 2 / of_loss
                expected += weights.curvature * max(naive.ld2(n, p), 0.0) / mean
            assert found[n, gemm, p] == pytest.approx(expected)


@FAST
@given(profiles())
def test_the_default_method_reads_what_was_measured_of_updates_and_losses(
    given_profile: PrecisionProfile,
) -> None:
    (batch,) = given_profile.batches
    found = divergence(given_profile, batch)
    for n, p in cells(given_profile):
        squares = np.zeros((3, len(given_profile.weights)))
        for k, operand in np.ndindex(len(given_profile.weights), 2):
            kind = operand  # second operands of fprop and dgrad are W, whose errors all tokens share
            squares[0, k] += (batch.forward[kind, 1, k, n] * batch.results[n, 0, p, operand]) ** 2
            squares[1, k] += (batch.backward[kind, 1, k, n] * batch.results[n, 1, p, operand]) ** 2
        own = given_profile.owners[n]
        squares[2, own] = batch.sensitivity[1, own] ** 2 * (batch.results[n, 2, p] ** 2).sum()
        assert np.allclose(found.update[n, :, p], np.sqrt(squares.sum(1)))
        assert found.layer_update[n, p] == pytest.approx(float(np.sqrt(squares.sum(0)).sum()))
        parts = [float(part) for part in batch.losses[n, p]]
        variance = len(parts) * statistics.variance(parts)  # of the sum of parts that are drawn like these
        independent = (Naive(given_profile, batch).ld(n, p) * batch.loss) ** 2
        expected = math.sqrt(max(sum(parts) ** 2, (variance + independent) / 2)) / abs(batch.loss)
        assert found.loss[n, p] == pytest.approx(expected)
        e_f = math.hypot(*batch.results[n, 0, p])
        assert found.curvature[n, p] == pytest.approx(0.5 * e_f**2 * batch.curvature[n] / abs(batch.loss))


@FAST
@given(profiles())
def test_errors_of_weights_can_be_taken_as_independent_between_tokens(
    given_profile: PrecisionProfile,
) -> None:
    (batch,) = given_profile.batches
    as_tokens = divergence(given_profile, batch, Method(weight_errors="tokens"))
    equal_kinds = replace(
        batch, forward=np.stack([batch.forward[0]] * 2), backward=np.stack([batch.backward[0]] * 2)
    )
    expected = divergence(replace(given_profile, batches=(equal_kinds,)), equal_kinds)
    assert np.allclose(as_tokens.update, expected.update)
    assert np.allclose(as_tokens.update[:, 2], divergence(given_profile, batch).update[:, 2])


@FAST
@given(profiles(), st.sampled_from([Method(), SNIP]))
def test_variances_add(given_profile: PrecisionProfile, method: Method) -> None:
    """The variance of any choice of formats is the sum of its GEMMs', and 1 + 1 for all in the reference format."""
    found = divergence(given_profile, given_profile.batches[0], method)
    costs = gemm_costs(given_profile, found)
    rng = np.random.default_rng(0)
    layers, total = len(given_profile.layers), 0.0
    chosen = rng.integers(3, size=(layers, 3))
    update = loss = 0.0
    for n, gemm in np.ndindex(layers, 3):
        total += costs[n, gemm, chosen[n, gemm]]
        update += found.update[n, gemm, chosen[n, gemm]] ** 2
        loss += found.loss[n, chosen[n, 0]] ** 2 if gemm == 0 else 0.0
    reference = (found.update[:, :, 2] ** 2).sum(), (found.loss[:, 2] ** 2).sum()
    assert total == pytest.approx(update / reference[0] + loss / reference[1])
    assert costs[:, :, 2].sum() == pytest.approx(2.0)


@FAST
@given(profiles(), st.floats(0.1, 10.0))
def test_an_error_that_grows_makes_its_own_gemm_dearer_and_no_other(
    given_profile: PrecisionProfile, factor: float
) -> None:
    (batch,) = given_profile.batches
    results = batch.results.copy()
    results[0, 1, 1] *= factor
    before, after = (
        divergence(given_profile, one).update for one in (batch, replace(batch, results=results))
    )
    expected = before.copy()
    expected[0, 1, 1] *= factor
    assert np.allclose(after, expected)


@FAST
@given(profiles(batches=3), st.sampled_from([Method(), SNIP]))
def test_batches_are_averaged_in_squares(given_profile: PrecisionProfile, method: Method) -> None:
    each = [divergence(given_profile, batch, method) for batch in given_profile.batches]
    found = mean_divergence(given_profile, method)
    for name in ("update", "layer_update", *(["loss"] if method == SNIP else [])):
        squares = [getattr(one, name) ** 2 for one in each]
        assert np.allclose(getattr(found, name) ** 2, sum(squares) / len(squares))
    assert np.allclose(found.curvature, sum(one.curvature for one in each) / len(each))


@FAST
@given(profiles(batches=3))
def test_of_the_mean_change_of_the_loss_its_own_noise_is_taken_off(given_profile: PrecisionProfile) -> None:
    batches, found = given_profile.batches, mean_divergence(given_profile).loss
    for n, p in cells(given_profile):
        changes = [[float(part) / batch.loss for part in batch.losses[n, p]] for batch in batches]
        spread = statistics.fmean(len(one) * statistics.variance(one) for one in changes)
        independent = statistics.fmean(Naive(given_profile, batch).ld(n, p) ** 2 for batch in batches)
        variance = (spread + independent) / 2
        mean = statistics.fmean(sum(one) for one in changes)
        expected = max(mean**2 - variance / len(batches), 0.0) + variance
        assert found[n, p] == pytest.approx(math.sqrt(expected))


def test_the_parts_sum_up_to_the_costs() -> None:
    made = profile()
    found = mean_divergence(made)
    weights = Weights(0.3, 2.0, 0.7)
    loss, update, curvature = gemm_parts(made, found, weights)
    costs = gemm_costs(made, found, weights)
    assert np.allclose(costs[:, 0], loss + curvature + update[:, 0])
    assert np.allclose(costs[:, 1:], update[:, 1:])
    assert (costs[:, :, 0] == 0).all()


def test_where_nothing_diverges_nothing_costs() -> None:
    made = profile()
    quiet = np.zeros_like(made.batches[0].errors)
    still = np.zeros_like(made.batches[0].losses)
    found = mean_divergence(with_statistics(made, errors=quiet, results=quiet, losses=still))
    assert (gemm_costs(made, found) == 0).all()
    assert (layer_costs(made, found) == 0).all()


def test_a_layer_that_is_not_finite_leaves_the_others_costs_finite() -> None:
    made = profile(3)
    errors = made.batches[0].errors.copy()
    errors[1] = np.nan
    for costs in (gemm_costs, layer_costs):
        found = costs(made, mean_divergence(with_statistics(made, errors=errors), SNIP))
        assert np.isfinite(found[[0, 2]]).all()
        assert np.isnan(found[1]).any()


@pytest.mark.parametrize(
    ("formats", "index"),
    [(("bf16", "fp8", "nvfp4"), 2), (("mxfp4", "fp4"), 0), (("bf16", "mxfp8", "fp8"), 1), (("fp8",), 0)],
)
def test_sums_are_taken_at_the_format_of_fewest_bits(formats: tuple[str, ...], index: int) -> None:
    assert reference_format(formats) == index


def test_formats_that_quantize_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="no candidate format quantizes anything - got bf16, fp32"):
        reference_format(("bf16", "fp32"))


@pytest.mark.parametrize("choice", ["errors", "updates", "weight_errors", "losses"])
def test_unknown_methods_are_refused(choice: str) -> None:
    made = profile()
    with pytest.raises(PlanError, match="got guessed, expected"):
        divergence(made, made.batches[0], Method(**{choice: "guessed"}))


def test_each_term_stands_apart() -> None:
    made = profile(3)
    found = mean_divergence(made)
    assert isinstance(found, Divergence)
    assert (found.loss.shape, found.curvature.shape) == ((3, 3), (3, 3))
    assert (found.update.shape, found.layer_update.shape) == ((3, 3, 3), (3, 3))
