"""What a format costs: loss divergence and weight divergence of every layer, GEMM and format.

Problem  Local quantization error misleads: what counts is how far it moves the loss, and the weights after the update.
Method   Local errors of one layer and format, with T tokens, O outputs, I inputs, and e the errors of the operands that
         each GEMM reads, taken as random and independent of what they meet::

             e_f^2 = (|eX|^2 |W|^2 + |X|^2 |eW|^2) / I        in Y, by fprop
             e_b^2 = (|eG|^2 |W|^2 + |G|^2 |eW|^2) / O        in gX, by dgrad
             e_w^2 = (|eG|^2 |X|^2 + |G|^2 |eX|^2) / T        in gW, by wgrad

         That is SNIP's form, which spreads energy evenly over the summed index. The statistics also hold both terms
         summed index by index, as the tensors really are: the default (`Method.errors`).

         Loss, relative: the size of its first-order change, and the mean of the second-order change::

             R^2 = (|gX| |eX|)^2 / numel X + (|gW| |eW|)^2 / numel W
             LD  = sqrt(max(D^2 - v / N, 0) + v) / |Loss|,    v = (S^2 + R^2) / 2
             LD2 = e_f^2 (z'Hz / |z|^2) / 2 / |Loss|

         SNIP has R alone, of random errors. D is the sum of <G, E> over a batch, the mean of N batches, with E the real
         error of fprop's result, and S^2 the variance of such sums by the spread of a batch's 16 parts
         (`scrimp.statistics.loss_changes`). R does not know what tokens share, S has 15 degrees of freedom: v, their
         mean, is how much a batch varies, v / N how much of D^2 that is, and LD^2 what is expected of a batch's square.

         Weights: gains F and B carry local errors to every weight k, c_k = lr s_k / |W_k| to its update. By default
         c_k F and c_k B are one measured number, the change of the update that the noise caused, and there are
         two of each: for errors of X and G by noise that is independent between tokens, for errors of W,
         which all tokens share, by noise that is one map of all of them (`Method`)::

             of fprop   U^2 = sum_k (c_k F[k<-l] e_f)^2
             of dgrad   U^2 = sum_k (c_k B[k<-l] e_b)^2
             of wgrad   U^2 = (c_l e_w)^2
             of a layer WD  = sum_k c_k sqrt([k = l] e_w^2 + (B e_b)^2 + (F e_f)^2)

Cost     Per layer, SNIP's own (eq. 7): LD / sum LD + beta WD / sum WD, sums over layers at the reference format.
         Per GEMM (eq. 8): independent errors add in squares, so costs are variances, which are linear in the choice::

             V_fprop = LD^2 / NL + beta U^2 / NW + gamma max(LD2, 0) / NM,    V_dgrad, V_wgrad = beta U^2 / NW

         with NL, NW, NM the sums over everything at the reference format (the lowest).
Limits   SNIP's own method takes errors of W as independent between tokens, and understates them where T is large. Of
         the change of the loss only the size is predicted. LD of one batch is too large: where parts are normal around
         nothing, and R is right, its root mean square is 1.22 times the right one.
         Layers whose statistics are not finite have costs that are not; sums leave them out.
Source   SNIP (arXiv 2602.01410), reconstruction eq. (1), (2), (4), (6) to (8).
Checked  tests/planner/precision/test_divergence.py; against real damage in benchmarks/snip_rates.py.

Shapes: L layers, P formats, K watched weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError
from scrimp.planner.precision.profile import LOSS_PARTS, BatchStatistics, PrecisionProfile
from scrimp.precision import GEMMS, HIGH_PRECISION, OPERANDS, recipe

Array = NDArray[np.float64]
FPROP, DGRAD, WGRAD = range(len(GEMMS))


@dataclass(frozen=True)
class Weights:
    """How the terms of the cost are weighted against each other."""

    loss: float = 1.0
    """Weight of the loss divergence."""
    update: float = 1.0
    """beta, of the weight divergence."""
    curvature: float = 0.0
    """gamma, of the mean second-order change of the loss; SNIP has none."""


@dataclass(frozen=True, eq=False)
class Divergence:
    """The divergence of one batch, or averaged over several; each term apart."""

    loss: Array
    """[L, P] LD of X and W together."""
    curvature: Array
    """[L, P] LD2, signed."""
    update: Array
    """[L, 3, P] U by GEMM."""
    layer_update: Array
    """[L, P] WD of all three GEMMs in one format."""


@dataclass(frozen=True)
class Method:
    """How local errors and their way to the updates are taken. The defaults are Scrimp's, `SNIP` is the paper's."""

    errors: str = "results"
    """results: of each GEMM's result, summed by index of the summed axis while measuring; norms: of whole matrices."""
    updates: str = "measured"
    """measured: the update that the noise really caused; rms: the gradient's gain times a mean sensitivity."""
    weight_errors: str = "shared"
    """shared: errors of W reach all tokens alike; tokens: they are taken as independent between tokens."""
    losses: str = "real"
    """real: by the errors that fprop makes, too; independent: errors are taken as independent of everything."""


SNIP = Method("norms", "rms", "tokens", "independent")


def divergence(profile: PrecisionProfile, batch: BatchStatistics, method: Method | None = None) -> Divergence:
    """All terms from the statistics of one batch."""
    method = method or Method()
    loss = np.sqrt(_loss_squares(profile, (batch,), method))
    errors = local_errors(profile, batch, method)
    e_f, e_w = (np.sqrt((errors[gemm] ** 2).sum(-1)) for gemm in (FPROP, WGRAD))
    curvature = 0.5 * e_f**2 * batch.curvature[:, None] / abs(batch.loss)
    forward, backward, own = relative_updates(profile, batch, method)
    by_forward, by_backward = _carried(forward, errors[FPROP]), _carried(backward, errors[DGRAD])
    by_own = (own[:, None] * e_w) ** 2
    update = np.sqrt(np.stack([by_forward.sum(0), by_backward.sum(0), by_own], axis=1))
    squares = by_forward + by_backward
    squares[list(profile.owners), np.arange(len(profile.layers))] += by_own
    return Divergence(loss, curvature, update, np.sqrt(squares).sum(0))


def _loss_squares(profile: PrecisionProfile, batches: Sequence[BatchStatistics], method: Method) -> Array:
    """[L, P] mean squares of the relative first-order change of the loss by fprop."""
    _check("losses", method.losses, ("real", "independent"))
    outputs, inputs = (np.array(sizes, dtype=float) for sizes in zip(*profile.shapes, strict=True))
    squares, changes, spreads = [], [], []
    for batch in batches:
        x_error, w_error = batch.errors[:, FPROP, :, 0], batch.errors[:, FPROP, :, 1]
        of_x = (batch.gx[:, None] * x_error) ** 2 / (profile.rows * inputs)[:, None]
        of_w = (batch.gw[:, None] * w_error) ** 2 / (outputs * inputs)[:, None]
        squares.append((of_x + of_w) / batch.loss**2)
        changes.append(batch.losses.sum(-1) / batch.loss)
        spreads.append(LOSS_PARTS * batch.losses.var(-1, ddof=1) / batch.loss**2)
    independent: Array = np.mean(squares, axis=0)
    if method.losses == "independent":
        return independent
    variance = (np.mean(spreads, axis=0) + independent) / 2
    found: Array = np.maximum(np.mean(changes, axis=0) ** 2 - variance / len(batches), 0.0) + variance
    return found


def _carried(gains: Array, errors: Array) -> Array:
    """[K, L, P] squares of the relative updates, from [2, K, L] gains and [L, P, 2] errors by operand."""
    carried: Array = np.einsum("okl,lpo->klp", gains**2, errors**2)
    return carried


def relative_updates(
    profile: PrecisionProfile, batch: BatchStatistics, method: Method | None = None
) -> tuple[Array, Array, Array]:
    """Relative update of each weight per local error: of fprop and of dgrad [2, K, L] by operand, of a layer's own
    wgrad [L]."""
    method = method or Method()
    _check("updates", method.updates, ("measured", "rms"))
    _check("weight_errors", method.weight_errors, ("shared", "tokens"))
    owners, kinds = list(profile.owners), [0, 1] if method.weight_errors == "shared" else [0, 0]
    if method.updates == "measured":
        return batch.forward[kinds, 1], batch.backward[kinds, 1], batch.sensitivity[1, owners]
    c = batch.sensitivity[0]
    return c[:, None] * batch.forward[kinds, 0], c[:, None] * batch.backward[kinds, 0], c[owners]


def local_errors(
    profile: PrecisionProfile, batch: BatchStatistics, method: Method | None = None
) -> tuple[Array, Array, Array]:
    """e_f, e_b, e_w, each [L, P, 2]: by the error of the first and of the second operand."""
    method = method or Method()
    _check("errors", method.errors, ("results", "norms"))
    if method.errors == "results":
        return batch.results[:, FPROP], batch.results[:, DGRAD], batch.results[:, WGRAD]
    sizes = {"x": batch.x, "w": batch.w, "g": batch.g}
    found = []
    for index, (gemm, summed) in enumerate(zip(GEMMS, profile.summed, strict=True)):
        a, b = OPERANDS[gemm]
        others = np.stack([sizes[b], sizes[a]], axis=-1)[:, None, :]
        found.append(batch.errors[:, index] * others / np.sqrt(summed)[:, None, None])
    return found[0], found[1], found[2]


def _check(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise PlanError(f"{what} cannot be taken that way", got=name, expected=" or ".join(known))


def reference_format(formats: tuple[str, ...]) -> int:
    """Index of the format that sums are normalised with: the fewest bits, the first of equals.

    Raises:
        PlanError: no candidate quantizes anything.
    """
    low = lowest_format(formats)
    if low is None:
        raise PlanError(
            "no candidate format quantizes anything",
            got=", ".join(formats),
            expected="at least one of 4 or 8 bits, such as nvfp4 or fp8",
        )
    return formats.index(low)


def lowest_format(formats: Sequence[str]) -> str | None:
    """The candidate of fewest bits, the first of equals; None: nothing quantizes."""
    low = min(formats, key=lambda name: recipe(name).bits, default=None)
    return None if low in HIGH_PRECISION else low


def gemm_costs(profile: PrecisionProfile, found: Divergence, weights: Weights | None = None) -> Array:
    """V of eq. (8), [L, 3, P]; parts that no choice changes are 0."""
    loss, update, curvature = gemm_parts(profile, found, weights)
    costs = update.copy()
    costs[:, FPROP] += loss + curvature
    return costs


def gemm_parts(
    profile: PrecisionProfile, found: Divergence, weights: Weights | None = None
) -> tuple[Array, Array, Array]:
    """The weighted terms of V: loss [L, P], update [L, 3, P] and curvature [L, P]."""
    weights = weights or Weights()
    reference = reference_format(profile.formats)
    loss, update, mean = found.loss**2, found.update**2, np.maximum(found.curvature, 0.0)
    return (
        weights.loss * loss / _total(loss[:, reference]),
        weights.update * update / _total(update[:, :, reference]),
        weights.curvature * mean / _total(mean[:, reference]),
    )


def layer_costs(profile: PrecisionProfile, found: Divergence, weights: Weights | None = None) -> Array:
    """Q of eq. (7), [L, P]."""
    weights = weights or Weights()
    reference = reference_format(profile.formats)
    mean = np.maximum(found.curvature, 0.0)
    return (
        weights.loss * found.loss / _total(found.loss[:, reference])
        + weights.update * found.layer_update / _total(found.layer_update[:, reference])
        + weights.curvature * mean / _total(mean[:, reference])
    )


def mean_divergence(profile: PrecisionProfile, method: Method | None = None) -> Divergence:
    """Over the batches: mean squares of deviations, means of means; the loss as of all of them together."""
    method = method or Method()
    found = [divergence(profile, batch, method) for batch in profile.batches]

    def root_mean_square(name: str) -> Array:
        roots: Array = np.sqrt(np.mean([getattr(one, name) ** 2 for one in found], axis=0))
        return roots

    return Divergence(
        np.sqrt(_loss_squares(profile, profile.batches, method)),
        np.mean([one.curvature for one in found], axis=0),
        root_mean_square("update"),
        root_mean_square("layer_update"),
    )


def _total(values: Array) -> float:
    """A sum of what is finite, to divide by; 1 where nothing diverges at all."""
    total = float(values[np.isfinite(values)].sum())
    return total if total > 0 else 1.0
