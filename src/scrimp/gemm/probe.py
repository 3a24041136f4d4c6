"""One GEMM tried on a device, and its result judged against float64.

Problem  A kernel may be missing, may fail, or may give wrong numbers without a word. What is used must have been
         seen to work here, on this device, with these versions.
Method   Operands look like training: activations with an outlier column, small weights, tiny gradients. The
         exact result is the float64 product of the values that `scrimp.formats` rounds them to, so that
         only the accumulation is judged, never the format:

             |y - y64| <= (n u + r) sum |a||b|       every element, where all of them are computed
             ||y - y64|| / ||y64|| <= 2 %            always

         with n = K / 32 instructions, u what each may lose, and r = 2^-8 where the result is bf16.
         FP8 tensor cores are reported to keep 14 bits: an instruction shifts its 32 products and the sum so far to
         the largest of these 33 addends, and cuts each off below 2^-13 of it. All cut off alike would lose 33 x 2^-13;
         those of either sign cancel, and a sum of random signs is smaller than its magnitudes. Emulated on these
         operands, unpromoted, the worst of 12,288 elements lost 2.2 x 2^-14 of sum |a||b| per instruction at K = 128,
         1.3 at 256, 0.2 at 1,024, 0.05 at 4,096. So u = 2^-12: 1.8 times the worst.
         2 % is what such an accumulator loses at K = 4096 (DeepSeek-V3), and below the 2.6 % that rounding to E4M3
         itself costs; a wrong scale or a lost tile costs far more.
Limits   A kernel that kills the process (an illegal address) cannot be judged, only avoided.
Checked  tests/gemm/test_doctor.py: results with one wrong tile, scale or row are found.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.formats import Noise, fake_quantize
from scrimp.gemm.backends import Backend
from scrimp.gemm.problem import AXES, COLUMNS, Shape, Use, operands_of, shape_of
from scrimp.gemm.storage import pack, unpack
from scrimp.precision import OPERANDS

ACCUMULATOR_STEP, INSTRUCTION_K = 2.0**-12, 32
BF16_STEP = 2.0**-8
LARGEST_ERROR = 0.02
_SCALES = {"x": 1.0, "w": 0.02, "g": 1e-4}
_NOISE = Noise(1)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a linear layer and its batch."""

    tokens: int
    inputs: int
    outputs: int

    def shape(self, gemm: str) -> Shape:
        """M, N, K of one of its GEMMs."""
        return shape_of(gemm, self.tokens, self.inputs, self.outputs)

    def __str__(self) -> str:
        return f"{self.tokens} tokens x {self.inputs} -> {self.outputs}"


@dataclass(frozen=True)
class Trial:
    """One GEMM of one recipe with its operands."""

    gemm: str
    recipe: str
    a: Tensor
    b: Tensor

    def uses(self) -> tuple[Use, Use]:
        """How both operands are quantized."""
        chosen = operands_of(self.gemm, self.recipe)
        axes = AXES[self.gemm]
        return Use(chosen[0], axes[0], _NOISE.derive(0)), Use(chosen[1], axes[1], _NOISE.derive(1))

    def run(self, backend: Backend, out: torch.dtype) -> Tensor:
        """Quantize both operands and multiply them."""
        a_use, b_use = self.uses()
        return backend.multiply(
            self.gemm, backend.prepare(self.a, a_use), backend.prepare(self.b, b_use), out
        )

    def other_ways(self, backend: Backend) -> Iterator[Callable[[torch.dtype], Tensor]]:
        """The same product as training makes it: of codes kept for wgrad, and of gradients quantized in pairs."""
        a_use, b_use = self.uses()
        if a_use.operand is None:
            return
        if self.gemm == "wgrad":
            shape = (self.b.shape[0], self.b.shape[1])

            def of_kept_codes(out: torch.dtype) -> Tensor:
                kept = unpack(pack(backend.store(self.b, b_use)), self.recipe, shape)
                return backend.multiply(self.gemm, backend.prepare(self.a, a_use), backend.load(kept), out)

            yield of_kept_codes
        if self.gemm in ("dgrad", "wgrad"):
            other = "wgrad" if self.gemm == "dgrad" else "dgrad"
            other_use = Use(operands_of(other, self.recipe)[0], AXES[other][0], _NOISE.derive(2))
            uses = (a_use, other_use) if self.gemm == "dgrad" else (other_use, a_use)
            pair = backend.prepare_pair(self.a, *uses)
            if pair is not None:
                mine = pair[0 if self.gemm == "dgrad" else 1]
                yield lambda out: backend.multiply(self.gemm, mine, backend.prepare(self.b, b_use), out)


@dataclass(frozen=True)
class Exact:
    """The float64 result, or some rows of it."""

    product: Tensor
    magnitudes: Tensor
    """sum |a||b|."""
    rows: Tensor
    """Which rows of the result these are."""
    k: int


def make_trial(gemm: str, recipe: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Trial:
    """Operands as training has them, the same numbers at every call."""
    shapes = {
        "x": (sizes.tokens, sizes.inputs),
        "w": (sizes.outputs, sizes.inputs),
        "g": (sizes.tokens, sizes.outputs),
    }
    return Trial(gemm, recipe, *(random_matrix(name, shapes[name], device, dtype) for name in OPERANDS[gemm]))


@functools.lru_cache(maxsize=12)
def random_matrix(name: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """X, W or G; on a CPU first, so that every device gets the same numbers. Kept: large ones take seconds."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed("xwg".index(name)))
    values *= _SCALES[name]
    if name == "x":
        values[:, :: max(1, shape[1] // 3)] *= 20
    return values.to(device, dtype)


def exact_result(trial: Trial, max_rows: int | None = None) -> Exact:
    """The product in float64 of what the operands round to; of evenly spread rows where these are limited."""
    matrices = []
    for x, use in zip((trial.a, trial.b), trial.uses(), strict=True):
        values, outer = x, None
        if use.operand is not None:
            found = fake_quantize(x, use.operand, use.axis, noise=use.noise, keep_rotation=True)
            values, outer = found.values, found.outer
        by_row = values if use.axis == COLUMNS else values.T
        scale = None if outer is None else outer.reshape(-1, 1).double()
        matrices.append((by_row, scale))
    (left, left_scale), (right, right_scale) = matrices
    count = len(left) if max_rows is None else min(len(left), max_rows)
    rows = torch.linspace(0, max(0, len(left) - 1), count, device=left.device).long()
    a, b = left[rows].double(), right.double()
    if left_scale is not None:
        a = a * (left_scale if len(left_scale) == 1 else left_scale[rows])
    if right_scale is not None:
        b = b * right_scale
    return Exact(a @ b.T, a.abs() @ b.abs().T, rows, left.shape[1])


def disagreement(result: Tensor, exact: Exact) -> tuple[float, str | None]:
    """Relative error of a result, and what is wrong with it, None where nothing is."""
    y = result[exact.rows].double()
    if y.shape != exact.product.shape:
        return math.inf, f"a result of shape {tuple(y.shape)} in place of {tuple(exact.product.shape)}"
    difference = (y - exact.product).abs()
    norm = float(exact.product.norm())
    error = float(difference.norm()) / norm if norm else float(difference.norm())
    if not error <= LARGEST_ERROR:  # so that a NaN is wrong
        return error, f"{error:.1%} from float64"
    step = ACCUMULATOR_STEP * max(1.0, exact.k / INSTRUCTION_K)
    step += BF16_STEP if result.dtype == torch.bfloat16 else 0.0
    num_wrong = int((difference > step * exact.magnitudes).sum())
    return error, f"{num_wrong:,} elements beyond the error of sums" if num_wrong else None


def try_out(backend: Backend, trial: Trial, exact: Exact, out: torch.dtype) -> tuple[float, str | None, bool]:
    """Run a GEMM and judge it: relative error, what is wrong, and whether it ran at all."""
    try:
        error, wrong = disagreement(_finished(trial.run(backend, out)), exact)
        for way in trial.other_ways(backend):
            if wrong is None:
                error, wrong = disagreement(_finished(way(out)), exact)
    except Exception as failure:  # whatever a kernel throws is the answer to the question
        return math.inf, _first_line(failure), False
    return error, wrong, True


def _finished(result: Tensor) -> Tensor:
    if result.device.type == "cuda":
        torch.cuda.synchronize(result.device)
    return result


def _first_line(failure: Exception) -> str:
    text = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {text[0][:160]}" if text else type(failure).__name__
