"""What of a plan a host can run: each layer's three recipes against those that the host has.

Problem  A host (torchao, Transformer Engine) has fewer choices per layer than a plan. What it cannot run must
         not turn into something else unseen.
Method   A host lists every (fprop, dgrad, wgrad) that it runs. A layer whose three recipes are in the list is
         exported as planned. Any other is left in the compute type, and each of its quantized GEMMs is
         named with what runs instead and why. With `approximate` it takes the nearest of the list
         that gives no GEMM fewer bits than the plan did, in this order:

             fewest bits more, summed over the GEMMs; fewest GEMMs changed; the host's own preference

         and what changed is named in the same way.
Compute  A GEMM that is not quantized runs in the host's working type. It is taken to be the plan's: bf16,
         unless the plan's unquantized GEMMs are all fp32.
Saved    What backward keeps of X is the host's own affair. It is named where it would change numbers: where the
         plan keeps other codes than wgrad reads.
Checked  tests/export/test_fit.py: against a brute-force reading of this text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scrimp.errors import PlanError
from scrimp.export.globs import collapse
from scrimp.precision import GEMMS, HIGH_PRECISION, RECOMPUTE, LinearPrecision, recipe

Triple = tuple[str, str, str]
"""Recipes of fprop, dgrad and wgrad."""
SAVED = "saved"


@dataclass(frozen=True)
class Inexpressible:
    """One GEMM of a layer that the host does not run as planned."""

    layer: str
    gemm: str
    """fprop, dgrad or wgrad; saved, where what backward keeps of the input is another."""
    recipe: str
    """The recipe that the plan asks for."""
    instead: str
    """What runs."""
    why: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.gemm}: {self.recipe} planned, {self.instead} runs: {self.why}"


@dataclass(frozen=True)
class Host:
    """What a host runs."""

    name: str
    runs: Sequence[Triple]
    """Preferred first; the compute type three times must be one of them."""
    explain: Callable[[Triple], str]
    """Why three recipes that are not in `runs` are not."""
    unquantizable: Mapping[str, str] = field(default_factory=dict)
    """Layers that run in the compute type whatever the plan says, and why."""


def compute_of(precisions: Mapping[str, LinearPrecision]) -> str:
    """The working type of a plan, bf16 or fp32; see the module."""
    named = {choice.gemm(gemm) for choice in precisions.values() for gemm in GEMMS}
    return "fp32" if "fp32" in named and "bf16" not in named else "bf16"


def fit(
    precisions: Mapping[str, LinearPrecision], host: Host, *, compute: str, approximate: bool = False
) -> tuple[dict[str, Triple], tuple[Inexpressible, ...]]:
    """What each layer runs in on the host, and what of the plan that leaves out.

    Raises:
        PlanError: no layers, something that is no `LinearPrecision`, an unknown recipe.
    """
    if not precisions:
        raise PlanError("there is no layer to export", do="give a plan with gemms")
    runs: dict[str, Triple] = {}
    left_out: list[Inexpressible] = []
    for layer, precision in precisions.items():
        planned = _triple(layer, precision)
        runs[layer], why = _choose(layer, planned, host, compute, approximate)
        left_out += [
            Inexpressible(layer, gemm, want, have, why)
            for gemm, want, have in zip(GEMMS, planned, runs[layer], strict=True)
            if want != have
        ]
        if precision.saved not in ("fp32", compute, RECOMPUTE, precision.wgrad):
            why = f"{host.name} keeps what its own wgrad reads"
            left_out.append(Inexpressible(layer, SAVED, precision.saved, runs[layer][2], why))
    return runs, tuple(left_out)


def summarise(
    left_out: Iterable[Inexpressible], layers: Iterable[str], *, most: int | None = None
) -> list[str]:
    """One line for all layers that share what was planned, what runs instead and why.

    Args:
        layers: all that were exported, so that no glob means one that runs as planned.
        most: globs in a line; None: all.
    """
    by_layer: dict[str, list[Inexpressible]] = {layer: [] for layer in layers}
    for entry in left_out:
        by_layer[entry.layer].append(replace(entry, layer=""))
    globs: dict[tuple[Inexpressible, ...], list[str]] = {}
    for pattern, entries in collapse(by_layer):
        globs.setdefault(tuple(entries), []).append(pattern)
    lines = []
    for shared, patterns in globs.items():
        where = ", ".join(patterns[:most]) + (
            f", ... ({len(patterns)} globs)" if most is not None and patterns[most:] else ""
        )
        for instead, why in dict.fromkeys((entry.instead, entry.why) for entry in shared):
            same = [entry for entry in shared if (entry.instead, entry.why) == (instead, why)]
            planned = ", ".join(f"{entry.gemm} {entry.recipe}" for entry in same)
            lines.append(f"{where}: {planned} planned, {instead} runs: {why}")
    return lines


def nearest(planned: Triple, runs: Sequence[Triple]) -> Triple:
    """The nearest of `runs` that gives no GEMM fewer bits; see the module."""

    def bits_more(triple: Triple) -> list[int]:
        return [recipe(have).bits - recipe(want).bits for have, want in zip(triple, planned, strict=True)]

    def distance(triple: Triple) -> tuple[int, int]:
        return sum(bits_more(triple)), sum(have != want for have, want in zip(triple, planned, strict=True))

    return min((triple for triple in runs if min(bits_more(triple)) >= 0), key=distance)


def _choose(layer: str, planned: Triple, host: Host, compute: str, approximate: bool) -> tuple[Triple, str]:
    """What a layer runs in, and why not as planned."""
    plain: Triple = (compute, compute, compute)
    if layer in host.unquantizable:
        return plain, host.unquantizable[layer]
    first, second, third = (compute if name in HIGH_PRECISION else name for name in planned)
    if (first, second, third) in host.runs:
        return (first, second, third), f"what is not quantized runs in the host's working type, {compute}"
    why = host.explain((first, second, third))
    return (nearest((first, second, third), host.runs) if approximate else plain), why


def _triple(layer: str, precision: LinearPrecision) -> Triple:
    if not isinstance(precision, LinearPrecision):
        raise PlanError(f"{layer} has no precision", got=repr(precision), expected="a LinearPrecision")
    for gemm in GEMMS:
        recipe(precision.gemm(gemm))
    return precision.recipes
