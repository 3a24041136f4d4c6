"""Clusters of other sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrimp.errors import PlanError
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.cluster_sizes import nearest_sizes, resized, sizes_between, sizes_like


def test_sizes_grow_from_one_device_to_many_nodes() -> None:
    sizes = list(sizes_like(load_hardware("8xh100"), 128))
    assert [one.devices for one in sizes] == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    assert [one.nodes for one in sizes][3:6] == [1, 2, 3]
    assert [one.devices for one in sizes_like(load_hardware("64xgb200"), 256)][-4:] == [64, 128, 192, 256]
    halves = [(one.nodes, one.groups[0].used) for one in sizes_like(load_hardware("2x4xh100"), 16)]
    assert halves == [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("size", list(sizes_like(load_hardware("h100"), 64)), ids=lambda size: size.name)
def test_the_name_of_a_size_is_its_hardware(size: object) -> None:
    assert load_hardware(size.name) == size  # type: ignore[attr-defined]


def test_sizes_of_a_file_keep_its_name(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text('[[nodes]]\nnode = "dgx-h100"\n', encoding="utf-8")
    cluster = load_hardware(file)
    assert [one.name for one in sizes_like(cluster, 4)] == ["two: h100", "two: 2xh100", "two: 4xh100"]
    four, eight = resized(cluster, 1, 4), resized(cluster, 1, 8)
    assert [one.name for one in sizes_between(four, eight)] == [f"two: {used}xh100" for used in (5, 6, 7)]


def test_all_sizes_between_two_are_named_or_some_of_many() -> None:
    def between(below: str, above: str) -> list[str]:
        return [one.name for one in sizes_between(load_hardware(below), load_hardware(above))]

    assert between("4xh100", "8xh100") == ["5xh100", "6xh100", "7xh100"]
    assert between("8xh100", "2x8xh100") == []
    assert between("4x8xh100", "6x8xh100") == ["5x8xh100"]
    many = between("64x8xh100", "96x8xh100")
    assert many == [f"{nodes}x8xh100" for nodes in range(68, 96, 4)]


def test_the_nearest_below_and_above_are_found() -> None:
    nine = load_hardware("9x8xh100")
    assert [one.nodes for one in nearest_sizes(nine, lambda one: not one.nodes % 4)] == [8, 12]
    five = resized(load_hardware("8xh100"), 1, 5)
    assert [one.devices for one in nearest_sizes(five, lambda one: not one.devices % 4)] == [4, 8]
    seven = resized(five, 1, 7)
    assert [one.devices for one in nearest_sizes(seven, lambda one: one.devices > 8)] == [16]
    assert nearest_sizes(five, lambda one: False) == []


def test_the_nearest_sizes_are_hardware() -> None:
    """A node of 72 devices of which clusters fill 64."""
    for name, divisor, sizes in (("72xgb200", 40, [40, 320]), ("60xgb200", 36, [36, 72])):
        near = nearest_sizes(load_hardware(name), lambda one, of=divisor: one.devices % of == 0)  # type: ignore[misc]
        assert [one.devices for one in near] == sizes
        assert [load_hardware(one.name) for one in near] == near


def test_two_kinds_of_nodes_have_no_other_sizes(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text('[[nodes]]\nnode = "dgx-h100"\n[[nodes]]\nnode = "dgx-a100-80"\n', encoding="utf-8")
    with pytest.raises(PlanError, match="several kinds of nodes has no other sizes"):
        list(sizes_like(load_hardware(str(file))))
