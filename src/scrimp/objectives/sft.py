"""Supervised fine-tuning: next-token prediction of what the assistant wrote, in whole conversations.

The loss is that of next-token prediction; a batch has targets at the assistant's tokens alone (`scrimp.data.packing`),
and the sum is divided by all of them in the whole batch. So a token counts the same in a long answer and in a short
one, and however the batch is cut into micro-batches.
Checked  tests/training/test_sft.py
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.objectives.base import Reads
from scrimp.objectives.next_token import NextToken


@dataclass(frozen=True)
class SupervisedFineTuning(NextToken):
    """Each position predicts its target, where the assistant wrote that."""

    @property
    def reads(self) -> Reads:
        """Conversations."""
        return "conversations"
