"""The planner's predictions beside published training runs.

Method    Every row of `benchmarks/published/` is predicted from its setting and the hardware files alone (zero-shot),
          and with one factor for a group: measured over predicted of one of its rows, every row in turn as that one,
          and the error on the others. An error is |predicted / measured - 1| of tokens per second and device; with a
          factor it is the median, or the 90th percentile, of the other rows, and of these the median over the rows
          that give the factor. A source is a page or a paper, whatever groups its rows are in; the figures of all
          sources are the medians of theirs.
Beside    Trivial predictors: 40 % of the bf16 peak, and the nearest row: the share of the peak of the row with the same
          device and format, of another model, whose size is nearest. Calculon, from a checkout of its repository, on
          the rows that it can say (`published_calculon.py`), and our own error on these.
Memory    Printed peaks beside predicted ones, and settings that ended out of memory (`published_memory`).
Sweeps    Rows of one source, model, device, format and batch whose layouts alone differ: how many of the pairs that
          differ by more than 5 % are ordered right, and how much slower than the best published layout that one is
          which is predicted to be the fastest of those that are predicted to fit (of three rows or more).
Held out  Rows of sources that were written down before the model was changed for them, with the first prediction of
          each beside today's (`published_held_out`); no other figure counts them.
Limits    Rows whose source leaves out what matters are not scored. No figure of hardware or software files was fitted
          to a row.
Run       python benchmarks/published_runs.py [--calculon PATH]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from environment import RESULTS, facts, markdown_table, write_pair
from published_calculon import Calculon
from published_held_out import HELD_OUT, held_out_lines
from published_memory import FITS, PEAKS, fit_lines, outcomes, peak_lines, peaks

from scrimp.errors import ConfigError, ScrimpError
from scrimp.json_files import as_typed
from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.execution import Execution
from scrimp.planner.layout.lines import LayoutLine, Line, answer, setting_of
from scrimp.planner.layout.setting import Offload, Setting

FOLDER = Path(__file__).parent / "published"
FILES, HELD = ("rows.jsonl", "beside.jsonl", "sweeps.jsonl"), ("held_out.jsonl",)
CLEAR = 0.05
"""Share by which two layouts must differ to be ordered."""
FEWEST = 3
"""Rows of a sweep from which a layout is chosen."""


@dataclass(frozen=True)
class Row:
    """One published run and its prediction."""

    group: str
    source: str
    name: str
    sweep: str
    """What rows share whose layouts alone differ."""
    scored: bool
    measured: float
    """Tokens per second and device."""
    predicted: float
    constant_mfu: float
    parameters: int
    flops_share: float
    """Measured FLOPs by the peak in bf16."""
    kind: str
    """Device and format."""
    split: dict[str, float]
    """Shares of the step by cause."""
    peak_bytes: float
    memory_bytes: float
    """Bytes that a program can take of a device."""
    measured_peak: float | None
    calculon: float | None
    """What Calculon predicts; None where it does not."""
    first: float | None = None
    """The first prediction of a row that was held out."""
    fitted_first: bool = True
    """Whether it was predicted to fit then."""

    @property
    def fits(self) -> bool:
        """Whether it is predicted to."""
        return self.peak_bytes <= self.memory_bytes

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.measured - 1.0


def main() -> None:
    """Predict, print the summary, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--calculon", type=Path, help="a checkout of calculon-ai/calculon; else it is not run"
    )
    options = parser.parse_args()
    before = facts()
    kinds = shapes()
    other = Calculon(options.calculon) if options.calculon else None
    found, held = rows(kinds, FILES, other), rows(kinds, HELD, other)
    scored, unseen = ([row for row in some if row.scored] for some in (found, held))
    groups = [line_of(name, own) for name, own in parts(scored, lambda row: row.group).items()]
    by_source = markdown_table(("source", *SUMMARY[1:]), summarised(scored))
    beside = markdown_table(HELD_OUT, held_out_lines(parts(unseen, page)))
    made = partial(setting_for, kinds=kinds)
    printed, ended = peaks(made), outcomes(made)
    memory = [*markdown_table(PEAKS, peak_lines(printed)), "", *markdown_table(FITS, fit_lines(ended))]
    print("\n".join([*markdown_table(SUMMARY, groups), "", *by_source, "", *beside, "", *memory]))
    about = {"command": before["command"], "commit": before["commit"], "date": options.date}
    record = {
        "environment": about,
        "results": [asdict(row) for row in found],
        "held_out": [asdict(row) for row in held],
        "peaks": [asdict(one) for one in printed],
        "outcomes": [asdict(one) for one in ended],
    }
    page_text = "\n".join(
        [
            *HEAD,
            *markdown_table(SUMMARY, groups),
            *("", "## By source", ""),
            *by_source,
            *("", "## Held out", "", ABOUT_HELD, ""),
            *beside,
            *("", "## Rows", "", ABOUT_MEMORY, ""),
            *memory,
            "",
            *markdown_table(ROWS, map(cells, found)),
            *("", "Held out:", ""),
            *markdown_table((*ROWS, "first"), map(held_cells, held)),
            "",
        ]
    )
    print(write_pair(options.out, f"{options.date}-published-runs", record, page_text))


HEAD = [
    "# Published training runs and the planner's predictions of them",
    "",
    "Predicted from hardware files alone; how, and what is beside: the docstring of `benchmarks/published_runs.py`.",
    "",
]
ABOUT_HELD = (
    "Written down before the model was changed for them; first predictions beside today's: "
    "`benchmarks/published_held_out.py`."
)
ABOUT_MEMORY = (
    "Printed peaks of memory, and settings that ended out of memory: `benchmarks/published_memory.py`."
)
SUMMARY = (
    "group",
    "rows scored",
    "median error",
    "90th percentile",
    "bias",
    "with one factor: median",
    "90th percentile ",
    "40 % of peak",
    "nearest row",
    "Calculon, and ours there",
    "pairs ordered",
    "chosen layout slower: median, most",
    "predicted not to fit",
)
ROWS = (
    "group",
    "source",
    "setting",
    "scored",
    "measured tok/s",
    "predicted",
    "error",
    "compute, exchanges, bubble",
    "GB",
)


def shapes() -> dict[str, ModelShape]:
    """Models by their names."""
    tables = tomllib.loads((FOLDER / "shapes.toml").read_text(encoding="utf-8"))
    return {
        name: as_typed(values, ModelShape, origin=name, error=ConfigError, do="mend shapes.toml")
        for name, values in tables.items()
    }


def rows(kinds: dict[str, ModelShape], files: Iterable[str], calculon: Calculon | None = None) -> list[Row]:
    """All of these files, predicted."""
    found = []
    for file in files:
        for text in (FOLDER / file).read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            try:
                found.append(predicted(row, kinds, calculon))
            except ScrimpError as error:
                print(f"{row['group']} {row['setting']['model']}: {error}")
    return found


def predicted(row: dict[str, Any], kinds: dict[str, ModelShape], calculon: Calculon | None) -> Row:
    """One row."""
    said = row["setting"]
    setting = setting_for(said, kinds)
    found, tokens = answer(setting), setting.global_batch * setting.sequence
    rate = row["measured"].get("tokens_per_second_per_device")
    if rate is None:
        rate = tokens / row["measured"]["step_seconds"] / setting.layout.ranks
    flops, peak = setting.model.flops_per_token(setting.sequence), setting.device.peak.bf16
    layout = " ".join(
        f"{key} {value}" for key, value in said["layout"].items() if value not in (1, False, "1f1b")
    )
    recompute = "" if said["recompute"] == "none" else f", recompute {said['recompute']}"
    shared = [
        said["model"],
        said["hardware"],
        f"s {said['sequence']}",
        f"batch {said['global_batch']}",
        said["precision"],
    ]
    total = found["step_seconds"]
    other = calculon and calculon.step_seconds(setting, kinds[said["model"]])
    first = row.get("first") or {}
    return Row(
        group=row["group"],
        source=row["source"],
        name=f"{', '.join(shared)}, micro-batch {said['micro_batch']}, {layout}{recompute}",
        sweep=" ".join([row["source"], *shared, said["software"]]),
        scored=row["scored"],
        measured=rate,
        predicted=found["tokens_per_second_per_device"],
        constant_mfu=0.4 * peak / flops,
        parameters=setting.model.parameters,
        flops_share=rate * flops / peak,
        kind=f"{setting.device.name} {said['precision']}",
        split={key: value / total for key, value in found["seconds"].items()},
        peak_bytes=max(sum(stage["peak_bytes"].values()) for stage in found["stages"]),
        memory_bytes=setting.device.memory_bytes,
        measured_peak=row["measured"].get("peak_bytes"),
        calculon=tokens / other / setting.layout.ranks if other else None,
        first=first.get("tokens_per_second_per_device"),
        fitted_first=first.get("fits", True),
    )


def setting_for(said: dict[str, Any], kinds: dict[str, ModelShape]) -> Setting:
    """The setting of a row."""
    offload = {key: value for key, value in said["offload"].items() if key in Offload.__dataclass_fields__}
    hardware = said["hardware"]
    execution = said.get("execution", {})
    more = {
        "model": kinds[said["model"]],
        "hardware": str(FOLDER / hardware) if hardware.endswith(".toml") else hardware,
        "layout": LayoutLine(**said["layout"]),
        "offload": Offload(**offload),
        "recompute_parts": tuple(said.get("recompute_parts", ())),
        "execution": Execution(**{key: _fixed(value) for key, value in execution.items()}),
    }
    return setting_of(Line(**{**said, **more}))


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def parts(found: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """The rows by what a key says of each."""
    by: dict[str, list[Row]] = defaultdict(list)
    for row in found:
        by[key(row)].append(row)
    return by


def page(row: Row) -> str:
    """The page or paper that a row stands on, whatever release it is of."""
    return row.source.split()[0]


def summarised(found: list[Row]) -> list[list[str]]:
    """A line for each source, and one for all."""
    sources = parts(found, page)
    lines = [line_of(name, own) for name, own in sources.items()]
    columns = []
    for own in sources.values():
        median, most = with_one_factor(own) or (math.nan, math.nan)
        plain = sorted(errors(own, rate))
        trivial = [statistics.median(errors(own, by)) for by in (constant, nearest(own))]
        columns.append([statistics.median(plain), percentile(plain), median, most, *trivial])
    means = [
        f"{statistics.median(value for value in column if not math.isnan(value)):.1%}"
        for column in zip(*columns, strict=True)
    ]
    every = line_of("all rows, a factor for each source", found)
    every[5:7] = of_rows(list(sources.values()))
    return [*lines, ["median of the sources", "", *means[:2], "", *means[2:], "", "", "", ""], every]


def line_of(name: str, own: list[Row]) -> list[str]:
    """The figures of some rows."""
    found, calibrated = sorted(errors(own, rate)), with_one_factor(own)
    right, pairs = ordered(own)
    slower = chosen_slower(own)
    told = [row for row in own if row.calculon]
    theirs, ours = (errors(told, by) for by in (other_planner, rate))
    return [
        name,
        str(len(own)),
        f"{statistics.median(found):.1%}",
        f"{percentile(found):.1%}",
        f"{statistics.median(row.error for row in own):+.1%}",
        f"{calibrated[0]:.1%}" if calibrated else "",
        f"{calibrated[1]:.1%}" if calibrated else "",
        f"{statistics.median(errors(own, constant)):.1%}",
        f"{statistics.median(errors(own, nearest(own))):.1%}",
        f"{statistics.median(theirs):.1%}, {statistics.median(ours):.1%} of {len(told)}"
        if told
        else "not run",
        f"{right} of {pairs}" if pairs else "",
        f"{statistics.median(slower):.1%}, {max(slower):.1%} of {len(slower)}" if slower else "",
        str(sum(not row.fits for row in own)),
    ]


def rate(row: Row) -> float:
    """The planner's."""
    return row.predicted


def constant(row: Row) -> float:
    """That of a constant share of the peak."""
    return row.constant_mfu


def nearest(own: list[Row]) -> Callable[[Row], float]:
    """That of the row of the nearest model."""

    def found(row: Row) -> float:
        others = [one for one in own if one.kind == row.kind and one.parameters != row.parameters]
        if not others:
            return row.constant_mfu
        near = min(others, key=lambda one: abs(math.log(one.parameters / row.parameters)))
        return near.flops_share / row.flops_share * row.measured

    return found


def errors(own: Iterable[Row], by: Callable[[Row], float]) -> list[float]:
    """Relative errors of a predictor, one for each row."""
    return [abs(by(row) / row.measured - 1.0) for row in own]


def other_planner(row: Row) -> float:
    """That of Calculon."""
    return row.calculon or math.nan


def with_factor_of(one: Row, own: list[Row]) -> list[float]:
    """Errors of the other rows, with the factor of one."""
    factor = one.measured / one.predicted
    return [abs(row.predicted * factor / row.measured - 1.0) for row in own if row is not one]


def with_one_factor(own: list[Row]) -> tuple[float, float] | None:
    """Median and 90th percentile of the other rows, each the median over the rows that give the factor."""
    if len(own) < 2:
        return None
    found = [sorted(with_factor_of(one, own)) for one in own]
    return statistics.median(map(statistics.median, found)), statistics.median(map(percentile, found))


def of_rows(sources: list[list[Row]]) -> list[str]:
    """Median and 90th percentile of all rows, each with a factor of its source: its median over those factors."""
    found = []
    for own in sources:
        factors = [row.measured / row.predicted for row in own]
        for number, row in enumerate(own):
            others = factors[:number] + factors[number + 1 :]
            if others:
                found.append(
                    statistics.median(abs(row.predicted * one / row.measured - 1.0) for one in others)
                )
    return [f"{statistics.median(found):.1%}", f"{percentile(sorted(found)):.1%}"]


def ordered(own: list[Row]) -> tuple[int, int]:
    """Pairs of a sweep that are ordered right, and pairs that differ clearly."""
    right = pairs = 0
    for sweep in parts(own, lambda row: row.sweep).values():
        for one, other in itertools.combinations(sweep, 2):
            if abs(one.measured / other.measured - 1.0) > CLEAR:
                pairs += 1
                right += (one.measured > other.measured) == (one.predicted > other.predicted)
    return right, pairs


def chosen_slower(own: list[Row]) -> list[float]:
    """For each sweep how much longer the layout that is predicted to be the fastest takes than the best one."""
    found = []
    for sweep in parts(own, lambda row: row.sweep).values():
        if len(sweep) >= FEWEST:
            among = [row for row in sweep if row.fits] or sweep
            chosen = max(among, key=lambda row: row.predicted)
            found.append(max(row.measured for row in sweep) / chosen.measured - 1.0)
    return found


def percentile(values: list[float]) -> float:
    """The 90th, of values in order."""
    return values[min(len(values) - 1, int(0.9 * len(values)))]


def cells(row: Row) -> list[str]:
    """One row as text."""
    split = " / ".join(f"{row.split[key]:.0%}" for key in ("compute", "communication_exposed", "bubble"))
    size = f"{row.peak_bytes / 1e9:.0f} of {row.memory_bytes / 1e9:.0f}"
    if row.measured_peak:
        size += f", measured {row.measured_peak / 1e9:.0f}"
    return [
        row.group,
        row.source,
        row.name,
        "yes" if row.scored else "no",
        f"{row.measured:,.0f}",
        f"{row.predicted:,.0f}",
        f"{row.error:+.1%}",
        split,
        size,
    ]


def held_cells(row: Row) -> list[str]:
    """One row that was held out, with the error of its first prediction."""
    return [*cells(row), f"{row.first / row.measured - 1.0:+.1%}" if row.first else "refused"]


if __name__ == "__main__":
    main()
