"""Ranks that share experts, where no token has a number to be routed by: every expert gets as many.

Method   On fake tensors a router chooses nobody, and the counts that ranks exchange cannot be read. Of A pairs of a
         rank each of E experts gets A / E instead, of every rank alike: what comes to a rank is as much as it has.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scrimp.models.expert_ranks import ExpertRanks, Journey
from scrimp.models.experts import RoutedBlock, Routes
from scrimp.models.model import Model


def balance_experts(model: Model, tokens: int) -> None:
    """Let the tokens of a rank choose all experts alike, where ranks share them.

    Args:
        tokens: of a rank in a pass.
    """
    blocks = [block for block in model.each_block() if isinstance(block, RoutedBlock) and block.mlp.ranks]
    for block in blocks:
        before, routing = cast(ExpertRanks, block.mlp.ranks), block.mlp.routing
        pairs = np.full(routing.experts, tokens * routing.chosen // routing.experts)
        pairs[: tokens * routing.chosen % routing.experts] += 1
        block.mlp.ranks = _BalancedRanks(before.group, before.etp, before.place, pairs)


class _BalancedRanks(ExpertRanks):
    def __init__(self, group: dist.ProcessGroup, etp: int, place: int, pairs_E: Any) -> None:
        super().__init__(group, etp, place)
        self._pairs_E = pairs_E

    def journey(self, ends_E: Tensor) -> Journey:
        """As many pairs for each expert as `pairs_E` has, whatever the router says."""
        own_nE = self._pairs_E.reshape(self.ep, -1).repeat(self.etp, axis=0)
        mine = own_nE[self.rank]
        come_nE = np.broadcast_to(mine, (self.size, len(mine)))
        # A journey asks both for sums alone, which an array answers where a fake tensor cannot.
        return _BalancedJourney(self, own_nE, cast(Tensor, come_nE), ends_E.device)


class _BalancedJourney(Journey):
    def routes(self) -> Routes:
        """The same shapes, without an order."""
        rows, experts = int(self.come_nE.sum()), self.come_nE.shape[1]
        nothing = torch.empty(0, device=self.device)
        order_R = torch.empty(rows, dtype=torch.int64, device=self.device)
        ends_E = torch.empty(experts, dtype=torch.int32, device=self.device)
        return Routes(nothing, ends_E, order_R, torch.empty_like(order_R)[:, None])
