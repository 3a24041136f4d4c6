"""What layers keep of their inputs for the backward pass, in bytes: what `budget.saved_bytes` counts.

Method   What is kept of a layer's input is what its wgrad reads: codes where that GEMM is quantized, else bf16. So the
         bytes of a decision are those of the wgrad's format, over the rows of the statistics
         (`scrimp.precision.saved_bytes`), and its share is over the same numbers in bf16. Where the recipes do not
         decide what is kept, for a rule does or attention keeps its output anyway, every format takes these bytes.
Limits   An input counts once for each layer that reads it, and as kept: what blocks make again instead
         (`memory.activations`) is not known here. Of experts as if all rows were in one run.
Checked  tests/planner/precision/test_saved_bytes.py

Shapes: L layers, P formats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import BF16_BYTES, GEMMS, saved_bytes

Array = NDArray[np.float64]
_WGRAD = GEMMS.index("wgrad")


def kept_bytes(
    profile: PrecisionProfile, fixed: Sequence[tuple[str, ...]] | None, *, compiled: bool
) -> Array:
    """[L, 3, P], bytes that a GEMM adds in each format: those of its layer's input stand at its wgrad.

    Args:
        fixed: all that is kept of each layer's input whatever runs; empty where wgrad's format decides it.
        compiled: whether layers run in compiled graphs.
    """
    found = np.zeros((len(profile.layers), len(GEMMS), len(profile.formats)))
    experts = profile.experts or (1,) * len(profile.layers)
    for i, (rows, (_, inputs)) in enumerate(zip(profile.rows, profile.shapes, strict=True)):
        whatever_runs = fixed[i] if fixed is not None else ()
        for p, name in enumerate(profile.formats):
            found[i, _WGRAD, p] = sum(
                saved_bytes(kept, round(rows), inputs, compiled=compiled, grouped=experts[i] > 1)
                for kept in whatever_runs or (name,)
            )
    return found


def bf16_bytes(profile: PrecisionProfile) -> Array:
    """[L], of the same inputs in bf16."""
    inputs = np.array([float(inputs) for _, inputs in profile.shapes])
    found: Array = BF16_BYTES * inputs * np.round(profile.rows)
    return found
