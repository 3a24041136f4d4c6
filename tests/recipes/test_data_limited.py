"""Laws of loss: planted ones are found again, whatever cannot be fitted is refused; findings are what results say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.errors import ConfigError
from scrimp.recipes import file_of
from scrimp.recipes.data_limited import findings
from scrimp.recipes.data_limited.laws import Law, amount_of, fit, limits_of_members
from scrimp.study.definition import Study, load_study
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
    assert found.has_limit


def test_the_interval_of_the_limit_holds_the_planted_one_about_as_often_as_it_says() -> None:
    """Members of an ensemble: with a = 1 the law is a line, whose limit has noise of a known size."""
    generator, planted, hits = np.random.default_rng(1), Law(3.0, 0.5, 1.0), 0
    members = (1.0, 2.0, 4.0, 8.0)
    for _ in range(100):
        losses = [[planted.at(x) + 0.01 * one for one in generator.standard_normal(12)] for x in members]
        low, high = fit(members, losses, exponent=1.0).interval or (0.0, 0.0)
        hits += low <= 3.0 <= high
    assert 80 <= hits <= 99


def test_the_joint_limit_and_its_interval_are_found_through_noise() -> None:
    """Ever more of ever larger members, with noise of runs as large as seeds have."""
    generator, members, hits, found = np.random.default_rng(2), (1, 2, 3, 5), 0, []
    for _ in range(60):
        limits = [
            limits_of_members(
                members,
                [
                    [
                        3.8 + (1e6 / size) ** 0.5 + 0.2 / k + 0.005 * one
                        for one in generator.standard_normal(8)
                    ]
                    for k in members
                ],
            )
            for size in SIZES
        ]
        law = fit(SIZES, limits)
        low, high = law.interval or (0.0, 0.0)
        hits += low <= 3.8 <= high
        found.append(law.limit)
    assert abs(np.mean(found) - 3.8) < 0.005
    assert 45 <= hits <= 59  # of 60 by 95 %, with as few seeds somewhat fewer


def test_a_law_never_falls_below_what_it_ends_at() -> None:
    growing = fit((1.0, 2.0, 4.0), [[1.0], [1.1], [1.2]])
    assert growing.factor == 0
    assert growing.limit == pytest.approx(1.1)


def test_the_amount_that_has_a_loss_lies_between_its_neighbours() -> None:
    amounts, losses = [1, 2, 4, 8], [5.0, 4.0, 4.2, 2.0]
    assert amount_of(amounts, losses, 4.5) == pytest.approx(2**0.5)
    assert amount_of(amounts, losses, 3.0) == pytest.approx(4 * 2**0.5)  # more text is never worth less
    assert amount_of(amounts, losses, 5.0) == 1
    assert amount_of(amounts, losses, 5.5) == 0
    assert amount_of(amounts, losses, 2.0) == pytest.approx(8)
    assert amount_of(amounts, losses, 1.9) == float("inf")


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


def results_of_losses(losses: Mapping[str, float], study: Study | None = None) -> Results:
    """Results of a study, the recipe's own, in which each variant has one loss, a little more with each seed."""
    study = study or load_study(str(file_of("recipe:data-limited", "study")))
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
    losses = {f"usual-{width}": 5.0 + width / 100 for width in (32, 64, 96)}
    for width in (32, 64, 96):
        losses |= {f"strong-{width}{draw}": 4.0 + 40 / width for draw in ("", "-draw1", "-draw2")}
        losses |= {f"ensemble-{k}-of-{width}": 3.8 + 40 / width + 0.2 / k for k in (2, 3)}
    losses |= {f"data-{n}": 4.0 + 0.6 / n for n in (1, 2, 4, 8)}
    single = losses["strong-64"]
    return losses | {"student": single - 0.1, "self-student": single + 0.1, "untaught": 5.0}


def test_findings_are_what_the_losses_say() -> None:
    said = findings(results_of_losses(planted()))
    assert said[0] == (
        "One model, decay 0.1: the loss rises with the width (32: 5.321, 64: 5.641, 96: 5.961)."
    )
    assert said[1].startswith(
        "One model, strong decay: the loss falls with the width (32: 5.251, 64: 4.626, 96: 4.418);"
    )
    assert said[3] == (
        "Members of width 64 (1: 4.626, 2: 4.526, 3: 4.493): 4.426 (4.425 to 4.427) for ever more of them."
    )
    assert said[5].startswith("Ever more of ever larger members: 3.8")
    assert said[6] == (
        "The student: 4.526, where one model has 4.626 and the ensemble 4.493: 75% of the ensemble's gain."
    )
    assert said[7].endswith("where one model has 4.626 and the ensemble 4.493: -75% of the ensemble's gain.")
    assert said[8] == "Without teachers, by the same steps and decay: 5.001."
    # Of width 96 three members have 4.2833, between 4.3 of twice the text and 4.15 of four times.
    assert said[9] == (
        "In data: ensemble-3-of-96 has the loss that the usual recipe, four epochs, has with 2.2 times the text "
        "(by single seeds 2.2 to 2.2); usual-32, the best of the usual decay, with less than 1 times the text "
        "(by single seeds less than 1 to less than 1)."
    )


@pytest.mark.parametrize(
    ("gone", "same", "count"),
    [
        ("data-8", range(10), 10),
        ("strong-64", [0, 2, 4, 9], 5),  # of one model, two widths are left
        ("ensemble-3-of-64", [0, 1, 2, 4, 5, 9], 7),  # two members are, and all of students is gone
        ("usual-32", range(1, 9), 10),
    ],
)
def test_of_runs_that_are_missing_nothing_is_said(gone: str, same: Sequence[int], count: int) -> None:
    losses = planted()
    whole = findings(results_of_losses(losses))
    del losses[gone]
    said = findings(results_of_losses(losses))
    assert [whole.index(one) for one in said if one in whole] == list(same)
    assert len(said) == count
    assert findings(results_of_losses({})) == []


def test_models_of_one_size_have_no_law() -> None:
    """A study of one's own may keep the recipe's name, and its variants' names, with other sizes."""
    study = load_study(str(file_of("recipe:data-limited", "study")))
    alike = dict(study.variants[0].settings)
    study = replace(study, variants=tuple(replace(one, settings=alike) for one in study.variants))
    said = findings(results_of_losses(planted(), study))
    assert said[1].endswith("96: 4.418).")
    assert not any("ever larger" in one for one in said)
