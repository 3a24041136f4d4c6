"""What the planner predicts of memory and time against real runs: one command that proves it on a GPU.

Every run is `scrimp train` in a process of its own (`memory_run.py`); the configurations are in `memory_cases.py`, what
is concluded from them in `memory_checks.py`.

peaks        Configurations of 60M to 4B, three steps each: predicted peak against the most that the allocator counted
             (`max_memory_allocated`). What it reserved is told apart; a prediction is of tensors. Several
             run side by side as far as they fit: bytes do not depend on it.
cards        Cards of 16, 24, 40 GB: the allocator is held to the card less what CUDA's context and libraries
             took in the same run on the full device, and the plan gets that budget. Bit-equal losses.
time         Plans of two models at several budgets: predicted against measured seconds per step, median of ten
             after five, the first plan kept; regret against the fastest of all that fit in the same budget.
qwen7b       Qwen2.5-7B on 16 GB beside 57 GB of host memory, all of the process; bf16 moments.
qwen7b-8bit  The same with 8-bit moments, which leave room for larger micro-batches.
qwen7b-card  Qwen2.5-7B with all of an 80 GB card, 524,288 tokens a step.
qwen14b      Qwen2.5-14B on 24 GB, 8-bit moments. Beside these four published figures of other systems on their own
             hardware, not measured here.
Run          python benchmarks/memory.py --part peaks         # about nine minutes each; results after every check
             python benchmarks/memory.py --device cpu --part peaks       # tiny models, torch's profiler
It starts `scrimp` from this checkout. What did not run, or not in time, counts as not held; exit status 1 if anything
did not hold. On a CPU seconds and cards show no more than that the script works, and results are written only
where `--out` says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import memory_checks as checks
from environment import RESULTS, cpu, facts, write_pair
from gpu_session import OverLimitError, Session, python, run
from memory_cases import CARDS, GIB, MIB, PEAKS, REFERENCES, TIMES, TRACED, Card, Case, Size, keeping
from memory_checks import Outcome
from memory_page import page, sentence, size_of, summary
from rich.console import Console

from scrimp.training.memory.limits import usable_of_card

STEPS = {"peaks": 3, "cards": 6, "time": checks.WARM_UP_STEPS + 10}
REFERENCE_STEPS = {"cuda": 40, "cpu": 6}
"""At most: the time ends them. On a CPU the profiler keeps every allocation."""
CONTEXT_BYTES = 1 << 30
"""Where no run on the full device measured it."""
CONTEXT_SPARE = 64 * MIB
ROOM_SHARE = 0.9
"""Share of the device that runs side by side may need."""
STEPPING_SHARE = 0.75
"""Share of a part's time after which a reference case begins no step: one may take a while."""
RunDict = dict[str, Any]


@dataclass
class Bench(Session):
    """One part on one device."""

    device: str = "cuda"
    device_bytes: int = 0
    compile: str = "off"
    shards: Path = Path()
    record: dict[str, Any] = field(default_factory=dict)
    is_written: bool = True
    found: list[RunDict] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def logs(self) -> Path:
        """Beside the results, where there are any."""
        return (self.out if self.is_written else self.scratch) / f"{self.date}-memory-{self.part}-logs"

    def measure(
        self,
        name: str,
        options: Sequence[str],
        steps: int,
        *,
        allocator_bytes: int | None = None,
        seconds: float | None = None,
    ) -> RunDict:
        """A run in a process of its own: its figures, or `failure`.

        Args:
            allocator_bytes: most that CUDA's allocator may hold.
            seconds: from its start on, after which it begins no step.
        """
        folder = self.scratch / f"run-{next(self.numbers)}"
        own = [f"--result={folder}.json"]
        own += [f"--allocator-bytes={allocator_bytes}"] if allocator_bytes and self.device == "cuda" else []
        own += [f"--seconds={seconds}"] if seconds else []
        common = [f"--device={self.device}", f"--data.source={self.shards}", f"--run.dir={folder}"]
        common += [f"--train.steps={steps}", "--evaluation.every=0", "--checkpoint.every=0"]
        began = time.perf_counter()
        failure = self._started([*own, "--", *common, *options])
        path = Path(f"{folder}.json")
        run = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        run |= {
            "name": name,
            "options": list(options),
            "failure": failure,
            "wall": time.perf_counter() - began,
        }
        with self.lock:
            self.found.append(run)
            print(sentence(run, self.part), flush=True)
            self.write()
        return run

    def _started(self, words: list[str]) -> str:
        """Why the child failed; empty if it did not."""
        if self.left_s <= 0:
            return "the time was up"
        try:
            done = self.command(*python("benchmarks/memory_run.py", *words))
        except OverLimitError:
            return "the time was up while it ran"
        said = (done.stderr.strip() or done.stdout.strip()).replace("^", "")[-1500:]
        return f"exit status {done.returncode}: {said}" if done.returncode else ""

    def held(self, outcome: Outcome) -> None:
        """Keep an outcome, show and write it."""
        self.outcomes.append(outcome)
        print(f"{outcome[0]}: {'ok' if outcome[1] else 'FAILED'} ({outcome[2]})", flush=True)
        self.write()

    def write(self) -> None:
        """What there is so far."""
        if not self.is_written:
            return
        record = self.record | {"part": self.part, "checks": self.outcomes, "runs": self.found}
        name = f"{self.date}-memory-{self.part}-{self.device}"
        write_pair(self.out, name, record, page(record))


class Room:
    """Device memory that runs side by side share."""

    def __init__(self, gib: float) -> None:
        self._all = self._free = gib
        self._changed = threading.Condition()

    @contextmanager
    def take(self, gib: float) -> Iterator[None]:
        """Wait until there is so much; who needs more than all of it gets all."""
        gib = min(gib, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= gib)
            self._free -= gib
        try:
            yield
        finally:
            with self._changed:
                self._free += gib
                self._changed.notify_all()


# -- parts -------------------------------------------------------------------------------------


def peaks(bench: Bench) -> None:
    """The matrix."""
    cases = PEAKS[bench.device]
    room = Room(ROOM_SHARE * bench.device_bytes / GIB)
    workers = 3 if bench.device == "cuda" else 1

    def one(case: Case) -> RunDict:
        with room.take(case.gib):
            return bench.measure(case.name, case.options, STEPS["peaks"])

    with ThreadPoolExecutor(workers) as pool:
        # The largest first: what is small finds room beside what is left.
        runs = list(pool.map(one, sorted(cases, key=lambda case: -case.gib)))
    bench.held(checks.ran(runs, len(cases)))
    bench.held(checks.peaks_near(runs, frozenset(case.name for case in cases if case.is_compiled)))
    bench.held(checks.no_false_fits(runs))


def cards(bench: Bench) -> None:
    """Emulated cards."""
    for card in CARDS[bench.device]:
        full = bench.measure(f"{card.case.name}, full device", card.case.options, STEPS["cards"])
        limit = card.nbytes - context_of(full, bench.device)
        run = bench.measure(
            f"{card.case.name}, {card.name}",
            (*card.case.options, f"--budget.device-memory={limit}B"),
            STEPS["cards"],
            allocator_bytes=limit,
        )
        bench.held(on_card(card, full, run))


def on_card(card: Card, full: RunDict, run: RunDict) -> Outcome:
    """Whether the plan of a card was another one at all, and held."""
    name, held, figure = checks.kept_to_card(f"{card.case.name} on {card.name}", full, run, card.nbytes)
    if held and full["plan"] == run["plan"]:
        return name, False, f"{figure}; the plan is that of the full device: this shows nothing"
    return name, held, figure


def context_of(run: RunDict, device: str) -> int:
    """Bytes of a card that its allocator cannot have."""
    if device == "cpu":
        return 0
    measured = run.get("context")
    return CONTEXT_BYTES if measured is None else int(measured) + CONTEXT_SPARE


def times(bench: Bench) -> None:
    """Seconds of steps, and what the search gave away."""
    for size in TIMES[bench.device]:
        runs, budgets = timed(bench, size)
        bench.held(checks.ran(runs, 1 + len(size.budgets) + len(size.others)))
        bench.held(checks.times_near(runs))
        bench.held(checks.regret(runs, budgets, size.case.name))


def timed(bench: Bench, size: Size) -> tuple[list[RunDict], dict[str, int]]:
    """All plans of one model; the budgets of those that were searched for, by name."""

    def one(name: str, *more: str) -> RunDict:
        words = (*size.case.options, f"--train.compile={bench.compile}", *more)
        return bench.measure(f"{size.case.name}, {name}", words, STEPS["time"])

    runs = [one("resident", TRACED)]
    if checks.failure_of(runs[0]):
        return runs, {}
    most, budgets = runs[0]["predicted"]["device"], {}
    for share in size.budgets:
        limit = int(share * most)
        runs.append(one(f"{share:.0%} of that", f"--budget.device-memory={limit}B"))
        # Others that would fit count if they leave a GPU's allocator as much as a plan must.
        budgets[runs[-1]["name"]] = usable_of_card(limit) if bench.device == "cuda" else limit
    # With both budgets a CPU is two memories, so that what is to be offloaded has somewhere to go.
    runs += [one(f"all {level}", keeping(level), f"--budget.device-memory={most}B") for level in size.others]
    return runs, budgets


def reference(bench: Bench) -> None:
    """One reference case: what it takes, and how fast it is."""
    found = REFERENCES[bench.device][bench.part]
    model = (f"--model.preset={found.model}", f"--train.compile={bench.compile}", *found.options)
    # The same kernels on two blocks: what of the card is no tensor's.
    few = ("--model.num-layers=2", "--train.batch-tokens=2048", keeping("block+offload"))
    probe = bench.measure(f"{found.model}, two blocks", (*model, *few), 2)
    limit = found.card_bytes - context_of(probe, bench.device)
    budgets = (
        f"--budget.device-memory={limit}B",
        f"--budget.host-memory={found.host_bytes - found.host_reserve}B",
    )
    run = bench.measure(
        found.model,
        (*model, f"--train.batch-tokens={found.batch_tokens}", *budgets),
        REFERENCE_STEPS[bench.device],
        allocator_bytes=limit,
        seconds=max(1.0, STEPPING_SHARE * bench.left_s),
    )
    bench.held(checks.ran([run], 1))
    if checks.failure_of(run):
        return
    trouble = checks.trouble_of(run, found.card_bytes)
    device = f"{size_of(checks.occupied(run))} with context and slack, {size_of(run['device'])} of tensors"
    bench.held((f"device within {size_of(found.card_bytes)}", not trouble, "; ".join([device, *trouble])))
    host = (
        f"{run['host'] / 1e9:.1f} GB (predicted {run['predicted']['host'] / 1e9:.1f} without the interpreter)"
    )
    bench.held((f"host within {found.host_bytes / 1e9:.0f} GB", run["host"] <= found.host_bytes, host))
    bench.held(checks.peaks_near([run]))
    bench.held(checks.no_false_fits([run]))
    bench.held(checks.times_near([run]))


PARTS: dict[str, Callable[[Bench], None]] = {
    "peaks": peaks,
    "cards": cards,
    "time": times,
    "qwen7b": reference,
    "qwen7b-8bit": reference,
    "qwen14b": reference,
    "qwen7b-card": reference,
}


# -- the command -------------------------------------------------------------------------------


def run_part(bench: Bench) -> None:
    """A part; whatever breaks it is an outcome that did not hold."""
    try:
        PARTS[bench.part](bench)
    except Exception as error:
        bench.held((bench.part, False, f"{type(error).__name__}: {error}"[:500]))
    if not bench.outcomes:
        bench.held((bench.part, False, "nothing was checked"))


def device_facts(device: str) -> dict[str, Any]:
    """Name and bytes of the device, from another process: a context of this one's would lie on it for good."""
    if device == "cpu":
        return {"device": cpu(), "device_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'device': p.name, 'device_bytes': p.total_memory, 'cuda': torch.version.cuda}))"
    )
    done = subprocess.run(python("-c", code), capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"torch sees no CUDA device here: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compile", choices=("on", "off"), default="off", help="blocks of what is timed")
    parser.add_argument("--budget-s", type=float, default=550.0, help="seconds for each part")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, help="folder for the results; unset: benchmarks/results of a GPU")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts; 0 if everything held."""
    options = arguments_of(words)
    record = facts("torch", "triton", "torchao", "numpy")
    try:
        record |= device_facts(options.device)
    except (RuntimeError, ValueError) as error:
        print(f"NOT RUN: {error}")
        return 1
    record["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    benches = []
    with tempfile.TemporaryDirectory(prefix="scrimp-memory-") as scratch:
        shards = Path(scratch) / "shards"
        prepare = python("-m", "scrimp", "prepare", "stdlib", str(shards), "--tokenizer", "bytes")
        said = Path(scratch) / "prepare.err"
        if run(prepare, Path(scratch) / "prepare.out", said, 300):
            print(f"NOT RUN: no data: {said.read_text(errors='replace').strip()[-500:]}")
            return 1
        for part in options.part:
            folder = Path(scratch) / part
            folder.mkdir()
            bench = Bench(
                folder, (options.out or RESULTS).resolve(), part, options.date, options.budget_s,
                device=options.device, device_bytes=record["device_bytes"], compile=options.compile,
                shards=shards, record=record, is_written=options.device == "cuda" or options.out is not None,
            )  # fmt: skip
            benches.append(bench)
            run_part(bench)
    outcomes = [outcome for bench in benches for outcome in bench.outcomes]
    title = f"{record['device']}, torch {record['versions']['torch']}"
    Console().print(summary(title, [(bench.part, bench.outcomes, bench.found) for bench in benches]))
    print(f"{sum(held for _, held, _ in outcomes)} of {len(outcomes)} checks held")
    return 0 if all(held for _, held, _ in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
