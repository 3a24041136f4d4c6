"""The learning rate of every schedule: bounds, ends, and shape."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.training.schedule import Schedule

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def settings(schedule: str, steps: int, warmup: int, ratio: float = 0.1) -> Schedule:
    return Schedule(schedule, steps, 1.0, warmup, ratio)


@given(st.sampled_from(SCHEDULES), st.integers(1, 400), st.floats(0, 1), st.floats(0, 1))
def test_the_rate_is_positive_at_first_and_never_above_the_peak(
    schedule: str, steps: int, warmup_share: float, ratio: float
) -> None:
    lr = settings(schedule, steps, int(warmup_share * steps), ratio)
    rates = [lr(step) for step in range(steps)]
    assert rates[0] > 0
    assert max(rates) <= 1.0 + 1e-12
    assert min(rates) >= 0.0
    decay = rates[lr.warmup_steps :]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(decay))


@given(st.sampled_from(["cosine", "linear", "wsd"]), st.integers(2, 400), st.data())
def test_the_last_step_runs_at_the_final_rate_exactly(schedule: str, steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps))
    assert settings(schedule, steps, warmup)(steps - 1) == pytest.approx(0.1, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "steps", "warmup", "rates"),
    [
        ("wsd", 3, 2, [0.5, 1.0, 0.1]),
        ("wsd", 3, 1, [1.0, 1.0, 0.1]),
        ("wsd", 3, 3, [0.5, 1.0, 0.1]),
        ("cosine", 2, 2, [1.0, 0.1]),
        ("cosine", 1, 1, [1.0]),
        ("constant", 2, 2, [0.5, 1.0]),
    ],
)
def test_short_runs(schedule: str, steps: int, warmup: int, rates: list[float]) -> None:
    lr = settings(schedule, steps, warmup)
    assert [lr(step) for step in range(steps)] == pytest.approx(rates)


def test_warm_up_rises_in_equal_steps_to_the_peak() -> None:
    lr = settings("cosine", 100, 10)
    assert [lr(step) for step in range(10)] == pytest.approx([0.1 * k for k in range(1, 11)])


def test_wsd_is_flat_until_its_last_fifth() -> None:
    lr = settings("wsd", 100, 10)
    assert {lr(step) for step in range(10, 80)} == {1.0}
    assert lr(80) < 1.0


def test_constant_keeps_the_peak() -> None:
    assert settings("constant", 100, 10)(99) == 1.0


@given(st.sampled_from(SCHEDULES), st.integers(1, 30), st.integers(1, 120))
def test_after_a_refactorization_the_rate_recovers_within_ten_steps(
    schedule: str, every: int, steps: int
) -> None:
    plain = settings(schedule, steps, 3)
    recovering = dataclasses.replace(plain, refactor_every=every)
    for step in range(steps):
        since = step % every + 1 if step >= every else 10
        assert recovering(step) == pytest.approx(plain(step) * min(1.0, since / min(10, every)))


def test_a_recovery_by_hand() -> None:
    lr = dataclasses.replace(settings("constant", 40, 0), refactor_every=12)
    assert [lr(step) for step in (0, 11, 12, 13, 21, 22, 23, 24, 25)] == pytest.approx(
        [1.0, 1.0, 0.1, 0.2, 1.0, 1.0, 1.0, 0.1, 0.2]
    )
