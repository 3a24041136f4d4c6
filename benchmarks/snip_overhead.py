"""Seconds and extra memory of measuring, solving, switching and probing, beside plain training steps.

Everything in one process, on one checkpoint of a trunk. A step is a whole one (batch, passes, clipping, optimizer), in
bf16 and in the formats of a plan. Peaks are high-water marks: on a CPU of the resident set, free memory handed back
and the mark reset before each act; on CUDA of the allocator.
A statistics batch is a step's batch, as in `scrimp.cycle.precision_cycle` where a step has at most four
micro-batches.

Limits   On a CPU in use by others, times spread: all are kept. The resident set has a grain of some MiB.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from snip_lab import Choices, Lab

from scrimp.models import spec_of
from scrimp.planner.flops import count_flops
from scrimp.planner.precision.analysed import make_plan
from scrimp.planner.precision.choose import Budget, Question, choose
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.profiler.process_memory import MemoryMeter
from scrimp.statistics import Subject, probe

HOST = torch.device("cpu")
LR = 1e-4
SWITCHES = 20
RESET_GRAIN = 2**24
"""The mark counts as reset if it lies this near the resident set."""


def measure(
    lab: Lab,
    profile: PrecisionProfile,
    high: str,
    low: str,
    *,
    share: float = 0.75,
    batches: Sequence[int] = (1, 2),
    more_formats: Sequence[str] = (),
    steps: int = 8,
    repeats: int = 3,
) -> dict[str, Any]:
    """All figures of one checkpoint.

    Args:
        profile: of the checkpoint, for the plan that runs.
        share: of FLOPs in 4 bits of that plan.
        batches: numbers of statistics batches to measure with.
        more_formats: candidates that are added to `high` and `low` for one more set.
        steps: plain steps that are timed, after one to warm up.
        repeats: of every other act.
    """
    question = Question(profile.select((high, low)), Budget(fp4_flops=share))
    plan = choose(question).recipes(question.profile)
    sets = [(high, low), *([(high, low, *more_formats)] if more_formats else [])]
    record = _facts(lab, high, low) | {"share": share, "high_water_marks_reset": _marks_reset(lab)}
    record["step"] = {
        "bf16": _steps(lab, {}, steps),
        "plan": _steps(lab, plan, steps),
    }
    record["collect"] = [
        {"formats": list(formats), "batches": count} | _collect(lab, plan, formats, count, repeats)
        for formats in sets
        for count in batches
    ]
    record["solve"] = {
        "choose": _acts(HOST, partial(choose, question), repeats),
        "plan with certainty": _acts(HOST, partial(make_plan, question), repeats),
    }
    record["switch"] = _switches(lab, plan, high)
    record["probe"] = _probe(lab, plan, repeats)
    return record | {"load_after": os.getloadavg()[0]}


def _facts(lab: Lab, high: str, low: str) -> dict[str, Any]:
    """What the figures are of."""
    train, architecture = lab.train_config, lab.model.architecture
    return {
        "seed": lab.decisions.config.run.seed,
        "step_of_trunk": lab.start,
        "high": high,
        "low": low,
        "device": lab.decisions.device.name,
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "parameters": sum(p.numel() for p in lab.model.parameters()),
        "layers": len(lab.layers),
        "tokens": train.batch_tokens,
        "sequence": train.sequence,
        "flops_per_token": count_flops(spec_of(architecture), train.sequence).causal,
    }


def _steps(lab: Lab, plan: Choices, count: int) -> dict[str, Any]:
    """Seconds of plain steps, the first one dropped, and the peak of all."""
    lab.reset()
    _steady_train(lab, plan, 2, [])
    stamps: list[float] = []
    found = _acts(lab.device, lambda: _steady_train(lab, plan, count + 1, stamps), 1)
    lab.reset()
    return found | {"seconds": [b - a for a, b in itertools.pairwise(stamps[1:])]}


def _steady_train(lab: Lab, plan: Choices, count: int, stamps: list[float]) -> None:
    """Train; the clock is read before each step, and after the last."""

    def stamp(_: int) -> None:
        _wait(lab.device)
        stamps.append(time.perf_counter())

    lab.train(count, plan, lambda _: LR, between=stamp)
    stamp(count)


def _collect(lab: Lab, plan: Choices, formats: Sequence[str], count: int, repeats: int) -> dict[str, Any]:
    """A measurement between two steps of a run in the plan's formats."""
    lab.reset()
    lab.replan(plan)
    found = _acts(lab.device, lambda: lab.measure(lab.start, count, tuple(formats)), repeats)
    lab.reset()
    return found


def _switches(lab: Lab, plan: Choices, high: str) -> dict[str, Any]:
    """From the plan to all of its layers in the higher format and back; and the steps that follow."""
    lab.reset()
    other = dict.fromkeys(plan, (high,) * 3)
    turns = itertools.cycle((other, plan))
    found = _acts(lab.device, lambda: lab.replan(next(turns)), SWITCHES)
    lab.reset()
    stamps: list[float] = []

    def between(done: int) -> Choices | None:
        _wait(lab.device)
        stamps.append(time.perf_counter())
        return plan if done == 2 else None

    lab.train(5, other, lambda _: LR, between=between)
    lab.reset()
    steps = [b - a for a, b in itertools.pairwise(stamps)]
    return found | {"before": steps[1:2], "after": steps[2:3], "later": steps[3:]}


def _probe(lab: Lab, plan: Choices, repeats: int) -> dict[str, Any]:
    """The plan against bf16 on one batch."""
    lab.reset()
    lab.replan(plan)
    subject = Subject(
        lab.model,
        lab.planned,
        lab.optimizer,
        lambda batch: lab.losses(lab.start, batch),
        "bf16",
        lab.decisions.device.name,
        lab.optimizer.num_updates,
    )
    found = _acts(lab.device, lambda: probe(subject, next(lab.batches(lab.start))), repeats)
    lab.reset()
    return found


def _acts(device: torch.device, act: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Seconds of each repetition; bytes at the highest high-water mark, and by how much the highest grew."""
    seconds, peaks, growths = [], [], []
    for _ in range(repeats):
        _hand_back()
        meter = MemoryMeter(device)
        in_use = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        _wait(device)
        began = time.perf_counter()
        act()
        _wait(device)
        seconds.append(time.perf_counter() - began)
        is_cuda = device.type == "cuda"
        device_peak = meter.peak_device_bytes() or 0
        peaks.append(device_peak if is_cuda else meter.process_peak_bytes())
        growths.append(device_peak - in_use if is_cuda else meter.process_growth_bytes())
    return {"seconds": seconds, "peak_bytes": max(peaks), "growth_bytes": max(growths)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _marks_reset(lab: Lab) -> bool:
    """Whether this machine lets a process reset its high-water mark; else peaks are those of all acts before."""
    _hand_back()
    torch.ones(RESET_GRAIN).sum()  # four bytes each: a mark well above the grain, whose memory is free again
    return lab.device.type == "cuda" or MemoryMeter(lab.device).process_growth_bytes() < RESET_GRAIN


def _hand_back() -> None:
    """Give freed memory back to the system, so that the resident set is what is in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
