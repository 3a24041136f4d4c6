"""Loss curves of a small model in each number format, over three seeds.

Question  What does training in a format cost in loss, against bf16 on the same data in the same order?
Method    `scrimp train` once per recipe and seed: the seed decides initialisation, data order and rounding
          noise, so that runs of one seed differ in nothing but their formats. Every block's GEMMs run in the
          recipe; embedding, head, norms and attention stay in bf16. The table shows, per recipe, the
          held-out loss, and its gap to bf16 of the same seed: mean and range over seeds, in per cent.
          The curve is the training loss averaged over a window of steps.
Limits    Two runs that differ by a rounding drift apart: with few steps and three seeds a gap of a per cent is
          noise, of which the range over seeds gives an idea. A few million parameters and tokens, emulated
          formats: says nothing of large models or of speed.
Run       python benchmarks/format_losses.py           (resumable: finished runs are not repeated)
          python benchmarks/format_losses.py --only-report
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from environment import RESULTS, ROOT, cpu, facts, markdown_table, write_pair

RECIPES = ("bf16", "fp8", "fp8_tensor", "mxfp8", "nvfp4", "mxfp4", "fp4")
CONTROL = RECIPES[0]
WINDOW = 20
COLUMNS = (
    "recipe",
    "seeds",
    "held-out loss, mean",
    "gap to bf16, mean",
    "gap, lowest to highest",
    "training loss, last quarter",
    "its gap to bf16, mean (lowest, highest)",
)


def main() -> None:
    """Train what is missing, then report on everything that is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--preset", default="llama-3m")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--eval-tokens", type=int, default=32_768)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "format-losses")
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only-report", action="store_true", help="train nothing")
    options = parser.parse_args()
    before = facts("torch") | {"device": cpu() if options.device in ("auto", "cpu") else options.device}
    # Seed by seed, so that what is there at any time compares.
    for seed in options.seeds:
        for recipe in options.recipes:
            if not options.only_report:
                train(recipe, seed, options)
    runs = [read(folder) for folder in sorted(options.work.glob("*-seed*")) if is_finished(folder)]
    if not runs:
        raise SystemExit("no run is finished")
    name = f"{options.date}-format-losses"
    record = {"environment": before, "settings": settings(options), "plot": f"{name}.svg", "runs": runs}
    path = write_pair(options.out, name, record, page(runs, record))
    draw(runs, path.with_suffix(".svg"))
    print("\n".join(markdown_table(COLUMNS, rows(runs))))


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the numbers."""
    return {name: getattr(options, name) for name in ("preset", "steps", "batch_tokens", "eval_tokens")}


def train(recipe: str, seed: int, options: argparse.Namespace) -> None:
    """One run, or the rest of one that was interrupted."""
    folder = options.work / f"{recipe}-seed{seed}"
    if is_finished(folder):
        return
    command = [sys.executable, "-m", "scrimp", "train", "--run.dir", str(folder)]
    if (folder / "config.toml").exists():
        command += ["--resume"]
    else:
        command += ["--precision", recipe, "--run.seed", str(seed), "--model.preset", options.preset]
        command += ["--train.steps", str(options.steps), "--train.batch-tokens", str(options.batch_tokens)]
        command += ["--evaluation.every", str(options.steps), "--evaluation.tokens", str(options.eval_tokens)]
        command += ["--checkpoint.every", "60", "--device", options.device]
    print(f"{recipe}, seed {seed}", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def is_finished(folder: Path) -> bool:
    """Whether a run has reached its end."""
    events = folder / "events.jsonl"
    return events.exists() and any(event["kind"] == "finish" for event in lines(events))


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read(folder: Path) -> dict[str, Any]:
    """What a finished run measured."""
    recipe, _, seed = folder.name.rpartition("-seed")
    metrics = lines(folder / "metrics.jsonl")
    held_out = [row["eval_loss"] for row in metrics if "eval_loss" in row][-1]
    losses = [round(row["loss"], 4) for row in metrics]
    return {"recipe": recipe, "seed": int(seed), "held_out_loss": held_out, "losses": losses}


def rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """One row per recipe, in the order of RECIPES."""
    controls = {run["seed"]: run for run in runs if run["recipe"] == CONTROL}
    control = {seed: run["held_out_loss"] for seed, run in controls.items()}
    table = []
    for recipe in RECIPES:
        mine = [run for run in runs if run["recipe"] == recipe]
        if not mine:
            continue
        gaps = [100 * (r["held_out_loss"] / control[r["seed"]] - 1) for r in mine if r["seed"] in control]
        spread = f"{min(gaps):+.2f} % to {max(gaps):+.2f} %" if gaps else "no control"
        loss = statistics.mean(run["held_out_loss"] for run in mine)
        gap = f"{statistics.mean(gaps):+.2f} %" if gaps else ""
        last = {run["seed"]: last_quarter(run) for run in mine}
        trained = [
            100 * (last[seed] / last_quarter(run) - 1) for seed, run in controls.items() if seed in last
        ]
        paired = (
            f"{statistics.mean(trained):+.2f} % ({min(trained):+.2f}, {max(trained):+.2f})" if trained else ""
        )
        quarter = f"{statistics.mean(last.values()):.4f}"
        table.append([recipe, str(len(mine)), f"{loss:.4f}", gap, spread, quarter, paired])
    return table


def last_quarter(run: dict[str, Any]) -> float:
    """Mean training loss of the last quarter of the steps: of the same batches for every recipe of a seed."""
    losses: list[float] = run["losses"]
    return statistics.mean(losses[-(len(losses) // 4) or -1 :])


def page(runs: list[dict[str, Any]], record: dict[str, Any]) -> str:
    """The result as Markdown."""
    environment, chosen = record["environment"], record["settings"]
    text = [
        "# Loss of a small model in each number format",
        "",
        f"{chosen['preset']}, {chosen['steps']} steps of {chosen['batch_tokens']:,} tokens of the standard library's "
        "source; blocks in the recipe, the rest in bf16. Formats emulated by the reference back end; losses measured. "
        "How: the docstring of `benchmarks/format_losses.py`.",
        "",
        f"- command: {environment['command']}",
        f"- commit: {environment['commit']}",
        f"- device: {environment['device']}; torch {environment['versions']['torch']}",
        "",
        *markdown_table(COLUMNS, rows(runs)),
        "",
        "![training loss by recipe](" + f"{record['plot']})",
        "",
    ]
    return "\n".join(text)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Training loss and its gap to bf16, averaged over seeds, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "scrimp"  # the same figures give the same file
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    curves = {recipe: mean_curve([r["losses"] for r in runs if r["recipe"] == recipe]) for recipe in RECIPES}
    for index, (recipe, curve) in enumerate(curves.items()):
        colour = f"C{index}"  # the same in both plots
        if not curve:
            continue
        steps = range(WINDOW, WINDOW + len(curve))
        left.plot(steps, curve, color=colour, label=recipe, linewidth=1.2)
        if recipe != CONTROL and curves[CONTROL]:
            gap = [100 * (a / b - 1) for a, b in zip(curve, curves[CONTROL], strict=False)]
            right.plot(range(WINDOW, WINDOW + len(gap)), gap, color=colour, label=recipe, linewidth=1.2)
    left.set(title=f"training loss, mean of {WINDOW} steps and all seeds", xlabel="step", ylabel="loss")
    right.set(title="gap to bf16", xlabel="step", ylabel="per cent")
    right.axhline(0, color="black", linewidth=0.8)
    left.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def mean_curve(losses: list[list[float]]) -> list[float]:
    """Mean over runs of the moving average over WINDOW steps."""
    if not losses:
        return []
    length = min(len(run) for run in losses)
    mean = [statistics.mean(run[i] for run in losses) for i in range(length)]
    return [statistics.mean(mean[i - WINDOW : i]) for i in range(WINDOW, length + 1)]


if __name__ == "__main__":
    main()
