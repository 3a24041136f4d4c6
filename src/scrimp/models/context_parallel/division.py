"""How the tokens of a row are divided over ranks.

Problem  A row of T tokens is spread over W ranks, T / W on each. Causal attention makes late tokens dear: token t looks
         at t + 1 keys, so that the rank with the last tokens would compute almost twice the average.
Method   Three divisions. Rank r holds, in this order:

         zigzag      of 2 W chunks, number r and number 2 W - 1 - r: one cheap chunk, one dear one
         striped     tokens r, r + W, r + 2 W, ...: of every stretch of the row an equal share
         contiguous  of W chunks, number r: for attention that is not causal, and for Ulysses

         A rank's tokens rise, so the tokens of a document are neighbours on every rank. All that attention asks is how
         many tokens a rank holds before a position (`before`).
Limits   2 W must divide T for zigzag, W for the others; what does not divide is refused, never padded.
Source   zigzag: Zeppelin (arXiv 2509.21841), Llama 3; striped: Striped Attention (arXiv 2311.09431)
Checked  tests/models/test_division.py

Shapes: B rows, T tokens of a row, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from scrimp.errors import ConfigError

Scheme = Literal["zigzag", "striped", "contiguous"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


@dataclass(frozen=True)
class Run:
    """Tokens of a rank at equal distances."""

    first: int
    """Position in the row."""
    count: int
    step: int = 1

    def before(self, position: int) -> int:
        """How many of them are at positions before this one."""
        return min(max(-(-(position - self.first) // self.step), 0), self.count)

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.first + (self.count - 1) * self.step + 1


@dataclass(frozen=True)
class Division:
    """A row of `length` tokens on so many ranks.

    Raises:
        ConfigError: it does not divide.
    """

    scheme: Scheme
    length: int
    ranks: int

    def __post_init__(self) -> None:
        parts = self.ranks * (2 if self.scheme == "zigzag" else 1)
        if self.length % parts or not self.length:
            below = self.length // parts * parts
            nearest = f"{below:,} or {below + parts:,}" if below else f"{parts:,}"
            raise ConfigError(
                "context parallelism: a sequence does not divide over the ranks",
                got=f"{self.length:,} tokens",
                expected=f"a multiple of {parts:,}: {self.scheme} over {self.ranks} ranks",
                do=f"use sequences of {nearest} tokens, or another number of ranks",
            )

    @property
    def part(self) -> int:
        """Tokens of a rank."""
        return self.length // self.ranks

    def runs(self, rank: int) -> tuple[Run, ...]:
        """What a rank holds."""
        if self.scheme == "striped":
            return (Run(rank, self.part, self.ranks),)
        if self.scheme == "contiguous":
            return (Run(rank * self.part, self.part),)
        half = self.part // 2
        return tuple(Run(chunk * half, half) for chunk in (rank, 2 * self.ranks - 1 - rank))

    def before(self, rank: int, position: int) -> int:
        """How many tokens a rank holds before a position of the row: where that position is, or would be, on it."""
        return sum(run.before(position) for run in self.runs(rank))

    def positions(self, rank: int) -> Tensor:
        """Where the tokens of a rank are in the row, int64 of T / W, on the CPU."""
        return torch.cat(
            [torch.arange(run.first, run.stop, run.step, dtype=torch.int64) for run in self.runs(rank)]
        )

    @cached_property
    def _order(self) -> Tensor:
        """Positions of all ranks, one after the other."""
        return torch.cat([self.positions(rank) for rank in range(self.ranks)])

    def cut(self, x: Tensor, rank: int, *, dim: int = 1) -> Tensor:
        """The part of a rank of a tensor with T entries along `dim`."""
        assert x.shape[dim] == self.length, "the tensor is not of whole rows"
        return x.index_select(dim, self.positions(rank).to(x.device))

    def joined(self, parts: Sequence[Tensor], *, dim: int = 1) -> Tensor:
        """Whole rows of the parts of all ranks, in the order of ranks."""
        found = torch.cat(list(parts), dim)
        return torch.empty_like(found).index_copy_(dim, self._order.to(found.device), found)
