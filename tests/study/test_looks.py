"""Who looks again and again errs hardly more often than who looks once; looks are remembered in the study's folder."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from fakes import rows_for, study_of
from test_results import LOSSES

from scrimp.cli import main
from scrimp.errors import CheckpointError
from scrimp.study.announce import visible_text
from scrimp.study.comparisons import t_quantile, visible_difference
from scrimp.study.conduct import STUDY_FILE
from scrimp.study.looks import LOOKS, Look, confidence_of, number_of, read_looks, record_looks
from scrimp.study.results import results_of
from scrimp.study.rows import append_row

MOST = 30
"""Pairs that a simulated study has at most."""


@cache
def bound(number: int, pairs: int) -> float:
    """Bound of |t| in the look after so many others."""
    return t_quantile(0.5 + confidence_of(0.95, number) / 2, pairs - 1)


@cache
def visible(number: int) -> np.ndarray:
    """By pairs, the smallest difference in scatters that the look after so many others would probably find."""
    alpha = 1 - confidence_of(0.95, number)
    found = [visible_difference(pairs, 1.0, alpha=alpha, power=0.8) for pairs in range(2, MOST + 1)]
    return np.array([np.inf, np.inf, *found])


def follows_advice(pairs: int, effect: float, number: int) -> int:
    enough = np.flatnonzero(visible(number + 1) <= effect)
    return max(int(enough[0]), pairs + 1) if len(enough) else MOST + 1


def adds_one(pairs: int, effect: float, number: int) -> int:
    return pairs + 1


@pytest.mark.slow
@pytest.mark.parametrize("begins", [3, 6])
@pytest.mark.parametrize("goes_on", [follows_advice, adds_one])
@pytest.mark.every(4)
def test_studies_of_nothing_err_as_often_as_the_page_says(goes_on, begins: int) -> None:  # type: ignore[no-untyped-def]
    wrong, times = 0, 10_000
    for draws in np.random.default_rng(begins).normal(size=(times, MOST)):
        pairs = begins
        for number in range(4):
            effect = abs(draws[:pairs].mean()) / draws[:pairs].std(ddof=1)
            if effect * np.sqrt(pairs) > bound(number, pairs):
                wrong += 1
                break
            pairs = goes_on(pairs, effect, number)
            if pairs > MOST:
                break
    assert wrong / times < 0.0625 + 0.004  # with 0.95 at every look about 0.1


def test_the_same_pairs_again_are_the_same_look() -> None:
    first, second = Look(steps=8, seeds=[0, 1, 2]), Look(steps=8, seeds=[0, 1, 2, 3])
    assert number_of(first, []) == number_of(first, [first, second]) == 0
    assert number_of(second, [first]) == number_of(second, [first, second]) == 1
    assert confidence_of(0.95, 0) == 0.95
    assert confidence_of(0.95, 2) == pytest.approx(0.998)


def test_a_later_look_has_a_wider_interval_and_says_so() -> None:
    study = study_of()
    rows = rows_for(study, LOSSES)
    first = results_of(study, rows)
    looks = {"c": [Look(steps=8, seeds=[0, 1])]}
    later = results_of(study, rows, looks)
    assert first.others[0] == later.others[0]
    before, after = first.others[1].comparison, later.others[1].comparison
    assert before is not None
    assert after is not None
    assert before.confidence == 0.95
    assert after.confidence == pytest.approx(0.99)
    assert after.low is not None
    assert before.low is not None
    assert after.low < before.low
    assert later.others[1].earlier_looks == 1
    assert "at 99.0% confidence" in visible_text(study, rows, looks)


@pytest.mark.parametrize("interval", ["t", "bootstrap"])
def test_ever_so_many_looks_can_be_reckoned_with(interval: str) -> None:
    study = study_of("ab", seeds=7, head=f'interval = "{interval}"')
    control = [3.0, 3.2, 2.9, 3.1, 3.05, 3.3, 2.8]
    other = [one - 0.01 * place for place, one in enumerate(control)]
    rows = rows_for(study, {"a": control, "b": other})
    (b,) = results_of(study, rows, {}).others
    assert b.comparison is not None
    assert b.comparison.interval == interval
    looks = {"b": [Look(steps=8, seeds=[seed]) for seed in range(3000)]}
    (b,) = results_of(study, rows, looks).others
    assert b.verdict.startswith("cannot tell")
    # No sample of seven is so far out.
    assert b.comparison is not None
    assert b.comparison.interval == "t"


def test_the_same_pairs_in_another_figure_or_beside_another_control_are_another_look() -> None:
    before = [Look(steps=8, seeds=[0, 1], figure="held_out_loss", control="a")]
    again = Look(steps=8, seeds=[0, 1], figure="held_out_loss", control="a")
    assert number_of(again, before) == 0
    assert number_of(replace(again, figure="training_loss"), before) == 1
    assert number_of(replace(again, control="c"), before) == 1
    assert number_of(again, [Look(steps=8, seeds=[0, 1])]) == 0  # of a file that does not say


def test_looks_are_remembered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_of()
    (tmp_path / STUDY_FILE).write_text(study.text)
    rows = rows_for(study, LOSSES)
    for row in rows.values():
        if row.seed < 2:
            append_row(tmp_path, row)
    for _ in range(2):
        assert main(["study", str(tmp_path)]) == 0
        assert read_looks(tmp_path) == {
            name: [Look(steps=8, seeds=[0, 1], figure="held_out_loss", control="a")] for name in "bc"
        }
    assert "99%" not in capsys.readouterr().out
    for row in rows.values():
        if row.seed == 2:
            append_row(tmp_path, row)
    assert main(["study", str(tmp_path)]) == 0
    assert [len(looks) for looks in read_looks(tmp_path).values()] == [2, 2]
    assert "(99%)" in capsys.readouterr().out
    page = (tmp_path / "study.html").read_text()
    assert "all looks at one together err with at most 6.25%" in page
    assert "Of the verdicts here 2 had such looks before, up to 1." in page


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    assert read_looks(tmp_path) == {}
    record_looks(tmp_path, {}, {})
    assert not (tmp_path / LOOKS).exists()
    (tmp_path / LOOKS).write_text("damaged")
    with pytest.raises(CheckpointError, match="looks"):
        read_looks(tmp_path)
