"""What the proof of a plan costs in the step after a switch: whole steps with and without it, in one process.

Question  Every GEMM that a plan changes is held against `scrimp.formats` when it runs first
          (`scrimp.gemm.fingerprints`). How much longer is that step?
Method    A model is switched from fp8 to nvfp4, and back, between steps of forward and backward on one batch; pairs of
          a proven step and a plain one follow each other, and the ratio is of processor time, which other work on
          the machine disturbs least. A step of training has several micro-batches, and the first alone is looked
          at: the share of a step is that of a micro-batch over their number.
Emulated  On a CPU the quantizers of the step are the proof's own. Where kernels run the step much faster, the proof,
          in torch's operations, does not become faster with them: its share of a step is larger there.
Run       python benchmarks/switch_proof.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from planned_step import make, synchronise
from rich.console import Console
from torch import Tensor

from scrimp.data import Batch
from scrimp.gemm import LinearPrecision
from scrimp.runtime import Executable

COLUMNS = ("switch", "GEMMs proven", "step, s", "step with the proof, s", "times a step", "range")


@dataclass(frozen=True)
class Switched:
    """Steps after switches to one recipe, processor seconds."""

    recipe: str
    gemms: int
    plain: list[float]
    proven: list[float]

    @property
    def ratios(self) -> list[float]:
        """Step with the proof over step without it, pair by pair."""
        return [with_proof / without for with_proof, without in zip(self.proven, self.plain, strict=True)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-3m")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = cpu() if options.device == "cpu" else torch.cuda.get_device_name()
    before = facts("torch", "triton") | {"device": device, "threads": options.threads}
    found = measure(options)
    settings = {name: getattr(options, name) for name in ("preset", "sequence", "micro_batch")}
    record = {"environment": before, "settings": settings, "switches": [asdict(row) for row in found]}
    text = page(found, record)
    path = write_pair(options.out, f"{options.date}-switch-proof-{options.device}", record, text)
    Console().print(text, f"written: {path}", markup=False)


def measure(options: argparse.Namespace) -> list[Switched]:
    """Switches to and fro."""
    executable, tokens = make("fp8", options)
    planned = executable.planned
    assert planned is not None
    rows = {name: Switched(name, 0, [], []) for name in ("nvfp4", "fp8")}
    for round_ in range(options.repeats + 1):
        for name in rows:
            before = {layer: entry.precision for layer, entry in planned.layers.items()}
            planned.replan(LinearPrecision.of(name))
            plain = step(executable, tokens)
            proof = planned.prove(before)
            proven = step(executable, tokens)
            assert not proof.pending
            if round_:  # the first one warms up
                rows[name].plain.append(plain)
                rows[name].proven.append(proven)
                rows[name] = Switched(name, len(proof.proven), rows[name].plain, rows[name].proven)
    return list(rows.values())


def step(executable: Executable, tokens_BT: Tensor) -> float:
    """Seconds of one forward and backward pass: of the processor on a CPU, else of the clock."""
    clock = time.process_time if executable.device.type == "cpu" else time.perf_counter
    synchronise(executable.device)
    start = clock()
    executable.begin(0, 0)
    executable.loss(Batch.of(tokens_BT, tokens_BT)).total.backward()
    synchronise(executable.device)
    seconds = clock() - start
    executable.model.zero_grad(set_to_none=True)
    return seconds


def page(found: list[Switched], record: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = []
    for row in found:
        ratios = row.ratios
        rows.append(
            (
                f"to {row.recipe}",
                str(row.gemms),
                f"{statistics.median(row.plain):.2f}",
                f"{statistics.median(row.proven):.2f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            )
        )
    environment, settings = record["environment"], record["settings"]
    return "\n".join(
        [
            "# The proof of a plan, in the step after a switch",
            "",
            f"`{environment['command']}`, commit {environment['commit'][:7]}, "
            f"torch {environment['versions']['torch']}, {environment['device']}, "
            f"{environment['threads']} thread. {settings['preset']}, micro-batch of "
            f"{settings['micro_batch']} sequences of {settings['sequence']} tokens.",
            "",
            "Forward and backward of one micro-batch, measured, in processor seconds; formats are emulated. Only the "
            "first micro-batch of a plan's first step is looked at: of a step with m of them the added part is 1/m.",
            "",
            *markdown_table(COLUMNS, rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
