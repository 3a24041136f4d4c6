"""How fast the links between ranks are: latency and bandwidth of every pair, and of collectives over all ranks.

Problem  A layout is as fast as the links that its axes cross. Which pairs of ranks are joined by a slow one (another
         node, another cluster, a cable that fell back to a lower speed) no name of a host or a device says.
Method   A message goes to the other rank and comes back; half of the fastest round trip counts. Latency is that of
         8 bytes. For bandwidth the message grows by eights, from `FIRST_BYTES` on, up to `LARGEST_BYTES`, as long as
         its trips are expected to stay within the pair's share of `PAIRS_S`; then it is sent again until the share is
         over. The best rate counts, since others at work on a machine or a link only ever take from it.

         Up to `ALONE` ranks pairs are measured one after another, with nothing else under way. More are measured in
         the n - 1 rounds of a tournament (`rounds_of`), in each of which every rank has one partner: then a link that
         several pairs share, such as that of a node, shows what each of them gets while all of them use it.

         Collectives run over all ranks on the default process group: 4 bytes from each rank to each for latency, and
         for bandwidth as much as the slowest link is expected to carry in `COLLECTIVE_S`. Bandwidth is what a rank
         sends in a ring (`scrimp.profiler.collectives`) by the time of the slowest rank.
CUDA     The same calls over NCCL. Pairs use the communicator of all ranks, as `batch_isend_irecv` does: none is made
         for each pair.
Limits   About 20 s in all, unless a message of `FIRST_BYTES` already takes longer than a pair's share. A figure is of
         an idle link in one direction at a time; on ranks of one machine it is that of its memory. The CUDA part was
         not run on several GPUs.
Source   The tournament is the circle method for round robins
Checked  tests/profiler/test_rank_links.py, on gloo with delayed messages; tests/cli/test_doctor_ranks.py
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scrimp.errors import ConfigError
from scrimp.launchers import place_of
from scrimp.profiler.collectives import SHARES
from scrimp.profiler.device import Device
from scrimp.profiler.links_report import CollectiveRate, RankLinks, RankPlace
from scrimp.timing import now
from scrimp.world import World

ALONE = 16
"""Ranks up to which one pair is measured at a time."""
MOST_RANKS = 512
PAIRS_S, COLLECTIVE_S = 12.0, 0.5
MOST_OF_A_PAIR_S = 0.5
TINY_BYTES, FIRST_BYTES, GROWTH = 8, 4096, 8
LARGEST_BYTES = {"cpu": 2**24, "cuda": 2**28}
TINY_TRIPS, TRIPS, COLLECTIVE_ROUNDS = 16, 2, 3
Pairs = list[tuple[int, int]]


def measure_rank_links(
    device: Device,
    *,
    at_once: bool | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> RankLinks:
    """Measure the links between all ranks of the default process group; every rank returns the same.

    Args:
        at_once: whether pairs are measured in rounds. None: as their number says.
        progress: hears the share that is done, 0 to 1.

    Raises:
        ConfigError: there is one rank, or more than `MOST_RANKS`.
    """
    world = device.world
    _refuse_number(world.size)
    at_once = world.size > ALONE if at_once is None else at_once
    rounds = rounds_of(world.size)
    if not at_once:
        rounds = [[pair] for one in rounds for pair in one]
    pairs = _Pairs(world, device.torch_device, min(PAIRS_S / len(rounds), MOST_OF_A_PAIR_S))
    dist.all_reduce(torch.zeros(1, device=device.torch_device))  # NCCL connects all ranks before pairs meet
    for number, one in enumerate(rounds):
        progress(0.8 * number / len(rounds))
        pairs.meet(one)
    latency, rates = pairs.gathered()
    found = []
    for number, operation in enumerate(OPERATIONS):
        progress(0.8 + 0.2 * number / len(OPERATIONS))
        found.append(_collective(operation, world, device.torch_device, _slowest(rates)))
    progress(1.0)
    return RankLinks(
        backend=dist.get_backend_config() if device.is_host else "nccl",
        torch=torch.__version__,
        places=tuple(places(device)),
        at_once=at_once,
        latency=latency,
        bandwidth=rates,
        collectives=tuple(found),
    )


def places(device: Device) -> list[RankPlace]:
    """Where each rank runs, in their order; a collective."""
    own = place_of(os.environ)
    local = device.world.rank if own is None else own.local_rank
    return [RankPlace(*one) for one in device.world.gathered([socket.gethostname(), device.name, local])]


def rounds_of(ranks: int) -> list[Pairs]:
    """All pairs of ranks in rounds, in each of which no rank is in two pairs: a round robin by the circle method."""
    circle: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    half, found = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def _refuse_number(ranks: int) -> None:
    if 1 < ranks <= MOST_RANKS:
        return
    raise ConfigError(
        "there are no links between ranks to measure"
        if ranks == 1
        else "too many ranks to measure all links",
        got=f"{ranks:,} rank{'s' * (ranks > 1)}",
        expected=f"2 to {MOST_RANKS}",
        do="start several: scrimp launch --ranks 4 doctor --ranks, or with torchrun or srun"
        if ranks == 1
        else "start one rank of each node, or fewer nodes",
    )


class _Pairs:
    """This rank's messages to the others.

    Args:
        share: seconds that a round trip of a pair may take.
    """

    def __init__(self, world: World, device: torch.device, share: float) -> None:
        self._world, self._device, self._share = world, device, share
        self._buffer = torch.zeros(LARGEST_BYTES[device.type], dtype=torch.uint8, device=device)
        self._found: dict[int, tuple[float, float]] = {}

    def meet(self, pairs: Pairs) -> None:
        """One round: this rank measures with its partner, if it has one; a collective."""
        for one, other in pairs:
            if self._world.rank == one:
                self._found[other] = self._lead(other)
            elif self._world.rank == other:
                self._follow(one)
        dist.barrier()

    def gathered(self) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
        """Latency in seconds and bandwidth in bytes per second, a row for each rank; a collective."""
        size = self._world.size
        latency = [[0.0] * size for _ in range(size)]
        rates = [[0.0] * size for _ in range(size)]
        rows = self._world.gathered([[other, *pair] for other, pair in self._found.items()])
        for rank, row in enumerate(rows):
            for other, seconds, rate in row:
                latency[rank][other] = latency[other][rank] = _rounded(seconds)
                rates[rank][other] = rates[other][rank] = _rounded(rate)
        return tuple(map(tuple, latency)), tuple(map(tuple, rates))

    def _lead(self, other: int) -> tuple[float, float]:
        """Seconds of a small message, and bytes per second."""
        latency = self._trips(other, TINY_BYTES, TINY_TRIPS) / 2
        ends, num_bytes, rate = now(self._device) + self._share, FIRST_BYTES, 0.0
        while rate == 0.0 or now(self._device) < ends:
            seconds = self._trips(other, num_bytes, TRIPS) / 2
            rate = max(rate, num_bytes / seconds)
            # Where a disturbance hides how fast the link is, the same size comes again.
            larger = num_bytes * GROWTH
            if larger <= self._buffer.numel() and 2 * (TRIPS + 1) * larger / rate <= self._share:
                num_bytes = larger
        self._send(self._order(0, 0), other)
        return latency, rate

    def _trips(self, other: int, num_bytes: int, trips: int) -> float:
        """Seconds of the fastest round trip, after one that does not count."""
        self._send(self._order(num_bytes, trips), other)
        message, best = self._buffer[:num_bytes], math.inf
        for trip in range(trips + 1):
            began = now(self._device)
            self._send(message, other)
            self._receive(message, other)
            if trip > 0:
                best = min(best, now(self._device) - began)
        return best

    def _follow(self, other: int) -> None:
        while True:
            order = self._order(0, 0)
            self._receive(order, other)
            num_bytes, trips = order.tolist()
            if num_bytes == 0:
                return
            message = self._buffer[:num_bytes]
            for _ in range(trips + 1):
                self._receive(message, other)
                self._send(message, other)

    def _order(self, num_bytes: int, trips: int) -> Tensor:
        return torch.tensor([num_bytes, trips], device=self._device)

    def _send(self, message: Tensor, other: int) -> None:
        _carry_out(dist.P2POp(dist.isend, message, other))

    def _receive(self, message: Tensor, other: int) -> None:
        _carry_out(dist.P2POp(dist.irecv, message, other))


def _carry_out(operation: Any) -> None:
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def _all_gather(whole: Tensor, part: Tensor) -> None:
    call = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, call)(whole, part)


def _reduce_scatter(whole: Tensor, part: Tensor) -> None:
    call = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, call)(part, whole)


def _all_reduce(whole: Tensor, part: Tensor) -> None:
    dist.all_reduce(whole)


def _all_to_all(whole: Tensor, part: Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(whole), whole)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
}
"""Calls with the whole tensor and a rank's part of it."""


def _collective(operation: str, world: World, device: torch.device, slowest: float) -> CollectiveRate:
    """Its latency, and its bandwidth at a size that all ranks choose alike."""
    sends = SHARES[operation](world.size)
    expected = COLLECTIVE_S / (COLLECTIVE_ROUNDS + 1) * slowest / sends
    num_bytes = max(FIRST_BYTES * world.size, min(LARGEST_BYTES[device.type], int(expected)))
    small = _seconds(operation, world, device, 1)
    part = num_bytes // (4 * world.size)
    large = _seconds(operation, world, device, part)
    whole = 4 * part * world.size
    return CollectiveRate(operation, whole, _rounded(small), _rounded(whole * sends / large))


def _seconds(operation: str, world: World, device: torch.device, part: int) -> float:
    """Seconds of the fastest call, as its slowest rank measured them."""
    call = OPERATIONS[operation]
    tensors = torch.zeros(part * world.size, device=device), torch.zeros(part, device=device)
    found = []
    for _ in range(COLLECTIVE_ROUNDS + 1):
        dist.barrier()
        began = now(device)
        call(*tensors)
        found.append(world.largest(now(device) - began))
    return min(found[1:])


def _slowest(rates: Sequence[Sequence[float]]) -> float:
    return min(rate for one, row in enumerate(rates) for other, rate in enumerate(row) if one != other)


def _rounded(number: float) -> float:
    """Four digits: what is written is what is known."""
    return float(f"{number:.4g}")
