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
import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, facts, write_pair
from gpu_session import Outcome, OverLimitError, Session, SkippedError, python
from rich.console import Console
from rich.table import Table

SIZES = ("llama-60m", "llama-300m", "qwen2.5-0.5b")


def train(session: Session, run_dir: Path, *more: str) -> dict[int, float]:
    """Train on the standard library's text; step to loss."""
    done = session.command(*python("-m", "scrimp", "train", f"--run.dir={run_dir}", *more))
    if done.returncode:
        raise RuntimeError(
            f"scrimp train failed with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return losses(run_dir)


def losses(run_dir: Path) -> dict[int, float]:
    """Step to loss of a run."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


RUN = (
    "--device=cuda",
    "--model.preset=llama-20m",
    "--train.steps=40",
    "--checkpoint.every=20",
    "--checkpoint.keep-last=3",
)
SMOKE_RUN = ("--device=cuda", "--model.preset=llama-3m", "--train.steps=4", "--data.tokenizer=bytes")
BF16 = ("--precision=bf16", *RUN)
GREEDY = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=32, do_sample=False)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""
NEAR = {"fp8": 0.05, "nvfp4": 0.15, "fp4": 0.3}
"""Share of bf16's fall in loss by which a recipe may stay behind it: wide, against a broken kernel, not a judgement."""
LAST_STEPS = 5
MEMORY_RUN = (
    "--device=cuda",
    "--model.preset=llama-60m",
    "--train.steps=4",
    "--train.sequence=1024",
    "--train.micro-batch=32",
    "--train.batch-tokens=32768",
)
"""Large enough that what backward keeps is most of the memory."""


@dataclass(frozen=True)
class Check:
    """One check, and the seconds that it may take."""

    run: Callable[[Session], Outcome]
    limit_s: float


WHOLE = float("inf")
"""All that is left of the part."""
Row = tuple[str, str, bool, str]


# -- checks ------------------------------------------------------------------------------------


def check_smoke(session: Session) -> Outcome:
    """What everything else needs: the device computes, and a run in fp8 takes its steps."""
    product = "import torch; x = torch.ones(256, 256, device='cuda', dtype=torch.bfloat16); assert (x @ x == 256).all()"
    done = session.command(*python("-c", product))
    if done.returncode:
        return "smoke test: a product, four steps in fp8", False, last_line(done)
    by_step = train(session, session.scratch / "smoke", "--precision=fp8", *SMOKE_RUN)
    figure = f"loss {by_step[1]:.3f} to {by_step[max(by_step)]:.3f}"
    return "smoke test: a product, four steps in fp8", len(by_step) == 4, figure


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a failed command said."""
    return ((done.stderr or done.stdout).strip().splitlines() or ["it said nothing"])[-1][-300:]


def check_gemm_tests(session: Session) -> Outcome:
    """With a GPU present Triton's kernels run compiled in them."""
    return tests(session, "tests of the GEMMs, kernels compiled", "-m", "not slow", "tests/gemm")


def check_kernel_tests(session: Session) -> Outcome:
    """Those of the step's own passes, all cases."""
    files = (f"tests/gemm/test_triton_{name}.py" for name in ("sums", "cross_entropy", "adamw"))
    return tests(session, "tests of the step's own kernels, compiled", *files)


def check_gpu_tests(session: Session) -> Outcome:
    """The tests that skip themselves elsewhere."""
    return tests(session, "tests marked gpu", "-m", "gpu", "tests")


def tests(session: Session, name: str, *selection: str) -> Outcome:
    """Tests by their summary: all of them skipped would be no proof."""
    workers = ("-n", "6") if importlib.util.find_spec("xdist") else ()
    # No -q here: pyproject.toml has one, and with a second pytest prints no summary.
    done = session.command(*python("-m", "pytest", "-p", "no:cacheprovider", *workers, *selection))
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:])
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return name, done.returncode == 0 and some_passed(summary), summary


def some_passed(summary: str) -> bool:
    """Whether pytest's last line counts a passed test and no failed one."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summary)}
    return counts.get("passed", 0) > 0 and not counts.keys() & {"failed", "error", "errors"}


def check_doctor(session: Session) -> Outcome:
    """Every recipe and back end; the report is kept among the results, and for the runs that follow."""
    done = session.command(*python("-m", "scrimp", "doctor", "--device=cuda", "--json", "--fresh"))
    if not done.stdout.strip():
        return "scrimp doctor: nothing wrong", False, done.stderr[-500:]
    report = json.loads(done.stdout)
    write_pair(session.out, f"{session.date}-doctor-cuda", report)
    return "scrimp doctor: nothing wrong", done.returncode == 0, doctor_figures(report["measurements"])


def doctor_figures(measurements: Iterable[Mapping[str, Any]]) -> str:
    """How many of each status, and which are wrong."""
    found = list(measurements)
    counts = Counter(m["status"] for m in found)
    text = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    wrong = [f"{m['recipe']} {m['gemm']} {m['backend']}" for m in found if m["status"] == "wrong"]
    return f"{text} ({', '.join(wrong)})" if wrong else text


def check_determinism(session: Session) -> Outcome:
    """Equal seeds give equal losses, compiled kernels and masked documents included."""
    first = losses(session.run_of("first", lambda run_dir: train(session, run_dir, *BF16)))
    second = train(session, session.scratch / "second", *BF16)
    fell = first[40] < first[1] - 1.0
    return (
        "loss falls; two runs equal bit for bit",
        first == second and fell,
        f"{first[1]:.3f} to {first[40]:.3f}",
    )


def check_resume(session: Session) -> Outcome:
    """A run resumed from its middle repeats the same losses."""
    whole, resumed = session.finished("first"), session.scratch / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000040")
    again = train(session, resumed, "--resume")
    before = losses(whole)
    differing = [step for step, loss in before.items() if again[step] != loss]
    return "resumed run equal bit for bit", not differing, f"{len(differing)} of {len(before)} steps differ"


def check_memory(session: Session) -> Outcome:
    """Predicted against measured peak of device memory."""
    predicted, measured = peaks(session.finished("first"))
    return (
        "predicted peak within 15 % of measured",
        abs(predicted / measured - 1) < 0.15,
        f"{predicted / measured - 1:+.1%}",
    )


def peaks(run_dir: Path) -> tuple[int, int]:
    """Predicted and measured peak of a run's device memory, in bytes."""
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    return plan["predicted"]["peak_device_bytes"], plan["measured"]["peak_device_bytes"]


def check_export(session: Session) -> Outcome:
    """Greedy text from the exported model in transformers equals Scrimp's."""
    run_dir, exported = session.finished("first"), session.scratch / "exported"
    scrimp = python("-m", "scrimp")
    done = session.command(*scrimp, "export", str(run_dir), str(exported))
    if done.returncode:
        return "greedy text equals transformers'", False, done.stderr[-200:]
    how = ("--prompt=import ", "--tokens=32", "--temperature=0", "--device=cpu")
    ours = session.command(*scrimp, "generate", str(run_dir), *how).stdout.strip()
    theirs = session.command(*python("-c", GREEDY, str(exported))).stdout.strip()
    return "greedy text equals transformers'", bool(ours) and ours == theirs, repr(ours[:40])


# -- formats -----------------------------------------------------------------------------------


def check_accumulator(session: Session) -> Outcome:
    """FP4 codes on FP8 units: exact where Triton's kernel adds up every 128 of K."""
    done = benchmark(session, "accumulator.py", "--device", "cuda")
    if done.returncode:
        return "FP4 on FP8 units exact", False, done.stderr[-500:]
    record = json.loads((session.out / f"{session.date}-accumulator-cuda.json").read_text(encoding="utf-8"))
    return "FP4 on FP8 units exact", *exact_figures(record)


def exact_figures(record: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the kernel that is used is exact, and the worst of each way."""
    shares: dict[str, list[float | None]] = {}
    for row in record["exact"]:
        shares.setdefault(row["way"], []).append(row.get("inexact, share"))
    shown = []
    for way, found in shares.items():
        ran = [share for share in found if share is not None]
        shown.append(f"{way}: " + (f"{max(ran):.1%} inexact" if len(ran) == len(found) else "failed"))
    used = shares.get("triton, every 128", [])
    return bool(used) and all(share == 0.0 for share in used), "; ".join(shown)


def check_losses(recipe: str, session: Session) -> Outcome:
    """A recipe's loss against bf16's on the same data."""
    found = {name: losses(format_run(session, name)) for name in ("bf16", recipe)}
    first, control = found["bf16"][1], last_loss(found["bf16"])
    behind = (last_loss(found[recipe]) - control) / (first - control)
    held = first - control > 1.0 and abs(behind) <= NEAR[recipe]
    figure = f"{first:.3f} to {last_loss(found[recipe]):.3f}, bf16 to {control:.3f}"
    return f"{recipe}: loss within {NEAR[recipe]:.0%} of bf16's fall", held, f"{figure} ({behind:+.1%})"


def last_loss(of_steps: Mapping[int, float]) -> float:
    """Mean over the last steps."""
    values = [of_steps[step] for step in sorted(of_steps)[-LAST_STEPS:]]
    return sum(values) / len(values)


def format_run(session: Session, recipe: str) -> Path:
    """A finished run in a recipe, trained at the first call."""
    return session.run_of(recipe, lambda run_dir: train(session, run_dir, f"--precision={recipe}", *RUN))


def check_format_memory(session: Session) -> Outcome:
    """Peak memory of fp8, which keeps inputs in 8 bits, against bf16."""
    found = {}
    for recipe in ("bf16", "fp8"):
        run_dir = session.scratch / f"memory-{recipe}"
        train(session, run_dir, f"--precision={recipe}", *MEMORY_RUN)
        found[recipe] = peaks(run_dir)
    held = found["fp8"][1] < found["bf16"][1]
    shown = [
        f"{recipe} {measured / 2**20:,.0f} MiB (predicted {predicted / measured - 1:+.1%})"
        for recipe, (predicted, measured) in found.items()
    ]
    return "fp8 needs less memory than bf16", held, ", ".join(shown)


# -- snip --------------------------------------------------------------------------------------


def check_time_tests(session: Session) -> Outcome:
    """GEMM times and the stopwatch, on the device."""
    return tests(session, "tests of GEMM times", "-m", "gpu", "tests/profiler")


def check_planned_run(name: str, budget: tuple[str, ...], session: Session) -> Outcome:
    """A run that chooses its formats: it plans, keeps its budget, and its loss falls."""
    run_dir = session.scratch / f"run-snip-{name}"
    train(session, run_dir, "--precision=snip", *budget, *RUN)
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    plans = [event for event in map(json.loads, lines) if event["kind"] == "replan"]
    by_step = losses(run_dir)
    seconds = [sum(plan["seconds"].values()) for plan in plans]
    figure = f"{len(plans)} plans, measured and solved in {max(seconds, default=0):.1f} s; "
    figure += f"{plans[-1]['reason'] if plans else 'none'}; loss {by_step[1]:.3f} to {last_loss(by_step):.3f}"
    return f"snip by {name}", bool(plans) and by_step[1] - last_loss(by_step) > 1.0, figure


def check_study(session: Session) -> Outcome:
    """Runs of the study at 60M, as many as the time suffices for; the next call goes on after them."""
    folder = session.out / "snip-60m"
    with contextlib.suppress(OverLimitError):  # rows are written run by run
        session.command(*python("-m", "scrimp", "study", "benchmarks/snip_60m.toml", "--out", str(folder)))
    rows = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    failed = [row["variant"] for row in map(json.loads, rows) if row["error"]]
    return (
        "study snip_60m",
        bool(rows) and not failed,
        f"{len(rows)} runs; failed: {', '.join(failed) or 'none'}",
    )


# -- measurements ------------------------------------------------------------------------------


def benchmark(session: Session, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark; what it prints is shown."""
    where = ("--date", session.date, "--out", str(session.out))
    done = session.command(*python(f"benchmarks/{script}", *words, *where))
    print(done.stdout[-9000:], done.stderr[-2000:] if done.returncode else "", flush=True)
    return done


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
STEP = (*ON_CUDA, "--compile", "--precision", "bf16", "--sizes", *SIZES)


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
