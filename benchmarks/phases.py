"""The allocator's cache between generation and training: what each policy takes, and what it costs.

Question  Generation, scoring and training in one process ask for blocks of other sizes. How much more than what is
          allocated does the allocator reserve, and what do giving the cache back at every edge, giving it back where
          Scrimp's measured policy does, expandable segments, and a pool per phase change? The study
          (Zhang et al., arXiv 2410.15651) found -25 % memory for +2 % time by emptying at the edges.
Method    The loop and the policies: `phases_work.py`. Each policy runs in a process of its own, since settings of the
          allocator are a process's; all policies in turn, several rounds, beginning with another one each time.
          Every round runs without a limit, and with the allocator limited to a multiple of what the default policy had
          allocated at most (measured in a first process, which counts for nothing else): there a
          policy that keeps what it cannot reuse retries or runs out of memory.
Figures   Of the whole process, its first iteration included: most reserved, most allocated, largest slack (reserved but
          not allocated) at an edge, releases, retries, out of memory. Seconds of an iteration without
          the first; times are compared with the default's of the same round.
Limits    On a CPU there is no caching allocator: a tiny load runs under every policy, losses must be equal, no result
          is written.
Run       python benchmarks/phases.py                      # a GPU; --rounds, --budget-s for a lease
          python benchmarks/phases.py --device cpu         # only whether the script works
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, ROOT, facts, markdown_table, write_pair
from phases_work import POLICIES, Load, run
from rich.console import Console
from stopwatch import rotated

LOADS = {
    "cuda": Load("cuda", "llama-300m", 24, (128, 2048), (4, 24), micro_batch=4, iterations=4),
    "cpu": Load("cpu", "llama-3m", 2, (8, 24), (2, 4), micro_batch=2, iterations=2),
}
LIMITS = (0.0, 1.1)
WARM_UP = 1
"""Iterations that do not count in times."""
SETTING = "PYTORCH_CUDA_ALLOC_CONF"
"""Its newer name, PYTORCH_ALLOC_CONF, is ignored by some versions of torch."""
COLUMNS = (
    "policy",
    "reserved, GiB (least, most)",
    "against default",
    "allocated, GiB",
    "largest slack at an edge, GiB",
    "iteration, s (least, most)",
    "against default",
    "releases",
    "retries",
    "out of memory",
)
Row = dict[str, Any]
"""What `phases_work.run` returns, with its round and its multiple."""


def main() -> int:
    """Measure, print, write; 0 if it ran to its end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(LOADS), default="cuda")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument(
        "--limits",
        nargs="+",
        type=float,
        default=list(LIMITS),
        help="multiples of what is allocated; 0: none",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin nothing later than this")
    for name in ("preset", "prompts", "micro_batch", "iterations", "seed"):
        kind = str if name == "preset" else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="of the load")
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return 0
    if options.device == "cpu":
        return rehearse(load_of(options), options.policies)
    if not torch.cuda.is_available():
        print("NOT RUN: torch sees no CUDA device here")
        return 1
    return measure(options)


def load_of(options: argparse.Namespace) -> Load:
    """The device's load, with what was changed on the command line."""
    names = ("preset", "prompts", "micro_batch", "iterations", "seed")
    given = {name: getattr(options, name) for name in names}
    return replace(LOADS[options.device], **{k: v for k, v in given.items() if v is not None})


# -- processes ---------------------------------------------------------------------------------


def child(asked: dict[str, Any]) -> None:
    """One policy in this process; the last line that it prints is the result."""
    load = asked["load"]
    for name in ("prompt_tokens", "new_tokens"):
        load[name] = tuple(load[name])
    print(json.dumps(run(asked["policy"], Load(**load), asked["limit"])))


def in_process(policy: str, load: Load, limit: int = 0) -> Row:
    """One policy in a process of its own.

    Raises:
        RuntimeError: it failed otherwise than by running out of memory.
    """
    asked = {"policy": policy, "load": asdict(load), "limit": limit}
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(asked)],
        env=environment_of(policy),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{policy} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def environment_of(policy: str) -> dict[str, str]:
    """Variables of a policy's process: settings of the allocator are the policy's alone."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return kept | ({SETTING: "expandable_segments:True"} if policy == "expandable" else {})


def rehearse(load: Load, policies: Sequence[str]) -> int:
    """On a CPU: whether the script works and the policies change no loss."""
    rows = [in_process(policy, load) for policy in policies]
    equal = all(row["losses"] == rows[0]["losses"] for row in rows)
    print(
        "a CPU has no caching allocator: nothing was measured and no result is written; "
        f"{len(rows)} policies ran, losses {'equal' if equal else 'DIFFER'}"
    )
    return 0 if equal else 1


def measure(options: argparse.Namespace) -> int:
    """All policies on a GPU."""
    began, load = time.perf_counter(), load_of(options)
    record: dict[str, Any] = facts("torch", "triton") | {
        "device": torch.cuda.get_device_name(),
        "load": asdict(load),
        "first": in_process("default", load),
        "rows": [],
    }
    if record["first"]["ended"] is not None:
        print(f"NOT RUN: {record['first']['ended']}; take fewer --prompts")
        return 1
    allocated, longest = record["first"]["peak_allocated"], time.perf_counter() - began
    for number in range(options.rounds):
        for multiple in options.limits:
            for policy in rotated(options.policies, number):
                if time.perf_counter() - began + longest > options.budget_s:
                    continue
                start = time.perf_counter()
                row = in_process(policy, load, int(multiple * allocated))
                longest = max(longest, time.perf_counter() - start)
                record["rows"].append(row | {"round": number, "multiple": multiple})
                print(f"round {number}, limit {multiple}: {' | '.join(summary(record['rows'][-1:], []))}")
    text = page(record)
    path = write_pair(options.out, f"{options.date}-phases", record, text)
    Console().print(text, f"written: {path}", markup=False)
    return 0


# -- the page ----------------------------------------------------------------------------------


def page(record: dict[str, Any]) -> str:
    """The result as Markdown."""
    load, rows = record["load"], record["rows"]
    text = [
        "# The allocator's cache between generation and training",
        "",
        f"{load['preset']}, {record['device']}, torch {record['versions']['torch']}: per iteration "
        f"{2 * load['prompts']} sequences generated ({load['prompt_tokens'][0]:,} to {load['prompt_tokens'][1]:,} "
        f"tokens of prompt, {load['new_tokens'][0]} to {load['new_tokens'][1]} new ones), scored, half of them "
        f"trained on; {load['iterations']} iterations a process. Medians over rounds. Measured; how: the docstrings of "
        "`benchmarks/phases.py` and `phases_work.py`.",
        "",
        f"- command: {record['command']}",
        f"- commit: {record['commit']}",
        *checks(rows),
    ]
    for multiple in dict.fromkeys(row["multiple"] for row in rows):
        of_limit = [row for row in rows if row["multiple"] == multiple]
        default = [row for row in of_limit if row["policy"] == "default"]
        policies = dict.fromkeys(row["policy"] for row in of_limit)
        lines = [summary([row for row in of_limit if row["policy"] == name], default) for name in policies]
        title = f"Limited to {multiple:g} times what is allocated" if multiple else "Without a limit"
        text += ["", f"{title}:", "", *markdown_table(COLUMNS, lines)]
    return "\n".join([*text, ""])


def checks(rows: Sequence[Row]) -> Iterable[str]:
    """What would make the comparison void."""
    ignored = [row for row in rows if row["policy"] == "expandable" and not row["expandable"]]
    if ignored:
        yield "- VOID: this torch did not turn expandable segments on"
    first = [row["losses"][0] for row in rows if row["losses"]]
    if first:
        yield f"- loss of the first iteration: {min(first):.4f} to {max(first):.4f} in all processes"


def summary(rows: Sequence[Row], default: Sequence[Row]) -> list[str]:
    """One line of the table: a policy under a limit."""
    reserved = [row["peak_reserved"] / 2**30 for row in rows]
    seconds = [value for row in rows for value in row["seconds"][WARM_UP:]]
    slack = [max((max(values, default=0) for values in row["slack"].values()), default=0) for row in rows]
    return [
        rows[0]["policy"],
        spread(reserved),
        ratio(rows, default, lambda row: row["peak_reserved"]),
        f"{max(row['peak_allocated'] for row in rows) / 2**30:.2f}",
        f"{max(slack) / 2**30:.2f}",
        spread(seconds),
        ratio(rows, default, lambda row: statistics.median(row["seconds"][WARM_UP:] or [0.0])),
        f"{statistics.median(row['releases'] for row in rows):g}",
        f"{statistics.median(row['retries'] for row in rows):g}",
        f"{sum(row['ended'] is not None for row in rows)} of {len(rows)}",
    ]


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f}, {max(values):.2f})"


def ratio(rows: Sequence[Row], default: Sequence[Row], figure: Callable[[Row], float]) -> str:
    """Median over rounds of a figure against the default's of the same round; of processes that ran to their end."""
    base = {row["round"]: figure(row) for row in default if row["ended"] is None}
    found = [
        figure(row) / base[row["round"]] - 1
        for row in rows
        if row["ended"] is None and base.get(row["round"])
    ]
    return f"{statistics.median(found):+.1%}" if found else "-"


if __name__ == "__main__":
    sys.exit(main())
