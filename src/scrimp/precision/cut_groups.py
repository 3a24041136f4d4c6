"""Whether ranks that share a linear layer quantize their pieces as one process quantizes the whole.

Problem  Each of several ranks has some outputs of a layer (rows of W, columns of G) or some inputs (columns of W
         and X). A scale that spans all features is the largest number of all ranks', which a reduction
         finds. A group of fixed size (a tile, a block) must lie on one rank.
Method   A piece begins at feature b of the whole, for each rank and each of the layers that are stacked in it.
         Groups of g features along the cut lie on one rank where g divides every b::

             outputs  fprop  W across its groups          dgrad  G, W along them      wgrad  G across
             inputs   fprop  X, W along                   dgrad  W across             wgrad  X across

         Across them tiles are one feature wide, and blocks as wide as they are long.
Checked  tests/precision/test_cut_groups.py, by quantizing pieces and wholes
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from scrimp.errors import PlanError
from scrimp.precision.formats import lookup_scaling
from scrimp.precision.recipes import GEMMS, HADAMARD, HIGH_PRECISION, OPERANDS, Operand, recipe
from scrimp.precision.rules import RECOMPUTE, LinearPrecision

Split = Literal["outputs", "inputs"]
_CUT_TENSORS: dict[str, tuple[str, ...]] = {"outputs": ("w", "g"), "inputs": ("w", "x")}
_SUMMED: dict[str, str] = {"outputs": "dgrad", "inputs": "fprop"}
"""The GEMM that sums over the features that are cut."""


def check_cut(
    name: str, precision: LinearPrecision, split: str, begins: Collection[int], features: int
) -> None:
    """Refuse a precision whose groups would lie on two ranks.

    Args:
        name: of the layer.
        split: which features are cut, outputs or inputs.
        begins: the features at which pieces begin, of all ranks and stacked layers.
        features: of the whole layer.

    Raises:
        PlanError: names the GEMM, its recipe and the group.
    """
    uses = [(gemm, precision.gemm(gemm)) for gemm in GEMMS]
    if precision.saved not in (*HIGH_PRECISION, RECOMPUTE):
        uses.append(("wgrad", precision.saved))
    for gemm, recipe_name in uses:
        entry = recipe(recipe_name).gemm(gemm)
        for tensor, operand in zip(OPERANDS[gemm], () if entry is None else (entry.a, entry.b), strict=False):
            if tensor not in _CUT_TENSORS[split]:
                continue
            group = _group(operand, is_along=gemm == _SUMMED[split])
            for begin in sorted(begins):
                if begin % group:
                    raise PlanError(
                        f"{name}.{gemm} cannot run in {recipe_name} on ranks that share the layer",
                        got=f"a piece that begins at {begin:,} of its {features:,} {split}; groups of {group} "
                        f"{split} of {tensor.upper()}",
                        expected=f"pieces of a multiple of {group}",
                        do="plan another recipe for this layer (fp8_tensor, fp8_row), or use fewer ranks",
                    )


def _group(operand: Operand, *, is_along: bool) -> int:
    """Features of a group, along the sum of the GEMM or across it; 1 where a reduction finds the scale."""
    scaling = lookup_scaling(operand.scaling)
    group = (scaling.columns if is_along else scaling.rows) or 1
    return max(group, HADAMARD) if operand.hadamard and is_along else group
