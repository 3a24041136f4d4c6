"""Messages between ranks that take as long as over slow links: each waits for its bytes before it is sent."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

Rates = Sequence[Sequence[float]]
"""Bytes per second between two ranks; infinite: not delayed."""


def of_pairs(ranks: int, rates: dict[tuple[int, int], float], usual: float = math.inf) -> list[list[float]]:
    """Rates of some links; all others have the usual one."""
    found = [[usual] * ranks for _ in range(ranks)]
    for (one, other), rate in rates.items():
        found[one][other] = found[other][one] = rate
    return found


@contextlib.contextmanager
def delayed(rates: Rates) -> Iterator[None]:
    """Inside, what `batch_isend_irecv` sends leaves this rank one message after another, each at the rate of its
    link."""
    send, own = dist.batch_isend_irecv, rates[dist.get_rank()]

    def slowly(operations: list[Any]) -> Any:
        sent = [one for one in operations if one.op is dist.isend]
        time.sleep(sum(one.tensor.nbytes / own[one.peer] for one in sent))
        return send(operations)

    dist.batch_isend_irecv = slowly
    try:
        yield
    finally:
        dist.batch_isend_irecv = send
