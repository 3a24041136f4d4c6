"""Hardware by name or file: `h100`, `8xh100`, `128x8xh100`, or a TOML file with several kinds of nodes.

Problem  Planning for hardware that is not here needs its numbers, and a short way to say how many of which.
Method   A device has one node that its name alone means (`default_for` in nodes/)::

             h100         one device
             8xh100       one node, 8 of its devices in use
             64xh100      8 nodes, all devices in use
             128x8xh100   128 nodes with 8 devices each
             64xgb200     one NVLink domain of 72, 64 in use; 256xgb200 is 4 of them (`fill`)

         A file lists nodes and how many of each, by a shipped name or written out, and the link between
         different ones::

             name = "two rooms"
             [[nodes]]
             count = 4
             node = "dgx-h100"
             [[nodes]]
             count = 2
             node = { name = "old", device = "a100-80", devices = 4, ... }
             [link.between]
             name = "Ethernet"
             bytes_per_second = 3.1e9
             latency_seconds = 20e-6
             achieved = 0.8

         The file of a node alone is one such node, all of its devices in use.
Limits   Two tiers of links in a node group, and one between groups. Devices of one node are equal.
Checked  tests/planner/hardware/test_read.py
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from scrimp.config import nearest_word
from scrimp.errors import ConfigError
from scrimp.planner.hardware.schema import (
    BETWEEN_RANGES,
    DEVICE_RANGES,
    NODE_RANGES,
    Cluster,
    Device,
    Kind,
    Link,
    Node,
    NodeGroup,
)
from scrimp.planner.hardware.tables import Reader, build, check_about, missing, read_table, unknown

_HERE: Final = Path(__file__).parent
DEVICES: Final[tuple[str, ...]] = tuple(sorted(file.stem for file in (_HERE / "devices").glob("*.toml")))
"""Names of the devices that ship."""
NODES: Final[tuple[str, ...]] = tuple(sorted(file.stem for file in (_HERE / "nodes").glob("*.toml")))
"""Names of the nodes that ship."""
_MOST: Final = 2**20
"""Devices of a cluster; none has more."""
_KINDS: Final[tuple[Kind, ...]] = ("int8", "fp8", "fp8_block", "mxfp8", "nvfp4")
_UNITS: Final[dict[Kind, str]] = {"int8": "int8", "nvfp4": "fp4"}
"""Peaks of the units that run them; of all others fp8's."""


def load_device(name: str | Path, relative_to: Path | None = None, where: str | None = None) -> Device:
    """A device by its name, or from a TOML file.

    Args:
        relative_to: folder that a file's path starts from.
        where: the key and the file that name it, for an error.
    """
    file = _file(name, relative_to)
    if file is not None:
        return _device(file)
    if name not in DEVICES:
        raise _no_such("device", str(name), DEVICES, where)
    return _shipped_device(str(name))


def load_node(name: str) -> Node:
    """A node that ships, by its name."""
    if name not in NODES:
        raise _no_such("node", name, NODES)
    return _shipped_node(name)


def load_hardware(name: str | Path) -> Cluster:
    """The cluster that a name (`8xh100`) or a TOML file says."""
    file = _file(name, None)
    return _cluster(file) if file is not None else _by_name(str(name).strip().lower())


def is_file(name: str | Path) -> bool:
    """Whether hardware is named by its file, not as something that ships."""
    return isinstance(name, Path) or name.endswith(".toml") or "/" in name


def _file(name: str | Path, relative_to: Path | None) -> Path | None:
    """The file that is meant, or None for a name of something that ships."""
    if not is_file(name):
        return None
    return Path(name) if relative_to is None else relative_to / name


@cache
def _shipped_device(name: str) -> Device:
    return _device(_HERE / "devices" / f"{name}.toml")


@cache
def _shipped_node(name: str) -> Node:
    file = _HERE / "nodes" / f"{name}.toml"
    return _node(read_table(file), str(file), file.parent)


@cache
def _default_nodes() -> dict[str, str]:
    """Node that each device's name alone means."""
    return {device: node for node in NODES for device in _shipped_node(node).default_for}


def _device(file: Path) -> Device:
    table, where = read_table(file), str(file)
    found = build(Device, table, Reader(where, DEVICE_RANGES, {}))
    check_about(table, where)
    for kind in _KINDS:
        share, unit = getattr(found.achieved, kind), found.unit(kind)
        if share is not None and unit is None:
            raise ConfigError(
                f"achieved.{kind} in {where} is a share of units that the device does not have",
                got=share,
                expected=f"a rate peak.{_UNITS.get(kind, 'fp8')} beside it",
                do=f"remove achieved.{kind}, or add that rate under [peak]",
            )
    for width, kind in (("int8", "int8"), ("fp8", "fp8"), ("fp4", "nvfp4")):
        if getattr(found.peak, width) is not None and getattr(found.achieved, kind) is None:
            raise missing(f"achieved.{kind}", where, f"the share of peak.{width} that products reach")
    return found


def _node(table: Any, where: str, folder: Path, device: str | None = None, prefix: str = "") -> Node:
    """A node from its table; `device` stands in for the one that the table names."""

    def read_device(value: object) -> Device:
        if not isinstance(value, str):
            raise ConfigError(
                f"{prefix}device in {where} is no name",
                got=repr(value)[:80],
                expected="a device or a TOML file",
            )
        return load_device(device or value, folder, f"{prefix}device in {where}")

    ranges = {prefix + key: allowed for key, allowed in NODE_RANGES.items()}
    found = build(Node, table, Reader(where, ranges, {f"{prefix}device": read_device}), prefix)
    check_about(table, where)
    if found.fill is not None and found.fill > found.devices:
        raise ConfigError(
            f"{prefix}fill in {where} is more than the node has",
            got=found.fill,
            expected=f"at most devices = {found.devices}",
        )
    return found


def _by_name(name: str) -> Cluster:
    match = re.fullmatch(r"(?:(\d{1,7})x)?(?:(\d{1,7})x)?([a-z].*)", name)
    if match is None:
        raise ConfigError(
            "hardware is neither a name nor a file",
            got=repr(name),
            expected="h100, 8xh100, 128x8xh100, or a file that ends in .toml",
            do=f"devices that ship: {', '.join(DEVICES)}",
        )
    if match[3] not in DEVICES:
        raise _no_such("device", match[3], DEVICES, name)
    device = load_device(match[3])
    node = _shipped_node(_default_nodes()[match[3]])
    node = node if node.device.name == device.name else replace(node, device=device)
    counts = [int(number) for number in (match[1], match[2]) if number is not None]
    if 0 in counts:
        raise ConfigError("hardware has no devices", got=repr(name), expected="counts of 1 or more")
    if math.prod(counts) > _MOST:
        raise ConfigError("hardware has too many devices", got=repr(name), expected=f"at most {_MOST:,}")
    if len(counts) == 2:
        group = NodeGroup(counts[0], node, _at_most(counts[1], node, name))
    else:
        group = _fill(counts[0] if counts else 1, node, name)
    return Cluster(name, (group,), node.link.outside)


def _at_most(used: int, node: Node, name: str) -> int:
    if used > node.devices:
        raise ConfigError(
            f"{name} has more devices in a node than {node.name}",
            got=used,
            expected=f"at most {node.devices}",
            do="describe other nodes in a TOML file: [[nodes]] with count and node = { ... }",
        )
    return used


def _fill(devices: int, node: Node, name: str) -> NodeGroup:
    """So many devices in as few nodes as hold them, equally many in each."""
    if devices <= node.devices:
        return NodeGroup(1, node, devices)
    each = node.fill or node.devices
    if devices % each:
        below, above = devices // each * each, (devices // each + 1) * each
        raise ConfigError(
            f"{name} leaves a node of {node.name} partly used",
            got=f"{devices} devices",
            expected=f"a multiple of {each}, such as {below} or {above}",
            do=f"say how many of each node: NODESxDEVICESx{node.device.name}",
        )
    return NodeGroup(devices // each, node, each)


def _cluster(file: Path) -> Cluster:
    table, where = read_table(file), str(file)
    if "nodes" not in table and "device" in table:
        node = _node(table, where, file.parent)
        return Cluster(node.name, (NodeGroup(1, node, node.devices),), node.link.outside)
    if "nodes" not in table and "peak" in table:
        raise ConfigError(
            f"{where} describes a device, and not where it is",
            expected=f'a node, with `device = "{file.name}"`, its host memory and its links',
            do="write that beside it, as docs/planner.md shows, and name that file",
        )
    known = ["name", "nodes", "link"]
    for key in table:
        if key not in known:
            raise unknown(key, known, where)
    listed = table.get("nodes")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(
            f"nodes in {where} is no list of nodes" if "nodes" in table else f"nodes is missing in {where}",
            expected='one [[nodes]] or more, each with `count = 4` and `node = "dgx-h100"`',
            do=f"nodes that ship: {', '.join(NODES)}",
        )
    groups = tuple(_group(entry, number, where, file.parent) for number, entry in enumerate(listed))
    between = _between(table.get("link", {}), where)
    slowest = min((group.node.link.outside for group in groups), key=lambda link: link.bandwidth)
    name = table.get("name", file.stem)
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigError(
            f"name in {where} is no text of one line", got=repr(name)[:80], expected="a name for the cluster"
        )
    found = Cluster(name, groups, between or slowest)
    if found.devices > _MOST:
        raise ConfigError(
            f"nodes in {where} have too many devices", got=f"{found.devices:,}", expected=f"at most {_MOST:,}"
        )
    return found


def _group(entry: Any, number: int, where: str, folder: Path) -> NodeGroup:
    prefix = f"nodes[{number}]."
    if not isinstance(entry, dict):
        raise ConfigError(f"nodes[{number}] in {where} is no table", got=repr(entry)[:80])
    known = [prefix + name for name in ("count", "node", "device", "devices")]
    for name in entry:
        if prefix + name not in known:
            raise unknown(prefix + name, known, where)
    if "node" not in entry:
        raise missing(f"{prefix}node", where, f"a table, or one of {', '.join(NODES)}")
    device = entry.get("device")
    if device is not None and not isinstance(device, str):
        raise ConfigError(f"{prefix}device in {where} is no name", got=repr(device)[:80], expected="a device")
    wanted = entry["node"]
    if isinstance(wanted, str):
        node = _named_node(wanted, folder, f"{prefix}node in {where}")
        if device is not None:
            node = replace(node, device=load_device(device, folder, f"{prefix}device in {where}"))
    else:
        node = _node(wanted, where, folder, device, f"{prefix}node.")
    count = _whole(entry.get("count", 1), f"{prefix}count", where, _MOST)
    used = _whole(entry.get("devices", node.fill or node.devices), f"{prefix}devices", where, node.devices)
    return NodeGroup(count, node, used)


def _named_node(name: str, folder: Path, where: str) -> Node:
    """A node that ships, or from a file."""
    if is_file(name):
        file = folder / name
        return _node(read_table(file), str(file), file.parent)
    if name not in NODES:
        raise _no_such("node", name, NODES, where)
    return load_node(name)


def _between(link: Any, where: str) -> Link | None:
    if not isinstance(link, dict):
        raise ConfigError(f"link in {where} is no table", got=repr(link)[:80], expected="[link.between]")
    for name in link:
        if name != "between":
            raise unknown(f"link.{name}", ["link.between"], where)
    if "between" not in link:
        return None
    return build(Link, link["between"], Reader(where, BETWEEN_RANGES, {}), "link.between.")


def _whole(value: object, key: str, where: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(
            f"{key} in {where} is no count", got=repr(value)[:80], expected=f"a whole number, 1 to {most:,}"
        )
    return value


def _no_such(what: str, name: str, known: tuple[str, ...], where: str | None = None) -> ConfigError:
    sizes = [one for one in known if one.startswith(f"{name}-")]
    near = sizes[-1] if sizes else nearest_word(name, known)
    return ConfigError(
        f"{where + ': ' if where else ''}no {what} of that name ships",
        got=repr(name),
        expected=f"one of {', '.join(known)}, or a TOML file",
        do=f"did you mean {near!r}?" if near else None,
    )
