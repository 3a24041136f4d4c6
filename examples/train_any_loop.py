"""Scrimp in a training loop of your own: measure, plan, apply, and again while the run goes on.

The loop is plain PyTorch and stays yours: a small decoder on the bytes of your Python's own source text, AdamW, bf16.
Scrimp needs four lines of it. A CPU is enough and emulates the formats; no network, about half a minute.

    python examples/train_any_loop.py
"""

from __future__ import annotations

import argparse
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import scrimp
from scrimp.report.precision_text import precision_map_text

CONTEXT, BATCH, WIDTH, HEADS, BLOCKS = 64, 8, 128, 4, 4
FIRST_PLAN, NEXT_PLAN = 30, 60
"""Steps; the second plan is made from statistics of a model that runs by the first."""


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, _ = x_BTD.shape
        qkv = self.qkv(self.norm_1(x_BTD)).view(batch, tokens, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(x_BTD.shape))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT) + self.places.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def loss(model: nn.Module, windows_BT: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(windows_BT[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows_BT[:, 1:].flatten())


def batches(seed: int) -> Iterator[Tensor]:
    """Random windows of the standard library's source, without end."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((library / name).read_bytes() for name in ("argparse.py", "typing.py", "inspect.py"))
    data, generator = torch.tensor(list(text)), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1), generator=generator)
        yield data[starts + torch.arange(CONTEXT + 1)]


def main() -> None:
    """Train, with two plans on the way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--fp4", type=float, default=0.75, help="share of the linear FLOPs in 4 bits")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, data, console = Decoder(), batches(0), Console()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    recent: deque[Tensor] = deque(maxlen=4)
    plan = None
    for step in range(options.steps):
        if step in (FIRST_PLAN, NEXT_PLAN):
            profile = scrimp.measure(model, optimizer, recent, loss, max_norm=1.0)
            plan = scrimp.plan(profile, options.fp4, current=plan)
            scrimp.apply(model, plan)
            shares = {name: layer.flops_share for name, layer in plan.layers.items()}
            console.print(precision_map_text(plan.precisions, shares, title=f"step {step}: {plan.reason}"))
        recent.append(next(data))
        value = loss(model, recent[-1])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"step {step + 1:4d}  loss {value.item():.3f}")


if __name__ == "__main__":
    main()
