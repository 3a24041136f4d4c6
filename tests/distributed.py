"""Runs a function on several processes that form one gloo group, each with one CPU thread."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Ranks are forked from one process that has imported these already: four seconds less for each of them.
FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["scrimp.training.setup", "scrimp.api", "torch.distributed.fsdp", "torch._dynamo"]
)

TIMEOUT = timedelta(seconds=90)
"""A rank that waits for one that failed gives up."""


def spawn(world: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns on every rank, in order.

    Args:
        world: how many processes.
        function: of the top level of a module, so that a new process can import it.
        folder: an empty one of the test, where the ranks meet and leave their results.

    Raises:
        AssertionError: a rank failed; with the traceback of the first that did.
    """
    try:
        given = (world, dict(os.environ), function, folder, arguments)
        mp.start_processes(_run, given, world, start_method="forkserver")
    except Exception as error:
        # Ranks that wait for a failed one fail too, and may be noticed first.
        failures = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
        first = failures[0].read_text() if failures else str(error)
        raise AssertionError(first) from error
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world)]


def _run(
    rank: int,
    world: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    folder: Path,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)  # the one process keeps that of its first test
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        result = function(rank, *arguments)
        # Shared-memory tensors would vanish with this process.
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    except Exception:
        (folder / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()
