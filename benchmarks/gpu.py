"""Everything that needs a GPU, in parts that each fit a lease of ten minutes: checks, measurements, a table last.

smoke     Before every other part, in a minute: a matrix product, and four steps in fp8. Where it fails nothing else is
          begun.
checks    The tests of the GEMMs (Triton's kernels compiled, not interpreted) and those marked `gpu`. A
          compiled bf16 run on packed documents: its loss falls; two runs with the same seed and one that
          is resumed half-way have the same losses bit for bit; its predicted peak memory is compared with the
          measured one. The exported model gives the same greedy text in transformers.
doctor    `scrimp doctor`: every product of every recipe and back end, right and how fast.
formats   What FP8 tensor cores keep of a sum (accumulator.py). Runs in fp8, nvfp4 and fp4: the loss falls
          and stays near bf16's on the same data. Peak memory of fp8 against bf16.
gemm      gemm.py: every GEMM and the quantizers.
kernels   The tests of the step's own kernels, compiled: sums of gradients, the loss, AdamW. Then fused_passes.py: each
          right and faster than the operators that it stands for, in one run.
linear    gemm.py: whole linear layers, with the peers.
memory    memory.py: predicted against measured peaks. Its other parts are memory-cards, memory-time, memory-qwen7b,
          memory-qwen7b-8bit and memory-qwen14b here.
llmq      llmq.py: LLMQ's own speed on this card and Scrimp's, Qwen2.5-7B, by the settings of its authors for the
          smallest card that trains it; llmq-card by those for an H100, and Scrimp with all of the card.
phases    phases.py: the allocator's cache between generation and training.
snip      Formats chosen while training: the tests of GEMM times, a run that plans by a share of FLOPs and one that
          plans by a speed-up; then what measuring costs at 60M, and first pairs of the study snip_60m.toml, which goes
          on where it stopped with every call.
step      planned_step.py, then step.py with both sides compiled, at sizes from 60M to 0.5B.
Run       python benchmarks/gpu.py --part checks       # results under benchmarks/results/, after every check
          python benchmarks/gpu.py                     # all parts, one after the other
It needs the `dev` extra of the package, and starts `scrimp` from this checkout. Every check has a limit of its own,
after which all that it started is killed; what the time of a part (--budget-s) does not suffice for counts as not
held, and says so. Full logs lie beside the results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, facts, write_pair
from gpu_checks import (
    NEAR,
    benchmark,
    check_accumulator,
    check_determinism,
    check_doctor,
    check_export,
    check_format_memory,
    check_gemm_tests,
    check_gpu_tests,
    check_kernel_tests,
    check_losses,
    check_memory,
    check_planned_run,
    check_resume,
    check_smoke,
    check_study,
    check_time_tests,
)
from gpu_session import Outcome, Session, SkippedError
from rich.console import Console
from rich.table import Table

SIZES = ("llama-60m", "llama-300m", "qwen2.5-0.5b")


@dataclass(frozen=True)
class Check:
    """One check, and the seconds that it may take."""

    run: Callable[[Session], Outcome]
    limit_s: float


WHOLE = float("inf")
"""All that is left of the part."""
Row = tuple[str, str, bool, str]


# -- measurements ------------------------------------------------------------------------------


def measured(script: str, *words: str, session: Session) -> Outcome:
    """A benchmark as an outcome: it ran to its end."""
    if script in ENDS_BY_ITSELF:  # with what it has
        words += ("--budget-s", f"{max(1.0, session.left_s - ENDS_BY_ITSELF[script]):.0f}")
    done = benchmark(session, script, *words)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return f"{script} {' '.join(words[:4])}", done.returncode == 0, lines[-1][-200:] if lines else ""


ENDS_BY_ITSELF = {"gemm.py": 90, "memory.py": 30, "phases.py": 30, "llmq.py": 240}
"""Scripts that take a budget, and the seconds that they need beside it."""
ON_CUDA = ("--device", "cuda")
PLANNED = (*ON_CUDA, "--compile", "--preset", "llama-300m", "--sequence", "2048", "--micro-batch", "8")
COST = ("--preset", "llama-60m", "--sequence", "1024", "--batch-tokens", "65536")
STEP = (
    *ON_CUDA,
    "--precision",
    "bf16",
    "--sides",
    "ours compiled",
    "transformers compiled",
    "--sizes",
    *SIZES,
)


def of_gemm(suffix: str, *parts: str) -> Check:
    """gemm.py with some of its parts."""

    def check(session: Session) -> Outcome:
        return measured("gemm.py", *ON_CUDA, "--suffix", suffix, "--parts", *parts, session=session)

    return check


def of_script(script: str, *words: str) -> Check:
    """Another benchmark."""

    def check(session: Session) -> Outcome:
        return measured(script, *words, session=session)

    return check


def limited(limit_s: float, *checks: Callable[[Session], Outcome]) -> tuple[Check, ...]:
    """Checks that may take so many seconds each."""
    return tuple(Check(check, limit_s) for check in checks)


SMOKE = limited(60, check_smoke)
PART_S = 535.0
"""With the smoke test before it a part stays under ten minutes."""
PARTS: dict[str, tuple[Check, ...]] = {
    "checks": (
        *limited(170, check_gemm_tests),
        *limited(85, check_gpu_tests, check_determinism),
        *limited(60, check_resume),
        *limited(10, check_memory),
        *limited(60, check_export),
    ),
    "doctor": limited(WHOLE, check_doctor),
    "formats": (
        *limited(60, check_accumulator),
        *limited(110, *(partial(check_losses, recipe) for recipe in NEAR)),
        *limited(110, check_format_memory),
    ),
    "gemm": limited(WHOLE, of_gemm("", "gemms", "quantizers")),
    "kernels": (
        *limited(240, check_kernel_tests),
        *limited(WHOLE, of_script("fused_passes.py", *ON_CUDA)),
    ),
    "linear": limited(WHOLE, of_gemm("-linear", "linear")),
    "memory": limited(WHOLE, of_script("memory.py", "--part", "peaks")),
    **{
        f"memory-{part}": limited(WHOLE, of_script("memory.py", "--part", part))
        for part in ("cards", "time", "qwen7b", "qwen7b-8bit", "qwen14b")
    },
    "llmq": limited(WHOLE, of_script("llmq.py", "--part", "qwen7b")),
    "llmq-card": limited(WHOLE, of_script("llmq.py", "--part", "qwen7b-card")),
    "phases": limited(WHOLE, of_script("phases.py")),
    "snip": (
        *limited(60, check_time_tests),
        *limited(
            120,
            partial(check_planned_run, "share", ("--budget.fp4-flops=0.75",)),
            partial(check_planned_run, "speedup", ("--snip.formats=bf16,fp8", "--budget.speedup=1.05")),
        ),
        *limited(150, of_script("snip_cost.py", *COST)),
        *limited(WHOLE, check_study),
    ),
    "step": (
        *limited(240, of_script("planned_step.py", *PLANNED)),
        *limited(WHOLE, of_script("step.py", *STEP)),
    ),
}


def run_part(
    name: str, checks: Iterable[Check], session: Session, record: Mapping[str, Any], skip: str = ""
) -> list[Outcome]:
    """Every check of a part, written after each; a failed one does not hide the next.

    Args:
        skip: why none of them is begun; "" where they are.
    """
    outcomes: list[Outcome] = []
    for check in checks:
        began = time.perf_counter()
        session.begin(title(check.run), check.limit_s)
        try:
            if skip or session.part_left_s <= 0:
                raise SkippedError(skip or "skipped: the time of the part was up")
            outcome = check.run(session)
        except Exception as error:
            outcome = (title(check.run), False, str(error)[-500:])
        outcomes.append(outcome)
        held = "ok" if outcome[1] else "FAILED"
        print(f"{outcome[0]}: {held} ({outcome[2]}), {time.perf_counter() - began:.0f} s", flush=True)
        write_pair(session.out, f"{session.date}-gpu-{name}", {**record, "checks": outcomes})
    return outcomes


def title(check: Callable[[Session], Outcome]) -> str:
    """What a check is called before it has an outcome."""
    function = check.func if isinstance(check, partial) else check
    arguments = check.args if isinstance(check, partial) else ()
    return " ".join([getattr(function, "__name__", "check"), *map(str, arguments)])


def run_parts(parts: Sequence[str], arguments: argparse.Namespace, record: Mapping[str, Any]) -> list[Row]:
    """The smoke test, then the parts; (part, check, held, figure)."""
    rows: list[Row] = []
    skip = ""
    for part, checks in [("smoke", SMOKE), *((part, PARTS[part]) for part in parts)]:
        with tempfile.TemporaryDirectory(prefix="scrimp-gpu-", ignore_cleanup_errors=True) as scratch:
            session = Session(
                Path(scratch), arguments.out.resolve(), part, arguments.date, arguments.budget_s
            )
            outcomes = run_part(part, checks, session, record, skip)
        rows += [(part, *outcome) for outcome in outcomes]
        if part == "smoke" and not all(held for _, held, _ in outcomes):
            skip = "skipped: the smoke test failed"
    return rows


def main() -> int:
    """Run the parts; 0 if everything held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--budget-s", type=float, default=PART_S, help="seconds for each part, beside the smoke test's minute"
    )
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("NOT RUN: torch sees no CUDA device here")
        return 1
    record = facts("torch", "triton", "torchao", "transformers", "tokenizers", "numpy")
    record |= {"date": arguments.date, "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("part", "check", "held", "figure"):
        table.add_column(column)
    rows = run_parts(arguments.part, arguments, record)
    for part, name, held, figure in rows:
        table.add_row(part, name, "yes" if held else "NO", figure)
    Console().print(table)
    return 0 if all(held for _, _, held, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
