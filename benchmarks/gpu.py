"""Everything that needs a GPU, in one command: first checks, then measurements, a table last.

Checks    The tests marked `gpu`. A compiled bf16 run on packed documents: its loss falls; two runs with the same
          seed and one that is resumed half-way have the same losses bit for bit; its predicted peak memory
          is compared with the measured one. The exported model gives the same greedy text in
          transformers.
Measures  `benchmarks/step.py` with both sides compiled, at sizes from 60M to 0.5B.
Run       python benchmarks/gpu.py            # results under benchmarks/results/
          python benchmarks/gpu.py --checks   # only the checks
It needs the `dev` extra of the package, and starts `scrimp` from this checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from environment import RESULTS, ROOT, facts, write_pair
from rich.console import Console
from rich.table import Table

SIZES = ("llama-60m", "llama-300m", "qwen2.5-0.5b")
Outcome = tuple[str, bool, str]
"""What was checked, whether it held, and the figure that shows it."""


def command(*words: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Run a command in this checkout with the package on the path."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def train(run_dir: Path, *more: str) -> dict[int, float]:
    """Train on the standard library's text, compiled and in bf16; step to loss."""
    done = command(sys.executable, "-m", "scrimp", "train", f"--run.dir={run_dir}", *more)
    if done.returncode:
        raise RuntimeError(
            f"scrimp train failed with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


RUN = (
    "--device=cuda",
    "--precision=bf16",
    "--model.preset=llama-20m",
    "--train.steps=40",
    "--train.checkpoint-every=20",
    "--train.keep-last=3",
)


def check_gpu_tests(scratch: Path) -> Outcome:
    """The tests that skip themselves elsewhere: all of them skipped would be no proof."""
    # No -q here: pyproject.toml has one, and with a second pytest prints no summary.
    done = command(sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests")
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return "tests marked gpu", done.returncode == 0 and some_passed(summary), summary


def some_passed(summary: str) -> bool:
    """Whether pytest's last line counts a passed test and no failed one."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summary)}
    return counts.get("passed", 0) > 0 and not counts.keys() & {"failed", "error", "errors"}


def check_determinism(scratch: Path) -> Outcome:
    """Equal seeds give equal losses, compiled kernels and masked documents included."""
    first, second = train(scratch / "first", *RUN), train(scratch / "second", *RUN)
    fell = first[40] < first[1] - 1.0
    return (
        "loss falls; two runs equal bit for bit",
        first == second and fell,
        f"{first[1]:.3f} to {first[40]:.3f}",
    )


def check_resume(scratch: Path) -> Outcome:
    """A run resumed from its middle repeats the same losses."""
    whole, resumed = scratch / "first", scratch / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000040")
    again = train(resumed, "--resume")
    before = [json.loads(line) for line in (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    differing = [record["step"] for record in before if again[record["step"]] != record["loss"]]
    return "resumed run equal bit for bit", not differing, f"{len(differing)} of {len(before)} steps differ"


def check_memory(scratch: Path) -> Outcome:
    """Predicted against measured peak of device memory."""
    plan = json.loads((scratch / "first" / "plan.json").read_text(encoding="utf-8"))
    predicted, measured = plan["predicted"]["peak_device_bytes"], plan["measured"]["peak_device_bytes"]
    return (
        "predicted peak within 15 % of measured",
        abs(predicted / measured - 1) < 0.15,
        f"{predicted / measured - 1:+.1%}",
    )


def check_export(scratch: Path) -> Outcome:
    """Greedy text from the exported model in transformers equals Scrimp's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = scratch / "exported"
    done = command(sys.executable, "-m", "scrimp", "export", str(scratch / "first"), str(exported))
    if done.returncode:
        return "greedy text equals transformers'", False, done.stderr[-200:]
    words = (
        "generate",
        str(scratch / "first"),
        "--prompt=import ",
        "--tokens=32",
        "--temperature=0",
        "--device=cpu",
    )
    ours = command(sys.executable, "-m", "scrimp", *words).stdout.strip()
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(exported, dtype="float32"),
        AutoTokenizer.from_pretrained(exported),
    )
    ids = model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=32, do_sample=False)
    theirs = tokenizer.decode(ids[0], skip_special_tokens=True).strip()
    return "greedy text equals transformers'", ours == theirs, repr(ours[:40])


CHECKS: tuple[Callable[[Path], Outcome], ...] = (
    check_gpu_tests,
    check_determinism,
    check_resume,
    check_memory,
    check_export,
)


def run_checks() -> list[Outcome]:
    """Every check; a failed one does not hide the next."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="scrimp-gpu-") as scratch:
        for check in CHECKS:
            began = time.perf_counter()
            try:
                outcome = check(Path(scratch))
            except Exception as error:
                outcome = (check.__name__, False, str(error)[-500:])
            outcomes.append(outcome)
            print(
                f"{outcome[0]}: {'ok' if outcome[1] else 'FAILED'} ({outcome[2]}), {time.perf_counter() - began:.0f} s"
            )
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", action="store_true", help="only the checks")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("NOT RUN: torch sees no CUDA device here")
        return 1
    record = facts("torch", "triton", "transformers", "tokenizers", "numpy")
    record |= {"date": arguments.date, "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    outcomes = run_checks()
    if not arguments.checks:
        words = ("--device", "cuda", "--compile", "--precision", "bf16", "--sizes", *SIZES)
        words += ("--date", arguments.date, "--out", str(arguments.out.resolve()))
        print(command(sys.executable, "benchmarks/step.py", *words).stdout)
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("check", "held", "figure"):
        table.add_column(column)
    for name, held, figure in outcomes:
        table.add_row(name, "yes" if held else "NO", figure)
    Console().print(table)
    write_pair(arguments.out, f"{arguments.date}-gpu-checks", record | {"checks": outcomes})
    return 0 if all(held for _, held, _ in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
