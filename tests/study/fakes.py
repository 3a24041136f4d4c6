"""Studies that train nothing: places that answer at once, and rows out of thin air."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest

from scrimp.study.definition import Study, parse_study
from scrimp.study.estimate import Probe
from scrimp.study.job import Job
from scrimp.study.rows import Curve, Key, Row
from scrimp.study.variants import TRUNK

PROBE = Probe(
    startup_seconds=2.0,
    step_seconds=0.5,
    host_bytes=1 << 20,
    device_bytes=0,
    micro_batch=4,
    data="d",
    threads=1,
)


def study_of(
    variants: Collection[str] = ("a", "b", "c"), seeds: int = 3, head: str = "", tail: str = ""
) -> Study:
    """A study of 8 steps whose variants differ in nothing but a learning rate."""
    text = f"seeds = {seeds}\n{head}\n[settings]\ntrain.steps = 8\n"
    for number, name in enumerate(variants, start=1):
        text += f'[[variants]]\nname = "{name}"\noptimizer.lr = {number / 1000}\n'
    return parse_study(text + tail, name="mine", where="mine.toml")


def row_for(
    study: Study, variant: str, seed: int, value: float | None, steps: int = 8, **more: object
) -> Row:
    """A row with a loss, or an error where the loss is None."""
    one = next(one for one in study.runs_of_a_seed if one.name == variant)
    known: dict[str, object] = {"error": "it broke"} if value is None else {"figures": {study.figure: value}}
    if value is not None:
        known["training"] = Curve(steps=[2.0, 4.0], values=[value + 1, value])
        known["held_out"] = Curve(steps=[float(steps)], values=[value])
    digest = study.digest(one, seed)
    return Row(variant=variant, seed=seed, steps=steps, digest=digest, **(known | more))  # type: ignore[arg-type]


def rows_for(study: Study, losses: Mapping[str, Collection[float | None]]) -> dict[Key, Row]:
    """Rows of the whole runs of some variants, in the order of the study's seeds."""
    rows = [
        row_for(study, name, seed, value)
        for name, values in losses.items()
        for seed, value in zip(study.seeds, values, strict=False)
    ]
    return {row.key: row for row in rows}


class Watched:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.started_jobs: list[Job] = []
        self.rows: list[Row] = []
        self.gone: list[dict[str, int]] = []

    def started(self, job: Job) -> None:
        self.started_jobs.append(job)

    def going(self, steps: Mapping[str, int]) -> None:
        pass

    def ended(self, job: Job, row: Row) -> None:
        self.rows.append(row)

    def dropped(self, ends: Mapping[str, int]) -> None:
        self.gone.append(dict(ends))


def write_finished(run: Path, steps: int, *, is_over: bool = True) -> None:
    """What a run leaves that has come so far, and to its end."""
    (run / "metrics.jsonl").write_text(json.dumps({"step": steps, "loss": 3.0}) + "\n", encoding="utf-8")
    over = {"kind": "finish", "reason": "all steps done", "step": steps}
    (run / "events.jsonl").write_text(json.dumps(over) + "\n" if is_over else "", encoding="utf-8")


class FakePlaces:
    """Places in which a run is over as soon as it began.

    Args:
        loss: of a job; None where it fails. It may raise, as a study that is killed.
    """

    def __init__(self, study: Study, loss: Callable[[Job], float | None], count: int = 2) -> None:
        self.study, self.loss, self.count = study, loss, count
        self.going: list[Job] = []
        self.most, self.is_closed = 0, False

    def start(self, job: Job) -> None:
        self.going.append(job)
        self.most = max(self.most, len(self.going))

    def ended(self) -> list[tuple[Job, Row]]:
        jobs, self.going = self.going, []
        for one in jobs:
            one.run_folder.mkdir(parents=True, exist_ok=True)
            (one.run_folder / "config.toml").touch()
            one.settings_file.write_text(one.toml)
        return [(one, self._over(one)) for one in jobs]

    def _over(self, job: Job) -> Row:
        found = self.loss(job)
        if found is not None and job.variant == TRUNK:
            write_finished(job.run_folder, job.steps)
        return row_for(self.study, job.variant, job.seed, found, job.steps)

    def steps(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.is_closed = True


def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conductor that does not wait."""
    monkeypatch.setattr("scrimp.study.conduct.time.sleep", lambda seconds: None)
