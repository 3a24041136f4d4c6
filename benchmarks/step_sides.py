"""The sides that `step.py` compares: the same weights, batches, clipping and optimizer, each with its own model.

ours                    Scrimp's decoder and loss, as `scrimp train` has them
ours compiled           the same, compiled by block as it trains with `train.compile`
ours by operators       the same without kernels of Numba's: by torch's operators
transformers            `AutoModelForCausalLM` with attn_implementation="sdpa" and no cache, cross-entropy over float32
                        logits
transformers compiled   the same, compiled as a whole
plain decoder           `plain_decoder.py`, with the same loss
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from plain_decoder import plain_decoder
from torch import Tensor, nn

from scrimp.config.architecture import Architecture
from scrimp.cpu import operators_alone
from scrimp.data import Batch
from scrimp.models.huggingface.export import export_model
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.objectives.next_token import NEXT_TOKEN

OURS, PEER = "ours", "transformers"
COMPILED = " compiled"
NAMES = (OURS, OURS + COMPILED, "ours by operators", PEER, PEER + COMPILED, "plain decoder")


@dataclass
class Side:
    """One of the competitors."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor], tuple[float, float]]
    """From tokens [rows, sequence + 1] to the loss and the norm of its gradients."""


@dataclass(frozen=True)
class Maker:
    """What all sides share."""

    architecture: Architecture
    precision: str
    chunk: int
    """Tokens of a chunk of our loss."""
    sequence: int
    device: str

    def side(self, name: str) -> Side:
        """A side with the first weights of seed 0."""
        model = build_model(self.architecture)
        initialise(model, 0)
        if name.startswith(OURS):
            return self._ours(name, model.to(self.device))
        if name.startswith(PEER):
            peer: nn.Module = transformers_model(model, self.architecture)
        else:
            peer = plain_decoder(self.architecture, dict(model.named_parameters()), self.sequence)
        return self._peer(name, peer.to(self.device))

    def _ours(self, name: str, model: Model) -> Side:
        if name.endswith(COMPILED):
            for block in model.blocks:
                block.compile()
        around = operators_alone if name == "ours by operators" else nullcontext

        def loss(tokens: Tensor) -> Tensor:
            with self._autocast():
                batch = Batch.of(tokens[:, :-1], tokens[:, 1:])
                sums = NEXT_TOKEN.loss(model, batch, chunk=self.chunk)
            return sums.total / tokens[:, 1:].numel()

        return _side(name, model, loss, around)

    def _peer(self, name: str, peer: nn.Module) -> Side:
        called: Any = torch.compile(peer) if name.endswith(COMPILED) else peer

        def loss(tokens: Tensor) -> Tensor:
            with self._autocast():
                if name.startswith(PEER):
                    logits = called(input_ids=tokens[:, :-1], use_cache=False).logits
                else:
                    logits = called(tokens[:, :-1])
            return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

        return _side(name, peer, loss, nullcontext)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.precision == "bf16":
            return torch.autocast(self.device, torch.bfloat16)
        return nullcontext()


def transformers_model(model: Model, architecture: Architecture) -> nn.Module:
    """The transformers model with our weights, through an exported folder."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        export_model(model, architecture, Path(folder) / "model")
        peer: nn.Module = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", attn_implementation="sdpa", dtype=torch.float32
        )
    return peer.train()


def _side(
    name: str,
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    around: Callable[[], AbstractContextManager[object]],
) -> Side:
    """A competitor with its optimizer: everything but the loss is the same for all."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(tokens: Tensor) -> tuple[float, float]:
        with around():
            loss = loss_of(tokens)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.item(), norm.item()

    return Side(name, model, optimizer, step)
