"""Bytes that backward keeps of a layer's input X [T, I]: what wgrad reads, in the form in which it lies in memory.

::

    bf16, fp32    2 and 4 bytes a number
    recompute     nothing
    a recipe      codes and scales of its wgrad's X: I rows, each of the T tokens that wgrad sums over

Compiled   A compiled graph knows sizes, but no plan: it keeps as many bytes for the codes of any recipe as the largest
           takes (`capacity`). Of a grouped layer it keeps the input itself.
Checked    tests/precision/test_saved_inputs.py: against the tensors that quantizing makes
"""

from __future__ import annotations

from scrimp.precision.formats import storage_bytes
from scrimp.precision.recipes import HADAMARD, recipe
from scrimp.precision.rules import RECOMPUTE

ALIGNMENT = 16
"""Bytes that every part of packed codes begins at a multiple of."""
BF16_BYTES = 2


def saved_bytes(
    saved: str, tokens: int, features: int, *, compiled: bool = False, grouped: bool = False
) -> int:
    """Bytes of an input of so many tokens and features.

    Args:
        saved: a high precision, a recipe, or recompute.
        compiled: whether the layer runs in a compiled graph.
        grouped: whether it is a grouped layer, of several experts.
    """
    if saved == RECOMPUTE:
        return 0
    entry = recipe(saved)
    if entry.wgrad is None:
        return tokens * features * entry.bits // 8
    if compiled:
        return BF16_BYTES * tokens * features if grouped else capacity(tokens, features)
    operand = entry.wgrad.b
    return storage_bytes((features, operand.length(tokens)), operand.element, operand.scaling)


def capacity(tokens: int, features: int) -> int:
    """Bytes that hold the codes of X [tokens, features] of any recipe; also of symbolic sizes."""
    whole = (tokens + HADAMARD - 1) // HADAMARD * HADAMARD
    return features * (whole + 4 * (tokens // 128 + 1)) + 3 * ALIGNMENT
