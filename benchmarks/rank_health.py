"""What it costs that ranks say how they are, and how often they say something wrong.

Overhead     Two gloo processes train a small model by FSDP2. Steps without and with recording (`scrimp.health`, its
             thread that talks to the store included) take turns in blocks; a block's ratio is with / without. Beside
             it the parts: collectives of a step times the microseconds that wrapping adds to one, and the
             processor's time that the thread takes in a second.
False alarms A run of 500 steps on two ranks, beside a process on every core that does nothing but count: events of the
             kinds slow-rank and lost-rank.
Use          python benchmarks/rank_health.py
Limits       On a machine that others use, the spread of the ratio is wider than what it is to show; the parts are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from distributed import spawn  # noqa: E402
from environment import RESULTS, cpu, facts, write_pair  # noqa: E402
from ranks import environment, free_port, start  # noqa: E402
from tiny_run import flags, records, write_corpus  # noqa: E402

from scrimp.health import HANG_S, record  # noqa: E402
from scrimp.health.lookout import Lookout  # noqa: E402
from scrimp.launchers import Place  # noqa: E402
from scrimp.meeting import Meeting  # noqa: E402

WIDTH, LAYERS, ROWS = 256, 8, 64
ROUNDS, BLOCK, WARM = 24, 5, 5
CALLS = 200_000


def overhead(rank: int, port: int) -> dict[str, Any]:
    """Figures of one of two ranks."""
    meeting = Meeting(Place(rank, 2, rank, 2, "localhost", port, "", "this benchmark"), 60, print)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS))
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(records_it: bool) -> float:
        """Seconds of a block of steps."""
        with contextlib.ExitStack() as stack:
            lookout = None
            if records_it:
                stack.enter_context(record().recording())
                lookout = Lookout(meeting, record(), HANG_S, 3600.0, lambda: None, print)
                lookout.start()
            dist.barrier()
            began = time.perf_counter()
            for number in range(BLOCK):
                with record().in_step(number) if records_it else contextlib.nullcontext():
                    step()
            seconds = time.perf_counter() - began
            dist.barrier()
            if lookout is not None:
                lookout.stop()
        return seconds

    for _ in range(WARM):
        step()
    ratios, seconds = [], []
    for _ in range(ROUNDS):
        without = block(False)
        with_it = block(True)
        ratios.append(with_it / without)
        seconds.append(without / BLOCK)
    return {"ratios": ratios, "step_s": statistics.median(seconds), **_parts(step, meeting)}


def _parts(step: Any, meeting: Meeting) -> dict[str, float]:
    """Calls of a step, microseconds of wrapping one, and processor seconds of a look."""
    noted = record()
    with noted.recording():
        step()
        calls = sum(one[2] for one in noted.statement()["groups"])
        wrapped = noted._recorded("all-reduce", lambda tensor: None)
        per_call = []
        for call in (wrapped, lambda tensor: None):
            began = time.thread_time()
            for _ in range(CALLS):
                call(None)
            per_call.append((time.thread_time() - began) / CALLS)
        lookout = Lookout(meeting, noted, HANG_S, 3600.0, lambda: None, print)
        lookout._say()
        dist.barrier()
        began = time.thread_time()
        for _ in range(200):
            lookout._looks()
        look = (time.thread_time() - began) / 200
        dist.barrier()
    return {"calls": calls, "per_call_us": (per_call[0] - per_call[1]) * 1e6, "look_ms": look * 1e3}


def measured_overhead() -> list[str]:
    """A line of figures for each of both ranks."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for rank, found in enumerate(spawn(2, overhead, Path(name), free_port())):
            ratios = sorted(found["ratios"])
            low, middle, high = (ratios[len(ratios) * share // 4] for share in (1, 2, 3))
            cost = (
                found["calls"] * found["per_call_us"] * 1e-6 / found["step_s"] + 2 * found["look_ms"] * 1e-3
            )
            lines.append(
                f"rank {rank}: with / without {middle:.4f} (quartiles {low:.4f} to {high:.4f}, {len(ratios)} blocks of "
                f"{BLOCK} steps of {found['step_s'] * 1e3:.1f} ms); parts: {found['calls']} calls of "
                f"{found['per_call_us']:.2f} us, two looks a second of {found['look_ms']:.2f} ms: {cost:.2%}"
            )
    return lines


def alarms(steps: int) -> list[str]:
    """How many alarms a run under load has, and which."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            words = flags(
                write_corpus(folder), folder / "run", f"--train.steps={steps}", "--checkpoint.every=50"
            )
            run = start(["-m", "scrimp", "launch", "--ranks=2", *words], environment(folder))
            output, _ = run.communicate()
            if run.returncode:
                raise SystemExit(output)
            events = records(folder / "run", "events.jsonl")
            found = [one for one in events if one["kind"] in ("slow-rank", "lost-rank")]
            seconds = sum(one["step_s"] for one in records(folder / "run"))
    finally:
        for one in busy:
            one.kill()
    return [f"{steps} steps in {seconds:.0f} s: {len(found)} alarms", *map(json.dumps, found)]


def main() -> None:
    """Measure both, write the results, print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="of the run under load")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    about = {**facts("torch"), "date": options.date, "cpu": cpu()}
    found = {"overhead": measured_overhead(), "false alarms": alarms(options.steps)}
    text = ["# What it costs that ranks say how they are, and false alarms", ""]
    text += ["Measured by `benchmarks/rank_health.py`, whose docstring says how.", ""]
    text += [f"- {name}: {value}" for name, value in about.items()]
    for name, lines in found.items():
        text += ["", f"## {name.capitalize()}", "", *(f"- {line}" for line in lines)]
    record = {"environment": about, "results": found}
    print(write_pair(options.out, f"{options.date}-rank-health-cpu", record, "\n".join(text) + "\n"))
    print("\n".join(text))


if __name__ == "__main__":
    main()
