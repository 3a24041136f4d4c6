"""Train a decoder of your own: attention and MLP side by side, as in GPT-J and PaLM.

    scrimp train --model.kind examples/own_model.py:Parallel --trust-code

A block adds both to the same residual stream, instead of one after the other::

    x = x + attention(norm(x)) + mlp(norm(x))

The specification is Llama's: the same layers, FLOPs and sizes, by a preset. What differs is how a block runs, which
trace, planner and statistics find out from the block itself. A kind with other layers says so in `block`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp.models.blocks import KEEP, Attend, Attention, Block, Mlp, Place
from scrimp.models.kinds.llama import Llama

if TYPE_CHECKING:
    from torch import Tensor

    from scrimp.config.activations import Activations


class ParallelBlock(Block):
    """Attention and MLP of the same input."""

    def add(self, x_BTD: Tensor, attend: Attend, activations: Activations = KEEP) -> Tensor:
        """The residual stream after this block."""
        attended = self.attention(x_BTD, self.attention_norm, attend, activations)
        return x_BTD + attended + self.mlp(x_BTD, self.mlp_norm, activations)


class Parallel(Llama):
    """A decoder of such blocks."""

    def build_block(self, index: int, place: Place) -> Block:
        """One block, its parameters uninitialised."""
        a, attends = self.architecture, self.block(index).attention
        return ParallelBlock(
            attends,
            Attention(attends, a.width, place),
            Mlp(a.width, a.ffn_width, place),
            attention_norm=self.build_norm(place),
            mlp_norm=self.build_norm(place),
        )
