"""The process that test_checkpoint_kill.py kills: saves checkpoint after checkpoint.

Run as ``checkpoint_victim.py RUN_DIR``. It imports torch once and forks one victim per line of
its input, so that fifty kills cost fifty forks:

    random SECONDS    kill -9 the victim that long after its first save began
    call NUMBER       the victim kills itself just before its NUMBER-th file operation

and answers ``killed`` or, if the victim came to its end first, ``ended``.
"""

from __future__ import annotations

import builtins
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.hf_storage

from scrimp.training.checkpoint import CheckpointStore

SAVES = 1_000_000
SAVES_WHEN_COUNTED = 3


def expected(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a step, by a rule that the test knows too."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(200, 100, generator=generator),
        "model.bias": torch.randn(100, generator=generator).bfloat16(),
        "optimizer.weight.exp_avg": torch.randn(200, 100, generator=generator),
        "optimizer.updates": torch.tensor(step),
    }


def train(run_dir: Path, saves: int, begun: Callable[[], None]) -> None:
    """What a run does: go on from the newest good checkpoint, and save as it goes."""
    store = CheckpointStore(run_dir, keep_last=2, keep_every=7)
    checkpoint, errors = store.latest()
    if errors:
        raise errors[0]
    first = checkpoint.step if checkpoint else 0
    begun()
    # The first one is saved once more: replacing an existing checkpoint is killed as well.
    for step in range(max(first, 1), first + saves + 1):
        tensors = expected(step)
        store.save(step, tensors, {"step": step}, {"config.toml": f"# {step}\n"})
        for tensor in tensors.values():
            tensor.zero_()  # training goes on at once
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

    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    builtins.open = counted(open)
    shutil.rmtree = counted(shutil.rmtree)


def fork_victim(run_dir: Path, how: str, amount: str) -> str:
    """One victim; returns when it is dead."""
    reader, writer = os.pipe()
    victim = os.fork()
    if victim == 0:
        os.close(reader)
        try:
            if how == "call":
                die_before_call(int(amount))
            saves = SAVES_WHEN_COUNTED if how == "call" else SAVES
            train(run_dir, saves, lambda: os.close(writer))
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)  # ends when the victim closes its end, or dies
    os.close(reader)
    if how == "random":
        time.sleep(float(amount))
        os.kill(victim, signal.SIGKILL)
    _, status = os.waitpid(victim, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "killed"
    return "ended" if status == 0 else f"failed with {status}"


def main() -> None:
    torch.set_num_threads(1)
    run_dir = Path(sys.argv[1])
    for line in sys.stdin:
        print(fork_victim(run_dir, *line.split()), flush=True)


if __name__ == "__main__":
    main()
