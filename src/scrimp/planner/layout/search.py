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

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from scrimp.config.resolved import ResolvedLayout
from scrimp.models.shapes import ModelSizes
from scrimp.planner.hardware import Cluster, Device
from scrimp.planner.layout.contenders import Contenders, Family, Misfit
from scrimp.planner.layout.predict import Prediction, predict
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Setting
from scrimp.planner.layout.software import Software
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
        """Seconds of a step."""
        return self.prediction.step_seconds


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be trained on what; how, is asked."""

    model: ModelSizes
    cluster: Cluster
    sequence: int
    global_batch: int
    """Sequences of a step, over all ranks."""
    software: Software
    precision: str = "bf16"

    @property
    def device(self) -> Device:
        """That computes."""
        return self.cluster.groups[0].node.device


@dataclass(frozen=True)
class Found:
    """The answer of a search."""

    best: tuple[Candidate, ...]
    """The fastest first."""
    tried: int
    """Settings whose bytes were predicted."""
    too_large: int
    """Those of them that do not fit."""
    nearest_bytes: float
    """The least that any of them needs of a device."""
    families: Mapping[Family, Candidate | Misfit] = field(default_factory=dict)
    """The best of each value of each degree."""


def search(
    question: Question,
    *,
    keep: int = 5,
    fits_given: Callable[[ResolvedLayout, int], bool] = lambda layout, micro_batch: True,
    note: Callable[[int], None] = lambda tried: None,
) -> Found:
    """The best layouts of a model on a cluster.

    Args:
        keep: how many plans are wanted.
        fits_given: whether a layout and its micro-batch are among those that are asked for.
        note: told now and then how many settings were tried.
    """
    best = Contenders(keep)
    tried, too_large, least = 0, 0, float("inf")
    for layout in layouts(question):
        for micro_batch in micro_batches(question, layout):
            if not fits_given(layout, micro_batch):
                continue
            found = None
            for recompute in RECOMPUTATIONS:
                setting = _setting(question, layout, micro_batch, recompute)
                memory = tuple(peak_bytes(setting))
                most = max(one.total for one in memory)
                tried, least = tried + 1, min(least, most)
                if most <= question.device.memory_bytes:
                    found = Candidate(setting, predict(setting), memory)
                    break
                too_large += 1
            note(tried)
            if found is None:
                best.does_not_fit(setting, memory)
                break
            best.fits(found)
    return Found(tuple(best.best), tried, too_large, least, best.families)


def fits(
    question: Question,
    *,
    fits_given: Callable[[ResolvedLayout, int], bool] = lambda layout, micro_batch: True,
    note: Callable[[int], None] = lambda tried: None,
) -> bool:
    """Whether any layout fits: bytes are counted, no seconds.

    Args:
        fits_given, note: as of `search`.
    """
    tried = 0
    for layout in layouts(question):
        size = next((size for size in micro_batches(question, layout) if fits_given(layout, size)), None)
        if size is None:
            continue
        tried += 1
        note(tried)
        memory = peak_bytes(_setting(question, layout, size, FULL))
        if max(one.total for one in memory) <= question.device.memory_bytes:
            return True
    return False


def _setting(question: Question, layout: ResolvedLayout, micro_batch: int, recompute: str) -> Setting:
    return Setting(
        model=question.model,
        cluster=question.cluster,
        sequence=question.sequence,
        global_batch=question.global_batch,
        micro_batch=micro_batch,
        layout=layout,
        software=question.software,
        recompute=recompute,
        precision=question.precision,
    )


def layouts(like: Question) -> Iterator[ResolvedLayout]:
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
            if tp > 1 and cp > 1 and not like.software.cuts_shared_rows:
                continue
            if rest or pp > len(model.blocks) or like.sequence % (2 * cp * tp) or like.global_batch % readers:
                continue
            for ep in _divisors(experts):
                if (readers * cp * tp) % ep:
                    continue
                for virtual in range(1, _MOST_VIRTUAL + 1 if pp > 1 else 2):
                    if pp * virtual > len(model.blocks):
                        break
                    yield from _shared(readers, tp=tp, pp=pp, cp=cp, ep=ep, virtual=virtual)


def micro_batches(like: Question, layout: ResolvedLayout) -> Iterator[int]:
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
