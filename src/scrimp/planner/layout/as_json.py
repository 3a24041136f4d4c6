"""What a search found, as JSON: the question, plans, what spoke against others, and which hardware files were read.

Each plan has the keys of a line of `scrimp plan --batch` and of its answer. A device and a node are known by a digest
of their numbers, so that an answer says whether it is of the files at hand.

Checked  tests/planner/layout/test_as_json.py; docs/planner.md shows one
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from scrimp.planner.hardware import Cluster
from scrimp.planner.layout.contenders import Misfit
from scrimp.planner.layout.explained import Beside, Loser, bytes_beside, losers, reason_text, seconds_beside
from scrimp.planner.layout.lines import LayoutLine, as_answer
from scrimp.planner.layout.objectives import Answer, Goal, Trial, cost_of, days_of, price_of
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import Candidate
from scrimp.planner.layout.setting import BlockPlan, Setting
from scrimp.planner.layout.summary import blocks_text
from scrimp.planner.layout.what_if import Change


def answer_json(answer: Answer, goal: Goal, version: str) -> dict[str, Any]:
    """The whole answer.

    Args:
        version: of Scrimp.
    """
    question, found = answer.question, answer.found
    return {
        "scrimp": version,
        "question": _question(question, goal),
        "hardware": hardware_json(question.cluster),
        "best": [plan_json(one, question, goal) for one in found.best],
        "losers": [loser_json(one, found.best[0]) for one in losers(found)],
        "settings_tried": found.tried,
        "do_not_fit": found.too_large,
        "tried": [trial_json(one, goal) for one in answer.trials],
    }


def plan_json(one: Candidate, question: Question, goal: Goal) -> dict[str, Any]:
    """A plan that fits: how it is laid out, what it takes and costs."""
    tokens = question.sequence * question.global_batch
    day = 86_400.0 * tokens / one.seconds
    price = cost_of(question, one.seconds, 1e9) if price_of(question.cluster) else None
    return setting_json(one.setting) | {
        **as_answer(one.setting, one.prediction, one.memory),
        "tokens_per_day": day,
        "dollars_per_billion_tokens": price,
        **_training(question, one.seconds, goal),
    }


def setting_json(setting: Setting) -> dict[str, Any]:
    """How a setting lays the training out, in the words of a line."""
    names = [field.name for field in dataclasses.fields(LayoutLine) if field.name != "sequence_parallel"]
    layout = {name: getattr(setting.layout, name) for name in names}
    return {
        "layout": layout | {"sequence_parallel": setting.sequence_parallel},
        "micro_batch": setting.micro_batch,
        "recompute": setting.recompute,
        "recompute_parts": list(setting.recompute_parts),
        "blocks_text": blocks_text(setting),
        "blocks": [_block(one) for one in setting.blocks],
        "offload": dataclasses.asdict(setting.offload),
        "precision": setting.precision,
        "states": dataclasses.asdict(setting.software.states),
        "attention_kernel": setting.software.attention_kernel,
    }


def _block(one: BlockPlan) -> dict[str, Any]:
    return dataclasses.asdict(one) | {"formats": [list(pair) for pair in one.formats]}


def loser_json(one: Loser, best: Candidate) -> dict[str, Any]:
    """The best plan of a family, and what killed it."""
    name, value = one.family
    found: dict[str, Any] = {
        "with": {f"layout.{name}": value},
        "killed_by": one.killed_by,
        "part": one.part,
        "bytes_over" if isinstance(one.best, Misfit) else "seconds_more": one.amount,
        "slower": one.slower,
        "why": reason_text(one, best),
        **setting_json(one.best.setting),
        "peak_bytes": max(rank.total for rank in one.best.memory),
    }
    if isinstance(one.best, Candidate):
        found["step_seconds"] = one.best.seconds
    return found


def beside_json(best: Candidate, other: Candidate | Misfit) -> dict[str, Any]:
    """Two plans, second by second and byte by byte of their fullest ranks."""
    found = {"plan": setting_json(other.setting), "peak_bytes": _pairs(bytes_beside(best, other))}
    if isinstance(other, Candidate):
        found |= {
            "step_seconds": {"best": best.seconds, "other": other.seconds},
            "seconds": _pairs(seconds_beside(best, other)),
        }
    return found


def trial_json(one: Trial, goal: Goal) -> dict[str, Any]:
    """One question of a series."""
    found: dict[str, Any] = {"name": one.name, "devices": one.question.cluster.devices, "note": one.note}
    if one.best is not None:
        found["step_seconds"] = one.best.seconds
        found |= _training(one.question, one.best.seconds, goal)
    return found


def change_json(one: Change, goal: Goal) -> dict[str, Any]:
    """What one change comes to."""
    plan = None if one.best is None else plan_json(one.best, one.question, goal)
    return {"change": one.name, "best": plan, "settings_tried": one.tried}


def hardware_json(cluster: Cluster) -> dict[str, Any]:
    """What the cluster is made of, with a digest of every file's numbers."""
    return {
        "name": cluster.name,
        "devices": cluster.devices,
        "nodes": [
            {
                "count": group.count,
                "devices": group.used,
                "node": group.node.name,
                "node_sha256": _digest(dataclasses.replace(group.node, device=None)),  # type: ignore[arg-type]
                "device": group.node.device.name,
                "device_sha256": _digest(group.node.device),
                "price_per_hour": group.node.device.price_per_hour,
                "estimates": [*group.node.estimates, *group.node.device.estimates],
            }
            for group in cluster.groups
        ],
    }


def _question(question: Question, goal: Goal) -> dict[str, Any]:
    return {
        "objective": goal.objective,
        "tokens": goal.tokens,
        "days": goal.days,
        "parameters": question.model.parameters,
        "layers": len(question.model.blocks),
        "sequence": question.sequence,
        "global_batch": question.global_batch,
        "given": dict(question.given),
        "precision": question.precision,
        "formats": None if question.formats is None else list(question.formats.names),
        "software": question.software.name,
    }


def _training(question: Question, seconds: float, goal: Goal) -> dict[str, float]:
    """Days and dollars of all tokens, where they are named."""
    if goal.tokens is None:
        return {}
    found = {"days": days_of(question, seconds, goal.tokens)}
    if price_of(question.cluster):
        found["dollars"] = cost_of(question, seconds, goal.tokens)
    return found


def _pairs(rows: Sequence[Beside]) -> dict[str, dict[str, float]]:
    return {one.name: {"best": one.best, "other": one.other} for one in rows}


def _digest(numbers: Any) -> str:
    text = json.dumps(dataclasses.asdict(numbers), sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()
