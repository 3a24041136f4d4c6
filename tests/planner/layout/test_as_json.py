"""The answer as JSON: each plan is a line of a batch, whose answer is that plan's."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from scrimp.cli import main
from scrimp.config import preset
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.as_json import answer_json, beside_json, hardware_json
from scrimp.planner.layout.lines import answer_line
from scrimp.planner.layout.objectives import Answer, Goal
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import search
from scrimp.planner.layout.software import software


@pytest.fixture(scope="module")
def answer() -> Answer:
    question = Question(
        model=sizes_of(spec_of(preset("llama-3.2-1b"))),
        cluster=load_hardware("4xh100"),
        sequence=8192,
        global_batch=64,
        software=software("scrimp"),
        precision="fp8_tensor",
    )
    return Answer(question, search(question))


def test_a_plan_is_a_line_that_is_answered_alike(answer: Answer) -> None:
    found = json.loads(json.dumps(answer_json(answer, Goal(tokens=1e12), "1.2.3")))
    question = found["question"]
    for plan in found["best"]:
        line: dict[str, Any] = {"model": "llama-3.2-1b", "hardware": found["hardware"]["name"]}
        line |= {name: question[name] for name in ("sequence", "global_batch", "software")}
        line |= {
            name: plan[name]
            for name in ("layout", "micro_batch", "recompute", "blocks", "offload", "precision")
        }
        again = answer_line(json.dumps(line), where="line 1")
        assert {name: plan[name] for name in again} == again
        assert plan["days"] == pytest.approx(1e12 / plan["tokens_per_day"])
        assert plan["dollars"] == pytest.approx(1000 * plan["dollars_per_billion_tokens"])
        assert plan["dollars"] == pytest.approx(plan["days"] * 24 * 4 * 2.95)
    assert found["scrimp"] == "1.2.3"
    assert found["do_not_fit"] < found["settings_tried"]
    assert {one["killed_by"] for one in found["losers"]} >= {"link"}
    for one in found["losers"]:
        assert ("bytes_over" in one) == (one["killed_by"] == "memory") == ("step_seconds" not in one)


def test_two_plans_stand_beside_each_other(answer: Answer) -> None:
    first, *_, last = answer.found.best
    found = beside_json(first, last)
    sums = {side: sum(pair[side] for pair in found["seconds"].values()) for side in ("best", "other")}
    assert sums == pytest.approx(found["step_seconds"])
    assert found["plan"]["micro_batch"] == last.setting.micro_batch


def test_a_digest_changes_with_a_number_of_the_device_and_no_other() -> None:
    cluster = load_hardware("2x8xh100")
    (group,) = cluster.groups
    device = dataclasses.replace(group.node.device, memory_bytes=group.node.device.memory_bytes + 1)
    changed = dataclasses.replace(
        cluster, groups=(dataclasses.replace(group, node=dataclasses.replace(group.node, device=device)),)
    )
    (one,), (other,) = hardware_json(cluster)["nodes"], hardware_json(changed)["nodes"]
    assert one["device_sha256"] != other["device_sha256"]
    assert one["node_sha256"] == other["node_sha256"]
    (fewer,) = hardware_json(load_hardware("4xh100"))["nodes"]
    assert fewer["device_sha256"] == one["device_sha256"]


@pytest.mark.slow
def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--hardware", "4xh100", "--model.preset", "llama-3.2-1b", "--json", "--explain"]
    assert main([*words, "layout.tp=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["explain"]["asked"] == "tp 4"
    assert found["explain"]["plan"]["layout"]["tp"] == 4
    assert found["explain"]["step_seconds"]["other"] > found["explain"]["step_seconds"]["best"]
    assert main([*words, "layout.tp=3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "tp 3 does not divide 32 heads" in found["explain"]["objections"]
