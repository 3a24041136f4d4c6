"""Names of what a block does with its activations between forward and backward pass.

Each level makes more of them again in the backward pass, and keeps less::

    keep       everything that backward reads
    swiglu     not the SwiGLU product, the input of mlp.down
    norms      nor the normed inputs of qkv and gate_up
    mlp        nor gate and up: the whole MLP is run again from the residual stream before it
    qkv        nor q, k, v; of attention its output and softmax sums are kept, so that it does not run again
    attention  nor those: the residual streams before attention and before the MLP are all that is kept
    block      only the block's input is kept

With ``+offload`` what a level still keeps waits in host memory: ``keep+offload`` moves instead of recomputing,
``block+offload`` leaves nothing of a block on the device.

Source  LLMQ's recompute levels and ProTrain's block modes; docs/memory.md
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.config.schema import MemoryConfig
from scrimp.errors import ConfigError, PlanError

LEVELS = ("keep", "swiglu", "norms", "mlp", "qkv", "attention", "block")
GATED, HEADS = "swiglu", "qkv"
"""The levels that are also parts of a block's activations (`scrimp.planner.layout.block_activations`): gates times up;
queries, keys and values."""
OFFLOAD = "+offload"
KEY = "memory.activations"


@dataclass(frozen=True)
class Activations:
    """What one block does with its activations."""

    level: str = "keep"
    is_offloaded: bool = False
    ends_region: bool = False
    """A compiled graph makes the whole block again but for its result, so that its last product need keep nothing. No
    name says so: a block does, while it runs."""

    @classmethod
    def parse(cls, text: str) -> Activations:
        """From its name in a plan.

        Raises:
            PlanError: no such level.
        """
        level = text.removesuffix(OFFLOAD)
        if level not in LEVELS:
            raise PlanError(
                "there is no such choice for a block's activations",
                got=repr(text),
                expected=", ".join(LEVELS) + f", each also with {OFFLOAD}",
            )
        return cls(level, text.endswith(OFFLOAD))

    def __str__(self) -> str:
        """Its name in a plan."""
        return self.level + (OFFLOAD if self.is_offloaded else "")

    def recomputes(self, level: str) -> bool:
        """Whether it makes again what `level` does."""
        return LEVELS.index(self.level) >= LEVELS.index(level)


ALL_ACTIVATIONS = tuple(str(Activations(level, offload)) for offload in (False, True) for level in LEVELS)


def assign_activations(text: str, num_blocks: int) -> list[Activations]:
    """What each block does by a setting: a choice for all blocks, then for some: ``norms,0-11=block,12=qkv+offload``.

    Raises:
        ConfigError: no such choice, blocks that are no numbers, or that the model does not have.
    """
    first, *rules = (part.strip() for part in text.split(","))
    assigned = [_chosen(first)] * num_blocks
    for rule in rules:
        blocks, equals, choice = (part.strip() for part in rule.partition("="))
        start, dash, stop = blocks.partition("-")
        numbers = [start, stop] if dash else [start]
        if not equals or not all(number.isascii() and number.isdecimal() for number in numbers):
            raise ConfigError(
                f"{KEY}: a rule that cannot be read",
                got=repr(rule),
                expected="blocks and their choice, such as 0-11=block",
            )
        low, high = int(numbers[0]), int(numbers[-1])
        if not low <= high < num_blocks:
            raise ConfigError(
                f"{KEY}: blocks that the model does not have",
                got=blocks,
                expected=f"0 to {num_blocks - 1}",
            )
        assigned[low : high + 1] = [_chosen(choice)] * (high - low + 1)
    return assigned


def blocks_on_host(key: str, text: str, num_blocks: int) -> int | None:
    """The number of blocks whose weights, gradients or optimizer states live on the host, as memory.weights, .gradients
    or .optimizer asks for; None: the plan decides.

    Raises:
        ConfigError: neither a place nor a number of blocks that the model has.
    """
    if text == "auto":
        return None
    known = {"device": 0, "host": num_blocks}
    if text in known:
        return known[text]
    if text.isascii() and text.isdecimal() and int(text) <= num_blocks:
        return int(text)
    raise ConfigError(
        f"memory.{key} is not one of its choices",
        got=repr(text),
        expected=f"auto, device, host, or a number of blocks, 0 to {num_blocks}",
    )


def check_memory(memory: MemoryConfig, num_blocks: int) -> None:
    """Refuse settings of `memory.*` that a model does not have, or that contradict each other.

    Raises:
        ConfigError: by name.
    """
    if memory.activations != "auto":
        assign_activations(memory.activations, num_blocks)
    found = {
        key: blocks_on_host(key, getattr(memory, key), num_blocks)
        for key in ("weights", "gradients", "optimizer")
    }
    # Where another class is set, `auto` means device.
    is_open = all(count is None for count in found.values())
    if memory.update == "cpu" and not is_open and not found["optimizer"]:
        raise ConfigError(
            "memory.update cpu has nothing to update: optimizer states live on the device",
            got=f"memory.weights {memory.weights}, gradients {memory.gradients}, optimizer {memory.optimizer}",
            do="set --memory.optimizer host or a number of blocks, or leave memory.update out",
        )
    gradients, optimizer = found["gradients"], found["optimizer"] or 0
    if memory.update != "device" and gradients is not None and gradients < optimizer:
        raise ConfigError(
            f"memory.update {memory.update} needs the gradients of the blocks that the CPU updates on the host",
            got=f"memory.gradients {memory.gradients} beside memory.optimizer {memory.optimizer}",
            do="leave memory.gradients out: it follows memory.optimizer",
        )


def _chosen(text: str) -> Activations:
    try:
        return Activations.parse(text)
    except PlanError as error:
        raise ConfigError(
            f"{KEY}: {error.what}", got=repr(text), expected=", ".join(ALL_ACTIVATIONS)
        ) from None
