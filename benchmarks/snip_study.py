"""Does SNIP choose well? Predicted against measured damage, and training under every policy at equal budget.

Question  Of the linear layers' FLOPs a given share must run in 4 bits. Does the plan that measured statistics
          choose cost less loss than rules of thumb, and do the predictions behind it hold?
Method    A trunk per seed: `scrimp train` in bf16 at a constant learning rate, with kept checkpoints. From each
          checkpoint:

          damage   every GEMM alone in each low format, on batches that the statistics have not seen: root mean
                   square change of the loss and of AdamW's next update, against the prediction.
          train    on by each policy's plan for a few steps with equal weights, moments, batches and a learning
                   rate that falls to a tenth; then the held-out loss in bf16 and in the plan's formats.
                   Phase 0 is training from scratch: longer, in the higher format until the warm-up is
                   over; then SNIP plans, and once more when half is done, from statistics of that moment;
                   the other policies plan once.
                   The gap is to the bf16 run of the same seed. `bf16-again` is bf16 from weights that are
                   moved by one part in 10^6: the noise floor.

          plans    what every policy chooses from the profiles that are there, and how stable that is (seconds).
          overhead time and memory of measuring, solving, switching and probing, on the first seed and phase.
          report   everything that is there, as a page with plots in benchmarks/results (`snip_report`).

Limits    Formats are emulated: says nothing of speed. A model of a few million parameters and short runs.
Run       python benchmarks/snip_study.py trunk            (resumable, as all parts: what is there is not repeated)
          python benchmarks/snip_study.py damage train
          python benchmarks/snip_study.py plans overhead report
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import RESULTS, ROOT, cpu, facts
from snip_cadence import Cadence
from snip_damage import pairs
from snip_lab import Lab, single_damages, spearman
from snip_overhead import measure
from snip_plans import write_plans
from snip_report import Grid, write_report

from scrimp.planner.precision.choose import Budget, Question, choose
from scrimp.planner.precision.divergence import SNIP, Weights, mean_divergence
from scrimp.planner.precision.profile import PrecisionProfile

PARTS = ("trunk", "damage", "train", "plans", "overhead", "report", "keep", "restore")
KEPT = "snip-study-rows.jsonl"
PEAK_LR, WARM_UP = 2e-3, 50
CONTROLS = ("bf16", "bf16-again")
FULL = ("fp8", "fp4")
POLICIES = (
    "snip",
    "snip-layer",
    "snip-paper",
    "min-abs-err",
    "min-rel-err",
    "first-last",
    "layer-type",
    "random:1",
    "random:2",
    "last-blocks",
)
ABLATIONS = {
    "loss only": Weights(update=0.0),
    "update only": Weights(loss=0.0),
    "with curvature": Weights(curvature=1.0),
}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "snip-study")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--phases", nargs="+", type=int, default=[300])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.75, 0.5, 0.8, 0.25])
    parser.add_argument("--policies", nargs="+", default=[*CONTROLS, *FULL, *POLICIES])
    parser.add_argument("--low", default="fp4", help="the 4-bit format")
    parser.add_argument("--high", default="fp8", help="the other format")
    parser.add_argument("--preset", default="llama-3m")
    parser.add_argument("--trunk-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=100, help="of training under a policy")
    parser.add_argument("--scratch-steps", type=int, default=300, help="of training from scratch (phase 0)")
    parser.add_argument("--held-out", type=int, default=65_536, help="tokens of an evaluation")
    parser.add_argument("--batches", type=int, default=3, help="statistics batches, and of damage")
    parser.add_argument(
        "--ahead",
        type=int,
        default=20,
        help="steps from statistics to the batches of damage; 0: the same ones",
    )
    parser.add_argument("--more-formats", nargs="*", default=["bf16", "mxfp8", "nvfp4"], help="of overhead")
    parser.add_argument("--repeats", type=int, default=3, help="of overhead")
    parser.add_argument("--date", default=date.today().isoformat(), help="of the report's files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the report's folder")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    parts = {"trunk": trunk, "damage": damage, "train": train}
    parts |= {"plans": plans, "overhead": overhead, "report": report, "keep": keep, "restore": restore}
    before = facts("torch", "numpy", "highspy") | {"device": cpu(), "threads": torch.get_num_threads()}
    for part in options.parts:
        if part in ("trunk", "damage", "train"):
            remember(options.work, before | {"part": part})
        parts[part](options)


def trunk(options: argparse.Namespace) -> None:
    """A bf16 run per seed, with checkpoints of every phase."""
    for seed in options.seeds:
        folder = options.work / f"seed{seed}"
        command = [sys.executable, "-m", "scrimp", "train", "--run.dir", str(folder)]
        if (folder / "config.toml").exists():
            command += ["--resume"]
        else:
            command += ["--run.seed", str(seed), "--model.preset", options.preset, "--precision", "bf16"]
            command += ["--train.steps", str(options.trunk_steps), "--train.sequence", "256"]
            command += ["--train.batch-tokens", "4096", "--train.micro-batch", "8"]
            command += [
                "--schedule.name",
                "constant",
                "--schedule.warmup-steps",
                "50",
                "--optimizer.lr",
                "2e-3",
            ]
            command += ["--checkpoint.every", "150", "--checkpoint.keep-every", "150"]
            command += ["--evaluation.every", "150", "--evaluation.tokens", "65536"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def profile_of(lab: Lab, options: argparse.Namespace) -> PrecisionProfile:
    """Statistics at the lab's checkpoint; kept in a file."""
    seed = lab.decisions.config.run.seed
    path = options.work / "profiles" / f"seed{seed}-step{lab.start}-{options.high}-{options.low}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        lab.reset()
        lab.measure(lab.start, options.batches, ("bf16", options.high, options.low)).write(path)
    return PrecisionProfile.read(path)


# -- damage ------------------------------------------------------------------------------------


def damage(options: argparse.Namespace) -> None:
    """Predicted and measured damage of every GEMM alone."""
    for phase in options.phases:
        for seed in options.seeds:
            path = options.work / "damage" / f"seed{seed}-step{phase}-{options.low}.json"
            if path.exists():
                continue
            lab = Lab(options.work / f"seed{seed}", phase)
            profile = profile_of(lab, options)
            lab.reset()
            losses, updates = single_damages(lab, options.low, phase + options.ahead, options.batches)
            row = {"seed": seed, "step": phase, "format": options.low, "layers": list(profile.layers)}
            row |= {
                "loss": losses.tolist(),
                "update": updates.tolist(),
                "predicted": predictions(profile, options.low),
            }
            write(path, row | {"spearman": correlations(profile, options.low, losses, updates)})
            print(json.dumps(correlations(profile, options.low, losses, updates)), flush=True)


def predictions(profile: PrecisionProfile, low: str) -> dict[str, Any]:
    """Predicted changes of loss [L] and update [L, 3], by Scrimp's method and by SNIP's."""
    p = profile.formats.index(low)
    found = {"scrimp": mean_divergence(profile), "snip": mean_divergence(profile, SNIP)}
    return {
        name: {"loss": one.loss[:, p].tolist(), "update": one.update[:, :, p].tolist()}
        for name, one in found.items()
    }


def correlations(
    profile: PrecisionProfile, low: str, losses: np.ndarray, updates: np.ndarray
) -> dict[str, float]:
    """Spearman of predictions and of local errors with the measured damage of single GEMMs."""
    p, predicted = profile.formats.index(low), mean_divergence(profile)
    found = {name: spearman(*pair) for name, pair in pairs(profile, low, losses, updates).items()}
    found["update, size ratio"] = float(np.median(predicted.update[:, :, p] / updates))
    found["loss, size ratio"] = float(np.median(predicted.loss[:, p] / losses[:, 0]))
    return found


# -- training under policies -------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Every policy from every checkpoint at every budget; one file per cell."""
    for budget in options.budgets:
        for phase in options.phases:
            for seed in options.seeds:
                labs: list[Lab] = []
                for policy in options.policies:
                    cell(options, seed, phase, budget, policy, labs)


def cell(
    options: argparse.Namespace, seed: int, phase: int, budget: float, policy: str, labs: list[Lab]
) -> None:
    """Train one policy, unless it is done."""
    fixed = policy in (*CONTROLS, *FULL, "last-blocks")
    label = "any" if fixed else f"{budget:g}"
    name = f"seed{seed}-step{phase}-{options.low}-{label}-{policy.replace(':', '')}"
    path = options.work / "cells" / f"{name.replace(' ', '-')}.json"
    if path.exists():
        return
    if not labs:
        labs.append(Lab(options.work / f"seed{seed}", phase))
    lab = labs[0]
    began = time.perf_counter()
    run = continued if phase else from_scratch
    losses, recipes, share = run(lab, policy, budget, options)
    row = {
        "seed": seed,
        "step": phase,
        "low": options.low,
        "high": options.high,
        "budget": budget,
        "policy": policy,
    }
    row |= {"fp4_flops": share, "losses": losses, "seconds": time.perf_counter() - began, "recipes": recipes}
    row |= {
        "held_out": lab.held_out(options.held_out),
        "held_out_in_plan": lab.held_out(options.held_out, in_plan=True),
    }
    write(path, row)
    print(f"{name}: {row['held_out']:.4f} ({row['seconds']:.0f} s)", flush=True)


Trained = tuple[list[float], dict[str, tuple[str, str, str]], float]
"""Losses by step, the last recipes by layer, and their share of FLOPs in 4 bits."""


def continued(lab: Lab, policy: str, budget: float, options: argparse.Namespace) -> Trained:
    """On from the lab's checkpoint by one plan."""
    recipes, share = plan_of(policy, profile_of(lab, options), budget, options)
    lab.reset()
    if policy == "bf16-again":
        nudge(lab)

    def lr(done: int) -> float:
        return PEAK_LR * (1 - 0.9 * done / max(1, options.steps - 1))

    return lab.train(options.steps, recipes, lr), recipes, share


def from_scratch(lab: Lab, policy: str, budget: float, options: argparse.Namespace) -> Trained:
    """From the first weights: the higher format, then plans made on the way."""
    steps = options.scratch_steps
    lab.reset()
    if policy == "bf16-again":
        nudge(lab)
    whole = {"fp8": options.high, "fp4": options.low}.get(policy, options.high)
    start = {} if policy in CONTROLS else dict.fromkeys(lab.layers, (whole, whole, whole))
    found: dict[str, Any] = {"recipes": start, "share": float(policy == "fp4")}
    due = () if policy in (*CONTROLS, *FULL) else (WARM_UP, steps // 2) if policy == "snip" else (WARM_UP,)

    def between(done: int) -> dict[str, tuple[str, str, str]] | None:
        if done in due:
            profile = lab.measure(done, options.batches, ("bf16", options.high, options.low))
            found["recipes"], found["share"] = plan_of(policy, profile, budget, options)
            return dict(found["recipes"])
        return None

    def lr(done: int) -> float:
        return PEAK_LR * min(1.0, (done + 1) / WARM_UP) * (1 - 0.9 * done / max(1, steps - 1))

    return lab.train(steps, start, lr, between), found["recipes"], found["share"]


def plan_of(
    policy: str, profile: PrecisionProfile, budget: float, options: argparse.Namespace
) -> tuple[dict[str, tuple[str, str, str]], float]:
    """Recipes by layer, and the share of FLOPs in 4 bits."""
    if policy in CONTROLS:
        return {}, 0.0
    names = {"fp4": options.low, "fp8": options.high}
    weights = ABLATIONS.get(policy, Weights())
    question = Question(
        profile.select((options.high, options.low)),
        Budget(fp4_flops=budget),
        "snip" if policy in ABLATIONS else names.get(policy, policy),
        weights,
    )
    if policy == "last-blocks":
        question = replace(question, profile=profile)
    choice = choose(question)
    return choice.recipes(question.profile), choice.fp4_flops


@torch.no_grad()
def nudge(lab: Lab) -> None:
    """Move every master weight by one part in a million."""
    generator = torch.Generator().manual_seed(1)
    for name, part in lab.optimizer.parts():
        if name.endswith(".master"):
            part.local.mul_(1 + 1e-6 * torch.randn(part.shape, generator=generator))


# -- what is there -----------------------------------------------------------------------------


def plans(options: argparse.Namespace) -> None:
    """Every policy's plan from every profile."""

    def planner(
        policy: str, profile: PrecisionProfile, budget: float, high: str, low: str
    ) -> tuple[dict[str, tuple[str, str, str]], float]:
        formats = argparse.Namespace(high=high, low=low)
        return plan_of(policy, profile, budget, formats)

    print(write_plans(options.work, sorted(options.budgets), planner), flush=True)


def overhead(options: argparse.Namespace) -> None:
    """Time that SNIP adds, for the first seed and phase."""
    seed, phase = options.seeds[0], options.phases[0]
    path = options.work / "overhead" / f"seed{seed}-step{phase}-{options.high}-{options.low}.json"
    if path.exists():
        return
    before = facts("torch", "numpy", "highspy")
    lab = Lab(options.work / f"seed{seed}", phase)
    more = [name for name in options.more_formats if name not in (options.high, options.low)]
    record = measure(
        lab,
        profile_of(lab, options),
        options.high,
        options.low,
        batches=sorted({1, Cadence.default().batches}),
        more_formats=more,
        repeats=options.repeats,
    )
    write(path, before | record)


def report(options: argparse.Namespace) -> None:
    """A page, its figures and its plots."""
    grid = Grid(options.seeds, options.phases, options.budgets, options.policies, options.low, options.high)
    print(write_report(options.work, grid, options.out, options.date), flush=True)


def keep(options: argparse.Namespace) -> None:
    """Every finished row of damage and training into one file beside the results."""
    paths = sorted(
        path for folder in ("cells", "damage", "overhead") for path in (options.work / folder).glob("*.json")
    )
    rows = [
        json.dumps({"file": f"{path.parent.name}/{path.name}", "row": json.loads(path.read_text())})
        for path in paths
    ]
    (options.out / KEPT).write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(rows)} rows kept", flush=True)


def restore(options: argparse.Namespace) -> None:
    """The rows that were kept, so that a study goes on in a new work folder; its trunk is trained again."""
    for line in (options.out / KEPT).read_text(encoding="utf-8").splitlines():
        kept = json.loads(line)
        if not (options.work / kept["file"]).exists():
            write(options.work / kept["file"], kept["row"])


def remember(work: Path, row: dict[str, Any]) -> None:
    """Add to parts.jsonl which code ran a part, for the report."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "parts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def write(path: Path, row: dict[str, Any]) -> None:
    """One JSON object, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(row) + "\n", encoding="utf-8")
    partial.rename(path)


if __name__ == "__main__":
    main()
