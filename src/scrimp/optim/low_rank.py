"""The step of one matrix in GaLore and Fira: Adam in the subspace where its gradient has most of its norm.

Problem  Adam's two averages take twice the memory of the weights. The gradient of a weight matrix lies mostly in a few
         directions, and these change slowly.
Method   GaLore, for a gradient G of shape m x n, m <= n (else of its transpose), t the step's number::

             P = the first r left singular vectors of G            once in T updates: [m, r]
             R = P' G                                              [r, n]
             M = b1 M + (1 - b1) R        V = b2 V + (1 - b2) R^2
             N = M / (1 - b1^t) / (sqrt(V / (1 - b2^t)) + eps)
             W = (1 - lr wd) W - lr a P N

         a is `optimizer.low_rank_scale`. M and V stay as they are where P is made anew.
         Fira adds what P leaves out of the gradient, each column j as much longer as Adam made R's::

             S[:, j] = |N[:, j]| / |R[:, j]| * (G - P R)[:, j]
             S = S * c |S'| / |S|   where |S| > c |S'|,  c = 1.01, S' that of the update before: no sudden growth
             W = (1 - lr wd) W - lr a (P N + S)

         r >= m leaves nothing out: P is then the identity and not kept.
Vectors  Those of the r largest eigenvalues of G G', summed and solved in float64, where the squares of singular values
         keep all that float32 says of these: for 1,024 x 4,096 in 0.7 s of one core, where torch's SVD takes 2.8. Of
         each vector the largest number is made positive: averages go on with the vectors that take the place of
         theirs, and these have the same sign then.
Limits   Where a gradient has fewer directions than r (fewer tokens in a batch), the last vectors are any that are
         orthogonal to the others. An expert without tokens when P is made gets one of unit vectors until the next time.
         S is 0 in columns where R is.
Source   Zhao et al., arXiv 2403.03507 (GaLore), algorithm 2; Chen et al., arXiv 2410.01623 (Fira).
         In Fira's published code a is a factor of P: it subtracts a P R, and S is without a. Here it is one of the
         learning rate of the whole update.
Checked  tests/optim/test_low_rank.py: the formulas step by step in float64, singular vectors by numpy
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scrimp.optim.update import Step

GROWTH = 1.01
"""Most that the norm of S grows from one update to the next."""


def state_shapes(rows: int, columns: int, rank: int, *, keeps_rest: bool) -> dict[str, tuple[int, ...]]:
    """What is kept of one matrix, in float32, by the end of its name.

    Args:
        keeps_rest: of Fira, which moves by what the projector leaves out too.
    """
    short, long = sorted((rows, columns))
    is_full = rank >= short
    averages = short if is_full else rank, long
    return {
        "projector": (short, 0 if is_full else rank),
        "exp_avg": averages,
        "exp_avg_sq": averages,
        "rest_norm": (int(keeps_rest and not is_full),),
    }


@dataclass(frozen=True)
class LowRankState:
    """What is kept of one matrix: views of storage that outlives it."""

    projector: Tensor
    """P, [m, r]; of a matrix that is updated in full without a column."""
    exp_avg: Tensor
    """M"""
    exp_avg_sq: Tensor
    """V"""
    rest_norm: Tensor
    """|S'|, one number; 0 before the first update. None of GaLore."""

    def copied(self, dtype: torch.dtype) -> LowRankState:
        """The same numbers elsewhere."""
        return replace(self, **{name: one.to(dtype, copy=True) for name, one in vars(self).items()})


@torch.no_grad()
def direction(state: LowRankState, gradient: Tensor, step: Step, *, refresh: bool) -> Tensor:
    """P N, or P N + S, in the shape of the gradient; the state goes on by one update.

    Args:
        refresh: make P anew.
    """
    is_tall = gradient.shape[0] > gradient.shape[1]
    g, p = gradient.T if is_tall else gradient, state.projector
    if not p.numel():
        moved = _adam(state, g, step)
        return moved.T if is_tall else moved
    if refresh:
        p.copy_(leading_vectors(g, p.shape[1]))
    inside = p.T @ g
    normed = _adam(state, inside, step)
    moved = p @ normed
    if state.rest_norm.numel():
        ratio = _ratio(normed.norm(dim=0), inside.norm(dim=0))
        moved += _limited(torch.addmm(g, p, inside, alpha=-1).mul_(ratio), state.rest_norm)
    return moved.T if is_tall else moved


def leading_vectors(gradient: Tensor, rank: int) -> Tensor:
    """[m, rank]: the first left singular vectors of a matrix of m rows and as many columns or more, in float64; the
    largest number of each is positive."""
    rows = len(gradient)
    squares = gradient.new_zeros((rows, rows), dtype=torch.float64)
    for columns in gradient.split(rows, dim=1):
        exact = columns.double()
        squares.addmm_(exact, exact.T)
        del exact
    vectors: Tensor = torch.linalg.eigh(squares).eigenvectors[:, -rank:].flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors.mul_(largest.sign())


def _adam(state: LowRankState, gradient: Tensor, step: Step) -> Tensor:
    """N; both averages take the gradient in."""
    state.exp_avg.lerp_(gradient, 1 - step.beta1)
    state.exp_avg_sq.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    root = state.exp_avg_sq.sqrt().mul_(step.root).add_(step.eps)
    return torch.div(state.exp_avg, root, out=root).mul_(1 / (1 - step.beta1**step.number))


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where there is nothing to divide by."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def _limited(rest: Tensor, before: Tensor) -> Tensor:
    """S, by the norm of the one before it, whose place its own takes."""
    norm = rest.norm()
    allowed = torch.where(before > 0, GROWTH * before, norm)
    factor = torch.where(norm > allowed, allowed / norm, 1.0)
    before.copy_(norm * factor)
    return rest.mul_(factor)
