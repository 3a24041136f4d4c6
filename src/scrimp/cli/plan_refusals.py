"""Why `scrimp plan --hardware` has no plan: what is too small, by how much, and what would be enough.

Method   A larger cluster is named so that it can be asked for: as `--hardware` takes it where the given one was named
         so, else by what its file would say.
Checked  tests/cli/test_plan_elsewhere.py: what is said to be enough is
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from scrimp.cli.plan_question import Asked
from scrimp.errors import ConfigError, PlanError
from scrimp.planner.hardware import Cluster, is_file
from scrimp.planner.layout.cluster_sizes import nearest_sizes, sizes_like
from scrimp.planner.layout.divisibility import has_layout, objections
from scrimp.planner.layout.given_memory import GivenMemory
from scrimp.planner.layout.host_needs import least_host_memory
from scrimp.planner.layout.objectives import Answer
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.software import in_states
from scrimp.planner.layout.state_formats import StateFormats
from scrimp.report.units import format_bytes


def misfit(answer: Answer, asked: Asked, hardware: str) -> PlanError:
    """The error of a search that found no plan.

    Args:
        hardware: as the user named it.
    """
    question, found = answer.question, answer.found
    if not found.tried:
        return _no_layout(question, hardware)
    room = question.device.memory_bytes
    need, what = format_bytes(round(found.nearest_bytes)), "into the memory of a device"
    got, lacking = (
        f"at least {need} of {format_bytes(room)}, with everything made again",
        f"devices with {need}",
    )
    advice = "larger devices"
    if found.nearest_bytes <= room:
        lean = min(question.cluster.groups, key=lambda group: group.node.host_memory_bytes / group.used)
        host = format_bytes(round(least_host_memory(question, found) * lean.used))
        what, lacking = "on the devices, nor what they cannot hold on the host", f"{host} of host memory"
        got = f"{format_bytes(lean.node.host_memory_bytes)} of host memory"
        advice = "a host with more memory (--budget.host-memory)"
    return PlanError(
        f"no layout of the model fits {what}", got=got, **_way_out(question, asked, hardware, lacking, advice)
    )


def size_text(cluster: Cluster, hardware: str) -> str:
    """A cluster of another size, as the user would ask for it."""
    if not is_file(hardware):
        return cluster.name
    group = cluster.groups[0]
    return f"`count = {group.count}` and `devices = {group.used}` in {hardware}"


def hardware_of_line(cluster: Cluster, asked: Cluster, hardware: str) -> str:
    """The hardware of a plan, as a saved line names it.

    Args:
        cluster: that an objective chose.
        asked, hardware: that the user named, and how.

    Raises:
        ConfigError: a line cannot name it.
    """
    if cluster.groups == asked.groups:
        # The plan is read from other folders, too.
        return str(Path(hardware).absolute()) if is_file(hardware) else hardware
    if is_file(hardware):
        raise ConfigError(
            "the plan is for another size than its hardware file says, and is not saved",
            got=f"{cluster.devices:,} devices, {asked.devices:,} in {hardware}",
            do=f"write {size_text(cluster, hardware)}, and plan for that",
        )
    return cluster.name


def _way_out(question: Question, asked: Asked, hardware: str, lacking: str, advice: str) -> dict[str, str]:
    """What is expected, and what to do."""
    others = f"{advice}, {_smaller_states(question, asked)}shorter sequences, or a smaller model"
    if len(question.cluster.groups) > 1:
        return {"expected": lacking, "do": f"take {others}"}
    enough = _enough(question, asked)
    if enough is None:
        return {"expected": lacking, "do": f"take {others}: more of these devices do not help"}
    size = size_text(enough, hardware)
    command = f"plan with {size}" if is_file(hardware) else f"plan for `scrimp plan --hardware {size}`"
    return {"expected": f"{lacking}, or {size}", "do": f"{command}, for {others}"}


def _smaller_states(question: Question, asked: Asked) -> str:
    """Formats of states with which the model fits, as the user would ask for them."""
    if not question.software.states.are_usual:
        return ""
    searching = asked.searching()
    for moments in ("bf16", "8bit"):
        states = StateFormats(moments=moments, masters=False)
        if searching.fits(dataclasses.replace(question, software=in_states(question.software, states))):
            return f"states that take less (--optimizer.master-weights False --optimizer.moments {moments}), "
    return ""


def _enough(question: Question, asked: Asked) -> Cluster | None:
    """The smallest larger cluster of the same devices on which the model fits."""
    searching = asked.searching()
    for cluster in sizes_like(question.cluster, max(64 * question.cluster.devices, 1024)):
        larger = dataclasses.replace(question, cluster=cluster)
        if cluster.devices > question.cluster.devices and searching.fits(larger, cluster.name):
            return cluster
    return None


def _no_layout(question: Question, hardware: str) -> PlanError:
    def is_good(cluster: Cluster) -> bool:
        return has_layout(dataclasses.replace(question, cluster=cluster))

    near = nearest_sizes(question.cluster, is_good) if len(question.cluster.groups) == 1 else []
    names = " and ".join(size_text(one, hardware) for one in near)
    keys = "layout.*" if question.memory == GivenMemory() else "layout.*, memory.*"
    return PlanError(
        "no layout has these degrees on this hardware",
        got=f"{question.cluster.devices:,} devices, {question.global_batch:,} sequences in a batch; "
        + "; ".join(objections(question)),
        expected=f"the nearest that have one: {names}" if near else "degrees that divide what they share",
        do=f"change {keys} or train.batch_tokens, or leave some of {keys} out",
    )
