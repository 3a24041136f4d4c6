"""The layouts that a model can have on a cluster, the fastest first, and what spoke against the others.

Method   All degrees are tried that divide what they share: tp the heads, key heads, widths and the devices of a node;
         pp the blocks; cp the sequence; ep the experts. For each, micro-batches and stages of a rank that the batch
         and the blocks allow, shards or copies. What blocks do in them is decided together (`block_choices`).
         A candidate goes through four doors, each dearer than the one before, always the one that promises most::

             1  its step if bytes, harm and waiting in the pipeline were free      `least_step_seconds`
             2  the same with the pipeline played                                  `predict`
             3  a bound of its step, with both limits priced                       `Blocks.least_seconds`
             4  its step                                                           `Blocks.solve`, `predict`

         The search ends where the next promise is worse than the plans that are wanted: whatever was not looked at is
         slower than they are.
         Stages of those that are wanted then get other sizes where these are faster (`stage_sizes`).
         Pipelines of zero 3 are looked at once those of zero 1 are through, which in the same shards have the faster
         passes: where their memory is not what decides, none of the doors is opened for zero 3.
         What is given stays as it is, values among them that are not tried otherwise: copies beside shards, ZeRO
         stage 2 (whose step is that of zero 3 with all weights gathered), gpipe, zbv and dualpipev, sizes of stages.
Limits   Copies are shards, or without a pipeline whole nodes of shards; where `Question.shares_all` all copies, shards
         and stages of ZeRO that there are. Stages of what does not lead are as equal as they divide, or in proportion
         to their devices' rates.
Checked  tests/planner/layout/test_layout_search.py: brute force over all candidates
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scrimp.config.pipeline import V_SHAPED, check_sizes
from scrimp.config.pipeline import fits as schedule_fits
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import ConfigError
from scrimp.models.shapes import ModelSizes
from scrimp.planner.hardware import Cluster, Device
from scrimp.planner.layout.block_choices import Blocks, has_room, has_room_as_planned, leanest
from scrimp.planner.layout.block_menus import Quality
from scrimp.planner.layout.contenders import Contenders, Family, Misfit
from scrimp.planner.layout.format_budget import FormatBudget
from scrimp.planner.layout.given_memory import GivenMemory
from scrimp.planner.layout.held_states import host_bytes
from scrimp.planner.layout.pipeline_times import least_weights
from scrimp.planner.layout.predict import Prediction, least_step_seconds, predict, send_seconds
from scrimp.planner.layout.setting import BlockPlan, Offload, Setting
from scrimp.planner.layout.software import Software
from scrimp.planner.layout.stage_memory import RankBytes, peak_bytes
from scrimp.planner.layout.stage_sizes import improved, in_proportion
from scrimp.planner.layout.stages import splits_backward

_MOST_VIRTUAL = 8
ON_HOST = (
    Offload(),
    Offload(optimizer=True),
    Offload(optimizer=True, master=True),
    Offload(optimizer=True, master=True, gradients=True),
    Offload(optimizer=True, master=True, gradients=True, weights=True),
)
"""States in host memory, each with all before it: those that are met least often first."""


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

    @property
    def fullest(self) -> float:
        """Share of its devices' memory that the fullest rank takes."""
        return max(one.total / self.setting.at(rank).memory_bytes for rank, one in enumerate(self.memory))


def _any(layout: ResolvedLayout, micro_batch: int) -> bool:
    return True


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
    """Of all products, where `formats` leaves nothing to choose."""
    formats: FormatBudget | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a layout, and `micro_batch`, that stay as they are."""
    memory: GivenMemory = field(default_factory=GivenMemory)
    """What the user decides of memory."""
    shares_all: bool = False
    """Whether whole copies, copies beside shards in any number, and every stage of ZeRO are tried: of a few ranks."""
    may_be: Callable[[ResolvedLayout, int], bool] = field(default=_any, compare=False)
    """Whether a layout with a micro-batch is carried out."""

    def on_host(self, layout: ResolvedLayout) -> tuple[Offload, ...]:
        """The states that may live in host memory; Scrimp has them there without pipelines alone."""
        if self.memory.offload is not None:
            return (self.memory.offload,) if layout.pp == 1 or self.memory.offload == Offload() else ()
        return ON_HOST if layout.pp == 1 else ON_HOST[:1]

    @property
    def device(self) -> Device:
        """That computes; of several kinds the slowest."""
        return min(
            (group.node.device for group in self.cluster.groups), key=lambda one: one.rate("bf16") or 0.0
        )


@dataclass(frozen=True)
class Found:
    """The answer of a search."""

    best: tuple[Candidate, ...]
    """The fastest first."""
    tried: int
    """Layouts with micro-batches that there are."""
    priced: int
    """Settings whose bytes were counted, with states here or on the host; what is left is slower than the best,
    whatever its bytes."""
    too_large: int
    """Those of the tried ones that were found to fit in no way."""
    nearest_bytes: float
    """The least that any of the priced ones needs of a device."""
    nearest_host_bytes: float
    """The least that those of them need on the host for a device, for which the devices are large enough; infinite
    where there is none."""
    families: Mapping[Family, Candidate | Misfit] = field(default_factory=dict)
    """The best of each value of each degree."""


@dataclass(order=True)
class _Waiting:
    """A candidate before one of its doors, by what it promises."""

    seconds: float
    number: tuple[int, int]
    """The layout's, and that of what is on the host."""
    setting: Setting = field(compare=False)
    free: tuple[str, ...] = field(compare=False)
    """Recipes of which each product takes the fastest where bytes and harm are free."""
    rough: Prediction | None = field(compare=False, default=None)
    """Filled by the second door."""
    blocks: Blocks | None = field(compare=False, default=None)
    """Filled by the third one."""
    followers: list[_Waiting] = field(compare=False, default_factory=list)
    """The same whose ranks share weights too (`_promises`); they wait until this one is through."""

    def release(self, best: Contenders, waiting: list[_Waiting]) -> None:
        """Let followers wait that may still change anything: none takes less than the passes of this one."""
        seconds = self.rough.passes if self.rough else self.seconds
        for one in self.followers:
            if best.may_take(one.setting.layout, seconds):
                own = _promise(one.setting, one.free, one.number[0])
                heapq.heappush(waiting, dataclasses.replace(own, seconds=max(seconds, own.seconds)))


def search(
    question: Question,
    *,
    keep: int = 5,
    note: Callable[[str], None] = lambda how_far: None,
    has_families: bool = True,
) -> Found:
    """The best layouts of a model on a cluster.

    Args:
        keep: how many plans are wanted.
        note: told again and again how far the search is.
        has_families: whether the best of each value of each degree is wanted too, which takes about as long again.
    """
    if question.memory.activations is not None:
        return _as_given(question, keep, note, has_families)
    quality = question.formats.quality(question.model) if question.formats else None
    waiting = _promises(question, quality, note)
    tried = sum(1 + len(one.followers) for one in waiting)
    priced, solved, least, host = 0, 0, math.inf, math.inf
    held: dict[int, bool] = {}
    best = Contenders(keep, has_families=has_families)
    heapq.heapify(waiting)
    while waiting:
        one = heapq.heappop(waiting)
        if not best.may_take(one.setting.layout, one.seconds):
            one.release(best, waiting)
            continue
        note(f"{tried:,} settings tried, {solved:,} of them solved block by block")
        if one.rough is None:
            heapq.heappush(waiting, _played(one))
            continue
        if one.blocks:
            found = _solved(one)
            solved += 1
            held[one.number[0]] = held.get(one.number[0], False) or found is not None
            best.fits(found)
            one.release(best, waiting)
            continue
        priced += 1
        for following in _with_more_on_host(one, question):
            heapq.heappush(waiting, following)
        one, blocks = _bounded(one, one.rough, quality)
        least = min(least, blocks.leanest_bytes)
        if blocks.leanest_bytes <= question.device.memory_bytes:
            host = min(host, host_bytes(one.setting))
        if math.isinf(one.seconds):
            held.setdefault(one.number[0], False)
            best.does_not_fit(one.setting, tuple(peak_bytes(leanest(one.setting))))
            one.release(best, waiting)
        else:
            heapq.heappush(waiting, one)
    for lead in tuple(best.best) if "stages" not in question.given else ():
        best.fits(_with_better_stages(lead, quality))
    too_large = sum(not is_held for is_held in held.values())
    return Found(tuple(best.best), tried, priced, too_large, least, host, best.families)


def fits(question: Question, note: Callable[[str], None] = lambda how_far: None) -> bool:
    """Whether any layout fits: bytes are counted, no seconds.

    Args:
        note: as of `search`.
    """
    tried = 0
    for layout in layouts(question):
        size = next(micro_batches(question, layout), None)
        if size is None:
            continue
        tried += 1
        note(f"{tried:,} layouts tried")
        blocks = question.memory.blocks(len(question.model.blocks))
        for offload in question.on_host(layout):
            setting = dataclasses.replace(setting_of(question, layout, size), offload=offload, blocks=blocks)
            if has_room_as_planned(setting, peak_bytes(setting)) if blocks else has_room(setting):
                return True
    return False


def _as_given(question: Question, keep: int, note: Callable[[str], None], has_families: bool) -> Found:
    """The same where the user decides what blocks do: every setting is predicted."""
    blocks = question.memory.blocks(len(question.model.blocks))
    best = Contenders(keep, has_families=has_families)
    tried, too_large, least, host = 0, 0, math.inf, math.inf
    for layout in layouts(question):
        for micro_batch in micro_batches(question, layout) if question.on_host(layout) else ():
            tried += 1
            note(f"{tried:,} settings tried")
            plain = dataclasses.replace(setting_of(question, layout, micro_batch), blocks=blocks)
            for offload in question.on_host(layout):
                setting = dataclasses.replace(plain, offload=offload)
                memory = tuple(peak_bytes(setting))
                least = min(least, max(one.total for one in memory))
                if has_room_as_planned(setting, memory):
                    best.fits(Candidate(setting, predict(setting), memory))
                    break
                if max(one.total for one in memory) <= question.device.memory_bytes:
                    host = min(host, host_bytes(setting))
            else:
                too_large += 1
                best.does_not_fit(setting, memory)
    return Found(tuple(best.best), tried, tried, too_large, least, host, best.families)


def setting_of(question: Question, layout: ResolvedLayout, micro_batch: int) -> Setting:
    """The setting of a layout, with nothing decided of its blocks."""
    found = Setting(
        model=question.model,
        cluster=question.cluster,
        sequence=question.sequence,
        global_batch=question.global_batch,
        micro_batch=micro_batch,
        layout=layout,
        software=question.software,
        precision=question.formats.base if question.formats else question.precision,
    )
    return (
        found
        if len(question.cluster.groups) == 1 or layout.stages is not None
        else dataclasses.replace(found, layout=in_proportion(found))
    )


def _promises(
    question: Question,
    quality: Quality | None,
    note: Callable[[str], None],
) -> list[_Waiting]:
    """All layouts and micro-batches, before the first door. Pipelines of zero 3 follow those of zero 1 with the same
    shards: these gather as much in forward passes, and reduce once a step."""
    waiting: list[_Waiting] = []
    leaders: dict[tuple[ResolvedLayout, int], _Waiting] = {}
    number, free = 0, quality.formats if quality else ()
    for layout in layouts(question):
        for micro_batch in micro_batches(question, layout) if question.on_host(layout) else ():
            setting = setting_of(question, layout, micro_batch)
            setting = dataclasses.replace(setting, offload=question.on_host(layout)[0])
            place = dataclasses.replace(layout, zero=1), micro_batch
            number += 1
            if layout.zero == 3 and place in leaders:
                leaders[place].followers.append(_Waiting(0.0, (number, 0), setting, free))
                continue
            waiting.append(_promise(setting, free, number))
            if layout.pp > 1 and layout.zero == 1:
                leaders[place] = waiting[-1]
            note(f"{number:,} settings found")
    return waiting


def _promise(setting: Setting, free: tuple[str, ...], number: int) -> _Waiting:
    return _Waiting(least_step_seconds(_unlimited(setting), free), (number, 0), setting, free)


def _unlimited(setting: Setting) -> Setting:
    """With blocks that need not save bytes."""
    plan = BlockPlan(gathered=True)
    return dataclasses.replace(setting, blocks=(plan,) * len(setting.model.blocks))


def _with_more_on_host(one: _Waiting, question: Question) -> list[_Waiting]:
    """The same with the next kind of states in host memory."""
    (number, level), levels = one.number, question.on_host(one.setting.layout)
    if level + 1 == len(levels):
        return []
    setting = dataclasses.replace(one.setting, offload=levels[level + 1])
    least = least_step_seconds(_unlimited(setting), one.free)
    return [_Waiting(least, (number, level + 1), setting, one.free)]


def _played(one: _Waiting) -> _Waiting:
    """After the second door."""
    rough = predict(_unlimited(one.setting), one.free)
    return dataclasses.replace(one, seconds=max(one.seconds, rough.least), rough=rough)


def _bounded(one: _Waiting, rough: Prediction, quality: Quality | None) -> tuple[_Waiting, Blocks]:
    """After the third one; seconds are infinite where it does not fit."""
    setting = one.setting
    blocks = Blocks(setting, quality)
    layout, rounds = setting.layout, setting.micro_batches
    # Of a V it is not known how much a rank waits at least.
    counted = 0.0 if splits_backward(layout) else 1.0 / setting.software.ranks_a_core
    weights = least_weights(layout.pp, layout.virtual or 1, rounds, counted=counted)
    sends = 2 * send_seconds(setting) * (layout.virtual or 1)
    passes = blocks.least_seconds(weights, sends)
    slower = rough.step_seconds / (rough.step_seconds - rough.seconds["other"])
    step = passes + rough.seconds["optimizer"]
    return dataclasses.replace(one, seconds=max(one.seconds, slower * step), blocks=blocks), blocks


def _solved(one: _Waiting) -> Candidate | None:
    """After the last one."""
    setting = one.blocks.solve() if one.blocks else None
    return _candidate(setting) if setting else None


def _candidate(setting: Setting) -> Candidate:
    return Candidate(setting, predict(setting), tuple(peak_bytes(setting)))


def _with_better_stages(one: Candidate, quality: Quality | None) -> Candidate | None:
    """The same layout with stages of other sizes, where they are faster."""

    def solved(setting: Setting) -> tuple[Setting, float] | None:
        found = Blocks(setting, quality).solve()
        return (found, predict(found).step_seconds) if found else None

    setting, seconds = improved(one.setting, one.seconds, solved)
    return _candidate(setting) if seconds < one.seconds else None


def layouts(like: Question) -> Iterator[ResolvedLayout]:
    """Those whose degrees divide what they share, and are as given."""
    given = {name: value for name, value in like.given.items() if name != "micro_batch"}
    for layout in _dividing(like):
        if all(getattr(layout, name) == value for name, value in given.items()):
            yield layout


def _dividing(like: Question) -> Iterator[ResolvedLayout]:
    model, devices = like.model, like.cluster.devices
    node = math.gcd(*(group.used for group in like.cluster.groups))
    attention = model.blocks[-1].attention
    heads = (attention.num_heads, attention.num_kv_heads)
    experts = max((one.experts for one in model.blocks[-1].linears), default=1)
    etp = like.given.get("etp", 1)
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
                if (readers * cp * tp) % (ep * etp) or (etp > 1 and experts == 1):
                    continue
                choices = itertools.product(_methods(like, tp, cp), range(1, _most_virtual(like, pp) + 1))
                for method, virtual in choices:
                    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "virtual": virtual}
                    for layout in _shared(readers, node, like, degrees | {"cp_method": method}):
                        yield from _staged(layout, like)


def _methods(like: Question, tp: int, cp: int) -> tuple[str, ...]:
    """How cp ranks may share attention."""
    attention, methods = like.model.blocks[-1].attention, like.software.cp_methods
    given = like.given.get("cp_method")
    if cp == 1 or given is not None:
        return (given,) if given else methods[:1]
    heads, keys = attention.num_heads // tp, attention.num_kv_heads // tp
    takes_heads = heads % cp == 0 and (keys % cp == 0 or cp % keys == 0)
    return tuple(one for one in methods if one != "ulysses" or takes_heads)


def _most_virtual(like: Question, pp: int) -> int:
    """Stages of a rank at most."""
    most = max(_MOST_VIRTUAL, like.given.get("virtual", 1))
    return min(most, len(like.model.blocks) // pp) if pp > 1 else 1


def micro_batches(like: Question, layout: ResolvedLayout) -> Iterator[int]:
    """Sequences of a pass, the fewest first."""
    share = like.global_batch // layout.data_ranks
    for size in _divisors(share):
        rounds = share // size
        if not schedule_fits(layout, rounds):
            continue
        if like.given.get("micro_batch", size) == size and like.may_be(layout, size):
            yield size


def _shared(readers: int, node: int, like: Question, degrees: Mapping[str, Any]) -> Iterator[ResolvedLayout]:
    """Copies and shards of so many ranks that read rows of their own; others than `layouts` tries where they are
    given."""
    given = like.given
    pp, zero = degrees["pp"], given.get("zero")
    # Weights may be shared within nodes alone.
    inside = node // math.gcd(node, degrees["tp"] * degrees["cp"])
    shards = {readers, inside} if 1 < inside < readers and readers % inside == 0 else {readers}
    if pp > 1 and zero is None:
        shards = {readers}
    sharded = shards if zero in (2, 3) or (zero is None and readers > 1) else set()
    pairs = [(readers, 1)] * (zero in (None, 1)) + [(fsdp, zero or 3) for fsdp in sorted(sharded)]
    if "dp" in given or "fsdp" in given:
        fsdp = given.get("fsdp") or max(1, readers // given["dp"])
        zeros = [zero] if zero else [1, 3] if fsdp > 1 else [1]
        pairs = [(fsdp, one) for one in zeros if readers % fsdp == 0]
    elif like.shares_all:
        stages = [zero] if zero else [3, 2, 1]
        pairs = [
            (fsdp, one)
            for fsdp in _divisors(readers)
            for one in (stages if fsdp * degrees["cp"] > 1 else stages[:1])
        ]
    for fsdp, one in pairs:
        yield ResolvedLayout(dp=readers // fsdp, fsdp=fsdp, zero=one, schedule="1f1b", **degrees)


def _is_split(stages: str | None, layout: ResolvedLayout, blocks: int) -> bool:
    """Whether sizes that are given, as 3,4,4,3, are those of so many blocks in the layout's stages."""
    if stages is None:
        return True
    try:
        check_sizes(stages, layout.pp * (layout.virtual or 1), blocks)
    except ConfigError:
        return False
    return True


def _staged(layout: ResolvedLayout, like: Question) -> Iterator[ResolvedLayout]:
    """With its schedule and stages, which are equal where they are not given."""
    usual = "interleaved" if (layout.virtual or 1) > 1 else "1f1b"
    if layout.pp == 1:
        if "stages" not in like.given:
            yield layout
        return
    schedule, stages = like.given.get("schedule", usual), like.given.get("stages")
    alike = {"interleaved": ("interleaved",), "1f1b": ("1f1b", "gpipe")}[usual]
    alike += V_SHAPED if layout.virtual == 2 else ()
    if schedule in alike and _is_split(stages, layout, len(like.model.blocks)):
        yield dataclasses.replace(layout, schedule=schedule, stages=stages)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
