"""What choosing formats while training costs a run: measuring, solving, switching and probing, beside its steps.

Question  Is it under 1 % of training time at the default cadence?
Method    Two runs of `scrimp train` on the standard library's text, one after the other: in bf16, and with
          `--precision snip`, which measures, plans, switches and probes at every tenth step. Its event `replan` says
          what each act took. Medians, laid out over the default cadence of a long run::

              period      a measurement, a switch, the probe that follows it, and a probe every `snip.probe_every` steps
              share       seconds of a period that training waits for / (`snip.every` x seconds of a plain step)
              with solver the same, as if the solver, which runs beside steps, were waited for

Limits    Emulated steps are slow, and make the share small on a CPU: that of bf16 steps stands beside. Measurements of
          longer steps take more of them, up to `snip.batches` batches of four micro-batches.
Run       python benchmarks/snip_cost.py --preset llama-3m
          python benchmarks/snip_cost.py --preset llama-60m --sequence 1024 --batch-tokens 65536     # a GPU
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from environment import RESULTS, cpu, facts, markdown_table, write_pair

from scrimp.config import Config, TrainConfig
from scrimp.config.schema import SnipConfig
from scrimp.config.snip import decide_every, decide_probe

LONG_RUN = 1_000_000
"""Steps of a run in which every default has its full size."""
FIRST, EVERY = 10, 10
"""Step of the first plan, and steps from one to the next."""


def main() -> None:
    """Run both, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-3m")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--formats", default="mxfp8,nvfp4")
    parser.add_argument("--plans", type=int, default=5)
    parser.add_argument("--date", default=date.today().isoformat(), help="of the result's files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="their folder")
    options = parser.parse_args()
    about = facts("torch", "numpy", "highspy") | {
        "settings": {k: v for k, v in vars(options).items() if k != "out"}
    }
    with tempfile.TemporaryDirectory() as scratch:
        steps = FIRST + EVERY * options.plans
        common = [
            f"--model.preset={options.preset}",
            f"--train.sequence={options.sequence}",
            f"--train.batch-tokens={options.batch_tokens}",
            "--evaluation.every=0",
            "--checkpoint.every=0",
        ]
        snip = ["--precision=snip", f"--snip.formats={options.formats}", "--budget.fp4-flops=0.75"]
        snip += [f"--snip.first={FIRST}", f"--snip.every={EVERY}", "--snip.delay=1"]
        plain = trained(Path(scratch) / "bf16", ["--precision=bf16", f"--train.steps={FIRST * 3}", *common])
        planned = trained(Path(scratch) / "snip", [*snip, f"--train.steps={steps}", *common])
    found = shares(plain, planned)
    record = about | {"device": planned["events"][0]["device"], "cpu": cpu()} | found
    write_pair(options.out, f"{options.date}-snip-cost-{options.preset}", record, page(record))
    print(json.dumps(found["shares"]))


def trained(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Events, and seconds of steps, of one run."""
    command = [sys.executable, "-m", "scrimp", "train", f"--run.dir={folder}", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("events", "metrics")
    }
    return {"events": rows["events"], "steps": [row["step_s"] for row in rows["metrics"]]}


def shares(plain: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each act and step, and shares of a run at the default cadence."""
    plans = [event["seconds"] for event in planned["events"] if event["kind"] == "replan"]
    acts = {name: [plan[name] for plan in plans] for name in ("measure", "solve", "stall", "probe")}
    steps = {"bf16": plain["steps"][1:], "plan": planned["steps"][FIRST + 1 :]}
    config = Config(train=TrainConfig(steps=LONG_RUN))
    every = decide_every(config)[0]
    probe_every = decide_probe(Config(train=config.train, snip=SnipConfig(every=every)))[0]
    at = {name: median(values) for name, values in acts.items()}
    waits = at["measure"] + at["stall"] + at["probe"] * (1 + every // probe_every)
    found = {
        f"of {name} steps{words}": seconds / (every * median(steps[name]))
        for name in steps
        for words, seconds in (("", waits), (", with solver", waits + at["solve"]))
    }
    cadence = {"every": every, "probe_every": probe_every}
    return {"cadence": cadence, "acts": acts, "steps": steps, "shares": found}


def page(record: dict[str, Any]) -> str:
    """The table as Markdown."""
    rows = [
        [name, f"{median(values):.4g}", f"{min(values):.4g}", f"{max(values):.4g}", str(len(values))]
        for kind, group in (("", record["acts"]), ("step in ", record["steps"]))
        for name, values in ((kind + name, values) for name, values in group.items())
    ]
    settings, cadence = record["settings"], record["cadence"]
    lines = [
        "# What choosing formats costs a run",
        "",
        f"`{record['command']}`, commit {record['commit']}, {record['device']} ({record['cpu']}); "
        f"{settings['preset']}, steps of {settings['batch_tokens']:,} tokens, candidates {settings['formats']}. "
        "Measured, in seconds.",
        "",
        *markdown_table(("act", "median", "fastest", "slowest", "times"), rows),
        "",
        f"At the default cadence of a long run (a plan every {cadence['every']:,} steps, a probe every "
        f"{cadence['probe_every']:,}), as a share of training time:",
        "",
        *markdown_table(("share", ""), [[name, f"{share:.2%}"] for name, share in record["shares"].items()]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
