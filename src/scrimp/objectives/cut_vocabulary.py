"""The loss of a chunk whose logits lie on several ranks, each with the columns of its own words.

Problem  Gathering logits to take their softmax sends S V numbers, and every rank then holds all of them.
Method   A token's loss needs three numbers of its logits: their largest m, the sum Z of exp(logit - m), and its
         target's logit y, which one rank has::

             lse = m + log Z        loss = lse - y + c lse^2        d loss / logits = exp(logit - lse) (1 + 2 c lse)
                                                                                      - onehot(y)

         So two all-reduces, of the maximum and of (Z, y) together, send 3 numbers per token. The gradient of each
         column needs lse and that column alone.
Limits   Ranks must have the same tokens. Gradients of the hidden states are each rank's own words' part: whoever
         gathered the tokens adds them up.
Source   Megatron-LM, arXiv 1909.08053, section 3
Checked  tests/objectives/test_cut_vocabulary.py

Shapes: Q tokens of a chunk, V words of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from scrimp.formats.grouping import cut
from scrimp.models.functions import at_least_float32, float32_or_wider


@dataclass(frozen=True)
class CutVocabulary:
    """Which words are this rank's."""

    words: range
    group: dist.ProcessGroup

    def losses(
        self,
        logits_QV: Tensor,
        targets_Q: Tensor,
        real_Q1: Tensor,
        z_loss: float,
        training: bool,
        *,
        rows: int,
    ) -> Tensor:
        """Sums of losses and penalties over all words, shape (2,), the same on all ranks.

        Args:
            logits_QV: become their own gradient when training.
            targets_Q: among all words; any number where `real_Q1` is false.
            rows: whose softmax is computed at once.
        """
        dtype = float32_or_wider(logits_QV.dtype)
        index_Q1 = (targets_Q - self.words.start)[:, None]
        is_here_Q1 = (index_Q1 >= 0) & (index_Q1 < len(self.words))
        index_Q1 = index_Q1.masked_fill(~is_here_Q1, 0)
        max_Q1 = logits_QV.amax(1, keepdim=True).to(dtype)
        dist.all_reduce(max_Q1, dist.ReduceOp.MAX, group=self.group)
        sums_2Q = logits_QV.new_empty(2, len(logits_QV), dtype=dtype)
        for part in cut(len(logits_QV), rows):
            sums_2Q[0, part] = (at_least_float32(logits_QV[part]) - max_Q1[part]).exp_().sum(1)
        sums_2Q[1] = logits_QV.gather(1, index_Q1).masked_fill(~is_here_Q1, 0.0)[:, 0]
        dist.all_reduce(sums_2Q, group=self.group)
        lse_Q1, target_Q1 = max_Q1 + sums_2Q[0, :, None].log(), sums_2Q[1, :, None]
        if training:
            for part in cut(len(logits_QV), rows):
                grad_RV = at_least_float32(logits_QV[part]).sub_(lse_Q1[part]).exp_()
                if z_loss:
                    grad_RV.mul_(1 + 2 * z_loss * lse_Q1[part])
                grad_RV.scatter_add_(1, index_Q1[part], -is_here_Q1[part].to(dtype))
                logits_QV[part] = grad_RV
        losses = torch.stack([lse_Q1 - target_Q1, z_loss * lse_Q1.square()])
        return losses.masked_fill_(~real_Q1, 0.0).sum(dim=(1, 2))
