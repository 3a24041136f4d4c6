"""How a run's weights move: what the trainer, checkpoints, statistics and the account ask of every optimizer.

An optimizer is a module with two functions, named in one line of `scrimp.config.optimizers`::

    build(executable, settings, *, seed) -> Optimizer
    memory(architecture, settings, parameters, *, ranks) -> OptimizerMemory

`scrimp.optim.targets.Targets` has all of `Optimizer` but the update itself; `scrimp.optim.own` puts any
torch.optim.Optimizer behind it.

Of several ranks each updates what lies with it of every parameter. That is right where elements move alone; an
optimizer that looks at whole matrices exchanges what it needs (`scrimp.optim.shared_maps`). One from a user's file says
in its class that elements move alone::

    elementwise = True

and is refused on ranks where it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from scrimp.parts import TensorPart
from scrimp.runtime.memory.gradients import GradientSlot
from scrimp.statistics import OptimizerView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class Optimizer(OptimizerView, Protocol):
    """An optimizer as a run needs it: that of the statistics, and steps.

    A step is: forward and backward passes, `gradient_norm`, `clip` and `step`, or neither where the step is skipped,
    then `zero_grad`.
    """

    num_updates: int
    """Steps that have been taken."""
    ranks: ProcessGroup | None
    """Ranks whose gradients are of one step; None: all."""

    def slot(self, name: str) -> GradientSlot:
        """Where the sum of a parameter's gradients is found while it is on the device."""
        ...

    def gradient_norm(self) -> float:
        """Global 2-norm of the gradients; waits for the device."""
        ...

    def clip(self, norm: float, limit: float) -> None:
        """Scale the gradients, now or by the next `step`, so that their norm, `norm` now, is at most `limit` (0: no
        limit)."""
        ...

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`; the gradients stay until `zero_grad`."""
        ...

    def relative_rate(self, name: str) -> float:
        """Learning rate of a parameter as a multiple of a step's."""
        ...

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """Name and storage of what lies here of every state tensor: what a checkpoint holds, and what loading one
        writes into."""
        ...

    def state_part(self, name: str, tensor: Tensor) -> TensorPart:
        """A state of a parameter, of the shape of its target, as checkpoints hold it."""
        ...

    def targets(self) -> dict[str, Tensor]:
        """Parameter name to what is updated, of what lies here: the parameter, or its master."""
        ...

    def write_targets(self) -> None:
        """Parameters follow their targets, where those were changed from outside."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """While it is entered, between two steps, parameters are the weights to evaluate; afterwards those to train,
        bit for bit."""
        ...

    def prepare(self, num_updates: int) -> None:
        """`parts` are about to be loaded as they were after so many updates: have all of them."""
        ...

    def restore_updates(self, num_updates: int) -> None:
        """Set the count of updates, after loading `parts`."""
        ...

    def close(self) -> None:
        """Leave nothing running; the state stays readable."""
        ...
