"""Finished studies as workloads: what counts as reached, what is refused, and the command with its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import row_for

from scrimp.cli import main
from scrimp.errors import ConfigError
from scrimp.study.conduct import STUDY_FILE
from scrimp.study.definition import Study, parse_study
from scrimp.study.page import build_page
from scrimp.study.results import results_of
from scrimp.study.rows import Curve, Row, append_row
from scrimp.study.workloads import standing

HEAD = 'figure = "steps_to_target"\ntarget = 2.0\n'
STEPS = [10.0, 20.0, 30.0, 40.0]


def workload(head: str = HEAD, variants: Sequence[str] = ("a", "b", "c"), tail: str = "") -> Study:
    """40 steps of 512 tokens, an evaluation every 10."""
    text = f"seeds = 3\n{head}[settings]\ntrain.steps = 40\ntrain.batch_tokens = 512\nevaluation.every = 10\n"
    for number, name in enumerate(variants, start=1):
        text += f'[[variants]]\nname = "{name}"\noptimizer.lr = {number / 1000}\n'
    return parse_study(text + tail, name="mine", where="mine.toml")


def run(study: Study, variant: str, seed: int, losses: Sequence[float | None], **more: object) -> Row:
    """A run whose evaluations had these losses."""
    curve = Curve(steps=STEPS[: len(losses)], values=list(losses))
    figures = {} if "error" in more else {"held_out_loss": losses[-1]}
    return row_for(study, variant, seed, 1.0, 40, held_out=curve, figures=figures, **more)


SLOW, FAST, NEVER = [4.0, 3.0, 2.5, 2.0], [3.0, 1.9, 2.1, 1.8], [4.0, 3.0, 2.5, 2.000001]


def write(folder: Path, study: Study, losses: dict[str, list[list[float]]], *more: Row) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STUDY_FILE).write_text(study.text)
    rows = [run(study, n, seed, one) for n, runs in losses.items() for seed, one in enumerate(runs)]
    for row in [*rows, *more]:
        append_row(folder, row)
    return folder


RACE = {"a": [SLOW, SLOW, FAST], "b": [FAST, FAST, NEVER], "c": [NEVER, SLOW, NEVER]}


def test_the_first_evaluation_at_or_below_the_target_counts() -> None:
    study = workload()
    rows = {row.key: row for n in RACE for s, one in enumerate(RACE[n]) if (row := run(study, n, s, one))}
    a, b, c = results_of(study, rows).outcomes
    assert (a.values, b.values[0]) == ({0: 40.0, 1: 40.0, 2: 20.0}, 20.0)
    assert (a.centre, b.centre, c.centre) == (40.0, 20.0, float("inf"))
    assert b.verdict == "no interval: of 3 pairs the target was never reached in 1, by the control in 0"
    assert c.verdict == "no interval: of 3 pairs the target was never reached in 2, by the control in 0"
    page = build_page(results_of(study, rows))
    assert "<td>never</td>" in page
    assert "held-out loss 2.000" in page


def test_two_that_never_reach_it_are_no_difference_of_zero() -> None:
    study = workload(variants="ab")
    rows = [run(study, name, seed, NEVER) for name in "ab" for seed in range(3)]
    (b,) = results_of(study, {row.key: row for row in rows}).others
    assert b.verdict == "no interval: of 3 pairs the target was never reached in 3, by the control in 3"


def test_steps_that_all_reach_have_intervals() -> None:
    study = workload(variants="ab")
    rows = [run(study, "a", seed, SLOW) for seed in range(3)] + [run(study, "b", s, FAST) for s in range(3)]
    (b,) = results_of(study, {row.key: row for row in rows}).others
    assert b.verdict == "lower by 20.00 (50.00%)"


def test_a_target_can_be_read_again_from_the_same_rows(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", workload(), RACE)
    assert standing([folder]).workloads[0].entries["a"].steps == 40
    (folder / STUDY_FILE).write_text(workload(HEAD.replace("2.0", "2.5")).text)
    assert standing([folder]).workloads[0].entries["a"].steps == 30


def test_runs_that_failed_count_by_what_they_had(tmp_path: Path) -> None:
    study = workload()
    failed = [run(study, "c", 0, FAST[:2], error="it broke"), run(study, "c", 1, SLOW[:1], error="it broke")]
    folder = write(tmp_path / "one", study, RACE | {"c": []}, *failed, run(study, "c", 2, FAST))
    entry = standing([folder]).workloads[0].entries["c"]
    assert (entry.steps, entry.reached, entry.failed) == (20.0, 2, 2)


def test_trials_of_a_submission_are_its_best_of_each_seed(tmp_path: Path) -> None:
    tail = '[submissions]\nmine = ["a", "b"]\ntheirs = ["c", "d"]\n'
    study = workload(variants="abcd", tail=tail)
    folder = write(tmp_path / "one", study, RACE | {"d": [SLOW, NEVER, SLOW]})
    found = standing([folder])
    entries = found.workloads[0].entries
    assert (entries["mine"].steps, entries["theirs"].steps) == (20.0, 40.0)
    assert found.scores == pytest.approx({"mine": 1.0, "theirs": 2 / 3})


def test_seconds_are_those_of_native_runs_that_had_their_machine_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three submissions of 40 steps of 512 tokens: bf16, an emulated format, and one whose runs were two at once."""
    text = (
        workload()
        .text.replace("0.001\n", '0.001\nprecision = "bf16"\n')
        .replace("0.002\n", '0.002\nprecision = "fp8"\n')
    )
    study = parse_study(text, name="mine", where="mine.toml")
    folder = tmp_path / "one"
    write(folder, study, {})
    for name in "abc":
        for seed, rate in enumerate((500.0, 1024.0, 2000.0)):
            row = run(study, name, seed, SLOW, at_once=2 if name == "c" else 1)
            append_row(folder, replace(row, figures=row.figures | {"tokens_per_second": rate}))
    found = standing([folder]).workloads[0].entries
    assert {name: one.seconds for name, one in found.items()} == {"a": 20.0, "b": None, "c": None}
    assert main(["score", str(folder), "--out", str(tmp_path / "score.html")]) == 0
    assert "measured seconds of the steps to the target" in " ".join(capsys.readouterr().out.split())
    assert "Measured seconds" in (tmp_path / "score.html").read_text()
    append_row(
        folder, replace(row, variant="a", seed=0, digest=study.digest(study.named("a"), 0), machine="other")
    )
    assert standing([folder]).workloads[0].entries["a"].seconds is None


def test_fewer_seeds_than_the_file_has_are_scored_where_all_ran_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", workload(), {name: runs[:1] for name, runs in RACE.items()})
    (found,) = standing([folder]).workloads
    assert (found.seeds, found.entries["a"].steps, found.entries["b"].steps) == (1, 40, 20)


def test_the_command_prints_a_table_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "lm", workload(), RACE)
    hard = {"a": [SLOW] * 3, "b": [NEVER] * 3, "c": [FAST] * 3}
    write(tmp_path / "lm2", workload(HEAD + 'held_out_of = "lm"\n'), hard)
    write(tmp_path / "copy", workload(), {"a": [SLOW] * 3, "b": [FAST] * 3, "c": [NEVER] * 3})
    page = tmp_path / "score.html"
    folders = [str(tmp_path / name) for name in ("lm", "lm2", "copy")]
    assert main(["score", *folders, "--out", str(page)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    # lm: b, which was fastest there, fails on its held-out variant. copy: b is fastest, a takes twice its steps.
    assert "self-tuning" in shown
    assert "a 0.833 1.00 2.00" in shown
    assert "b 0.500 – 1.00" in shown
    assert "c 0.000 – –" in shown
    assert "40 (20.5k)" in shown
    assert "never in 40, 0 of 3" in shown
    text = page.read_text()
    assert text.count('class="s1"') == 2
    assert "held-out variant of" in text


REFUSED = {
    "losses": ("", {}, "is no workload"),
    "unfinished": (HEAD, {"a": [SLOW, SLOW, SLOW], "b": [SLOW]}, "is not finished"),
    "nothing ran": (HEAD, {}, "is not finished"),
    "its workload is missing": (HEAD + 'held_out_of = "other"\n', RACE, "a workload that is not there"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_scored_is_refused(case: str, tmp_path: Path) -> None:
    head, losses, what = REFUSED[case]
    folder = write(tmp_path / "one", workload(head), losses)
    with pytest.raises(ConfigError) as refusal:
        standing([folder])
    assert what in refusal.value.what


def test_other_submissions_and_other_data_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one", workload(), RACE)
    other = write(tmp_path / "two", workload(variants="ab"), {"a": RACE["a"], "b": RACE["b"]})
    with pytest.raises(ConfigError) as refusal:
        standing([one, other])
    assert refusal.value.got == "a, b, 1 trial each"
    study = workload(variants="ab")
    rows = [run(study, name, seed, SLOW, data=name * 64) for name in "ab" for seed in range(3)]
    with pytest.raises(ConfigError) as refusal:
        standing([write(tmp_path / "three", study, {}, *rows)])
    assert "cannot be scored" in refusal.value.what


def test_nothing_to_score_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["score"]) == 2
    assert "no study is named" in capsys.readouterr().err
    assert main(["score", str(tmp_path)]) == 2
    assert "is no study's folder" in capsys.readouterr().err
