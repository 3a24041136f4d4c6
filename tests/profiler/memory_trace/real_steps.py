"""Real training steps on the CPU, with every allocation counted by torch's own profiler."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from adapters import adapted_model
from late_link import LateLink
from losses import next_token_loss
from torch import Tensor

from scrimp.config import Architecture, OptimizerConfig
from scrimp.config.activations import Activations
from scrimp.gemm import PlannedLayer, PlannedModel, backends_for, swap_in
from scrimp.models import spec_of
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.optim import AdamW
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.precision import LinearPrecision, parse_rules
from scrimp.runtime.memory import ActivationOffload, BlockMemory, HostArena

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """One configuration of a step."""

    architecture: Architecture
    precision: str = "fp32"
    parameters: str = "fp32"
    master_weights: bool = False
    rules: str = ""
    activations: tuple[str, ...] = ()
    rows: int = 2
    sequence: int = 512
    loss_chunk: int = 0
    micro_batches: int = 1

    @property
    def linears(self) -> dict[str, LinearPrecision]:
        """Layer to formats, where any differs."""
        if not self.rules:
            return {}
        return parse_rules(self.rules).assign(spec_of(self.architecture).origins)

    @property
    def choices(self) -> list[str]:
        """Activations by block; the given ones in turn."""
        given = self.activations or ("keep",)
        return [given[i % len(given)] for i in range(self.architecture.num_layers)]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `TracedStep`."""
        return {
            "precision": self.precision,
            "parameters": self.parameters,
            "optimizer": AdamWMemory(
                self.parameters if self.architecture.adapter is None else "fp32", self.master_weights
            ),
            "micro_batch": self.rows,
            "sequence": self.sequence,
            "loss_chunk": self.loss_chunk,
            "linears": self.linears,
        }


@dataclass
class RealStep:
    """A model with its optimizer; call it to train one step as `scrimp.training.loop` does."""

    setting: Setting
    model: Model = field(init=False)
    planned: PlannedModel | None = None

    def __post_init__(self) -> None:
        s = self.setting
        self.model = build_model(s.architecture, dtype=DTYPES[s.parameters])
        if s.architecture.adapter is not None:
            self.model = adapted_model(s.architecture, dtype=DTYPES[s.parameters])
        initialise(self.model, 0)
        linears = s.linears
        if linears:
            head = linears.pop("head")
            self.planned = swap_in(self.model, linears, choose=backends_for(CPU))
            self.model.planned_head = PlannedLayer("head", head, self.planned.clock, backends_for(CPU))
        for block, choice in zip(self.model.blocks, s.choices, strict=True):
            block.activations = Activations.parse(choice)  # type: ignore[assignment]
        if any(choice.endswith("+offload") for choice in s.choices):
            self._offload()
        train = OptimizerConfig(master_weights=s.master_weights)
        self.optimizer = AdamW(self.model.trained(), train)
        shape = s.micro_batches, s.rows, s.sequence
        self.tokens = torch.arange(shape[0] * shape[1] * shape[2]).view(shape) % s.architecture.vocab_size

    def _offload(self) -> None:
        """As `scrimp.runtime.memory.carry_out`, but copies arrive as late as they may: what is in flight stays."""
        num_blocks = self.setting.architecture.num_layers
        offload = ActivationOffload(
            HostArena(2**26, CPU), LateLink(CPU), num_blocks=num_blocks, keep_last=False
        )
        leaving = (i for i, choice in enumerate(self.setting.choices) if choice.endswith("+offload"))
        self.model.run_block = BlockMemory(num_blocks, offload=offload, leaving=frozenset(leaving))

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.setting.precision == self.setting.parameters:
            return contextlib.nullcontext()
        return torch.autocast("cpu", DTYPES[self.setting.precision])

    def loss_of(self, number: int, tokens: Tensor) -> Tensor:
        """The loss of one micro-batch."""
        return next_token_loss(self.model, tokens, tokens, None, chunk=self.setting.loss_chunk).total

    def __call__(self) -> None:
        for number, tokens in enumerate(self.tokens):
            if self.planned is not None:
                self.planned.clock.begin(0, number * tokens.numel())
            with self.autocast():
                total = self.loss_of(number, tokens)
            (total / tokens.numel()).backward()
            del total  # as the loop does: the graph holds masks and tables
        self.optimizer.clip(self.optimizer.gradient_norm(), 1.0)
        self.optimizer.step(1e-3)
        self.optimizer.zero_grad()
