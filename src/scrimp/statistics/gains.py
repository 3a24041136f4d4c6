"""How far an error in one layer's GEMM moves the gradients of all weights: gains, by injected noise.

With k a watched weight and l a planned layer::

    B[k<-l] = |change of gW_k| / |noise in gX_l|        F[k<-l] = |change of gW_k| / |noise in Y_l|

on the same batch, weights and random state. Three ways, from exact to cheap:

exact    (R1) a backward pass per distinct input and a forward pass per layer, noise at that very point. The oracle,
         and the only way where no residual stream is found.
blocks   (R2) a backward and a forward pass per node of the stream, noise into the stream there.
ratios   (R3, the default) two passes for each kind of noise, which enters once into the last node's gradient and once
         into the first node's activation; at every node the change that arrives there counts as injected::

             Bn[k,j] = |dgW_k| / |dR_j|                      backward run, k before j
             Fn[k,j] = |dgW_k| / |dx_j|                      forward run, k after j
             Fn[k,j] = Bn[k,j] |dR_j| / |dx_j|               forward run, k before j

For blocks and ratios, l in sub-layer s (between nodes s and s + 1) reaches the stream through its branch::

    B[k<-l] = a Bn[k,s], k before s;    a = |R_s - R_(s+1)| / |summed gX at l's input|
    F[k<-l] = c Fn[k,s+1];              c = |change of Y_exit| / |noise in Y_l|

c and the weights of its own sub-layer as `branches` measures. The ratio a is never taken at the linear layer
itself, which would charge it with the noise of the skip path.

Two kinds  Errors of X and G are independent between tokens, and average out in a weight's gradient; an error of W
           is one linear map that all tokens share, and does not. SNIP's reconstruction has noise of the first kind
           alone, and understates weight errors; here every pass is made with both.
Isolation  What happens inside a sub-layer comes from two more passes for each of its entries, in which no noise
           travels: see `branches`. So the ratios need six passes where each sub-layer has one entry (qkv and gate with
           up in one matrix), ten where q, k and v are apart; blocks 4 (S + 1) - 4 more.
Updates    Each pass also takes the change of the *update* that its noise causes, through the optimizer's state: where
           gradients are large their errors are large too, and AdamW divides by just that.
Curvature  z' H z / |z|^2 along the noise, for the mean of the second-order change of the loss: at the nodes
           <dx, dR> / |dx|^2 of the forward run, times c^2; exact: <z, G(Y + z) - G(Y)> / |z|^2.
Experts    What routed experts add to the stream is |Y_added|, not |Y_exit|: the weighted sum of what each token's
           experts gave; what noise in Y_exit does to the router's gradient is left out. Tokens keep the experts that
           they chose in the clean pass: another choice is no small change.
Limits     Noise is as large in each feature of a result, where errors of X lie as W's outputs do; of a, noise in gX is
           taken to reach the stream as the gradient itself does. What noise from the first node makes of the stream
           on its way counts as noise that enters later: updates by writers of the stream come out up to 1.6 times
           too large. `calibration` holds updates against real errors.
Source     SNIP (arXiv 2602.01410), reconstruction eq. (2), (5) and R1 to R3.
Checked    tests/statistics/test_gains.py: R2 and R3 against R1; test_exact.py: R1 against gradients that
           are disturbed by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from scrimp.statistics.branches import Isolated
from scrimp.statistics.stream import Changes, Injection, StreamTape
from scrimp.statistics.structure import Structure

Array = NDArray[np.float64]
UPDATES = 1
"""Row of gains that says how far updates move, after that of gradients."""
NOISES = ("tokens", "weights")
"""Kinds of injected noise: independent between tokens, and one linear map of all of them."""


@dataclass(frozen=True)
class Gains:
    """By noise of tokens and of weights, and of gradients and of relative updates."""

    backward: Array
    """[2, 2, K, L]."""
    forward: Array
    """[2, 2, K, L]."""
    curvature: Array
    """[L]."""


@dataclass(frozen=True)
class CleanRun:
    """What the clean pass measured, by layer."""

    norms: Mapping[tuple[str, str], float]
    """(layer, x w y g gx) to norm."""
    input_gradients: Mapping[str, float]
    """Norm of the summed gradient at a layer's input."""
    added: Mapping[int, float]
    """Sub-layer to the norm of what it adds to the stream, where that is not what its exit gives."""


def places(structure: Structure, weights: tuple[str, ...], owners: Mapping[str, str]) -> NDArray[np.int64]:
    """[K], sub-layer of each watched weight: -1 before the stream (embedding), S after it (head).

    Args:
        weights: in the order in which the model defines them; what belongs to no planned layer is
            before the stream if it comes before all that do, and after it if after them, or by its name.
        owners: weight to the planned layer that it belongs to.
    """
    last = len(structure.sublayers)
    by_owner = [structure.place(owners[weight]) if weight in owners else None for weight in weights]
    planned = [index for index, place in enumerate(by_owner) if place is not None]
    found: list[int] = []
    for index, (weight, place) in enumerate(zip(weights, by_owner, strict=True)):
        if place is not None:
            found.append(place)
        elif "head" in weight or "output" in weight or index > max(planned, default=-1):
            found.append(last)
        elif index < min(planned):
            found.append(-1)
        else:  # a router is of the sub-layer of its experts, which come after it
            after = min(other for other in planned if other > index)
            with_next = _shares_more(weight, weights[after], weights[index - 1])
            found.append(cast(int, by_owner[after]) if with_next else found[-1])
    return np.array(found)


def _shares_more(name: str, one: str, other: str) -> bool:
    """Whether a name begins like one more than like the other."""

    def shared(other: str) -> int:
        pairs = zip(name.split("."), other.split("."), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return shared(one) > shared(other)


class NodeGains:
    """Gains of the nodes of a stream, [K, S + 1], by whichever passes."""

    def __init__(self, num_weights: int, num_nodes: int) -> None:
        self.backward = np.zeros((len(NOISES), 2, num_weights, num_nodes))
        self.forward = np.zeros((len(NOISES), 2, num_weights, num_nodes))
        self.curvature = np.zeros(num_nodes)
        self.exits = np.zeros((len(NOISES), 2, num_weights, num_nodes - 1))
        """Gains of an exit's input gradient on the entries of its sub-layer."""
        self.entries: dict[tuple[int, int], Array] = {}
        """[2, 2, K], of (sub-layer, number of an entry), gains of its output on the weights of its sub-layer."""
        self.reach: dict[tuple[int, int], Array] = {}
        """[2], likewise: how much of noise in its output is there in that of the exit."""

    def add_exits(self, row: int, changes: Changes, moved: Array) -> None:
        """From a backward run: how far noise at each exit has moved the weights."""
        for s in range(self.exits.shape[-1]):
            if changes.exits[s] > 0:
                self.exits[row, ..., s] = moved / _root(changes.exits[s])

    def add_entries(self, structure: Structure, passes: Passes, seed: int) -> None:
        """A pass of isolated branches for each kind of noise and each number that an entry has."""
        turns = max((len(sub.entries) for sub in structure.sublayers), default=0)
        for turn, (row, kind) in itertools.product(range(turns), enumerate(NOISES)):
            found, moved = passes.isolated(kind, seed + row, turn)
            for s, sub in enumerate(structure.sublayers):
                if turn < len(sub.entries):
                    size, key = _root(found.injected.get(s, 0.0)), (s, turn)
                    self.entries.setdefault(key, np.zeros((len(NOISES), *moved.shape)))[row] = moved / size
                    arrived = math.sqrt(found.arrived.get(s, 0.0))
                    self.reach.setdefault(key, np.zeros(len(NOISES)))[row] = arrived / size


@dataclass
class Passes:
    """Disturbed passes over one batch; each gives [2, K] norms of the changes of gradients and updates."""

    stream: Callable[[Injection], tuple[Changes, Array]]
    """Noise at a node."""
    isolated: Callable[[str, int, int], tuple[Isolated, Array]]
    """Noise of a kind in every branch on its own, by seed and number of the entry."""
    first: int = 0
    """The first node whose activation has a gradient."""


def by_ratios(
    structure: Structure, where: NDArray[np.int64], passes: Passes, share: float, seed: int
) -> NodeGains:
    """R3: two passes for each kind of noise."""
    last = len(structure.sublayers)
    gains = NodeGains(len(where), last + 1)
    for row, kind in enumerate(NOISES):
        changes, moved = passes.stream(Injection(last, "backward", kind, share, seed + 2 * row))
        for j in range(last + 1):
            gains.backward[row, ..., j] = np.where(where < j, moved / _root(changes.gradient[j]), 0.0)
        gains.add_exits(row, changes, moved)
        changes, moved = passes.stream(Injection(passes.first, "forward", kind, share, seed + 2 * row + 1))
        for j in range(passes.first, last + 1):
            arriving = _root(changes.activation[j])
            back = gains.backward[row, ..., j] * math.sqrt(changes.gradient[j]) / arriving
            gains.forward[row, ..., j] = np.where(where < j, back, moved / arriving)
            if kind == "tokens":
                gains.curvature[j] = changes.product[j] / arriving**2
    gains.add_entries(structure, passes, seed + 100)
    return gains


def by_blocks(
    structure: Structure, where: NDArray[np.int64], passes: Passes, share: float, seed: int
) -> NodeGains:
    """R2: two passes per node for each kind of noise."""
    num_nodes = len(structure.nodes)
    gains = NodeGains(len(where), num_nodes)
    for (row, kind), j in itertools.product(enumerate(NOISES), range(num_nodes)):
        key = seed + 4 * j + 2 * row
        changes, moved = passes.stream(Injection(j, "backward", kind, share, key))
        gains.backward[row, ..., j] = np.where(where < j, moved / _root(changes.injected[j]), 0.0)
        if j == num_nodes - 1:
            gains.add_exits(row, changes, moved)
        changes, moved = passes.stream(Injection(j, "forward", kind, share, key + 1))
        gains.forward[row, ..., j] = moved / _root(changes.injected[j])
        if kind == "tokens":
            gains.curvature[j] = changes.product[j] / _root(changes.injected[j]) ** 2
    gains.add_entries(structure, passes, seed + 1000)
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
        layers: that gains are wanted of.
        owned: layer to the index of its weight, of all that are trained.
        clean: of all layers of the stream.
    """
    backward = np.zeros((len(NOISES), 2, len(where), len(layers)))
    forward, curvature = np.zeros_like(backward), np.zeros(len(layers))
    for index, layer in enumerate(layers):
        s = structure.place(layer)
        assert s is not None
        sub = structure.sublayers[s]
        through = _ratio(_root(tape.branch_squares[s]), clean.input_gradients[layer])
        backward[..., index] = np.where(where < s, through * nodes.backward[..., s], 0.0)
        reach = nodes.reach[s, sub.entries.index(layer)] if layer in sub.entries else np.ones(len(NOISES))
        if s in clean.added:
            reach = reach * _ratio(clean.added[s], clean.norms[sub.exit, "y"])
        forward[..., index] = reach[:, None, None] * nodes.forward[..., s + 1]
        curvature[index] = reach[0] ** 2 * nodes.curvature[s + 1]
        entries, own = (
            [owned[name] for name in names if name in owned]
            for names in (sub.entries, (*sub.entries, sub.exit))
        )
        if layer == sub.exit:
            backward[:, :, entries, index] = nodes.exits[:, :, entries, s]
        else:
            branch = nodes.entries[s, sub.entries.index(layer)][:, :, own]
            stream = forward[:, :, own, index]
            forward[:, :, own, index] = np.hypot(stream, branch)
    return Gains(backward, forward, curvature)


def _root(square: float) -> float:
    """The norm; infinite where nothing arrived, so that ratios are 0."""
    return math.sqrt(square) if square > 0 else math.inf


def _ratio(above: float, below: float) -> float:
    if not math.isfinite(above):  # nothing joined the stream here
        return 0.0
    return above / below if below > 0 else 0.0
