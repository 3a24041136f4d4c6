"""What else one could pay attention to: SNIP's baselines, as costs and orders of the same program.

Every policy chooses between the same formats with the same share of FLOPs in 4 bits. With H the format of most bits
among the candidates and P the one of fewest::

    snip           per GEMM, cost V (eq. 8)               snip-layer     per layer, V of its three GEMMs
    snip-paper     per layer, cost Q (eq. 7), with the paper's errors and sensitivities as reconstructed
    uniform        one format everywhere, by its name     random:SEED    cost(P) ~ U(0, 1), cost(H) = 0
    min-abs-err    |eX| + |eW| + |eG|                     min-rel-err    |eX|/|X| + |eW|/|W| + |eG|/|G|
    first-last     blocks 0, L-1, 1, L-2, ... in H while it fits into the share that is not 4-bit
    layer-type     all down, then out, then qkv, then gate and up, each from the last block backwards, likewise
    last-blocks    whole blocks from the last backwards in the reference format until they hold 15 % of
                   FLOPs (NVIDIA's rule); the rest in P, whatever the budget

Source   SNIP (arXiv 2602.01410) and NVFP4 pre-training (arXiv 2509.25149), as reconstructed in the spec's section 9.
Checked  tests/planner/bits/test_policies.py

Shapes: L layers, P formats.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError
from scrimp.planner.bits.divergence import SNIP, Method, Weights, gemm_costs, layer_costs, mean_divergence
from scrimp.planner.bits.profile import PrecisionProfile
from scrimp.precision import GEMMS, recipe

Array = NDArray[np.float64]
POLICIES = (
    "snip",
    "snip-layer",
    "snip-paper",
    "random",
    "min-abs-err",
    "min-rel-err",
    "first-last",
    "layer-type",
    "last-blocks",
)
LAST_SHARE = 0.15
_TYPES = (
    ("down", "fc2", "w2"),
    ("out", "o_proj", "proj"),
    ("v_proj",),
    ("k_proj",),
    ("q_proj", "qkv"),
    ("up",),
    ("gate",),
)
"""Kinds of layers in the order in which `layer-type` protects them."""


def is_per_gemm(policy: str) -> bool:
    """Whether a policy decides for each GEMM, not for each layer."""
    return policy == "snip"


def costs_of(
    policy: str,
    profile: PrecisionProfile,
    *,
    weights: Weights | None = None,
    method: Method | None = None,
) -> Array:
    """Costs of a policy that solves the program: [3 L, P] per GEMM (layer by layer), or [L, P] per layer.

    Raises:
        PlanError: a policy that does not exist, or that orders layers instead.
    """
    name, _, seed = policy.partition(":")
    if name in ("snip", "snip-layer"):
        costs = gemm_costs(profile, mean_divergence(profile, method), weights)
        return costs.reshape(-1, costs.shape[-1]) if name == "snip" else costs.sum(1)
    if name == "snip-paper":
        return layer_costs(profile, mean_divergence(profile, SNIP), weights)
    if name == "random":
        return _random(profile, int(seed or 0))
    if name in ("min-abs-err", "min-rel-err"):
        return _local(profile, relative=name == "min-rel-err")
    raise PlanError(
        "there is no such policy",
        got=policy,
        expected=", ".join(POLICIES),
        do="random takes a seed, as random:1",
    )


def order_of(policy: str, layers: Sequence[str]) -> list[int] | None:
    """The order in which a policy protects layers; None for one that solves the program."""
    if policy == "first-last":
        return _first_last(layers)
    if policy == "layer-type":
        return sorted(range(len(layers)), key=lambda i: (_kind(layers[i]), -_block(layers[i])))
    return None


def protect(order: Iterable[int], shares: Array, unprotected: float) -> NDArray[np.bool_]:
    """[L], which layers keep the higher format: each in order, if it fits into what need not be 4-bit.

    Args:
        shares: of FLOPs, by layer.
        unprotected: share that must be in 4 bits.
    """
    room, kept = 1.0 - unprotected + 1e-9, np.zeros(len(shares), dtype=bool)
    for index in order:
        if shares[index] <= room:
            kept[index] = True
            room -= shares[index]
    return kept


def last_blocks(layers: Sequence[str], shares: Array, share: float = LAST_SHARE) -> NDArray[np.bool_]:
    """[L], whether a layer is of the last blocks that together hold a share of the FLOPs."""
    kept = np.zeros(len(layers), dtype=bool)
    blocks = np.array([_block(layer) for layer in layers])
    for block in sorted(set(blocks.tolist()), reverse=True):
        if shares[kept].sum() >= share - 1e-9:
            break
        kept |= blocks == block
    return kept


def extremes(formats: Sequence[str]) -> tuple[int, int]:
    """Indices of the quantized format of most bits, and of the one of fewest; the first of equals."""
    bits = [recipe(name).bits for name in formats]
    low = min(range(len(bits)), key=lambda p: bits[p])
    quantized = [p for p in range(len(bits)) if bits[p] < 16] or [low]
    return max(quantized, key=lambda p: (bits[p], -p)), low


def _random(profile: PrecisionProfile, seed: int) -> Array:
    generator = np.random.default_rng([seed, zlib.crc32(profile.model.encode())])
    _, low = extremes(profile.formats)
    costs = np.zeros((len(profile.layers), len(profile.formats)))
    costs[:, low] = generator.uniform(size=len(profile.layers))
    return costs


def _local(profile: PrecisionProfile, *, relative: bool) -> Array:
    fprop, dgrad = GEMMS.index("fprop"), GEMMS.index("dgrad")
    total = np.zeros((len(profile.layers), len(profile.formats)))
    for batch in profile.batches:
        for errors, norms in (
            (batch.errors[:, fprop, :, 0], batch.x),
            (batch.errors[:, fprop, :, 1], batch.w),
            (batch.errors[:, dgrad, :, 0], batch.g),
        ):
            total += errors / np.maximum(norms[:, None], 1e-300) if relative else errors
    return total / len(profile.batches)


def _first_last(layers: Sequence[str]) -> list[int]:
    blocks = sorted({_block(layer) for layer in layers})
    outside_in: list[int] = []
    while blocks:
        outside_in.append(blocks.pop(0))
        if blocks:
            outside_in.append(blocks.pop())
    place = {block: i for i, block in enumerate(outside_in)}
    return sorted(range(len(layers)), key=lambda i: (place[_block(layers[i])], _kind(layers[i])))


def _block(layer: str) -> int:
    """The first number in a layer's name; -1 without one."""
    found = re.search(r"\d+", layer)
    return int(found[0]) if found else -1


def _kind(layer: str) -> int:
    """Place of a layer's kind in the order of `_TYPES`, by the last part of its name."""
    last = layer.rpartition(".")[2]
    return next((i for i, names in enumerate(_TYPES) if any(name in last for name in names)), len(_TYPES))
