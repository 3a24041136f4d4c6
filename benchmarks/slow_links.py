"""Copies of a model over a slow link: time gained by local steps, beside the loss that they cost.

Question  How much faster are steps whose gradients are not exchanged each time (`outer.every`), and what is the
          held-out loss then?
Link      Emulated: a collective that sends more than a kilobyte over it sleeps before it begins, for a latency and as
          long as the bytes that a ring sends from a rank take at the link's rate (`scrimp.profiler.collectives`).
          Scalars of each step wait for the latency too.
Method    `scrimp train` on two ranks with a copy each, a thread a rank, on the standard library's text as bytes; every
          way in processes of its own, with the same seed, data and steps, seeds in turn. Seconds are those of all steps
          and of the exchanges, without the start, evaluations and checkpoints; the exchange that overlaps counts as far
          as it was waited for. Loss: held out, at the end. No way has a learning rate of its own.
Run       python benchmarks/slow_links.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from environment import RESULTS, cpu, facts, markdown_table, write_pair

from scrimp.cli import main as scrimp
from scrimp.collective_calls import wrapped
from scrimp.profiler.collectives import SHARES, whole_bytes

WAYS = {
    "every step": [],
    "mean of the copies": ["--outer.lr=1", "--outer.momentum=0"],
    "diloco": [],
    "diloco, fp8": ["--outer.exchange=fp8"],
    "co2": ["--outer.overlap", "--outer.lr=1", "--outer.momentum=0.5"],
}
"""Name to settings; all but the first with `outer.every`."""
MODEL = [
    "--device=cpu",
    "--data.tokenizer=bytes",
    "--model.num-layers=4",
    "--model.width=128",
    "--model.num-heads=4",
    "--model.num-kv-heads=2",
    "--model.ffn-width=384",
    "--train.sequence=128",
    "--train.batch-tokens=2048",
    "--train.micro-batch=8",
    "--optimizer.lr=2e-3",
    "--evaluation.every=0",
    "--evaluation.tokens=65536",
    "--checkpoint.every=0",
]
SMALL = 1024
"""Bytes up to which a message is one of a step's scalars."""


@dataclass(frozen=True)
class Row:
    """One way with one seed."""

    way: str
    seed: int
    seconds: float
    """Seconds of all steps and of the exchanges that they waited for."""
    exchanging: float
    """The part of them in which only an exchange went on, between rounds."""
    loss: float
    """Held out, at the end."""
    said: str
    """What the run said of its exchanges."""


def main() -> None:
    """Measure, write the results, print the table."""
    options = parse()
    before, rows = facts("torch"), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder)
        for seed in range(options.seeds):
            for way in WAYS:
                rows.append(measured(way, seed, corpus, folder, options))
                print(rows[-1], flush=True)
    about = {
        "command": before["command"],
        "commit": before["commit"],
        "date": options.date,
        "device": cpu(),
        **before["versions"],
        "link": f"emulated: {options.megabytes:g} MB/s, {options.latency * 1e3:g} ms",
        "run": f"2 copies on 2 ranks, {options.steps} steps, outer.every {options.every}, {options.seeds} seeds",
        "model": " ".join(MODEL),
    }
    record = {"environment": about, "results": [asdict(row) for row in rows]}
    print(write_pair(options.out, f"{options.date}-slow-links-cpu", record, page(rows, about)))


def write_corpus(folder: Path) -> Path:
    """The text of the standard library's modules, about two megabytes of it."""
    texts, size = [], 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(texts[-1])
        if size > 2_000_000:
            break
    (folder / "corpus.txt").write_text("\n\n".join(texts), encoding="utf-8")
    return folder / "corpus.txt"


def measured(way: str, seed: int, corpus: Path, folder: Path, options: argparse.Namespace) -> Row:
    """Train in one way."""
    run = folder / f"{way.replace(' ', '-')}-{seed}"
    outer = [] if way == "every step" else [f"--outer.every={options.every}"]
    words = [
        "train",
        *MODEL,
        f"--data.source={corpus}",
        f"--data.cache={folder / 'cache'}",
        f"--run.dir={run}",
        f"--run.seed={seed}",
        f"--train.steps={options.steps}",
        "--layout.dp=2",
        *outer,
        *WAYS[way],
    ]
    link = options.megabytes * 1e6, options.latency
    mp.start_processes(on_rank, (str(folder / f"store-{run.name}"), words, *link), 2, start_method="spawn")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    waited = sum(one.get("exchange_wait_s") or 0.0 for one in records)
    spent = sum(one["step_s"] for one in records)
    said = [one for one in events if one["kind"] == "outer"]
    (evaluated,) = (one["loss"] for one in events if one["kind"] == "evaluation")
    return Row(way, seed, spent + waited, waited, evaluated, sentence_of(said[-1]) if said else "")


def sentence_of(event: dict[str, Any]) -> str:
    """The text of an event."""
    return str(
        next(value for key, value in event.items() if key not in ("kind", "time") and isinstance(value, str))
    )


def on_rank(rank: int, store: str, words: list[str], rate: float, latency: float) -> None:
    """The work of one rank, over the slow link."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), slow_link(rate, latency):
        code = scrimp(words)
    dist.destroy_process_group()
    sys.exit(code)


@contextlib.contextmanager
def slow_link(rate: float, latency: float) -> Iterator[None]:
    """While the body runs, collectives of this process take as long as over such a link.

    Args:
        rate: bytes per second that a rank sends.
        latency: seconds.
    """
    with wrapped(lambda operation, call: _slowed(operation, call, rate, latency)):
        yield


def _slowed(operation: str, call: Callable[..., Any], rate: float, latency: float) -> Callable[..., Any]:
    def slowed(*arguments: Any, **named: Any) -> Any:
        ranks, num_bytes = dist.get_world_size(named.get("group")), whole_bytes(arguments, named)
        if ranks > 1:
            time.sleep(latency + (num_bytes * SHARES[operation](ranks) / rate if num_bytes > SMALL else 0.0))
        return call(*arguments, **named)

    return slowed


def page(rows: list[Row], about: dict[str, Any]) -> str:
    """For the repository."""
    lines = ["# Copies over a slow link: time gained beside loss lost", ""]
    lines += ["Measured over an emulated link; how: the docstring of `benchmarks/slow_links.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    columns = (
        "way",
        "seconds of all steps",
        "times as fast",
        "only exchanging",
        "held-out loss",
        "loss lost",
        "said",
    )
    return "\n".join([*lines, "", *markdown_table(columns, cells(rows))]) + "\n"


def cells(rows: list[Row]) -> Iterator[list[str]]:
    """One line a way: means over seeds, and the spread of what is compared."""
    first = {row.seed: row for row in rows if row.way == "every step"}
    for way in WAYS:
        own = [row for row in rows if row.way == way]
        gained = [first[row.seed].seconds / row.seconds for row in own]
        lost = [row.loss - first[row.seed].loss for row in own]
        yield [
            way,
            f"{statistics.mean(row.seconds for row in own):.1f}",
            f"{statistics.mean(gained):.2f} ({min(gained):.2f} to {max(gained):.2f})",
            f"{statistics.mean(row.exchanging for row in own):.1f} s",
            f"{statistics.mean(row.loss for row in own):.4f}",
            f"{statistics.mean(lost):+.4f} ({min(lost):+.4f} to {max(lost):+.4f})",
            own[0].said or "-",
        ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--every", type=int, default=24, help="local steps of a round")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=12.5, help="of the link, in a second (100 Mbit/s)")
    parser.add_argument("--latency", type=float, default=0.001, help="of the link, in seconds")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
