"""The checks of `gpu.py`: what each runs on the device, and what it concludes from what it sees.

A check gets the part's `Session` and gives its name, whether it held, and a figure.
Checked  tests/benchmarks/test_gpu_script.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from environment import write_pair
from gpu_session import Outcome, OverLimitError, Session, python


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
    sums = ("tests/gemm/test_weight_sums.py", "tests/optim/test_summed_products.py")
    return tests(session, "tests of the step's own kernels, compiled", *files, *sums)


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


def benchmark(session: Session, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark; what it prints is shown."""
    where = ("--date", session.date, "--out", str(session.out))
    done = session.command(*python(f"benchmarks/{script}", *words, *where))
    print(done.stdout[-9000:], done.stderr[-2000:] if done.returncode else "", flush=True)
    return done
