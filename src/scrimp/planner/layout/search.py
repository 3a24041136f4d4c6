"""The layouts that a model can have on a cluster, the fastest first, and what spoke against the others.

Method   Of all layouts and micro-batches that there are (`questions`), what blocks do is decided together
         (`block_choices`). A candidate goes through five doors, each dearer than the one before, always the one that
         promises most::

             0  the least that any of a layout's micro-batches could take        `least_of_any_batch`
             1  its step if bytes and harm were free, with the least waiting       `least_step_seconds`
             2  whether it fits where it is leanest; the same with the pipeline    `Blocks.has_room`, `predict`
                played
             3  a bound of its step, with both limits priced                       `Blocks.least_seconds`
             4  its step                                                           `Blocks.solve`, `predict`

         The search ends where the next promise is worse than the plans that are wanted: whatever was not looked at is
         slower than they are.
         A pipeline promises what it would take in stages of better sizes (`balanced`); one that is solved, and might
         lead so, gets them where they are faster (`stage_sizes`).
         Pipelines of zero 3 are looked at once those of zero 1 are through, which in the same shards have the faster
         passes: where their memory is not what decides, none of the doors is opened for zero 3.
         What is given stays as it is, values among them that are not tried otherwise: copies beside shards, ZeRO
         stage 2 (whose step is that of zero 3 with all weights gathered), gpipe, zbv and dualpipev, sizes of stages.
Limits   Those of `questions`. Stages of what would not lead in perfect balance are as equal as they divide, or in
         proportion to their devices' rates.
Checked  tests/planner/layout/test_layout_search.py: brute force over all candidates
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scrimp.config.resolved import ResolvedLayout
from scrimp.planner.layout.block_choices import Blocks, has_room, has_room_as_planned, may_have_room
from scrimp.planner.layout.block_menus import Quality
from scrimp.planner.layout.contenders import Contenders, Family, Misfit
from scrimp.planner.layout.held_states import host_bytes
from scrimp.planner.layout.predict import (
    Passes,
    Prediction,
    least_of_any_batch,
    least_step_seconds,
    predict,
    rank_seconds,
    rank_weights,
    send_seconds,
)
from scrimp.planner.layout.questions import Question, layouts, micro_batches, setting_of
from scrimp.planner.layout.setting import BlockPlan, Setting
from scrimp.planner.layout.stage_memory import RankBytes, peak_bytes
from scrimp.planner.layout.stage_sizes import balanced, improved
from scrimp.planner.layout.stages import splits_backward

_MANY = 4
"""Micro-batches of a layout from which on it is asked first which of them have room."""


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
    """Those of the tried ones that were found to fit in no way, whatever is on the host."""
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
    has_own_sizes: bool = field(compare=False)
    """Whether the sizes of its stages are given."""
    rough: Prediction | None = field(compare=False, default=None)
    """Filled by the second door."""
    blocks: Blocks | None = field(compare=False, default=None)
    """The same."""
    balance: float = field(compare=False, default=1.0)
    """Share of its seconds that other sizes of stages may leave."""
    is_bounded: bool = field(compare=False, default=False)
    """Whether it went through the third one."""
    solved: Candidate | None = field(compare=False, default=None)
    """Filled by the fourth one, where stages of other sizes may be faster."""
    followers: list[_Waiting] = field(compare=False, default_factory=list)
    """The same whose ranks share weights too (`_layouts`); they wait until this one is through."""
    untried: tuple[tuple[ResolvedLayout, list[int]], ...] = field(compare=False, default=())
    """Layouts with their micro-batches, none of which was looked at alone: what is promised holds for all of them."""

    def released(self, known: _Known) -> Iterator[_Waiting]:
        """Followers that may still change anything: none takes less than the passes of this one."""
        seconds = self.balance * self.rough.passes if self.rough else self.seconds
        for one in self.followers:
            if known.best.may_take(one.setting.layout, seconds):
                own = _promise(one, known)
                yield dataclasses.replace(own, seconds=max(seconds, own.seconds))


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
    waiting = _layouts(question, quality, note)
    tried = sum(len(sizes) for one in waiting for _, sizes in one.untried)
    known = _Known(question, Contenders(keep, has_families=has_families), tried)
    heapq.heapify(waiting)
    while waiting:
        one = heapq.heappop(waiting)
        if one.untried:
            if any(known.best.may_take(layout, one.seconds) for layout, _ in one.untried):
                for other in _promises(one, known, quality):
                    heapq.heappush(waiting, other)
            continue
        if known.best.may_take(one.setting.layout, one.seconds):
            note(f"{known.tried:,} settings tried, {known.solved:,} of them solved block by block")
            following = _after_next_door(one, known, quality)
        else:
            following = one.released(known)
        for other in following:
            heapq.heappush(waiting, other)
    best = known.best
    if "stages" not in question.given:
        for lead in {id(one): one for one in best.families.values() if isinstance(one, Candidate)}.values():
            best.fits(_with_better_stages(lead, quality))
    return Found(
        tuple(best.best), known.tried, known.priced, known.too_large, known.least, known.host, best.families
    )


def _after_next_door(one: _Waiting, known: _Known, quality: Quality | None) -> Iterator[_Waiting]:
    """Take a candidate through its next door; gives what waits then."""
    if one.solved is not None:
        if known.best.may_lead(one.setting.layout, one.seconds):
            known.best.fits(_with_better_stages(one.solved, quality))
        return
    blocks = one.blocks or Blocks(one.setting, quality)
    if one.is_bounded:
        found = known.takes(one, blocks, _solved(blocks))
        yield from _with_other_stages(one, found)
        yield from one.released(known)
        return
    if one.rough is None:
        yield from _with_more_on_host(one, known)
        known.counts(one, blocks)
        following = _played(one, blocks, known) if blocks.has_room else None
    else:
        following = _bounded(one, blocks, one.rough)
    if following is not None and math.isfinite(following.seconds):
        yield following
    else:
        known.does_not_fit(one, blocks)
        yield from one.released(known)


@dataclass
class _Known:
    """What a search has found so far."""

    question: Question
    best: Contenders
    tried: int
    priced: int = 0
    solved: int = 0
    too_large: int = 0
    least: float = math.inf
    host: float = math.inf
    """The last three as `Found` has them."""
    failed: Counter[int] = field(default_factory=Counter)
    """With how many kinds of states on the host each layout was found not to fit."""
    passes: dict[Any, Passes] = field(default_factory=dict)
    """Those of blocks that save no bytes, by all that they depend on."""

    def passes_of(self, setting: Setting) -> Passes:
        """Those of settings that differ from this one in their stages alone."""
        layout = dataclasses.replace(setting.layout, virtual=1, stages=None, schedule="1f1b")
        place = (layout, setting.micro_batch, setting.offload, splits_backward(setting.layout))
        return self.passes.setdefault(place, {})

    def counts(self, one: _Waiting, blocks: Blocks) -> None:
        """Take in the bytes of a candidate."""
        self.priced += 1
        self.least = min(self.least, blocks.leanest_bytes)
        if blocks.leanest_bytes <= self.question.device.memory_bytes:
            self.host = min(self.host, host_bytes(one.setting))

    def takes(self, one: _Waiting, blocks: Blocks, found: Candidate | None) -> Candidate | None:
        """Take in one that was solved; gives it back."""
        self.solved += 1
        if found is None:
            self.does_not_fit(one, blocks)
        self.best.fits(found)
        return found

    def does_not_fit(self, one: _Waiting, blocks: Blocks) -> None:
        """Take in one that has no room."""
        number, levels = one.number[0], self.question.on_host(one.setting.layout)
        self.failed[number] += 1
        self.too_large += self.failed[number] == len(levels)
        self.best.does_not_fit(one.setting, blocks.leanest_memory)


def fits(question: Question, note: Callable[[str], None] = lambda how_far: None) -> bool:
    """Whether any layout fits: bytes are counted, no seconds.

    Args:
        note: as of `search`.
    """
    blocks = question.memory.blocks(len(question.model.blocks))
    for tried, layout in enumerate(layouts(question), start=1):
        note(f"{tried:,} layouts tried")
        sizes = list(micro_batches(question, layout))
        # Fewer sequences take less, but for all in one pass: no gradients are there while it runs forward.
        for size, offload in itertools.product(
            dict.fromkeys(sizes[:1] + sizes[-1:]), question.on_host(layout)
        ):
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


def _layouts(question: Question, quality: Quality | None, note: Callable[[str], None]) -> list[_Waiting]:
    """All layouts that there are, before any door. Pipelines of zero 3 go with those of zero 1 in the same shards and
    no copies: these gather as much in forward passes, and reduce once a step."""
    groups: dict[ResolvedLayout, list[ResolvedLayout]] = {}
    for layout in layouts(question):
        follows = layout.pp > 1 and layout.dp == 1
        groups.setdefault(dataclasses.replace(layout, zero=1) if follows else layout, []).append(layout)
    found, number, free = [], 0, quality.formats if quality else ()
    for members in groups.values():
        members.sort(key=lambda one: one.zero)
        sizes = [list(micro_batches(question, one)) if question.on_host(one) else [] for one in members]
        if any(sizes):
            first = members[0]
            whole = setting_of(question, first, question.global_batch // first.data_ranks)
            best = dataclasses.replace(_unlimited(whole), offload=question.on_host(first)[0])
            seconds = least_of_any_batch(best, min(map(min, filter(None, sizes))), free)
            one = _Waiting(seconds, (number, 0), best, free, "stages" in question.given)
            found.append(dataclasses.replace(one, untried=tuple(zip(members, sizes, strict=True))))
            number += sum(map(len, sizes))
            note(f"{number:,} settings found")
    return found


def _promises(group: _Waiting, known: _Known, quality: Quality | None) -> Iterator[_Waiting]:
    """The micro-batches of a layout before the first door, but for those that are too large: of what fits in no way
    the smallest one alone, and all sequences in one."""
    leaders: dict[int, _Waiting] = {}
    number, question = group.number[0], known.question
    for layout, sizes in group.untried:
        levels = question.on_host(layout)
        some = _with_room(question, quality, layout, sizes)
        known.too_large += len(sizes) - len(some)
        known.priced += len(sizes) - len(some)
        for size in some:
            setting = dataclasses.replace(setting_of(question, layout, size), offload=levels[0])
            number += 1
            one = _Waiting(0.0, (number, 0), setting, group.free, group.has_own_sizes)
            if size in leaders:
                leaders[size].followers.append(one)
            else:
                leaders[size] = _promise(one, known)
    yield from leaders.values()


def _with_room(
    question: Question, quality: Quality | None, layout: ResolvedLayout, sizes: list[int]
) -> list[int]:
    """The micro-batches, ascending, without those that devices do not hold whatever lives on the host."""
    if len(sizes) < _MANY:
        return sizes
    whole = question.global_batch // layout.data_ranks
    several = [size for size in sizes if size < whole]

    def lacks(size: int) -> bool:
        setting = setting_of(question, layout, size)
        # Of one large block among small ones two visit the device, which may be more than all that left it.
        levels = (dataclasses.replace(setting, offload=one) for one in reversed(question.on_host(layout)))
        return not any(may_have_room(level, quality) for level in levels)

    if several and lacks(several[-1]):
        several = several[: max(1, bisect.bisect_left(several, True, key=lacks))]
    return several + [size for size in sizes if size == whole]


def _promise(one: _Waiting, known: _Known) -> _Waiting:
    """Before the first door, with what it promises."""
    best = _unlimited(one.setting)
    busy = rank_seconds(best, one.free, known.passes_of(one.setting))
    share = 1.0 if one.has_own_sizes else balanced(best, busy)[1]
    return dataclasses.replace(one, seconds=share * least_step_seconds(best, one.free, busy), balance=share)


def _unlimited(setting: Setting) -> Setting:
    """With blocks that need not save bytes."""
    plan = BlockPlan(gathered=True)
    return dataclasses.replace(setting, blocks=(plan,) * len(setting.model.blocks))


def _with_more_on_host(one: _Waiting, known: _Known) -> list[_Waiting]:
    """The same with the next kind of states in host memory."""
    (number, level), levels = one.number, known.question.on_host(one.setting.layout)
    if level + 1 == len(levels):
        return []
    setting = dataclasses.replace(one.setting, offload=levels[level + 1])
    return [_promise(_Waiting(0.0, (number, level + 1), setting, one.free, one.has_own_sizes), known)]


def _with_other_stages(one: _Waiting, found: Candidate | None) -> list[_Waiting]:
    """The same once it is solved, where blocks may move between its stages."""
    share = 1.0 if one.has_own_sizes or found is None else balanced(found.setting)[1]
    if found is None or share == 1.0:
        return []
    return [dataclasses.replace(one, seconds=share * found.seconds, solved=found, followers=[])]


def _played(one: _Waiting, blocks: Blocks, known: _Known) -> _Waiting:
    """After the second door."""
    rough = predict(_unlimited(one.setting), one.free, known.passes_of(one.setting))
    return dataclasses.replace(
        one, seconds=max(one.seconds, one.balance * rough.least), rough=rough, blocks=blocks
    )


def _bounded(one: _Waiting, blocks: Blocks, rough: Prediction) -> _Waiting:
    """After the third one; seconds are infinite where it does not fit."""
    setting = one.setting
    sends = 2 * send_seconds(setting) * (setting.layout.virtual or 1)
    passes = blocks.least_seconds(rank_weights(setting), sends)
    slower = rough.step_seconds / (rough.step_seconds - rough.seconds["other"])
    step = passes + rough.seconds["optimizer"]
    return dataclasses.replace(one, seconds=max(one.seconds, one.balance * slower * step), is_bounded=True)


def _solved(blocks: Blocks) -> Candidate | None:
    """After the last one."""
    setting = blocks.solve()
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
