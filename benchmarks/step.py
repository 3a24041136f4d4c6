"""Tokens per second and peak memory of one training step, against plain PyTorch over transformers.

Question  How fast is Scrimp's decoder in a training step (forward, backward, clipping, fused
          AdamW) beside the transformers model of the same shape, and does it learn the same?
Peer      A plain loop: `AutoModelForCausalLM` with attn_implementation="sdpa" and no cache,
          `F.cross_entropy` over float32 logits, the same clipping, the same fused AdamW, the
          same batches; it starts from the same weights (exported by Scrimp, loaded by
          transformers). bf16 means autocast over float32 parameters on both sides. With
          --compile both are compiled: the peer as a whole, Scrimp by block as it trains.
Method    Both sides take every step in one process, in turn, and change places after each,
          so that whatever else the machine does falls on both. The first steps are dropped;
          the table gives the median step, the fastest and slowest, and the median of the
          ratios of neighbouring steps. Tokens are drawn from a Zipf distribution, so that
          there is something to learn; losses are compared step by step.
Share     FLOPs of our step (causal attention, `scrimp.planner.flops`) a second, over those of one product of three
          2,048 x 2,048 matrices of the precision's type. Both sides' steps and one product take turns.
Memory    Peak of one further step, of each side alone: bytes of parameters and optimizer state
          plus the peak of what the step allocates, from the profiler's allocation events on
          the CPU and from the allocator's maximum on CUDA.
Run       python benchmarks/step.py                          # CPU, all sizes, fp32 and bf16
          python benchmarks/step.py --sizes llama-3m --repeats 3
          python benchmarks/step.py --device cuda --compile --precision bf16 --sizes llama-300m
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from scrimp.config import load_config, preset, resolve
from scrimp.config.architecture import Architecture
from scrimp.data import Batch
from scrimp.models import spec_of
from scrimp.models.huggingface.export import export_model
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.objectives.next_token import NEXT_TOKEN
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
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Largest relative difference between the two losses of a step that counts as the same."""

PRODUCT_SIZE = 2048
"""Rows, columns and depth of the product whose rate a step is held against."""

Step = Callable[[Tensor], float]


@dataclass
class Side:
    """One of the two competitors."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step


@dataclass(frozen=True)
class Setting:
    """What one row measures."""

    size: str
    precision: str
    sequence: int
    micro_batch: int


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    size: str
    precision: str
    sequence: int
    micro_batch: int
    num_parameters: int
    loss_chunk: int
    ours_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float
    ratio_spread: tuple[float, float]
    product_flops_per_s: float
    share_of_product: float
    ours_step_s: tuple[float, float, float]
    peer_step_s: tuple[float, float, float]
    ours_peak_bytes: int
    peer_peak_bytes: int
    ours_losses: list[float]
    peer_losses: list[float]
    largest_loss_difference: float
    same_losses: bool


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
        console.print(f"{size} {precision} {sequence}: {results[-1].ratio:.2f} x")
    written = write(results, before, options)
    console.print(table(results))
    console.print(f"written: {written}")
    if not all(result.same_losses for result in results):
        sys.exit("losses differ")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="presets, or qwen-small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--compile", action="store_true", help="compile both sides")
    parser.add_argument("--sequence", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--micro-batch", type=int, help="sequences per step; default: 2,048 tokens")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each side")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them, dropped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def measure(setting: Setting, options: argparse.Namespace) -> Result:
    """One row: both sides through the same steps."""
    architecture = QWEN_SMALL if setting.size == "qwen-small" else preset(setting.size)
    chunk = loss_chunk(architecture, setting, options.device)
    ours, peer = sides(architecture, setting.precision, chunk, options)
    batches = token_batches(architecture.vocab_size, setting, options)
    seconds: dict[str, list[float]] = {"ours": [], "peer": [], "product": []}
    losses: dict[str, list[float]] = {"ours": [], "peer": []}
    left, right = product_operands(setting.precision, options.device)
    for number, tokens in enumerate(batches):
        for side in (ours, peer) if number % 2 == 0 else (peer, ours):
            start = time.perf_counter()
            losses[side.name].append(side.step(tokens))
            seconds[side.name].append(time.perf_counter() - start)
        start = time.perf_counter()
        (left @ right)[0, 0].item()
        seconds["product"].append(time.perf_counter() - start)
    timed = {name: values[options.warm_up :] for name, values in seconds.items()}
    ratios = [peer_s / ours_s for ours_s, peer_s in zip(timed["ours"], timed["peer"], strict=True)]
    pairs = zip(losses["ours"], losses["peer"], strict=True)
    difference = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
    num_tokens = setting.sequence * setting.micro_batch
    step_flops = num_tokens * count_flops(spec_of(architecture), setting.sequence).causal
    product_rate = 2 * PRODUCT_SIZE**3 / statistics.median(timed["product"])
    return Result(
        **asdict(setting),
        num_parameters=spec_of(architecture).parameters,
        loss_chunk=chunk,
        ours_tokens_per_s=num_tokens / statistics.median(timed["ours"]),
        peer_tokens_per_s=num_tokens / statistics.median(timed["peer"]),
        ratio=statistics.median(ratios),
        ratio_spread=(min(ratios), max(ratios)),
        product_flops_per_s=product_rate,
        share_of_product=step_flops / statistics.median(timed["ours"]) / product_rate,
        ours_step_s=spread(timed["ours"]),
        peer_step_s=spread(timed["peer"]),
        ours_peak_bytes=peak_bytes(ours, batches[0]),
        peer_peak_bytes=peak_bytes(peer, batches[0]),
        ours_losses=losses["ours"],
        peer_losses=losses["peer"],
        largest_loss_difference=difference,
        same_losses=difference <= TOLERANCE[setting.precision],
    )


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


def sides(
    architecture: Architecture, precision: str, chunk: int, options: argparse.Namespace
) -> tuple[Side, Side]:
    """Both models with the same weights, and their steps."""
    model = build_model(architecture)
    initialise(model, 0)
    peer = transformers_model(model, architecture).to(options.device)
    model.to(options.device)
    compiled_peer: Any = peer
    if options.compile:
        compiled_peer = torch.compile(peer)
        for block in model.blocks:
            block.compile()

    def autocast() -> AbstractContextManager[object]:
        return torch.autocast(options.device, torch.bfloat16) if precision == "bf16" else nullcontext()

    def our_loss(tokens: Tensor) -> Tensor:
        with autocast():
            sums = NEXT_TOKEN.loss(model, Batch.of(tokens[:, :-1], tokens[:, 1:]), chunk=chunk)
        return sums.total / tokens[:, 1:].numel()

    def peer_loss(tokens: Tensor) -> Tensor:
        with autocast():
            logits = compiled_peer(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return side("ours", model, our_loss), side("peer", peer, peer_loss)


def transformers_model(model: Model, architecture: Architecture) -> nn.Module:
    """The transformers model with our weights, through an exported folder."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        export_model(model, architecture, Path(folder) / "model")
        peer: nn.Module = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", attn_implementation="sdpa", dtype=torch.float32
        )
    return peer.train()


def side(name: str, model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Side:
    """A competitor with its optimizer: everything but the loss is the same for both."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(tokens: Tensor) -> float:
        loss = loss_of(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Side(name, model, optimizer, step)


def spread(seconds: list[float]) -> tuple[float, float, float]:
    """Fastest, median and slowest."""
    return min(seconds), statistics.median(seconds), max(seconds)


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
    suffix = f"{options.device}-compiled" if options.compile else options.device
    record = {"environment": before, "results": [asdict(result) for result in results]}
    return write_pair(options.out, f"{options.date}-step-{suffix}", record, page(results, before))


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
        "compiled": options.compile,
        "optimizer": "AdamW fused, lr 1e-3, betas 0.9/0.95, decay 0.1; clip 1.0; float32 parameters and state",
        "steps": f"{options.warm_up} dropped, {options.repeats} timed, both sides in turn",
        "data": "Zipf distributed random tokens, each row one document",
    }


COLUMNS = (
    "size",
    "precision",
    "parameters",
    "tokens/step",
    "ours tok/s",
    "peer tok/s",
    "ratio (spread)",
    "share of a product",
    "peak ours / peer",
    "largest loss difference",
)


def cells(result: Result) -> list[str]:
    """One row as text."""
    low, high = result.ratio_spread
    return [
        result.size,
        result.precision,
        f"{result.num_parameters / 1e6:.1f}M",
        f"{result.micro_batch} x {result.sequence}",
        f"{result.ours_tokens_per_s:,.0f}",
        f"{result.peer_tokens_per_s:,.0f}",
        f"{result.ratio:.2f} ({low:.2f} to {high:.2f})",
        f"{result.share_of_product:.0%} of {result.product_flops_per_s / 1e12:.2f} TFLOP/s",
        f"{result.ours_peak_bytes / 2**20:,.0f} / {result.peer_peak_bytes / 2**20:,.0f} MiB",
        f"{result.largest_loss_difference:.1e}",
    ]


def table(results: list[Result]) -> Table:
    """For the terminal."""
    rich = Table(title="one training step: Scrimp (ours) and plain PyTorch over transformers (peer)")
    for column in COLUMNS:
        rich.add_column(column)
    for result in results:
        rich.add_row(*cells(result))
    return rich


def page(results: list[Result], facts: dict[str, Any]) -> str:
    """For the repository."""
    lines = ["# One training step: Scrimp against plain PyTorch over transformers", ""]
    lines += ["All figures measured; how, and what the peer is: the docstring of `benchmarks/step.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", *markdown_table(COLUMNS, map(cells, results))]
    lines += ["", "Losses, first and last step (ours / peer):", ""]
    for r in results:
        first, last = (f"{r.ours_losses[i]:.5f} / {r.peer_losses[i]:.5f}" for i in (0, -1))
        lines.append(
            f"- {r.size} {r.precision} {r.sequence}: {first}, {last}; loss in chunks of {r.loss_chunk or 'all'} tokens"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
