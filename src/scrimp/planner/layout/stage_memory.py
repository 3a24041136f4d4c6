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

from dataclasses import dataclass
from typing import Literal

from scrimp.planner.layout.block_activations import (
    boundary_bytes,
    later_bytes,
    made_again_bytes,
    waiting_bytes,
    working_bytes,
)
from scrimp.planner.layout.held_states import gathered_bytes, gradient_bytes, state_bytes, weight_bytes
from scrimp.planner.layout.in_flight import held_by, passes_in_flight
from scrimp.planner.layout.setting import Setting
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
Bytes = dict[str, float]


@dataclass(frozen=True)
class RankBytes:
    """The peak of one rank."""

    categories: Bytes
    """At its worst moment."""
    moment: Moment
    """Which that is."""
    passing: float
    """Bytes at the worst moment of those in which all passes in flight hold activations."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.categories.values())


def peak_bytes(setting: Setting) -> list[RankBytes]:
    """The peaks of the ranks of a pipeline, first to last."""
    return [_rank(setting, kinds, rank) for rank, kinds in enumerate(kinds_of_ranks(setting))]


def margin_of(setting: Setting) -> float:
    """Share of what comes and goes that the setting's software loses to its allocator."""
    software = setting.software
    if not software.caches_allocations:
        return 0.0
    return OLDER_MARGIN if setting.layout.pp > 1 and not software.expandable_segments else MARGIN


def _rank(setting: Setting, own: Kinds, rank: int) -> RankBytes:
    found = _moments(setting, own, rank)
    share = margin_of(setting)
    lost = {
        moment: share * sum(size for name, size in one.items() if name not in STAYS)
        for moment, one in found.items()
    }
    sizes = {moment: sum(one.values()) + lost[moment] for moment, one in found.items()}
    worst = max(sizes, key=sizes.__getitem__)
    categories = dict.fromkeys(CATEGORIES, 0.0) | found[worst]
    categories["margin"] = lost[worst]
    return RankBytes(categories, worst, max(sizes["backward"], sizes.get("loss", 0.0)))


def _moments(setting: Setting, own: Kinds, rank: int) -> dict[Moment, Bytes]:
    """What a rank holds at each of its moments, without a margin."""
    software = setting.software
    whole, reduced = gathered_bytes(setting, own, rank)
    held = {
        "weights": weight_bytes(setting, own, rank),
        "gradients": gradient_bytes(setting, own, rank),
        "optimizer": state_bytes(setting, rank),
        "pools": whole * (software.unit_copies > 0),
    }
    waiting, again, alone = _activations(setting, own)
    if splits_backward(setting.layout):
        waiting = _waiting_in_v(setting, rank)
    else:
        waiting *= passes_in_flight(setting, rank)
    first = held | _without_gradients(setting, held)
    shared = numbers_of_rank(setting, rank).over(setting.state_shards)
    found: dict[Moment, Bytes] = {
        "backward": first | {"gathered": whole + reduced, "activations": waiting + again},
        "end": held | {"gathered": whole + reduced, "activations": alone},
        "update": held | {"update": software.update_bytes * shared},
    }
    if rank == last_rank(setting.layout):
        found["loss"] = first | {"gathered": whole, "activations": waiting, "logits": _logits(setting)}
    return found


def _without_gradients(setting: Setting, held: Bytes) -> Bytes:
    """Gradients, and pools, before the first backward pass of a step."""
    software = setting.software
    if software.gradients_stay or setting.micro_batches > 1:
        return {}
    has_pool = software.unit_copies > 0 and setting.weight_shards[0] > 1
    return {"gradients": 0.0, "pools": held["pools"] + held["gradients"] * has_pool}


def _activations(setting: Setting, own: Kinds) -> tuple[float, float, float]:
    """Bytes of each pass in flight; what a block's backward pass has besides, at most; and with its own of one pass."""
    waiting = again = alone = 0.0
    for (index, plan), count in own.items():
        block, like = setting.model.blocks[index], setting.in_formats(plan.formats)
        one = waiting_bytes(block, plan, like)
        more = made_again_bytes(block, plan, like) + working_bytes(block, like)
        waiting += count * one
        again, alone = max(again, more), max(alone, one + more)
    return waiting, again, alone


def _waiting_in_v(setting: Setting, rank: int) -> float:
    """Bytes of all passes in flight, and of gradients of weights that wait, at the moment that has most."""
    stages, each = kinds_of_stages(setting), []
    for stage in stages_of_rank(setting.layout, rank):
        flying = later = 0.0
        for (index, plan), count in stages[stage].items():
            block, like = setting.model.blocks[index], setting.in_formats(plan.formats)
            flying += count * waiting_bytes(block, plan, like)
            later += count * later_bytes(block, like)
        each.append((flying, later))
    return max(
        sum(
            flying * own + later * others
            for (flying, later), own, others in zip(each, one.flying, one.waiting, strict=True)
        )
        for one in held_by(setting, rank)
    )


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
