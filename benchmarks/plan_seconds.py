"""How long planning takes, on one core.

Question  Seconds until a plan is there: the account of a 7B model on one card, the same with another budget, one
          prediction of a layout, the search for a 70B model on 1,024 devices and for one of 1e12 parameters on 8,192;
          with formats chosen too, without statistics and with those of 80 blocks that all differ (made up: random).
Method    Each case in a process of its own that is held to one core; CPU seconds of it, its largest resident set.
          The account is what `scrimp plan` does between its command line and its tables (trace, search, what more
          memory would give), of a card of 24 GB beside 80 GB of host, with rates and seconds of `largest_model`
          because there is no card here; loading Python's modules, torch among them, counts and is said. Planning again
          asks the same process about a card of 20 GB. A prediction is asked for twice: the first time the order of a
          pipeline's passes is found, later it is known.
Limits    CPU seconds: other work on the machine slows a core down, by shared caches and clock. Each process times a
          loop of Python before and after its case, which says how fast its core was.
Run       python benchmarks/plan_seconds.py            (minutes on one core)
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from environment import RESULTS, facts, markdown_table, write_pair

MODEL, MOMENTS, SEQUENCE = "qwen2.5-7b", "bf16", 2048
CARD, OTHER_CARD, HOST = 24, 20, 80
TRILLION = Path(__file__).parent / "one_trillion.toml"
LAYOUTS = {
    "4,096 stage-micro-batches": {"pp": 16, "fsdp": 64, "global_batch": 64 * 256},
    "65,536 stage-micro-batches": {"pp": 32, "virtual": 2, "fsdp": 4, "tp": 8, "global_batch": 4 * 1024},
}
FORMATS = ("bf16", "fp8_tensor", "nvfp4")
TARGETS: dict[str, float | None] = {
    "account": 3.0,
    "planned again": 1.0,
    "prediction, 4,096 stage-micro-batches": 0.005,
    "prediction, 65,536 stage-micro-batches": 0.05,
    "search, 70B on 1,024": 10.0,
    "search, 1e12 on 8,192": 60.0,
    "search, 70B on 1,024, formats chosen": 10.0,
    "search, 1e12 on 8,192, formats chosen": 60.0,
    "search, 70B on 1,024, formats by statistics": 20.0,
    "a loop of 1e7 additions": None,
}


def main() -> None:
    """Every case, and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, help="one case in this process, as JSON")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="these alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.case:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        before = _loop_seconds()
        rows = CASES[options.case]()
        loop = (before + _loop_seconds()) / 2
        rows.append(
            {"what": "a loop of 1e7 additions", "seconds": loop, "note": "before and after each case"}
        )
        print(
            json.dumps(
                {"rows": rows, "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
            )
        )
        return
    record: dict[str, Any] = facts("torch", "numpy")
    record["runs"] = [run_case(name) for name in options.cases for _ in range(options.repeats)]
    part = "" if options.cases == list(CASES) else f"-{'-'.join(options.cases)}"
    name = f"{date.today().isoformat()}-plan-seconds{part}"
    print(write_pair(options.out, name, record, page(record, options.repeats)))


def run_case(name: str) -> dict[str, Any]:
    """One case in a process of its own."""
    words = [sys.executable, str(Path(__file__).resolve()), "--case", name]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(record: dict[str, Any], repeats: int) -> str:
    """A row for each thing that was timed."""
    found: dict[str, list[tuple[float, int, str]]] = {}
    for run in record["runs"]:
        for row in run["rows"]:
            found.setdefault(row["what"], []).append((row["seconds"], run["peak_bytes"], row["note"]))
    rows = []
    for what, all_runs in found.items():
        seconds = sorted(one[0] for one in all_runs)
        target = TARGETS.get(what)
        rows.append(
            [
                what,
                f"{seconds[len(seconds) // 2]:.3g} ({seconds[0]:.3g} to {seconds[-1]:.3g})",
                "" if target is None else f"{target:g}",
                f"{max(one[1] for one in all_runs) / 1e6:.0f}",
                all_runs[0][2],
            ]
        )
    lines = [
        "# How long planning takes",
        "",
        f"CPU seconds on one core, median (least to most) of {repeats} processes; the largest resident set of the "
        f"process. Command `{record['command']}`, commit {record['commit']}.",
        "",
        *markdown_table(["what", "s", "wanted, s", "memory, MB", "found (predicted)"], rows),
    ]
    return "\n".join(lines) + "\n"


def _loop_seconds() -> float:
    began, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number
    return time.process_time() - began


def timed(rows: list[dict[str, Any]], what: str, run: Callable[[], Any]) -> Any:
    """The result of a call, whose CPU seconds become a row."""
    began = time.process_time()
    found = run()
    rows.append({"what": what, "seconds": time.process_time() - began, "note": ""})
    return found


def account() -> list[dict[str, Any]]:
    """A 7B model on one card, then on a smaller one."""
    rows: list[dict[str, Any]] = []
    timed(rows, "account: modules are loaded", _load)
    from largest_model import machine_of, traced_costs

    from scrimp.planner.memory.machine import Setup
    from scrimp.planner.memory.room import Budgets
    from scrimp.report.memory_text import memory_tables
    from scrimp.training.memory.decide import Problem

    costs = timed(rows, "account: the trace", lambda: traced_costs(MODEL, MOMENTS, SEQUENCE))

    def plan(card: int, what: str) -> None:
        problem = Problem(costs, machine_of(card, HOST), Setup(8), None)
        found = timed(rows, f"{what}: the plan", problem.fastest)
        note = f"{found.account.peak / 2**30:.1f} GiB, {found.account.host_peak / 1e9:.0f} GB of the host"
        rows[-1]["note"] = f"{note}, {found.timeline.seconds:.1f} s"
        searched = replace(found, is_searched=True)
        budgets = Budgets(found.machine.device_bytes, found.machine.host_bytes)
        timed(
            rows, f"{what}: what more would give", lambda: list(memory_tables(searched, 0, budgets=budgets))
        )

    plan(CARD, "account")
    rows.append(
        {"what": "account", "seconds": sum(one["seconds"] for one in rows), "note": "all of the above"}
    )
    count = len(rows)
    plan(OTHER_CARD, "planned again")
    again = sum(one["seconds"] for one in rows[count:])
    return [*rows, {"what": "planned again", "seconds": again, "note": "both of these"}]


def _load() -> None:
    import scrimp.cli.dry_run  # noqa: F401


def predictions() -> list[dict[str, Any]]:
    """One layout each, of a 70B model on 1,024 devices."""
    from scrimp.config.resolved import ResolvedLayout
    from scrimp.planner.layout.predict import predict
    from scrimp.planner.layout.setting import Setting

    rows: list[dict[str, Any]] = []
    like = _question_70b(formats=False)
    for name, sizes in LAYOUTS.items():
        degrees = {key: value for key, value in sizes.items() if key != "global_batch"}
        schedule = "interleaved" if "virtual" in sizes else "1f1b"
        setting = Setting(
            model=like.model,
            cluster=like.cluster,
            sequence=like.sequence,
            global_batch=sizes["global_batch"],
            micro_batch=1,
            layout=ResolvedLayout(dp=1, zero=1, schedule=schedule, **degrees),  # type: ignore[arg-type]
            software=like.software,
        )
        timed(rows, f"prediction, {name}: the first", partial(predict, setting))
        timed(rows, f"prediction, {name}", partial(predict, replace(setting)))
    return rows


def search_70b() -> list[dict[str, Any]]:
    """All layouts of a 70B model on 1,024 devices."""
    return _searched(_question_70b(formats=False), "search, 70B on 1,024")


def search_70b_formats() -> list[dict[str, Any]]:
    """The same with a format for each product of each block."""
    return _searched(_question_70b(formats=True), "search, 70B on 1,024, formats chosen")


def search_70b_statistics() -> list[dict[str, Any]]:
    """The same with harm by statistics, in which no two blocks are alike."""
    question = _question_70b(formats=True)
    statistics = made_up_statistics(question.model, FORMATS)
    formats = replace(question.formats, statistics=statistics)
    return _searched(replace(question, formats=formats), "search, 70B on 1,024, formats by statistics")


def made_up_statistics(model: Any, formats: Sequence[str], seed: int = 3) -> Any:
    """Random figures of the right shapes; the first format makes no errors."""
    import numpy as np

    from scrimp.models import full_name
    from scrimp.planner.precision.profile import LOSS_PARTS, BatchStatistics, PrecisionProfile

    linears = [
        (full_name(at, one.name), one) for at, block in enumerate(model.blocks) for one in block.linears
    ]
    generator, layers, weights = np.random.default_rng(seed), len(linears), len(linears) + 2

    def draw(*shape: int) -> Any:
        return np.exp(generator.normal(size=shape))

    errors, results = draw(layers, 3, len(formats), 2), draw(layers, 3, len(formats), 2)
    errors[:, :, 0] = results[:, :, 0] = 0.0
    batch = BatchStatistics(
        loss=1.0,
        **{name: draw(layers) for name in ("x", "w", "y", "g", "gx", "gw")},
        errors=errors,
        results=results,
        losses=generator.normal(size=(layers, len(formats), LOSS_PARTS)),
        backward=draw(2, 2, weights, layers),
        forward=draw(2, 2, weights, layers),
        curvature=generator.normal(size=layers),
        sensitivity=draw(2, weights),
        update=draw(weights),
    )
    return PrecisionProfile(
        model="made up",
        device="cpu",
        step=1,
        layers=tuple(name for name, _ in linears),
        shapes=tuple((one.outputs, one.inputs) for _, one in linears),
        tokens=8192,
        formats=tuple(formats),
        weights=("embedding", *(f"{name}.weight" for name, _ in linears), "head"),
        owners=tuple(range(1, layers + 1)),
        optimizer="adamw",
        gains="ratios",
        batches=(batch,),
    )


def search_trillion() -> list[dict[str, Any]]:
    """All layouts of a model of 1e12 parameters on 8,192 devices."""
    return _searched(_question_trillion(formats=False), "search, 1e12 on 8,192")


def search_trillion_formats() -> list[dict[str, Any]]:
    """The same with a format for each product of each block."""
    return _searched(_question_trillion(formats=True), "search, 1e12 on 8,192, formats chosen")


def _question_trillion(*, formats: bool) -> Any:
    from scrimp.planner.hardware import load_hardware
    from scrimp.planner.layout.format_budget import FormatBudget
    from scrimp.planner.layout.questions import Question
    from scrimp.planner.layout.shape_files import read_shape
    from scrimp.planner.layout.software import software

    return Question(
        model=read_shape(TRILLION).sizes,
        cluster=load_hardware("1024x8xb200" if formats else "1024x8xh100"),
        sequence=4096,
        global_batch=16384,
        software=software("scrimp"),
        formats=FormatBudget(names=FORMATS, share=0.5) if formats else None,
    )


def _question_70b(*, formats: bool) -> Any:
    from scrimp.config import preset
    from scrimp.models import spec_of
    from scrimp.models.shapes import sizes_of
    from scrimp.planner.hardware import load_hardware
    from scrimp.planner.layout.format_budget import FormatBudget
    from scrimp.planner.layout.questions import Question
    from scrimp.planner.layout.software import software

    return Question(
        model=sizes_of(spec_of(preset("llama-3.1-70b"))),
        cluster=load_hardware("128x8xb200" if formats else "128x8xh100"),
        sequence=8192,
        global_batch=2048,
        software=software("scrimp"),
        formats=FormatBudget(names=FORMATS, share=0.5) if formats else None,
    )


def _searched(question: Any, what: str) -> list[dict[str, Any]]:
    from scrimp.planner.layout.search import search

    rows: list[dict[str, Any]] = []
    found = timed(rows, what, lambda: search(question))
    best = found.best[0]
    layout = best.setting.layout
    degrees = ("fsdp", "zero", "tp", "pp", "cp", "ep")
    named = " ".join(f"{name} {getattr(layout, name)}" for name in degrees if getattr(layout, name) > 1)
    rows[-1]["note"] = f"{named}, {best.seconds:.2f} s; {found.tried:,} settings, {found.priced:,} priced"
    return rows


CASES = {
    "account": account,
    "predictions": predictions,
    "search-70b": search_70b,
    "search-70b-formats": search_70b_formats,
    "search-70b-statistics": search_70b_statistics,
    "search-trillion": search_trillion,
    "search-trillion-formats": search_trillion_formats,
}

if __name__ == "__main__":
    main()
