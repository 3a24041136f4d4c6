"""GaLore's and Fira's updates of one matrix as their papers have them: step by step, in float64, by numpy's SVD."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def published(
    gradients: Sequence[Matrix], rank: int, every: int, beta1: float, beta2: float, eps: float, *, fira: bool
) -> tuple[list[Matrix], int]:
    """Updates without learning rate and scale; how often Fira's limiter had something to do.

    Args:
        rank: below the smaller dimension.
        every: updates from one projector to the next.
    """
    if gradients[0].shape[0] > gradients[0].shape[1]:
        turned, limited = published([g.T for g in gradients], rank, every, beta1, beta2, eps, fira=fira)
        return [update.T for update in turned], limited
    found, rest_norm, limited = [], None, 0
    m = v = np.zeros((rank, gradients[0].shape[1]))
    for number, g in enumerate(gradients, start=1):
        if (number - 1) % every == 0:
            vectors = np.linalg.svd(g)[0][:, :rank]
            p = vectors * np.sign(vectors[np.abs(vectors).argmax(0), range(rank)])
        r = p.T @ g
        m = beta1 * m + (1 - beta1) * r
        v = beta2 * v + (1 - beta2) * r * r
        n = (m / (1 - beta1**number)) / (np.sqrt(v / (1 - beta2**number)) + eps)
        update = p @ n
        if fira:
            rest = g - p @ r
            for column in range(g.shape[1]):
                rest[:, column] *= np.linalg.norm(n[:, column]) / np.linalg.norm(r[:, column])
            norm = np.linalg.norm(rest)
            if rest_norm is not None and norm > 1.01 * rest_norm:
                rest *= 1.01 * rest_norm / norm
                norm, limited = 1.01 * rest_norm, limited + 1
            rest_norm = norm
            update = update + rest
        found.append(update)
    return found, limited
