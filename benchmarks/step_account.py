"""What each pass of a step takes above its floor, and Scrimp's step beside LLMQ's in the same model of time.

Question  Which passes would kernels of our own shorten, by how much, and how good can they become? How does the step
          stand beside that of LLMQ, the fastest published one on cards of this size, and beside torchao's?
Method    `scrimp.planner.layout.step_account`: bytes, FLOPs and seconds of every pass, and those of ideal regions.
          Of Scrimp as it runs (`softwares/scrimp.toml`: bytes counted from its code), of LLMQ (`llmq.toml`: read in its
          source), which has one scale a tensor in all of its 8 bits, and of torchao's Float8Linear in TorchTitan
          (`torchtitan-2025.toml`: read in its source), whose weights, gradients and moments are in float32.
          Launches of today's step are counted here: operators of the update and its kernel, kernels of a compiled
          block as Inductor fuses it.
          Of Scrimp's own step sums of gradients that no product adds to run after products here, and beside them in
          `scrimp plan`.
          A ratio is sure where it keeps its sign with every constant moved by 15 %, one after the other: rates of the
          card, and figures of either program.
          FP8 of Scrimp with the head in 8 bits as well is shown beside FP8 of its blocks alone.
Limits    Counted and predicted: nothing is measured here. One device, dense models, nothing on the host: LLMQ's rows of
          7B and 14B that send residuals or states to the host are counted without.
Run       python benchmarks/step_account.py                                        # LLMQ's table for one H100
          python benchmarks/step_account.py --models qwen2.5-7b --hardware rtx4090 --micro-batch 4 --recompute full
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from environment import RESULTS, facts, markdown_table, write_pair
from rich.console import Console
from torch import Tensor, nn

from scrimp.config import OptimizerConfig, preset
from scrimp.config.resolved import ResolvedLayout
from scrimp.models import spec_of
from scrimp.models.model import build_model
from scrimp.models.shapes import sizes_of
from scrimp.optim import AdamW, Moments
from scrimp.planner.hardware import Cluster, load_hardware
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import OWN, Software, in_states, software, with_attention
from scrimp.planner.layout.stage_memory import peak_bytes
from scrimp.planner.layout.state_formats import StateFormats
from scrimp.planner.layout.step_account import LOSS_BYTES, Above, StepPass, above_floor, floor_of, passes_of
from scrimp.precision import GEMMS, HEAD
from scrimp.profiler.counted_step import KernelCounter, count_block

Case = tuple[str, str, int, str]
"""Model, format, micro-batch, and what is made again."""
_PUBLISHED = (
    ("qwen2.5-0.5b", 32, 32, "none"),
    ("qwen2.5-1.5b", 32, 32, "none"),
    ("qwen2.5-3b", 16, 16, "none"),
    ("qwen2.5-7b", 4, 16, "selective"),
)
"""LLMQ's table for one H100: model, micro-batch in bf16 and in 8 bits, and what is made again in 8 bits."""
ROWS: tuple[Case, ...] = tuple(
    (model, precision, plain, "none") if precision == "bf16" else (model, precision, low, again)
    for model, plain, low, again in _PUBLISHED
    for precision in ("bf16", "fp8_tensor", "fp8", "fp8_tensor + head", "fp8 + head")
)
"""That table, with the nearest level of recomputation. Of ours the head may be in 8 bits, too; LLMQ's is in bf16."""
WITH_HEAD = " + head"
SEQUENCE, TOKENS = 1024, 524_288
STATES = StateFormats(masters=False)
"""LLMQ's: weights, gradients and moments in bf16."""
LLMQ, TORCHAO = "LLMQ", "torchao"
ANY_ORDER = "in any order"
SHOWN = "today", ANY_ORDER, "floor"
COMPARED = (*((name, LLMQ) for name in SHOWN), ("today", TORCHAO))
"""Which of ours is divided by which of theirs."""
OPERAND_BYTES = 2.0 * (1.0 + 4.0 / 128)
"""Of two operands in 8 bits for each number of a weight, with scales of tiles."""
MOVED = 0.15
OF_PROGRAMS = (
    "traffic",
    "quantize_bytes",
    "quantize_block_bytes",
    "transposed_weight_bytes",
    "bytes_per_logit",
    "gradient_sum_bytes",
    "optimizer_bytes",
    "selective_products",
)
OF_CARDS = ("bf16", "fp8", "fp8_block", "attention_forward", "attention_backward", "memory")


@dataclass(frozen=True)
class Row:
    """One setting, in seconds of a step."""

    model: str
    precision: str
    micro_batch: int
    recompute: str
    today: float
    in_any_order: float
    """With `train.deterministic` false: attention by torch's faster kernel."""
    floor: float
    llmq: float
    torchao: float
    ratios: dict[str, tuple[float, float, float]]
    """Ours over LLMQ, and today over torchao: the ratio, and the least and most with a constant moved."""


@dataclass(frozen=True)
class Account:
    """The passes of one setting."""

    ours: list[Above]
    launches: dict[str, float]
    """By pass; ours of today."""
    theirs: dict[str, dict[str, StepPass]]
    """The other programs' passes, by program and pass."""


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", help="presets; unset: the rows of LLMQ's table")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    before = facts("torch")
    cases = ROWS
    if options.models:
        cases = tuple(
            (one, options.precision, options.micro_batch, options.recompute) for one in options.models
        )
    cluster = load_hardware(options.hardware)
    rows = [row_of(case, cluster) for case in cases]
    shown = [case for case in cases if case[0] == cases[-1][0] and WITH_HEAD not in case[1]]
    accounts = {case: account_of(case, cluster) for case in shown}
    text = page(rows, accounts, before, options.hardware)
    record = {
        "environment": before,
        "hardware": options.hardware,
        "rows": [asdict(row) for row in rows],
        "accounts": {" ".join(map(str, case)): asdict(found) for case, found in accounts.items()},
    }
    path = write_pair(options.out, f"{options.date}-step-account-{options.hardware}", record, text)
    Console().print(text, f"written: {path}", markup=False)


def today() -> Software:
    """Scrimp as it runs; the loss by its kernel (`scrimp.gemm.kernels.loss`), which predictions do not know yet."""
    return dataclasses.replace(in_states(software("scrimp"), STATES), bytes_per_logit=LOSS_BYTES)


def setting_of(case: Case, program: Software, cluster: Cluster) -> Setting:
    """A step of LLMQ's size. Scrimp quantizes weights once in it where memory has room for them."""
    model, precision, micro_batch, recompute = case
    precision, plans_head, _ = precision.partition(WITH_HEAD)
    found = Setting(
        model=sizes_of(spec_of(preset(model))),
        cluster=cluster,
        sequence=SEQUENCE,
        global_batch=TOKENS // SEQUENCE,
        micro_batch=micro_batch,
        layout=ResolvedLayout(dp=1, fsdp=1),
        software=program,
        precision=precision,
        recompute=recompute,
        formats={f"{HEAD}.{gemm}": precision for gemm in GEMMS} if plans_head else {},
    )
    if program.name not in OWN or precision == "bf16":
        return found
    numbers = sum(linear.parameters for block in found.model.blocks for linear in block.linears)
    taken = peak_bytes(found)[0].total + OPERAND_BYTES * numbers
    return dataclasses.replace(found, keeps_operands=taken <= found.memory_bytes)


def rivals() -> dict[str, Software]:
    """The other programs."""
    return {LLMQ: software("llmq"), TORCHAO: software("torchtitan-2025")}


def rivals_case(case: Case) -> Case:
    """What they run in the place of a case of ours: one scale a tensor in all of their 8 bits."""
    return case if case[1] == "bf16" else (case[0], "fp8_tensor", *case[2:])


def account_of(case: Case, cluster: Cluster) -> Account:
    """All passes of a setting, of ours and of theirs."""
    found = {
        name: {one.name: one for one in passes_of(setting_of(rivals_case(case), program, cluster))}
        for name, program in rivals().items()
    }
    return Account(above_floor(setting_of(case, today(), cluster)), launches_of(case, cluster), found)


def row_of(case: Case, cluster: Cluster) -> Row:
    """All programs on one setting, and how sure their ratios are."""
    ours = dict.fromkeys(SHOWN, today())
    ours[ANY_ORDER] = with_attention(today(), deterministic=False, documents=False)
    theirs = rivals()

    def seconds(name: str, program: Software, card: Cluster) -> float:
        passes = floor_of if name == "floor" else passes_of
        asked = rivals_case(case) if name in theirs else case
        return sum(one.seconds for one in passes(setting_of(asked, program, card)))

    taken = {name: seconds(name, program, cluster) for name, program in (ours | theirs).items()}
    ratios = {}
    for name, rival in COMPARED:
        own_program, its_program = ours[name], theirs[rival]
        found = [taken[name] / taken[rival]]
        found += [
            seconds(name, own_program, card) / seconds(rival, its_program, card)
            for card in moved_cards(cluster)
        ]
        found += [seconds(name, one, cluster) / taken[rival] for one in moved_programs(own_program)]
        found += [taken[name] / seconds(rival, one, cluster) for one in moved_programs(its_program)]
        ratios[f"{name} / {rival}"] = found[0], min(found), max(found)
    return Row(*case, *taken.values(), ratios=ratios)


def moved_cards(cluster: Cluster) -> Iterator[Cluster]:
    """The card with one rate after the other moved up and down."""
    group = cluster.groups[0]
    device = group.node.device
    for name in OF_CARDS:
        share = getattr(device.achieved, name)
        for factor in (1 - MOVED, 1 + MOVED):
            if share is not None:
                achieved = dataclasses.replace(device.achieved, **{name: share * factor})
                node = dataclasses.replace(group.node, device=dataclasses.replace(device, achieved=achieved))
                yield dataclasses.replace(cluster, groups=(dataclasses.replace(group, node=node),))


def moved_programs(program: Software) -> Iterator[Software]:
    """A program with one figure after the other moved up and down."""
    for factor in (1 - MOVED, 1 + MOVED):
        for name in OF_PROGRAMS:
            yield dataclasses.replace(program, **{name: getattr(program, name) * factor})
        counted = tuple(
            (name, tuple((launches, factor * x, factor * y, factor * w) for launches, x, y, w in figures))
            for name, figures in program.quantize
        )
        yield dataclasses.replace(program, quantize=counted)


def launches_of(case: Case, cluster: Cluster) -> dict[str, float]:
    """Launches of Scrimp's step today, by pass: those that its account has, and those that are counted here."""
    setting = setting_of(case, today(), cluster)
    found = {one.name: one.launches for one in passes_of(setting)}
    forward, backward = counted_launches()
    blocks, passes = len(setting.model.blocks), setting.micro_batches
    with torch.device("meta"):
        parameters = len(list(build_model(preset(case[0])).parameters()))
    chunks = math.ceil(setting.tokens / (setting.software.loss_tokens or setting.tokens))
    return found | {
        "update": update_launches(parameters),
        "loss": chunks * passes,
        "norms, gates, rotation": (forward + backward) * blocks * passes,
    }


@cache
def update_launches(parameters: int) -> int:
    """Launches of the update of so many parameters, with the norm of their gradients and the clip."""
    updates = importlib.import_module("scrimp.optim.update")  # the package has a function of this name
    weights = {str(number): nn.Parameter(torch.randn(8, 128).bfloat16()) for number in range(parameters)}
    optimizer = AdamW(weights, dataclasses.replace(OptimizerConfig(), master_weights=False))

    def by_kernel(weight: Tensor, gradient: Tensor, moments: Moments, *_: Any) -> None:
        states = [weight, *moments.tensors().values()]
        counter.kernel([gradient, *states], states)

    for weight in weights.values():
        weight.float().sum().backward()
    with (
        patch.object(updates, "_takes_kernel", lambda *_: True),
        patch.object(updates, "update_by_kernel", by_kernel),
        KernelCounter() as counter,
    ):
        norm = optimizer.gradient_norm()
        optimizer.clip(norm, norm / 2)
        optimizer.step(0.01)
    return counter.take().launches


@cache
def counted_launches() -> tuple[int, int]:
    """Launches of the forward and the backward pass of a compiled block of Llama without products and attention."""
    block = count_block(preset("llama-3m"), compiled=True)
    kernels = [one.launches - one.product_launches - 1 for one in (block.forward, block.backward)]
    return kernels[0], kernels[1]


def page(
    rows: list[Row],
    accounts: dict[Case, Account],
    environment: dict[str, Any],
    hardware: str,
) -> str:
    """The result as Markdown."""
    text = [
        "# The step above its floor",
        "",
        f"One {hardware}, {TOKENS:,} tokens a step, sequences of {SEQUENCE:,}, weights and moments in bf16 (torchao's "
        "in float32). Counted and predicted, not measured; how: the docstring of `benchmarks/step_account.py`.",
        "",
        f"- command: {environment['command']}",
        f"- commit: {environment['commit']}",
        "",
        "Seconds of a step; in any order: with `train.deterministic = false`, attention by torch's faster kernel. "
        "Ratios to LLMQ, in brackets with each constant moved by 15 % in turn:",
        "",
        *ratio_table(rows),
    ]
    for case, found in accounts.items():
        model, precision, micro_batch, recompute = case
        step = sum(one.taken.seconds for one in found.ours)
        text += [
            "",
            f"{model} in {precision} (the others in {rivals_case(case)[1]}), micro-batches of {micro_batch}, "
            f"made again: {recompute}; today {step:.2f} s:",
            "",
            *pass_table(found, step),
        ]
    return "\n".join([*text, ""])


def ratio_table(rows: list[Row]) -> list[str]:
    """Seconds of all programs, and ours over LLMQ's."""
    settings = ("model", "format", "micro-batch", "made again")
    heads = (*settings, *SHOWN, LLMQ, TORCHAO, *rows[0].ratios)
    cells = [
        (
            row.model,
            row.precision,
            str(row.micro_batch),
            row.recompute,
            *(f"{one:.2f}" for one in (row.today, row.in_any_order, row.floor, row.llmq, row.torchao)),
            *("{:.2f} ({:.2f} to {:.2f})".format(*one) for one in row.ratios.values()),
        )
        for row in rows
    ]
    return markdown_table(heads, cells)


def pass_table(account: Account, step: float) -> list[str]:
    """The passes of a step of so many seconds."""
    own = ("pass", "launches", "GB", "floor, GB", "TFLOP", "s", "floor, s", "above, s", "of the step")
    heads = (*own, *(f"{name}, {unit}" for name in account.theirs for unit in ("GB", "s")))
    passes = dict.fromkeys(
        [one.taken.name for one in account.ours]
        + [name for found in account.theirs.values() for name in found]
    )
    ours = {one.taken.name: one for one in account.ours}
    cells = []
    for name in passes:
        one = ours.get(name, Above(StepPass(name), StepPass(name)))
        cells.append(
            (name, *_own_cells(one, account.launches.get(name, 0), step), *_their_cells(account, [name]))
        )
    whole = Above(
        sum((one.taken for one in account.ours), StepPass("all")),
        sum((one.floor for one in account.ours), StepPass("all")),
    )
    launches = sum(account.launches.get(name, 0) for name in passes)
    cells.append(("all", *_own_cells(whole, launches, step), *_their_cells(account, list(passes))))
    return markdown_table(heads, cells)


def _own_cells(one: Above, launches: float, step: float) -> list[str]:
    return [
        f"{launches:,.0f}",
        f"{one.taken.moved / 1e9:,.0f}",
        f"{one.floor.moved / 1e9:,.0f}",
        f"{one.taken.flops / 1e12:,.0f}",
        f"{one.taken.seconds:.2f}",
        f"{one.floor.seconds:.2f}",
        f"{one.seconds:+.2f}",
        f"{one.seconds / step:+.1%}",
    ]


def _their_cells(account: Account, names: list[str]) -> Iterator[str]:
    """Bytes and seconds of each other program's passes of these names, together."""
    for passes in account.theirs.values():
        found = [passes[name] for name in names if name in passes]
        yield f"{sum(one.moved for one in found) / 1e9:,.0f}"
        yield f"{sum(one.seconds for one in found):.2f}"


if __name__ == "__main__":
    main()
