"""What else one could pay attention to: SNIP's baselines, as costs and orders of the same program.

Every policy chooses between the same formats with the same share of FLOPs in 4 bits. With H the quantized format of
most bits among the candidates (bf16 where only one width is quantized) and P the one of fewest::

    snip           per GEMM, cost V (eq. 8)               snip-layer     per layer, V of its three GEMMs
    snip-paper     per layer, cost Q (eq. 7), with the paper's errors and sensitivities as reconstructed
    uniform        one format everywhere, by its name     random:SEED    cost(P) ~ U(0, 1), cost(H) = 0
    min-abs-err    |eX| + |eW| + |eG|                     min-rel-err    |eX|/|X| + |eW|/|W| + |eG|/|G|
    ...-gemm       these three per GEMM, errors those of its own two operands
    first-last     blocks 0, L-1, 1, L-2, ... in H while it fits into the share that is not 4-bit; then single GEMMs
    layer-type     all down, then out, then qkv, then gate and up, each from the last block backwards, likewise
    backward-first fprop of blocks 0, L-1, 1, L-2, ... in H, likewise; dgrad and wgrad in P, but for what fprop leaves
    last-blocks    whole blocks from the last backwards in the reference format until they hold 15 % of
                   FLOPs (NVIDIA's rule); the rest in P, whatever the budget
    last-blocks-matched   whole blocks from the last backwards in H while the next one fits into the share that is
                   not 4-bit: a model of few blocks may have more in 4 bits than was asked for

With `uniform` and `last-blocks`, formats do not depend on the budget (`scrimp.config.snip.keeps_budget`).

Source   SNIP (arXiv 2602.01410) and NVFP4 pre-training (arXiv 2509.25149), as reconstructed in the spec's section 9.
Checked  tests/planner/precision/test_policies.py

Shapes: L layers, P formats.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from scrimp.config.snip import POLICIES
from scrimp.errors import PlanError
from scrimp.models.usual_names import linear_kind
from scrimp.planner.precision.divergence import (
    SNIP,
    Method,
    Weights,
    gemm_costs,
    layer_costs,
    mean_divergence,
)
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import GEMMS, OPERANDS, recipe

Array = NDArray[np.float64]
LAST_SHARE = 0.15
HIGH_BITS = 16


def is_per_gemm(policy: str) -> bool:
    """Whether a policy decides for each GEMM, not for each layer."""
    return policy in ("snip", "backward-first") or policy.partition(":")[0].endswith("-gemm")


def costs_of(
    policy: str,
    profile: PrecisionProfile,
    *,
    weights: Weights | None = None,
    method: Method | None = None,
) -> Array:
    """Costs of a policy that solves the program: [3 L, P] per GEMM (layer by layer), or [L, P] per layer.

    A layer whose statistics are not finite costs as much as the worst of the others: whoever smooths or compares
    costs need not know of it.

    Raises:
        PlanError: a policy that does not exist, or that orders layers instead.
    """
    costs = _raw_costs(policy, profile, weights, method)
    by_layer = costs.reshape(len(profile.layers), -1, costs.shape[-1])
    bad = np.isin(profile.layers, profile.unusable())
    if bad.any():
        by_layer = by_layer.copy()
        by_layer[bad] = 0.0 if bad.all() else by_layer[~bad].max(axis=0)
    return by_layer.reshape(costs.shape)


def _raw_costs(
    policy: str, profile: PrecisionProfile, weights: Weights | None, method: Method | None
) -> Array:
    name, _, seed = policy.partition(":")
    if policy in ("snip", "snip-layer"):
        costs = gemm_costs(profile, mean_divergence(profile, method), weights)
        return costs.reshape(-1, costs.shape[-1]) if name == "snip" else costs.sum(1)
    if policy == "snip-paper":
        return layer_costs(profile, mean_divergence(profile, SNIP), weights)
    per_gemm, name = is_per_gemm(policy), name.removesuffix("-gemm")
    if name == "random" and (seed.isdecimal() or not seed):
        return _random(profile, int(seed or 0), len(GEMMS) if per_gemm else 1)
    if name in ("min-abs-err", "min-rel-err") and not seed:
        local = _local(profile, relative=name == "min-rel-err")
        return local.sum(-1).reshape(-1, local.shape[2]) if per_gemm else _of_layer(local)
    raise PlanError(
        "there is no such policy",
        got=policy,
        expected=", ".join(POLICIES),
        do="random takes a seed, as random:1",
    )


def harm_of_lowest(policy: str, profile: PrecisionProfile, weights: Weights) -> float:
    """What everything in the lowest format costs by a policy: the unit of a budget of divergence."""
    if policy in ("snip", "snip-layer", "snip-paper"):
        return weights.loss + weights.update + weights.curvature or 1.0
    _, low = extremes(profile.formats)
    return float(costs_of(policy, profile)[:, low].sum()) or 1.0


def order_of(policy: str, layers: Sequence[str]) -> list[int] | None:
    """The order in which a policy protects layers; None for one that solves the program."""
    if policy == "last-blocks-matched":
        return sorted(range(len(layers)), key=lambda i: -_block(layers[i]))
    if policy in ("first-last", "backward-first"):
        return _first_last(layers)
    if policy == "layer-type":
        return sorted(range(len(layers)), key=lambda i: (linear_kind(layers[i]), -_block(layers[i])))
    return None


def order_of_gemms(policy: str, order: Sequence[int], layers: Iterable[int]) -> list[int]:
    """The order in which a policy protects single GEMMs of some layers, as 3 * layer + GEMM."""
    chosen, fprop, *backward = [*layers], *range(len(GEMMS))
    of_layers = [index for index in order if index in chosen]
    if policy == "backward-first":
        groups = [
            [(index, fprop) for index in of_layers],
            [(index, one) for index in of_layers for one in backward],
        ]
    else:
        groups = [[(index, gemm) for index in of_layers for gemm in range(len(GEMMS))]]
    return [len(GEMMS) * index + gemm for group in groups for index, gemm in group]


def protect(order: Iterable[int], shares: Array, unprotected: float) -> NDArray[np.bool_]:
    """[N], which layers (or GEMMs) keep the higher format: each in order, if it fits into what need not be 4-bit.

    Args:
        shares: of FLOPs, by layer (or GEMM).
        unprotected: share that must be in 4 bits.
    """
    room, kept = 1.0 - unprotected + 1e-9, np.zeros(len(shares), dtype=bool)
    for index in order:
        if shares[index] <= room:
            kept[index] = True
            room -= shares[index]
    return kept


def protect_blocks(layers: Sequence[str], shares: Array, unprotected: float) -> NDArray[np.bool_]:
    """[L], whether a layer is of the last blocks that fit whole into what need not be 4-bit; as `protect`."""
    room, kept = 1.0 - unprotected + 1e-9, np.zeros(len(layers), dtype=bool)
    blocks = np.array([_block(layer) for layer in layers])
    for block in sorted(set(blocks.tolist()), reverse=True):
        room -= shares[blocks == block].sum()
        if room < 0:
            break
        kept |= blocks == block
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
    """Indices of H and P, see the module; the first of equals, and the same where there is one width alone."""
    bits = [recipe(name).bits for name in formats]
    low = bits.index(min(bits))
    above = sorted({count for count in bits if count > bits[low]})
    quantized = [count for count in above if count < HIGH_BITS]
    high = max(quantized) if quantized else min(above, default=bits[low])
    return bits.index(high), low


def _random(profile: PrecisionProfile, seed: int, decisions: int) -> Array:
    """[N, P], of so many decisions a layer."""
    generator = np.random.default_rng([seed, zlib.crc32(profile.model.encode())])
    _, low = extremes(profile.formats)
    costs = np.zeros((decisions * len(profile.layers), len(profile.formats)))
    costs[:, low] = generator.uniform(size=len(costs))
    return costs


def _local(profile: PrecisionProfile, *, relative: bool) -> Array:
    """[L, 3, P, 2], errors of both operands of each GEMM, means over the batches."""
    total = np.zeros((len(profile.layers), len(GEMMS), len(profile.formats), 2))
    for batch in profile.batches:
        sizes = {"x": batch.x, "w": batch.w, "g": batch.g}
        norms = np.stack(
            [np.stack([sizes[name] for name in OPERANDS[gemm]], axis=-1) for gemm in GEMMS], axis=1
        )
        total += batch.errors / np.maximum(norms[:, :, None, :], 1e-300) if relative else batch.errors
    return total / len(profile.batches)


def _of_layer(errors: Array) -> Array:
    """[L, P], of X, W and G each once: as fprop reads X and W, and dgrad G."""
    fprop, dgrad = GEMMS.index("fprop"), GEMMS.index("dgrad")
    found: Array = errors[:, fprop].sum(-1) + errors[:, dgrad, :, 0]
    return found


def _first_last(layers: Sequence[str]) -> list[int]:
    blocks = sorted({_block(layer) for layer in layers})
    outside_in: list[int] = []
    while blocks:
        outside_in.append(blocks.pop(0))
        if blocks:
            outside_in.append(blocks.pop())
    place = {block: i for i, block in enumerate(outside_in)}
    return sorted(range(len(layers)), key=lambda i: (place[_block(layers[i])], linear_kind(layers[i])))


def _block(layer: str) -> int:
    """The first part of a layer's name that is a number; -1 without one."""
    return next((int(part) for part in layer.split(".") if part.isdecimal()), -1)
