"""What the user decides of memory, as a search over layouts has it.

Method   `memory.activations` decides what every block does: then no block is solved, and each layout and micro-batch is
         predicted with these blocks. `memory.optimizer`, `gradients` and `weights` say which states live in host
         memory; where none of them is given, the first of `questions.ON_HOST` with which the layout fits is taken.
Limits   Levels between that no program but Scrimp has (swiglu, mlp, qkv, attention), and a number of blocks whose
         states leave, are not predicted for other hardware.
Checked  tests/planner/layout/test_given_memory.py: each setting predicted alone
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.config.activations import OFFLOAD, assign_activations
from scrimp.config.schema import MemoryConfig
from scrimp.errors import ConfigError
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Offload

LEVELS = {"keep": NONE, "norms": SELECTIVE, "block": FULL}
AUTO, DEVICE, HOST = "auto", "device", "host"


@dataclass(frozen=True)
class GivenMemory:
    """What is not searched."""

    activations: str | None = None
    """As `memory.activations`; None: the search decides."""
    offload: Offload | None = None
    """Which states live on the host; None: the search decides."""

    @property
    def sends_activations(self) -> bool:
        """Whether activations of some blocks are to wait in host memory."""
        return self.activations is not None and OFFLOAD in self.activations

    def blocks(self, count: int) -> tuple[BlockPlan, ...]:
        """What each of so many blocks does; none where that is searched.

        Raises:
            ConfigError: blocks that the model does not have, or a level that is not predicted.
        """
        if self.activations is None:
            return ()
        found = []
        for one in assign_activations(self.activations, count):
            if one.level not in LEVELS or (one.is_offloaded and one.level != "keep"):
                raise ConfigError(
                    "a search on other hardware does not know what blocks would do",
                    got=f"memory.activations {one}",
                    expected=f"{', '.join(LEVELS)}, keep+offload; auto: the search decides",
                )
            found.append(BlockPlan(recompute=LEVELS[one.level], offload=one.is_offloaded))
        return tuple(found)


def given_memory(memory: MemoryConfig) -> GivenMemory:
    """What a configuration gives.

    Raises:
        ConfigError: states of which a part alone leaves.
    """
    states = {name: getattr(memory, name) for name in ("optimizer", "gradients", "weights")}
    for name, value in states.items():
        if value not in (AUTO, DEVICE, HOST):
            raise ConfigError(
                "a search on other hardware moves all blocks' states or none",
                got=f"memory.{name} {value}",
                expected=f"{AUTO}, {DEVICE} or {HOST}",
            )
    away = {name: value == HOST for name, value in states.items()}
    is_given = any(value != AUTO for value in states.values())
    offload = Offload(**away, master=away["optimizer"]) if is_given else None
    return GivenMemory(None if memory.activations == AUTO else memory.activations, offload)
