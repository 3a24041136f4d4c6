"""The largest model that trains, as predicted, by card and host memory; and the reference cases in full.

Question  Which model can be trained in full (all weights, AdamW) on a card of so many GB beside a host of so
          many?
Method    For each model: a trace of its step on fake tensors along CUDA's way through the code
          (`TracedStep`), then the planner (`scrimp.planner.memory.search`) with what a run may use
          (`scrimp.training.memory.limits`) of a card whose context takes `CONTEXT_BYTES`, and of a host that has all
          but `HOST_RESERVE` free. Micro-batch of one sequence. bf16 weights without masters, rounded
          stochastically; moments in bf16 (8 bytes a parameter) or 8 bits (6.03).
Limits    Predicted: nothing is run. Rates of the card are those of `CARD`'s file, of the link `LINK`; they decide
          which plan is fastest, not what fits. Attention's backward pass is counted for 132 multiprocessors. The
          copy that a checkpoint is written from is not counted: without room for it, training waits while a
          checkpoint is written.
Run       python benchmarks/largest_model.py            (minutes on one core; no GPU)
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from datetime import date
from pathlib import Path
from typing import Any

from environment import RESULTS, facts, markdown_table, write_pair

from scrimp.config import PRESETS, preset
from scrimp.config.activations import ALL_ACTIVATIONS, Activations
from scrimp.config.resolved import ResolvedLayout
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.block_times import block_seconds, level_seconds
from scrimp.planner.layout.predict import kernels_of
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import software
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.search import find
from scrimp.profiler.memory_trace import TracedStep
from scrimp.report.memory_text import runs_of
from scrimp.runtime.memory import largest_step
from scrimp.training.memory.limits import usable_of_card, usable_of_host

CARDS = (12, 16, 24, 40, 80)
"""GB, as cards are sold: 2^30 bytes each."""
HOSTS = (32, 64, 128, 256)
MODELS = (
    "qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-1.5b", "qwen3-1.7b", "qwen2.5-3b", "llama-3.2-3b", "qwen3-4b",
    "mistral-7b", "qwen2.5-7b", "llama-3-8b", "qwen3-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3-70b",
)  # fmt: skip
CONTEXT_BYTES = 700 * 2**20
HOST_RESERVE = 4 * 10**9
CARD = load_hardware("rtx4090")
LINK = 25e9


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record: dict[str, Any] = facts("torch", "numpy")
    models = sorted(options.models, key=lambda name: spec_of(PRESETS[name]).parameters)
    began = time.perf_counter()
    traced = {
        (name, moments): traced_costs(name, moments, options.sequence)
        for name in models
        for moments in ("bf16", "8bit")
    }
    setup = Setup(options.micro_batches)
    record["largest"] = [
        {
            "moments": moments,
            "card": card,
            "host": host,
            "model": largest(models, traced, moments, card, host, setup),
        }
        for moments in ("bf16", "8bit")
        for card in CARDS
        for host in HOSTS
    ]
    record["cases"] = [
        case(traced[name, moments], name, moments, card, host, setup)
        for name, card, host in (("qwen2.5-7b", 16, 57), ("qwen2.5-14b", 24, 128))
        for moments in ("bf16", "8bit")
        if name in models
    ]
    record |= {"sequence": options.sequence, "seconds": time.perf_counter() - began}
    print(write_pair(options.out, f"{date.today().isoformat()}-largest-model", record, page(record)))


def traced_costs(name: str, moments: str, sequence: int) -> StepCosts:
    """A step of one sequence on a CUDA device, with seconds."""
    architecture = preset(name)
    costs = TracedStep(
        architecture,
        precision="bf16",
        parameters="bf16",
        optimizer=AdamWMemory("bf16", moments=moments),
        micro_batch=1,
        sequence=sequence,
        loss_chunk=512,
        activations=ALL_ACTIVATIONS,
        device_functions="cuda",
    ).costs()
    setting = Setting(
        model=sizes_of(spec_of(architecture)),
        cluster=CARD,
        sequence=sequence,
        global_batch=1,
        micro_batch=1,
        layout=ResolvedLayout(dp=1, fsdp=1),
        software=software("scrimp"),
    )
    kernels, block = kernels_of(setting), setting.model.blocks[0]
    one = block_seconds(block, setting, kernels)
    (kind,) = costs.classes
    timed = {}
    for choice, cost in kind.choices.items():
        again = level_seconds(block, setting, kernels, Activations.parse(choice).level)
        timed[choice] = dataclasses.replace(
            cost, forward_seconds=one.forward.compute, backward_seconds=one.backward.compute + again
        )
    return dataclasses.replace(costs, classes=(dataclasses.replace(kind, choices=timed),))


def machine_of(card: float, host: float) -> Machine:
    """A card of so many GiB and a host of so many GB."""
    return Machine(
        device_bytes=usable_of_card(int(card * 2**30) - CONTEXT_BYTES),
        host_bytes=usable_of_host(int(host * 1e9) - HOST_RESERVE),
        upload=LINK,
        download=LINK,
        upload_together=0.8 * LINK,
        download_together=0.8 * LINK,
        cpu_adam=None,  # `memory.update` is device unless it is asked for
        device_memory=CARD.groups[0].node.device.bandwidth,
    )


def largest(
    models: list[str],
    traced: dict[tuple[str, str], StepCosts],
    moments: str,
    card: int,
    host: int,
    setup: Setup,
) -> str | None:
    """The largest model that fits; models in rising size, and what fits falls with size."""
    low, high = 0, len(models)
    while low < high:
        middle = (low + high) // 2
        if find(traced[models[middle], moments], machine_of(card, host), setup) is None:
            high = middle
        else:
            low = middle + 1
    return models[low - 1] if low else None


def case(costs: StepCosts, name: str, moments: str, card: int, host: int, setup: Setup) -> dict[str, Any]:
    """One model on one machine, in full."""
    # The host's figure is a budget for the run, nothing in reserve.
    machine = dataclasses.replace(machine_of(card, host), host_bytes=largest_step(int(host * 1e9)))
    plan = find(costs, machine, setup)
    found: dict[str, Any] = {
        "model": name,
        "moments": moments,
        "card": card,
        "host": host,
        "fits": plan is not None,
    }
    if plan is not None:
        account = plan.account
        found |= {
            "activations": runs_of(plan.placement.activations),
            "states": str(plan.placement.states),
            "device": dict(account.device),
            "host_bytes": dict(account.host),
            "peak_device_bytes": account.peak,
            "peak_host_bytes": account.host_peak,
            "step_seconds": plan.timeline.seconds,
            "computing_seconds": plan.timeline.compute,
        }
    return found


def page(record: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    lines = [
        "# The largest model that trains, by card and host",
        "",
        "Predicted by the planner from traces; nothing was run. How: the docstring of `benchmarks/largest_model.py`.",
        f"Sequences of {record['sequence']:,} tokens, one at a time; command `{record['command']}`, "
        f"commit {record['commit']}.",
        "",
    ]
    for moments, name in (
        ("bf16", "bf16 weights and moments, 8 bytes a parameter"),
        ("8bit", "8-bit moments, 6.03 bytes"),
    ):
        rows = [
            [f"{card} GB"]
            + [
                next(
                    row["model"] or "none"
                    for row in record["largest"]
                    if (row["moments"], row["card"], row["host"]) == (moments, card, host)
                )
                for host in HOSTS
            ]
            for card in CARDS
        ]
        columns = ["card", *(f"host of {host} GB" for host in HOSTS)]
        lines += [f"## {name}", "", *markdown_table(columns, rows), ""]
    lines += ["## Reference cases", ""]
    for found in record["cases"]:
        lines += [*_case(found), ""]
    return "\n".join(lines) + "\n"


def _case(found: dict[str, Any]) -> list[str]:
    head = f"{found['model']}, {found['moments']} moments, {found['card']} GB card, {found['host']} GB of host memory"
    if not found["fits"]:
        return [f"- **{head}**: does not fit"]
    device, host = found["peak_device_bytes"], found["peak_host_bytes"]
    lines = [
        f"- **{head}**: {device / 2**30:.2f} GiB on the card, {host / 1e9:.1f} GB on the host (predicted)",
        f"  - {found['activations']}; {found['states']}",
        f"  - step {found['step_seconds']:.1f} s, of which the model computes "
        f"{found['computing_seconds']:.1f} s (predicted)",
    ]
    for where, unit, size in (("device", "GiB", 2**30), ("host_bytes", "GB", 10**9)):
        parts = ", ".join(f"{name} {value / size:.2f}" for name, value in found[where].items())
        lines.append(f"  - {where.removesuffix('_bytes')}, {unit}: {parts}")
    return lines


if __name__ == "__main__":
    main()
