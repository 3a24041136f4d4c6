"""Sizes of stages, beside all sizes that there are; and clusters of several kinds of nodes."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from published_settings import LLAMA_8B, setting

from scrimp.config.resolved import ResolvedLayout
from scrimp.planner.hardware import Cluster, load_hardware
from scrimp.planner.layout.block_choices import Blocks
from scrimp.planner.layout.predict import least_step_seconds, predict, rank_seconds
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import search
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import software
from scrimp.planner.layout.stage_sizes import improved, in_proportion
from scrimp.planner.layout.stages import blocks_of_stages

WIDE_HEAD = dataclasses.replace(LLAMA_8B, layers=12, vocab_size=512_000)
MIXED = """
[link.between]
name = "Ethernet, 100 Gb/s"
bytes_per_second = 12_500_000_000
latency_seconds = 2e-5
achieved = 0.8

[[nodes]]
count = 1
node = "dgx-a100-80"

[[nodes]]
count = 1
node = "dgx-h100"
"""


def solved(one: Setting) -> tuple[Setting, float] | None:
    found = Blocks(one, None).solve()
    return (found, predict(found).step_seconds) if found else None


def with_sizes(one: Setting, sizes: tuple[int, ...]) -> Setting:
    layout = dataclasses.replace(one.layout, stages=",".join(map(str, sizes)))
    return dataclasses.replace(one, layout=layout, blocks=())


def test_the_last_stage_has_fewer_blocks_where_the_head_is_wide() -> None:
    like = setting(WIDE_HEAD, "4xh100", pp=4, fsdp=1, global_batch=32)
    start = solved(like)
    assert start is not None
    found, seconds = improved(*start, solved)
    sizes = [len(blocks) for blocks in blocks_of_stages(found)]
    assert sum(sizes) == 12
    assert sizes[-1] < min(sizes[:-1])
    every = [
        one[1]
        for sizes in itertools.product(range(1, 7), repeat=4)
        if sum(sizes) == 12 and (one := solved(with_sizes(like, sizes))) is not None
    ]
    assert seconds == pytest.approx(min(every), rel=5e-3)
    assert seconds < start[1] * 0.95


@pytest.fixture
def mixed(tmp_path: Path) -> Cluster:
    file = tmp_path / "mixed.toml"
    file.write_text(MIXED, encoding="utf-8")
    return load_hardware(str(file))


def on(cluster: Cluster, **layout: int) -> Setting:
    like = setting(dataclasses.replace(LLAMA_8B, layers=32), "16xh100", global_batch=64)
    degrees = {"dp": 1, "fsdp": 16 // layout.get("pp", 1), "tp": 1, "cp": 1, "virtual": 1, **layout}
    return dataclasses.replace(like, cluster=cluster, layout=ResolvedLayout(**degrees))  # type: ignore[arg-type]


def test_stages_are_as_large_as_their_devices_are_fast(mixed: Cluster) -> None:
    one = on(mixed, pp=4, zero=1)
    assert [one.at(rank).device.name for rank in range(4)] == ["a100-80", "a100-80", "h100", "h100"]
    found = dataclasses.replace(one, layout=in_proportion(one))
    sizes = [len(blocks) for blocks in blocks_of_stages(found)]
    assert sum(sizes) == 32
    assert 2 < sizes[2] / sizes[0] < 4
    equal, other = (predict(each).step_seconds for each in (one, found))
    assert other < 0.75 * equal
    busy = rank_seconds(found)
    assert max(busy) / min(busy) < 1.4


def test_without_stages_all_wait_for_the_slowest(mixed: Cluster) -> None:
    one = on(mixed, zero=3)
    old = dataclasses.replace(one, cluster=load_hardware("2x8xa100-80"))
    assert one.device.name == "a100-80"
    assert predict(one).step_seconds >= predict(old).step_seconds * (1 - 1e-9)


@pytest.mark.slow
def test_a_search_over_two_kinds_of_nodes_gives_the_fast_ones_more(mixed: Cluster) -> None:
    like = on(mixed, zero=3)
    asked = Question(
        model=like.model, cluster=mixed, sequence=4096, global_batch=64, software=software("scrimp")
    )
    found = search(asked)
    best = found.best[0]
    assert best.setting.layout.pp > 1
    sizes = [len(blocks) for blocks in blocks_of_stages(best.setting)]
    assert sizes[-1] > 2 * sizes[0]
    alone = search(dataclasses.replace(asked, cluster=load_hardware("8xh100"))).best[0]
    assert best.seconds < alone.seconds
    for rank, one in enumerate(best.memory):
        assert one.total <= best.setting.at(rank).device.memory_bytes


@pytest.mark.parametrize(
    ("nodes", "slow"), [(("dgx-a100-80", "dgx-h100"), 2), (("dgx-h100", "dgx-a100-80"), 1)]
)
def test_only_a_rank_on_both_kinds_of_nodes_waits_for_the_link_between(
    nodes: tuple[str, str], slow: int, tmp_path: Path
) -> None:
    """Three nodes, two of them old, and four ranks of six devices."""
    file = tmp_path / "three.toml"
    between = '[link.between]\nname = "x"\nbytes_per_second = 1e9\nlatency_seconds = 5e-5\nachieved = 0.9\n'
    counted = (f'[[nodes]]\ncount = {1 + (node == "dgx-a100-80")}\nnode = "{node}"\n' for node in nodes)
    file.write_text(between + "".join(counted), encoding="utf-8")
    one = setting(hardware=str(file), pp=4, zero=3, global_batch=96)
    busy = rank_seconds(one)
    assert min(busy[slow] / each for rank, each in enumerate(busy) if rank != slow) > 5
    blocks = Blocks(one, None)
    assert [rank.menus[0].seconds.min() > 0.2 for rank in blocks.places] == [
        rank == slow for rank in range(4)
    ]
    found = blocks.solve()
    assert found is not None
    assert least_step_seconds(found) <= predict(found).step_seconds
