"""Ranks that are killed, stopped or asked to end at random: are they noticed and named, and does the run go on?

Method   A drill is a run of a tiny model on two processes by `scrimp launch --restarts 1`. One rank gets SIGKILL,
         SIGSTOP or SIGTERM: in the first seconds, in a step, beside a checkpoint, or in an evaluation. Drill i draws
         all that from the generator with seed i. What it must show:

         noticed   seconds from the signal to the first line that says so (of SIGTERM: to the launcher's end); of
                   SIGKILL and SIGSTOP at most 10
         gone      seconds from that line until none of the first ranks is left; at most 10
         named     the line names the rank that got the signal, and no other
         left      processes of this run that are there at the end: none
         losses    those of all steps, equal to those of a run that nothing happened to: bit for bit

         After SIGTERM the run is to stay ended, with a checkpoint, and is continued by a second command.
Use      python benchmarks/drills.py --drills 60 --part 0/2    each finished drill is a line of the result file, and is
         not done again; several processes may share the drills as parts. --page writes the table.
Limits   One machine, gloo. The limits of time are those of a machine that others use as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from environment import RESULTS, cpu, facts  # noqa: E402
from ranks import children_of, environment, lives, start  # noqa: E402
from tiny_run import flags, losses, write_corpus  # noqa: E402

STEPS, CHECKPOINT_EVERY, EVALUATE_EVERY = 60, 10, 20
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
MOMENTS = ("first seconds", "step", "checkpoint", "evaluation")
NOTICED_WITHIN_S = GONE_WITHIN_S = 10.0
PATIENCE_S = 600.0


def words(corpus: Path, run_dir: Path) -> list[str]:
    """The command of every run."""
    return flags(
        corpus,
        run_dir,
        f"--train.steps={STEPS}",
        f"--checkpoint.every={CHECKPOINT_EVERY}",
        f"--evaluation.every={EVALUATE_EVERY}",
    )


class Drill:
    """One run with one accident.

    Args:
        number: seed of what is drawn.
    """

    def __init__(self, number: int, corpus: Path, folder: Path) -> None:
        draw = random.Random(number)
        self.number, self.corpus, self.folder = number, corpus, folder
        self.signal, self.rank = SIGNALS[number % 3], draw.randrange(2)
        self.moment = MOMENTS[number // 3 % 4]
        self._draw = draw
        self.run_dir = folder / "run"
        self._lines: list[tuple[float, str]] = []

    def carried_out(self, expected: dict[int, float]) -> dict[str, Any]:
        """What it showed."""
        process = self._launched("--restarts=1")
        first = self._first_ranks(process)
        self._wait_for_moment(process)
        step = self._step()
        sent = time.monotonic()
        if lives(first[self.rank]):
            os.kill(first[self.rank], getattr(signal, self.signal))
        gone = self._gone(first)
        code = self._code(process)
        noticed = self._noticed(sent, gone)
        continued = self._continued() if self.signal == "SIGTERM" else code
        found = losses(self.run_dir) if (self.run_dir / "metrics.jsonl").exists() else {}
        row = {
            "drill": self.number,
            "signal": self.signal,
            "rank": self.rank,
            "moment": self.moment,
            "step": step,
            "load": round(os.getloadavg()[0], 1),
            "noticed_s": round(noticed - sent, 2),
            "gone_s": round(max(0.0, gone - noticed), 2),
            "named": self._named(),
            "code": code,
            "continued": continued,
            "left": self._left(),
            "same_losses": found == expected,
        }
        if is_good(row):
            said = [text for _, text in self._lines if "error:" in text or "rank" in text][:6]
        else:
            said = [f"{at - sent:.1f} {text}" for at, text in self._lines][-80:]
        return row | {"said": said}

    def _code(self, process: subprocess.Popen[str]) -> int | None:
        """Exit code of the launcher; None where it does not end: where its processes are is in the output then."""
        try:
            return process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            for one in (*children_of(process.pid).values(), process.pid):
                state = Path(f"/proc/{one}/status").read_text().split("State:")[1].splitlines()[0].strip()
                where = Path(f"/proc/{one}/wchan").read_text()
                self._lines.append((time.monotonic(), f"process {one} still there: {state}, in {where}"))
                os.kill(one, signal.SIGABRT)
            process.wait()
            return None

    def _launched(self, *options: str) -> subprocess.Popen[str]:
        command = ["-m", "scrimp", "launch", "--ranks=2", *options, *words(self.corpus, self.run_dir)]
        return self._started(command)

    def _started(self, command: list[str]) -> subprocess.Popen[str]:
        environ = environment(self.folder, SCRIMP_DRILL=str(self.folder), PYTHONFAULTHANDLER="1")
        process = start(command, environ)

        def read() -> None:
            assert process.stdout is not None
            self._lines.extend((time.monotonic(), line.rstrip()) for line in process.stdout)

        threading.Thread(target=read, daemon=True).start()
        return process

    def _first_ranks(self, process: subprocess.Popen[str]) -> dict[int, int]:
        found: dict[int, int] = {}
        while len(found) < 2 and process.poll() is None:
            found = children_of(process.pid)
            time.sleep(0.02)
        return found

    def _step(self) -> int:
        log = self.run_dir / "metrics.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def _wait_for_moment(self, process: subprocess.Popen[str]) -> None:
        """Until what was drawn is so."""
        draw = self._draw
        if self.moment == "first seconds":
            time.sleep(draw.uniform(0, 12))
            return
        every = {"step": 1, "checkpoint": CHECKPOINT_EVERY, "evaluation": EVALUATE_EVERY}[self.moment]
        at = draw.randrange(every, STEPS - 5, every) - (self.moment != "step")
        while self._step() < at and process.poll() is None:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))

    def _gone(self, first: dict[int, int]) -> float:
        ends = time.monotonic() + PATIENCE_S
        while any(map(lives, first.values())) and time.monotonic() < ends:
            time.sleep(0.02)
        return time.monotonic()

    def _noticed(self, sent: float, gone: float) -> float:
        return min([at for at, _ in self._signs() if at >= sent] + [gone])

    def _signs(self) -> list[tuple[float, str]]:
        """Lines that say that something happened to a rank."""
        return [
            (at, text)
            for at, text in self._lines
            if text.startswith("error:") or "was ended by" in text or "is stopped" in text
        ]

    def _named(self) -> bool:
        """Whether the signalled rank is named, and no other; SIGTERM asks, and nobody is to blame."""
        errors = [text for _, text in self._signs()]
        others = [text for text in errors if f"rank {1 - self.rank}" in text]
        return not others and (
            self.signal == "SIGTERM" or any(f"rank {self.rank}" in text for text in errors)
        )

    def _continued(self) -> int | None:
        """Exit code of a second command, after a run that was asked to end."""
        more = ["--resume"] if (self.run_dir / "config.toml").exists() else []
        command = ["-m", "scrimp", "launch", "--ranks=2", *words(self.corpus, self.run_dir), *more]
        process = self._started(command)
        before, code = len(self._lines), self._code(process)
        if code == 0:
            del self._lines[before:]
        return code

    def _left(self) -> int:
        """Processes that have this drill's folder in their environment."""
        needle = f"SCRIMP_DRILL={self.folder}".encode()
        found = 0
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                found += needle in entry.read_bytes().split(b"\0") and lives(int(entry.parent.name))
            except OSError:
                continue
        return found


def is_good(row: dict[str, Any]) -> bool:
    """Whether a drill showed all that it must."""
    code = 143 if row["signal"] == "SIGTERM" else 0
    return bool(
        row["named"]
        and (row["signal"] == "SIGTERM" or row["noticed_s"] <= NOTICED_WITHIN_S)
        and row["gone_s"] <= GONE_WITHIN_S
        and row["left"] == 0
        and row["same_losses"]
        and row["code"] in (code, 0)  # the signal may come when all is done
        and row["continued"] == 0
    )


def undisturbed(corpus: Path, folder: Path) -> dict[int, float]:
    """Losses of the run that nothing happens to."""
    command = ["-m", "scrimp", "launch", "--ranks=2", *words(corpus, folder / "run")]
    process = start(command, environment(folder))
    output, _ = process.communicate(timeout=PATIENCE_S)
    if process.returncode:
        raise SystemExit(output)
    return losses(folder / "run")


def page(rows: list[dict[str, Any]], about: list[dict[str, Any]]) -> str:
    """A table: one row for each signal and moment.

    Args:
        about: of each start of this program, what ran where.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["signal"], row["moment"]].append(row)
    text = [
        f"# Drills: {len(rows)} accidents on two ranks, {sum(map(is_good, rows))} as they must be",
        "",
        "By `benchmarks/drills.py`, which says what the columns are; seconds are median (largest).",
        "",
        *dict.fromkeys(
            f"- {one['date']}: `{one['command']}`, commit {one['commit'][:12]}, {one['versions']}, {one['cpu']}, "
            f"load {one['load']}"
            for one in about
        ),
        "",
        "| signal | moment | drills | good | noticed s | gone s | named | left | same losses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, moment), some in sorted(groups.items()):
        noticed, gone = ([row[key] for row in some] for key in ("noticed_s", "gone_s"))
        text.append(
            f"| {name} | {moment} | {len(some)} | {sum(map(is_good, some))} "
            f"| {statistics.median(noticed):.1f} ({max(noticed):.1f}) "
            f"| {statistics.median(gone):.1f} ({max(gone):.1f}) "
            f"| {sum(row['named'] for row in some)} | {sum(row['left'] for row in some)} "
            f"| {sum(row['same_losses'] for row in some)} |"
        )
    bad = [row for row in rows if not is_good(row)]
    text += ["", "Not as they must be:" if bad else "", *(f"- `{json.dumps(row)}`" for row in bad)]
    return "\n".join(text).rstrip() + "\n"


def main() -> None:
    """Carry out the drills that are not done yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drills", type=int, default=60)
    parser.add_argument("--part", default="0/1", help="NUMBER/OF: the drills of one of several processes")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-drills.jsonl")
    parser.add_argument("--page", action="store_true", help="write the table and end")
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    about = [line for line in lines if "drill" not in line]
    rows = sorted((line for line in lines if "drill" in line), key=lambda row: row["drill"])
    if given.page:
        given.out.with_suffix(".md").write_text(page(rows, about))
        return
    began = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", **facts("torch"), "cpu": cpu()}
    _note(given.out, began | {"load": round(os.getloadavg()[0], 1)})
    part, parts = map(int, given.part.split("/"))
    with tempfile.TemporaryDirectory(prefix="drills-") as name:
        folder = Path(name)
        corpus = write_corpus(folder)
        expected = undisturbed(corpus, folder)
        for number in range(part, given.drills, parts):
            if number in {row["drill"] for row in rows}:
                continue
            own = folder / f"drill-{number}"
            own.mkdir()
            row = Drill(number, corpus, own).carried_out(expected)
            _note(given.out, row)
            print("good" if is_good(row) else "BAD ", json.dumps(row), flush=True)


def _note(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
