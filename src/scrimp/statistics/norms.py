"""Norms and quantization errors of every GEMM, from one ordinary pass in the compute type.

Problem  What a format does to an operand depends on the very tensor: its outliers, the axis that its scales run
         along, the rounding of its recipe. And an error counts by what it is multiplied with.
Method   `NormWatch` observes the planned GEMMs as they run, and quantizes both operands of each as every candidate
         format would: scaled along the axis that the GEMM sums over, stochastic where its recipe is. A rotated
         operand is compared after rotating back, which keeps the norm. For errors that are independent
         between elements, with k along the summed axis::

             |change of A B|^2 = sum_k |eA_k|^2 |B_k|^2 + |A_k|^2 |eB_k|^2

         SNIP's reconstruction has the norms of whole matrices there, as if energy were spread evenly over k; outlier
         features, rotations and tokens with large gradients make that wrong by up to a factor of two.
Sums     Squares add over the micro-batches of a statistics batch, those of W and its error apart: all of them share
         the one weight, whose error is therefore computed once (nearest rounding has no luck).
Experts  A grouped layer has one plan for all its experts, so their statistics are one pool: sums over the tokens of
         all. What rare experts lack in tokens they lack in weight. Their matrices count all the same: where no token
         of a statistics batch chose an expert, |W|^2 and |eW|^2 are taken to be the mean of the others'.
Limits   Errors of W act on all tokens alike, and are not independent of X; the result's norm takes them as if.
Source   SNIP (arXiv 2602.01410), reconstruction eq. (4), and the sums by index instead of norms.
Checked  tests/statistics/test_norms.py: against quantized copies and products in float64.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scrimp.formats import QuantizedTensor, fake_quantize
from scrimp.formats.hadamard import rotate
from scrimp.gemm import Execution, PlannedLayer
from scrimp.gemm.backends.numba import NumbaBackend
from scrimp.gemm.layer import Shard
from scrimp.gemm.problem import AXES, Use, operands_of
from scrimp.precision import GEMMS, OPERANDS
from scrimp.statistics.ranks import ALONE, Ranks
from scrimp.statistics.stream import is_recomputing, square

_NAMES = {"fprop": ("x", "w", "y"), "dgrad": ("g", "w", "gx"), "wgrad": ("g", "x", "gw")}
"""First operand, second operand and result."""
_COUNTED_IN = {"x": "fprop", "w": "fprop", "y": "fprop", "g": "dgrad", "gx": "dgrad"}
"""The GEMM that a tensor's norm is taken from, of those that read it."""

_CUT = {("outputs", name) for name in ("w", "y", "g")} | {("inputs", name) for name in ("x", "w", "gx")}
"""What lies in pieces on tensor-parallel ranks."""
_PARTIAL = {("outputs", "gx"), ("inputs", "y")}
"""What is a sum over them."""

ErrorKey = tuple[str, str, str, int]
"""Layer, GEMM, recipe, operand."""
WeightKey = tuple[ErrorKey, int]
"""And the expert, 0 where there is one matrix."""


class NormWatch:
    """An observer; sums of one statistics batch.

    Args:
        layers: whose norms are taken.
        recipes: candidate formats.
        weight_errors: of earlier batches, read and added to.
        quantized: layers whose errors are taken; None: all.
        ranks: that the layers run on.
        experts: of all ranks' layers, how many each has; None: those of `layers`.
    """

    def __init__(
        self,
        layers: Mapping[str, PlannedLayer],
        recipes: Sequence[str],
        weight_errors: dict[WeightKey, Tensor] | None = None,
        quantized: Collection[str] | None = None,
        ranks: Ranks = ALONE,
        experts: Mapping[str, int] | None = None,
    ) -> None:
        self._ranks = ranks
        self._layers = layers
        self._experts_of = experts or {name: max(1, len(one.members)) for name, one in layers.items()}
        self._quantized = layers.keys() if quantized is None else quantized
        self._recipes = [
            name for name in recipes if any(operands_of(gemm, name) != (None, None) for gemm in GEMMS)
        ]
        self.squares: dict[tuple[str, str], float] = defaultdict(float)
        """(layer, tensor) to |tensor|^2."""
        self.errors: dict[ErrorKey, float] = defaultdict(float)
        """|Q(A) - A|^2; of a weight once, however many micro-batches read it."""
        self.results: dict[ErrorKey, float] = defaultdict(float)
        """|change of the GEMM's result|^2 by the error of one operand."""
        self.tokens: dict[str, int] = defaultdict(int)
        self.runs: dict[tuple[str, str], float] = defaultdict(float)
        """(layer, GEMM) to how often it ran."""
        self.columns: dict[tuple[str, str, int], Tensor] = {}
        """(layer, g or x, expert) to the squares of each feature, summed over tokens."""
        self.rows: dict[tuple[str, int], int] = defaultdict(int)
        """(layer, expert) to rows of x."""
        self._of_weights: dict[tuple[tuple[Any, ...], int], float] = {}
        """Squares of W (layer, w) and of its errors (ErrorKey), by expert."""
        self._weight_errors = {} if weight_errors is None else weight_errors

    def __call__(self, execution: Execution) -> None:
        """Observe one GEMM."""
        layer, gemm = execution.layer, execution.gemm
        if layer not in self._layers or (gemm == "fprop" and is_recomputing()):
            return
        self.runs[layer, gemm] += 1
        names, expert = _NAMES[gemm], execution.expert
        b = execution.b.dequantize() if isinstance(execution.b, QuantizedTensor) else execution.b
        operands = execution.a, b
        for name, value in zip(names, (*operands, execution.result), strict=True):
            if _COUNTED_IN.get(name) == gemm:
                self._count(layer, name, value, expert)
        if layer not in self._quantized:
            return
        along = [_squares_along(value, axis) for value, axis in zip(operands, AXES[gemm], strict=True)]
        for recipe in self._recipes:
            for operand, value in enumerate(operands):
                key = (layer, gemm, recipe, operand)
                error = self._error(key, value, expert)
                if names[operand] == "w":
                    self._of_weights[key, expert] = float(error.sum())
                else:
                    self.errors[key] += float(error.sum())
                self.results[key] += float(torch.dot(error, along[1 - operand]))

    def _count(self, layer: str, name: str, value: Tensor, expert: int) -> None:
        shard = self._shard(layer)
        if shard is not None and (shard.split, name) in _PARTIAL:
            value = shard.sum(value)
        if name == "w":
            self._of_weights[(layer, name), expert] = square(value)
        else:
            self.squares[layer, name] += square(value)
        if name == "x":
            self.rows[layer, expert] += len(value)
        if name in ("x", "g"):
            squares = value.float().square().sum(0)
            before = self.columns.get((layer, name, expert))
            self.columns[layer, name, expert] = squares if before is None else before.add_(squares)

    def join(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Close the sums, over all ranks and the same on each; after the pass, by all of them.

        Args:
            shapes: [O, I] of whole weights, by layer.
        """
        for layer in sorted(self._experts_of):
            self._join_weights(layer)
            experts = range(self._experts(layer))
            same = self._on_same_tokens(layer)
            rows = self._ranks.sum([self.rows.get((layer, expert), 0) / same for expert in experts])
            self.rows.update({(layer, e): round(rows[e]) for e in experts})
            self.tokens[layer] = sum(self.rows[layer, expert] for expert in experts)
        if self._ranks.size == 1:
            return
        share = self._ranks.share
        once = {"x": 1.0, "y": 1.0, "g": share**2, "gx": share**2}
        by_gemm = {"fprop": 1.0, "dgrad": share**2, "wgrad": share**2}
        for layer in sorted(self._experts_of):
            squares = {(layer, name): factor / self._copies(layer, name) for name, factor in once.items()}
            self._ranks.join(self.squares, squares)
            self._ranks.join(self.runs, {(layer, gemm): 1.0 for gemm in GEMMS})
            keys = self._keys(layer, of_weights=False)
            self._ranks.join(self.errors, {key: squares[layer, OPERANDS[key[1]][key[3]]] for key in keys})
            # Sums over features that are cut have a part on each rank, and so have results of cut features.
            of_results = 1 if self._shard(layer) is not None else self._ranks.copies()
            keys = self._keys(layer)
            self._ranks.join(self.results, {key: by_gemm[key[1]] / of_results for key in keys})
            outputs, inputs = shapes[layer]
            for expert in range(count := self._experts(layer)):
                for name, width in (("g", outputs // count), ("x", inputs)):
                    self._join_columns((layer, name, expert), width, squares[layer, name])

    def _join_weights(self, layer: str) -> None:
        """Squares of all experts' matrices, from those that some rank has seen."""
        experts = self._experts(layer)
        errors = self._keys(layer, of_weights=True)
        keys: list[tuple[Any, ...]] = [(layer, "w"), *errors]
        own = np.array([[self._of_weights.get((key, e), np.nan) for e in range(experts)] for key in keys])
        seen = self._ranks.sum(~np.isnan(own[0]) / self._on_same_tokens(layer))
        total = self._ranks.sum(np.where(np.isnan(own), 0.0, own) / self._copies(layer, "w"))
        is_seen = seen > 0
        found = (total[:, is_seen] / seen[is_seen]).sum(1) * (experts / max(1, is_seen.sum()))
        self.squares[layer, "w"] = float(found[0])
        self.errors.update(zip(errors, found[1:].tolist(), strict=True))

    def _keys(self, layer: str, *, of_weights: bool | None = None) -> list[ErrorKey]:
        """Keys of all errors of a layer, or of those of W or the others alone."""
        return [
            (layer, gemm, recipe, operand)
            for gemm in GEMMS
            for recipe in self._recipes
            for operand in (0, 1)
            if of_weights in (None, OPERANDS[gemm][operand] == "w")
        ]

    def _experts(self, layer: str) -> int:
        return self._experts_of[layer]

    def _join_columns(self, key: tuple[str, str, int], width: int, factor: float) -> None:
        """Put together the column sums of all features, whichever ranks hold them."""
        layer, name, _ = key
        own, shard = self.columns.get(key), self._shard(layer)
        whole = np.zeros(width)
        if own is not None:
            features = [range(len(own))]
            if shard is not None and (shard.split, name) in _CUT:
                features = [*shard.features]
            whole[list(itertools.chain(*features))] = own.double().cpu().numpy() * factor
        total = torch.from_numpy(self._ranks.sum(whole)).float()
        self.columns[key] = total if own is None else total.to(own.device)

    def _shard(self, layer: str) -> Shard | None:
        """How ranks share a layer; None: they do not, or it is not here."""
        return None if layer not in self._layers else self._layers[layer].piece

    def _on_same_tokens(self, layer: str) -> int:
        """Ranks that run its products on the same tokens."""
        shard = self._shard(layer)
        return self._ranks.copies() if shard is None else shard.ranks

    def _copies(self, layer: str, name: str) -> int:
        """Ranks that have the same of a tensor of its products."""
        shard = self._shard(layer)
        return 1 if shard is not None and (shard.split, name) in _CUT else self._on_same_tokens(layer)

    def error_shape(self, layer: str) -> Tensor | None:
        """[O, I], where errors of a layer's weight gradient lie: |G_o| |X_i|, with a mean square of 1.

        The error of an operand is about a share of its size, feature by feature. Experts lie one below the other, each
        with the n tokens that chose it: |G_o| |X_i| / sqrt(n).
        """
        if layer not in self._experts_of:
            return None
        found = [self._shape_of(layer, expert) for expert in range(self._experts(layer))]
        like = next((shape for shape in found if shape is not None), None)
        if like is None:
            return None
        whole = torch.cat([torch.zeros_like(like) if shape is None else shape for shape in found])
        return whole.div_(whole.square().mean().sqrt())

    def _shape_of(self, layer: str, expert: int) -> Tensor | None:
        """[O, I], not normalised; None: nothing reached it."""
        g, x = self.columns.get((layer, "g", expert)), self.columns.get((layer, "x", expert))
        if g is None or x is None or not float(g.sum()) or not float(x.sum()):
            return None
        return torch.outer(g.sqrt(), (x / self.rows[layer, expert]).sqrt())

    def _error(self, key: ErrorKey, value: Tensor, expert: int) -> Tensor:
        """Squares of an operand's error, along the axis that the GEMM sums over."""
        layer, gemm, recipe, operand = key
        if (key, expert) in self._weight_errors:
            return self._weight_errors[key, expert]
        planned = self._ranks.member(self._layers[layer], expert)
        found = squared_error(value, planned.uses(gemm, planned.clock.now, recipe)[operand])
        if OPERANDS[gemm][operand] == "w":
            self._weight_errors[key, expert] = found
        return found


def squared_error(value: Tensor, use: Use) -> Tensor:
    """[K], |Q(A) - A|^2 of one operand by its index along the axis that the GEMM sums over."""
    if use.operand is None:
        return torch.zeros(value.shape[use.axis], device=value.device)
    return _squares_along(error_of(value, use), use.axis)


def error_of(value: Tensor, use: Use) -> Tensor:
    """Q(A) - A of one operand, in float32 and rotated back where it is rotated."""
    if use.operand is None:
        return torch.zeros_like(value, dtype=torch.float32)
    if (kernels := NumbaBackend()).takes(value.device):
        found = kernels.prepare(value, use).quantized.dequantize()
        if use.operand.hadamard:
            rows, columns = value.shape
            found = rotate(found, use.axis, inverse=True)[:rows, :columns]
    else:
        found = fake_quantize(
            value, use.operand, use.axis, noise=use.noise, reduce_amax=use.reduce_amax
        ).dequantize()
    return found.sub_(value)


def _squares_along(value: Tensor, axis: int) -> Tensor:
    """[K], the squares summed over the other axis."""
    norms: Tensor = torch.linalg.vector_norm(value, dim=-2 if axis % 2 == 1 else -1, dtype=torch.float32)
    return norms.square_()
