"""A host without memory and a link without copies, for steps on tensors that have no memory themselves.

Problem  What a step keeps on the device beside what it sends away is decided by the code that sends: a count of it
         (`scrimp.training.memory.simulated`) should run that code, and needs no bytes on the host.
Method   `EndlessArena` keeps the books of a `HostArena` over slabs of torch's "meta" device, of any size. `LatestLink`
         copies nothing, and says of each copy that it is done once it was waited for: as late as the rules of
         `scrimp.runtime.memory.link` allow. So sources and targets stay as long as they may, and what was counted is
         the most that a real link can leave on the device.
Limits   Numbers mean nothing. Views of places are "meta" tensors: what the host itself reads or writes, as weights that
         are filled there and updates by the CPU, does not run.
Checked  tests/training/memory/test_simulated.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from scrimp.runtime.memory.arena import HostArena, Place
from scrimp.runtime.memory.link import Link, Ticket

_ENDLESS = 2**60


class EndlessArena(HostArena):
    """Places of any size, in no memory."""

    def __init__(self) -> None:
        super().__init__(_ENDLESS, torch.device("meta"), slab_bytes=_ENDLESS)

    def _acquire(self, sizes: list[int], device: torch.device) -> None:
        self._slabs += [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


class LatestLink(Link):
    """Copies of fake tensors: each is over when it was waited for, and never before."""

    kind = FakeTensor

    def _copy_out(self, source: Tensor, place: Place) -> Ticket:
        return _Latest()

    def _copy_back(self, place: Place, target: Tensor) -> Ticket:
        return _Latest()


class _Latest:
    def __init__(self) -> None:
        self._was_waited_for = False

    def wait(self) -> None:
        self._was_waited_for = True

    def finish(self) -> None:
        self.wait()

    def is_done(self) -> bool:
        return self._was_waited_for
