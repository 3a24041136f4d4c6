"""Seconds of groups within a node and across nodes, by hand."""

from __future__ import annotations

import pytest
from published_settings import setting

from scrimp.planner.hardware import Link
from scrimp.planner.layout.collectives import Group, group_of

IN = Link("inside", 400e9, 1e-6, 0.5)
OUT = Link("outside", 50e9, 4e-6, 0.5)
GB = 1e9


def test_a_group_within_a_node() -> None:
    group = Group(8, 8, IN, OUT)
    assert group.gathered(GB) == pytest.approx(GB * 7 / 8 / 200e9 + 7e-6)
    assert group.sent(GB) == pytest.approx(GB / 200e9 + 1e-6)


def test_reductions_take_as_many_times_an_all_gather_as_the_link_says() -> None:
    link = Link("switches that add", 400e9, 1e-6, 0.5, reduces=1.5, adds=1.2)
    group = Group(8, 8, link, OUT)
    gathered = GB * 7 / 8 / 200e9
    assert group.reduced(GB) == pytest.approx(1.5 * gathered + 7e-6)
    assert group.added(GB) == pytest.approx(1.2 * gathered + 7e-6)
    plain = Group(8, 8, IN, OUT)
    assert plain.reduced(GB) == plain.gathered(GB)
    assert plain.added(GB) - 7e-6 == pytest.approx(2 * (plain.gathered(GB) - 7e-6))


def test_a_group_over_nodes_uses_all_of_their_cards() -> None:
    one, eight = Group(4, 1, IN, OUT), Group(32, 8, IN, OUT)
    assert one.gathered(GB) == pytest.approx(GB * 3 / 4 / 25e9 + 3 * 4e-6)
    assert eight.gathered(GB) == pytest.approx(max(GB * 31 / 32 / 200e9, GB * 3 / 4 / 200e9) + 28e-6 + 12e-6)
    assert one.sent(GB) == pytest.approx(GB / 25e9 + 4e-6)


def test_tokens_travel_once_to_a_node_or_to_each_expert() -> None:
    group = Group(32, 8, IN, OUT)
    each = group.travelled(GB, 8, once=False)
    once = group.travelled(GB, 8, once=True)
    assert each == pytest.approx(GB * 8 * 7 / 8 / 200e9 + GB * 8 * 24 / 32 / 25e9 + group.latency)
    copies = 32 * (1 - (31 / 32) ** 8)
    far = 3 * (1 - 0.75**8)
    assert once == pytest.approx(GB * copies * 7 / 8 / 200e9 + GB * far / 25e9 + group.latency)


def test_a_group_of_one_costs_nothing() -> None:
    group = Group(1, 1, IN, OUT)
    assert group.gathered(GB) == group.sent(GB) == group.travelled(GB, 2, once=True) == 0.0


@pytest.mark.parametrize(
    ("ranks", "stride", "in_node"), [(8, 1, 8), (4, 8, 1), (16, 1, 8), (4, 4, 2), (2, 16, 1), (6, 2, 2)]
)
def test_how_many_ranks_of_an_axis_share_a_node_of_eight(ranks: int, stride: int, in_node: int) -> None:
    assert group_of(ranks, stride, 8, IN, OUT).in_node == in_node


def test_an_all_to_all_sends_each_rank_its_part() -> None:
    near, far = Group(8, 8, IN, OUT), Group(16, 8, IN, OUT)
    assert near.exchanged(GB) == pytest.approx(GB * 7 / 8 / 200e9 + near.latency)
    assert far.exchanged(GB) == pytest.approx(GB * 8 / 16 / 25e9 + far.latency)


def test_one_device_of_a_node_has_its_network_card_alone() -> None:
    alone, all_train = (
        setting(hardware=name, fsdp=16).groups["fsdp"] for name in ("16x1xrtx4090", "2x8xrtx4090")
    )
    assert alone.outside.bytes_per_second == pytest.approx(12.5e9)
    assert all_train.outside.bytes_per_second == pytest.approx(12.5e9 / 8)
    # A node sends as fast by one of them as by all.
    assert alone.outside.bandwidth == pytest.approx(all_train.in_node * all_train.outside.bandwidth)
