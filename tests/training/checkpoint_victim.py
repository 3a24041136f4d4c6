"""The process that test_checkpoint_kill.py kills: saves checkpoint after checkpoint, alone or as one rank of several.

Run as ``checkpoint_victim.py RUN_DIR RANKS``. It imports torch once and forks a victim per line of
its input, with the other ranks beside it, so that fifty kills cost fifty forks:

    random SECONDS RANK    kill -9 that rank so long after its first save began
    call NUMBER RANK       that rank kills itself just before its NUMBER-th file operation

and answers ``killed`` or, if the victim came to its end first, ``ended``. The other ranks are left to
notice by themselves; only then does it answer.
"""

from __future__ import annotations

import builtins
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scrimp.parts import TensorPart
from scrimp.training.checkpoint import CheckpointStore
from scrimp.world import World

SAVES = 1_000_000
SAVES_WHEN_COUNTED = 3
PATIENCE = timedelta(seconds=60)
"""So long a rank waits for another; one whose peer is dead is told by the system, at once."""


def expected(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a step, by a rule that the test knows too."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(200, 100, generator=generator),
        "model.bias": torch.randn(100, generator=generator).bfloat16(),
        "optimizer.weight.exp_avg": torch.randn(200, 100, generator=generator),
        "optimizer.updates": torch.tensor(step),
    }


def parts(tensors: dict[str, torch.Tensor], world: World) -> dict[str, TensorPart]:
    """What a rank holds: rows of the weight, columns of its moments, and a copy of the rest, which rank 0 writes."""
    found = {}
    for name, tensor in tensors.items():
        local, offsets, is_writer = tensor, [0] * tensor.dim(), world.is_writer
        if tensor.dim() == 2:
            dimension = 0 if name.startswith("model") else 1
            size = tensor.shape[dimension] // world.size
            offsets[dimension], is_writer = world.rank * size, True
            local = tensor.narrow(dimension, world.rank * size, size)
        found[name] = TensorPart(local, tuple(tensor.shape), tuple(offsets), is_writer)
    return found


def train(run_dir: Path, saves: int, world: World, begun: Callable[[], None]) -> None:
    """What a run does: go on from the newest good checkpoint, and save as it goes."""
    store = CheckpointStore(run_dir, keep_last=2, keep_every=7, world=world)
    checkpoint, errors = store.latest()
    if errors:
        raise errors[0]
    first = checkpoint.step if checkpoint else 0
    begun()
    # The first one is saved once more: replacing an existing checkpoint is killed as well.
    for step in range(max(first, 1), first + saves + 1):
        tensors = expected(step)
        store.save(step, parts(tensors, world), {"step": step}, {"config.toml": f"# {step}\n"})
        for tensor in tensors.values():
            tensor.zero_()  # training goes on at once
        for _ in range(3):
            store.poll()
    store.wait()


def die_before_call(number: int) -> None:
    """Wrap what touches the disk, so that this process kills itself before the `number`-th call."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "pwrite"):
        setattr(os, name, counted(getattr(os, name)))
    builtins.open = counted(open)
    shutil.rmtree = counted(shutil.rmtree)


def fork_rank(run_dir: Path, meeting: Path, world: World, how: str, amount: str) -> tuple[int, int]:
    """One rank: its process, and what can be read from when its first save begins, or it is dead.

    Args:
        how: "call" where it kills itself.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    try:
        if world.size > 1:
            store = dist.FileStore(str(meeting / "store"), world.size)
            dist.init_process_group(
                "gloo", store=store, rank=world.rank, world_size=world.size, timeout=PATIENCE
            )
        if how == "call":
            die_before_call(int(amount))
        train(run_dir, SAVES_WHEN_COUNTED if amount else SAVES, world, lambda: os.close(writer))
        if world.size > 1:
            dist.destroy_process_group()
    except BaseException as error:
        if world.size == 1:
            sys.stderr.write(f"{error!r}\n")
        os._exit(1)
    os._exit(0)


def fork_victim(run_dir: Path, ranks: int, how: str, amount: str, rank: str = "0") -> str:
    """One victim, and the ranks beside it; returns when all are dead."""
    with tempfile.TemporaryDirectory() as meeting:
        found = [
            fork_rank(
                run_dir,
                Path(meeting),
                World(number, ranks),
                how if number == int(rank) else "watch",
                amount if how == "call" else "",
            )
            for number in range(ranks)
        ]
        victim, reader = found[int(rank)]
        os.read(reader, 1)  # ends when the victim closes its end, or dies
        if how == "random":
            time.sleep(float(amount))
            os.kill(victim, signal.SIGKILL)
        statuses = {child: os.waitpid(child, 0)[1] for child, _ in found}
        for _, pipe in found:
            os.close(pipe)
    if os.WIFSIGNALED(statuses[victim]) and os.WTERMSIG(statuses[victim]) == signal.SIGKILL:
        return "killed"
    return "ended" if not any(statuses.values()) else f"failed with {statuses}"


def main() -> None:
    torch.set_num_threads(1)
    run_dir, ranks = Path(sys.argv[1]), int(sys.argv[2])
    for line in sys.stdin:
        print(fork_victim(run_dir, ranks, *line.split()), flush=True)


if __name__ == "__main__":
    main()
