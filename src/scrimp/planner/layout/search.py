"""The layouts that a model can have on a cluster, the fastest first, and what spoke against the others.

Method   All degrees are tried that divide what they share: tp the heads, key heads, widths and the devices of a node;
         pp the blocks; cp the sequence; ep the experts. For each, micro-batches and stages of a rank that the batch
         and the blocks allow, shards or copies, and recomputation from nothing upwards until it fits.
         A candidate's bytes are counted before its seconds. One that does not fit with everything made again is left
         out with all larger micro-batches.
Limits   Equal stages but for what does not divide; one format for all blocks.
Checked  tests/planner/layout/test_layout_search.py: brute force over all candidates
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import PlanError
from scrimp.planner.layout.predict import Prediction, predict
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Setting
from scrimp.planner.layout.stage_memory import RankBytes, peak_bytes

RECOMPUTATIONS = (NONE, SELECTIVE, FULL)
_MOST_VIRTUAL = 8


@dataclass(frozen=True)
class Candidate:
    """A setting that fits, and its step."""

    setting: Setting
    prediction: Prediction
    memory: tuple[RankBytes, ...]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step_seconds


@dataclass(frozen=True)
class Found:
    """The answer of a search."""

    best: tuple[Candidate, ...]
    """The fastest first."""
    tried: int
    """Settings of which bytes or seconds were predicted."""
    nearest_bytes: float
    """Where nothing fits: the least that a device would need; else 0."""


def search(like: Setting, *, keep: int = 5) -> Found:
    """The best layouts of a model on a cluster.

    Args:
        like: gives model, cluster, batch, software and precision; its layout, micro-batch and recomputation are not
            read.
        keep: how many plans are wanted.
    """
    best: list[Candidate] = []
    tried, least = 0, float("inf")
    room = like.device.memory_bytes
    for layout in layouts(like):
        for micro_batch in micro_batches(like, layout):
            fits = False
            for recompute in RECOMPUTATIONS:
                try:
                    setting = dataclasses.replace(
                        like, layout=layout, micro_batch=micro_batch, recompute=recompute
                    )
                except PlanError:
                    continue
                memory = tuple(peak_bytes(setting))
                tried += 1
                most = max(one.total for one in memory)
                least = min(least, most)
                if most > room:
                    continue
                fits = True
                best.append(Candidate(setting, predict(setting), memory))
                best = sorted(best, key=lambda one: one.seconds)[:keep]
                break
            if not fits:
                break
    return Found(tuple(best), tried, 0.0 if best else least)


def layouts(like: Setting) -> Iterator[ResolvedLayout]:
    """Those whose degrees divide what they share."""
    model, devices, node = like.model, like.cluster.devices, like.cluster.groups[0].used
    attention = model.blocks[-1].attention
    heads = (attention.num_heads, attention.num_kv_heads)
    experts = max((one.experts for one in model.blocks[-1].linears), default=1)
    for tp in _divisors(node):
        if any(size % tp for size in (*heads, model.vocab_size, like.sequence)):
            continue
        for pp, cp in itertools.product(_divisors(devices // tp), _divisors(devices // tp)):
            readers, rest = divmod(devices, tp * pp * cp)
            if rest or pp > len(model.blocks) or like.sequence % (2 * cp * tp) or like.global_batch % readers:
                continue
            for ep in _divisors(experts):
                if (readers * cp * tp) % ep:
                    continue
                for virtual in range(1, _MOST_VIRTUAL + 1 if pp > 1 else 2):
                    if pp * virtual > len(model.blocks):
                        break
                    yield from _shared(readers, tp=tp, pp=pp, cp=cp, ep=ep, virtual=virtual)


def micro_batches(like: Setting, layout: ResolvedLayout) -> Iterator[int]:
    """Sequences of a pass, the fewest first."""
    share = like.global_batch // layout.data_ranks
    for size in _divisors(share):
        rounds = share // size
        if (layout.virtual or 1) > 1 and rounds % layout.pp:
            continue
        yield size


def _shared(readers: int, **degrees: int) -> Iterator[ResolvedLayout]:
    schedule = "interleaved" if degrees["virtual"] > 1 else "1f1b"
    if degrees["pp"] == 1 and readers > 1:
        yield ResolvedLayout(dp=1, fsdp=readers, zero=3, schedule=schedule, **degrees)  # type: ignore[arg-type]
    yield ResolvedLayout(dp=1, fsdp=readers, zero=1, schedule=schedule, **degrees)  # type: ignore[arg-type]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
