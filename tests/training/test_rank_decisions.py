"""What one rank of two sees alone decides the same on both: each guard, check and store with other inputs by rank."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from distributed import spawn
from rich.console import Console

from scrimp.config import Config, ModelConfig, RunConfig, TrainConfig
from scrimp.errors import ScrimpError
from scrimp.host_memory import host_memory_available
from scrimp.profiler import peaks_of, resolve_device
from scrimp.training import checkpoint
from scrimp.training.checkpoint import CheckpointStore
from scrimp.training.guards import NonFiniteGuard, StopSignals
from scrimp.training.memory.block_seconds import links_of
from scrimp.training.memory.check import STEPS, WARM_UP, MemoryCheck
from scrimp.training.memory.limits import host_free
from scrimp.training.metrics import MetricsLog
from scrimp.training.progress import StepLine
from scrimp.training.run_folder import RunLock, claim_new_folder
from scrimp.training.setup import Decisions, decide
from scrimp.world import World

pytestmark = pytest.mark.slow

GIVEN = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=2),
    train=TrainConfig(steps=4, sequence=64, batch_tokens=256, micro_batch=2),
)


def refused(act: Any) -> str:
    """What is raised, in words."""
    try:
        act()
    except ScrimpError as error:
        return str(error)
    return ""


def signals(world: World) -> dict[str, Any]:
    """The second rank is sent one."""
    said: list[str] = []
    with StopSignals(said.append, world) as found:
        before = found.should_stop()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        after = found.should_stop(), found.should_stop()
    return {"stops": (before, *after), "code": found.exit_code, "said": said}


def not_finite(world: World) -> dict[str, Any]:
    """The second rank has a NaN twice, then the first an infinity."""
    guard, here = NonFiniteGuard(3, world), world.rank == 1
    losses = [
        1.0,
        float("nan") if here else 1.0,
        float("nan") if here else 1.0,
        1.0 if here else float("inf"),
    ]
    reasons = [guard.check(loss, 2.0) for loss in losses]
    return {"reasons": reasons, "stop": refused(lambda: guard.stop_if_exhausted(4))}


def memory(world: World, decisions: Decisions) -> dict[str, Any]:
    """The second rank is slower and fuller."""
    seconds = [9.0] * WARM_UP + [1.0 + world.rank] * STEPS
    check = MemoryCheck(decisions.memory, 0, world)
    compared = check.after_step(decisions.plan, len(seconds), seconds, 1000 * (1 + world.rank))
    assert compared is not None
    return {
        "compared": (compared.sentence, compared.measured),
        "free": (int(world.smallest(decisions.device.available_bytes)), host_free(decisions.device)),
    }


def measured(decisions: Decisions) -> dict[str, Any]:
    """What each rank would find other figures for."""
    return {"peaks": peaks_of(decisions.device), "links": links_of(decisions.device)}


def checkpoints(world: World, folder: Path) -> dict[str, Any]:
    """The writer's disk is full at first; then the ranks have folders of their own."""
    store = CheckpointStore(folder / "of-both", keep_last=2, keep_every=0, world=world)
    tensors = {"model.w": torch.full((4,), float("nan"))}
    full = shutil.disk_usage(folder)._replace(free=0)
    with patch.object(shutil, "disk_usage", lambda path: full):
        refusal = refused(lambda: store.save(1, tensors, {}, {}))
    store.save(1, tensors, {"step": 1}, {})
    store.wait()
    done = store.poll(), store.poll(), store.not_finite
    apart = CheckpointStore(folder / f"of-{world.rank}", keep_last=2, keep_every=0, world=world)
    with patch.object(checkpoint, "_SEEN_WITHIN", 0.1):
        refusals = (
            refused(lambda: apart.save(1, tensors, {}, {})),
            refused(apart.refuse_separate_folders),
        )
    store.refuse_separate_folders()
    world.barrier()
    left = [path.name for path in sorted(folder.rglob("*")) if path.suffix == ".partial"]
    return {"refusal": refusal, "done": done, "apart": refusals, "left": left}


def files(world: World, folder: Path) -> dict[str, Any]:
    """Log, console, lock and name of the run."""
    named = Config(run=RunConfig(dir=folder / "run"))
    with claim_new_folder(named, world) as run_dir:
        log = MetricsLog(run_dir / str(world.rank), resume_step=None, world=world)
        log.step({"step": 1, "loss": 1.0})
        log.event("start", 0, "here")
        log.close()
        shown = io.StringIO()
        with StepLine(total_steps=1, console=Console(file=shown), world=world) as line:
            line.message("hello")
        again = refused(lambda: RunLock(run_dir, world).__enter__())
    return {
        "folder": str(run_dir),
        "has log": (run_dir / str(world.rank)).exists(),
        "shown": bool(shown.getvalue()),
        "again": again,
    }


def decided_by(rank: int, folder: Path) -> dict[str, Any]:
    """All of it, in one start of two processes."""
    world = World.current()
    device = resolve_device("cpu", world)
    own = host_memory_available()
    decisions = dataclasses.replace(decide(GIVEN), device=device)
    found: dict[str, Any] = {"device": device.available_bytes, "own": own}
    found |= signals(world) | not_finite(world) | memory(world, decisions) | measured(decisions)
    return found | checkpoints(world, folder) | files(world, folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    found = spawn(2, decided_by, tmp_path_factory.mktemp("meeting"), tmp_path_factory.mktemp("files"))
    return found[0], found[1]


Both = tuple[dict[str, Any], dict[str, Any]]


def test_a_signal_to_one_rank_stops_both_by_its_number(both: Both) -> None:
    for rank in both:
        assert rank["stops"] == (False, True, True)
        assert rank["code"] == 128 + signal.SIGTERM
    assert both[0]["said"] == ["SIGTERM on rank 1: writing a checkpoint"]
    assert both[1]["said"] == [
        "SIGTERM: finishing this step and writing a checkpoint; once more stops at once"
    ]


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(both: Both) -> None:
    for rank in both:
        assert rank["reasons"] == [
            None,
            "rank 1: loss nan, gradient norm 2.0",
            "rank 1: loss nan, gradient norm 2.0",
            "rank 0: loss inf, gradient norm 2.0",
        ]
        assert "3 steps in a row up to step 4 were not finite" in rank["stop"]


def test_the_slowest_and_the_fullest_rank_are_compared_with_the_prediction(both: Both) -> None:
    assert both[0]["compared"] == both[1]["compared"]
    _, figures = both[0]["compared"]
    assert (figures.step_seconds, figures.peak_device_bytes) == (2.0, 2000)


def test_limits_are_those_of_the_rank_with_the_least_memory(both: Both) -> None:
    assert both[0]["device"] == both[1]["device"]
    assert both[0]["free"] == both[1]["free"]
    assert both[0]["device"] <= max(both[0]["own"], both[1]["own"])  # two ranks share this host's


def test_what_is_measured_on_one_rank_is_reckoned_with_on_both(both: Both) -> None:
    """Two processes never measure the same rates."""
    assert both[0]["peaks"] == both[1]["peaks"]
    assert both[0]["links"] == both[1]["links"]


def test_a_full_disk_refuses_a_checkpoint_on_both(both: Both) -> None:
    assert "no space for a checkpoint" in both[0]["refusal"]
    assert both[1]["refusal"].startswith("rank 0: writing the checkpoint of step 1 failed: no space")
    for rank in both:
        assert rank["done"] == ([1], [], {1: ("model.w",)})


def test_ranks_that_see_different_folders_are_refused(both: Both) -> None:
    for rank in both:
        for refusal in rank["apart"]:
            assert "ranks see different folders for checkpoints" in refusal
            assert "of-1/checkpoints/.step-" in refusal
        assert rank["left"] == []


def test_one_rank_locks_writes_and_shows(both: Both) -> None:
    assert both[0]["folder"] == both[1]["folder"]
    assert [rank["has log"] for rank in both] == [True, False]
    assert [rank["shown"] for rank in both] == [True, False]
    assert all("is in use" in rank["again"] for rank in both)
