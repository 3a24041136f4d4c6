"""Made-up profiles: any numbers of the right shapes, so that formulas can be held against naive ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from scrimp.planner.precision.profile import LOSS_PARTS, BatchStatistics, PrecisionProfile

LAYERS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
FORMATS = ("bf16", "fp8", "nvfp4")


def names(blocks: int) -> tuple[str, ...]:
    """The names of the decoder's layers."""
    return tuple(f"blocks.{block}.{layer}" for block in range(blocks) for layer in LAYERS)


def statistics(
    generator: np.random.Generator, num_layers: int, num_formats: int, num_weights: int
) -> BatchStatistics:
    """All positive, but the curvature; the first format makes no errors."""

    def draw(*shape: int) -> np.ndarray:
        return np.exp(generator.normal(size=shape))

    errors, results = draw(num_layers, 3, num_formats, 2), draw(num_layers, 3, num_formats, 2)
    errors[:, :, 0] = results[:, :, 0] = 0.0
    vectors = {name: draw(num_layers) for name in ("x", "w", "y", "g", "gx", "gw")}
    losses = generator.normal(size=(num_layers, num_formats, LOSS_PARTS))
    losses[:, 0] = 0.0
    return BatchStatistics(
        loss=float(draw(1)[0]),
        **vectors,
        errors=errors,
        results=results,
        losses=losses,
        backward=draw(2, 2, num_weights, num_layers),
        forward=draw(2, 2, num_weights, num_layers),
        curvature=generator.normal(size=num_layers),
        sensitivity=draw(2, num_weights),
        update=draw(num_weights),
    )


def profile(
    layers: int | Sequence[str] = 4,
    formats: Sequence[str] = FORMATS,
    *,
    seed: int = 0,
    batches: int = 1,
    shapes: Sequence[tuple[int, int]] | None = None,
) -> PrecisionProfile:
    """Layers (their names, or how many), each with a weight; an embedding before them and a head behind."""
    generator = np.random.default_rng(seed)
    layer_names = (
        tuple(f"blocks.{i}.layer" for i in range(layers)) if isinstance(layers, int) else tuple(layers)
    )
    count = len(layer_names)
    if shapes is None:
        shapes = [(int(a), int(b)) for a, b in generator.integers(2, 9, (count, 2)) * 8]
    return PrecisionProfile(
        model="0123456789ab",
        device="cpu",
        step=7,
        layers=layer_names,
        shapes=tuple(shapes),
        tokens=96,
        formats=tuple(formats),
        weights=("embedding", *(f"{name}.weight" for name in layer_names), "head"),
        owners=tuple(range(1, count + 1)),
        optimizer="adamw",
        gains="ratios",
        batches=tuple(statistics(generator, count, len(formats), count + 2) for _ in range(batches)),
    )


@st.composite
def profiles(draw: st.DrawFn, most_layers: int = 4, batches: int = 1) -> PrecisionProfile:
    """Any."""
    return profile(
        draw(st.integers(1, most_layers)),
        seed=draw(st.integers(0, 10**6)),
        batches=draw(st.integers(1, batches)),
    )


def with_statistics(base: PrecisionProfile, **arrays: Any) -> PrecisionProfile:
    """The same profile with other arrays in every batch."""
    batches = tuple(dataclasses.replace(batch, **arrays) for batch in base.batches)
    return dataclasses.replace(base, batches=batches)
