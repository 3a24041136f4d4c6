"""Whether two versions of Scrimp train alike: the losses of every step, bit for bit.

Question  A change that must not change a number (a redesign, a layout, what is recomputed) is made in many steps. Did
          it change one?
Method    Each case runs with the package of one checkout, then with that of the other, in processes of their own, with
          one number of threads, on the same text. The losses and gradient norms of all steps and the digest of the
          last weights are compared (of transformers' callback what its Trainer logs). A case that differs between two
          runs of one version would show nothing: with --twice the second checkout is the first one again.
Cases     demo      `make demo`: formats planned while training, from the standard library's text
          offload   bf16 weights, 8-bit moments, blocks that recompute, weights, gradients and states on the host
          resumed   formats planned while training, resumed from the middle
          callback  examples/transformers_trainer.py: formats planned in transformers' Trainer
Run       git worktree add ../before COMMIT && python benchmarks/same_losses.py ../before
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environment import ROOT
from rich.console import Console

Found = dict[str, Any]

_CALLBACK = """
import hashlib, json, runpy, sys, transformers
train = transformers.Trainer.train
def then_print(self):
    self.args.logging_steps = self.state.logging_steps = 1
    done = train(self)
    digest = hashlib.sha256()
    for name, tensor in sorted(self.model.state_dict().items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    losses = [[one["loss"], one["grad_norm"]] for one in self.state.log_history if "loss" in one]
    print("FOUND", json.dumps({"losses": losses, "weights": digest.hexdigest()}))
    return done
transformers.Trainer.train = then_print
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> int:
    """Run every case in both checkouts; 1 if any differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--twice", action="store_true", help="compare the earlier version with itself")
    parser.add_argument("--steps", type=int, default=150, help="of the demo; others follow from it")
    options = parser.parse_args()
    before, console = options.before.resolve(), Console()
    after = before if options.twice else ROOT
    differs = False
    for name in options.cases:
        began = time.monotonic()
        with console.status(name):
            found = [_found(CASES[name], tree, options.steps) for tree in (before, after)]
        same = found[0] == found[1]
        differs |= not same
        seconds = time.monotonic() - began
        console.print(
            f"{name}: {'the same' if same else 'DIFFERENT'}, {_described(found[1])} ({seconds:.0f} s)"
        )
        if not same:
            console.print(_first_difference(*found))
    return int(differs)


def _found(case: Callable[[Path, Path, int], Found], tree: Path, steps: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        return case(tree, Path(folder), steps)


def _demo(tree: Path, folder: Path, steps: int) -> Found:
    return _train(tree, folder, "--precision=snip", f"--train.steps={steps}")


def _offload(tree: Path, folder: Path, steps: int) -> Found:
    placed = [f"--memory.{kind}=2" for kind in ("weights", "gradients", "optimizer")]
    limits = ["--budget.device-memory=2GB", "--budget.host-memory=2GB"]
    formats = ["--precision=bf16", "--train.parameters=bf16"]
    settings = "[train]\nmoments = '8bit'\n"
    blocks = "--memory.activations=keep,0-1=norms+offload,2=block"
    return _train(
        tree,
        folder,
        *formats,
        *placed,
        *limits,
        blocks,
        f"--train.steps={max(steps // 5, 4)}",
        settings=settings,
    )


def _resumed(tree: Path, folder: Path, steps: int) -> Found:
    count = max(steps // 3, 20)
    every = count // 2
    words = ["--precision=snip", f"--train.steps={count}", "--snip.first=5", "--snip.every=10"]
    settings = f"[train]\ncheckpoint_every = {every}\n"
    _train(tree, folder, *words, settings=settings)
    return _train(tree, folder, *words, f"--resume-from={every}", settings=settings)


def _train(tree: Path, folder: Path, *words: str, settings: str = "[train]\n") -> Found:
    """Train by command-line words and settings whose names changed: a file may have the old ones."""
    run, file = folder / "run", folder / "settings.toml"
    file.write_text(settings + "eval_every = 0\n", encoding="utf-8")
    _python(tree, "-m", "scrimp", "train", str(file), *words, f"--run.dir={run}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (weights,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    tensors = sorted(weights.rglob("*.safetensors"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in tensors)).hexdigest()
    assert tensors, f"no tensors in {weights}"
    return {"losses": [[record["loss"], record["grad_norm"]] for record in records], "weights": digest}


def _callback(tree: Path, folder: Path, steps: int) -> Found:
    out = _python(
        tree,
        "-c",
        _CALLBACK,
        str(tree / "examples" / "transformers_trainer.py"),
        f"--steps={max(steps // 3, 40)}",
    )
    (line,) = (line for line in out.splitlines() if line.startswith("FOUND "))
    found: Found = json.loads(line.removeprefix("FOUND "))
    return found


def _python(tree: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "2"}
    probe = [sys.executable, "-c", "import scrimp; print(scrimp.__file__)"]
    loaded = subprocess.run(probe, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(loaded).is_relative_to(tree), f"{tree} was asked for, {loaded} was imported"
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree.name}: {' '.join(words[:6])} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def _described(found: Found) -> str:
    return f"{len(found['losses'])} steps, last {found['losses'][-1]}, weights {found['weights'][:12]}"


def _first_difference(before: Found, after: Found) -> str:
    pairs = list(zip(before["losses"], after["losses"], strict=False))
    step = next((number for number, (one, other) in enumerate(pairs, 1) if one != other), None)
    if step is None:
        return f"  {len(before['losses'])} and {len(after['losses'])} records, weights differ"
    return f"  first at record {step}: {pairs[step - 1][0]} before, {pairs[step - 1][1]} after"


CASES: dict[str, Callable[[Path, Path, int], Found]] = {
    "demo": _demo,
    "offload": _offload,
    "resumed": _resumed,
    "callback": _callback,
}

if __name__ == "__main__":
    sys.exit(main())
