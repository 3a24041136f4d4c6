"""A small pre-norm model, its loss and its data, for tests of the library door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY = 16, 32


class Block(nn.Module):
    """Pre-norm MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


LAYERS = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(seed: int) -> Tensor:
    """Sequences in which every token decides the next one."""
    tokens = [torch.randint(VOCABULARY, (4,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(8):
        tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
    return torch.stack(tokens, dim=1)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def loss_in_bf16(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, tokens)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: range, of: Callable[..., Tensor] = loss) -> list[float]:
    losses = []
    for step in steps:
        value = of(model, batch(100 + step))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def trained(seed: int = 0, **options: Any) -> tuple[Net, torch.optim.AdamW]:
    model = net(seed, **options)
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    return model, optimizer


def is_plain(model: nn.Module) -> bool:
    """No planned layer, and no hook left behind."""
    return not any(
        hasattr(module, "planned") or module._forward_hooks or module._forward_pre_hooks
        for module in model.modules()
    )
