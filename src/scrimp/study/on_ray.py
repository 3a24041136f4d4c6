"""Runs of a study on the machines of a Ray cluster: each is a task, in which a process of `scrimp train` runs.

Problem  A study of many runs is done sooner on several machines. They may share a file system or not.
Method   A task gets the run as data, asks for its threads as CPUs, for its memory and for its share of a GPU, runs the
         process on whatever machine it lands on, and gives the row back: rows are written by the study alone. A task
         whose machine is lost is given to another one by Ray. Where the folder is shared, it goes on from the newest
         checkpoint, else from the beginning, with the same losses.
         A Ray of this machine alone (`local`) is started and stopped with the study.
Limits   All machines have Scrimp, and the corpus under the same name; that it is the same one, its digest in each row
         says. Where the folder is not shared, runs' own folders stay on the machines that they ran on.
Checked  tests/study/test_on_ray.py, with Ray on one machine
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from scrimp.errors import ConfigError
from scrimp.study.definition import Study
from scrimp.study.estimate import Probe
from scrimp.study.job import Job, finished_row
from scrimp.study.processes import Process, last_step
from scrimp.study.rows import Row

LOCAL: Final = "local"
_LOOK_S: Final = 0.2
_RETRIES: Final = 3
"""Times that a run is given to another machine after its own was lost."""


@contextlib.contextmanager
def ray_places(
    study: Study, probes: Mapping[str, Probe], threads: int, at_once: int | None, address: str
) -> Iterator[tuple[RayPlaces, str]]:
    """The places of a cluster, and what allows no more.

    Raises:
        ConfigError: runs are timed, Ray is not installed, the cluster is not there, or no machine has room for a run.
    """
    if study.is_timed:
        raise ConfigError(
            "runs that are timed do not go on a Ray cluster",
            got=f"figure {study.figure}",
            expected="one machine for all of them, and one run at a time",
            do="leave --ray out",
        )
    ray = _ray()
    _connect(ray, address)
    try:
        need = _needs(probes, threads)
        room = sum(_room(node["Resources"], need) for node in ray.nodes() if node["Alive"])
        if room == 0:
            raise ConfigError(
                "no machine of the Ray cluster has room for a run",
                got="; ".join(_shown(node["Resources"]) for node in ray.nodes() if node["Alive"]),
                expected=_shown(need),
                do="lower threads in the study, or add machines",
            )
        runs = len(study.variants) * len(study.seeds)
        limits = {"the cluster's machines": room, "there are no more runs": runs}
        if at_once is not None:
            limits["--at-once"] = at_once
        why = min(limits, key=lambda name: limits[name])
        places = RayPlaces(ray, limits[why], need)
        try:
            yield places, why
        finally:
            places.close()
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    try:
        if address == LOCAL:
            ray.init(log_to_driver=False, include_dashboard=False)
        else:
            ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected="the address of one, auto, or local",
            do="start one with `ray start --head`, or give --ray local",
        ) from None


class RayPlaces:
    """Places on the machines of a cluster.

    Args:
        need: what a task asks for: CPU, GPU, memory.
    """

    def __init__(self, ray: Any, count: int, need: Mapping[str, float]) -> None:
        self._ray, self.count = ray, count
        self._task = ray.remote(run_here).options(
            num_cpus=need["CPU"],
            num_gpus=need.get("GPU", 0),
            memory=int(need["memory"]),
            max_retries=_RETRIES,
            scheduling_strategy="SPREAD",
        )
        self._going: dict[Any, Job] = {}

    def start(self, job: Job) -> None:
        """Begin a job in a free place."""
        self._going[self._task.remote(job)] = job

    def ended(self) -> list[tuple[Job, Row]]:
        """Those that ended since this was last asked."""
        if not self._going:
            return []
        ready, _ = self._ray.wait(list(self._going), num_returns=len(self._going), timeout=0)
        return [(job, self._row(one, job)) for one in ready for job in [self._going.pop(one)]]

    def steps(self) -> dict[str, int]:
        """The last step of each run that goes on, by name; where the folder is not shared always 0."""
        return {job.name: last_step(job.run_folder) for job in self._going.values()}

    def close(self) -> None:
        """End what still runs, with a checkpoint each."""
        for one in self._going:
            self._ray.cancel(one)
        if self._going:
            self._ray.wait(list(self._going), num_returns=len(self._going), timeout=90)
        self._going.clear()

    def _row(self, one: Any, job: Job) -> Row:
        try:
            row: Row = self._ray.get(one)
        except Exception as error:  # what Ray raises for a task is of the class of what the task raised
            words = " ".join(str(error).split())
            return Row(
                variant=job.variant,
                seed=job.seed,
                steps=job.steps,
                digest=job.digest,
                error=f"its task on Ray failed: {words[-400:]}",
            )
        return row


def run_here(job: Job) -> Row:
    """The body of a task: run the process to its end on the machine that the task landed on."""
    done = finished_row(job)
    if done is not None:
        return done
    process = Process(replace(job, environment=_gpu_of_task()))
    try:
        while (row := process.row()) is None:
            time.sleep(_LOOK_S)
        return row
    except BaseException:
        process.ask_to_end()
        process.end()
        raise


def _gpu_of_task() -> dict[str, str]:
    """The GPU that Ray gave the task, for its process."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}


def _needs(probes: Mapping[str, Probe], threads: int) -> dict[str, float]:
    """What a run asks of a machine, by Ray's names of resources."""
    need: dict[str, float] = {"CPU": threads, "memory": max(one.host_bytes for one in probes.values())}
    if any(one.device_bytes for one in probes.values()):
        need["GPU"] = 1
    return need


def _room(has: Mapping[str, float], need: Mapping[str, float]) -> int:
    """Runs that a machine has room for."""
    return int(min(has.get(name, 0.0) // amount for name, amount in need.items() if amount > 0))


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):,.0f}" for name in ("CPU", "GPU", "memory"))


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray is not installed",
            expected="the extra of Scrimp that brings it",
            do="pip install 'scrimp[ray]', or leave --ray out",
        ) from None
    return ray
