"""The layout of a run, proven by its first steps: predicted beside measured, and what the difference teaches.

Problem  A layout is chosen by predictions. Whether ranks do what was planned, and as fast, only steps show.
Method   `rows_of` puts beside one another: seconds of a step (where ranks were measured before the run, or those of
         the saved plan that it trains by), the peak of each rank, and for each axis the collectives of rank 0 and the
         bytes that it sends in them (`scrimp.planner.axis_traffic`). A collective belongs to the axes in which the
         ranks of its group differ.
         A step of t seconds, e of them in exchanges, corrects rates of computing and of exchanging::

             slower_c = (t - e) / (t' - e')        slower_e = (e - a' slower_c) / (e' - a')      (primes: predicted)

         with a the seconds of exchanges that are copies in memory, not links; where e is not known (on CUDA calls
         return before they are over), both are t / t'.
         With corrected rates the open layouts are predicted again. With s' seconds of a step in the best of them, s in
         this one, and n steps left, another one is advised where n (s - s') is more than the seconds of a restart.
Limits   Collectives are counted within the passes of a step and the sums over copies; those of whole copies and of cp
         are not predicted, nor anything of pipelines, of experts, of copies that train alone and of models that learn
         from their own average. Seconds in exchanges
         are with waits for slower ranks. A restart is taken to cost what this start did.
Checked  tests/training/test_layout_proof.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scrimp.config import Resolution, ResolvedConfig, replace_values
from scrimp.config.own_average import learns_from_average
from scrimp.models import ModelSpec, spec_of
from scrimp.planner.axis_traffic import degrees_of, traffic_of
from scrimp.planner.layout.predict import Prediction, predict
from scrimp.planner.rank_placement import AxisTraffic
from scrimp.profiler.collectives import Collective
from scrimp.profiler.measured_cluster import RankRates
from scrimp.report.units import format_bytes, format_duration
from scrimp.training.chosen_layout import ChosenLayout, RanksHere, choose_on, step_of_run
from scrimp.training.measured_ranks import scaled
from scrimp.training.setup import Decisions

TOLERANCE = 0.1
_LEAST = 1e-3
"""Share of its predicted seconds that a link takes at least."""
_COUNTED = {
    ("fsdp", "cp"): ("all-gather", "reduce-scatter"),
    ("dp",): ("all-reduce",),
    ("tp",): ("all-gather", "reduce-scatter"),  # those of norms and of the loss are not predicted
    ("cp",): ("send", "all-to-all"),
}
"""Axes to the collectives that their prediction is of."""


@dataclass(frozen=True)
class Row:
    """A figure of a step."""

    name: str
    predicted: float | None
    measured: float | None
    text: Callable[[float], str]

    @property
    def off(self) -> float | None:
        """Measured over predicted, less one; None where one of them is not known."""
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted - 1.0

    @property
    def is_off(self) -> bool:
        """Whether they differ by more than the tolerance."""
        return self.off is not None and abs(self.off) > TOLERANCE


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of a start measured."""

    seconds: float
    """Seconds of one step on the slowest rank."""
    exchange_seconds: float | None
    """Those in exchanges, the mean of the ranks; None: not known."""
    peaks: Sequence[int | None]
    """Bytes on the device, by rank."""
    calls: Sequence[Collective]
    """Collectives that rank 0 calls in one step."""


def prediction_of(decisions: Decisions, here: RanksHere) -> Prediction | None:
    """The step of a run as it is carried out; None where the model of the search does not know it."""
    kind, activations = decisions.device.torch_device.type, decisions.plan.placement.activations
    setting = step_of_run(decisions.config, decisions.architecture, here.cluster, activations, kind)
    return None if setting is None else predict(setting)


def rows_of(decisions: Decisions, prediction: Prediction | None, measured: FirstSteps) -> list[Row]:
    """All figures, those of time first."""
    config = decisions.config
    seconds = decisions.planned_seconds if prediction is None else prediction.step_seconds
    rows = [Row("seconds of a step", seconds, measured.seconds, format_duration)]
    rows += _peaks(decisions, measured)
    spec = spec_of(decisions.architecture)
    is_known = config.layout.pp == 1 and config.outer.every == 0 and spec.routing is None
    is_known = is_known and not learns_from_average(config.objective)
    return rows + exchange_rows(config, spec if is_known else None, measured.calls)


def _peaks(decisions: Decisions, measured: FirstSteps) -> list[Row]:
    figures, peaks = decisions.plan.predicted, measured.peaks
    stages = figures.stage_bytes
    if stages:
        each = len(peaks) // len(stages)
        found = [_largest(peaks[rank * each : (rank + 1) * each]) for rank in range(len(stages))]
        return [
            Row(f"peak of rank {rank} of the pipeline", stage, peak, _bytes)
            for rank, (stage, peak) in enumerate(zip(stages, found, strict=True))
        ]
    return [Row("peak of a rank", figures.peak_device_bytes, _largest(peaks), _bytes)]


def _largest(peaks: Iterable[int | None]) -> int | None:
    return max((one for one in peaks if one is not None), default=None)


def exchange_rows(config: ResolvedConfig, spec: ModelSpec | None, calls: Sequence[Collective]) -> list[Row]:
    """Collectives and bytes of each axis; of those that nothing predicts, as they were counted.

    Args:
        spec: of a model and a layout whose exchanges are predicted; else None.
    """
    traffic = [] if spec is None else traffic_of(spec, config)
    degrees = degrees_of(config.layout)
    found: dict[str, tuple[AxisTraffic | None, list[Collective]]] = {
        f"{'/'.join(one.axes)} {' and '.join(_COUNTED[one.axes])}": (one, []) for one in traffic
    }
    for call in calls:
        axes = axes_of(call.members, list(degrees.values()), list(degrees))
        if not axes:
            continue
        name = next(
            (
                key
                for key, (one, _) in found.items()
                if one and set(axes) <= set(one.axes) and call.operation in _COUNTED[one.axes]
            ),
            f"{'/'.join(axes)} {call.operation}",
        )
        found.setdefault(name, (None, []))[1].append(call)
    rows = []
    for name, (one, own) in found.items():
        sent = sum(call.sent for call in own)
        count, num_bytes = (None, None) if one is None else (one.calls, one.num_bytes)
        rows.append(Row(f"{name}: collectives", count, len(own), lambda figure: f"{figure:,.0f}"))
        rows.append(Row(f"{name}: bytes sent", num_bytes, sent, _bytes))
    return rows


def axes_of(members: Sequence[int], degrees: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
    """Axes of a mesh, the outermost first, in which some ranks differ."""
    found, step = [], math.prod(degrees)
    for name, degree in zip(names, degrees, strict=True):
        step //= degree
        if len({member // step % degree for member in members}) > 1:
            found.append(name)
    return tuple(found)


def table_of(rows: Sequence[Row], title: str) -> str:
    """For people: one line a row, what is off by more than the tolerance last."""
    cells = [("", "predicted", "measured", "")]
    for row in rows:
        before, after = ("-" if one is None else row.text(one) for one in (row.predicted, row.measured))
        cells.append((row.name, before, after, "" if row.off is None else f"{100 * row.off:+.1f} %"))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = [title]
    for name, *values in cells:
        figures = (value.rjust(width) for value, width in zip(values, widths[1:], strict=True))
        lines.append(f"  {name.ljust(widths[0])}  {'  '.join(figures)}".rstrip())
    off = [row.name for row in rows if row.is_off]
    lines.append(f"  off by more than {100 * TOLERANCE:.0f} %: {'; '.join(off) or 'nothing'}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Correction:
    """How many times longer things take than predicted."""

    computing: float
    exchanging: float


def correction_of(decisions: Decisions, here: RanksHere, measured: FirstSteps) -> Correction:
    """The factors of the model that a measured step says."""

    def at(rates: RankRates) -> Prediction:
        found = prediction_of(decisions, replace(here, rates=rates))
        assert found is not None  # a layout that runs
        return found

    free = at(replace(here.rates, link=math.inf, latency_seconds=0.0))
    return factors_of(at(here.rates), free, measured)


def factors_of(whole: Prediction, free: Prediction, measured: FirstSteps) -> Correction:
    """The same by the formulas above.

    Args:
        whole: the predicted step.
        free: the same, where messages cost nothing.
    """
    step, own = whole.step_seconds, measured.exchange_seconds
    exchanges, copies = (one.seconds["communication_exposed"] for one in (whole, free))
    share = (step - whole.seconds["other"]) / step  # the rest is a share of all
    computing = exchanging = measured.seconds / step
    if own is not None and 0 < own < share * measured.seconds and copies < exchanges < share * step:
        computing = (share * measured.seconds - own) / (share * step - exchanges)
        on_links = exchanges - copies
        exchanging = max(own - copies * computing, _LEAST * on_links) / on_links
    return Correction(computing, exchanging)


def corrected(rates: RankRates, correction: Correction) -> RankRates:
    """Rates by which a step takes what it took."""
    slower = correction.exchanging
    found = scaled(rates, 1.0 / correction.computing)
    return replace(found, link=rates.link / slower, latency_seconds=rates.latency_seconds * slower)


def better_layout(decisions: Decisions, here: RanksHere) -> ChosenLayout | None:
    """Another layout that is predicted to be clearly faster, with corrected rates."""
    chosen = decisions.config.optimizer  # asked for may be `auto`, which a search does not know
    found = choose_on(
        here.cluster,
        replace_values(decisions.asked, {"optimizer.name": chosen.name, "optimizer.rank": chosen.rank}),
        Resolution(decisions.config, decisions.architecture, {}),
        decisions.architecture,
        device_type=decisions.device.torch_device.type,
        given=decisions.given,
    )
    return found if found is not None and found.is_other else None


def saved_seconds(found: ChosenLayout) -> float:
    """Seconds that another layout saves in each step; 0 where this one, which runs, is not predicted to fit."""
    return 0.0 if found.before is None else found.before.seconds - found.best.seconds


def is_worth(found: ChosenLayout, steps_left: int, restart_seconds: float) -> bool:
    """Whether going on in another layout saves more than a restart takes."""
    return steps_left * saved_seconds(found) > restart_seconds


def _bytes(count: float) -> str:
    return format_bytes(round(count))
