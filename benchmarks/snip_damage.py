"""Predicted against measured damage of single GEMMs: which predictions are compared, and how sure Spearman is.

Rows      What `pairs` gives. `update` rows compare all GEMMs of all layers, or those of one GEMM; `loss` rows
          compare layers, since only fprop moves the loss. Methods: `scrimp.planner.precision.divergence.Method`.
Interval  95 % by bootstrap: GEMMs are drawn with replacement, ties have their mean rank, and the 2.5th and 97.5th
          percentile of the draws' correlations are taken. It says how much the figure hangs on which GEMMs the
          model happens to have, not how it would be at other seeds.
Limits    GEMMs of one layer share operands, and are not as independent as the bootstrap takes them to be.
Checked   tests/benchmarks/test_snip_gaps.py

Shapes: L layers; 3 GEMMs fprop, dgrad, wgrad.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError
from scrimp.planner.precision.divergence import SNIP, Method, local_errors, mean_divergence
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import GEMMS

Array = NDArray[np.float64]
DRAWS = 2000
METHODS = {
    "scrimp": Method(),
    "without shared weight errors": Method(weight_errors="tokens"),
    "mean sensitivities": Method(updates="rms"),
    "norms of whole matrices": Method(errors="norms"),
    "snip": SNIP,
}
MAIN = {"update": "update, scrimp", "loss": "loss, LD"}
"""The rows that the issue's thresholds are for."""
THRESHOLDS = {"update": 0.8, "loss": 0.7}
_PROFILE = re.compile(r"seed(\d+)-step(\d+)-([a-z0-9_]+)-([a-z0-9_]+)\.safetensors")


@dataclass(frozen=True, eq=False)
class Damage:
    """One file of the part `damage`, with the profile that its predictions are of."""

    seed: int
    step: int
    low: str
    loss: Array
    """[L, 3], relative, root mean square over batches."""
    update: Array
    """[L, 3], likewise."""
    stored: dict[str, float]
    """Spearman of every row, as computed when the damage was measured."""
    profile: PrecisionProfile | None


def profiles(work: Path) -> dict[tuple[int, int, str, str], Path]:
    """(seed, step, high, low) to the profile's file."""
    found = {}
    for path in sorted((work / "profiles").glob("*.safetensors")):
        match = _PROFILE.fullmatch(path.name)
        if match:
            found[int(match[1]), int(match[2]), match[3], match[4]] = path
    return found


def read_profile(path: Path) -> PrecisionProfile | None:
    """None of a file that this version of the code cannot read."""
    try:
        return PrecisionProfile.read(path)
    except PlanError:
        return None


def unreadable(work: Path) -> list[str]:
    """Names of profiles that are there for nothing."""
    return [path.name for path in profiles(work).values() if read_profile(path) is None]


def read_damages(work: Path) -> list[Damage]:
    """All that were measured, by format, step and seed."""
    known, found = profiles(work), []
    for path in sorted((work / "damage").glob("*.json")):
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        key = (row["seed"], row["step"])
        file = next((p for name, p in known.items() if name[:2] == key and name[3] == row["format"]), None)
        found.append(
            Damage(
                *key,
                row["format"],
                np.array(row["loss"], dtype=float),
                np.array(row["update"], dtype=float),
                row["spearman"],
                None if file is None else read_profile(file),
            )
        )
    return sorted(found, key=lambda one: (one.low, one.step, one.seed))


def pairs(
    profile: PrecisionProfile, low: str, losses: Array, updates: Array
) -> dict[str, tuple[Array, Array]]:
    """Row to predicted and measured damage, both [L, 3] or [L].

    Args:
        losses: [L, 3], measured.
        updates: [L, 3], measured.
    """
    p = profile.formats.index(low)
    found: dict[str, tuple[Array, Array]] = {}
    for name, method in METHODS.items():
        predicted = mean_divergence(profile, method).update[:, :, p]
        found[f"update, {name}"] = predicted, updates
        for index, gemm in enumerate(GEMMS):
            found[f"update of {gemm}, {name}"] = predicted[:, index], updates[:, index]
    batch = profile.batches[0]
    local = np.stack([np.sqrt((e[:, p] ** 2).sum(-1)) for e in local_errors(profile, batch)], axis=1)
    absolute = batch.errors[:, :, p].sum(-1)
    found["update, local errors only"] = local, updates
    found["update, absolute errors"] = absolute, updates
    found["loss, LD"] = mean_divergence(profile).loss[:, p], losses[:, 0]
    found["loss, absolute errors"] = absolute[:, 0], losses[:, 0]
    return found


def rank_correlation(first: Array, second: Array) -> float:
    """Spearman, ties at their mean rank; not a number where one side has a single value."""
    return float(_weighted(first, second, np.ones((1, np.size(first))))[0])


def interval(first: Array, second: Array, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """95 % of Spearman's correlation by bootstrap over items."""
    size = np.size(first)
    weights = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=draws)
    found = _weighted(first, second, weights.astype(float))
    low, high = np.nanquantile(found, (0.025, 0.975))
    return float(low), float(high)


def _weighted(first: Array, second: Array, weights: Array) -> Array:
    """[B] Spearman where item i is there `weights[b, i]` times."""
    a, b = (_ranks(np.ravel(values), weights) for values in (first, second))
    total = weights.sum(axis=1, keepdims=True)
    a, b = (ranks - (weights * ranks).sum(axis=1, keepdims=True) / total for ranks in (a, b))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Array = (weights * a * b).sum(1) / np.sqrt((weights * a**2).sum(1) * (weights * b**2).sum(1))
    return found


def _ranks(values: Array, weights: Array) -> Array:
    """[B, N] mean ranks of N items, each there several times."""
    distinct, place = np.unique(values, return_inverse=True)
    counts: Array = weights @ (place[:, None] == np.arange(len(distinct)))
    middle: Array = counts.cumsum(axis=1) - (counts - 1) / 2
    return middle[:, place]
