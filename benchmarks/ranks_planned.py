"""Predicted and measured seconds of plans on 2 and 4 CPU ranks.

Question  Does the search order plans as they run, and how much slower than the best is the one that it chooses?
Method    One process group for each plan, one thread a rank. In it the machine is measured as `scrimp train` measures
          it (`scrimp.training.measured_ranks`), and the median of some steps is taken. Plans are visited in rounds,
          so that what else the machine does falls on all of them; of a plan the fastest round counts. All are
          predicted from the median of what was measured of the machine on so many ranks, as a search predicts all
          candidates from one measurement. Of all plans, and per number of ranks: Spearman's
          rank correlation; and regret: the chosen plan's measured seconds over the measured best, of the plans in fp32
          without recomputation, which are the
          layouts that a search chooses from. Nothing is fitted to these figures.
Run       python benchmarks/ranks_planned.py
          Rounds are kept in a file of their own and continued after a stop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from environment import RESULTS, cpu, facts, markdown_table, write_pair

from scrimp.config import Config, flatten, preset, replace_values, resolve
from scrimp.data import Batch
from scrimp.models import spec_of
from scrimp.models.initialise import initialise
from scrimp.models.shapes import sizes_of
from scrimp.optim import build
from scrimp.planner.layout.at_hand import setting_of_run
from scrimp.planner.layout.predict import predict
from scrimp.profiler.measured_cluster import RankRates, cluster_of, software_here
from scrimp.runtime import realise
from scrimp.runtime.parallel import RankMesh
from scrimp.runtime.passes import run_passes
from scrimp.training.measured_ranks import rates_of_run
from scrimp.training.setup import decide
from scrimp.world import World

SEQUENCE, ROWS, VOCABULARY = 256, 8, 4096
"""Rows of a batch, over all ranks."""
MEMORY_BYTES = 8 * 2**30
KEEP, FULL = {"memory.activations": "keep"}, {"memory.activations": "block"}
SEARCHED = ("searched 2", "searched 4")
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2": (2, {"layout.fsdp": 1}),
    "fsdp 2, zero 1": (2, {"layout.fsdp": 2, "layout.zero": 1}),
    "fsdp 2, zero 2": (2, {"layout.fsdp": 2, "layout.zero": 2}),
    "fsdp 2, zero 3": (2, {"layout.fsdp": 2}),
    "fsdp 2, zero 3, recomputed": (2, {"layout.fsdp": 2, **FULL}),
    "dp 2, recomputed": (2, {"layout.fsdp": 1, **FULL}),
    "tp 2": (2, {"layout.tp": 2}),
    "cp 2": (2, {"layout.cp": 2}),
    "pp 2": (2, {"layout.pp": 2}),
    "dp 2, fp8": (2, {"layout.fsdp": 1, "precision": "fp8"}),
    "dp 2, nvfp4": (2, {"layout.fsdp": 1, "precision": "nvfp4"}),
    "dp 4": (4, {"layout.fsdp": 1}),
    "fsdp 4, zero 3": (4, {"layout.fsdp": 4}),
    "dp 2, fsdp 2": (4, {"layout.dp": 2}),
    "fsdp 2, tp 2": (4, {"layout.tp": 2, "layout.fsdp": 2}),
    "pp 2, fsdp 2": (4, {"layout.pp": 2, "layout.fsdp": 2}),
    "cp 2, fsdp 2": (4, {"layout.cp": 2, "layout.fsdp": 2}),
    "searched 2": (2, {"memory.activations": "auto"}),
    "searched 4": (4, {"memory.activations": "auto"}),
}
CHOSEN = ("train.micro_batch", "memory.activations")
LAYOUT = ("pp", "dp", "fsdp", "cp", "tp", "cp_method", "virtual", "schedule", "stages", "zero", "gathered")
COLUMNS = ("plan", "ranks", "predicted s", "measured s", "predicted / measured")


def main() -> None:
    """Measure what is not measured yet, write the page."""
    options = parse()
    before, kept = facts("torch"), options.keep
    rounds: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    end = time.monotonic() + options.seconds
    for number in range(options.rounds):
        for name in options.plans:
            done = any(one["plan"] == name and one["round"] == number for one in rounds)
            if done or time.monotonic() > end:
                continue
            rounds.append({"plan": name, "round": number, **measured(name, options)})
            kept.write_text(json.dumps(rounds))
            print(rounds[-1], flush=True)
    about = {
        "command": before["command"],
        "commit": before["commit"],
        "date": options.date,
        "device": cpu(),
        **{name: before["versions"][name] for name in ("torch", "python")},
        "model": f"{options.size}, fp32 unless named; {ROWS} x {SEQUENCE} tokens a step",
        "steps": f"{options.warm_up} dropped, median of {options.repeats}, at most {options.rounds} rounds",
        "machine": "virtual, of a shared host",
    }
    rows = rows_of(rounds, options.size)
    found = {f"{ranks} ranks": agreement([row for row in rows if row["ranks"] == ranks]) for ranks in (2, 4)}
    found["all plans"] = agreement(rows)
    record = {"environment": about, "results": rows, "agreement": found, "rounds": rounds}
    print(write_pair(options.out, f"{options.date}-ranks-planned-cpu", record, page(rows, found, about)))


def rows_of(rounds: list[dict[str, Any]], size: str) -> list[dict[str, Any]]:
    """Each plan in the fastest of its rounds."""
    found = []
    for name, (ranks, settings) in PLANS.items():
        own = [one for one in rounds if one["plan"] == name]
        if own:
            fastest = min(own, key=lambda one: one["measured"])
            found.append(
                {
                    "plan": f"{name}: {fastest['did']}" if name in SEARCHED else name,
                    "is_searched": name in SEARCHED,
                    "ranks": ranks,
                    "format": settings.get("precision", "fp32"),
                    "predicted": seconds_of(name, size, rounds, fastest["chosen"])["step"],
                    "measured": fastest["measured"],
                }
            )
    return found


def agreement(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Spearman's correlation over all plans, and regret of what was searched."""
    if len(rows) < 2:
        return {}
    guessed, real = (ranks_of([row[key] for row in rows]) for key in ("predicted", "measured"))
    found = {"spearman": statistics.correlation(guessed, real)}
    searched = [row["measured"] for row in rows if row["is_searched"]]
    if len(searched) == 1:
        best = min(row["measured"] for row in rows if row["format"] == "fp32")
        found["regret"] = searched[0] / best - 1.0
    return found


def ranks_of(values: list[float]) -> list[float]:
    """The place of each."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(at)) for at in range(len(values))]


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One visit of a plan."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = PLANS[name][0]
        mp.spawn(on_rank, (ranks, name, options, Path(folder)), nprocs=ranks, join=True)
        found: dict[str, Any] = json.loads((Path(folder) / "row.json").read_text())
        return found


def asked(name: str, size: str) -> Config:
    """The settings of a plan."""
    settings = {
        "device": "cpu",
        "data.tokenizer": "bytes",
        "model.preset": size,
        "model.vocab_size": VOCABULARY,
        "train.sequence": SEQUENCE,
        "train.batch_tokens": SEQUENCE * ROWS,
        "train.micro_batch": 2,
        **KEEP,
        **PLANS[name][1],
    }
    return replace_values(Config(), settings)


def seconds_of(
    name: str, size: str, rounds: list[dict[str, Any]], chosen: dict[str, Any]
) -> dict[str, float]:
    """The predicted step of a plan, by the median of what visits on so many ranks measured of the machine.

    Args:
        chosen: what Scrimp decided of its layout and memory.
    """
    ranks, compute = PLANS[name][0], compute_of(name)
    own = [
        one["rates"]
        for one in rounds
        if PLANS[one["plan"]][0] == ranks and compute_of(one["plan"]) == compute
    ]
    rates = RankRates(**{key: statistics.median(one[key] for one in own) for key in own[0]})
    low = {
        key: statistics.median(one["rates"][key] for one in rounds if one["plan"] == name)
        for key in ("low", "low4")
    }
    cluster = cluster_of(replace(rates, **low), ranks=ranks, name="here", memory_bytes=MEMORY_BYTES)
    architecture = replace(preset(size), vocab_size=VOCABULARY)
    settings = replace_values(asked(name, size), chosen)
    config = resolve(settings, architecture, device_type="cpu", ranks=ranks).config
    program = software_here(cluster, "cpu", compute=compute, compiled=False)
    model = sizes_of(spec_of(architecture))
    setting = setting_of_run(config, model, cluster, program)
    assert setting is not None, name
    found = predict(setting)
    return {"step": found.step_seconds, **found.seconds}


def compute_of(name: str) -> str:
    """The working format of a plan."""
    return "bf16" if "precision" in PLANS[name][1] else "fp32"


def on_rank(rank: int, ranks: int, name: str, options: argparse.Namespace, folder: Path) -> None:
    """The work of one rank; the first leaves what it has measured."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    world = World(rank, ranks)
    config = asked(name, options.size)
    decisions = decide(config, world=world)
    rates = (
        decisions.here.rates
        if decisions.here
        else rates_of_run(decisions.config, decisions.architecture, decisions.device)
    )
    step = stepper(decisions)
    seconds = []
    for number in range(options.warm_up + options.repeats):
        world.barrier()
        start = time.perf_counter()
        step(number)
        world.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        values, plan = flatten(decisions.config), decisions.plan
        chosen = {key: values[key] for key in (*CHOSEN, *(f"layout.{one}" for one in LAYOUT))}
        found = {
            "measured": statistics.median(seconds[options.warm_up :]),
            "rates": vars(rates),
            "chosen": chosen,
            "did": plan.layout.text,
        }
        (folder / "row.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def stepper(decisions: Any) -> Any:
    """The steps of `scrimp.training.step`, without its guards and logs."""
    config = decisions.config
    mesh = RankMesh(config.layout, decisions.world)
    rules = config.precision_rules
    executable = realise(
        decisions.plan,
        decisions.architecture,
        lambda model: initialise(model, 0),
        device=torch.device("cpu"),
        parameters=config.train.parameters,
        compute=rules.compute,
        loss_chunk=config.train.loss_chunk,
        mesh=mesh,
    )
    optimizer = build(config.optimizer, executable, seed=0)

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + mesh.data_rank)
        of_step = []
        for _ in range(config.micro_batches):
            tokens = torch.randint(
                0, VOCABULARY, (config.train.micro_batch, SEQUENCE + 1), generator=generator
            )
            of_step.append(Batch.of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        targets = sum(mesh.gathered_rows(sum(batch.num_targets for batch in of_step)))
        run_passes(executable, of_step, targets)
        executable.add_up_copies(optimizer.gradients)
        optimizer.gradient_norm()
        optimizer.clip(1.0, 1.0)
        optimizer.step(1e-3)
        optimizer.zero_grad()

    return step


def page(rows: list[dict[str, Any]], found: dict[str, dict[str, float]], about: dict[str, Any]) -> str:
    """For the repository."""
    lines = ["# Plans on ranks of one machine: predicted and measured", ""]
    lines += ["How: the docstring of `benchmarks/ranks_planned.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    for name, figures in found.items():
        if figures:
            regret = f", regret {figures['regret']:.1%}" if "regret" in figures else ""
            lines.append(f"- {name}: Spearman {figures['spearman']:.2f}{regret}")
    cells = [
        [
            row["plan"],
            str(row["ranks"]),
            f"{row['predicted']:.3f}",
            f"{row['measured']:.3f}",
            f"{row['predicted'] / row['measured']:.2f}",
        ]
        for row in rows
    ]
    return "\n".join([*lines, "", *markdown_table(COLUMNS, cells)]) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="llama-8m", help="a preset")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no plan is begun")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "ranks-planned.json")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
