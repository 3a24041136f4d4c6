"""Bytes that each rank of a pipeline takes at most: those of the worst moment of its step, by what takes them.

Problem  Logits, what a block makes again and an update's temporaries are never there at once: their sum is no peak, and
         rules out layouts that run.
Method   Weights and states are there at every moment (`held_states`). So are gradients; only where a step has one pass,
         and their memory is free between steps, its forward pass finds none. What comes to these::

             loss      on the last rank: logits, log-probabilities and their gradients, `held_logit_bytes` in all;
                       activations of all passes in flight; embedding, head and two blocks gathered
             backward  of the block that runs last, while all activations are there: what is made again of it
                       (`block_activations`), and gradients of its activations; gathered, and its own gradients before
                       they are reduced
             end       of the block that runs first, in the last backward pass: of activations its own alone
             update    temporaries of the update, `update_bytes` for each number of a state

         The first 1f1b rank has as many passes in flight as ranks.
         pools     what a caching allocator keeps for another stream, so that no other tensor finds room in it: buffers
                   from which gathered weights are copied, and gradients' memory while there are none
         margin    `MARGIN` of what comes and goes, for what else it cannot use: what is allocated once leaves no gaps
Limits   What a network library, a captured graph or a kernel's workspace takes is in no category.
Source   In flight: Narayanan et al., arXiv 2104.04473, section 2.2. Pools: PyTorch, CUDACachingAllocator.cpp (a block
         belongs to the stream that asked for it) and fsdp/_fully_shard/_fsdp_collectives.py (streams of its own for
         all-gathers and reduce-scatters)
Checked  tests/planner/layout/test_rank_bytes.py; benchmarks/published_runs.py: beside printed peaks
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scrimp.planner.layout.block_activations import backward_bytes, boundary_bytes, waiting_bytes
from scrimp.planner.layout.held_states import (
    gathered_between_passes,
    gathered_bytes,
    gradient_bytes,
    state_bytes,
    weight_bytes,
)
from scrimp.planner.layout.setting import NONE, Setting
from scrimp.planner.layout.stages import Kinds, kinds_of_ranks, numbers_of_rank

MARGIN, OLDER_MARGIN = 0.03, 0.15
"""Share of what comes and goes that a caching allocator cannot use beside the pools that are counted. Where its
segments can grow (expandable_segments): 69 to 70 GB allocated were 72 to 73 reserved (GPT-OSS 120B; Megatron-Bridge
067f987d, skills/nemo-mbridge-perf-cuda-graphs/card.yaml); a run that is short of memory gives back most of it. Where
they cannot, 15 % on average (eight language models on A100: Guo et al., GMLake, arXiv 2401.08156), but for passes one
after the other, which free in the reverse order and leave no gaps."""
STAYS = ("weights", "gradients", "optimizer", "pools")
CATEGORIES = (
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "logits",
    "update",
    "pools",
    "margin",
)
Moment = Literal["loss", "backward", "end", "update"]
MOMENTS: tuple[Moment, ...] = ("loss", "backward", "end", "update")
Bytes = dict[str, float]


@dataclass(frozen=True)
class RankBytes:
    """The peak of one rank."""

    categories: Bytes
    """At its worst moment."""
    moment: Moment
    """Which that is."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.categories.values())


@dataclass(frozen=True)
class Outside:
    """What a rank holds whatever its blocks do, at each of its moments, without a margin."""

    moments: dict[Moment, Bytes]
    flight: float
    """Passes that it holds at once."""
    share: float
    """Of what comes and goes: the margin."""

    def bytes(self, moment: Moment) -> float:
        """With the margin; of a moment that the rank does not have none at all, so that it is never the worst."""
        one = self.moments.get(moment)
        return _with_margin(one, self.share) if one else -math.inf


def peak_bytes(setting: Setting, outside: Sequence[Outside] | None = None) -> list[RankBytes]:
    """The peaks of the ranks of a pipeline, first to last.

    Args:
        outside: of `outside_blocks`, where it is known: it is the same whatever is decided of blocks.
    """
    outside = outside or outside_blocks(setting)
    ranks = kinds_of_ranks(setting)
    kept = {id(own): own for own in ranks}
    known = {name: _kept(setting, own) for name, own in kept.items()}
    return [_rank(known[id(own)], one) for own, one in zip(ranks, outside, strict=True)]


def outside_blocks(setting: Setting) -> list[Outside]:
    """What each rank of a pipeline holds beside what its blocks keep."""
    # Ranks between the ends that have equal blocks differ in the passes that they hold alone.
    known: dict[object, dict[Moment, Bytes]] = {}
    last, share, found = setting.layout.pp - 1, margin_of(setting), []
    for rank, own in enumerate(kinds_of_ranks(dataclasses.replace(setting, blocks=(), recompute=NONE))):
        key = (frozenset(own.items()), rank == 0, rank == last)
        if key not in known:
            known[key] = _moments_outside(setting, own, rank)
        found.append(Outside(known[key], passes_in_flight(setting, rank), share))
    return found


def margin_of(setting: Setting) -> float:
    """Share of what comes and goes that the setting's software loses to its allocator."""
    software = setting.software
    if not software.caches_allocations:
        return 0.0
    return OLDER_MARGIN if setting.layout.pp > 1 and not software.expandable_segments else MARGIN


def passes_in_flight(setting: Setting, rank: int) -> float:
    """How many passes of all its blocks a rank holds when they are most."""
    layout, m = setting.layout, setting.micro_batches
    virtual = layout.virtual or 1
    if virtual == 1:
        return m if layout.schedule == "gpipe" else min(m, layout.pp - rank)
    return min(2 * (layout.pp - 1 - rank) + (virtual - 1) * layout.pp + 1, m * virtual) / virtual


def _rank(kept: _Kept, outside: Outside) -> RankBytes:
    found = _moments(kept, outside)
    sizes = {moment: _with_margin(one, outside.share) for moment, one in found.items()}
    worst = max(sizes, key=sizes.__getitem__)
    categories = dict.fromkeys(CATEGORIES, 0.0) | found[worst]
    categories["margin"] = _margin(found[worst], outside.share)
    return RankBytes(categories, worst)


def _with_margin(one: Bytes, share: float) -> float:
    return sum(one.values()) + _margin(one, share)


def _margin(one: Bytes, share: float) -> float:
    return share * sum(size for name, size in one.items() if name not in STAYS)


def _moments(kept: _Kept, outside: Outside) -> dict[Moment, Bytes]:
    """What a rank holds at each of its moments, without a margin."""
    waiting = outside.flight * kept.waiting
    activations = {"backward": waiting + kept.again, "end": kept.alone, "loss": waiting, "update": 0.0}
    return {
        moment: one | {"weights": one["weights"] + kept.standing, "activations": activations[moment]}
        for moment, one in outside.moments.items()
    }


def _moments_outside(setting: Setting, own: Kinds, rank: int) -> dict[Moment, Bytes]:
    """The same without what blocks keep, be it activations or gathered weights."""
    software = setting.software
    whole, reduced = gathered_bytes(setting, own, rank)
    held = {
        "weights": weight_bytes(setting, own, rank),
        "gradients": gradient_bytes(setting, own, rank),
        "optimizer": state_bytes(setting, rank),
        "pools": whole * (software.unit_copies > 0),
    }
    first = held | _without_gradients(setting, held)
    shared = numbers_of_rank(setting, rank).over(setting.state_shards)
    found: dict[Moment, Bytes] = {
        "backward": first | {"gathered": whole + reduced},
        "end": held | {"gathered": whole + reduced},
        "update": held | {"update": software.update_bytes * shared},
    }
    if rank == setting.layout.pp - 1:
        found["loss"] = first | {"gathered": whole, "logits": _logits(setting)}
    return found


def _without_gradients(setting: Setting, held: Bytes) -> Bytes:
    """Gradients, and pools, before the first backward pass of a step."""
    software = setting.software
    if software.gradients_stay or setting.micro_batches > 1:
        return {}
    has_pool = software.unit_copies > 0 and setting.weight_shards[0] > 1
    return {"gradients": 0.0, "pools": held["pools"] + held["gradients"] * has_pool}


@dataclass(frozen=True)
class _Kept:
    """What the blocks of a rank keep."""

    waiting: float
    """Bytes of each pass in flight."""
    again: float
    """What a block's backward pass has besides, at most."""
    alone: float
    """The same with its own of one pass."""
    standing: float
    """Weights that stay gathered."""


def _kept(setting: Setting, own: Kinds) -> _Kept:
    waiting = again = alone = 0.0
    for (index, plan), count in own.items():
        block, like = setting.model.blocks[index], setting.in_formats(plan.formats)
        one = waiting_bytes(block, plan, like)
        more = backward_bytes(block, plan, like)
        waiting += count * one
        again, alone = max(again, more), max(alone, one + more)
    return _Kept(waiting, again, alone, gathered_between_passes(setting, own))


def _logits(setting: Setting) -> float:
    """All that the loss holds at once, and what the last norm and the head read."""
    software, tp = setting.software, setting.layout.tp
    tokens = min(software.loss_tokens or setting.tokens, setting.tokens)
    words = setting.model.vocab_size / (1 if software.gathers_logits else tp)
    each = software.held_logit_bytes
    if tp > 1 and software.held_shared_logit_bytes:
        each = software.held_shared_logit_bytes
    boundary = boundary_bytes(setting)
    is_whole = software.keeps_gathered and setting.sequence_parallel
    return each * tokens * words + boundary + boundary * (tp if is_whole else 1)
