"""What carries the messages of each axis of a layout, where links are unequal.

Problem  Clusters of different networks have one network in common, often the slowest; a library that serves all ranks
         alike then uses that one everywhere, or finds none.
Method   Each axis of the mesh has process groups of its own, so each can have its own back end::

             layout.backends = dp=gloo,fsdp=nccl:IB,pp=nccl:Socket

         After the colon stands a network of NCCL (`NCCL_NET` by axis: IB, Socket, or a plugin's name). Axes that are
         not named have what NCCL or gloo find by themselves.
Limits   Between CUDA devices gloo adds up and broadcasts, and does nothing else: only copies of the model (dp) can use
         it. FSDP2 shards over fsdp and cp as one axis: it goes by fsdp's back end, rings by cp's. Shards of routed
         experts go by dp's where there are copies, tokens to experts by ep's. What Muon and GaLore put together
         and what `outer.every` exchanges go by none of them. NCCL's part was not run on several GPUs.
Source   Holmes, arXiv 2312.03549: automatic NIC selection by communication group
Checked  tests/config/test_axis_backends.py; tests/runtime/parallel/test_groups_of_axes.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from scrimp.errors import ConfigError

AXES = ("pp", "dp", "fsdp", "cp", "tp", "ep")
_KNOWN = ("gloo", "nccl")
_SERVED = {"fsdp": ("fsdp", "cp"), "ep": ("ep", "etp")}
"""Axes whose ranks an axis' back end serves together."""


class Degrees(Protocol):
    """A layout, as far as this asks it."""

    @property
    def backends(self) -> str | None: ...


@dataclass(frozen=True)
class AxisBackend:
    """One library, and of NCCL its network."""

    name: str
    network: str | None = None
    """None: as it finds."""


def axis_backends(text: str | None) -> Mapping[str, AxisBackend]:
    """The back end of each axis that is named.

    Raises:
        ConfigError: this is no list of axes and back ends.
    """
    found: dict[str, AxisBackend] = {}
    for part in text.split(",") if text else ():
        axis, value = (word.strip() for word in part.partition("=")[::2])
        name, colon, network = value.partition(":")
        if axis not in AXES or axis in found or name not in _KNOWN or (colon and not network):
            raise ConfigError(
                "layout.backends names no axis and back end",
                got=f"{part.strip()!r} in {text!r}",
                expected=f"each of {', '.join(AXES)} once at most, as dp=gloo, or fsdp=nccl:IB",
                do="write AXIS=gloo, AXIS=nccl or AXIS=nccl:NETWORK, with commas between",
            )
        found[axis] = AxisBackend(name, network or None)
    return found


def check_backends(layout: Degrees, device_type: str) -> None:
    """Refuse back ends that an axis does not have, or cannot use on this device.

    Args:
        layout: with its degrees decided.
        device_type: cpu or cuda.

    Raises:
        ConfigError: with the axis.
    """
    for axis, backend in axis_backends(layout.backends).items():
        degree = math.prod(getattr(layout, one) for one in _SERVED.get(axis, (axis,)))
        on_cuda = device_type == "cuda"
        is_gloo = backend.name == "gloo"
        reasons = (
            (degree == 1, f"layout.{' x layout.'.join(_SERVED.get(axis, (axis,)))} is 1, and sends nothing"),
            (
                on_cuda and is_gloo and axis != "dp",
                "between CUDA devices gloo serves copies of the model (dp) alone",
            ),
            (not on_cuda and not is_gloo, "NCCL is for CUDA devices"),
            (is_gloo and backend.network is not None, "a network is chosen for nccl alone"),
        )
        for reason in (reason for holds, reason in reasons if holds):
            raise ConfigError(
                f"layout.backends cannot be carried out for {axis}: {reason}",
                got=f"{layout.backends} on {device_type}",
                do=f"leave {axis} out of layout.backends, or change its back end",
            )
