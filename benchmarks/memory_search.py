"""How long the planner of memory searches.

Question  Seconds from the costs of a step to its plan, for 80 blocks with 14 choices each and every placement of
          states.
Method    `search` on the traced costs of Llama 3 70B along CUDA's way through the code, on cards and hosts from
          roomy to too small; CPU seconds of this thread, all repetitions kept. A search that fails also finds
          out what would fit.
Run       python benchmarks/memory_search.py            (a minute on one core)
"""

from __future__ import annotations

import argparse
import statistics
import time
from datetime import date
from pathlib import Path

from environment import RESULTS, facts, markdown_table, write_pair
from largest_model import machine_of, traced_costs

from scrimp.planner.memory.machine import Setup
from scrimp.planner.memory.room import NoRoomError
from scrimp.planner.memory.search import search

MACHINES = ((80, 1024), (80, 640), (48, 1024), (40, 700), (24, 1024), (16, 256))
"""GB of the card and of the host."""


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record = facts("torch", "numpy")
    began = time.process_time()
    costs = traced_costs(options.model, "bf16", 2048)
    record["trace_seconds"] = time.process_time() - began
    record["searches"] = []
    for card, host in MACHINES:
        seconds, found = [], ""
        for _ in range(options.repeats):
            began = time.process_time()
            try:
                plan = search(costs, machine_of(card, host), Setup(8))
                account, predicted = plan.account, plan.timeline.seconds
                sizes = f"{account.peak / 2**30:.1f} GiB, {account.host_peak / 1e9:.0f} GB"
                found = f"{sizes}, {predicted:.0f} s"
            except NoRoomError:
                found = "does not fit"
            seconds.append(time.process_time() - began)
        record["searches"].append({"card": card, "host": host, "seconds": seconds, "found": found})
    rows = [
        [
            f"{one['card']} GB, {one['host']} GB",
            f"{statistics.median(one['seconds']):.2f} ({min(one['seconds']):.2f} to {max(one['seconds']):.2f})",
            one["found"],
        ]
        for one in record["searches"]
    ]
    lines = [
        "# How long the planner of memory searches",
        "",
        f"{options.model}, {len(costs.blocks)} blocks with {len(costs.classes[0].choices)} choices; CPU seconds, "
        "median "
        f"(least to most) of {options.repeats}; the trace took {record['trace_seconds']:.1f} s. "
        f"Command `{record['command']}`, commit {record['commit']}.",
        "",
        *markdown_table(["card, host", "search, s", "found (predicted)"], rows),
    ]
    name = f"{date.today().isoformat()}-memory-search"
    print(write_pair(options.out, name, record, "\n".join(lines) + "\n"))


if __name__ == "__main__":
    main()
