"""An optimizer as the statistics see it: gradients, clipping, and a rule for each parameter's next update.

Problem  SNIP asks how far noise in a gradient moves the next update of a weight. That depends on the optimizer.
Method   For each parameter an optimizer gives an `UpdateRule`, a snapshot h of what its next step makes of a gradient::

             update = -lr (h(g) + decay)         noise n in the gradient moves it by lr (h(g + n) - h(g))

         The statistics evaluate h at as many gradients as they like; the optimizer's own state is untouched.
Rules    `scrimp.optim.update_rules`: AdamW and Adam, SGD, Muon, GaLore and Fira; an optimizer may bring its own.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class UpdateRule(Protocol):
    """What one parameter's next update is made of."""

    @property
    def lr(self) -> float:
        """Learning rate, relative to those of the other parameters."""
        ...

    @property
    def is_linear(self) -> bool:
        """Whether h(g) is g itself but for what does not depend on g, so that every sensitivity is 1."""
        ...

    def direction(self, gradient: Tensor) -> Tensor:
        """h(g): the update without learning rate and decoupled decay, in the gradient's shape."""
        ...

    def here(self) -> UpdateRule:
        """The same rule for the shard of the parameter that lies on this rank.

        Raises:
            PlanError: a shard's update needs the other shards.
        """
        ...


class OptimizerView(Protocol):
    """An optimizer as the statistics need it."""

    @property
    def name(self) -> str:
        """Name of the update rule."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Parameter name to accumulated gradient, as the optimizer will read it before clipping."""
        ...

    def rule(self, name: str) -> UpdateRule | None:
        """How a parameter is updated; None if it is not trained."""
        ...

    def clip_factor(self, norm: float) -> float:
        """What a gradient of this global norm is multiplied by before the step."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...
