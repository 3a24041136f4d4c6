"""The charts of a run: which quantities share a figure, on which axis.

Loss gets the width of the page, in linear or in logarithmic steps. Raw values are faint, the
centred mean over them is bold; held-out values are dots. Utilisation and memory show what was
predicted as a dashed line beside what was measured. Every legend says which is which.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np

from scrimp.report.charts import Chart, Kind, Mark, Series, Unit, render
from scrimp.report.curves import Array, smooth
from scrimp.report.html import Markup, tag
from scrimp.report.read_run import RunRecord, mapping
from scrimp.report.summary import full_to_causal
from scrimp.report.units import (
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    format_rate,
    is_number,
)

_MARK_PLACES = 100
_SMOOTH_FROM = 30
"""Steps from which a mean is drawn over the raw values."""


def loss_figure(run: RunRecord) -> Markup:
    """The loss over linear or logarithmic steps, with the events of the run."""
    held_out = run.evaluations("eval_loss", "loss")
    series = _smoothed(run, "loss", "training")
    series.append(
        Series(
            name="held out", steps=held_out[0], values=held_out[1], kind="dots", colour=2, decides_range=True
        )
    )
    chart = Chart(
        slug="loss",
        title="Loss",
        subtitle="Cross-entropy in nats per token, measured, by optimizer step",
        series=series,
        format=format_number,
        log_steps=run.num_steps >= 10,
        height=300,
        marks=_marks(run),
        note=_mark_note(run),
    )
    return render(chart)


def small_figures(run: RunRecord) -> Markup:
    """All other charts, two beside each other where there is room."""
    charts = [
        Chart(
            slug="lr",
            title="Learning rate",
            subtitle="As set by the schedule",
            series=[_series(run, "lr", "learning rate")],
            format=partial(format_number, digits=3),
            zero=True,
        ),
        Chart(
            slug="grad-norm",
            title="Gradient norm",
            subtitle="Global, before clipping, measured; log scale",
            series=_smoothed(run, "grad_norm", "gradient norm"),
            format=partial(format_number, digits=3),
            log=True,
        ),
        Chart(
            slug="throughput",
            title="Throughput",
            subtitle="Trained tokens per second, measured",
            series=_smoothed(run, "tokens_per_s", "tokens/s"),
            format=format_rate,
            unit=Unit(prefixes=True),
            zero=True,
        ),
        _utilisation(run),
        _memory(run),
        _wait(run),
    ]
    return tag("div", *[render(chart) for chart in charts], class_="grid-two")


def _utilisation(run: RunRecord) -> Chart:
    series = [_averaged(run, run.columns["mfu_bf16"], "MFU, causal form")]
    ratio, full = full_to_causal(run), run.columns["mfu_bf16_full"]
    if not np.isfinite(full).any() and ratio is not None:
        full = run.columns["mfu_bf16"] * ratio
    series.append(_averaged(run, full, "MFU, full form", kind="dashed"))
    series.append(_averaged(run, run.columns["sol"], "speed of light", colour=3))
    mean = f", mean over ±{_radius(run):,} steps" if run.num_steps >= _SMOOTH_FROM else ""
    origin = run.start_field("peak_origin")
    peak = f" Peak rates: {origin}." if isinstance(origin, str) else ""
    return Chart(
        slug="utilisation",
        title="Utilisation",
        subtitle=f"MFU against the BF16 peak, SOL against the planned formats' peaks; measured{mean}",
        series=series,
        format=format_percent,
        unit=Unit(name="%", size=0.01),
        zero=True,
        note=f"The causal form counts half of the attention scores, the full form all of them.{peak}",
    )


_MEMORY_NOTE = (
    "The process grows by more than its tensors on the host: libraries, and heap that was freed but not given back. "
    "No plan predicts that. On a CPU tensors are counted in chosen steps."
)


def _memory(run: RunRecord) -> Chart:
    series = [
        _series(run, "tensor_peak_bytes", "tensors on the device, measured"),
        _series(run, "process_growth_bytes", "growth of the process, measured", colour=2),
    ]
    value = mapping(run.plan.get("predicted")).get("peak_device_bytes")
    if run.num_steps and is_number(value):
        ends = run.columns["step"][[0, -1]]
        line = np.full(2, float(value))
        label = "tensors on the device, predicted"
        series.append(
            Series(name=label, steps=ends, values=line, kind="dashed", decides_range=True, derived=True)
        )
    return Chart(
        slug="memory",
        title="Memory",
        subtitle="Peak bytes so far",
        series=series,
        format=format_bytes,
        unit=_binary_unit(np.concatenate([part.values for part in series])),
        zero=True,
        note=_MEMORY_NOTE,
    )


def _binary_unit(values: Array) -> Unit:
    largest = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    units = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"))
    return next(
        (Unit(name=f" {name}", size=size) for size, name in units if largest >= size), Unit(name=" B")
    )


def _wait(run: RunRecord) -> Chart:
    waited, spent = run.recorded("data_wait_s")[1].sum(), run.recorded("step_s")[1].sum()
    share = f"{format_percent(float(waited / spent), 2)} of all step time (measured)." if spent > 0 else ""
    return Chart(
        slug="data-wait",
        title="Wait for data",
        subtitle="Time per step that the loop waited for a batch, measured; log scale from 1 µs",
        series=[
            dataclasses.replace(part, values=np.maximum(part.values, 1e-6))
            for part in _smoothed(run, "data_wait_s", "wait")
        ],
        format=format_duration,
        unit=Unit(name=" s", prefixes=True),
        log=True,
        note=share,
    )


def _series(run: RunRecord, column: str, name: str, *, kind: Kind = "line", colour: int = 1) -> Series:
    return Series(name=name, steps=run.columns["step"], values=run.columns[column], kind=kind, colour=colour)


def _smoothed(run: RunRecord, column: str, name: str) -> list[Series]:
    if run.num_steps < _SMOOTH_FROM:
        return [_series(run, column, name)]
    radius = _radius(run)
    mean = smooth(run.columns[column], radius)
    return [
        _series(run, column, f"{name}, each step", kind="faint"),
        Series(
            name=f"{name}, mean over ±{radius:,} steps",
            steps=run.columns["step"],
            values=mean,
            derived=True,
        ),
    ]


def _averaged(run: RunRecord, values: Array, name: str, *, kind: Kind = "line", colour: int = 1) -> Series:
    """Only the mean: several noisy lines in one chart hide each other."""
    shown = smooth(values, _radius(run)) if run.num_steps >= _SMOOTH_FROM else values
    return Series(
        name=name,
        steps=run.columns["step"],
        values=shown,
        kind=kind,
        colour=colour,
        derived=True,
    )


def _radius(run: RunRecord) -> int:
    return max(2, run.num_steps // 60)


def _marks(run: RunRecord) -> list[Mark]:
    if not run.num_steps:
        return []
    low, high = run.columns["step"][[0, -1]]
    skipped = run.columns["step"][run.columns["skipped"] == 1]
    marks = [
        Mark(step=float(step), label=f"step {step:,.0f} was skipped", kind="skipped") for step in skipped
    ]
    for event in run.events_of("resume", "plan", "replan", "promotion"):
        step = event.get("step")
        if is_number(step) and low < step <= high:
            label = f"{event.get('kind')} at step {step:,}: {event.get('reason', '')}"[:200]
            marks.append(Mark(step=float(step), label=label))
    # One mark per place: a thousand skipped steps would paint a bar.
    places = {
        (mark.kind, int((mark.step - low) / max(high - low, 1) * _MARK_PLACES)): mark
        for mark in reversed(marks)
    }
    return list(places.values())


def _mark_note(run: RunRecord) -> str:
    kinds = {mark.kind for mark in _marks(run)}
    skipped = int(np.nansum(run.columns["skipped"]))
    words = (
        ("skipped", f"× marks skipped steps, {skipped:,} in all"),
        ("event", "a dotted line is a resume or a new plan"),
    )
    named = [sentence for kind, sentence in words if kind in kinds]
    if not named:
        return ""
    sentence = "; ".join(named)
    return sentence[0].upper() + sentence[1:] + "."
