"""What planned GEMMs cost: a step in each recipe against bf16, and a change of plan between steps.

Question  How much slower is an emulated (or faster a native) recipe than bf16 in a whole training
          step? What does it cost to give half of all layers other recipes while training goes on?
Method    One model in bf16 and one per recipe on the same batch: forward and backward, gradients dropped,
          without the optimizer, which is the same for all. All take their steps in turn, in one process; the
          ratio is the median of the ratios to the bf16 step of the same round. The first round, in which
          back ends tune themselves and Numba compiles, is dropped. On a CPU each recipe runs twice, quantized by
          torch's operators (reference) and by compiled kernels (numba).
Units     On a CPU without units for bf16 everything runs with products in float32, as a run there has it
          (`scrimp.gemm.cpu_products`). Before, the first model takes its steps with torch's own.
Threads   Those of torch spin as briefly between operators as in a run (`scrimp.cli.entry`).
Compute   `--compute fp32`: blocks, head and products in float32, beside a model in float32.
Switch    A model in fp8 gives every second layer fp4: seconds for `replan` itself, then the step after it
          against the steps before. Eager, and with every block compiled, where new graphs are
          counted; beside it what compiling the blocks took at the start, as a static plan would again.
Run       python benchmarks/planned_step.py                       # CPU, llama-60m
          python benchmarks/planned_step.py --device cuda --preset llama-300m --compile
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in every run, and before torch starts its threads
import torch
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from rich.console import Console
from torch import Tensor

from scrimp.config import Config, ModelConfig, TrainConfig, preset, resolve
from scrimp.data import Batch
from scrimp.gemm import LinearPrecision, backends_for
from scrimp.gemm.backends.numba import has_numba
from scrimp.gemm.cpu_products import has_bf16_units, widen_bf16_products
from scrimp.models.initialise import initialise
from scrimp.planner import Figures, build_plan
from scrimp.planner.memory.placement import Placement
from scrimp.runtime import Executable, compile_blocks, realise

RECIPES = ("fp8", "fp8_tensor", "fp8_row", "mxfp8", "nvfp4", "mxfp4", "fp4")
STEP_COLUMNS = ("recipe", "back end", "step, ms (fastest, slowest)", "times {compute}", "range of the ratio")
SWITCH_COLUMNS = (
    "mode",
    "first step, s",
    "steps before, ms",
    "replan, ms",
    "step after, ms",
    "steps later, ms",
    "new graphs",
)


@dataclass(frozen=True)
class StepResult:
    """One recipe, quantized by one back end."""

    recipe: str
    backend: str
    seconds: list[float]
    ratios: list[float]


@dataclass(frozen=True)
class SwitchResult:
    """One change of plan."""

    mode: str
    first_step_s: float
    before_s: list[float]
    replan_s: float
    after_s: float
    later_s: list[float]
    new_graphs: int


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-60m")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compute", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of every model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--skip-switch", action="store_true")
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = cpu() if options.device == "cpu" else torch.cuda.get_device_name()
    before = facts("torch", "triton") | {"device": device, "threads": options.threads}
    steps = measure_steps(options)
    switches = (
        [] if options.skip_switch else [measure_switch(options, mode) for mode in ("eager", "compiled")]
    )
    record = {
        "environment": before,
        "settings": {
            name: getattr(options, name)
            for name in ("preset", "sequence", "micro_batch", "compute", "compile")
        },
        "steps": [asdict(result) for result in steps],
        "switches": [asdict(result) for result in switches],
    }
    text = page(steps, switches, record)
    path = write_pair(
        options.out, f"{options.date}-planned-step-{options.device}-{options.compute}", record, text
    )
    Console().print(text, f"written: {path}", markup=False)


def make(recipe: str, options: argparse.Namespace, backend: str | None = None) -> tuple[Executable, Tensor]:
    """A model that runs in a recipe, and a batch.

    Args:
        backend: that quantizes; None: the one that would be chosen.
    """
    compute = options.compute
    config = Config(
        precision=compute if recipe == compute else f"{compute},*={recipe},head={compute}",
        model=ModelConfig(preset=options.preset),
        train=TrainConfig(
            sequence=options.sequence,
            batch_tokens=options.sequence * options.micro_batch,
            micro_batch=options.micro_batch,
        ),
    )
    architecture = preset(options.preset)
    config = resolve(config, architecture, device_type=options.device).config
    plan = build_plan(
        config,
        architecture,
        device_name=options.device,
        device_is_host=options.device == "cpu",
        torch_version=torch.__version__,
        reasons={},
        placement=Placement.resident(architecture.num_layers),
        why="everything resident",
        predicted=Figures(),
    )
    executable = realise(
        plan,
        architecture,
        lambda model: initialise(model, 0),
        device=torch.device(options.device),
        parameters=config.train.parameters,
        compute=config.precision_rules.compute,
        loss_chunk=config.train.loss_chunk or 0,
        choose=backends_for(torch.device(options.device), backend),
    )
    generator = torch.Generator().manual_seed(0)
    shape = (options.micro_batch, options.sequence)
    return executable, torch.randint(0, architecture.vocab_size, shape, generator=generator)


def step(executable: Executable, tokens_BT: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    synchronise(executable.device)
    start = time.perf_counter()
    executable.begin(0, 0)
    executable.loss(Batch.of(tokens_BT, tokens_BT)).total.backward()
    synchronise(executable.device)
    seconds = time.perf_counter() - start
    executable.model.zero_grad(set_to_none=True)
    return seconds


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_steps(options: argparse.Namespace) -> list[StepResult]:
    """All recipes in turn, several rounds."""
    base = (options.compute, "")
    backends = [None] if options.device != "cpu" else ["reference", *(["numba"] if has_numba() else [])]
    models = {base: make(options.compute, options)}
    for recipe, backend in itertools.product(options.recipes, backends):
        models[recipe, backend or ""] = make(recipe, options, backend)
    if options.compile:
        for executable, _ in models.values():
            compile_blocks(executable.model)
    own = []
    if options.device == "cpu" and options.compute == "bf16" and not has_bf16_units():
        own = [step(*models[base]) for _ in range(options.repeats + 1)][1:]
        widen_bf16_products()
    rounds = [{key: step(*model) for key, model in models.items()} for _ in range(options.repeats + 1)][1:]
    found = [StepResult(*key, [r[key] for r in rounds], [r[key] / r[base] for r in rounds]) for key in models]
    if own:
        usual = statistics.median(r[base] for r in rounds)
        found.insert(
            1, StepResult(options.compute, "torch's own products", own, [one / usual for one in own])
        )
    return found


def measure_switch(options: argparse.Namespace, mode: str) -> SwitchResult:
    """Half of all layers from fp8 to fp4 between two steps."""
    executable, tokens = make("fp8", options)
    if mode == "compiled":
        torch._dynamo.reset()
        compile_blocks(executable.model)
    first = step(executable, tokens)
    before = [step(executable, tokens) for _ in range(options.repeats)]
    assert executable.planned is not None
    graphs = num_graphs()
    start = time.perf_counter()
    layers = list(executable.planned.layers)[::2]
    changed = executable.planned.replan(dict.fromkeys(layers, LinearPrecision.of("fp4")))
    replan = time.perf_counter() - start
    assert changed == layers
    after = step(executable, tokens)
    later = [step(executable, tokens) for _ in range(options.repeats)]
    return SwitchResult(mode, first, before, replan, after, later, num_graphs() - graphs)


def num_graphs() -> int:
    """Graphs that torch.compile has made so far in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def page(steps: list[StepResult], switches: list[SwitchResult], record: dict[str, Any]) -> str:
    """The result as Markdown."""
    environment, settings = record["environment"], record["settings"]
    rows = [
        (
            r.recipe,
            r.backend,
            f"{milliseconds(r.seconds)} ({1e3 * min(r.seconds):,.0f}, {1e3 * max(r.seconds):,.0f})",
            f"{statistics.median(r.ratios):.2f}",
            f"{min(r.ratios):.2f} to {max(r.ratios):.2f}",
        )
        for r in steps
    ]
    changes = [
        (
            s.mode,
            f"{s.first_step_s:.2f}",
            milliseconds(s.before_s),
            f"{1e3 * s.replan_s:.2f}",
            milliseconds([s.after_s]),
            milliseconds(s.later_s),
            str(s.new_graphs),
        )
        for s in switches
    ]
    text = [
        "# Planned GEMMs: a step in each recipe, and a change of plan",
        "",
        f"{settings['preset']}, {settings['micro_batch']} x {settings['sequence']} tokens, "
        f"{'compiled' if settings['compile'] else 'eager'}, {environment['device']}, {environment['threads']} threads, "
        f"torch {environment['versions']['torch']}. Measured; how: the docstring of `benchmarks/planned_step.py`.",
        "",
        f"- command: {environment['command']}",
        f"- commit: {environment['commit']}",
        "",
        f"Forward and backward pass (all blocks in the recipe, the head in {settings['compute']}):",
        "",
        *markdown_table([one.format(**settings) for one in STEP_COLUMNS], rows),
    ]
    if changes:
        text += ["", "Half of all layers from fp8 to fp4:", "", *markdown_table(SWITCH_COLUMNS, changes)]
    return "\n".join([*text, ""])


def milliseconds(seconds: list[float]) -> str:
    """The median."""
    return f"{1e3 * statistics.median(seconds):,.0f}"


if __name__ == "__main__":
    main()
