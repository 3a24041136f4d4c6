"""Which GEMMs a policy chooses for 4 bits, and how much its plans differ between batches, seeds and phases.

No training: profiles that other parts have stored are solved again, as a whole and for each statistics batch alone.
Two plans differ by the share of planned FLOPs that run in another format (churn). For scale: two plans of
share s that know nothing of each other differ by 2 s (1 - s) on average, 37.5 % at 75 %.

Limits   Gains are measured on a profile's first batch alone, and the others take them from it: churn between batches is
         of norms, errors and sensitivities only.
Checked  tests/benchmarks/test_snip_report.py
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from snip_damage import profiles, read_profile

from scrimp.files import write_whole
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import GEMMS, recipe

Recipes = Mapping[str, Sequence[str]]
Planner = Callable[[str, PrecisionProfile, float, str, str], tuple[Recipes, float]]
"""Policy, profile, share of FLOPs in 4 bits, higher and lower format; gives recipes by layer and the share reached."""
POLICIES = ("snip", "snip-layer", "snip-paper", "min-abs-err", "min-rel-err")
"""Those whose plans depend on statistics."""
LOW_BITS = 4


def write_plans(work: Path, budgets: Sequence[float], planner: Planner) -> Path:
    """plans.json, of every profile that can be read; made anew each time, as it takes seconds."""
    rows = []
    for (seed, step, high, low), path in profiles(work).items():
        profile = read_profile(path)
        if profile is None:  # the report names it
            continue
        where = {"seed": seed, "step": step, "low": low, "high": high}
        for budget, policy in itertools.product(budgets, POLICIES):
            rows.append(where | plan_row(profile, policy, budget, planner, high, low))
    target = work / "plans.json"
    write_whole(target, json.dumps(rows) + "\n")
    return target


def plan_row(
    profile: PrecisionProfile, policy: str, budget: float, planner: Planner, high: str, low: str
) -> dict[str, Any]:
    """The plan of all batches, and how far those of single batches are from it and from each other."""
    recipes, share = planner(policy, profile, budget, high, low)
    alone = [
        planner(policy, replace(profile, batches=(batch,)), budget, high, low)[0] for batch in profile.batches
    ]
    flops = dict(zip(profile.layers, profile.flops.tolist(), strict=True))
    return {
        "budget": budget,
        "policy": policy,
        "fp4_flops": share,
        "flops": flops,
        "recipes": {layer: list(names) for layer, names in recipes.items()},
        "churn_to_batches": [churn(recipes, one, flops) for one in alone],
        "churn_between_batches": [churn(a, b, flops) for a, b in itertools.combinations(alone, 2)],
    }


def churn(first: Recipes, second: Recipes, flops: Mapping[str, float]) -> float:
    """Share of FLOPs in another format."""
    changed = sum(
        share / len(GEMMS) * sum(a != b for a, b in zip(first[layer], second[layer], strict=True))
        for layer, share in flops.items()
    )
    return changed / sum(flops.values())


def kind_of(layer: str) -> str:
    """A layer's name without its block: `mlp.down` of `blocks.3.mlp.down`."""
    parts = layer.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[last + 1 :])


def shares_by_kind(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Kind of layer to GEMM to the share of its FLOPs in 4 bits, over all plans."""
    low: dict[tuple[str, str], list[float]] = {}
    weights: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for layer, names in row["recipes"].items():
            for gemm, name in zip(GEMMS, names, strict=True):
                low.setdefault((kind_of(layer), gemm), []).append(float(is_low(name)))
                weights.setdefault((kind_of(layer), gemm), []).append(row["flops"][layer])
    kinds = list(dict.fromkeys(kind for kind, _ in low))
    return {
        kind: {
            gemm: float(np.average(low[kind, gemm], weights=weights[kind, gemm])) for gemm in map(str, GEMMS)
        }
        for kind in kinds
    }


def is_low(name: str) -> bool:
    """Whether a recipe has 4 bits."""
    return recipe(name).bits <= LOW_BITS


def read_plans(work: Path) -> list[dict[str, Any]]:
    """What `write_plans` stored; nothing where it has not run."""
    path = work / "plans.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def stability(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Churn by formats, budget and policy: between batches of a profile, seeds of a step, steps of a seed."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["low"], row["high"], row["budget"], row["policy"]), []).append(row)
    found = []
    for (low, high, budget, policy), members in groups.items():
        one = {"low": low, "high": high, "budget": budget, "policy": policy}
        one["share"] = float(np.mean([row["fp4_flops"] for row in members]))
        one["batches"] = [value for row in members for value in row["churn_between_batches"]]
        one["seeds"] = _between(members, same="step", other="seed")
        one["phases"] = _between(members, same="seed", other="step")
        found.append(one)
    return found


def _between(rows: Sequence[Mapping[str, Any]], *, same: str, other: str) -> list[float]:
    return [
        churn(a["recipes"], b["recipes"], a["flops"])
        for a, b in itertools.combinations(rows, 2)
        if a[same] == b[same] and a[other] != b[other]
    ]
