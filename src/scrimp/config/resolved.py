"""Settings of which none is open: what `resolve` gives, and all that comes after it reads.

The sections are those of `scrimp.config.schema`, with narrower types where a setting may be left to Scrimp. So nobody
who reads a resolved configuration has to ask whether a value is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scrimp.config.schema import (
    CheckpointConfig,
    Config,
    EvaluationConfig,
    LayoutConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from scrimp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ResolvedTrain(TrainConfig):
    """Steps and batches, all sizes known."""

    sequence: int
    batch_tokens: int
    micro_batch: int
    loss_chunk: int

    @property
    def sequences_per_step(self) -> int:
        """Sequences of a batch."""
        return self.batch_tokens // self.sequence

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a forward pass."""
        return self.micro_batch * self.sequence


@dataclass(frozen=True, kw_only=True)
class ResolvedOptimizer(OptimizerConfig):
    """The optimizer."""

    lr: float
    embedding_lr_ratio: float
    master_weights: bool


@dataclass(frozen=True, kw_only=True)
class ResolvedSchedule(ScheduleConfig):
    """The learning rate over the run."""

    warmup_steps: int


@dataclass(frozen=True, kw_only=True)
class ResolvedEvaluation(EvaluationConfig):
    """When is evaluated, and on how much."""

    every: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ResolvedCheckpoint(CheckpointConfig):
    """When checkpoints are written."""

    every: int


@dataclass(frozen=True, kw_only=True)
class ResolvedLayout(LayoutConfig):
    """How the run is laid over its ranks."""

    dp: int
    fsdp: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.pp * self.dp * self.fsdp * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Ranks over which FSDP2 cuts the weights of a copy, or of its pieces."""
        return self.fsdp * self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of them, that read rows of their own."""
        return self.dp * self.fsdp


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """One training run, decided."""

    train: ResolvedTrain
    optimizer: ResolvedOptimizer
    schedule: ResolvedSchedule
    evaluation: ResolvedEvaluation
    checkpoint: ResolvedCheckpoint
    layout: ResolvedLayout

    @property
    def rank_sequences(self) -> int:
        """Sequences of a batch that one rank reads."""
        return self.train.sequences_per_step // self.layout.data_ranks

    @property
    def micro_batches(self) -> int:
        """Forward passes of a rank in one step."""
        return -(-self.rank_sequences // self.train.micro_batch)


SECTIONS: dict[str, type[Any]] = {
    "train": ResolvedTrain,
    "optimizer": ResolvedOptimizer,
    "schedule": ResolvedSchedule,
    "evaluation": ResolvedEvaluation,
    "checkpoint": ResolvedCheckpoint,
    "layout": ResolvedLayout,
}


def closed(config: Config) -> ResolvedConfig:
    """A configuration whose choices are all made, as the type that says so.

    Raises:
        ConfigError: a choice is open, as in a damaged file of a run.
    """
    sections: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        values = vars(getattr(config, name))
        for key in kind.__annotations__:
            if values[key] is None:
                raise ConfigError(
                    f"{name}.{key} is open in a configuration that should be decided",
                    expected="a value",
                    do="use the config.toml that the run has written",
                )
        sections[name] = kind(**values)
    return ResolvedConfig(**{**vars(config), **sections})
