"""What one block, the head and the optimizer step cost in bytes and seconds: the planner's input.

All bytes are of one device and one micro-batch. A block's figures are differences: a trace of a chain of two equal
blocks gives them (`scrimp.profiler.memory_trace`), `scrimp.planner.memory.states` adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scrimp.errors import PlanError

Origin = Literal["measured", "predicted"]
"""Where seconds come from: timed on this device, or predicted from the work."""


@dataclass(frozen=True)
class LevelSeconds:
    """Seconds of one block's passes over one micro-batch, at one level of recomputation."""

    forward: float
    backward: float
    """Without what is made again."""
    again: float
    """What the level makes again in backward."""


@dataclass(frozen=True)
class BlockCost:
    """One block under one choice for its activations (`scrimp.config.activations`)."""

    kept: int
    """Live on the device after its forward pass that was not before it, its output included."""
    forward_peak: int
    """Most above what was live before its forward pass."""
    backward_peak: int
    """Most during its backward pass above what was live before its forward pass, without the gradient of its
    output (one boundary), gradients of its weights included."""
    accumulating_peak: int | None = None
    """The same where gradients exist already: new ones are added and freed. None: as `backward_peak`, an upper
    bound."""
    cast: int = 0
    """Live besides from its forward pass until the loss is over: copies of weights in the compute format that
    autocast keeps, though the block's backward pass makes them again."""
    host: int = 0
    """Waits in host memory between the passes."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """With what is made again."""

    def peak_of_backward(self, accumulates: bool) -> int:
        """The peak of the backward pass, with gradients new or existing."""
        if accumulates and self.accumulating_peak is not None:
            return self.accumulating_peak
        return self.backward_peak


@dataclass(frozen=True)
class BlockClass:
    """Blocks that cost the same: equal shapes and number formats."""

    weights: int
    gradients: int
    optimizer: int
    """Bytes of the block's states: moments, master weights."""
    choices: Mapping[str, BlockCost]
    """Name of the activations' choice to cost."""
    frozen: int = 0
    """The part of the weights that is not trained: it has no gradients and is in no checkpoint."""
    parameters: int = 0
    """Numbers of the weights that are trained, for the CPU's Adam; 0: what gradients in bf16 say."""
    routed: int = 0
    """Those of them that are routed experts'."""
    update_peak: int = 0
    """Temporary memory of its update."""
    norm_peak: int = 0
    """Temporary memory of the norm of one of its gradients."""
    norms: int = 0
    """Bytes of the norms themselves, which stay on the device where the gradients leave."""

    @property
    def trained(self) -> int:
        """Bytes of the weights that are trained."""
        return self.weights - self.frozen


@dataclass(frozen=True)
class EndsCost:
    """The embedding, final norm, head and loss: what is no block."""

    weights: int
    gradients: int
    optimizer: int
    head_peak: int
    """Most during head, loss and their backward pass above what was live after the last block, gradients of head and
    final norm included."""
    head_gradients: int
    """The part of the gradients above that exists once the head's backward pass is over."""
    embedding_peak: int
    """Most during the embedding's backward pass above what was live before it, without the boundary's gradient."""
    waiting: int = 0
    """The part of the head's gradients that waits for a second gradient of the same weight (tied embeddings); it is new
    even where gradients accumulate."""
    accumulating_head_peak: int | None = None
    """`head_peak` where gradients exist already; None: the same."""
    accumulating_embedding_peak: int | None = None
    """`embedding_peak` where gradients exist already; None: the same."""
    seconds: float = 0.0
    """Forward and backward of all of it."""
    frozen: int = 0
    """The part of the weights that is not trained."""

    @property
    def trained(self) -> int:
        """Bytes of the weights that are trained."""
        return self.weights - self.frozen

    def peak_of_head(self, accumulates: bool) -> int:
        """The peak of head and loss, with gradients new or existing."""
        if accumulates and self.accumulating_head_peak is not None:
            return self.accumulating_head_peak
        return self.head_peak

    def peak_of_embedding(self, accumulates: bool) -> int:
        """The peak of the embedding's backward pass, with gradients new or existing."""
        if accumulates and self.accumulating_embedding_peak is not None:
            return self.accumulating_embedding_peak
        return self.embedding_peak


@dataclass(frozen=True)
class StepCosts:
    """A whole step of one model on one device."""

    classes: tuple[BlockClass, ...]
    blocks: tuple[int, ...]
    """Class of each block, first to last."""
    ends: EndsCost
    boundary: int
    """The residual stream between two blocks."""
    optimizer_peak: int = 0
    """Temporary memory of the update of what lives on the device."""
    norm_peak: int = 0
    """Temporary memory of the gradients' norm, which is over before the update."""
    resident: int = 0
    """Whatever else stays on the device: tokens, RoPE tables, copies of weights in other formats."""
    tables: int = 0
    """The part of `resident` that ends with the backward pass: RoPE tables, a mask."""
    is_shared: bool = False
    """Whether these are the costs of one of several ranks: its parts of states, and seconds without communication."""
    operands: int = 0
    """Bytes of all weights as operands, which products may keep over the micro-batches of a step
    (`scrimp.gemm.weight_operands`)."""
    seconds_origin: Origin | None = None
    """Where the seconds of blocks come from; None: nobody asked for them."""

    @property
    def checkpoint_copy(self) -> int:
        """Bytes of what a checkpoint holds: weights that are trained, masters, moments, wherever they live. As many on
        the host, in a copy, while one is written beside the training."""
        parts: list[BlockClass | EndsCost] = [self.ends, *(self.classes[number] for number in self.blocks)]
        return sum(part.trained + part.optimizer for part in parts)


def chosen_costs(costs: StepCosts, choices: Sequence[str]) -> list[BlockCost]:
    """What each block costs under its choice.

    Args:
        choices: activations by block, names of `BlockClass.choices`.

    Raises:
        PlanError: not one choice per block, or a choice without costs.
    """
    if len(choices) != len(costs.blocks):
        raise PlanError(
            "a step has one choice per block", got=f"{len(choices)} choices", expected=str(len(costs.blocks))
        )
    found = []
    for index, (number, choice) in enumerate(zip(costs.blocks, choices, strict=True)):
        known = costs.classes[number].choices
        if choice not in known:
            raise PlanError(
                f"no costs were traced for the activations of block {index}",
                got=repr(choice),
                expected=", ".join(known),
            )
        found.append(known[choice])
    return found
