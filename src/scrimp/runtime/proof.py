"""Proves that the GEMMs of a model run in the formats that its plan says.

Problem  A precision setting that silently does nothing is the commonest bug of its kind: the
         run is slower or less exact than its log claims, and nobody sees it.
Method   Before training: one forward and backward pass over a few tokens, twice watched.

         kinds and counts   a dispatch mode sees every matrix product after autograd and autocast have had
                            their say, and planned GEMMs report themselves. Both must equal the plan: three
                            per linear layer (fprop, dgrad, wgrad), in their formats. Of a model with adapters
                            frozen weights have no wgrad, and the adapters' products run in the working format
                            (`ModelSpec.gemms`, `adapter_products`).
         fingerprints       of every layer's three GEMMs: its numbers are those of its format
                            (`scrimp.gemm.fingerprints`).

         Gradients are thrown away; parameters, random state and data order are untouched.
         In training: the first step of a plan, at the start, at a resume and at a switch, is proven on its own data,
         compiled or not (`StepProof`). All planned GEMMs are counted, and those that the plan changed are
         fingerprinted. What runs again in backward, where activations are recomputed, counts once.
Limits   Of grouped products each counts as one; of planned ones the first run of tokens vouches for the others.
         Attention's own products live inside one fused kernel and are not counted here. The probe
         runs before compilation.
Checked  tests/runtime/test_proof.py, tests/training/precision/test_precision_proof.py, with plans that lie.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.data import Batch
from scrimp.errors import TrainingError
from scrimp.gemm import (
    Execution,
    Fingerprints,
    PlannedLayer,
    changed_gemms,
    is_running,
    is_running_again,
    observing,
    without_witnesses,
)
from scrimp.gemm.fingerprints import Gemm
from scrimp.gemm.problem import DTYPE_NAMES
from scrimp.models import ModelSpec
from scrimp.models.model import Model
from scrimp.planner import Plan
from scrimp.precision import LinearPrecision
from scrimp.runtime.execute import HEAD, PLANNED_PROBE_TOKENS, Executable

_SECOND = {"addmm", "addmm_", "_addmm_activation", "grouped_product"}
"""Products whose operands begin with the second argument."""
_PRODUCTS = {"mm", "linear", *_SECOND}
_PROBE_TOKENS = 8
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
            operand = args[name in _SECOND]
            self.counts["plain", "", DTYPE_NAMES.get(operand.dtype, str(operand.dtype))] += 1
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

    def check(
        self,
        plan: Plan,
        compute: str,
        spec: ModelSpec,
        *,
        micro_batches: int,
        head_passes: int,
        may_idle: Collection[str] = (),
    ) -> None:
        """Compare one step with the plan.

        Args:
            compute: the working format; layers that run in it alone may go their own way, uncounted.
            spec: what the model is.
            head_passes: how often the loss of the whole step runs the head (`Objective.head_passes`).
            may_idle: layers of which fewer may run (`idle_layers`).

        Raises:
            TrainingError: the GEMMs that ran are not those of the plan.
        """
        expected: Counts = Counter()
        for (layer, gemm, recipe), number in expected_products(plan, compute, spec).items():
            if layer != "plain":
                expected[layer, gemm, recipe] = number * (head_passes if layer == HEAD else micro_batches)
        expected = as_far_as_tokens_come(expected, self.counts, may_idle)
        plain = {layer for layer, choice in plan.gemms.items() if choice == LinearPrecision.of(compute)}
        ran = Counter(
            {key: number for key, number in self.counts.items() if key[0] not in plain or key[2] != compute}
        )
        _compare(ran, expected, "of the first step ")


def expected_products(plan: Plan, compute: str, spec: ModelSpec) -> Counts:
    """The GEMMs of one forward and backward pass over one chunk of tokens."""
    counts: Counts = Counter()
    for layer, choice in plan.gemms.items():
        is_plain = choice == LinearPrecision.of(compute)
        if spec.linear(layer).rank:
            counts["plain", "", compute] += spec.adapter_products(layer)
        if spec.linear(layer).made_of is not None:  # B A, twice, and the gradients of both factors
            counts["plain", "", compute] += 4
        for gemm in spec.gemms[layer]:
            counts[("plain", "", choice.gemm(gemm)) if is_plain else (layer, gemm, choice.gemm(gemm))] += 1
    return counts


def idle_layers(executable: Executable, plan: Plan) -> set[str]:
    """Layers of experts that ranks share: there may be no token for any of those here."""
    layout, spec = executable.mesh.layout, executable.model.spec
    return {layer for layer in plan.gemms if layout.ep > 1 and spec.linear(layer).experts > 1}


def as_far_as_tokens_come(expected: Counts, ran: Counts, may_idle: Collection[str]) -> Counts:
    """As few as ran, for layers that may idle."""
    return Counter(
        {key: min(number, ran[key]) if key[0] in may_idle else number for key, number in expected.items()}
    )


def prove(executable: Executable, plan: Plan) -> None:
    """Run the probe and compare.

    Raises:
        TrainingError: the products that ran are not the plan's, or not in its formats.
    """
    architecture, plan = executable.model.architecture, executable.gemms_here(plan)
    num_tokens = PLANNED_PROBE_TOKENS if executable.planned else _PROBE_TOKENS
    # Several short rows where the context is short: kernels ask for a multiple of 128 tokens in all.
    length = min(num_tokens, 1 << (architecture.context.bit_length() - 1))
    tokens_BT = (torch.arange(num_tokens) % architecture.vocab_size).view(-1, length)
    # In one chunk, whatever the run's is: every chunk would add three products of the head.
    # A few tokens, but of a tiny run they may be more than its own micro-batches have.
    probed = dataclasses.replace(executable, loss_chunk=0, most_tokens=0, longest=0)
    spec, quantized = executable.model.spec, _quantized(plan, executable.precision)
    planned, fingerprints = StepCount(), Fingerprints(quantized, _running(changed_gemms({}, quantized), spec))
    # Witnesses wait for the first step, with its own data, and compiled. Every rank probes whole rows.
    with (
        _whole_rows(executable.model),
        without_witnesses(),
        observing(planned),
        observing(fingerprints),
        _ProductCounter() as counter,
    ):
        _probe(probed, Batch.of(tokens_BT, tokens_BT))
    executable.model.zero_grad(set_to_none=True)
    ran, expected = counter.counts + planned.counts, expected_products(plan, executable.precision, spec)
    _compare(ran, as_far_as_tokens_come(expected, ran, idle_layers(executable, plan)), "")
    fingerprints.check()


def _running(gemms: Collection[Gemm], spec: ModelSpec) -> set[Gemm]:
    """Those that run at all."""
    return {(layer, gemm) for layer, gemm in gemms if gemm in spec.gemms[layer]}


def _probe(probed: Executable, batch: Batch) -> None:
    if probed.stages is None:
        probed.loss(batch).total.backward()
    else:
        probed.stages.passes([batch], probed.run, lambda number, is_last: None, 1, is_probe=True)


@contextlib.contextmanager
def _whole_rows(model: Model) -> Iterator[None]:
    """Inside, ranks share no rows."""
    shared, model.context_parallel = model.context_parallel, None
    try:
        yield
    finally:
        model.context_parallel = shared


def _quantized(plan: Plan, compute: str) -> dict[str, LinearPrecision]:
    """The layers whose GEMMs are planned ones; the others take torch's own path."""
    return {layer: choice for layer, choice in plan.gemms.items() if choice != LinearPrecision.of(compute)}


class StepProof:
    """Proves the first step of a plan: how many GEMMs run, and that those which changed have their formats' numbers."""

    def __init__(
        self, executable: Executable, plan: Plan, before: Plan | None, last: StepProof | None = None
    ) -> None:
        """Expect a plan.

        Args:
            before: the plan of the step before; None: every GEMM is new.
            last: the proof of that plan; what it could not prove is proven now.
        """
        assert executable.planned is not None
        plan = executable.gemms_here(plan)
        self._plan, self._compute, self._spec = plan, executable.precision, executable.model.spec
        self._may_idle = idle_layers(executable, plan)
        layers: dict[str, PlannedLayer] = dict(executable.planned.layers)
        if executable.model.planned_head is not None:
            layers[HEAD] = executable.model.planned_head
        precisions = {k: v for k, v in _quantized(plan, self._compute).items() if k in layers}
        changed = changed_gemms({} if before is None else before.gemms, precisions)
        if last is not None:
            changed |= last.give_up()
        self._fingerprints = Fingerprints(precisions, _running(changed, self._spec))
        self._fingerprints.watch(layers)

    @contextlib.contextmanager
    def of_step(self, *, micro_batches: int, head_passes: int) -> Iterator[None]:
        """The step that runs inside is the plan's first one.

        Raises:
            TrainingError: its GEMMs are not those of the plan, or not in their formats; all are named.
        """
        count = StepCount()
        with observing(count):
            yield
        count.check(
            self._plan,
            self._compute,
            self._spec,
            micro_batches=micro_batches,
            head_passes=head_passes,
            may_idle=self._may_idle,
        )
        self._fingerprints.check()

    def check(self) -> None:
        """After another step: of a GEMM whose first run showed nothing, a later one may have."""
        self._fingerprints.check()

    def give_up(self) -> set[tuple[str, str]]:
        """Look at nothing more; the GEMMs of which nothing could be told."""
        self._fingerprints.release()
        return self._fingerprints.pending | self._fingerprints.undecided

    @property
    def is_complete(self) -> bool:
        """Whether every GEMM that was to be proven is."""
        return not self._fingerprints.pending | self._fingerprints.undecided

    @property
    def sentence(self) -> str:
        """What is proven, for people."""
        proven, layers = self._fingerprints.proven, {layer for layer, _ in self._fingerprints.proven}
        text = f"{len(proven)} GEMMs of {len(layers)} layers gave the numbers of their formats"
        open_ones = sorted(".".join(key) for key in self._fingerprints.pending | self._fingerprints.undecided)
        if open_ones:
            named = ", ".join(open_ones[:4]) + (", ..." if len(open_ones) > 4 else "")
            text += f"; nothing could be told yet of {len(open_ones)}: {named}"
        return text


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
