"""The recipe's findings: what each variant changes beside the plain run, and nothing of runs that are missing."""

from __future__ import annotations

import pytest

from scrimp.config import Config, base_architecture, replace_values, resolve
from scrimp.recipes import file_of
from scrimp.recipes.source_weighting import PLAIN, WORDS, findings
from scrimp.study.definition import load_study
from scrimp.study.results import Results, results_of
from scrimp.study.rounds import steps_of
from scrimp.study.rows import Row

STUDY = load_study(str(file_of("recipe:source-weighting", "study")))
NAMES = [one.name for one in STUDY.variants]


def results_of_changes(changes: dict[str, float], seeds: int) -> Results:
    """Results in which a variant's losses are so much above those of the plain run, of source b twice as much; in the
    last seed the other way round."""
    rows: list[Row] = []
    for name, change in changes.items():
        for seed in range(seeds):
            sign = -1 if seed == seeds - 1 and seeds > 1 else 1
            figures = {
                "mean_source_loss": 4.0 + seed + sign * change,
                "held_out_loss/a": 3.0 + seed + sign * 0.5 * change,
                "held_out_loss/b": 5.0 + seed + sign * 1.5 * change,
            }
            steps = steps_of(STUDY.named(name))
            rows.append(Row(variant=name, seed=seed, steps=steps, digest="", figures=figures))
    return results_of(STUDY, {row.key: row for row in rows})


def test_all_variants_are_named_and_can_be_decided() -> None:
    assert [PLAIN, *WORDS] == NAMES
    for one in STUDY.variants:
        config = replace_values(Config(), dict(one.settings))
        resolve(config, base_architecture(config, None), device_type="cpu")


def test_changes_are_means_over_seeds_beside_the_plain_run() -> None:
    said = findings(results_of_changes({PLAIN: 0.0, "weighted": -0.3, "both": 0.06}, seeds=3))
    assert said == [
        "Weights of sources: the mean of the sources' losses changes by -0.1000, lower on 2 of 3 seeds "
        "(a -0.0500, b -0.1500).",
        "Weights and the average of ten: the mean of the sources' losses changes by +0.0200, lower on 1 of 3 seeds "
        "(a +0.0100, b +0.0300).",
    ]


@pytest.mark.parametrize("changes", [{}, {PLAIN: 0.0}, {"weighted": -0.1}])
def test_nothing_is_said_of_runs_that_are_missing(changes: dict[str, float]) -> None:
    assert findings(results_of_changes(changes, seeds=1)) == []
