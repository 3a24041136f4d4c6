"""Proves that the GEMMs of a model run in the formats that its plan says.

Problem  A precision setting that silently does nothing is the commonest bug of its kind: the
         run is slower or less exact than its log claims, and nobody sees it.
Method   One forward and backward pass over a few tokens, before training, under a dispatch mode
         that sees every matrix product after autograd and autocast have had their say. The
         formats and counts of the products must equal the plan's: three per linear layer
         (fprop, dgrad, wgrad). The gradients are thrown away; parameters, random state and data order
         are untouched.
Limits   Attention's own products live inside one fused kernel and are not counted here. The probe
         runs eagerly, also where training is compiled.
Checked  tests/runtime/test_proof.py, with a plan that lies.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.errors import TrainingError
from scrimp.plan import Plan
from scrimp.runtime.execute import Executable

_PRODUCTS = {"mm", "addmm", "addmm_", "_addmm_activation", "linear"}
_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_PROBE_TOKENS = 8


class _ProductCounter(TorchDispatchMode):
    """Counts two-dimensional matrix products by the format of their operands."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.formats: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            operand = args[1] if "addmm" in name else args[0]
            self.formats[_FORMATS.get(operand.dtype, str(operand.dtype))] += 1
        return func(*args, **(kwargs or {}))


def expected_products(plan: Plan) -> Counter[str]:
    """Format to number of GEMMs in one step over one chunk of tokens."""
    return Counter(
        fmt for choice in plan.gemms.values() for fmt in (choice.fprop, choice.dgrad, choice.wgrad)
    )


def prove(executable: Executable, plan: Plan) -> None:
    """Run the probe and compare.

    Raises:
        TrainingError: the products that ran are not the plan's.
    """
    architecture = executable.model.architecture
    num_tokens = min(_PROBE_TOKENS, architecture.context)
    tokens_BT = (torch.arange(num_tokens) % architecture.vocab_size).unsqueeze(0)
    # In one chunk, whatever the run's is: every chunk would add three products of the head.
    probed = dataclasses.replace(executable, loss_chunk=0)
    with _ProductCounter() as counter:
        probed.loss(tokens_BT, tokens_BT, None).total.backward()
    executable.model.zero_grad(set_to_none=True)
    expected = expected_products(plan)
    if counter.formats != expected:
        raise TrainingError(
            "the matrix products that ran are not those of the plan",
            got=_spell(counter.formats),
            expected=_spell(expected),
            do="this is a defect of Scrimp: report it with plan.json and config.toml",
        )


def _spell(counts: Counter[str]) -> str:
    return ", ".join(f"{number} in {fmt}" for fmt, number in sorted(counts.items())) or "none"
