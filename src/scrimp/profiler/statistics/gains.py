"""How far an error in one layer's GEMM moves the gradients of all weights: gains, by injected noise.

With k a watched weight and l a planned layer::

    B[k<-l] = |change of gW_k| / |noise in gX_l|        F[k<-l] = |change of gW_k| / |noise in Y_l|

on the same batch, weights and random state. Three ways, from exact to cheap:

exact    (R1) a backward pass per distinct input and a forward pass per layer, noise at that very point. The oracle,
         and the only way where no residual stream is found.
blocks   (R2) a backward and a forward pass per node of the stream, noise into the stream there.
ratios   (R3, the default) two passes in all: noise once into the last node's gradient and once into the first node's
         activation; at every node the change that arrives there is what counts as injected::

             Bn[k,j] = |dgW_k| / |dR_j|                      backward run, k before j
             Fn[k,j] = |dgW_k| / |dx_j|                      forward run, k after j
             Fn[k,j] = Bn[k,j] |dR_j| / |dx_j|               forward run, k before j

For blocks and ratios, l in sub-layer s (between nodes s and s + 1) reaches the stream through its branch::

    B[k<-l] = a Bn[k,s], k before s;    a = |R_s - R_(s+1)| / |summed gX at l's input|
    B[k<-l] = |G_k| |X_k| / (sqrt(T) |gX_l|)                k an entry and l the exit of one sub-layer
    F[k<-l] = c Fn[k,s+1];              c = |Y_exit| / |Y_l|
    F[k<-l] = |G_k| |X_k| / (sqrt(T) |Y_l|)                 added in squares, k the exit and l an entry

The ratio is never taken at the linear layer itself, which would charge it with the noise of the skip path. The last
line is not in the reconstruction of SNIP: an entry's error also changes what the exit multiplies.

Curvature  z' H z / |z|^2 along the noise, for the mean of the second-order change of the loss: at the nodes
           <dx, dR> / |dx|^2 of the forward run, times c^2; exact: <z, G(Y + z) - G(Y)> / |z|^2.
Source     SNIP (arXiv 2602.01410), reconstruction eq. (2), (5) and R1 to R3.
Checked    tests/profiler/statistics/test_gains.py: R1 against changes of gradients taken by hand, R2 and R3 against R1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scrimp.profiler.statistics.stream import Changes, Injection, StreamTape
from scrimp.profiler.statistics.structure import Structure

Array = NDArray[np.float64]
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Gains:
    """[K, L] both gains, [L] curvature."""

    backward: Array
    forward: Array
    curvature: Array


@dataclass(frozen=True)
class CleanRun:
    """What the clean pass measured, by layer."""

    norms: Mapping[tuple[str, str], float]
    """(layer, x w y g gx) to norm."""
    input_gradients: Mapping[str, float]
    """Norm of the summed gradient at a layer's input."""
    tokens: int


def places(structure: Structure, weights: tuple[str, ...], owners: Mapping[str, str]) -> NDArray[np.int64]:
    """[K], sub-layer of each watched weight: -1 before the stream (embedding), S after it (head).

    Args:
        owners: weight to the planned layer that it belongs to.
    """
    last = len(structure.sublayers)
    found = []
    for weight in weights:
        place = structure.place(owners[weight]) if weight in owners else None
        is_head = weight not in owners and ("head" in weight or "output" in weight)
        found.append(place if place is not None else last if is_head else -1)
    return np.array(found)


class NodeGains:
    """Gains of the nodes of a stream, [K, S + 1], by whichever passes."""

    def __init__(self, num_weights: int, num_nodes: int) -> None:
        self.backward = np.zeros((num_weights, num_nodes))
        self.forward = np.zeros((num_weights, num_nodes))
        self.curvature = np.zeros(num_nodes)


Run = Callable[[Injection], tuple[Changes, Array]]
"""A disturbed pass over the batch: changes at the nodes, and [K] norms of the weights' gradient changes."""


def by_ratios(structure: Structure, where: NDArray[np.int64], run: Run, share: float, seed: int) -> NodeGains:
    """R3: two passes."""
    last = len(structure.sublayers)
    gains = NodeGains(len(where), last + 1)
    changes, moved = run(Injection(last, "backward", share, seed))
    for j in range(last + 1):
        gains.backward[:, j] = np.where(where < j, moved / _root(changes.gradient[j]), 0.0)
    changes, moved = run(Injection(0, "forward", share, seed + 1))
    for j in range(last + 1):
        arriving = _root(changes.activation[j])
        back = gains.backward[:, j] * _root(changes.gradient[j]) / arriving
        gains.forward[:, j] = np.where(where < j, back, moved / arriving)
        gains.curvature[j] = changes.product[j] / arriving**2
    return gains


def by_blocks(structure: Structure, where: NDArray[np.int64], run: Run, share: float, seed: int) -> NodeGains:
    """R2: two passes per node."""
    num_nodes = len(structure.nodes)
    gains = NodeGains(len(where), num_nodes)
    for j in range(num_nodes):
        changes, moved = run(Injection(j, "backward", share, seed + 2 * j))
        gains.backward[:, j] = np.where(where < j, moved / _root(changes.injected[j]), 0.0)
        changes, moved = run(Injection(j, "forward", share, seed + 2 * j + 1))
        injected = _root(changes.injected[j])
        gains.forward[:, j] = moved / injected
        gains.curvature[j] = changes.product[j] / injected**2
    return gains


def of_layers(
    nodes: NodeGains,
    structure: Structure,
    where: NDArray[np.int64],
    layers: tuple[str, ...],
    owned: Mapping[str, int],
    clean: CleanRun,
    tape: StreamTape,
) -> Gains:
    """From nodes to layers, by the branch that joins them.

    Args:
        owned: layer to the index of its weight.
    """
    backward = np.zeros((len(where), len(layers)))
    forward, curvature = np.zeros_like(backward), np.zeros(len(layers))
    norm, root_t = clean.norms, math.sqrt(clean.tokens)
    for index, layer in enumerate(layers):
        s = structure.place(layer)
        assert s is not None
        sub = structure.sublayers[s]
        branch = _root(tape.branch_squares[s])
        through = _ratio(branch, clean.input_gradients[layer])
        backward[:, index] = np.where(where < s, through * nodes.backward[:, s], 0.0)
        reach = _ratio(norm[sub.exit, "y"], norm[layer, "y"])
        forward[:, index] = reach * nodes.forward[:, s + 1]
        curvature[index] = reach**2 * nodes.curvature[s + 1]
        if layer == sub.exit:
            for entry in sub.entries:
                direct = norm[entry, "g"] * norm[entry, "x"]
                backward[owned[entry], index] = _ratio(direct, root_t * norm[layer, "gx"])
        else:
            direct = _ratio(norm[sub.exit, "g"] * norm[sub.exit, "x"], root_t * norm[layer, "y"])
            k = owned[sub.exit]
            forward[k, index] = math.hypot(forward[k, index], direct)
    return Gains(backward, forward, curvature)


def _root(square: float) -> float:
    """The norm; infinite where nothing arrived, so that ratios are 0."""
    return math.sqrt(square) if square > 0 else math.inf


def _ratio(above: float, below: float) -> float:
    if not math.isfinite(above):  # nothing joined the stream here
        return 0.0
    return above / below if below > 0 else 0.0
