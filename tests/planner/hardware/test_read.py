"""Hardware by name and by file: what ships is whole and sourced, names mean what they say, mistakes are refused.

Oracles: the profiler's table of peak rates, written independently; links crossed by spans, counted pair by pair.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import scrimp.planner.hardware.schema as schema
from scrimp.config import flatten
from scrimp.errors import ConfigError
from scrimp.planner.hardware import DEVICES, NODES, Link, load_device, load_hardware, load_node
from scrimp.profiler.peaks import device_peaks

SHIPPED = Path(schema.__file__).parent
FILES = sorted(SHIPPED.glob("*/*.toml"))
ASKED = {
    *("h100", "h100-96", "h200", "b200", "b300", "gb200", "gb300", "a100-40", "a100-80", "l40s", "dgxspark"),
    *("rtx3090", "rtx4060ti", "rtx4090", "rtx5060ti", "rtx5090", "rtxpro6000", "mi250x"),
    *("mi300x", "mi325x", "mi350x", "mi355x"),
}
NODE = {
    "name": "my node",
    "device": "a100-80",
    "devices": 4,
    "host_memory_bytes": 500_000_000_000,
    "cpu_cores": 32,
    "host_op_seconds": 13.5e-6,
    "link": {
        "inside": {"name": "NVLink", "bytes_per_second": 300e9, "latency_seconds": 4e-6, "achieved": 0.8},
        "outside": {"name": "Ethernet", "bytes_per_second": 3e9, "latency_seconds": 2e-5, "achieved": 0.9},
    },
}


def toml(value: Any) -> str:
    """A value as TOML writes it, tables inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def write(folder: Path, name: str, table: dict[str, Any]) -> Path:
    """A TOML file of that table."""
    file = folder / name
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in table.items()))
    return file


def changed(table: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """A deep copy with the value at a dotted key; None removes it."""
    copy = tomllib.loads("".join(f"{name} = {toml(item)}\n" for name, item in table.items()))
    at = copy
    *way, last = key.split(".")
    for name in way:
        at = at[name]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return copy


def table_of(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text())


def test_what_was_asked_for_ships() -> None:
    assert set(DEVICES) == ASKED
    assert {load_device(name).name for name in DEVICES} == set(DEVICES)
    assert {load_node(name).name for name in NODES} == set(NODES)


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_alone_is_a_cluster(name: str) -> None:
    cluster = load_hardware(name)
    (group,) = cluster.groups
    assert (cluster.devices, group.node.device) == (1, load_device(name))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_number_has_a_source_or_is_called_an_estimate(file: Path) -> None:
    table = table_of(file)
    told = {*table["sources"], *table["estimates"]}

    def numbers(at: dict[str, Any], prefix: str = "") -> list[str]:
        found = []
        for name, value in at.items():
            if isinstance(value, dict) and name != "sources":
                found += numbers(value, f"{prefix}{name}.")
            elif isinstance(value, int | float):
                found.append(prefix + name)
        return found

    untold = [
        key for key in numbers(table) if not any(key == name or key.startswith(f"{name}.") for name in told)
    ]
    assert untold == []


@pytest.mark.parametrize(
    ("kind", "ranges"),
    [("device", schema.DEVICE_RANGES), ("node", schema.NODE_RANGES)],
    ids=["device", "node"],
)
def test_every_number_that_can_be_written_has_a_range(kind: str, ranges: dict[str, Any]) -> None:
    if kind == "device":
        written = {
            key for name in DEVICES for key, value in flatten(load_device(name)).items() if number(value)
        }
        # No shipped file has a rate of integers; a file of one's own may.
        assert written.isdisjoint({"peak.int8", "achieved.int8"})
        written |= {"peak.int8", "achieved.int8"}
    else:
        found = {key for name in NODES for key, value in flatten(load_node(name)).items() if number(value)}
        written = {key for key in found if not key.startswith("device.")}
    assert written == set(ranges)


def number(value: object) -> bool:
    return isinstance(value, int | float)


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h100-96", "NVIDIA H100"),
        ("h200", "NVIDIA H200"),
        ("b200", "NVIDIA B200"),
        ("a100-40", "NVIDIA A100-SXM4-40GB"),
        ("a100-80", "NVIDIA A100-SXM4-80GB"),
        ("l40s", "NVIDIA L40S"),
        ("rtx5090", "NVIDIA GeForce RTX 5090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("rtx3090", "NVIDIA GeForce RTX 3090"),
    ],
)
def test_peaks_agree_with_the_profiler(name: str, known_as: str) -> None:
    peak, rates = load_device(name).peak, device_peaks(torch.device("cuda"), known_as).flops_per_s
    found = {width: getattr(peak, width) for width in ("bf16", "fp32", "fp8", "fp4")}
    rates = {width: rate for width, rate in rates.items() if width != "int8"}  # in no shipped file
    assert {width: rate for width, rate in found.items() if rate} == pytest.approx(rates)


def test_the_h100_stands_where_it_was_measured() -> None:
    device = load_device("h100")
    assert device.rate("bf16") == pytest.approx(798e12, rel=0.01)
    assert device.bandwidth == pytest.approx(3.0e12, rel=0.02)
    assert device.memory_bytes < 81_559 * 2**20
    assert device.rate("nvfp4") is None
    assert device.rate("mxfp8") is None
    whole = device.rate("fp8")
    assert whole is not None
    assert device.rate("fp8", device.k_half("fp8")) == pytest.approx(whole / 2)


def test_eight_bits_run_on_the_faster_instruction() -> None:
    card = load_device("rtx5090")
    assert card.unit("fp8") == card.peak.mxfp8 == pytest.approx(2 * (card.peak.fp8 or math.nan))


@pytest.mark.parametrize(
    ("name", "nodes", "used", "node"),
    [
        ("h100", 1, 1, "dgx-h100"),
        ("8xh100", 1, 8, "dgx-h100"),
        ("2xH100", 1, 2, "dgx-h100"),
        ("64xh100", 8, 8, "dgx-h100"),
        ("128x8xh100", 128, 8, "dgx-h100"),
        ("2x4xa100-40", 2, 4, "dgx-a100-40"),
        ("64xgb200", 1, 64, "gb200-nvl72"),
        ("72xgb200", 1, 72, "gb200-nvl72"),
        ("256xgb200", 4, 64, "gb200-nvl72"),
        ("2x72xgb300", 2, 72, "gb300-nvl72"),
        ("3072xmi250x", 384, 8, "frontier"),
        ("2xdgxspark", 2, 1, "dgx-spark"),
    ],
)
def test_names_say_how_many_of_what(name: str, nodes: int, used: int, node: str) -> None:
    cluster = load_hardware(name)
    (group,) = cluster.groups
    assert (group.count, group.used, group.node.name) == (nodes, used, node)
    assert (cluster.nodes, cluster.devices) == (nodes, nodes * used)


def test_a_card_with_other_memory_stands_in_the_same_node() -> None:
    (group,) = load_hardware("8xh100-96").groups
    assert (group.node.name, group.node.device.name) == ("dgx-h100", "h100-96")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("8xh10", "did you mean 'h100'"),
        ("8xa100", "did you mean 'a100-80'"),
        ("rtx4090ti", "one of a100-40"),
        ("h100x8", "no device"),
        ("12xh100", "a multiple of 8, such as 8 or 16"),
        ("144xgb200", "a multiple of 64, such as 128 or 192"),
        ("0xh100", "counts of 1 or more"),
        ("4x0xh100", "counts of 1 or more"),
        ("128x9xh100", "at most 8"),
        ("1000000x8xh100", "at most 1,048,576"),
        ("2000000xh100", "at most 1,048,576"),
        ("99999999999xh100", "neither a name nor a file"),
        ("-8xh100", "neither a name nor a file"),
        ("", "neither a name nor a file"),
    ],
)
def test_other_names_are_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_hardware(name)


H100 = table_of(SHIPPED / "devices" / "h100.toml")
BAD_DEVICES: list[tuple[str, object, str]] = [
    ("power_wats", 700, "power_watts"),
    ("peak.bf61", 9e14, "peak.bf16"),
    ("achieved.int4", 0.5, "one of achieved.fp32"),
    ("achieved.int8", 0.5, "a rate peak.int8 beside it"),
    ("peak.int8", 2e15, "achieved.int8"),
    ("power_watts", None, "is missing"),
    ("peak", None, "is missing"),
    ("peak.bf16", None, "is missing"),
    ("peak", 9e14, "no table"),
    ("power_watts", "700", "without quotes"),
    ("power_watts", -700, "1 to 100,000"),
    ("power_watts", 0, "1 to 100,000"),
    ("power_watts", True, "a number"),
    ("power_watts", math.nan, "nan"),
    ("memory_bandwidth", math.inf, "inf"),
    ("memory_bandwidth", 3350.0, "1,000,000,000 to"),
    ("memory_bytes", 10**14, "10,000,000,000,000"),
    ("memory_bytes", 80.0e9, "write 80000000000"),
    ("multiprocessors", 132.5, "a whole number"),
    ("launch_seconds", 5.0, "0.01"),
    ("price_per_hour", -1.0, "0 to 10,000"),
    ("peak.bf16", 989.4, "peak.bf16"),
    ("achieved.bf16", 1.3, "at most 1.25"),
    ("achieved.memory", 0.0, "above 0"),
    ("achieved.fp8", None, "achieved.fp8"),
    ("achieved.nvfp4", 0.5, "peak.fp4"),
    ("peak.fp8", None, "achieved.fp8"),
    ("shape.tile_rows", 0, "1 to 4,096"),
    ("shape.k_half.bf16", -3, "1 to 100,000"),
    ("host_link.both_ways", 2.0, "at most 1"),
    ("name", " ", "is empty"),
    ("sources", ["data sheet"], "table of texts"),
    ("sources", {"power_wats": "x"}, "power_watts"),
    ("estimates", "power_watts", "list of names"),
    ("estimates", ["peak.bf61"], "peak.bf16"),
]


@pytest.mark.parametrize(("key", "value", "says"), BAD_DEVICES)
def test_a_wrong_device_file_is_refused_by_file_and_key(
    tmp_path: Path, key: str, value: object, says: str
) -> None:
    file = write(tmp_path, "card.toml", changed(H100, key, value))
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        load_device(file)
    assert str(file) in str(refused.value)
    assert key.rpartition(".")[2] in str(refused.value)


def test_a_device_file_as_it_ships_is_read_elsewhere(tmp_path: Path) -> None:
    assert load_device(write(tmp_path, "card.toml", H100)) == load_device("h100")
    assert load_device("card.toml", tmp_path) == load_device("h100")


@pytest.mark.parametrize("content", [b"power_watts = \n", b"\xff\xfe", b"a = " + b"[" * 5000])
def test_what_is_no_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "card.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_device(file)


@pytest.mark.parametrize("load", [load_device, load_hardware])
def test_files_that_are_not_there_are_refused(tmp_path: Path, load: Any) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            load(path)


def test_several_kinds_of_nodes_and_a_link_between(tmp_path: Path) -> None:
    link = {"name": "long cable", "bytes_per_second": 1e9, "latency_seconds": 1e-3, "achieved": 0.5}
    listed = [{"count": 2, "node": "dgx-h100"}, {"count": 3, "node": NODE, "devices": 2}]
    cluster = load_hardware(write(tmp_path, "mine.toml", {"nodes": listed, "link": {"between": link}}))
    assert (cluster.name, cluster.devices, cluster.nodes) == ("mine", 22, 5)
    assert [group.node.device.name for group in cluster.groups] == ["h100", "a100-80"]
    assert cluster.between == Link("long cable", 1e9, 1e-3, 0.5)


@pytest.mark.parametrize(
    ("hardware", "times"),
    [
        ("2x8xrtx4090", 1.0),
        ("2x4xrtx4090", 2.0),
        ("2x1xrtx4090", 8.0),
        ("2x4xrtxpro6000", 2.0),
        ("2x6xrtxpro6000", 1.0),
        ("2x3xmi250x", 2.0),
        ("2x4xh100", 1.0),
    ],
)
def test_devices_that_do_not_train_leave_the_others_their_network_card(hardware: str, times: float) -> None:
    group = load_hardware(hardware).groups[0]
    link = group.node.link.outside
    assert group.reached(link).bytes_per_second == pytest.approx(times * link.bytes_per_second)


def test_without_a_link_between_the_slowest_way_out_counts(tmp_path: Path) -> None:
    listed = [{"count": 1, "node": "dgx-h100"}, {"count": 1, "node": NODE}]
    assert load_hardware(write(tmp_path, "mine.toml", {"nodes": listed})).between.name == "Ethernet"


def test_the_files_of_the_guide_are_read(tmp_path: Path) -> None:
    """A node, whose file another one names, too; and a cluster."""
    page = (Path(__file__).parents[3] / "docs" / "planner.md").read_text(encoding="utf-8")
    texts = re.findall(r"```toml\n(.*?)```", page.partition("## Hardware files")[2], re.DOTALL)
    for name, text in zip(("node", "cluster"), texts, strict=True):
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    (group,) = load_hardware(tmp_path / "node.toml").groups
    assert (group.node.device.name, group.count, group.used) == ("rtx4090", 1, 2)
    assert [one.devices for one in load_hardware(tmp_path / "cluster.toml").groups] == [32, 8]
    (tmp_path / "three.toml").write_text('[[nodes]]\nnode = "node.toml"\ncount = 3\n', encoding="utf-8")
    assert load_hardware(tmp_path / "three.toml").devices == 6
    (tmp_path / "below").mkdir()
    (tmp_path / "node.toml").rename(tmp_path / "below" / "node.toml")
    (tmp_path / "mine.toml").write_bytes((SHIPPED / "devices" / "rtx5090.toml").read_bytes())
    other = '[[nodes]]\nnode = "below/node.toml"\ndevice = "mine.toml"\n'
    (tmp_path / "other.toml").write_text(other, encoding="utf-8")
    assert load_hardware(tmp_path / "other.toml").groups[0].node.device.name == "rtx5090"


def test_files_as_they_ship_are_read_elsewhere(tmp_path: Path) -> None:
    """A node is a cluster of one; a device has no host and no links."""
    for part, name in (("nodes", "dgx-h100"), ("devices", "h100")):
        (tmp_path / f"{name}.toml").write_bytes((SHIPPED / part / f"{name}.toml").read_bytes())
    assert load_hardware(tmp_path / "dgx-h100.toml").groups == load_hardware("8xh100").groups
    with pytest.raises(ConfigError, match=r"h100\.toml describes a device, and not where it is"):
        load_hardware(tmp_path / "h100.toml")


def test_a_file_names_devices_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "card.toml", changed(H100, "name", "my card"))
    listed = [{"node": changed(NODE, "device", "card.toml")}, {"node": "dgx-h200", "device": "card.toml"}]
    cluster = load_hardware(write(tmp_path, "mine.toml", {"name": "two", "nodes": listed}))
    assert [group.node.device.name for group in cluster.groups] == ["my card", "my card"]


ENTRY: dict[str, Any] = {"count": 2, "node": "dgx-h100"}
BAD_CLUSTERS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "nodes", "dgx-h100"),
    ({"nodes": []}, "nodes", "[[nodes]]"),
    ({"nodes": {}}, "nodes", "no list"),
    ({"nodes": ["dgx-h100"]}, "nodes[0]", "no table"),
    ({"node": [ENTRY]}, "node", "did you mean nodes"),
    ({"nodes": [ENTRY, {"cuont": 2, "node": "dgx-h100"}]}, "nodes[1].cuont", "nodes[1].count"),
    ({"nodes": [{"count": 2}]}, "nodes[0].node", "dgx-h100"),
    ({"nodes": [{**ENTRY, "node": "dgx-h10"}]}, "nodes[0].node", "did you mean 'dgx-h"),
    ({"nodes": [{**ENTRY, "device": "h10O"}]}, "nodes[0].device", "did you mean 'h"),
    ({"nodes": [{**ENTRY, "count": 0}]}, "nodes[0].count", "a whole number"),
    ({"nodes": [{**ENTRY, "count": 2.0}]}, "nodes[0].count", "a whole number"),
    ({"nodes": [{**ENTRY, "count": True}]}, "nodes[0].count", "a whole number"),
    ({"nodes": [{**ENTRY, "devices": 9}]}, "nodes[0].devices", "1 to 8"),
    ({"nodes": [{**ENTRY, "count": 2**20}]}, "nodes", "too many devices"),
    ({"nodes": [{**ENTRY, "device": 3}]}, "nodes[0].device", "no name"),
    ({"nodes": [{"node": changed(NODE, "device", 3)}]}, "nodes[0].node.device", "no name"),
    ({"nodes": [{"node": changed(NODE, "cpu_cores", -1)}]}, "nodes[0].node.cpu_cores", "1 to 100,000"),
    ({"nodes": [{"node": changed(NODE, "fill", 9)}]}, "nodes[0].node.fill", "at most devices = 4"),
    (
        {"nodes": [{"node": changed(NODE, "link.inside.achieved", 1.5)}]},
        "nodes[0].node.link.inside.achieved",
        "at most 1",
    ),
    (
        {"nodes": [{"node": changed(NODE, "link.outside", None)}]},
        "nodes[0].node.link.outside",
        "is missing",
    ),
    (
        {"nodes": [{"node": changed(NODE, "link.inside.bytes_per_secnd", 1e9)}]},
        "nodes[0].node.link.inside.bytes_per_secnd",
        "did you mean nodes[0].node.link.inside.bytes_per_second",
    ),
    ({"nodes": [ENTRY], "link": 3}, "link", "no table"),
    ({"nodes": [ENTRY], "link": {"betwen": {}}}, "link.betwen", "link.between"),
    ({"nodes": [ENTRY], "link": {"between": {"name": "x"}}}, "link.between.bytes_per_second", "is missing"),
    ({"nodes": [ENTRY], "name": 3}, "name", "no text"),
]


@pytest.mark.parametrize(("table", "key", "says"), BAD_CLUSTERS)
def test_a_wrong_cluster_file_is_refused_by_file_and_key(
    tmp_path: Path, table: dict[str, Any], key: str, says: str
) -> None:
    file = write(tmp_path, "mine.toml", table)
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        load_hardware(file)
    assert str(file) in str(refused.value)
    assert key in str(refused.value)


def test_a_name_that_would_colour_a_terminal_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "red\\u001b[31m"\n[[nodes]]\nnode = "dgx-h100"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no text of one line - got 'red\\x1b\[31m'"):
        load_hardware(file)
