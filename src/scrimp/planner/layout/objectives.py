"""What a search is for: the fastest step, the cheapest tokens, the fewest devices, the longest sequence, or the largest
model.

Method   Each is the search of `search.py` over a series of questions that differ in one number::

             step-time         one question
             cost              clusters up to the one that is named (`sizes_like`); the least price of a token, of those
                               in time where days are given
             smallest-cluster  clusters from the smallest one up to the first that trains the tokens in time, then
                               sizes between it and the one before. Those whose peak rate is too low for it are left
                               out unsearched. It ends where twice in a row more devices are not faster.
             longest-context   sequences that divide the tokens of a batch, from the longest down; the first that fits
             largest-model     models of the same shape (`scaled_models`): doubled until none fits, then the largest by
                               halving the interval

         With R the price of a device per hour and n devices::

             days = tokens / tokens of a step * seconds of a step / 86,400        cost = 24 days n R

Limits   A size between two that are late is not always tried. That what is smaller fits is taken for granted where an
         interval is halved. Whether positions are good for a longer sequence is not asked, but for learned ones.
Checked  tests/planner/layout/test_objectives.py: against all sizes, sequences and models one by one
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from scrimp.errors import PlanError
from scrimp.planner.hardware import Cluster, Kind
from scrimp.planner.layout.cluster_sizes import sizes_between, sizes_like
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.scaled_models import ModelFamily
from scrimp.planner.layout.search import Candidate, Found, fits, search

Objective = Literal["step-time", "cost", "smallest-cluster", "longest-context", "largest-model"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
DAY = 86_400.0
_KINDS: tuple[Kind, ...] = get_args(Kind)
_MOST_TOKENS, _MOST_DAYS = 1e18, 1e5
_MOST_TIMES = 64
"""Times the width of the given model that are tried."""
_LEAST_SEQUENCE = 128
_IDLE = 2
"""Sizes in a row that are not faster, nor need fewer bytes of a device."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is wanted of the whole training."""

    objective: Objective = "step-time"
    tokens: float | None = None
    """To train."""
    days: float | None = None
    """That it may take."""

    def __post_init__(self) -> None:
        tokens, days = self.tokens, self.days
        if tokens is not None and not 1 <= tokens <= _MOST_TOKENS:
            raise PlanError("tokens are out of range", got=tokens, expected=f"1 to {_MOST_TOKENS:g}")
        if days is not None and not 0 < days <= _MOST_DAYS:
            raise PlanError(
                "days are out of range", got=days, expected=f"more than 0, at most {_MOST_DAYS:,.0f}"
            )
        if days is not None and tokens is None:
            raise PlanError(
                "days say by when, and nothing says what",
                got=f"{days:g} days, no tokens",
                do="give tokens, as 15T",
            )
        if self.objective == "smallest-cluster" and days is None:
            raise PlanError(
                "the smallest cluster is one that trains so many tokens in so many days",
                got="no days" if tokens else "neither tokens nor days",
                do="give both, as 15T tokens in 30 days",
            )


@dataclass(frozen=True, kw_only=True)
class Searching:
    """How each question is searched."""

    note: Callable[[str], None] = lambda how_far: None
    about: Callable[[str], None] = lambda what: None
    """Told what is searched now."""
    keep: int = 5

    def search(self, question: Question, what: str = "") -> Found:
        """The best layouts, and the best of each family."""
        self.about(what)
        return search(question, keep=self.keep, note=self.note)

    def best(self, question: Question, what: str = "") -> Found:
        """The best layout alone, which is found in half of the time."""
        self.about(what)
        return search(question, keep=1, note=self.note, has_families=False)

    def fits(self, question: Question, what: str = "") -> bool:
        """Whether there is one."""
        self.about(what)
        return fits(question, self.note)


AT_PEAK = "too slow at its peak rate"
"""What is said of a size that was not searched."""


@dataclass(frozen=True)
class Trial:
    """One question of the series."""

    name: str
    question: Question
    best: Candidate | None
    """None: nothing fits, or was not searched."""
    note: str = ""
    """Why it is not the answer."""


@dataclass(frozen=True)
class Answer:
    """What an objective comes to."""

    question: Question
    found: Found
    trials: tuple[Trial, ...] = ()
    """All that was tried, if it was more than one."""


def days_of(question: Question, seconds: float, tokens: float) -> float:
    """Days that so many tokens take at so many seconds a step."""
    return tokens / (question.sequence * question.global_batch) * seconds / DAY


def price_of(cluster: Cluster) -> float:
    """US dollars of an hour."""
    return sum(group.devices * group.node.device.price_per_hour for group in cluster.groups)


def cost_of(question: Question, seconds: float, tokens: float) -> float:
    """US dollars of so many tokens."""
    return 24.0 * days_of(question, seconds, tokens) * price_of(question.cluster)


def answered(
    question: Question, goal: Goal, searching: Searching, family: Callable[[], ModelFamily]
) -> Answer:
    """The answer to a question by its goal.

    Args:
        family: models to choose the largest from; asked for by that goal alone.

    Raises:
        PlanError: no size is in time; a price is not known.
    """
    if goal.objective == "cost":
        return _cheapest(question, goal, searching)
    if goal.objective == "smallest-cluster":
        return _smallest(question, goal, searching)
    if goal.objective == "longest-context":
        return _longest(question, searching)
    if goal.objective == "largest-model":
        return _largest(question, searching, family())
    return Answer(question, searching.search(question))


def _cheapest(question: Question, goal: Goal, searching: Searching) -> Answer:
    if not price_of(question.cluster):
        raise PlanError(
            "the hardware has no price",
            got=f"price_per_hour 0 of {question.device.name}",
            do="write price_per_hour into a hardware file, or ask for another objective",
        )
    trials: list[Trial] = []
    best: tuple[float, Question] | None = None
    for cluster in _up_to(question.cluster):
        found, trial = _tried(question, cluster, goal, searching)
        trials.append(trial)
        if not found.best or trial.note:
            continue
        cost = cost_of(trial.question, found.best[0].seconds, 1.0)
        if best is None or cost < best[0]:
            best = (cost, trial.question)
    if best is None and any(trial.best for trial in trials):
        raise _too_late(trials, goal)
    chosen = question if best is None else best[1]
    return Answer(chosen, searching.search(chosen, chosen.cluster.name), tuple(trials))


def _smallest(question: Question, goal: Goal, searching: Searching) -> Answer:
    assert goal.tokens is not None
    assert goal.days is not None
    rate = max(question.device.unit(kind) or 0.0 for kind in _KINDS)
    flops = question.model.flops_per_token(question.sequence) * goal.tokens
    least = flops / rate / (goal.days * DAY)
    trials: list[Trial] = []
    fastest, leanest, idle, before = float("inf"), float("inf"), 0, None

    def tried(cluster: Cluster) -> tuple[Found | None, Trial]:
        if cluster.devices < least:
            late = dataclasses.replace(question, cluster=cluster)
            return None, Trial(cluster.name, late, None, AT_PEAK)
        return _tried(question, cluster, goal, searching)

    for cluster in sizes_like(question.cluster):
        found, trial = tried(cluster)
        if trial.best and not trial.note:
            trials += _down_to_the_fewest(before, trial, lambda one: tried(one)[1])
            chosen = trials[-1]
            return Answer(chosen.question, searching.search(chosen.question, chosen.name), tuple(trials))
        trials.append(trial)
        before = cluster
        if found is None:
            continue
        seconds = found.best[0].seconds if found.best else float("inf")
        idle = 0 if seconds < fastest or found.nearest_bytes < 0.99 * leanest else idle + 1
        fastest, leanest = min(fastest, seconds), min(leanest, found.nearest_bytes)
        if idle == _IDLE:
            break
    raise _too_late(trials, goal)


def _down_to_the_fewest(
    late: Cluster | None, in_time: Trial, tried: Callable[[Cluster], Trial]
) -> list[Trial]:
    """What is tried between a cluster that is late and one in time: some sizes, then some between the last of these
    that is late and the first that is not, until none is left; that one is the last."""
    trials = []
    while late is not None and (between := sizes_between(late, in_time.question.cluster)):
        for trial in map(tried, between):
            if trial.best and not trial.note:
                in_time = trial
                break
            trials.append(trial)
            late = trial.question.cluster
    return [*trials, in_time]


def _tried(question: Question, cluster: Cluster, goal: Goal, searching: Searching) -> tuple[Found, Trial]:
    """The question on another cluster."""
    one = dataclasses.replace(question, cluster=cluster)
    found = searching.best(one, cluster.name)
    return found, Trial(cluster.name, one, next(iter(found.best), None), _late(one, found, goal))


def _late(question: Question, found: Found, goal: Goal) -> str:
    if not found.best:
        return "no layout" if not found.tried else "does not fit"
    if goal.tokens is None or goal.days is None:
        return ""
    return "" if days_of(question, found.best[0].seconds, goal.tokens) <= goal.days else "too slow"


def _too_late(trials: list[Trial], goal: Goal) -> PlanError:
    assert goal.tokens is not None
    late = "no cluster of these devices trains so many tokens in time"
    if not any(trial.best for trial in trials):
        if any(trial.note == AT_PEAK for trial in trials):
            return PlanError(
                late,
                got=f"{goal.days:g} days; up to {trials[-1].name} all are {AT_PEAK}",
                do="give more days or fewer tokens",
            )
        return PlanError(
            "no cluster of these devices trains the model",
            got=f"{len(trials)} sizes tried, up to {trials[-1].name}",
            do="name larger devices, or take shorter sequences or a smaller model",
        )
    days, name = min(
        (days_of(trial.question, trial.best.seconds, goal.tokens), trial.name)
        for trial in trials
        if trial.best
    )
    return PlanError(
        late,
        got=f"{goal.days:g} days; the fastest that was tried, {name}, takes {days:,.1f}",
        do="give more days or fewer tokens, "
        + (
            "or name more devices"
            if goal.objective == "cost"
            else "or a larger train.batch_tokens, which more can share"
        ),
    )


def _longest(question: Question, searching: Searching) -> Answer:
    tokens, most = question.sequence * question.global_batch, question.model.learned_positions
    trials: list[Trial] = []
    for sequence in _sequences(tokens, most):
        one = dataclasses.replace(question, sequence=sequence, global_batch=tokens // sequence)
        name = f"{sequence:,} tokens"
        found = searching.search(one, name) if searching.fits(one, name) else None
        if found and found.best:
            trials.append(Trial(name, one, found.best[0]))
            return Answer(one, found, tuple(trials))
        trials.append(Trial(name, one, None, "does not fit"))
    return Answer(question, searching.search(question))


def _sequences(tokens: int, most: int) -> Iterator[int]:
    """Lengths that divide a batch, the longest first."""
    for number in range(1, tokens // _LEAST_SEQUENCE + 1):
        length, rest = divmod(tokens, number)
        if not rest and not length % _LEAST_SEQUENCE and length <= (most or tokens):
            yield length


def _largest(question: Question, searching: Searching, family: ModelFamily) -> Answer:
    trials: list[Trial] = []

    def is_held(number: int) -> bool:
        member = family.member(number)
        one = dataclasses.replace(question, model=member.model)
        held = searching.fits(one, member.text)
        trials.append(Trial(member.text, one, None, "smaller" if held else "does not fit"))
        return held

    low, high = 0, family.given
    while high <= _MOST_TIMES * family.given and is_held(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_held(middle) else (low, middle)
    if not low:
        return Answer(question, searching.search(question))
    member = family.member(low)
    one = dataclasses.replace(question, model=member.model)
    found = searching.search(one, member.text)
    chosen = [
        Trial(each.name, each.question, next(iter(found.best), None)) if each.name == member.text else each
        for each in trials
    ]
    return Answer(one, found, tuple(sorted(chosen, key=lambda each: each.question.model.parameters)))


def _up_to(cluster: Cluster) -> Iterator[Cluster]:
    """Smaller ones, and itself."""
    for one in sizes_like(cluster, cluster.devices):
        if one.devices < cluster.devices:
            yield one
    yield cluster
