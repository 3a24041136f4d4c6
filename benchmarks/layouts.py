"""Tokens per second, bytes and waits of training on several ranks, against plain PyTorch doing the same by hand.

Question  What does Scrimp's step cost on 1, 2 and 4 ranks of one machine, layout by layout, beside the transformers
          model under DistributedDataParallel or FSDP2, and does it learn the same?
Peer      `AutoModelForCausalLM` with attn_implementation="sdpa" and no cache, from the same weights (exported by
          Scrimp); DDP for copies, for shards `fully_shard` of every layer and of the rest, gathered again for the
          backward pass (zero 3) or not (zero 2); `F.cross_entropy` over float32 logits, clipping by the global norm,
          fused AdamW. Both sides see the same rows on the same ranks. float32.
Method    gloo, a process and a thread for each rank. All ranks take every step with both sides in turn, and change
          places after each, so that whatever else the machine does falls on both. The first steps are dropped; the
          table has the median of the ratios of neighbouring steps, and its spread. Rank 0's figures.
          Ranks that outnumber cores take turns on them: on such a machine more ranks are never faster, and the figure
          to read is the ratio.
Bytes     What leaves a rank in one step by the formula of a ring, and the seconds spent in collectives, by
          `scrimp.profiler.collectives`, in one further step of each side.
Run       python benchmarks/layouts.py
          python benchmarks/layouts.py --size llama-3m --ranks 2 --repeats 5
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scrimp.config import Config, preset, replace_values
from scrimp.data import Batch
from scrimp.models.huggingface.export import export_model
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.optim import build
from scrimp.profiler.collectives import counting_collectives
from scrimp.runtime import realise
from scrimp.runtime.parallel import RankMesh
from scrimp.runtime.passes import run_passes
from scrimp.training.setup import decide
from scrimp.world import World

LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"fsdp": 1},
    "fsdp, zero 3": {"zero": 3},
    "fsdp, zero 2": {"zero": 2},
    "fsdp, zero 1": {"zero": 1},
    "hybrid, zero 3": {"dp": 2},
    "cp zigzag": {"cp": 2},
    "cp ulysses": {"cp": 2, "cp_method": "ulysses"},
    "tp": {"tp": 2},
    "pp 1f1b": {"pp": 2, "schedule": "1f1b"},
    "pp zbv": {"pp": 2, "schedule": "zbv"},
}
"""Name to settings of `[layout]`; those with a peer are copies and shards."""
NO_PEER = ("cp", "tp", "pp")
LR, CLIP = 1e-3, 1.0
SEQUENCE, ROWS, MICRO_BATCHES, VOCABULARY = 256, 4, 2, 4096

Step = Callable[[list[Batch]], float]
"""Takes a step on the micro-batches of this rank: its loss."""


@dataclass(frozen=True)
class Row:
    """One layout on one number of ranks."""

    layout: str
    ranks: int
    tokens: int
    """Tokens of a step, over all ranks."""
    ours_tokens_per_s: float
    peer_tokens_per_s: float | None
    ratio: float | None
    ratio_spread: tuple[float, float] | None
    ours_sent: float
    """Bytes that leave a rank in a step."""
    peer_sent: float | None
    ours_wait: float
    """Share of the step that is spent in collectives."""
    peer_wait: float | None
    largest_loss_difference: float | None


COLUMNS = (
    "layout",
    "ranks",
    "tokens/step",
    "ours tok/s",
    "peer tok/s",
    "ratio (spread)",
    "sent per step, ours / peer",
    "in collectives, ours / peer",
    "largest loss difference",
)


def main() -> None:
    """Measure, write the results, print the table."""
    options = parse()
    before = facts("torch", "transformers")
    rows: list[Row] = []
    for ranks in options.ranks:
        for name in options.layouts:
            if fits(LAYOUTS[name], ranks):
                rows.append(measured(name, ranks, options))
                print(" | ".join(cells(rows[-1])), flush=True)
    about = {
        "command": before["command"],
        "commit": before["commit"],
        "date": options.date,
        "device": cpu(),
        **{name: before["versions"][name] for name in ("torch", "transformers", "python")},
        "model": f"{options.size}, float32; AdamW fused, clip {CLIP}",
        "batch": f"{ROWS} x {SEQUENCE} tokens in {MICRO_BATCHES} micro-batches for each reader, random",
        "steps": f"{options.warm_up} dropped, {options.repeats} timed, both sides in turn; one thread a rank",
    }
    record = {"environment": about, "results": [asdict(row) for row in rows]}
    print(write_pair(options.out, f"{options.date}-layouts-cpu", record, page(rows, about)))


def fits(layout: dict[str, Any], ranks: int) -> bool:
    """Whether a layout says something of its own on so many ranks."""
    if ranks == 1:
        return layout == LAYOUTS["fsdp, zero 3"]
    if layout.get("dp", 1) > 1:
        return ranks >= 2 * layout["dp"]
    return True


def measured(name: str, ranks: int, options: argparse.Namespace) -> Row:
    """One row: both sides through the same steps, on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (ranks, name, options, Path(folder)), nprocs=ranks, join=True)
        return Row(**json.loads((Path(folder) / "row.json").read_text()))


def on_rank(rank: int, ranks: int, name: str, options: argparse.Namespace, folder: Path) -> None:
    """The work of one rank; the first leaves what it has measured."""
    torch.set_num_threads(1)
    world = World(rank, ranks)
    if ranks > 1:
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    layout = LAYOUTS[name] if ranks > 1 else {}
    own, mesh = ours(layout, world, options.size)
    sides = {"ours": own}
    if not any(axis in layout for axis in NO_PEER):
        sides["peer"] = peer(layout, world, options.size, folder)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    losses: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(options.warm_up + options.repeats):
        turn = sides if number % 2 else reversed(sides)
        of_step = batches(number, mesh.data_rank)
        for side in list(turn):
            world.barrier()
            start = time.perf_counter()
            losses[side].append(sides[side](of_step))
            seconds[side].append(time.perf_counter() - start)
    counted = {side: sent(sides[side], batches(0, mesh.data_rank)) for side in sides}
    if rank == 0:
        tokens = ROWS * SEQUENCE * MICRO_BATCHES * mesh.data_ranks
        timed = {side: values[options.warm_up :] for side, values in seconds.items()}
        row = row_of(name if ranks > 1 else "one process", ranks, tokens, timed, losses, counted)
        (folder / "row.json").write_text(json.dumps(asdict(row)))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def row_of(
    name: str,
    ranks: int,
    tokens: int,
    seconds: dict[str, list[float]],
    losses: dict[str, list[float]],
    counted: dict[str, tuple[float, float]],
) -> Row:
    """The figures of both sides, or of ours where there is no peer."""
    rates = {side: tokens / statistics.median(values) for side, values in seconds.items()}
    ratios = [p / o for o, p in zip(seconds["ours"], seconds.get("peer", []), strict=False)]
    pairs = list(zip(losses["ours"], losses.get("peer", []), strict=False))
    sent_by_peer, waits_of_peer = counted.get("peer", (None, None))
    return Row(
        layout=name,
        ranks=ranks,
        tokens=tokens,
        ours_tokens_per_s=rates["ours"],
        peer_tokens_per_s=rates.get("peer"),
        ratio=statistics.median(ratios) if ratios else None,
        ratio_spread=(min(ratios), max(ratios)) if ratios else None,
        ours_sent=counted["ours"][0],
        peer_sent=sent_by_peer,
        ours_wait=counted["ours"][1],
        peer_wait=waits_of_peer,
        largest_loss_difference=max((abs(o - p) / p for o, p in pairs), default=None),
    )


def sent(step: Step, of_step: list[Batch]) -> tuple[float, float]:
    """Bytes that leave this rank in a step, and the share of it that collectives take."""
    start = time.perf_counter()
    with counting_collectives() as counted:
        step(of_step)
    return counted.sent(), counted.seconds / (time.perf_counter() - start)


def batches(step: int, reader: int) -> list[Batch]:
    """The micro-batches of one reader."""
    generator = torch.Generator().manual_seed(1000 * step + reader)
    found = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(0, 1000, (ROWS, SEQUENCE + 1), generator=generator)
        found.append(Batch.of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return found


def ours(layout: dict[str, Any], world: World, size: str) -> tuple[Step, RankMesh]:
    """The steps of `scrimp.training.step`, without its guards and logs, and the ranks as they are laid out."""
    sharing = math.prod(int(layout.get(axis, 1)) for axis in NO_PEER)
    settings = {
        "device": "cpu",
        "data.tokenizer": "bytes",
        "model.preset": size,
        "model.vocab_size": VOCABULARY,
        "train.sequence": SEQUENCE,
        "train.batch_tokens": SEQUENCE * ROWS * MICRO_BATCHES * (world.size // sharing),
        "train.micro_batch": ROWS,
        "memory.activations": "keep",
        **{f"layout.{key}": value for key, value in layout.items()},
    }
    if world.size > 1 and not {"dp", "fsdp"} & layout.keys():
        settings["layout.fsdp"] = world.size // sharing  # a search would choose by the machine
    decisions = decide(replace_values(Config(), settings), world=world)
    config = decisions.config
    mesh = RankMesh(config.layout, world)
    executable = realise(
        decisions.plan,
        decisions.architecture,
        lambda model: initialise(model, 0),
        device=torch.device("cpu"),
        parameters="fp32",
        compute="fp32",
        loss_chunk=config.train.loss_chunk,
        mesh=mesh,
    )
    optimizer = build(config.optimizer, executable, seed=0)

    def step(of_step: list[Batch]) -> float:
        targets = sum(mesh.gathered_rows(sum(batch.num_targets for batch in of_step)))
        total = run_passes(executable, of_step, targets)
        executable.add_up_copies(optimizer.gradients)
        norm = optimizer.gradient_norm()
        loss: float = sum(mesh.gathered(float(total.loss))) / targets
        optimizer.clip(norm, CLIP)
        optimizer.step(LR)
        optimizer.zero_grad()
        return loss

    return step, mesh


def peer(layout: dict[str, Any], world: World, size: str, folder: Path) -> Step:
    """The transformers model in PyTorch's own layout."""
    model = transformers_model(size, folder / f"peer-{world.rank}")
    wrapped: Any = model
    if world.size > 1 and layout.get("fsdp") == 1:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif world.size > 1:
        copies = int(layout.get("dp", 1))
        mesh = init_device_mesh("cpu", (copies, world.size // copies), mesh_dim_names=("dp", "fsdp"))
        over = mesh if copies > 1 else mesh["fsdp"]
        for layer in model.model.layers:
            fully_shard(
                layer, mesh=over, reshard_after_forward=layout["zero"] == 3 if "zero" in layout else True
            )
        fully_shard(model, mesh=over)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)

    def step(of_step: list[Batch]) -> float:
        total = torch.zeros(())
        for number, batch in enumerate(of_step, start=1):
            is_last = number == len(of_step)
            if isinstance(wrapped, nn.parallel.DistributedDataParallel):
                wrapped.require_backward_grad_sync = is_last
            elif layout.get("zero") == 1:
                wrapped.set_requires_gradient_sync(is_last)
            logits = wrapped(input_ids=batch.tokens_BT, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch.targets_BT.flatten())
            (loss / len(of_step)).backward()  # ranks are averaged: all have as many targets
            total += loss.detach() / len(of_step)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if world.size > 1:
            dist.all_reduce(total)
        return float(total) / world.size

    return step


def transformers_model(size: str, folder: Path) -> Any:
    """With the first weights of ours, through an exported folder."""
    from transformers import AutoModelForCausalLM

    architecture = replace(preset(size), vocab_size=VOCABULARY)
    model = build_model(architecture)
    initialise(model, 0)
    export_model(model, architecture, folder)
    found = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    return found.train()


def cells(row: Row) -> list[str]:
    """One row as text."""

    def both(one: float, other: float | None, form: str) -> str:
        return f"{one:{form}} / {'-' if other is None else format(other, form)}"

    ratio = "-"
    if row.ratio is not None and row.ratio_spread is not None:
        ratio = f"{row.ratio:.2f} ({row.ratio_spread[0]:.2f} to {row.ratio_spread[1]:.2f})"
    mib = 2**20
    return [
        row.layout,
        str(row.ranks),
        f"{row.tokens:,}",
        f"{row.ours_tokens_per_s:,.0f}",
        "-" if row.peer_tokens_per_s is None else f"{row.peer_tokens_per_s:,.0f}",
        ratio,
        both(row.ours_sent / mib, None if row.peer_sent is None else row.peer_sent / mib, ".1f") + " MiB",
        both(row.ours_wait, row.peer_wait, ".0%"),
        "-" if row.largest_loss_difference is None else f"{row.largest_loss_difference:.1e}",
    ]


def page(rows: list[Row], about: dict[str, Any]) -> str:
    """For the repository."""
    lines = ["# Layouts on ranks of one machine: Scrimp against plain PyTorch", ""]
    lines += [
        "All figures measured; how, and what the peer is: the docstring of `benchmarks/layouts.py`.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    return "\n".join([*lines, "", *markdown_table(COLUMNS, map(cells, rows))]) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="llama-8m", help="a preset")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), help="names")
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each side")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them, dropped")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
