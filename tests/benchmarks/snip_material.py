"""Small inputs of the SNIP study's report: a random profile, and runs with given gaps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from snip_gaps import BASELINES, Cell, Cells, Setting

from scrimp.planner.precision.profile import BatchStatistics, PrecisionProfile

SETTING = Setting(300, "fp4", "fp8")
LAYERS = tuple(f"blocks.{i}.{name}" for i in range(4) for name in ("attention.qkv", "mlp.down"))
FORMATS = ("bf16", "fp8", "fp4")
Array = NDArray[np.float64]


def profile(seed: int = 0, num_batches: int = 2) -> PrecisionProfile:
    """Random statistics of eight layers; errors grow from bf16 (none) to fp4."""
    random = np.random.default_rng(seed)
    size, weights = len(LAYERS), len(LAYERS) + 1
    grow = np.array([0.0, 0.03, 1.0])[:, None]

    def positive(*shape: int) -> Array:
        return random.lognormal(0.0, 0.7, shape)

    def batch() -> BatchStatistics:
        norms = {name: positive(size) for name in ("x", "w", "y", "g", "gx", "gw", "curvature")}
        return BatchStatistics(
            loss=4.0,
            errors=positive(size, 3, 3, 2) * grow,
            results=positive(size, 3, 3, 2) * grow,
            backward=positive(2, 2, weights, size),
            forward=positive(2, 2, weights, size),
            sensitivity=positive(2, weights),
            update=positive(weights),
            **norms,
        )

    shapes = tuple((64, 32) if layer.endswith("qkv") else (32, 128) for layer in LAYERS)
    return PrecisionProfile(
        model="model",
        device="cpu",
        step=300,
        layers=LAYERS,
        shapes=shapes,
        tokens=256,
        formats=FORMATS,
        weights=("embedding", *LAYERS),
        owners=tuple(range(1, size + 1)),
        optimizer="adamw",
        gains="ratios",
        batches=tuple(batch() for _ in range(num_batches)),
    )


def cell(policy: str, gap: float, seed: int = 0, budget: str = "0.75", **changes: Any) -> Cell:
    """A run that ends `gap` per cent above bf16's held-out loss of 4."""
    fixed = policy in ("bf16", "bf16-again", "fp8", "fp4", "last-blocks")
    loss = 4.0 * (1 + gap / 100)
    made = Cell(SETTING, seed, "" if fixed else budget, policy, 0.75, loss, loss, (loss,) * 40, {})
    return replace(made, **changes)


def runs(gaps: dict[str, float], seeds: int = 3) -> Cells:
    """The same gaps at every seed, and the control."""
    made = [cell(policy, gap, seed) for policy, gap in gaps.items() for seed in range(seeds)]
    return Cells([*made, *(cell("bf16", 0.0, seed) for seed in range(seeds))])


def everywhere(gap: float) -> dict[str, float]:
    """One gap for every baseline."""
    return {"random:1" if name == "random" else name: gap for name in BASELINES}
