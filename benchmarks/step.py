"""Tokens per second and peak memory of one training step, against plain PyTorch over transformers and without it.

Question  How fast is Scrimp's decoder in a training step (forward, backward, clipping, fused AdamW) beside others'
          models of the same shape, and does it learn the same?
Sides     `step_sides.py`: Scrimp's step, compiled and not, and by torch's operators alone; the transformers model in a
          plain loop, compiled and not; a decoder in plain PyTorch. All begin with the same weights and take the same
          batches. bf16 means autocast over float32 parameters on all sides.
Method    All sides take every step in one process, in turn, and change places after each, so that whatever else the
          machine does falls on all. The first steps are dropped; the table gives the median step and the median of the
          ratios of neighbouring steps. Tokens are drawn from a Zipf distribution, so that there is something to learn;
          losses are compared step by step, norms of gradients in the first step, before rounding has moved weights
          apart; both must be the first side's.
Share     FLOPs of the first side's step (causal attention, `scrimp.planner.flops`) a second, over those of one product
          of three 2,048 x 2,048 matrices of the precision's type. The steps of all sides and one product take turns.
Memory    Peak of one further step, of each side alone: bytes of parameters and optimizer state
          plus the peak of what the step allocates, from the profiler's allocation events on
          the CPU and from the allocator's maximum on CUDA.
Run       python benchmarks/step.py                          # CPU, all sizes, fp32 and bf16
          python benchmarks/step.py --sizes llama-3m --repeats 3 --sides ours "plain decoder"
          python benchmarks/step.py --device cuda --precision bf16 --sizes llama-300m \
              --sides "ours compiled" "transformers compiled"
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from rich.console import Console
from rich.table import Table
from step_sides import NAMES, OURS, PEER, Maker, Side
from torch import Tensor

from scrimp.config import load_config, preset, resolve
from scrimp.config.architecture import Architecture
from scrimp.models import spec_of
from scrimp.planner.flops import count_flops

QWEN_SMALL = Architecture(
    family="qwen2",
    vocab_size=8192,
    num_layers=8,
    width=512,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    ffn_width=1408,
    context=2048,
    norm_eps=1e-6,
    qkv_bias=True,
    tied_embeddings=True,
)
"""Grouped-query attention and QKV bias, as in Qwen 2.5, at about 27M parameters."""
SIZES = ("llama-3m", "llama-20m", "llama-60m", "qwen-small")
TOLERANCE = {"fp32": (1e-4, 1e-5), "bf16": (1e-2, 1e-2)}
"""Largest relative difference between two losses of a step, and between the first norms, that counts as none."""

PRODUCT_SIZE = 2048
"""Rows, columns and depth of the product whose rate a step is held against."""


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    size: str
    precision: str
    sequence: int
    micro_batch: int


@dataclass(frozen=True)
class Taken:
    """One side's steps."""

    side: str
    tokens_per_s: float
    step_s: tuple[float, float, float]
    """Fastest, median and slowest."""
    peak_bytes: int
    losses: list[float]
    norms: list[float]
    ratio: tuple[float, float, float]
    """Its seconds over those of the first side, step by step: least, median and most."""
    loss_difference: float
    """Largest relative difference to the first side's loss of a step."""
    norm_difference: float
    """Relative difference of the first step's norms, of gradients at the same weights."""


@dataclass(frozen=True)
class Result:
    """All sides on one setting."""

    size: str
    precision: str
    sequence: int
    micro_batch: int
    num_parameters: int
    loss_chunk: int
    product_flops_per_s: float
    share_of_product: float
    """FLOPs of the first side's step a second over those."""
    sides: list[Taken]

    @property
    def is_same(self) -> bool:
        """Whether all sides had the same losses and norms."""
        loss, norm = TOLERANCE[self.precision]
        return all(one.loss_difference <= loss and one.norm_difference <= norm for one in self.sides)


def main() -> None:
    """Measure every size and precision, write the results, print the table."""
    options = parse()
    torch.set_num_threads(options.threads)
    before = environment(options)
    results = []
    console = Console()
    for precision, sequence, size in product(options.precision, options.sequence, options.sizes):
        setting = Setting(size, precision, sequence, options.micro_batch or max(1, 2048 // sequence))
        with console.status(str(setting)):
            results.append(measure(setting, options))
        found = ", ".join(f"{one.ratio[1]:.2f} x {one.side}" for one in results[-1].sides[1:])
        console.print(f"{size} {precision} {sequence}: {found}")
    written = write(results, before, options)
    console.print(table(results))
    console.print(f"written: {written}")
    if not all(result.is_same for result in results):
        sys.exit("losses or gradients differ")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="presets, or qwen-small")
    parser.add_argument(
        "--sides", nargs="+", choices=NAMES, default=[OURS, PEER], help="the first against the others"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", nargs="+", choices=tuple(TOLERANCE), default=list(TOLERANCE))
    parser.add_argument("--sequence", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--micro-batch", type=int, help="sequences per step; default: 2,048 tokens")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each side")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them, dropped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--suffix", default="", help="end of their names")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if len(set(options.sides)) < len(options.sides):
        parser.error("--sides names a side twice")
    return options


def measure(setting: Setting, options: argparse.Namespace) -> Result:
    """All sides through the same steps."""
    architecture = QWEN_SMALL if setting.size == "qwen-small" else preset(setting.size)
    chunk = loss_chunk(architecture, setting, options.device)
    maker = Maker(architecture, setting.precision, chunk, setting.sequence, options.device)
    sides = [maker.side(name) for name in options.sides]
    batches = token_batches(architecture.vocab_size, setting, options)
    courses = {side.name: Course() for side in sides}
    multiplied: list[float] = []
    left, right = product_operands(setting.precision, options.device)
    for number, tokens in enumerate(batches):
        for index in range(len(sides)):
            side = sides[(index + number) % len(sides)]
            start = time.perf_counter()
            loss, norm = side.step(tokens)
            courses[side.name].add(time.perf_counter() - start, loss, norm)
        start = time.perf_counter()
        (left @ right)[0, 0].item()
        multiplied.append(time.perf_counter() - start)
    first = courses[sides[0].name]
    num_tokens = setting.sequence * setting.micro_batch
    step_flops = num_tokens * count_flops(spec_of(architecture), setting.sequence).causal
    product_rate = 2 * PRODUCT_SIZE**3 / statistics.median(multiplied[options.warm_up :])
    step_s = statistics.median(first.seconds[options.warm_up :])
    return Result(
        **asdict(setting),
        num_parameters=spec_of(architecture).parameters,
        loss_chunk=chunk,
        product_flops_per_s=product_rate,
        share_of_product=step_flops / step_s / product_rate,
        sides=[
            taken(
                side.name,
                courses[side.name],
                first,
                num_tokens,
                options.warm_up,
                peak_bytes(side, batches[0]),
            )
            for side in sides
        ],
    )


@dataclass
class Course:
    """What a side's steps gave, one after another."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(self, seconds: float, loss: float, norm: float) -> None:
        """One more step."""
        self.seconds.append(seconds)
        self.losses.append(loss)
        self.norms.append(norm)


def taken(name: str, own: Course, first: Course, num_tokens: int, warm_up: int, peak: int) -> Taken:
    """A side's figures, beside those of the first side."""
    seconds = own.seconds[warm_up:]
    ratios = [mine / its for mine, its in zip(seconds, first.seconds[warm_up:], strict=True)]
    return Taken(
        side=name,
        tokens_per_s=num_tokens / statistics.median(seconds),
        step_s=spread(seconds),
        peak_bytes=peak,
        losses=own.losses,
        norms=own.norms,
        ratio=spread(ratios),
        loss_difference=largest_difference(own.losses, first.losses),
        norm_difference=largest_difference(own.norms[:1], first.norms[:1]),
    )


def largest_difference(own: Sequence[float], first: Sequence[float]) -> float:
    """The largest difference of two numbers of a step, relative to the first side's."""
    return max(abs(mine - its) / abs(its) for mine, its in zip(own, first, strict=True))


def product_operands(precision: str, device: str) -> tuple[Tensor, Tensor]:
    """Two matrices of the type that products of this precision have."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape, generator = (PRODUCT_SIZE, PRODUCT_SIZE), torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    return left, right


def loss_chunk(architecture: Architecture, setting: Setting, device_type: str) -> int:
    """What `scrimp train` would choose for these sizes."""
    sequence, micro_batch = setting.sequence, setting.micro_batch
    config = load_config(None)
    train = replace(
        config.train, sequence=sequence, batch_tokens=sequence * micro_batch, micro_batch=micro_batch
    )
    precision: Any = setting.precision
    config = replace(config, train=train, precision=precision)
    chunk = resolve(config, architecture, device_type=device_type).config.train.loss_chunk
    assert chunk is not None
    return chunk


def token_batches(vocab_size: int, setting: Setting, options: argparse.Namespace) -> list[Tensor]:
    """Rows of sequence + 1 tokens for every step, Zipf distributed."""
    generator = torch.Generator().manual_seed(0)
    weights = 1.0 / torch.arange(1, vocab_size + 1)
    steps = options.warm_up + options.repeats
    num_tokens = steps * setting.micro_batch * (setting.sequence + 1)
    tokens = torch.multinomial(weights, num_tokens, replacement=True, generator=generator)
    return list(tokens.view(steps, setting.micro_batch, -1).to(options.device))


def spread(figures: Sequence[float]) -> tuple[float, float, float]:
    """The least, the median and the largest."""
    return min(figures), statistics.median(figures), max(figures)


def peak_bytes(side: Side, tokens: Tensor) -> int:
    """Most bytes alive during one step of this side, its parameters and optimizer state included."""
    held: list[Tensor] = [*side.model.parameters()]
    held += [t for state in side.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    resident = sum(t.numel() * t.element_size() for t in held)
    if tokens.is_cuda:
        before = torch.cuda.memory_allocated(tokens.device)
        torch.cuda.reset_peak_memory_stats(tokens.device)
        side.step(tokens)
        return resident + torch.cuda.max_memory_allocated(tokens.device) - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        side.step(tokens)
    return resident + allocator_peak(profile)


def allocator_peak(profile: torch.profiler.profile) -> int:
    """Largest sum of live bytes over the profiler's allocation events."""
    recorded: Any = profile.profiler
    live = peak = 0
    for event in recorded.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def write(results: list[Result], before: dict[str, Any], options: argparse.Namespace) -> Path:
    """The results as JSON, and as a page."""
    record = {"environment": before, "results": [asdict(result) for result in results]}
    name = f"{options.date}-step-{options.device}{options.suffix}"
    return write_pair(options.out, name, record, page(results, before))


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader needs to repeat or to doubt the figures."""
    found = facts("torch", "transformers")
    return {
        "command": found["command"],
        "commit": found["commit"],
        "date": options.date,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else cpu(),
        "threads": options.threads,
        **{name: found["versions"][name] for name in ("torch", "transformers", "python")},
        "optimizer": "AdamW fused, lr 1e-3, betas 0.9/0.95, decay 0.1; clip 1.0; float32 parameters and state",
        "steps": f"{options.warm_up} dropped, {options.repeats} timed, all sides in turn",
        "data": "Zipf distributed random tokens, each row one document",
    }


COLUMNS = (
    "setting",
    "side",
    "tok/s",
    "its time / the first's",
    "peak",
    "differences of losses, of the first norm",
)


def cells(result: Result) -> list[list[str]]:
    """A row for each side as text."""
    setting = f"{result.size} {result.precision} {result.micro_batch} x {result.sequence}"
    return [[setting, *of_side(one, is_first=one is result.sides[0])] for one in result.sides]


def of_side(one: Taken, *, is_first: bool) -> list[str]:
    """Its cells."""
    low, middle, high = one.ratio
    beside = ["", ""]
    if not is_first:
        differences = f"{one.loss_difference:.1e}, {one.norm_difference:.1e}"
        beside = [f"{middle:.2f} ({low:.2f} to {high:.2f})", differences]
    return [one.side, f"{one.tokens_per_s:,.0f}", beside[0], f"{one.peak_bytes / 2**20:,.0f} MiB", beside[1]]


def table(results: list[Result]) -> Table:
    """For the terminal."""
    rich = Table(title="one training step")
    for column in COLUMNS:
        rich.add_column(column)
    for result in results:
        for row in cells(result):
            rich.add_row(*row)
    return rich


def page(results: list[Result], facts: dict[str, Any]) -> str:
    """For the repository."""
    lines = ["# One training step: Scrimp beside plain PyTorch", ""]
    lines += ["All figures measured; how, and what the sides are: the docstring of `benchmarks/step.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", *markdown_table(COLUMNS, (row for result in results for row in cells(result)))]
    lines += [
        "",
        "FLOPs of the first side's step a second, over those of one large product in the same minutes:",
        "",
    ]
    for r in results:
        name = f"{r.size} {r.precision} {r.micro_batch} x {r.sequence}"
        of_product = f"{r.share_of_product:.0%} of {r.product_flops_per_s / 1e12:.2f} TFLOP/s"
        last = ", ".join(f"{one.losses[-1]:.5f} {one.side}" for one in r.sides)
        lines.append(
            f"- {name}: {of_product}; loss in chunks of {r.loss_chunk or 'all'} tokens; last losses {last}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
