"""`scrimp plan --hardware ... --simulate`: the best plan's memory beside what a fake process group counts of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from scrimp.cli.plan_question import architecture_asked
from scrimp.cli.show import plain_console
from scrimp.config import Architecture, Config
from scrimp.errors import ConfigError
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.stage_memory import peak_bytes
from scrimp.planner.layout.stages import block_plans
from scrimp.report.units import format_bytes

OF_ALLOCATOR = ("pools", "margin")
"""Categories of a prediction that are no tensors."""
COLUMNS = ("bytes of a rank", "predicted", "counted", "diff.", "most")
_STAY = ("weights", "gradients", "gathered")


def architecture_of(config: Config, shape: Path | None) -> Architecture:
    """The model that is simulated.

    Raises:
        ConfigError: there is a shape alone, which nothing can run.
    """
    if shape is not None:
        raise ConfigError(
            "a shape cannot be simulated",
            got=f"--simulate beside --model.shape {shape}",
            expected="a model that Scrimp can build",
            do="name a preset, with --model.num-layers and the others where its sizes are not yours",
        )
    return architecture_asked(config)


def show_simulation(setting: Setting, architecture: Architecture) -> None:
    """Count, and print a table for the first and the last rank of the pipeline.

    Raises:
        PlanError: a setting that cannot be simulated.
    """
    from scrimp.training.memory.simulated import simulate

    start, predicted, console = time.monotonic(), peak_bytes(setting), plain_console()
    counted = simulate(setting, architecture, (0, setting.layout.pp - 1))
    for found in counted:
        _show(setting, found.rank, predicted[found.rank].categories, found.categories, found.most)
    seconds, most = time.monotonic() - start, max(one.total for one in counted)
    console.print(
        f"counted when most lived, in {seconds:.0f} s, on a fake process group of {setting.layout.ranks:,} ranks; "
        "most: of a category at any time"
    )
    if most > setting.memory_bytes:
        console.print(
            f"by the count it does not fit: {format_bytes(most)} of {format_bytes(setting.memory_bytes)}"
        )


def _show(
    setting: Setting,
    rank: int,
    predicted: Mapping[str, float],
    counted: Mapping[str, float],
    most: Mapping[str, float],
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    which = (
        f"rank {rank + 1} of {setting.layout.pp} of the pipeline" if setting.layout.pp > 1 else "each rank"
    )
    table = Table(title=f"the first plan on {which}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS:
        is_name = name == COLUMNS[0]
        table.add_column(name, justify="left" if is_name else "right", no_wrap=not is_name)
    formula = {name: size for name, size in predicted.items() if name not in OF_ALLOCATOR}
    for names in _rows(setting, (*formula, *counted)):
        sums = [sum(one.get(name, 0.0) for name in names) for one in (formula, counted, most)]
        table.add_row(", ".join(names), *_cells(*sums))
    table.add_row("all tensors", *_cells(sum(formula.values()), sum(counted.values())))
    plain_console().print(table)


def _rows(setting: Setting, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Categories, those as one between which prediction and count do not draw the same line: what is gathered and
    stays is weights to the one."""
    stays = setting.layout.zero < 3 or any(one.gathered for one in block_plans(setting))
    joint = _STAY if stays and setting.layout.shards > 1 else ()
    rows: list[tuple[str, ...]] = [(name,) for name in dict.fromkeys(names) if name not in joint]
    return [joint, *rows] if joint else rows


def _cells(predicted: float, counted: float, most: float | None = None) -> list[str]:
    difference = f"{100 * (counted / predicted - 1):+.1f} %" if predicted and counted else ""
    found = [format_bytes(round(predicted)), format_bytes(round(counted)), difference]
    return [*found, "" if most is None else format_bytes(round(most))]
