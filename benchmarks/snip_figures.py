"""The plots of the study, as SVG: damage, gaps, plans. What is missing is left out; nothing at all gives no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from snip_damage import MAIN, THRESHOLDS, Damage, pairs, rank_correlation
from snip_gaps import CONTROL, FIXED, UNIFORM, Cells, Estimate, Setting
from snip_plans import is_low

from scrimp.precision import GEMMS

COLOURS = {str(gemm): f"C{index}" for index, gemm in enumerate(GEMMS)}
MARKERS = "os^Dv<>p"
NAME_ROOM = 3.2
"""Inches beside a panel for names of layers."""


def pyplot() -> Any:
    """matplotlib, writing text as text and the same file for the same figures."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "scrimp"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> Path:
    """Without a date in it."""
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)
    return path


# -- damage ------------------------------------------------------------------------------------


def draw_damage(damages: Sequence[Damage], path: Path) -> Path | None:
    """Predicted against measured, a row per phase and format: update left, loss right."""
    damages = [one for one in damages if one.profile is not None]
    settings = sorted({(one.low, one.step) for one in damages})
    if not settings:
        return None
    figure, panels = pyplot().subplots(len(settings), 2, figsize=(10, 4.4 * len(settings)), squeeze=False)
    for (low, step), row in zip(settings, panels, strict=True):
        members = [one for one in damages if (one.low, one.step) == (low, step)]
        for what, panel in zip(MAIN, row, strict=True):
            _scatter(panel, members, what)
            found = np.mean([rank_correlation(*_compared(one, what)) for one in members])
            asked = f"Spearman {found:.2f}, at least {THRESHOLDS[what]} expected"
            panel.set_title(f"{what}: {low}, step {step}\n{asked}", fontsize=9)
    return save(figure, path)


def _compared(one: Damage, what: str) -> tuple[Any, Any]:
    assert one.profile is not None
    return pairs(one.profile, one.low, one.loss, one.update)[MAIN[what]]


def _scatter(panel: Any, members: Sequence[Damage], what: str) -> None:
    """Colours are GEMMs, markers seeds; the line is where both are equal."""
    from matplotlib import ticker

    ends: list[float] = []
    for number, one in enumerate(members):
        predicted, measured = _compared(one, what)
        for index, gemm in enumerate(COLOURS):
            if what == "loss" and gemm != "fprop":
                continue
            x, y = (values if values.ndim == 1 else values[:, index] for values in (predicted, measured))
            shown = (x > 0) & (y > 0)
            label = f"{gemm}, seed {one.seed}"
            style = {"color": COLOURS[gemm], "marker": MARKERS[number % len(MARKERS)], "alpha": 0.7}
            panel.scatter(x[shown], y[shown], s=18, label=label, linewidths=0, **style)
            ends += [*x[shown], *y[shown]]
    if ends:
        panel.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.8)
    panel.set(xscale="log", yscale="log", xlabel="predicted", ylabel="measured")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    panel.legend(frameon=False, fontsize=7)


# -- gaps --------------------------------------------------------------------------------------


def draw_gaps(cells: Cells, path: Path) -> Path | None:
    """A row of panels per setting: bars for every budget, then the gap over budgets."""
    settings = [s for s in cells.settings if cells.policies(s) and cells.of(s, "", CONTROL)]
    if not settings:
        return None
    columns = 1 + max(max(1, len(cells.budgets(setting))) for setting in settings)
    size = (1.5 + 3.6 * columns, 0.8 + 4.4 * len(settings))
    figure, panels = pyplot().subplots(len(settings), columns, figsize=size, squeeze=False)
    for setting, row in zip(settings, panels, strict=True):
        names = cells.policies(setting)
        colours = {name: pyplot().get_cmap("tab20")(index % 20) for index, name in enumerate(names)}
        budgets = cells.budgets(setting) or [""]
        for budget, panel in zip(budgets, row, strict=False):
            _bars(panel, cells, setting, budget, colours)
        for panel in row[len(budgets) : -1]:
            panel.axis("off")
        _curves(row[-1], cells, setting, colours)
    return save(figure, path)


def _bars(panel: Any, cells: Cells, setting: Setting, budget: str, colours: Mapping[str, str]) -> None:
    """Mean, 95 % interval and every run; the grey band is between two bf16 runs."""
    found = {name: cells.all_gaps(setting, budget, name) for name in colours}
    found = {name: gaps for name, gaps in found.items() if gaps}
    for place, (name, gaps) in enumerate(found.items()):
        estimate = Estimate(tuple(float(np.mean(values)) for values in gaps.values()))
        reach = estimate.interval
        errors = None if reach is None else [[estimate.mean - reach[0]], [reach[1] - estimate.mean]]
        if np.isfinite(estimate.mean):
            panel.barh(place, estimate.mean, color=colours[name], alpha=0.6, xerr=errors, capsize=3)
        values = [value for seed in gaps.values() for value in seed if np.isfinite(value)]
        panel.plot(values, [place] * len(values), "k.", markersize=4)
    floor = cells.floor(setting)
    if floor is not None and np.isfinite(floor.values).all():
        panel.axvspan(-max(floor.values), max(floor.values), color="0.85", zorder=0)
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_yticks(range(len(found)), list(found), fontsize=8)
    panel.invert_yaxis()
    share = f"{float(budget):.0%} of FLOPs in 4 bits" if budget else "no budget"
    panel.set_title(f"{share}\n{setting}", fontsize=9)
    panel.set_xlabel("gap to bf16, per cent of the held-out loss", fontsize=8)


def _curves(panel: Any, cells: Cells, setting: Setting, colours: Mapping[str, str]) -> None:
    """Mean gap over the share of FLOPs in 4 bits; policies without a budget are points."""
    for name, colour in colours.items():
        budgets = [""] if name in FIXED else cells.budgets(setting)
        points = []
        for budget in budgets:
            gaps = cells.gaps(setting, budget, name).values()
            if gaps and np.isfinite(list(gaps)).all():
                share = np.mean([cell.share for cell in cells.of(setting, budget, name)])
                points.append((100 * float(share), float(np.mean(list(gaps)))))
        if points:
            style = "x" if name in UNIFORM else "o-"
            panel.plot(*zip(*points, strict=True), style, color=colour, label=name, markersize=4, linewidth=1)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_title(f"gap over share\n{setting}", fontsize=9)
    panel.set_xlabel("per cent of FLOPs in 4 bits", fontsize=8)
    panel.legend(frameon=False, fontsize=6)


# -- plans -------------------------------------------------------------------------------------


def draw_plans(rows: Sequence[Mapping[str, Any]], path: Path, policy: str = "snip") -> Path | None:
    """Layers down, GEMMs across: share of seeds in which a policy gives 4 bits; a panel per setting and budget."""
    rows = [row for row in rows if row["policy"] == policy]
    groups = sorted({(row["low"], row["high"], row["step"]) for row in rows})
    budgets = sorted({row["budget"] for row in rows})
    if not groups:
        return None
    num_layers = len(rows[0]["recipes"])
    size = (NAME_ROOM + 1.5 * len(budgets), len(groups) * (1.2 + 0.17 * num_layers))
    figure, panels = pyplot().subplots(len(groups), len(budgets), figsize=size, squeeze=False, sharey="row")
    for (low, high, step), line in zip(groups, panels, strict=True):
        for budget, panel in zip(budgets, line, strict=True):
            key = (low, high, step, budget)
            members = [r for r in rows if (r["low"], r["high"], r["step"], r["budget"]) == key]
            if not members:
                panel.axis("off")
                continue
            layers = list(members[0]["recipes"])
            mean = np.mean([[[is_low(n) for n in r["recipes"][k]] for k in layers] for r in members], axis=0)
            panel.pcolormesh(mean, cmap="Blues", vmin=0, vmax=1, edgecolors="0.8", linewidth=0.3)
            panel.set_xticks(np.arange(len(GEMMS)) + 0.5, [str(gemm) for gemm in GEMMS], fontsize=6)
            panel.set_yticks(np.arange(len(layers)) + 0.5, layers, fontsize=6)
            panel.set_ylim(len(layers), 0)
            panel.set_title(f"{budget:.0%} {low}\nstep {step}, {len(members)} seeds", fontsize=7)
    return save(figure, path)
