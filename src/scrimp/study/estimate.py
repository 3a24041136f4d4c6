"""What a study takes before it is begun: seconds, memory, and how many runs go at once.

Problem  A study may take hours: what it takes should be known before it begins. Its runs cost as differently as its
         variants.
Method   Runs that differ only in what costs nothing (seed, learning rate, schedule) cost the same. Of each cost the
         first steps of one run are taken, alone, in a folder that is thrown away: seconds until the first step, seconds
         of a step, what the process had before it trained, and the peak that its plan predicts. Hours follow from the
         steps of all runs and the places that they go in.
         As many runs go at once as there are cores for their threads, and memory: of the host what is free, of each GPU
         its own, by the plans' peaks. Runs that are timed go alone, with all cores.
         The micro-batch that the probed run decided on is given to all runs of its cost, so that it does not depend on
         what else runs when they begin. Probes are kept in the study's folder, and with them the threads of its runs.
Limits   Runs that need others of the study are probed without these: teachers' time and memory are not counted.
         Evaluations and checkpoints are not counted, nor that runs beside each other slow each other down. A process
         that is the first to read a corpus prepares it, which its seconds until the first step then contain.
Checked  tests/study/test_estimate.py
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from scrimp.errors import CheckpointError, ConfigError, DataError, TrainingError
from scrimp.files import write_whole
from scrimp.host_memory import host_memory_available
from scrimp.json_files import read_json
from scrimp.report.units import format_duration
from scrimp.study.comparisons import pairs_for_bootstrap
from scrimp.study.definition import Study
from scrimp.study.job import RUNS, Job, data_digest, read_run_of
from scrimp.study.processes import Process, last_step
from scrimp.study.rounds import steps_of, survivors
from scrimp.study.rows import Key, Row, digest_of, read_rows
from scrimp.study.variants import MOST_RUNS, TRUNK, Variant

PROBES: Final = "probes.json"
_COSTS_NOTHING: Final[Mapping[str, str]] = {
    "checkpoint": "every keep_every keep_last",
    "evaluation": "every tokens",
    "objective": "z_loss",
    "optimizer": "beta1 beta2 eps lr momentum weight_decay",
    "run": "rounding_seed seed",
    "schedule": "final_lr_ratio name warmup_steps",
    "snip": "policy",
    "train": "steps",
}
"""Settings whose values leave the cost of a step the same, or nearly so."""
_STEPS: Final = 8
_ENOUGH_S: Final = 20.0
"""After the first step; then three steps are enough."""
_LONGEST_S: Final = 1800.0
_LOOK_S: Final = 0.2
_FREE_SHARE: Final = 0.9
_CUDA_CONTEXT: Final = 1 << 30
_MOST_BYTES: Final = 2**24
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the first steps of a run showed."""

    startup_seconds: float
    """Time from the beginning of the process to its first step."""
    step_seconds: float
    host_bytes: int
    """Host memory of the run: what its process had before, and what its plan predicts."""
    device_bytes: int
    """GPU memory; 0 on a CPU."""
    micro_batch: int | None
    """The size that the run decided on, where it was left open."""
    data: str
    """Digest of tokenizer and corpus."""
    threads: int
    """Threads of the run."""


def threads_of(study: Study, folder: Path) -> int:
    """Threads of each run: as the file says, or the cores shared among all runs; of runs that are timed all cores.

    Other threads sum in another order. What the folder's runs began with therefore stays, whatever seeds and machines
    come later.

    Raises:
        ConfigError: the file asks for others than that.
    """
    begun = _begun_threads(folder)
    if study.threads is not None:
        if begun not in (None, study.threads):
            raise ConfigError(
                f"the runs in {folder} have other threads than the study",
                got=f"threads = {study.threads}",
                expected=f"{begun}, with which they were begun: sums in another order are other numbers",
                do="leave threads as they were, or give another folder with --out",
            )
        return study.threads
    if begun is not None:
        return begun
    variants = len(study.runs) if study.descent is None else len(study.descent.least())
    runs = 1 if study.is_timed else variants * len(study.seeds)
    return max(1, cores() // runs)


def _begun_threads(folder: Path) -> int | None:
    """Those of the newest row, or of the probes where runs have begun and none has ended; None: no run has begun."""
    rows = [row.environment.get("threads") for row in read_rows(folder).values()]
    probed = (
        [one.threads for one in kept_probes(folder).values()] if any((folder / RUNS).glob("*.toml")) else []
    )
    known = [one for one in (*probed, *rows) if isinstance(one, int)]
    return known[-1] if known else None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def probe_all(study: Study, folder: Path, threads: int, say: Say, *, trusts: bool) -> dict[str, Probe]:
    """The cost of each variant's runs, by name: from the folder of an earlier call, or measured.

    Raises:
        TrainingError: a run does not begin; with what it said.
        DataError: variants would read different data.
    """
    known, found = kept_probes(folder), dict[str, Probe]()
    for variant in study.runs_of_a_seed:
        if variant.combined is not None:  # what is evaluated has no steps
            found[variant.name] = found[variant.needs[0]]
            continue
        settings = _settings_of_probe(study, variant)
        key = digest_of({**_that_cost(study, settings), "threads": threads})
        if key not in known:
            say(f"measuring the first steps of {variant.name} ...")
            known[key] = _probe(study, variant, settings, threads, trusts=trusts)
            write_whole(
                folder / PROBES, json.dumps({name: asdict(one) for name, one in known.items()}, indent=1)
            )
        found[variant.name] = known[key]
    control = found[study.control]
    for name, one in found.items():
        if one.data != control.data and not (name == TRUNK and study.trunk_has_own_data):
            raise DataError(
                f"{name} and {study.control} would read different data",
                got=f"corpora {one.data[:12]} and {control.data[:12]}",
                expected="one tokenizer and one corpus for all runs of a study",
                do="name the tokenizer under [settings], as data.tokenizer or data.vocab_size",
            )
    return found


def with_micro_batch(settings: Mapping[str, Any], probe: Probe) -> dict[str, Any]:
    """Settings with the micro-batch that the probed run decided on, where they leave it open."""
    is_open = settings.get("train.micro_batch") is None and settings.get("memory.split") != "fastest"
    more = {"train.micro_batch": probe.micro_batch} if is_open and probe.micro_batch else {}
    return dict(settings) | more


def seconds_of(
    study: Study, probes: Mapping[str, Probe], done: Mapping[tuple[str, int], int], places: int
) -> float:
    """Seconds that the steps that are left take, in so many places.

    Args:
        done: the last step of each run that has ended, by variant and seed.
    """
    each = [
        probes[name].startup_seconds + steps * probes[name].step_seconds for name, steps in _left(study, done)
    ]
    return max(sum(each) / places, max(each, default=0.0))


def within(study: Study, probes: Mapping[str, Probe], hours: float, places: int) -> Study:
    """The study with as many seeds as so many hours have room for, whatever of it is done: two or more, or as many as
    its interval needs.

    Raises:
        ConfigError: there is no room for these.
    """
    least = 2
    if study.interval == "bootstrap":
        least = max(least, pairs_for_bootstrap(1 - study.confidence_of_each))

    def seconds(count: int) -> float:
        return seconds_of(study.with_seeds(count), probes, {}, places)

    counts = range(least, MOST_RUNS // len(study.variants) + 1)
    count = least - 1 + bisect.bisect_right(counts, 3600 * hours, key=seconds)
    if count < least:
        raise ConfigError(
            f"--hours {hours:g} has no room for {least} seeds of {study.name}",
            got=f"{format_duration(seconds(least))} by first steps",
            do="give more hours, or runs of fewer steps (--set train.steps=...)",
        )
    return study.with_seeds(count)


def done_of(rows: Mapping[Key, Row]) -> dict[tuple[str, int], int]:
    """The last step of each run that has ended without an error, by variant and seed."""
    found = dict[tuple[str, int], int]()
    for (name, seed, steps), row in rows.items():
        if row.error is None:
            found[name, seed] = max(steps, found.get((name, seed), 0))
    return found


def steps_left(study: Study, done: Mapping[tuple[str, int], int]) -> tuple[int, int]:
    """How many runs, or with halving parts of runs, are left, and their steps."""
    left = _left(study, done)
    return len(left), sum(steps for _, steps in left)


def _left(study: Study, done: Mapping[tuple[str, int], int]) -> list[tuple[str, int]]:
    """Variant and steps of each run, or part of one, that is left."""
    found = []
    for variant, ends in _ends(study):
        for seed in study.seeds:
            at = done.get((variant.name, seed), 0)
            for begin, end in itertools.pairwise([0, *ends]):
                if end > at:
                    found.append((variant.name, end - begin))
    return found


def _ends(study: Study) -> list[tuple[Variant, list[int]]]:
    """Where each variant's rounds end; of halving as if the ones listed first went on, of a descent as if it ended
    where it begins."""
    if study.descent is not None:
        least = [study.variants[study.descent.number(one)] for one in study.descent.least()]
        return [(one, [steps_of(one)]) for one in [*([study.trunk] if study.trunk else []), *least]]
    if study.halving is None:
        return [(one, [steps_of(one)]) for one in study.runs_of_a_seed if one.combined is None]
    counts = [len(study.others)]
    for _ in range(study.halving.rounds):
        counts.append(survivors(counts[-1], study.halving.factor))
    ends = {one.name: study.halving.steps(steps_of(one)) for one in study.variants}
    trunk = [] if study.trunk is None else [(study.trunk, [steps_of(study.trunk)])]
    return trunk + [
        (
            one,
            ends[one.name]
            if one.name == study.control
            else [end for end, most in zip(ends[one.name], counts, strict=True) if place < most],
        )
        for place, one in enumerate(sorted(study.variants, key=lambda one: one.name == study.control))
    ]


# -- places ------------------------------------------------------------------------------------


def places_here(
    study: Study, probes: Mapping[str, Probe], threads: int, at_once: int | None
) -> tuple[list[dict[str, str]], str]:
    """The environment of each place on this machine, and what allows no more.

    Args:
        at_once: most places that are asked for.
    """
    runs = len(study.variants) * len(study.seeds)
    wanted = min(runs, at_once or runs)
    gpus = _gpus() if any(one.device_bytes for one in probes.values()) else []
    environments = _on_gpus(gpus, max(one.device_bytes for one in probes.values())) if gpus else []
    if study.is_timed:
        return environments[:1] or [{}], "they are timed, and go alone"
    host = max(1, max(one.host_bytes for one in probes.values()))
    limits = {
        "there are no more runs" if at_once is None or at_once >= runs else "--at-once": wanted,
        f"{cores()} cores, {threads} for each": cores() // threads,
        "the host's memory": int(host_memory_available() * _FREE_SHARE / host),
    }
    if gpus:
        limits["the memory of GPUs"] = len(environments)
    why = min(limits, key=lambda name: limits[name])
    count = max(1, limits[why])
    return (environments or [{}] * count)[:count], why


def _on_gpus(gpus: Sequence[tuple[str, int]], need: int) -> list[dict[str, str]]:
    """A place for each share of a GPU, one GPU after the other; one on the freest where no GPU has room for a run."""
    fits = [int(free * _FREE_SHARE) // need for _, free in gpus]
    if not any(fits):
        freest = max(range(len(gpus)), key=lambda number: gpus[number][1])
        fits[freest] = 1
    return [
        {"CUDA_VISIBLE_DEVICES": name}
        for number in range(max(fits))
        for (name, _), most in zip(gpus, fits, strict=True)
        if number < most
    ]


def _gpus() -> list[tuple[str, int]]:
    """Each GPU as CUDA_VISIBLE_DEVICES names it, and its free bytes."""
    import torch

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = seen.split(",") if seen else [str(number) for number in range(count)]
    return [(names[number], torch.cuda.mem_get_info(number)[0]) for number in range(count)]


# -- probes ------------------------------------------------------------------------------------


def _that_cost(study: Study, settings: Mapping[str, Any]) -> dict[str, Any]:
    free = {f"{part}.{name}" for part, names in _COSTS_NOTHING.items() for name in names.split()}
    free |= {"data.mix"} if study.figure == "mean_source_loss" else set()  # of the same sources
    return {key: value for key, value in settings.items() if key not in free}


def kept_probes(folder: Path) -> dict[str, Probe]:
    """Probes of an earlier call; none where they cannot be read."""
    with contextlib.suppress(CheckpointError):
        if (folder / PROBES).exists():
            return read_json(
                folder / PROBES, dict[str, Probe], error=CheckpointError, do="", at_most=_MOST_BYTES
            )
    return {}


def _settings_of_probe(study: Study, variant: Variant) -> dict[str, Any]:
    """Those of a variant's run, as far as it can begin before the runs that it needs."""
    settings = study.settings_of(variant, study.seeds[0])
    if study.trunk is not None:  # of the same sizes, but it need not be there yet
        settings |= {key: value for key, value in study.trunk.settings.items() if key.startswith("model.")}
    settings = _without_needed(study, variant, settings)
    if "model.weights" not in settings:  # what only a run that goes on from other weights can have
        alone = ("adapter.", "optimizer.from_weights")
        settings = {key: value for key, value in settings.items() if not key.startswith(alone)}
    if study.trunk is not None:
        settings["data.vocab_size"] = study.trunk.settings.get("data.vocab_size")
    return settings | {"evaluation.every": 0, "checkpoint.every": 0, "checkpoint.keep_every": 0}


def _probe(
    study: Study, variant: Variant, settings: Mapping[str, Any], threads: int, *, trusts: bool
) -> Probe:
    with tempfile.TemporaryDirectory(prefix="scrimp-study-") as name:
        job = Job(
            variant=variant.name,
            seed=study.seeds[0],
            digest="",
            settings=settings,
            steps=steps_of(variant),
            folder=Path(name),
            figure=study.recorded_figure_of(variant),
            threads=threads,
            trusts=trusts,
        )
        began = time.monotonic()
        process, first, error = Process(job), None, None
        try:
            while True:
                steps, now = last_step(job.run_folder), time.monotonic()
                first = first or (now if steps else None)
                ended = process.row()
                if ended is not None:
                    error = ended.error
                    break
                if steps >= _STEPS or (steps >= 3 and first and now > first + _ENOUGH_S):
                    break
                if now > began + _LONGEST_S:
                    error = f"no {_STEPS} steps in {_LONGEST_S:,.0f} s"
                    break
                time.sleep(_LOOK_S)
        finally:
            process.kill()
        return _of_run(job, (first or time.monotonic()) - began, error)


def _without_needed(study: Study, variant: Variant, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without the runs that they name, which are not there yet: of the same model and tokenizer, without
    teachers."""
    for key in variant.naming:
        for of_tokenizer in ("data.vocab_size", "data.tokenizer"):
            settings[of_tokenizer] = variant.settings.get(of_tokenizer)
        del settings[key]
        if key == "model.weights":
            like = study.origin_of(variant).settings
            settings |= {name: one for name, one in like.items() if name.startswith("model.")}
        else:
            settings["objective.name"] = "next-token"
            for alone in ("objective.written", "objective.written_tokens"):
                settings.pop(alone, None)
    return settings


def _of_run(job: Job, startup: float, error: str | None) -> Probe:
    run = read_run_of(job)
    seconds = [] if run is None else run.recorded("step_s")[1].tolist()
    if run is None or not seconds:
        raise TrainingError(
            f"{job.variant} does not train",
            got=error or "no step was recorded",
            expected="a run that begins",
            do=f"try its settings with `scrimp train`: {'; '.join(job.toml.splitlines()[1:])}",
        )
    planned = run.plan.get("predicted", {})
    on_device, on_host = (int(planned.get(f"peak_{one}_bytes") or 0) for one in ("device", "host"))
    before = int((run.last("process_peak_bytes") or 0) - (run.last("process_growth_bytes") or 0))
    is_cuda = str(run.setting("device") or "").startswith("cuda")
    micro_batch = run.setting("train.micro_batch")
    return Probe(
        startup_seconds=startup,
        step_seconds=statistics.median(seconds[1:] or seconds),
        host_bytes=max(0, before) + on_host + (0 if is_cuda else on_device),
        device_bytes=on_device + _CUDA_CONTEXT if is_cuda else 0,
        micro_batch=micro_batch if isinstance(micro_batch, int) else None,
        data=data_digest(job.run_folder, job.figure),
        threads=job.threads,
    )
