"""Stages as a recipe: its run and its study are the same stages, and what is said of losses is what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scrimp.cli.build import build
from scrimp.cli.staged import StagedTrain
from scrimp.config.mixture import mixed_sources
from scrimp.recipes import file_of
from scrimp.recipes.staged import domain_of, findings, stages_of
from scrimp.study.definition import Study, load_study
from scrimp.study.results import results_of
from scrimp.study.rounds import steps_of
from scrimp.study.rows import Row

TEXT = "held_out_loss/stdlib:http"


@pytest.fixture(scope="module")
def study() -> Study:
    return load_study(str(file_of("recipe:staged", "study")))


def said(study: Study, losses: dict[str, list[float]]) -> list[str]:
    """Findings where variants have these losses of the domain, a seed each."""
    rows = [
        Row(
            variant=name,
            seed=seed,
            steps=steps_of(study.named(name)),  # type: ignore[arg-type]
            digest="",
            figures={"mean_source_loss": 9.0, TEXT: loss},
        )
        for name, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    return findings(results_of(study, {row.key: row for row in rows}))


def test_the_run_and_the_study_have_the_same_stages(study: Study) -> None:
    command, _ = build("train", ["recipe:staged"])
    assert isinstance(command, StagedTrain)
    names = stages_of(study)[::-1]
    assert names == ["stage-1", "stage-2", "staged"]
    assert command.stages.count == 3
    for number, name in enumerate(names, start=1):
        config, _ = command.stages.stage(number, Path("r"))
        settings = study.named(name).settings  # type: ignore[union-attr]
        assert config.data.mix == settings["data.mix"]
        assert config.train.steps == settings["train.steps"]
        assert config.optimizer.lr == settings["optimizer.lr"]
        assert config.optimizer.from_weights == settings.get("optimizer.from_weights", False)
        assert config.data.tokens == settings["data.tokens"]


def test_what_is_compared_costs_the_same(study: Study) -> None:
    steps = {one.name: one.settings["train.steps"] for one in study.variants}
    assert sum(steps[name] for name in stages_of(study)) == steps["in-domain"] == steps["mixed"] == 400
    assert steps["in-domain-short"] == steps["staged"] + steps["stage-2"] // 2
    second = mixed_sources(study.named("stage-2").settings["data.mix"])  # type: ignore[union-attr]
    assert 2 * next(one.share for one in second if one.name == "stdlib:http") == sum(
        one.share for one in second
    )
    assert domain_of(study) == "stdlib:http"


def test_gains_are_those_of_the_seeds_that_both_have(study: Study) -> None:
    losses = {"staged": [3.0, 3.2], "in-domain": [3.5, 3.4, 9.0], "mixed": [2.9, 3.1], "stage-1": [4.0]}
    lines = said(study, losses)
    assert lines[0] == (
        "held-out loss of stdlib:http: stage-1 4.000, staged 3.100, in-domain 5.300, mixed 3.000."
    )
    assert lines[1] == "staged less in-domain: -0.350 (-0.500 to -0.200), better in 2 of 2 seeds."
    assert lines[2] == "staged less mixed: +0.100 (+0.100 to +0.100), better in 0 of 2 seeds."
    assert len(lines) == 3


def test_of_runs_that_are_missing_nothing_is_said(study: Study) -> None:
    assert said(study, {}) == []
    assert said(study, {"in-domain": [3.0]}) == ["held-out loss of stdlib:http: in-domain 3.000."]
    assert said(study, {"mixed": [3.0]}) == ["held-out loss of stdlib:http: mixed 3.000."]


def test_of_a_study_of_ones_own_without_a_mixture_nothing_is_said(study: Study) -> None:
    variants = tuple(replace(one, settings={"train.steps": 8}) for one in study.variants)
    assert said(replace(study, variants=variants), {"staged": [3.0], "mixed": [3.1]}) == []
