"""Bytes of axes by formula, and those that gloo ranks were counted to send in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import spawn
from parity import ROWS, SEQUENCE, Case, batch_of, made

from scrimp.config import closed
from scrimp.models import spec_of
from scrimp.planner.axis_traffic import degrees_of, traffic_of
from scrimp.profiler.collectives import counting_collectives
from scrimp.world import World

FSDP = ("all-gather", "reduce-scatter")
CASES = {
    "zero 3": (Case({"fsdp": 2}), {("fsdp", "cp"): FSDP}),
    "zero 2": (Case({"fsdp": 2, "zero": 2}), {("fsdp", "cp"): FSDP}),
    "zero 1": (Case({"fsdp": 2, "zero": 1}), {("fsdp", "cp"): FSDP}),
    "copies": (Case({"dp": 2, "fsdp": 1}), {("dp",): ("all-reduce",)}),
    "tp": (Case({"tp": 2}), {("tp",): FSDP}),
    "ring": (Case({"cp": 2}), {("fsdp", "cp"): FSDP, ("cp",): ("send",)}),
    "ulysses": (
        Case({"cp": 2, "cp_method": "ulysses"}),
        {("fsdp", "cp"): FSDP, ("cp",): ("all-to-all",)},
    ),
}
"""Case, and the collectives of each kind of traffic."""
Found = dict[str, tuple[dict[tuple[str, ...], float], dict[str, float]]]


def steps(rank: int) -> Found:
    found: Found = {}
    for name, (case, _) in CASES.items():
        readers = 1 if {"cp", "tp"} & set(case.layout) else 2
        decisions, executable, _, _ = made(case, World(rank, 2), readers)
        for number in range(2):  # the first step lays FSDP2's groups out
            with counting_collectives() as counted:
                for micro_batch in range(case.micro_batches):
                    last = micro_batch == case.micro_batches - 1
                    executable.begin(number, micro_batch * ROWS * SEQUENCE, is_last=last)
                    executable.loss(batch_of(case, number, micro_batch)).total.backward()
        traffic = traffic_of(spec_of(decisions.architecture), decisions.config)
        sent = {
            operation: counted.sent(operation) for operation in (*FSDP, "all-reduce", "send", "all-to-all")
        }
        found[name] = {one.axes: one.num_bytes for one in traffic}, sent
    return found


@pytest.mark.slow
def test_ranks_send_what_the_formulas_say(tmp_path: Path) -> None:
    for rank in spawn(2, steps, tmp_path):
        for name, (_, operations) in CASES.items():
            traffic, sent = rank[name]
            assert set(traffic) == set(operations), name
            for axes, kinds in operations.items():
                # FSDP2 rounds rows up.
                assert sum(sent[kind] for kind in kinds) == pytest.approx(traffic[axes], rel=0.02), (
                    name,
                    axes,
                )


@pytest.mark.slow
def test_an_axis_of_one_rank_sends_nothing() -> None:
    decisions, _, _, _ = made(Case(), World(), 1)
    config = closed(decisions.config)
    assert traffic_of(spec_of(decisions.architecture), config) == []
    assert set(degrees_of(config.layout).values()) == {1}
