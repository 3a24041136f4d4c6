"""What would fit, where nothing does: the smallest device, and the smallest host.

Problem  "It does not fit" helps nobody. What is named instead must fit when it is typed: a budget is more than the
         bytes of a step. Of a host's budget the arena keeps a spare share, of a device's the caching allocator; on a
         CPU a checkpoint's copy lies in the same memory as the step.
Method   Feasibility asks for no seconds, so that `activation_dp` has few labels; bytes of the device are found by
         bisection, to a thousandth, always from above: what is named does fit. Placements are those of `placement`: all
         or none of each class, and quarters. `Room` is in bytes of a step by the account, `Budgets` turns these into
         what a user types, and sizes are shown rounded up.
Checked  tests/planner/memory/test_room.py; tests/training/memory/test_memory_refusal.py: printed figures, fed back
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scrimp.errors import PlanError
from scrimp.planner.memory.activation_dp import HOST, SECONDS, Array, fastest
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.feasible import any_that_fits
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.search_space import Split, chain, corners
from scrimp.planner.memory.states import Floor, floor_of

_UNLIMITED = 1 << 62
_EFFORT = 48
_NONE_FITS = "the run does not fit in memory, whatever is recomputed or offloaded"
_NONE_FOUND = "none of the plans that were tried fits in memory, and there are more than were tried"


@dataclass(frozen=True)
class Room:
    """What would fit, in bytes that a step takes by its account."""

    device: int
    """The smallest device of all."""
    its_host: int
    """Host memory that it needs."""
    device_with_this_host: int | None
    """None: no device is large enough."""
    host_with_this_device: int | None
    """None: no host is large enough."""


@dataclass(frozen=True)
class Budgets:
    """The memory that there is as a user knows it, and what a user types for bytes of a step."""

    device: int
    """The budget, or what is free."""
    host: int
    """The same; 0: nothing of a step may live there."""
    copy: int = 0
    """Bytes of a checkpoint's copy in the device's memory: it lies there while the host has no budget of its own."""
    share: float = 1.0
    """Share of the device's budget that a step may take."""
    pinned: int | None = None
    """The part of the host's bytes that may be pinned; None: all."""
    host_for: Callable[[int], int] = int
    """From bytes of a step on the host to a budget that is enough for them."""
    free: int | None = None
    """Free memory that `device` is the part of which a run may take; None: `device` is all there is."""

    def device_for(self, step: int, *, alone: bool = False) -> int:
        """A device's budget that is enough for so many bytes of a step.

        Args:
            alone: the host is given no budget.
        """
        return math.ceil(step / self.share) + (1 if self.share < 1 else 0) + (self.copy if alone else 0)

    @property
    def device_words(self) -> str:
        """What there is of the device, and what of it a step does not get."""
        kept = f", {1 - self.share:.0%} of it for the allocator's gaps" if self.share < 1 else ""
        beside = f", of which a checkpoint's copy takes {size_text(self.copy)}" if self.copy else ""
        part = "" if self.free is None else f", the part of {size_text(self.free)} free that a step may take"
        return f"{size_text(self.device)} of device memory{part}{kept}{beside}"

    @property
    def words(self) -> str:
        """What there is."""
        if not self.host:
            return self.device_words
        pinned = "" if self.pinned is None else f" ({size_text(self.pinned)} pinnable)"
        return f"{size_text(self.host)} of the host's{pinned} and {self.device_words}"


class NoRoomError(PlanError):
    """Nothing fits.

    Args:
        room: what would, where that was asked.
        device_budget: a budget of the device's that is enough beside this host, as `do` names it.
    """

    def __init__(
        self,
        what: str,
        *,
        got: str | None = None,
        do: str | None = None,
        room: Room | None = None,
        device_budget: str | None = None,
    ) -> None:
        super().__init__(what, got=got, do=do)
        self.room, self.device_budget = room, device_budget


def smallest(costs: StepCosts, machine: Machine, setup: Setup, only: Split | None = None) -> NoRoomError:
    """What would fit instead; for the caller to raise. Errors and arguments as of `room_of`."""
    room = room_of(costs, machine, setup, only)
    budgets = Budgets(machine.device_bytes, machine.host_bytes, pinned=machine.pinned_bytes)
    states = None if only is None else str(only.states(len(costs.blocks)))
    return no_room(
        room,
        budgets,
        beside_host=room,
        states=states,
        advice=["a smaller micro-batch"],
        is_certain=nothing_fits_for_sure(costs, machine, setup, only),
    )


def nothing_fits_for_sure(costs: StepCosts, machine: Machine, setup: Setup, only: Split | None) -> bool:
    """Whether a problem for which no plan was found has none, as far as `feasible` can say."""
    splits = [None] if only is None else _splits(costs, machine, setup, only)
    return all(any_that_fits(costs, machine, setup, split).is_certain for split in splits)


def no_room(
    room: Room,
    budgets: Budgets,
    *,
    beside_host: Room | None,
    states: str | None,
    advice: Sequence[str],
    is_certain: bool,
) -> NoRoomError:
    """The refusal in words.

    Args:
        room: with the host as it is.
        beside_host: where the host has a budget of its own; None: nothing of a step may live there.
        states: where the user put them, if that was decided.
        advice: what else would help.
        is_certain: there is no plan; else none was found.
    """
    ways, this_host = [], None
    if room.device_with_this_host is not None:
        this_host = enough_text(budgets.device_for(room.device_with_this_host, alone=True))
        ways.append(f"{this_host} of device memory" + (" with this host" if budgets.host else ""))
    if beside_host is not None:
        if beside_host.host_with_this_device == 0:
            ways.append("any budget of the host's beside this device: a checkpoint's copy then lies there")
        elif beside_host.host_with_this_device is not None:
            host = budgets.host_for(beside_host.host_with_this_device)
            ways.append(f"{enough_text(host)} of the host's with this device")
        device, host = budgets.device_for(beside_host.device), budgets.host_for(beside_host.its_host)
        ways.append(
            f"{enough_text(device)} of device memory, the smallest possible, with {enough_text(host)} of the host's"
        )
    return NoRoomError(
        (_NONE_FITS if is_certain else _NONE_FOUND)
        + ("" if states is None else f", with {states}, as memory.* says"),
        got=budgets.words,
        do=f"these would fit: {'; '.join(ways)}" + "".join(f"; or {one}" for one in advice),
        room=room,
        device_budget=this_host,
    )


def room_of(costs: StepCosts, machine: Machine, setup: Setup, only: Split | None = None) -> Room:
    """What would fit.

    Args:
        only: the placement of states that the user decided; None: any.
    """
    found, splits = _Room(costs, setup), _splits(costs, machine, setup, only)
    device, split = found.smallest_device(splits, _UNLIMITED, _UNLIMITED)
    assert split is not None
    limited, _ = found.smallest_device(splits, machine.host_bytes, machine.pinnable)
    hosts = [host for one in splits if (host := found.least_host(one, machine.device_bytes)) is not None]
    return Room(
        device=device,
        its_host=found.least_host(split, device) or 0,
        device_with_this_host=limited if limited < _UNLIMITED else None,
        host_with_this_device=min(hosts, default=None),
    )


def smallest_device(
    costs: StepCosts, machine: Machine, setup: Setup, only: Split | None = None
) -> int | None:
    """Bytes of the smallest device beside this host; None where none is large enough."""
    splits = _splits(costs, machine, setup, only)
    found, _ = _Room(costs, setup).smallest_device(splits, machine.host_bytes, machine.pinnable)
    return found if found < _UNLIMITED else None


def _splits(costs: StepCosts, machine: Machine, setup: Setup, only: Split | None) -> list[Split]:
    blocks, updaters = len(costs.blocks), setup.updaters_on(machine)
    if only:
        splits: tuple[Split, ...] = tuple(replace(only, update=updater) for updater in updaters)
    else:
        splits = (*corners(blocks, updaters), *chain(blocks, updaters[0]))
    return list(dict.fromkeys(split.within(blocks) for split in splits))


class _Room:
    def __init__(self, costs: StepCosts, setup: Setup) -> None:
        self.costs, self.accumulates = costs, setup.accumulates

    def smallest_device(self, splits: list[Split], host: int, pinned: int) -> tuple[int, Split | None]:
        """Bytes and placement of the smallest device that any of the placements fits."""
        best, which = _UNLIMITED, None
        for split in splits:
            floor = self._floor(split)
            left = min(host - floor.host, pinned - floor.pinned)
            if left < 0 or not self._fits(floor, best - max(best >> 10, 1), left):
                continue
            low, high = floor.rest - 1, min(best, self._roomy(floor))
            while high - low > max(high >> 10, 1):
                middle = (low + high) // 2
                low, high = (low, middle) if self._fits(floor, middle, left) else (middle, high)
            best, which = high, split
        return best, which

    def least_host(self, split: Split, device: int) -> int | None:
        """Least host bytes with which a placement fits a device."""
        floor = self._floor(split)
        front = self._front(floor, device, _UNLIMITED, (SECONDS,))
        return floor.host + int(front.min()) if len(front) else None

    def _fits(self, floor: Floor, device: int, left: int) -> bool:
        free = (SECONDS, HOST) if left > _UNLIMITED >> 1 else (SECONDS,)
        return len(self._front(floor, device, left, free)) > 0

    def _front(self, floor: Floor, device: int, left: int, free: tuple[int, ...]) -> Array:
        return fastest(
            self.costs,
            floor,
            accumulates=self.accumulates,
            device_bytes=device,
            host_bytes=left,
            effort=_EFFORT,
            free=free,
        ).host

    def _floor(self, split: Split) -> Floor:
        return floor_of(self.costs, split.states(len(self.costs.blocks)), self.accumulates)

    def _roomy(self, floor: Floor) -> int:
        """A device that every plan fits."""
        choices = [kind.choices.values() for kind in self.costs.classes]
        most = [max(c.kept + c.cast for c in options) for options in choices]
        passes = max(max(c.forward_peak, c.peak_of_backward(self.accumulates)) for o in choices for c in o)
        peak = passes + max(c.host for o in choices for c in o)  # in flight is what another block sends
        total = sum(most[number] for number in self.costs.blocks) + self.costs.boundary + peak
        beside = (int(bytes_.max(initial=0)) for bytes_ in (floor.forward, floor.backward, floor.sent))
        return max(floor.rest, total + max(floor.head, *beside))


def size_text(nbytes: int) -> str:
    """To the nearest: "60.0 MB"."""
    return _text(nbytes, round)


def enough_text(nbytes: int) -> str:
    """Rounded up: what is named is enough."""
    return _text(nbytes, math.ceil)


def _text(nbytes: int, whole: Callable[[float], int]) -> str:
    unit, size = ("GB", 10**9) if nbytes >= 10**9 else ("MB", 10**6)
    digits = 1 if nbytes >= 10 * size else 2
    return f"{whole(nbytes / size * 10**digits) / 10**digits:.{digits}f} {unit}"
