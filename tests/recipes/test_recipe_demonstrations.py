"""Models trained with demonstrations or without: a planted order is said, and the recipe's run trains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from scrimp.cli import main
from scrimp.config.mixture import mixed_sources
from scrimp.recipes import file_of
from scrimp.recipes.demonstrations import KINDS, findings
from scrimp.study.definition import Study, load_study
from scrimp.study.results import results_of
from scrimp.study.rounds import steps_of
from scrimp.study.rows import Row


@pytest.fixture(scope="module")
def study() -> Study:
    return load_study(str(file_of("recipe:demonstrations", "study")))


def said(study: Study, losses: Mapping[tuple[str, str, int], float]) -> list[str]:
    """Findings where (variant, kind of demonstrations, seed) has these losses."""
    rows: dict[tuple[str, int], Row] = {}
    for name, seed in {(variant, seed) for variant, _, seed in losses}:
        one = study.named(name)
        figures: dict[str, float | None] = {"mean_source_loss": 1.0} | {
            f"held_out_loss/label-maps:{kind}": loss
            for (variant, kind, of), loss in losses.items()
            if (variant, of) == (name, seed)
        }
        row = Row(variant=name, seed=seed, steps=steps_of(one), digest="", figures=figures)
        rows[row.key] = row
    return findings(results_of(study, rows))


def planted(seeds: int) -> dict[tuple[str, str, int], float]:
    """Own kind: 0.7, 0.5, 0.1; retrieved ones: 0.9, 0.3, 0.1; tuned: 0.8, 0.2, 0.05; a seed adds nothing."""
    found = {}
    for seed in range(seeds):
        for kind, own, retrieved, tuned in zip(
            KINDS, (0.7, 0.5, 0.1), (0.9, 0.3, 0.1), (0.8, 0.2, 0.05), strict=True
        ):
            found |= {
                (kind, kind, seed): own,
                (kind, "bm25", seed): retrieved,
                (f"{kind}-tuned", "bm25", seed): tuned,
            }
    return found


def test_planted_losses_are_said_in_their_order(study: Study) -> None:
    own, retrieved, tuned = said(study, planted(1))
    assert own.startswith(
        "Each model with the demonstrations that it was trained with: none 0.700, random 0.500, "
    )
    assert "none 0.900, random 0.300, bm25 0.100 nats" in retrieved
    assert "none 0.800, random 0.200, bm25 0.050 nats" in tuned
    assert all(
        one.endswith("retrieved below random below none on 1 of 1 seed.") for one in (own, retrieved, tuned)
    )


def test_seeds_are_averaged_and_those_out_of_order_counted(study: Study) -> None:
    losses = planted(2)
    losses["random", "random", 1] = 0.9  # above none
    own, *_ = said(study, losses)
    assert "none 0.700, random 0.700, bm25 0.100" in own
    assert own.endswith("on 1 of 2 seeds.")


def test_of_runs_that_are_missing_nothing_is_said(study: Study) -> None:
    losses = {key: loss for key, loss in planted(1).items() if key[0] != "random-tuned"}
    assert len(said(study, losses)) == 2
    assert said(study, {}) == []


def test_each_variant_trains_on_one_kind_and_is_tuned_on_the_same(study: Study) -> None:
    trained = {
        one.name: [part.name for part in mixed_sources(one.settings["data.mix"]) if part.share]
        for one in study.variants
    }
    assert trained == {
        name: [f"label-maps:{'few-shot' if is_tuned else kind}"]
        for kind in KINDS
        for name, is_tuned in ((kind, False), (f"{kind}-tuned", True))
    }
    for kind in KINDS:
        assert str(study.named(f"{kind}-tuned").settings["model.weights"]) == f"run:{kind}"


@pytest.mark.slow
def test_the_recipe_s_run_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe:demonstrations", "--train.steps=3", "--evaluation.every=0", "--evaluation.tokens=1024"]
    words += ["--device=cpu", f"--data.cache={tmp_path / 'cache'}", f"--run.dir={tmp_path / 'run'}"]
    assert main(["train", *words]) == 0
    shown = capsys.readouterr()
    assert re.search(r"9,\d{3} conversations in", shown.out + shown.err)
    losses = re.findall(r'"loss": ([0-9.]+)', (tmp_path / "run" / "metrics.jsonl").read_text())
    assert len(losses) == 3
    assert all(0 < float(loss) < 10 for loss in losses)
