"""What is asked of a search, and the layouts that answer it: those whose degrees divide what they share.

Method   tp divides the heads, key heads, widths and the devices of a node; pp the blocks; cp the sequence; ep the
         experts. Copies are shards, or without a pipeline whole nodes of shards; where `Question.shares_all` all
         copies, shards and stages of ZeRO that there are. For each, micro-batches and stages of a rank that the batch
         and the blocks allow. What is given stays as it is.
Checked  tests/planner/layout/test_layout_search.py, test_divisibility.py
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scrimp.config.pipeline import V_SHAPED
from scrimp.config.pipeline import fits as schedule_fits
from scrimp.config.resolved import ResolvedLayout
from scrimp.models.shapes import ModelSizes
from scrimp.planner.hardware import Cluster, Device
from scrimp.planner.layout.degree_checks import exchanges_heads, experts_of, shared_by_tp
from scrimp.planner.layout.execution import usual_execution
from scrimp.planner.layout.format_budget import FormatBudget
from scrimp.planner.layout.given_memory import GivenMemory
from scrimp.planner.layout.setting import Offload, Setting
from scrimp.planner.layout.software import OWN, Software
from scrimp.planner.layout.stage_sizes import in_proportion, is_split

_MOST_VIRTUAL = 8
ON_HOST = (
    Offload(),
    Offload(optimizer=True),
    Offload(optimizer=True, master=True),
    Offload(optimizer=True, master=True, gradients=True),
    Offload(optimizer=True, master=True, gradients=True, weights=True),
)
"""States in host memory, each with all before it: those that are met least often first."""
OWN_ON_HOST = (*ON_HOST[:1], *ON_HOST[2:])
"""Those of Scrimp, whose moments leave with their masters."""


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
    """The recipe of all products, where `formats` leaves nothing to choose."""
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
        """The states that may live in host memory; none, not even no states, where what is given cannot be: Scrimp has
        states and activations there without pipelines alone."""
        given, is_whole = self.memory.offload, layout.pp == 1
        if not is_whole and (given not in (None, Offload()) or self.memory.sends_activations):
            return ()
        is_own = self.software.name in OWN
        known = OWN_ON_HOST if is_own else ON_HOST
        levels = known[: None if is_whole else 1] if given is None else (given,)
        if is_own and not self.software.master_bytes:
            levels = tuple(dataclasses.replace(one, master=False) for one in levels)
        return levels

    @property
    def device(self) -> Device:
        """That computes; of several kinds the slowest."""
        return min(
            (group.node.device for group in self.cluster.groups), key=lambda one: one.rate("bf16") or 0.0
        )


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
        execution=usual_execution(question.software.name, question.model, question.cluster, layout),
    )
    return (
        found
        if len(question.cluster.groups) == 1 or layout.stages is not None
        else dataclasses.replace(found, layout=in_proportion(found))
    )


def layouts(like: Question) -> Iterator[ResolvedLayout]:
    """Those whose degrees divide what they share, and are as given."""
    given = {name: value for name, value in like.given.items() if name != "micro_batch"}
    for layout in _dividing(like):
        if all(getattr(layout, name) == value for name, value in given.items()):
            yield layout


def _dividing(like: Question) -> Iterator[ResolvedLayout]:
    model, devices = like.model, like.cluster.devices
    node = math.gcd(*(group.used for group in like.cluster.groups))
    sizes = (model.vocab_size, *(count for count, _ in shared_by_tp(model, like.sequence)))
    experts = experts_of(model)
    etp = like.given.get("etp", 1)
    for tp in _divisors(node):
        if any(size % tp for size in sizes):
            continue
        for pp, cp in itertools.product(_divisors(devices // tp), _divisors(devices // tp)):
            readers, rest = divmod(devices, tp * pp * cp)
            if tp > 1 and cp > 1 and not like.software.cuts_shared_rows:
                continue
            parts = 2 * cp * tp if cp > 1 else tp
            if rest or pp > len(model.blocks) or like.sequence % parts or like.global_batch % readers:
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
    attention, given = like.model.blocks[-1].attention, like.given.get("cp_method")
    methods = like.software.cp_methods if given is None else (given,)
    if cp == 1:
        return methods[:1]
    return tuple(one for one in methods if one != "ulysses" or exchanges_heads(attention, tp, cp))


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
    pp, cp, zero = degrees["pp"], degrees["cp"], given.get("zero")
    # Weights may be shared within nodes alone.
    inside = node // math.gcd(node, degrees["tp"] * cp)
    shards = {readers, inside} if 1 < inside < readers and readers % inside == 0 else {readers}
    if pp > 1 and zero is None:
        shards = {readers}
    sharded = shards if zero in (2, 3) or (zero is None and readers * cp > 1) else set()
    pairs = [(readers, 1)] * (zero in (None, 1)) + [(fsdp, zero or 3) for fsdp in sorted(sharded)]
    if "dp" in given or "fsdp" in given:
        fsdp = given.get("fsdp") or max(1, readers // given["dp"])
        zeros = [zero] if zero else [1, 3] if fsdp * cp > 1 else [1]
        pairs = [(fsdp, one) for one in zeros if readers % fsdp == 0]
    elif like.shares_all:
        stages = [zero] if zero else [3, 2, 1]
        pairs = [
            (fsdp, one) for fsdp in _divisors(readers) for one in (stages if fsdp * cp > 1 else stages[:1])
        ]
    for fsdp, one in pairs:
        yield ResolvedLayout(dp=readers // fsdp, fsdp=fsdp, zero=one, schedule="1f1b", **degrees)


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
    if schedule in alike and is_split(stages, layout, len(like.model.blocks)):
        yield dataclasses.replace(layout, schedule=schedule, stages=stages)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
