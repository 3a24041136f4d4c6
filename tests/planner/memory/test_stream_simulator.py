"""The event simulation: by hand, and what holds for any tasks."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MACHINE

from scrimp.planner.memory.stream_simulator import COMPUTE, CPU, DOWNLOAD, KINDS, UPLOAD, Lanes

LINK = replace(MACHINE, upload=10.0, download=10.0, upload_together=5.0, download_together=8.0)


def test_a_copy_slows_down_only_while_the_other_way_is_busy() -> None:
    lanes = Lanes()
    lanes.add(UPLOAD, 30.0, "weights")
    lanes.add(DOWNLOAD, 16.0, "gradients")
    run = lanes.run(LINK)
    # two seconds together: 10 of 30 up, 16 down; then 20 alone
    assert run.seconds == pytest.approx(2 + 2)
    assert run.lanes == pytest.approx((0, 4, 2, 0))


def test_waiting_is_booked_on_what_the_model_waits_for() -> None:
    lanes = Lanes()
    come = lanes.add(UPLOAD, 20.0, "weights")
    done = lanes.add(COMPUTE, 5.0, "compute", [come])
    lanes.add(UPLOAD, 60.0, "activations")
    lanes.add(CPU, 4.0, "update", [done])
    run = lanes.run(LINK)
    assert run.seconds == pytest.approx(11)
    assert run.exposed == {"compute": 0, "weights": 2, "activations": 0, "gradients": 0, "update": 4}
    assert run.busy["activations"] == pytest.approx(6)


def test_waiting_is_booked_on_the_awaited_copy_until_it_has_come() -> None:
    lanes = Lanes()
    lanes.add(DOWNLOAD, 40.0, "gradients")
    come = lanes.add(UPLOAD, 20.0, "weights")
    lanes.add(COMPUTE, 5.0, "compute", [come])
    run = lanes.run(LINK)
    # four seconds together, in which 32 of 40 leave; then 8 at 10 a second, under the computing
    assert run.seconds == pytest.approx(4 + 5)
    assert run.exposed == pytest.approx(
        {"compute": 0, "weights": 4, "activations": 0, "gradients": 0, "update": 0}
    )


def test_tasks_that_wait_for_each_other_are_an_error() -> None:
    lanes = Lanes()
    lanes.add(COMPUTE, 1.0, "compute", [1])
    lanes.add(UPLOAD, 1.0, "weights", [0])
    with pytest.raises(RuntimeError, match="wait for each other"):
        lanes.run(LINK)


@given(data=st.data(), count=st.integers(1, 25))
def test_the_longest_lane_bounds_from_below_and_the_sum_from_above(data: st.DataObject, count: int) -> None:
    lanes = Lanes()
    for number in range(count):
        after = data.draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        amount = data.draw(st.sampled_from((0.0, 1.0, 3.0, 10.0)))
        lane = data.draw(st.integers(0, 3))
        lanes.add(
            lane, amount, "compute" if lane == COMPUTE else data.draw(st.sampled_from(KINDS[1:])), after
        )
    run = lanes.run(LINK)
    assert lanes.seconds(LINK) == run.seconds
    assert max(run.lanes) <= run.seconds * (1 + 1e-9)
    assert run.seconds <= math.fsum(run.lanes) * (1 + 1e-9)
    assert math.fsum(run.exposed.values()) + run.busy["compute"] == pytest.approx(run.seconds)
    assert all(run.exposed[kind] <= run.busy[kind] + 1e-9 for kind in KINDS)
