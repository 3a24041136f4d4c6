"""Laws of loss: planted ones are found again, whatever cannot be fitted is refused; findings are what results say."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.errors import ConfigError
from scrimp.recipes import file_of
from scrimp.recipes.data_limited import findings
from scrimp.recipes.data_limited.laws import Law, fit
from scrimp.study.definition import load_study
from scrimp.study.results import Results, results_of
from scrimp.study.rounds import steps_of
from scrimp.study.rows import Row

SIZES = (1e6, 3e6, 1e7, 3e7, 1e8)


@examples(40)
@given(
    limit=st.floats(0.5, 5.0),
    share=st.floats(0.05, 1.0),
    exponent=st.floats(0.2, 2.0),
    seeds=st.integers(1, 3),
)
def test_a_planted_law_is_found_again(limit: float, share: float, exponent: float, seeds: int) -> None:
    planted = Law(limit, share * SIZES[0] ** exponent, exponent)
    found = fit(SIZES, [[planted.at(x)] * seeds for x in SIZES])
    assert found.limit == pytest.approx(limit, rel=1e-3)
    assert found.exponent == pytest.approx(exponent, rel=0.02)
    assert found.at(5e7) == pytest.approx(planted.at(5e7), rel=1e-3)
    assert found.x_of(found.at(2e6)) == pytest.approx(2e6, rel=1e-6)


def test_the_interval_of_the_limit_holds_the_planted_one_about_as_often_as_it_says() -> None:
    """Members of an ensemble: with a = 1 the law is a line, whose limit has noise of a known size."""
    generator, planted, hits = np.random.default_rng(1), Law(3.0, 0.5, 1.0), 0
    members = (1.0, 2.0, 4.0, 8.0)
    for _ in range(100):
        losses = [[planted.at(x) + 0.01 * one for one in generator.standard_normal(12)] for x in members]
        low, high = fit(members, losses, exponent=1.0).interval or (0.0, 0.0)
        hits += low <= 3.0 <= high
    assert 80 <= hits <= 99


def test_a_law_never_falls_below_what_it_ends_at() -> None:
    growing = fit((1.0, 2.0, 4.0), [[1.0], [1.1], [1.2]])
    assert growing.factor == 0
    assert growing.limit == pytest.approx(1.1)
    assert growing.x_of(1.0) == float("inf")


@pytest.mark.parametrize(
    ("xs", "losses", "exponent"),
    [
        ((1.0, 2.0), [[1.0], [0.9]], None),
        ((1.0, 1.0, 1.0), [[1.0], [1.0], [1.0]], None),
        ((1.0,), [[1.0]], 1.0),
        ((1.0, 2.0, 3.0), [[1.0, 2.0], [1.0], [1.0, 3.0]], None),
        ((1.0, 2.0, 3.0), [[], [], []], None),
    ],
)
def test_what_says_no_law_is_refused(
    xs: tuple[float, ...], losses: list[list[float]], exponent: float | None
) -> None:
    with pytest.raises(ConfigError, match="law cannot be fitted"):
        fit(xs, losses, exponent=exponent)


def results_of_losses(losses: Mapping[str, float]) -> Results:
    """Results of the recipe's own study in which each variant has one loss, a little more with each seed."""
    study = load_study(str(file_of("recipe:data-limited", "study")))
    rows = [
        Row(
            variant=one.name,
            seed=seed,
            steps=steps_of(one),
            digest="",
            figures={"held_out_loss": losses[one.name] + seed / 1000},
        )
        for one in study.variants
        if one.name in losses
        for seed in range(3)
    ]
    return results_of(study, {row.key: row for row in rows})


def planted() -> dict[str, float]:
    """Losses of the study by laws: of one model 4 + 40 / width, of K members 3.8 + 40 / width + 0.2 / K."""
    losses = {f"usual-{width}": 5.0 + width / 100 for width in (48, 96, 144)}
    for width in (48, 96, 144):
        losses |= {f"strong-{width}{draw}": 4.0 + 40 / width for draw in ("", "-draw1", "-draw2")}
        losses |= {f"ensemble-{k}-of-{width}": 3.8 + 40 / width + 0.2 / k for k in (2, 3)}
    losses |= {f"data-{n}": 4.0 + 0.6 / n for n in (1, 2, 4, 8)}
    return losses | {"student": losses["strong-96"] - 0.1, "self-student": losses["strong-96"] + 0.1}


def test_findings_are_what_the_losses_say() -> None:
    said = findings(results_of_losses(planted()))
    assert "decay 0.1: the loss rises with the width (48: 5.481, 96: 5.961, 144: 6.441)." in said[0]
    assert "strong decay: the loss falls with the width (48: 4.834, 96: 4.418, 144: 4.279)" in said[1]
    assert "Members of width 96 (1: 4.418, 2: 4.318, 3: 4.284): 4.218 (4.217 to 4.219)" in said[3]
    assert "Ever more of ever larger members" in said[5]
    assert (
        "The student: 4.318, where one model has 4.418 and the ensemble 4.284: 75% of the ensemble's gain."
        in said
    )
    assert "The self-student: 4.518, where one model has 4.418 and the ensemble 4.284: -75%" in said[7]
    assert "In data: ensemble-3-of-144 has the loss" in said[8]
    # 4.1444 = 4 + 0.6 / 4.155
    assert "with 4.2 times the text" in said[8]


@pytest.mark.parametrize("gone", ["data-8", "strong-96", "ensemble-3-of-96", "usual-48"])
def test_of_runs_that_are_missing_nothing_is_said(gone: str) -> None:
    losses = planted()
    del losses[gone]
    said = findings(results_of_losses(losses))
    assert 0 < len(said) <= 9
    assert all("nan" not in one for one in said)
    assert findings(results_of_losses({})) == []
