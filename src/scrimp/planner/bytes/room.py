"""What would fit, where nothing does: the smallest device, and the smallest host.

Feasibility asks for no seconds, so that `labels` has few labels; bytes of the device are found by bisection, to a
thousandth, always from above: what is named does fit. Placements are those of `splits`: all or none of each class, and
quarters.

Checked  tests/planner/bytes/test_room.py
"""

from __future__ import annotations

from scrimp.errors import PlanError
from scrimp.planner.bytes.costs import StepCosts
from scrimp.planner.bytes.labels import HOST, SECONDS, Array, fastest
from scrimp.planner.bytes.machine import Machine, Setup
from scrimp.planner.bytes.splits import Split, chain, corners
from scrimp.planner.bytes.states import Floor, floor_of

_UNLIMITED = 1 << 62
_EFFORT = 48


class NoRoomError(PlanError):
    """Nothing fits. What would, in bytes: None where not even that."""

    def __init__(
        self,
        machine: Machine,
        *,
        smallest: tuple[int, int],
        device: int | None,
        host: int | None,
        states: str | None = None,
        beside: int = 0,
    ) -> None:
        """Say what would fit.

        Args:
            states: where the user put them, if that was decided.
            beside: bytes of the device that are needed beside the step's.
        """
        self._arguments = {"smallest": smallest, "device": device, "host": host, "states": states}
        self._machine = machine
        self.smallest_device, self.its_host = smallest
        """The smallest device of all, and the host memory that it needs."""
        self.device_with_this_host, self.host_with_this_device = device, host
        ways = []
        if device is not None:
            ways.append(f"{_gb(device + beside)} of device memory with this host")
        if host is not None:
            ways.append(f"{_gb(host)} of the host's (pinnable) with this device")
        ways.append(
            f"{_gb(smallest[0] + beside)} of device memory, the smallest possible, with a host of {_gb(smallest[1])}"
        )
        super().__init__(
            "the run does not fit in memory, whatever is recomputed or offloaded"
            + ("" if states is None else f", with {states}, as memory.* says"),
            got=f"{_gb(machine.device_bytes + beside)} of device memory and {_gb(machine.pinnable)} of the host's",
            do=f"these would fit: {'; '.join(ways)}; or train with a smaller micro-batch or shorter sequences"
            + ("" if states is None else "; or leave memory.* to the plan"),
        )

    def beside(self, nbytes: int) -> NoRoomError:
        """The same, where so many bytes of the device are needed beside the step's."""
        return NoRoomError(self._machine, **self._arguments, beside=nbytes)  # type: ignore[arg-type]


def smallest(costs: StepCosts, machine: Machine, setup: Setup, only: Split | None = None) -> NoRoomError:
    """What would fit instead; for the caller to raise.

    Args:
        only: the placement of states that the user decided; None: any.
    """
    blocks = len(costs.blocks)
    found = _Room(costs, setup)
    updaters = setup.updaters_on(machine)
    all_of_them = (*corners(blocks, updaters), *chain(blocks, updaters[0]))
    splits = list(dict.fromkeys(split.within(blocks) for split in ((only,) if only else all_of_them)))
    device, split = found.smallest_device(splits, _UNLIMITED, _UNLIMITED)
    assert split is not None
    limited, _ = found.smallest_device(splits, machine.host_bytes, machine.pinnable)
    hosts = [host for split in splits if (host := found.least_host(split, machine.device_bytes)) is not None]
    return NoRoomError(
        machine,
        smallest=(device, found.least_host(split, device) or 0),
        device=limited if limited < _UNLIMITED else None,
        host=min(hosts, default=None),
        states=None if only is None else str(only.states(blocks)),
    )


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
        peak = max(
            max(c.forward_peak, c.peak_of_backward(self.accumulates)) + c.host for o in choices for c in o
        )
        total = sum(most[number] for number in self.costs.blocks) + self.costs.boundary + peak
        return max(floor.rest, total + max(floor.head, int(floor.backward.max(initial=0)), floor.resident))


def _gb(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,} bytes"
