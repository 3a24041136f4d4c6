"""From rows to comparisons, verdicts, curves and a table."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fakes import row_for, rows_for, study_of
from rich.console import Console

from scrimp.study.comparisons import interval_of, t_quantile
from scrimp.study.results import mean_curve, mean_gap, results_of
from scrimp.study.rows import Row
from scrimp.study.table import verdict_table

LOSSES = {"a": [3.0, 3.2, 2.9], "b": [2.5, 2.71, 2.41], "c": [3.3, 3.1, 2.9]}


def test_differences_are_paired_by_seed() -> None:
    study = study_of()
    found = {one.name: one for one in results_of(study, rows_for(study, LOSSES)).outcomes}
    assert found["a"].comparison is None
    assert found["a"].verdict == "the control"
    b = found["b"].comparison
    assert b is not None
    assert list(b.differences.values()) == pytest.approx([-0.5, -0.49, -0.49])
    assert (b.low, b.high) == pytest.approx(interval_of([-0.5, -0.49, -0.49], "t", 0.05))
    assert found["b"].relative == pytest.approx(-0.49333 / 3.0333, rel=1e-3)
    assert found["b"].verdict == "lower by 0.4933 (16.26%)"
    assert re.fullmatch(
        r"cannot tell: (\d+) more runs would probably \(\d+ more seeds of both\)", found["c"].verdict
    )


def test_all_comparisons_together_are_wider() -> None:
    study = study_of(head="all_together = true")
    results = results_of(study, rows_for(study, LOSSES))
    assert results.confidence == pytest.approx(0.975)
    b = results.others[0].comparison
    assert b is not None
    assert b.high is not None
    assert b.mean is not None
    assert b.scatter is not None
    assert b.high - b.mean == pytest.approx(t_quantile(1 - 0.025 / 2, 2) * b.scatter / np.sqrt(3))


def test_missing_and_failed_runs_leave_the_pairs_that_there_are() -> None:
    study = study_of()
    rows = rows_for(study, LOSSES | {"b": [2.5, None, 2.4], "c": [3.3]})
    results = results_of(study, rows)
    b, c = results.others
    assert b.comparison is not None
    assert list(b.comparison.differences) == [0, 2]
    assert b.failures == {1: "it broke"}
    assert c.verdict == "cannot tell: needs two pairs of runs"
    assert (results.done, results.planned) == (6, 9)


def test_dropped_variants_are_compared_at_their_last_round() -> None:
    study = study_of("abc", seeds=1, tail="[halving]\n")
    rows = [
        *(row_for(study, name, 0, value, 4) for name, value in {"a": 4.0, "b": 3.0, "c": 5.0}.items()),
        *(row_for(study, name, 0, value, 8) for name, value in {"a": 2.0, "b": 1.5}.items()),
    ]
    b, c = results_of(study, {row.key: row for row in rows}).others
    assert b.comparison is not None
    assert c.comparison is not None
    assert (b.comparison.mean, b.is_dropped) == (-0.5, False)
    assert (c.comparison.mean, c.is_dropped, c.steps) == (1.0, True, 4)


def test_survivors_that_wait_for_their_next_round_are_not_dropped() -> None:
    study = study_of("abc", seeds=2, tail="[halving]\n")
    losses = {"a": 4.0, "b": 3.0, "c": 5.0}
    rows = [row_for(study, name, seed, value, 4) for name, value in losses.items() for seed in (0, 1)]
    rows.append(row_for(study, "b", 0, 1.5, 8))  # the control has not reached that step
    a, b, c = results_of(study, {row.key: row for row in rows}).outcomes
    assert [one.is_dropped for one in (a, b, c)] == [False, False, True]
    assert b.steps == 4
    assert b.comparison is not None
    assert b.comparison.differences == {0: -1.0, 1: -1.0}
    # Before the round has ended nobody is dropped.
    early = results_of(study, {row.key: row for row in rows if row.seed == 0})
    assert not any(one.is_dropped for one in early.outcomes)


def test_a_difference_that_does_not_matter_is_the_same() -> None:
    study = study_of("ab", head="matters = 0.05")
    (b,) = results_of(study, rows_for(study, {"a": [3.0] * 3, "b": [3.001, 3.0011, 3.0009]})).others
    assert b.verdict == "the same: higher by 0.001000, which does not matter"


def test_one_more_seed_is_one() -> None:
    study = study_of("ab", head="power = 0.06", seeds=2)
    (b,) = results_of(study, rows_for(study, {"a": [0.0] * 2, "b": [1.0, 2.9]})).others
    assert b.verdict == "cannot tell: 2 more runs would probably (1 more seed of both)"


def test_runs_that_read_other_data_are_never_a_pair() -> None:
    study = study_of("ab", seeds=1)
    rows = [row_for(study, "a", 0, 1.0, data="x"), row_for(study, "b", 0, 1.0, data="y")]
    rows += [row_for(study, name, 1, 1.0, data="y") for name in "ab"]
    (b,) = results_of(study, {row.key: row for row in rows}).others
    assert b.comparison is not None
    assert b.comparison.differences == {1: 0.0}
    assert list(b.failures) == [0]
    assert "other data than a" in b.failures[0]


def test_curves_are_means_over_seeds_and_gaps_are_paired() -> None:
    study = study_of()
    results = results_of(study, rows_for(study, LOSSES))
    steps, values = mean_curve(results, "a", "training")
    assert steps.tolist() == [2.0, 4.0]
    assert values.tolist() == pytest.approx([4.0333, 3.0333], rel=1e-4)
    assert mean_gap(results, "b", "training")[1].tolist() == pytest.approx([-0.49333] * 2, rel=1e-4)
    assert mean_curve(results, "a", "held_out")[0].tolist() == [8.0]
    assert len(mean_curve(results_of(study, {}), "a", "training")[0]) == 0


def test_bootstrap_waits_for_enough_pairs() -> None:
    study = study_of(seeds=6, head='interval = "bootstrap"')
    values = {"a": [3.0] * 6, "b": [3.1, 3.3, 3.2, 3.2, 3.6, 3.1], "c": [3.0, 3.3]}
    b, c = results_of(study, rows_for(study, values)).others
    assert b.comparison is not None
    assert c.comparison is not None
    assert (b.comparison.low, b.comparison.high) == pytest.approx(
        interval_of(list(b.comparison.differences.values()), "bootstrap", 0.05)
    )
    assert (c.comparison.low, c.comparison.high) == pytest.approx(
        interval_of(list(c.comparison.differences.values()), "t", 0.05)
    )
    assert (b.comparison.interval, c.comparison.interval) == ("bootstrap", "t")


def test_the_table_has_a_verdict_for_each() -> None:
    study = study_of()
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(verdict_table(results_of(study, rows_for(study, LOSSES | {"c": [3.3, None, 2.9]}))))
    text = console.export_text()
    assert "held-out loss against a, nats a token" in text
    assert "lower by 0.4933" in text
    assert "1 failed" in text


def test_rows_are_all_that_is_needed() -> None:
    study = study_of("ab", seeds=1)
    row = Row(variant="a", seed=5, steps=8, digest="d", figures={"held_out_loss": 1.0})
    other = Row(variant="b", seed=5, steps=8, digest="d", figures={"held_out_loss": 1.5})
    results = results_of(study, {row.key: row, other.key: other})  # a seed that the file does not have
    assert results.others[0].comparison is not None
    assert results.others[0].comparison.mean == 0.5
