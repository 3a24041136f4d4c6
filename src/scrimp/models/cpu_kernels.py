"""Norms, gates and rotations on a CPU, compiled by Numba: each number is read from memory and written once.

Problem  As torch's operators they are three to twelve passes over whole activations: where a CPU has fast products of
         bfloat16, a quarter of a step in that type, with the loss.
Method   The formulas of `scrimp.models.functions` and `scrimp.models.rope` for a row at a time, which stays in the
         fastest cache between two loops over it. All computes in float32 and rounds once. Gradients of a norm's
         weight are summed over blocks of rows, of a size that no number of threads changes, and these by torch.
Limits   float32 and bfloat16.
Checked  tests/models/test_functions.py, tests/models/test_rope.py

Each kernel takes a range of rows (`scrimp.cpu.rows`). Shapes: S rows, D width, F width of a gate.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from scrimp.cpu.numbers import ONE, compiled, exponential, narrow, over_rows, wide

_THREE, _STEEP, _CUBIC = np.float32(3.0), np.float32(2 * (2 / np.pi) ** 0.5), np.float32(0.044715)


@over_rows()
def norm(x: Any, first: int, last: int, weight: Any, eps: Any, y: Any, r: Any) -> None:
    """x r w, and r = 1 / sqrt(mean(x^2) + eps)."""
    width = x.shape[1]
    for i in numba.prange(first, last):
        own, found, squares = x[i], y[i], np.float32(0.0)
        for j in range(width):
            v = np.float32(wide(own[j]))
            squares += v * v
        r[i] = ONE / np.sqrt(squares / np.float32(width) + eps)
        for j in range(width):
            found[j] = narrow(wide(own[j]) * r[i] * wide(weight[j]), y)


@over_rows()
def norm_gradients(x: Any, first: int, last: int, size: int, given: Any, dx: Any, dw: Any) -> None:
    """The gradient of x, and of the weight the part of each block of `size` rows; first and last count blocks."""
    weight, dy, r = given
    rows, width = x.shape
    for block in numba.prange(first, last):
        own_dw = dw[block]
        for j in range(width):
            own_dw[j] = np.float32(0.0)
        for i in range(block * size, min(rows, block * size + size)):
            own, grad, found, own_r, dot = x[i], dy[i], dx[i], r[i], np.float32(0.0)
            for j in range(width):
                dot += wide(grad[j]) * wide(own[j]) * wide(weight[j])
            factor = own_r * own_r * own_r * dot / np.float32(width)
            for j in range(width):
                v, g = wide(own[j]), wide(grad[j])
                own_dw[j] += g * v * own_r
                found[j] = narrow(g * wide(weight[j]) * own_r - v * factor, dx)


@compiled(fastmath={"contract"})
def _share(x: Any, is_gelu: bool) -> Any:
    """act(x) / x: of SiLU sigmoid(x), of GELU with tanh sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    inner = _STEEP * (x + _CUBIC * x * x * x) if is_gelu else x
    return ONE / (ONE + exponential(-inner))


@over_rows()
def gated(x: Any, first: int, last: int, is_gelu: bool, y: Any) -> None:
    """act(gate) up, of rows with the gate before up."""
    width = y.shape[1]
    for i in numba.prange(first, last):
        gate, up, found = x[i, :width], x[i, width:], y[i]
        for j in range(width):
            v = wide(gate[j])
            found[j] = narrow(v * _share(v, is_gelu) * wide(up[j]), y)


@over_rows()
def gated_gradient(x: Any, first: int, last: int, is_gelu: bool, dy: Any, dx: Any) -> None:
    """The gradient of both."""
    width = dy.shape[1]
    for i in numba.prange(first, last):
        gate, up, grad = x[i, :width], x[i, width:], dy[i]
        of_gate, of_up = dx[i, :width], dx[i, width:]
        for j in range(width):
            v, g = wide(gate[j]), wide(grad[j])
            s = _share(v, is_gelu)
            slope = _STEEP * (ONE + _THREE * _CUBIC * v * v) if is_gelu else ONE
            of_up[j] = narrow(g * v * s, dx)
            of_gate[j] = narrow(g * wide(up[j]) * s * (ONE + v * (ONE - s) * slope), dx)


@over_rows()
def rotation(
    x: Any, first: int, last: int, sizes: Any, steps: Any, cos: Any, sin: Any, sign: Any, out: Any
) -> None:
    """Heads turned by the positions of their tokens.

    Args:
        x: memory of (rows of tokens, tokens, heads, head size), as out; first and last count tokens of all rows.
        sizes: tokens of a row, heads, and pairs of a head.
        steps: numbers from one row, token and head to the next, of x and of out.
        cos: [tokens, head size], as sin, whose first half has the minus sign.
        sign: 1, or -1 to turn back.
    """
    tokens, heads, pairs = sizes
    (x_row, x_token, x_head), (out_row, out_token, out_head) = steps
    for i in numba.prange(first, last):
        row, token = i // tokens, i % tokens
        own_cos, own_sin = cos[token], sin[token]
        for head in range(heads):
            begin = row * x_row + token * x_token + head * x_head
            place = row * out_row + token * out_token + head * out_head
            one, two = x[begin : begin + pairs], x[begin + pairs : begin + 2 * pairs]
            found, other = out[place : place + pairs], out[place + pairs : place + 2 * pairs]
            for j in range(pairs):
                v, w = wide(one[j]), wide(two[j])
                found[j] = narrow(v * own_cos[j] + w * (own_sin[j] * sign), out)
                other[j] = narrow(w * own_cos[pairs + j] + v * (own_sin[pairs + j] * sign), out)
