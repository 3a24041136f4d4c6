"""Each kernel of a step's own passes beside the operators that it stands for: whether it is right, and how much faster.

Question  Sums of gradients, the loss and AdamW's update are one kernel each. Does each give what the operators give on
          this device, and how near does it come to the memory's speed?
Passes    `sum`: a bf16 gradient added to a bf16 sum. `product that adds`: wgrad of 4,096 tokens with its sum in
          float32, beside a product that is added afterwards; of bf16 operands on a GPU. `loss`: cross-entropy of a
          chunk of logits, and its gradient in their place. `update`: AdamW of weights in bf16 or of masters, averages
          in each format, clipped; where all is float32 the operators are torch's fused AdamW. `gate`: codes of tiles,
          or with one scale of the tensor, of a gate's result and of its gradients, made as they are read, beside a
          kernel for the gate and then the quantizer.
Right     Bit for bit, of the loss to rounding: both take sums, in another order. On a CPU with MKL the operators'
          square roots are a last place off, and no update is right.
Speed     Rounds with both in turn (stopwatch.py), as a ratio within each round. Bytes: what the kernel must read and
          write at least, over its seconds; beside it a large copy's.
Run       python benchmarks/fused_passes.py --device cuda
          TRITON_INTERPRET=1 python benchmarks/fused_passes.py --numbers 1024 --repeats 1     # the script itself
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from stopwatch import Race, Stopwatch, Work, first_line
from torch import Tensor

from scrimp.formats import Noise
from scrimp.gemm import kernels
from scrimp.gemm.deferred import Deferred, Matrix
from scrimp.gemm.weight_sums import add_product
from scrimp.objectives.cross_entropy import _block
from scrimp.optim import MomentFormat, Moments, Step
from scrimp.optim.targets import add_by_operators
from scrimp.optim.update import update_by_kernel, update_by_operators, update_fused

OPERATORS, KERNEL = "operators", "kernel"
NOISE = Noise(5, 3, 11)
STEP = Step(3, 1e-3, 0.9, 0.95, 1e-8, 0.1, clip=0.7)
COLUMNS, WORDS, TOKENS = 4096, 131_072, 4096
Z_LOSS = 1e-4


@dataclass(frozen=True)
class Pass:
    """One kernel, the operators, and what both change."""

    name: str
    run: dict[str, Callable[..., object]]
    """By kernel and by operators, of the same tensors."""
    tensors: list[Tensor]
    changed: int
    """So many of them, the first, are changed."""
    moved: int
    """Bytes that are read and written at least."""
    is_exact: bool = True

    def is_right(self) -> bool:
        """Whether both change copies of the tensors alike."""
        results = []
        for run in self.run.values():
            own = [one.clone() for one in self.tensors]
            given = run(*own)
            results.append([*own[: self.changed], *([given] if isinstance(given, Tensor) else [])])
        pairs = list(zip(*results, strict=True))
        if self.is_exact:
            return all(torch.equal(one, other) for one, other in pairs)
        return all(torch.allclose(one, other, rtol=1e-2, atol=1e-6) for one, other in pairs)

    def works(self) -> dict[str, Work]:
        """Both, again and again on the same tensors."""
        return {name: partial(run, *self.tensors) for name, run in self.run.items()}


@dataclass(frozen=True)
class Row:
    """One pass; seconds by round."""

    name: str
    numbers: int
    is_right: bool
    moved: int
    operators_s: list[float]
    kernel_s: list[float]
    failure: str = ""


def passes(numbers: int, device: torch.device) -> Iterator[Callable[[], Pass]]:
    """Each made when it is its turn: together they would not fit."""
    yield partial(sum_pass, numbers, device)
    yield partial(product_pass, numbers, device)
    yield partial(loss_pass, numbers, device)
    formats: tuple[MomentFormat, ...] = ("bf16", "8bit", "fp32")
    for weight in (torch.bfloat16, torch.float32):
        for format_ in formats:
            yield partial(update_pass, numbers, weight, format_, device)
    for quantize in (kernels.quantize_tiles, kernels.quantize_tensor):
        for of_gradients in (False, True):
            yield partial(gate_pass, numbers, quantize, of_gradients, device)


def matrix(numbers: int, columns: int, device: torch.device, seed: int) -> Tensor:
    """So many random numbers, in float32."""
    columns = min(columns, numbers)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(max(1, numbers // columns), columns, generator=generator, device=device)


def sum_pass(numbers: int, device: torch.device) -> Pass:
    """A bf16 gradient added to its sum."""
    total, gradient = (matrix(numbers, COLUMNS, device, seed).bfloat16() for seed in (1, 2))
    run: dict[str, Callable[..., object]] = {
        OPERATORS: lambda total, gradient: add_by_operators(total, gradient, NOISE),
        KERNEL: lambda total, gradient: kernels.add_rounded(total, gradient, NOISE),
    }
    return Pass("sum, bf16", run, [total, gradient], 1, 2 * total.nbytes + gradient.nbytes)


def product_pass(numbers: int, device: torch.device) -> Pass:
    """A product with its sum, of -1, 0 and 1: what it gives is exact in bf16 too."""
    total = matrix(numbers, COLUMNS, device, 1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g, x = (
        (0.4 * matrix(TOKENS * width, width, device, seed)).round().to(dtype)
        for seed, width in enumerate(total.shape, 2)
    )
    run: dict[str, Callable[..., object]] = {
        OPERATORS: lambda total, g, x: total.add_(g.t() @ x),
        KERNEL: lambda total, g, x: add_product(total, g.t(), x),
    }
    moved = 2 * total.nbytes + g.nbytes + x.nbytes
    return Pass("product that adds", run, [total, g, x], 1, moved, is_exact=dtype == torch.bfloat16)


def loss_pass(numbers: int, device: torch.device) -> Pass:
    """Loss and gradient of a chunk of logits."""
    logits = (3 * matrix(numbers, WORDS, device, 1)).bfloat16()
    targets = torch.arange(len(logits), device=device) % logits.shape[1]
    real = torch.ones(len(logits), 1, dtype=torch.bool, device=device)
    run: dict[str, Callable[..., object]] = {
        OPERATORS: lambda logits: _block(logits, targets[:, None], real, Z_LOSS, training=True).sum((1, 2)),
        KERNEL: lambda logits: kernels.cross_entropy(logits, targets, Z_LOSS, training=True).sum(0),
    }
    return Pass("loss, bf16", run, [logits], 1, 2 * logits.nbytes, is_exact=False)


def gate_pass(numbers: int, quantize: Callable[..., Any], of_gradients: bool, device: torch.device) -> Pass:
    """Codes both ways of what a gate makes, or of its gradients."""
    halves, grad = matrix(numbers, 2 * COLUMNS, device, 1).bfloat16(), None
    if of_gradients:
        grad = matrix(halves.numel() // 2, halves.shape[1] // 2, device, 2).bfloat16()

    def codes(x: Matrix) -> Tensor:
        row, _ = quantize(x, "e4m3", by_row=True, by_column=True)
        return cast(Tensor, row.codes.view(torch.uint8))

    def source(halves: Tensor, *grad: Tensor) -> Deferred:
        return Deferred(halves, "silu", *grad)

    run: dict[str, Callable[..., object]] = {
        OPERATORS: lambda *tensors: codes(source(*tensors).made()),
        KERNEL: lambda *tensors: codes(source(*tensors)),
    }
    tensors = [halves] if grad is None else [halves, grad]
    readings = 2 if quantize is kernels.quantize_tensor else 1
    moved = readings * sum(one.nbytes for one in tensors) + 2 * source(*tensors).numel()
    what = "gradients" if of_gradients else "result"
    return Pass(f"gate, {quantize.__name__.removeprefix('quantize_')}, {what}", run, tensors, 0, moved)


def update_pass(numbers: int, dtype: torch.dtype, format_: MomentFormat, device: torch.device) -> Pass:
    """AdamW of one matrix."""
    weight, gradient = (matrix(numbers, COLUMNS, device, seed).to(dtype) for seed in (1, 2))
    states = Moments.zeros(format_, weight).tensors()
    names, is_plain = list(states), dtype == torch.float32 and format_ == "fp32"

    def over(tensors: tuple[Tensor, ...]) -> Moments:
        return Moments.over(dict(zip(names, tensors[1:-1], strict=True)))

    def by_operators(*tensors: Tensor) -> None:
        if is_plain:
            update_fused([tensors[0]], [tensors[-1]], [over(tensors)], STEP)
        else:
            update_by_operators(tensors[0], tensors[-1], over(tensors), STEP, NOISE)

    def by_kernel(*tensors: Tensor) -> None:
        update_by_kernel(tensors[0], tensors[-1], over(tensors), STEP, NOISE)

    changed = [weight, *states.values()]
    update_by_operators(weight.clone(), gradient.clone(), Moments.over(states), STEP, NOISE)  # not of zeros
    moved = 2 * sum(one.nbytes for one in changed) + gradient.nbytes
    name = f"update, {'master' if dtype == torch.float32 else 'bf16'}, averages {format_}"
    run: dict[str, Callable[..., object]] = {OPERATORS: by_operators, KERNEL: by_kernel}
    return Pass(name, run, [*changed, gradient], len(changed), moved, is_exact=not is_plain)


def measure(make: Callable[[], Pass], watch: Stopwatch, repeats: int) -> Row:
    """One pass, checked and timed."""
    one = make()
    try:
        is_right, failure = one.is_right(), ""
    except Exception as error:  # a card that a kernel does not know
        is_right, failure = False, first_line(error)
    race = Race({}, {}, {}) if failure else watch.race(one.works(), 2, repeats)
    failure = failure or "; ".join(race.failures.values())
    seconds = [race.seconds.get(name, []) for name in (OPERATORS, KERNEL)]
    return Row(one.name, one.tensors[0].numel(), is_right, one.moved, *seconds, failure)


def page(rows: list[Row], bandwidth: float, environment: dict[str, object]) -> str:
    """The result as Markdown."""
    heads = ("pass", "numbers", "right", "operators, ms", "kernel, ms", "faster", "GB/s", "of a copy's")
    text = [
        "# Kernels of a step's own passes",
        "",
        f"{environment['device']}; how: the docstring of `benchmarks/fused_passes.py`. A copy moves "
        f"{bandwidth / 1e9:,.0f} GB/s.",
        "",
        f"- command: {environment['command']}",
        f"- commit: {environment['commit']}",
        "",
        *markdown_table(heads, [cells(row, bandwidth) for row in rows]),
        "",
    ]
    return "\n".join([*text, *(f"- {row.name}: {row.failure}" for row in rows if row.failure)])


def cells(row: Row, bandwidth: float) -> tuple[str, ...]:
    """A row of the page."""
    known = row.name, f"{row.numbers:,}", "yes" if row.is_right else "NO"
    if not (row.operators_s and row.kernel_s):
        return (*known, *["-"] * 5)
    ratios = [theirs / ours for theirs, ours in zip(row.operators_s, row.kernel_s, strict=True)]
    rate = row.moved / statistics.median(row.kernel_s)
    return (
        *known,
        f"{1e3 * statistics.median(row.operators_s):.3f}",
        f"{1e3 * statistics.median(row.kernel_s):.3f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{rate / 1e9:,.0f}",
        f"{rate / bandwidth:.0%}",
    )


def main() -> int:
    """Check, measure, write, print; 0 if all are right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--numbers", type=int, default=2**27, help="of a sum, of logits, of a weight")
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    watch = Stopwatch(device)
    name = torch.cuda.get_device_name() if watch.is_cuda else cpu()
    environment = facts("torch", "triton") | {"device": name}
    bandwidth, rows = watch.copy_bandwidth(), []
    for make in passes(options.numbers, device):
        rows.append(measure(make, watch, options.repeats))
        record = {"environment": environment, "copy_bytes_per_s": bandwidth, "rows": list(map(asdict, rows))}
        text = page(rows, bandwidth, environment)
        path = write_pair(options.out, f"{options.date}-fused-passes-{options.device}", record, text)
    print(text, f"written: {path.name}")
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
