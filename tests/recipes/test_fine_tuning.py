"""The recipe's findings on planted rows, and its run as it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from scrimp.cli import main
from scrimp.recipes import file_of
from scrimp.recipes.fine_tuning import findings
from scrimp.report.read_run import read_run
from scrimp.study.definition import load_study
from scrimp.study.results import results_of
from scrimp.study.rounds import steps_of
from scrimp.study.rows import Curve, Key, Row

STUDY = load_study(str(file_of("recipe:fine-tuning", "study")))
SWEEP = ("small-5e-4", "small-2e-3", "small-8e-3", "large-5e-4", "large-2e-3", "large-8e-3")
LOSSES = dict(zip(SWEEP, (2.50, 2.20, 2.30, 2.60, 2.40, 2.10), strict=True))
NORMS = dict(zip(SWEEP, (5.0, 2.0, 3.0, 6.0, 4.0, 1.0), strict=True))
"""In the order of the losses."""


def planted(
    losses: Mapping[str, float] = LOSSES,
    norms: Mapping[str, float] = NORMS,
    early: Mapping[str, float] | None = None,
    phased: tuple[float, float] = (0.3, -0.1),
    seeds: int = 3,
) -> dict[Key, Row]:
    """Rows whose curves say one thing in the first quarter of a run, and the opposite later."""
    rows = {}
    for one in STUDY.variants:
        for seed in range(seeds):
            loss, steps = losses.get(one.name, 2.2), steps_of(one)
            changes = phased if one.name == "phased" else (0.0, 0.0)
            mean = loss + seed / 100 + sum(changes) / 2 * (1 if seed < 2 else -1)
            at = [float(step) for step in range(1, steps + 1)]
            in_quarter = [step <= steps / 4 for step in at]
            norm = norms.get(one.name, 1.0)
            high = (early or {}).get(one.name, -norm)
            rows[one.name, seed, steps] = Row(
                variant=one.name,
                seed=seed,
                steps=steps,
                digest="",
                figures={
                    "mean_source_loss": mean,
                    "held_out_loss/stdlib-docstrings": loss + changes[0],
                    "held_out_loss/stdlib-signatures": loss + changes[1],
                },
                gradient_norm=Curve(steps=at, values=[norm if one else -norm for one in in_quarter]),
                training=Curve(steps=at, values=[high if one else -high for one in in_quarter]),
            )
    return rows


def said(rows: Mapping[Key, Row]) -> list[str]:
    return findings(results_of(STUDY, rows))


def test_the_sweep_has_the_same_samples_in_every_run() -> None:
    runs = [STUDY.named(name) for name in SWEEP]
    assert {one.settings["train.batch_tokens"] * steps_of(one) for one in runs} == {262_144}
    first, phased, control = (STUDY.named(name) for name in ("first-phase", "phased", STUDY.control))
    assert steps_of(first) + steps_of(phased) == steps_of(control)
    assert {one.settings["train.batch_tokens"] for one in (first, phased, control)} == {2048}


def test_findings_say_what_was_planted() -> None:
    batches, early, phases = said(planted())[:3], said(planted())[3:5], said(planted())[5:]
    assert batches == [
        "Batch of 2,048 tokens: 2.2100 at its best rate, 0.002.",
        "Batch of 8,192 tokens: 2.1100 at its best rate, 0.008.",
        # large at 5e-4 beside small at 2e-3 and 8e-3, large at 2e-3 beside small at 8e-3
        "Of 3 comparisons of a larger batch and lower rate with a smaller batch and higher rate, the larger batch ends "
        "lower in 0.",
    ]
    assert early == [
        "After a quarter of the steps, Spearman's correlation of the early score and the final loss is +1.00 over 6 "
        "runs' means (+1: as the guide has it); by low gradient norm alone +1.00, by high loss alone +1.00.",
        "The better half by that score is large-8e-3, small-2e-3, small-8e-3; the best at the end, large-8e-3, is "
        "among them.",
    ]
    assert phases == [
        "Two phases in the place of one mixture of the same samples change the loss by +0.0333 (stdlib-docstrings "
        "+0.3000, stdlib-signatures -0.1000); lower on 1 of 3 seeds."
    ]


def test_a_signal_that_misleads_is_said_so() -> None:
    opposite = {name: -norm for name, norm in NORMS.items()}
    found = said(planted(norms=opposite))
    assert "final loss is -1.00" in found[3]
    assert found[4].endswith("the best at the end, large-8e-3, is not among them.")
    found = said(planted(early=NORMS))  # the norm points one way, the loss the other
    assert "final loss is +0.00" in found[3]
    assert "gradient norm alone +1.00, by high loss alone -1.00." in found[3]


def test_larger_batches_with_lower_rates_are_counted() -> None:
    found = said(planted(losses=LOSSES | {"large-5e-4": 2.25, "large-2e-3": 2.0}))
    assert found[2].endswith("the larger batch ends lower in 2.")


def test_of_runs_that_are_missing_nothing_is_said() -> None:
    rows = planted()
    without = {key: row for key, row in rows.items() if key[0] != "large-2e-3"}
    assert [one.split()[0] for one in said(without)] == ["Two"]
    halved = {
        (name, seed, steps // 2 if name == "large-2e-3" else steps): replace(
            row, steps=steps // 2 if name == "large-2e-3" else steps
        )
        for (name, seed, steps), row in rows.items()
    }
    assert [one.split()[0] for one in said(halved)] == ["Two"]
    failed = {key: row if key[0] != "phased" else replace(row, error="it broke") for key, row in rows.items()}
    assert len(said(failed)) == 5
    assert said({}) == []


@pytest.mark.slow
def test_the_recipe_trains_as_it_stands(tmp_path: Path) -> None:
    run = tmp_path / "run"
    smaller = [
        "--train.steps=4",
        "--train.batch-tokens=4096",
        "--evaluation.tokens=1024",
        "--model.num-layers=1",
    ]
    words = [
        "train",
        "recipe:fine-tuning",
        *smaller,
        f"--run.dir={run}",
        f"--data.cache={tmp_path / 'cache'}",
    ]
    assert main([*words, "--device=cpu"]) == 0
    found = read_run(run)
    losses, rates = found.recorded("loss")[1], found.recorded("lr")[1]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert len(set(rates.tolist())) == 1, "constant, without warm-up"
    assert (run / "tokenizer" / "chat_template.jinja").is_file()
