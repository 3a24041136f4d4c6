"""Accuracy, margin and their errors."""

from __future__ import annotations

import math

import pytest

from scrimp.tasks import Item, Task, TaskScores, figures_of

ITEMS = tuple(Item(str(number), ("a", "b"), 0) for number in range(4))


def scores(*margins: float) -> TaskScores:
    return TaskScores(Task("mine", ITEMS), tuple(margin > 0 for margin in margins), margins, 1)


def test_figures_and_their_standard_errors() -> None:
    accuracy, margin = figures_of(scores(0.5, 0.1, -0.2, 0.0))
    assert (accuracy.name, accuracy.value, accuracy.chance, accuracy.items) == ("accuracy", 0.5, 0.5, 4)
    assert accuracy.error == pytest.approx(math.sqrt(0.5 * 0.5 / 3))
    assert (margin.name, margin.value, margin.chance) == ("margin", pytest.approx(0.1), 0.0)
    assert margin.error == pytest.approx(math.sqrt((0.16 + 0 + 0.09 + 0.01) / 3 / 4))
    assert margin.shortened == 1


def test_a_difference_on_the_same_items_has_the_error_of_differences() -> None:
    one = figures_of(scores(1.1, 2.3, 3.1, 4.3))[1]
    other = figures_of(scores(1.0, 2.0, 3.0, 4.0))[1]
    mean, error = one.less(other) or (0.0, None)
    assert mean == pytest.approx(0.2)
    assert error == pytest.approx(math.sqrt(0.04 / 3 / 4))
