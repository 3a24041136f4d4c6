"""Tiny models in training, and batches that they can learn: shared by the tests of statistics. One thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from losses import next_token_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scrimp.config.architecture import Architecture
from scrimp.gemm import LinearPrecision, PlannedModel, swap_in
from scrimp.gemm.layer import reference_only
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.optim.foreign import TorchOptimizer
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.statistics import Subject, collect

VOCABULARY = 64
TOKENS = 48
Batch = list[tuple[Tensor, Tensor]]
"""Micro-batches: tokens and targets, both [rows, TOKENS]."""


@functools.cache
def batch(number: int, *, micro_batches: int = 2, rows: int = 2) -> Batch:
    """A Markov chain of few likely steps whose second half repeats the first: there is something to attend to."""
    chain = torch.Generator().manual_seed(99)
    likely = torch.randint(0, VOCABULARY, (VOCABULARY, 3), generator=chain)
    generator = torch.Generator().manual_seed(1000 + number)
    found = []
    for _ in range(micro_batches):
        tokens = torch.zeros(rows, TOKENS + 1, dtype=torch.int64)
        tokens[:, 0] = torch.randint(0, VOCABULARY, (rows,), generator=generator)
        for t in range(1, TOKENS // 2):
            pick = torch.randint(0, 3, (rows,), generator=generator)
            tokens[:, t] = likely[tokens[:, t - 1], pick]
        tokens[:, TOKENS // 2 :] = tokens[:, : TOKENS + 1 - TOKENS // 2]
        found.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return found


def decoder(layers: int = 2, width: int = 32, **switches: Any) -> Model:
    """Scrimp's own decoder, initialised."""
    sizes: dict[str, Any] = {"num_layers": layers, "width": width, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_size": width // 4, "ffn_width": 2 * width, "context": TOKENS, "family": "llama"}
    model = build_model(Architecture(vocab_size=VOCABULARY, **sizes | switches))
    initialise(model, 0)
    return model


class MlpBlock(nn.Module):
    """Pre-norm, with what may stand in a branch."""

    def __init__(
        self, width: int, *, bias: bool, dropout: float, inner_dropout: float, batch_norm: bool
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=bias)
        self.middle = nn.BatchNorm1d(2 * width) if batch_norm else nn.Identity()
        self.down = nn.Linear(2 * width, width, bias=bias)
        self.dropout, self.inner_dropout = nn.Dropout(dropout), nn.Dropout(inner_dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        hidden = self.middle(hidden.flatten(0, 1)).view_as(hidden)
        return x + self.dropout(self.down(self.inner_dropout(F.gelu(hidden))))


class MlpModel(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(
        self,
        blocks: int = 2,
        width: int = 24,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
        batch_norm: bool = False,
        tied: bool = False,
        checkpointed: bool = False,
        reentrant: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed, self.reentrant = checkpointed, reentrant
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, width)
            drops = {"dropout": dropout, "inner_dropout": inner_dropout}
            self.blocks = nn.ModuleList(
                MlpBlock(width, bias=bias, batch_norm=batch_norm, **drops) for _ in range(blocks)
            )
            self.final_norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.checkpointed else block(x)
        return self.head(self.final_norm(x))


def losses(model: nn.Module, micro_batches: Batch, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """Shares of the mean loss, of any model here; under autocast to `dtype` if one is given."""
    targets = sum(t.numel() for _, t in micro_batches)
    for tokens, goal in micro_batches:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            if isinstance(model, Model):
                total = next_token_loss(model, tokens, goal).total
            else:
                output = model(tokens)
                logits = output if isinstance(output, Tensor) else output.logits
                total = F.cross_entropy(logits.float().flatten(0, 1), goal.flatten(), reduction="sum")
        yield total / targets


def linear_names(model: nn.Module, but: Sequence[str] = ("head", "lm_head", "embed_out")) -> list[str]:
    """Linear layers without the head."""
    named = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in named if name not in but]


@dataclass
class Bench:
    """A model with its optimizer and plan."""

    model: nn.Module
    optimizer: Any
    planned: PlannedModel
    compute: str = "fp32"
    max_norm: float = 1.0
    view: Any = field(init=False)

    def __post_init__(self) -> None:
        self.view = TorchOptimizer(self.optimizer, self.model, max_norm=self.max_norm)

    def losses(self, micro_batches: Batch) -> Iterator[Tensor]:
        """In the compute type."""
        return losses(self.model, micro_batches, torch.bfloat16 if self.compute == "bf16" else None)

    def subject(self, make_losses: Callable[[Any], Iterator[Tensor]] | None = None) -> Subject:
        """As `collect` takes it."""
        return Subject(self.model, self.planned, self.view, make_losses or self.losses, self.compute)

    def gradients(self, number: int) -> dict[str, Tensor]:
        """The gradients of one batch, as the model is now; nothing stays behind."""
        for loss in self.losses(batch(number)):
            loss.backward()
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.view.zero_grad()
        return found

    def train(self, steps: int, first: int = 0) -> list[float]:
        """Losses by step."""
        found = []
        for number in range(first, first + steps):
            total = 0.0
            for loss in self.losses(batch(number)):
                loss.backward()
                total += float(loss.detach())
            if self.max_norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(total)
        return found

    def collect(
        self, number: int = 500, formats: Sequence[str] = ("bf16", "fp8", "fp4"), **how: Any
    ) -> PrecisionProfile:
        """Statistics of one batch."""
        return collect(self.subject(), [batch(number)], formats, **how)


def bench(
    model: nn.Module,
    *,
    layers: Sequence[str] | None = None,
    steps: int = 0,
    compute: str = "fp32",
    lr: float = 3e-3,
    max_norm: float = 1.0,
    make: Callable[..., Any] = torch.optim.AdamW,
) -> Bench:
    """A model under plan, trained for some steps; by the reference back end."""
    optimizer = make(model.parameters(), lr=lr)
    names = linear_names(model) if layers is None else layers
    planned = swap_in(model, dict.fromkeys(names, LinearPrecision.of(compute)), choose=reference_only)
    made = Bench(model, optimizer, planned, compute, max_norm)
    model.train()
    made.train(steps)
    return made


@functools.cache
def trained_state(steps: int, layers: int, width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The decoder after some steps: its own state and its optimizer's."""
    made = bench(decoder(layers, width), steps=steps)
    return made.model.state_dict(), made.optimizer.state_dict()


def trained_decoder(*, steps: int = 60, layers: int = 2, width: int = 32, compute: str = "fp32") -> Bench:
    """A decoder that has learned something, the same one each time and never shared."""
    weights, moments = trained_state(steps, layers, width)
    made = bench(decoder(layers, width), compute=compute)
    made.model.load_state_dict({name: value.clone() for name, value in weights.items()})
    made.optimizer.load_state_dict(moments)
    return made


def spearman(first: Any, second: Any) -> float:
    """Rank correlation."""
    ranks = [np.argsort(np.argsort(np.ravel(values))) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])
