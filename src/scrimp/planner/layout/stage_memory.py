"""Bytes that each rank of a pipeline takes at most: those of the worst moment of its step, by what takes them.

Problem  Logits, what a block makes again and an update's temporaries are never there at once: their sum is no peak, and
         rules out layouts that run.
Method   Weights and states are there at every moment (`held_states`). So are gradients; only where a step has one pass,
         and their memory is free between steps, its forward pass finds none. What comes to these::

             loss      on the last rank: logits, log-probabilities and their gradients, `held_logit_bytes` in all; the
                       head's gradient, where the loss makes it (`head_gradient_bytes`); activations of all passes in
                       flight; embedding, head and two blocks gathered
             backward  of the block that runs last, while all activations are there: what is made again of it
                       (`block_activations`), and gradients of its activations; gathered, and its own gradients before
                       they are reduced
             end       of the block that runs first, in the last backward pass: of activations its own alone
             tied      where embedding and head are one, the head's gradient waits from the loss to the embedding's
                       backward pass, which makes another
             update    temporaries of the update, `update_bytes` for each number of a state, and states on a visit

         The first 1f1b rank has as many passes in flight as ranks (`in_flight`). Where gradients of weights wait (zbv,
         dualpipev), so do what their products read: inputs of layers and gradients of their results
         (`block_activations.later_bytes`); of all moments of the rank's order the one with most counts.
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

from scrimp.planner.layout.block_activations import (
    backward_bytes,
    boundary_bytes,
    later_bytes,
    waiting_bytes,
)
from scrimp.planner.layout.held_states import (
    gathered_between_passes,
    gathered_bytes,
    gradient_bytes,
    state_bytes,
    visiting_bytes,
    weight_bytes,
)
from scrimp.planner.layout.in_flight import fullest, held_by, passes_in_flight
from scrimp.planner.layout.setting import NONE, Setting
from scrimp.planner.layout.stages import (
    Kinds,
    kinds_of_ranks,
    kinds_of_stages,
    last_rank,
    numbers_of_rank,
    splits_backward,
    stages_of_rank,
)

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
PASSING: tuple[Moment, ...] = ("loss", "backward")
"""Those at which passes are in flight."""
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
    """Activations among them: of a V what waits for gradients of weights when passes in flight are most."""
    flight: float
    """Passes that it holds at once."""
    share: float
    """The margin, as a share of what comes and goes."""

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
    if splits_backward(setting.layout):
        waiting = _waiting_in_v(setting)
    else:
        waiting = [one.flight * known[id(own)].waiting for own, one in zip(ranks, outside, strict=True)]
    return [_rank(known[id(own)], one, size) for own, one, size in zip(ranks, outside, waiting, strict=True)]


def outside_blocks(setting: Setting, formats: Sequence[tuple[str, str]] = ()) -> list[Outside]:
    """What each rank of a pipeline holds beside what its blocks keep.

    Args:
        formats: of blocks, in which least waits for gradients of weights; none: the setting's own.
    """
    # Ranks between the ends that have equal blocks differ in the passes that they hold alone.
    known: dict[object, dict[Moment, Bytes]] = {}
    last, share, found = last_rank(setting.layout), margin_of(setting), []
    plain = dataclasses.replace(setting, blocks=(), recompute=NONE)
    later = _later_in_v(plain, tuple(formats)) if splits_backward(setting.layout) else [0.0] * plain.layout.pp
    for rank, own in enumerate(kinds_of_ranks(plain)):
        key = (frozenset(own.items()), rank == 0, rank == last)
        if key not in known:
            known[key] = _moments_outside(setting, own, rank)
        moments = known[key]
        if later[rank]:
            waits = {"activations": later[rank]}
            moments = moments | {at: moments[at] | waits for at in PASSING if at in moments}
        found.append(Outside(moments, passes_in_flight(setting, rank), share))
    return found


def _later_in_v(setting: Setting, formats: tuple[tuple[str, str], ...]) -> list[float]:
    """Bytes of each rank that wait for gradients of weights when passes in flight are most."""
    like, blocks, layout = setting.in_formats(formats), setting.model.blocks, setting.layout
    each = [
        sum(count * later_bytes(blocks[index], like) for (index, _), count in own.items())
        for own in kinds_of_stages(setting)
    ]
    return [
        sum(
            each[stage] * count
            for stage, count in zip(stages_of_rank(layout, rank), fullest(setting, rank).waiting, strict=True)
        )
        for rank in range(layout.pp)
    ]


def margin_of(setting: Setting) -> float:
    """Share of what comes and goes that the setting's software loses to its allocator."""
    software = setting.software
    if not software.caches_allocations:
        return 0.0
    return OLDER_MARGIN if setting.layout.pp > 1 and not software.expandable_segments else MARGIN


def _rank(kept: _Kept, outside: Outside, waiting: float) -> RankBytes:
    found = _moments(kept, outside, waiting)
    sizes = {moment: _with_margin(one, outside.share) for moment, one in found.items()}
    worst = max(sizes, key=sizes.__getitem__)
    categories = dict.fromkeys(CATEGORIES, 0.0) | found[worst]
    categories["margin"] = _margin(found[worst], outside.share)
    return RankBytes(categories, worst)


def _with_margin(one: Bytes, share: float) -> float:
    return sum(one.values()) + _margin(one, share)


def _margin(one: Bytes, share: float) -> float:
    return share * sum(size for name, size in one.items() if name not in STAYS)


def _moments(kept: _Kept, outside: Outside, waiting: float) -> dict[Moment, Bytes]:
    """What a rank holds at each of its moments, without a margin.

    Args:
        waiting: of all passes in flight.
    """
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
    waits, another = _tied_gradients(setting)
    shared = numbers_of_rank(setting, rank).over(setting.state_shards)
    found: dict[Moment, Bytes] = {
        "backward": first | {"gathered": whole + reduced + waits},
        "end": held | {"gathered": whole + reduced + waits + another},
        "update": held | {"update": software.update_bytes * shared + visiting_bytes(setting, own)},
    }
    if rank == last_rank(setting.layout):
        found["loss"] = first | {"gathered": whole, "logits": _logits(setting)}
    return found


def _tied_gradients(setting: Setting) -> Sequence[float]:
    """Bytes of the gradient that the head has given a weight which is the embedding's, too, and of the embedding's
    own: where ranks share weights, gradients before they are reduced count the first already."""
    if not setting.model.tied or last_rank(setting.layout) != 0:
        return 0.0, 0.0
    each = setting.software.weight_bytes * setting.model.embedding_parameters / setting.layout.tp
    return each * (setting.weight_shards[0] == 1), each


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


def _waiting_in_v(setting: Setting) -> list[float]:
    """Bytes of all passes in flight, and of gradients of weights that wait, at the moment of each rank that has
    most."""
    kept = [_kept_in_v(setting, own) for own in kinds_of_stages(setting)]
    ranks = range(setting.layout.pp)
    each = ([kept[stage] for stage in stages_of_rank(setting.layout, rank)] for rank in ranks)
    return [
        max(
            sum(
                flying * own + later * others
                for (flying, later), own, others in zip(ours, one.flying, one.waiting, strict=True)
            )
            for one in held_by(setting, rank)
        )
        for rank, ours in zip(ranks, each, strict=True)
    ]


def _kept_in_v(setting: Setting, own: Kinds) -> tuple[float, float]:
    """Bytes of a stage for each pass in flight, and for each whose gradients of weights wait."""
    flying = later = 0.0
    for (index, plan), count in own.items():
        block, like = setting.model.blocks[index], setting.in_formats(plan.formats)
        flying += count * waiting_bytes(block, plan, like)
        later += count * later_bytes(block, like)
    return flying, later


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
    head = software.head_gradient_bytes * setting.model.head_parameters / tp
    return each * tokens * words + head + boundary + boundary * (tp if is_whole else 1)
