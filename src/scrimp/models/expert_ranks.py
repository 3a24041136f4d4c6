"""Ranks that share routed experts: tokens travel to the ranks that have theirs, and the results travel back.

Problem  Experts are most of a model's weights, and each is read for few tokens: gathering all of them on every rank, as
         FSDP2 does, moves more bytes than the tokens have.
Method   The same ranks are seen twice (MoE folding). For dense layers they are dp, fsdp, cp and tp. For experts they
         are edp, ep and etp, whatever they are for the rest: neighbouring ranks share the experts of a block (ep), and
         the width of each (etp); ranks with the same experts (edp) are shards of FSDP2. A rank has E / ep experts, and
         of each F / etp of its width. It sorts its tokens by expert as one process does; then::

             counts      each rank tells the others how many tokens come for each expert
             to experts  an all-to-all of tokens, in the order of experts; a rank sorts what has come by expert
             products    of its experts, as alone
             back        an all-to-all of results, and each token takes its k as alone; of etp partial ones the sum

         A token goes to all etp ranks of its expert, each of which gives a partial sum: as many bytes as gathering and
         scattering over etp would send.
Sums     A rank's expert sees the tokens of the group, and its gradient is their sum; FSDP2 adds up over edp alone.
         Nothing is scaled, since losses are divided by the targets of all ranks. Routers are dense weights.
Bytes    Of A pairs of this rank those whose expert is elsewhere, times D numbers and etp copies, in each of four
         all-to-alls: there and back, forward and backward. Counts are 8 E etp bytes.
Formats  Quantized experts round by one clock on all ranks of a group; the counts bring the addresses of their rows, 8
         bytes to each rank.
Order    Results do not depend on which ranks have which experts, but for the order of sums in weights' gradients.
Limits   Nobody knows beforehand how many tokens a rank will get. The account of memory assumes as many as the rank has,
         as with a balanced router. Capacity is of the tokens of one rank. The host waits for the counts.
Source   MoE Parallel Folding with Megatron Core, arXiv 2504.14960; GShard, arXiv 2006.16668
Checked  tests/parity/

Letters: as of `scrimp.models.experts`; n ranks of a group, R rows that come to this one.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.gemm.clock import Clock
from scrimp.gemm.grouped import GroupedLinear
from scrimp.models.experts import RoutedBlock, Routes, spread
from scrimp.models.model import Model
from scrimp.parts import Cut

_ROWS_OF_A_GROUP = 2**40
"""More rows than any step has: addresses of rounding noise."""
_numbers = itertools.count()
_all: weakref.WeakValueDictionary[int, ExpertRanks] = weakref.WeakValueDictionary()


class ExpertRanks:
    """The ranks that share the experts of a block. It must outlive all backward passes.

    Args:
        group: ep x etp ranks; those that share an expert are neighbours.
        etp: how many share each.
        place: which of the groups of its stage this is.
    """

    def __init__(self, group: dist.ProcessGroup, etp: int, place: int = 0) -> None:
        self.group, self.etp, self.number = group, etp, next(_numbers)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ep, self.place = self.size // etp, place
        self.clocks: tuple[Clock, Clock] | None = None
        """Where experts are quantized: the model's clock, and that of the experts, which all ranks here set alike."""
        _all[self.number] = self

    def experts(self, count: int) -> range:
        """Which of so many experts this rank has."""
        share = count // self.ep
        first = self.rank // self.etp * share
        return range(first, first + share)

    def width(self, count: int) -> range:
        """Which of so many inner features of an expert."""
        share = count // self.etp
        first = self.rank % self.etp * share
        return range(first, first + share)

    def journey(self, ends_E: Tensor) -> Journey:
        """Where the tokens of this rank go, and how many come here; a collective.

        Args:
            ends_E: of this rank's pairs, over all experts.
        """
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
        own_nE = counts_E.view(self.ep, 1, -1).expand(-1, self.etp, -1).reshape(self.size, -1).contiguous()
        if self.clocks is not None:
            row = own_nE.new_full((self.size, 1), self.clocks[0].first_row)
            own_nE = torch.cat([own_nE, row], 1)
        come_nE = torch.empty_like(own_nE)
        dist.all_to_all_single(come_nE, own_nE, group=self.group)
        if self.clocks is not None:
            self._set_clock(come_nE[:, -1].tolist())
            own_nE, come_nE = own_nE[:, :-1], come_nE[:, :-1]
        return Journey(self, own_nE.cpu(), come_nE.cpu(), ends_E.device)

    def _set_clock(self, first_rows: list[int]) -> None:
        """Experts round by one address on all ranks of a group: that of the joint micro-batch in one process, where
        there is one group; others lie beyond it."""
        assert self.clocks is not None
        of_model, of_experts = self.clocks
        first_row = min(first_rows) * len(set(first_rows)) + self.place * _ROWS_OF_A_GROUP
        of_experts.begin(of_model.step, first_row)


@dataclass
class Journey:
    """The travel of one block's tokens in one forward pass."""

    ranks: ExpertRanks
    own_nE: Tensor  # noqa: N815
    """Pairs of this rank for each expert of each rank, on the CPU."""
    come_nE: Tensor  # noqa: N815
    """Pairs of each rank for each expert of this one."""
    device: torch.device

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Rows that go to each rank, and that come from it."""
        return self.own_nE.sum(1).tolist(), self.come_nE.sum(1).tolist()

    def go(self, x_AD: Tensor) -> Tensor:
        """x_RD: the rows that come here, rank by rank, of each by expert.

        Args:
            x_AD: this rank's pairs, by expert, without those that are dropped.
        """
        leaving = x_AD[: int(self.own_nE.sum()) // self.ranks.etp]
        if self.ranks.etp > 1:
            leaving = torch.cat([x for x in self._blocks(leaving) for _ in range(self.ranks.etp)])
        return _exchange(leaving, *self.sizes, self.ranks)

    def back(self, y_RD: Tensor, pairs: int) -> Tensor:
        """y_AD: the results of this rank's pairs.

        Args:
            pairs: A; those after the last that travelled get 0.
        """
        there, here = self.sizes
        found = _exchange(y_RD, here, there, self.ranks)
        if self.ranks.etp > 1:
            parts = found.split(there)
            found = torch.cat(
                [
                    torch.stack(parts[first : first + self.ranks.etp]).sum(0)
                    for first in range(0, self.ranks.size, self.ranks.etp)
                ]
            )
        return torch.cat([found, found.new_zeros(pairs - len(found), found.shape[1])])

    def _blocks(self, x_AD: Tensor) -> tuple[Tensor, ...]:
        """The rows of each rank of ep."""
        rows: list[int] = self.own_nE.sum(1)[:: self.ranks.etp].tolist()
        return torch.split(x_AD, rows)

    def routes(self) -> Routes:
        """From the rows that have come, rank by rank, to those of each expert here."""
        expert_R = torch.arange(self.come_nE.shape[1]).repeat(self.ranks.size)
        expert_R = expert_R.repeat_interleave(self.come_nE.flatten())
        order_R = expert_R.argsort(stable=True)
        place_R = torch.empty_like(order_R)
        place_R[order_R] = torch.arange(len(order_R))
        ends = self.come_nE.sum(0).cumsum(0).int()
        order_R, place_R, ends = (one.to(self.device) for one in (order_R, place_R, ends))
        nothing = torch.empty(0, device=self.device)
        return Routes(nothing, ends, order_R, place_R[:, None])

    def unsorted(self, y_RD: Tensor, routes: Routes) -> Tensor:
        """From the order of experts to that of the ranks again."""
        return spread(y_RD, routes.place_Sk[:, 0], routes.token_A[:, None])


def _exchange(x: Tensor, there: list[int], here: list[int], ranks: ExpertRanks) -> Tensor:
    found = _Exchange.apply(x, there, here, ranks.number)  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: list[int], here: list[int], number: int) -> Tensor:
        ctx.sizes, ctx.number = (there, here), number
        return _all_to_all(x, there, here, number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        there, here = ctx.sizes
        return _all_to_all(g, here, there, ctx.number), None, None, None


def _all_to_all(x: Tensor, there: list[int], here: list[int], number: int) -> Tensor:
    found = x.new_empty(sum(here), x.shape[1])
    group = _all[number].group
    dist.all_to_all_single(
        found, x.contiguous(), output_split_sizes=here, input_split_sizes=there, group=group
    )
    return found


def cut_experts(model: Model, ranks: ExpertRanks | None) -> dict[str, Cut | None]:
    """Leave this rank its experts, and of each its part.

    Args:
        model: on the meta device.
        ranks: None: every rank has all experts, which FSDP2 shards over all.

    Returns:
        by name what this rank has of the weights of experts; None: all.
    """
    found: dict[str, Cut | None] = {}
    for index, block in zip(model.part.blocks, model.each_block(), strict=True):
        if not isinstance(block, RoutedBlock):
            continue
        block.mlp.ranks = ranks
        experts, where = block.mlp.experts, f"blocks.{index}.mlp.experts"
        inner = experts.down.in_features
        for name, layer in (("gate_up", experts.gate_up), ("down", experts.down)):
            key = f"{where}.{name}.weight"
            found[key] = None if ranks is None else _cut(layer, ranks, inner, is_first=name == "gate_up")
    return found


def _cut(layer: GroupedLinear, ranks: ExpertRanks, inner: int, *, is_first: bool) -> Cut:
    whole, own, width = tuple(layer.weight.shape), ranks.experts(layer.experts), ranks.width(inner)
    size = layer.out_features
    if is_first and ranks.etp > 1:
        starts = [expert * size + half for expert in own for half in (0, inner)]
        rows = tuple(range(start + width.start, start + width.stop) for start in starts)
    else:
        rows = (range(own.start * size, own.stop * size),)
    columns = width if not is_first and ranks.etp > 1 else None
    cut = Cut(whole, rows, columns=columns)
    layer.experts = len(own)
    layer.out_features, layer.in_features = cut.local_shape[0] // len(own), cut.local_shape[1]
    empty = torch.empty(cut.local_shape, device="meta", dtype=layer.weight.dtype)
    layer.weight = nn.Parameter(empty)
    return cut
