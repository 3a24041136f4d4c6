"""The answer after one change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from published_settings import LLAMA_8B, setting

from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.objectives import Searching
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import search
from scrimp.planner.layout.what_if import variants, what_if

SMALL = dataclasses.replace(LLAMA_8B, layers=4)


def question(hardware: str, global_batch: int = 16) -> Question:
    like = setting(SMALL, hardware, global_batch=1024)
    return Question(
        model=like.model,
        cluster=like.cluster,
        sequence=like.sequence,
        global_batch=global_batch,
        software=like.software,
    )


@pytest.mark.parametrize(
    ("hardware", "names"),
    [
        ("h100", ["one more node", "half the batch", "twice the memory"]),
        ("4xh100", ["one more node", "NVLink", "half the batch", "twice the memory"]),
        ("2x8xh100", ["one more node", "InfiniBand", "NVLink", "half the batch", "twice the memory"]),
    ],
)
def test_one_thing_changes_at_a_time(hardware: str, names: list[str]) -> None:
    asked = question(hardware)
    found = variants(asked)
    assert len(found) == len(names)
    for (name, changed), starts in zip(found, names, strict=True):
        assert starts in name
        before, after = asked.cluster.groups[0], changed.cluster.groups[0]
        ratios = {
            "one more node": after.count - before.count,
            "InfiniBand": before.node.link.outside.bandwidth / after.node.link.outside.bandwidth,
            "NVLink": before.node.link.inside.bandwidth / after.node.link.inside.bandwidth,
            "half the batch": asked.global_batch / changed.global_batch,
            "twice the memory": after.node.device.memory_bytes / before.node.device.memory_bytes,
        }
        assert ratios[starts] == (1 if starts == "one more node" else 2)
        assert [key for key, ratio in ratios.items() if ratio not in (0, 1)] in ([starts], [])
    assert [name for name, _ in variants(dataclasses.replace(asked, global_batch=3))].count(
        "half the batch"
    ) == 0


def test_each_change_is_searched() -> None:
    asked = question("2xh100")
    changes = what_if(asked, Searching())
    for one in changes:
        assert one.best == search(one.question).best[0]
    now = search(asked).best[0].seconds
    seconds = {one.name: one.best.seconds for one in changes if one.best}
    assert seconds["one more node"] < now
    assert seconds["half the batch"] < now
    assert seconds["twice the memory"] <= now
    assert max(seconds.values()) >= now


def test_as_few_more_nodes_as_share_the_batch() -> None:
    two = question("2x8xh100", 16)
    assert variants(two)[0][0] == "one more node"
    found = {one.name: one for one in what_if(dataclasses.replace(two, given={"pp": 1}), Searching())}
    assert found["2 more nodes"].question.cluster.nodes == 4
    assert found["2 more nodes"].best is not None
    never = what_if(dataclasses.replace(two, given={"tp": 3}), Searching())
    assert {(one.best, one.tried) for one in never} == {(None, 0)}


def test_of_several_kinds_of_nodes_all_change_and_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text('[[nodes]]\nnode = "dgx-h100"\n[[nodes]]\nnode = "dgx-a100-80"\n', encoding="utf-8")
    asked = dataclasses.replace(question("8xh100"), cluster=load_hardware(file))
    found = dict(variants(asked))
    first, second = asked.cluster.groups
    assert found["one more node (h100)"].cluster.groups == (dataclasses.replace(first, count=2), second)
    assert found["nodes in the order a100-80, h100"].cluster.groups == (second, first)
    (name,) = (one for one in found if "in a node half" in one)
    for before, after in zip(asked.cluster.groups, found[name].cluster.groups, strict=True):
        assert before.node.link.inside.name in name
        assert before.node.link.inside.bandwidth == 2 * after.node.link.inside.bandwidth
    for before, after in zip(asked.cluster.groups, found["twice the memory"].cluster.groups, strict=True):
        assert after.node.device.memory_bytes == 2 * before.node.device.memory_bytes
