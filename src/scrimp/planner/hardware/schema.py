"""Devices, the nodes they stand in and the links between them, as typed numbers.

Problem  A planner answers for hardware that is not here: what a device can do at best, what good kernels
         reach of it, and how fast devices talk to one another.
Method   Every number in SI units (bytes, seconds, FLOP/s, B/s, W), so that no reader converts. A data
         sheet's peak and the share that kernels reach are two numbers, since they come from two sources::

             rate(kind) = peak of the unit that runs it * achieved[kind]          large products
             rate(kind, K) = rate(kind) * K / (K + k_half)                        inner size K

         The second line is a pipeline that fills and drains once a tile: its cost is fixed in time, so
         `k_half` doubles where the rate does. Waves of tiles over the multiprocessors come on top
         (`Shape.tile_rows`, `tile_columns`); whoever prices a product counts them.
Limits   One share a format for all large shapes and layouts, forward and backward. Clocks that sag in hot
         racks, slow samples of a chip and full networks are not in it.
Source   Each file names its own, key by key; what is judged or recalled stands in its `estimates`.
Checked  tests/planner/hardware/test_read.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from scrimp.config import Range

Kind = Literal["fp32", "bf16", "int8", "fp8", "fp8_block", "mxfp8", "nvfp4"]
"""How a matrix product is computed; fp8 has one scale a tensor or row, fp8_block and int8 one for 128 x 128."""


@dataclass(frozen=True)
class Peak:
    """Dense FLOP/s of the data sheet, sums in fp32. None: the device has no units of that width."""

    fp32: float
    bf16: float
    tf32: float | None = None
    fp8: float | None = None
    mxfp8: float | None = None
    """Block-scaled 8-bit instruction, where it is faster than plain fp8 (GeForce Blackwell: twice); else None."""
    fp4: float | None = None
    int8: float | None = None
    """Sums in int32."""


@dataclass(frozen=True)
class Achieved:
    """Shares of the peak that good kernels sustain under the power cap: large products (8,192 cubed and up),
    random data. Formats that the device cannot multiply are None."""

    fp32: float
    bf16: float
    attention_forward: float
    """Share of the bf16 peak: the best public flash kernel at head size 128, long sequences, causal (half the
    square counted, which is why long sequences are)."""
    attention_backward: float
    """The same; 2.5 times the FLOPs of the forward pass are counted."""
    memory: float
    """Share of the memory bandwidth: bytes read and written by elementwise kernels."""
    fp8: float | None = None
    """Share of the faster of `peak.fp8` and `peak.mxfp8`: cuBLAS of CUDA 13 takes the block-scaled instruction for
    one scale, too."""
    fp8_block: float | None = None
    mxfp8: float | None = None
    nvfp4: float | None = None
    int8: float | None = None
    """No shipped file has it, nor `peak.int8`: for scales of 128 x 128 no source gives a share that kernels reach."""


@dataclass(frozen=True)
class InnerSize:
    """Inner sizes K at which half of the large products' rate is reached, by width of the numbers."""

    bf16: float
    fp8: float | None = None
    fp4: float | None = None


@dataclass(frozen=True)
class Shape:
    """How the share falls for smaller products."""

    tile_rows: int
    """Rows of the output that one multiprocessor makes at a time."""
    tile_columns: int
    k_half: InnerSize
    keys_half: float = 480.0
    """Keys at which attention runs at half of its rate."""


@dataclass(frozen=True)
class HostLink:
    """The way to pinned host memory."""

    bytes_per_second: float
    """Each way alone, as measured."""
    both_ways: float
    """Share of that rate which each way keeps when both are busy."""


@dataclass(frozen=True)
class Device:
    """One accelerator, as a program sees it."""

    name: str
    vendor: str
    memory_bytes: int
    """What a program can allocate, after driver and context."""
    memory_bandwidth: float
    """B/s of the data sheet."""
    multiprocessors: int
    """SMs or CUs: units that tiles of a product are spread over."""
    cache_bytes: int
    """The last cache that all multiprocessors share."""
    launch_seconds: float
    """How long one kernel launch keeps the device waiting where launches are not hidden (eager, small kernels)."""
    power_watts: float
    price_per_hour: float
    """US dollars for one device, rented; 0 where it is owned."""
    peak: Peak
    achieved: Achieved
    shape: Shape
    host_link: HostLink
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where a key's number is from. A section's name stands for all keys in it that are not named themselves."""
    estimates: tuple[str, ...] = ()
    """Keys that no source gives as they stand: judged (from the source that is named), or recalled."""

    def unit(self, kind: Kind) -> float | None:
        """FLOP/s of the unit that runs products of a kind; None where there is none."""
        eight = max((rate for rate in (self.peak.fp8, self.peak.mxfp8) if rate), default=None)
        return {
            "fp32": self.peak.fp32,
            "bf16": self.peak.bf16,
            "fp8": eight,
            "fp8_block": eight,
            "mxfp8": eight,
            "nvfp4": self.peak.fp4,
            "int8": self.peak.int8,
        }[kind]

    def rate(self, kind: Kind, inner: float | None = None) -> float | None:
        """FLOP/s that large products of a kind sustain, or those of an inner size; None where it cannot."""
        unit, share = self.unit(kind), getattr(self.achieved, kind)
        if unit is None or share is None:
            return None
        full: float = unit * share
        half = self.k_half(kind)
        return full if inner is None else full * inner / (inner + half)

    def k_half(self, kind: Kind) -> float:
        """Inner size at which products of a kind reach half of their rate."""
        sizes = self.shape.k_half
        found = {"fp32": sizes.bf16, "bf16": sizes.bf16, "nvfp4": sizes.fp4}.get(kind, sizes.fp8)
        return sizes.bf16 if found is None else found

    @property
    def bandwidth(self) -> float:
        """B/s that elementwise kernels reach."""
        return self.memory_bandwidth * self.achieved.memory


@dataclass(frozen=True)
class Link:
    """How devices reach one another: alpha-beta, per device and direction."""

    name: str
    bytes_per_second: float
    """By the specification, with all devices sending at once."""
    latency_seconds: float
    """One message from device to device by NCCL, however small."""
    achieved: float
    """Share of the bandwidth that large all-gathers and reduce-scatters reach."""
    shared_by: int = 1
    """Devices behind one network card; where some of them do not train, the others have more of it
    (`NodeGroup.reached`)."""
    reduces: float = 1.0
    """Seconds of a large reduce-scatter, for one of an all-gather of as many bytes."""
    adds: float = 2.0
    """The same of an all-reduce: both of them, one after the other."""

    @property
    def bandwidth(self) -> float:
        """B/s per device and direction that large collectives reach."""
        return self.bytes_per_second * self.achieved


@dataclass(frozen=True)
class Links:
    """The tiers of a node."""

    inside: Link
    """Between devices of one node (NVL72: of one NVLink domain)."""
    outside: Link
    """From a node to others like it."""


@dataclass(frozen=True)
class Node:
    """Devices that the fastest link joins, with their host."""

    name: str
    device: Device
    devices: int
    host_memory_bytes: int
    """Bytes that the whole node has."""
    cpu_cores: int
    host_op_seconds: float
    """That the host takes to launch one operation, such as torch's Linear."""
    link: Links
    default_for: tuple[str, ...] = ()
    """Devices whose names alone (`8xh100`) mean this node."""
    fill: int | None = None
    """Devices of a node that clusters take; None: all (NVL72: 64, powers of two, as Megatron's recipes do)."""
    sources: Mapping[str, str] = field(default_factory=dict)
    estimates: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes, with equally many of their devices in use."""

    count: int
    node: Node
    used: int
    """Devices of each node that train."""

    @property
    def devices(self) -> int:
        """Devices of the group that train."""
        return self.count * self.used

    def reached(self, link: Link) -> Link:
        """A link out of the node, as each device that trains has it: these share the network cards, over which they
        are spread evenly, with none of those that do not train."""
        sharing = -(-self.used * link.shared_by // self.node.devices)
        if sharing == link.shared_by:
            return link
        return replace(link, bytes_per_second=link.bytes_per_second * link.shared_by / sharing)


@dataclass(frozen=True)
class Cluster:
    """Everything that trains: ranks are counted group by group, node by node."""

    name: str
    groups: tuple[NodeGroup, ...]
    between: Link
    """Between groups of nodes. With one group it is that group's own way out."""

    @property
    def devices(self) -> int:
        """Devices that train."""
        return sum(group.devices for group in self.groups)

    @property
    def nodes(self) -> int:
        """Nodes of all groups."""
        return sum(group.count for group in self.groups)

    def groups_of(self, start: int, stop: int) -> list[int]:
        """Numbers of the groups that have any of the devices from one number to another, not included."""
        found, first = [], 0
        for number, group in enumerate(self.groups):
            if first < stop and first + group.devices > start:
                found.append(number)
            first += group.devices
        return found


_SHARE: Final = Range(0, 1, above=True)
_RATE_SHARE: Final = Range(0, 1.25, above=True)
"""Cards may clock above the frequency that their sheet's peaks are of."""
_RATE: Final = Range(10**10, 10**18)
_COUNT: Final = Range(1, 10**5)
_LINK: Final = {
    "bytes_per_second": Range(10**7, 10**13),
    "latency_seconds": Range(1e-8, 1),
    "achieved": _SHARE,
    "shared_by": Range(1, 1024),
    "reduces": Range(0.1, 100),
    "adds": Range(0.1, 100),
}
DEVICE_RANGES: Final[dict[str, Range]] = {
    "memory_bytes": Range(10**8, 10**13),
    "memory_bandwidth": Range(10**9, 10**15),
    "multiprocessors": _COUNT,
    "cache_bytes": Range(10**4, 10**12),
    "launch_seconds": Range(1e-8, 1e-2),
    "power_watts": Range(1, 10**5),
    "price_per_hour": Range(0, 10**4),
    **{f"peak.{name}": _RATE for name in ("fp32", "tf32", "bf16", "int8", "fp8", "mxfp8", "fp4")},
    **{
        f"achieved.{name}": _RATE_SHARE
        for name in (
            *("fp32", "bf16", "int8", "fp8", "fp8_block", "mxfp8", "nvfp4"),
            *("attention_forward", "attention_backward", "memory"),
        )
    },
    "shape.tile_rows": Range(1, 4096),
    "shape.tile_columns": Range(1, 4096),
    "shape.keys_half": Range(1, 10**5),
    **{f"shape.k_half.{name}": Range(1, 10**5) for name in ("bf16", "fp8", "fp4")},
    "host_link.bytes_per_second": Range(10**8, 10**13),
    "host_link.both_ways": _SHARE,
}
NODE_RANGES: Final[dict[str, Range]] = {
    "devices": Range(1, 4096),
    "host_memory_bytes": Range(10**8, 10**15),
    "cpu_cores": _COUNT,
    "host_op_seconds": Range(1e-8, 1e-2),
    "fill": Range(1, 4096),
    **{f"link.{tier}.{name}": allowed for tier in ("inside", "outside") for name, allowed in _LINK.items()},
}
BETWEEN_RANGES: Final[dict[str, Range]] = {f"link.between.{name}": allowed for name, allowed in _LINK.items()}
"""Possible numbers by dotted key; beyond them a number is a typo or has another unit."""
