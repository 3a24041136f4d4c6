"""Proves that the GEMMs of a model run in the formats that its plan says.

Problem  A precision setting that silently does nothing is the commonest bug of its kind: the
         run is slower or less exact than its log claims, and nobody sees it.
Method   Before training: one forward and backward pass over a few tokens, twice watched.

         kinds and counts   a dispatch mode sees every matrix product after autograd and autocast have had
                            their say, and planned GEMMs report themselves. Both must equal the plan: three
                            per linear layer (fprop, dgrad, wgrad), in their formats.
         fingerprints       of the first GEMM of each recipe, kind, back end and saved format: its result
                            equals, up to rounding, the float64 product of operands that `scrimp.formats`
                            quantized apart from it (of a saved input anew, not as it was saved), and
                            differs from the product of the operands as they were.

         Gradients are thrown away; parameters, random state and data order are untouched.
         In training: the planned GEMMs of the first step are counted again (`StepCount`), compiled or not.
         What runs again in backward, where activations are recomputed, counts once.
Limits   Attention's own products live inside one fused kernel and are not counted here. The probe
         runs before compilation.
Checked  tests/runtime/test_proof.py, with plans that lie.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.errors import TrainingError
from scrimp.formats import QuantizedTensor, quantize
from scrimp.gemm import Execution, is_running, is_running_again, observing
from scrimp.gemm.problem import AXES, Use, high_precision, multiply
from scrimp.planner import Plan
from scrimp.precision import GEMMS, LinearPrecision, Operand
from scrimp.runtime.execute import DTYPES, HEAD, Executable, precisions_of

_PRODUCTS = {"mm", "addmm", "addmm_", "_addmm_activation", "linear"}
_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_PROBE_TOKENS = 8
_PLANNED_PROBE_TOKENS = 128
"""A multiple of every group and of what kernels ask for."""
_ROUNDING = {"bf16": 2.0**-7, "fp32": 2.0**-14}
"""Largest relative distance from the float64 product, by working format: its rounding, and that of the sums."""
_SMALLEST_EFFECT = 2.0**-9
"""Least relative distance from the unquantized product: eight bits leave 0.02 or more."""

Counts = Counter[tuple[str, str, str]]
"""(layer or "plain", GEMM or "", format) to number of products."""


class _ProductCounter(TorchDispatchMode):
    """Counts two-dimensional matrix products outside planned GEMMs by the format of their operands."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS and not is_running() and not is_running_again():
            operand = args[1] if "addmm" in name else args[0]
            self.counts["plain", "", _FORMATS.get(operand.dtype, str(operand.dtype))] += 1
        return func(*args, **(kwargs or {}))


class StepCount:
    """Counts the planned GEMMs of training steps by layer, kind and recipe."""

    def __init__(self) -> None:
        self.counts: Counts = Counter()

    def __call__(self, execution: Execution) -> None:
        """Observe one."""
        if is_running_again():
            return
        self.counts[execution.layer, execution.gemm, execution.recipe] += 1

    def check(self, plan: Plan, compute: str, *, micro_batches: int, head_chunks: int) -> None:
        """Compare one step with the plan.

        Args:
            compute: the working format; layers that run in it alone may go their own way, uncounted.
            head_chunks: chunks of tokens that the loss of the whole step was computed in.

        Raises:
            TrainingError: the GEMMs that ran are not those of the plan.
        """
        expected: Counts = Counter()
        for (layer, gemm, recipe), number in expected_products(plan, compute).items():
            if layer != "plain":
                expected[layer, gemm, recipe] = number * (head_chunks if layer == HEAD else micro_batches)
        plain = {
            layer for layer, choice in precisions_of(plan).items() if choice == LinearPrecision.of(compute)
        }
        ran = Counter({key: number for key, number in self.counts.items() if key[0] not in plain})
        _compare(ran, expected, "of the first step ")


def expected_products(plan: Plan, compute: str) -> Counts:
    """The GEMMs of one forward and backward pass over one chunk of tokens."""
    counts: Counts = Counter()
    for layer, choice in precisions_of(plan).items():
        is_plain = choice == LinearPrecision.of(compute)
        for gemm in GEMMS:
            counts[("plain", "", choice.gemm(gemm)) if is_plain else (layer, gemm, choice.gemm(gemm))] += 1
    return counts


def prove(executable: Executable, plan: Plan) -> None:
    """Run the probe and compare.

    Raises:
        TrainingError: the products that ran are not the plan's, or not in its formats.
    """
    architecture = executable.model.architecture
    num_tokens = _PLANNED_PROBE_TOKENS if executable.planned else _PROBE_TOKENS
    # Several short rows where the context is short: kernels ask for a multiple of 128 tokens in all.
    length = min(num_tokens, 1 << (architecture.context.bit_length() - 1))
    tokens_BT = (torch.arange(num_tokens) % architecture.vocab_size).view(-1, length)
    # In one chunk, whatever the run's is: every chunk would add three products of the head.
    # A few tokens, but of a tiny run they may be more than its own micro-batches have.
    probed = dataclasses.replace(executable, loss_chunk=0, most_tokens=0, longest=0)
    planned, fingerprints = StepCount(), _Fingerprints(executable.precision)
    with observing(planned), observing(fingerprints), _ProductCounter() as counter:
        probed.loss(tokens_BT, tokens_BT, None).total.backward()
    executable.model.zero_grad(set_to_none=True)
    _compare(counter.counts + planned.counts, expected_products(plan, executable.precision), "")


class _Fingerprints:
    """Checks the first GEMM of each recipe, kind, back end and saved format against float64."""

    def __init__(self, compute: str) -> None:
        self._compute, self._tolerance = DTYPES[compute], _ROUNDING[compute]
        self._seen: set[tuple[str, str, str, Operand | None]] = set()
        self._inputs: dict[str, Tensor] = {}
        """Layer to X as fprop read it: the codes that wgrad reads must be made of it."""

    def __call__(self, execution: Execution) -> None:
        if execution.gemm == "fprop":
            self._inputs[execution.layer] = execution.a
        input_X = self._inputs.pop(execution.layer, None) if execution.gemm == "wgrad" else None
        saved = execution.b.operand if isinstance(execution.b, QuantizedTensor) else None
        kind = (execution.recipe, execution.gemm, execution.backend, saved)
        if kind in self._seen or execution.recipe in _FORMATS.values():
            return
        plain = self._operands(execution, input_X)
        rounded = [_quantized(x, use.operand, use) for x, use in zip(plain, execution.uses, strict=True)]
        axes = AXES[execution.gemm]
        expected = multiply(rounded[0], axes[0], rounded[1], axes[1])
        unquantized = multiply(plain[0].double(), axes[0], plain[1].double(), axes[1])
        norm = float(expected.norm())
        distance, effect = (float((execution.result.double() - y).norm()) for y in (expected, unquantized))
        if not math.isfinite(norm) or norm == distance == 0:
            return  # of overflows and of zeros nothing is learned: the next one of its kind may do
        self._seen.add(kind)
        # So written that a NaN, too, is a difference.
        if not (distance <= self._tolerance * norm and (norm == 0 or effect >= _SMALLEST_EFFECT * norm)):
            raise TrainingError(
                f"{execution.layer}.{execution.gemm} did not run in {execution.recipe} on the "
                f"{execution.backend} back end",
                got=f"a result {distance / max(norm, 1e-30):.2g} from the recipe's, "
                f"{effect / max(norm, 1e-30):.2g} from the unquantized one (relative)",
                expected=f"at most {self._tolerance:.2g}, and at least {_SMALLEST_EFFECT:.2g}",
                do="run `scrimp doctor --fresh`, and report this with its table",
            )

    def _operands(self, execution: Execution, input_X: Tensor | None) -> list[Tensor]:
        """Both operands as they are before the recipe rounds them: in the type that quantizers read."""
        dtype = high_precision(execution.recipe, self._compute)
        a, b = execution.a, execution.b
        if isinstance(b, QuantizedTensor):
            assert input_X is not None
            saved, use = b.operand, execution.uses[1]
            # Not read from the codes, which may lie: made again of the input.
            b = input_X.to(self._compute)
            if saved != use.operand:
                b = _quantized(b, saved, use)
        return [a.to(dtype), b.to(dtype)]


def _quantized(x: Tensor, operand: Operand | None, use: Use) -> Tensor:
    """The values of a tensor in a format, in float64, made by `scrimp.formats` alone."""
    if operand is None:
        return x.double()
    codes = quantize(
        x,
        operand.element,
        operand.scaling,
        use.axis,
        operand.rounding,
        hadamard=operand.hadamard,
        four_over_six=operand.four_over_six,
        noise=use.noise,
        reduce_amax=use.reduce_amax,
    )
    return codes.dequantize(torch.float64)


def _compare(ran: Counts, expected: Counts, when: str) -> None:
    if ran == expected:
        return
    raise TrainingError(
        f"the matrix products {when}that ran are not those of the plan",
        got=_spell(ran - expected) or "fewer",
        expected=_spell(expected - ran) or "fewer",
        do="this is a defect of Scrimp: report it with plan.json and config.toml",
    )


def _spell(counts: Counts) -> str:
    names = [
        f"{number} {'plain' if layer == 'plain' else f'{layer}.{gemm}'} in {recipe}"
        for (layer, gemm, recipe), number in sorted(counts.items())
    ]
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
