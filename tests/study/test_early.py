"""Runs are pruned by their gradients and losses as the formula says, again and again the same, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakePlaces, Watched, no_sleep, row_for, study_of
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scrimp.errors import CheckpointError, ConfigError
from scrimp.study.announce import announcement
from scrimp.study.conduct import conduct
from scrimp.study.definition import Study, parse_study
from scrimp.study.early import Signal, early_scores, moving_average, signal_of
from scrimp.study.estimate import Probe
from scrimp.study.job import Job, row_of
from scrimp.study.page import build_page
from scrimp.study.results import results_of
from scrimp.study.rounds import rounds
from scrimp.study.rows import Curve, Key, Row, read_rows
from scrimp.study.table import verdict_table

BY_SIGNAL = '[halving]\nfactor = 2\nrounds = 2\nby = "early-signal"\n'
PROBE = Probe(
    startup_seconds=1, step_seconds=1, host_bytes=1, device_bytes=0, micro_batch=1, data="d", threads=1
)


def signalling(
    study: Study, name: str, seed: int, norm: float, loss: float, steps: int, **more: object
) -> Row:
    """A row with constant curves, whose figure is the norm: the better, the higher the loss early."""
    at = [float(step) for step in range(1, steps + 1)]
    return row_for(
        study,
        name,
        seed,
        norm,
        steps,
        training=Curve(steps=at, values=[loss] * steps),
        gradient_norm=Curve(steps=at, values=[norm] * steps),
        **more,
    )


def survivors_of(study: Study, rows: Mapping[Key, Row]) -> list[list[str]]:
    return [sorted(now.steps) for now in rounds(study, rows)]


def planted(
    study: Study, signals: Mapping[str, tuple[float, float]], steps: int, **more: object
) -> dict[Key, Row]:
    rows = [
        signalling(study, name, seed, norm, loss, steps, **more)
        for name, (norm, loss) in signals.items()
        for seed in study.seeds
    ]
    return {row.key: row for row in rows}


def test_low_norms_and_high_losses_go_on_with_the_control() -> None:
    study = study_of("abcde", seeds=2, tail=BY_SIGNAL)
    # a, the control, has the worst signal. Ranks of norms and losses: b 1+1, c 2+3, d 4+2, e 3+4.
    signals = {"a": (9.0, 1.0), "b": (1.0, 5.0), "c": (2.0, 3.0), "d": (4.0, 4.0), "e": (3.0, 2.0)}
    rows = planted(study, signals, 2) | planted(study, signals, 4) | planted(study, signals, 8)
    assert survivors_of(study, rows) == [["a", "b", "c", "d", "e"], ["a", "b", "c"], ["a", "b"]]


def test_by_figure_the_same_rows_are_ranked_otherwise() -> None:
    by_figure = study_of("abcd", seeds=1, tail="[halving]\n")
    by_signal = study_of("abcd", seeds=1, tail='[halving]\nby = "early-signal"\n')
    # Ranks of norm and loss: b 3+1, c 2+2, d 1+3. All the same, of which those that are listed first go on.
    rows = planted(by_figure, {"a": (9.0, 1.0), "b": (3.0, 9.0), "c": (2.0, 5.0), "d": (0.5, 1.0)}, 4)
    assert survivors_of(by_figure, rows)[1] == ["a", "c", "d"]
    assert survivors_of(by_signal, rows)[1] == ["a", "b", "c"]


def test_runs_that_failed_or_read_other_data_go_first_and_seeds_without_one_are_left_out() -> None:
    study = study_of("abcd", seeds=2, tail='[halving]\nby = "early-signal"\n')
    signals = {"a": (1.0, 1.0), "b": (1.0, 9.0), "c": (2.0, 5.0), "d": (3.0, 4.0)}
    rows = planted(study, signals, 4, data="x")
    assert survivors_of(study, rows)[1] == ["a", "b", "c"]
    broken = rows | {("b", 1, 4): row_for(study, "b", 1, None, 4)}
    assert survivors_of(study, broken)[1] == ["a", "c", "d"]
    elsewhere = rows | {("b", 0, 4): replace(rows["b", 0, 4], data="y")}
    assert survivors_of(study, elsewhere)[1] == ["a", "c", "d"]
    never_finite = replace(rows["b", 0, 4], gradient_norm=Curve(steps=[1.0, 2.0], values=[None, None]))
    assert survivors_of(study, rows | {never_finite.key: never_finite})[1] == ["a", "c", "d"]
    without_control = rows | {("a", 0, 4): row_for(study, "a", 0, None, 4)}
    assert survivors_of(study, without_control)[1] == ["a", "b", "c"]
    nobody = {key: row_for(study, key[0], key[1], None, 4) for key in rows}
    assert survivors_of(study, nobody)[1] == ["a", "b", "c"]


def test_a_study_that_was_killed_decides_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_sleep(monkeypatch)
    study = study_of("abcde", seeds=2, tail=BY_SIGNAL)
    signals = {"a": (9.0, 1.0), "b": (4.0, 2.0), "c": (1.0, 5.0), "d": (2.0, 4.0), "e": (3.0, 3.0)}

    class Signalling(FakePlaces):
        runs = 0

        def _over(self, job: Job) -> Row:
            self.runs += 1
            if self.runs == self.killed_at:
                raise KeyboardInterrupt
            return signalling(study, job.variant, job.seed, *signals[job.variant], job.steps)

    def run(folder: Path, killed_at: int) -> Watched:
        places, watched = Signalling(study, lambda job: 0.0, count=1), Watched()
        places.killed_at = killed_at  # type: ignore[attr-defined]
        probes = {one.name: PROBE for one in study.variants}
        conduct(study, folder, places, probes, watched)
        return watched

    whole = run(tmp_path / "whole", 0)
    assert whole.gone == [{"b": 2, "e": 2}, {"d": 4}]
    for killed_at in (4, 11, 14, 18):
        folder = tmp_path / str(killed_at)
        with pytest.raises(KeyboardInterrupt):
            run(folder, killed_at)
        run(folder, 0)
        assert read_rows(folder).keys() == read_rows(tmp_path / "whole").keys()


def test_the_average_is_that_of_the_recursion() -> None:
    """m_t = β m_(t-1) + (1 - β) x_t from 0, divided by 1 - β^t, over what is finite up to a step."""
    curve = Curve(steps=[2.0, 4.0, 6.0, 8.0], values=[5.0, None, 3.0, 100.0])
    mean, weight = 0.0, 0.0
    for value in (5.0, 3.0):
        mean, weight = 0.9 * mean + 0.1 * value, 0.9 * weight + 0.1
    assert moving_average(curve, 7.9) == pytest.approx(mean / weight)
    assert moving_average(curve, 2.0) == 5.0
    assert moving_average(curve, 1.0) is None


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(*[st.integers(0, 4)] * 4), min_size=1))
def test_scores_are_counted_ranks(drawn: dict[str, tuple[int, int, int, int]]) -> None:
    """The rank of a value: how many are smaller, and half of those that are equal, itself among these."""
    signals = {name: {0: Signal(one[0], one[1]), 7: Signal(one[2], one[3])} for name, one in drawn.items()}

    def rank(of: float, values: list[float]) -> float:
        return sum(one < of for one in values) + (sum(one == of for one in values) + 1) / 2

    for name, score in early_scores(signals).items():
        expected = 0.0
        for seed in (0, 7):
            norms = [one[seed].gradient_norm for one in signals.values()]
            losses = [-one[seed].loss for one in signals.values()]
            mine = signals[name][seed]
            expected += (rank(mine.gradient_norm, norms) + rank(-mine.loss, losses)) / 4
        assert score == pytest.approx(expected)


def test_rows_without_norms_are_read_and_refused_where_they_would_decide(tmp_path: Path) -> None:
    study = study_of("abc", seeds=1, tail='[halving]\nby = "early-signal"\n')
    rows = [row_for(study, name, 0, 1.0, 4) for name in "abc"]
    with pytest.raises(CheckpointError, match="no gradient norms") as refusal:
        survivors_of(study, {row.key: row for row in rows})
    assert "remove that line" in str(refusal.value.do)
    assert signal_of(row_for(study, "a", 0, None, 4)) is None
    published = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-27-data-limited.jsonl"
    assert "gradient_norm" not in json.loads(published.read_text().splitlines()[0])
    (tmp_path / "rows.jsonl").write_bytes(published.read_bytes())
    assert {row.gradient_norm for row in read_rows(tmp_path).values()} == {None}


def test_rows_have_the_norms_of_their_runs(tmp_path: Path) -> None:
    job = Job(
        variant="a",
        seed=0,
        digest="d",
        settings={},
        steps=3,
        folder=tmp_path,
        figure="training_loss",
    )
    job.run_folder.mkdir()
    norms = [3e-9, None, 2.0, 7.0]
    records = [{"step": step, "loss": 3.0, "grad_norm": norm} for step, norm in enumerate(norms, start=1)]
    (job.run_folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    row = row_of(job, seconds=1.0)
    assert row.gradient_norm == Curve(steps=[1, 2, 3], values=[3e-9, None, 2.0])


def test_it_says_by_what_variants_were_dropped() -> None:
    study = study_of("abc", seeds=2, tail='[halving]\nby = "early-signal"\n')
    signals = {"a": (9.0, 1.0), "b": (1.0, 5.0), "c": (2.0, 3.0)}
    rows = planted(study, signals, 4) | planted(study, {name: signals[name] for name in "ab"}, 8)
    results = results_of(study, rows)
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(verdict_table(results))
    assert "dropped after step 4 by early signal" in console.export_text()
    page = build_page(results)
    assert "c (dropped after step 4 by early signal)" in page
    assert "one of 2 goes on, ranked by early signal: a low gradient norm, a high training loss" in page
    probes = {one.name: PROBE for one in study.variants}
    lines = announcement(study, {}, probes, places=1, limited_by="", seconds=1.0, threads=1)
    assert any(line.startswith("halving by early signal: a low gradient norm") for line in lines)
    by_figure = study_of("abc", seeds=2, tail="[halving]\n")
    assert "(dropped after step 4 by held-out loss)" in build_page(results_of(by_figure, rows))


def test_runs_of_fewer_steps_are_ranked_where_as_large_a_share_of_them_is_over() -> None:
    """d has half as many, and is held against the control of twice its step."""
    text = "seeds = 1\n[settings]\ntrain.steps = 8\n"
    text += "".join(f'[[variants]]\nname = "{name}"\n' for name in "abcd") + "train.steps = 4\n" + BY_SIGNAL
    study = parse_study(text, name="mine", where="mine.toml")
    signals = {"a": (9.0, 1.0), "b": (4.0, 2.0), "c": (2.0, 4.0), "d": (1.0, 5.0)}
    rows = planted(study, {name: signals[name] for name in "abc"}, 2) | planted(study, {"d": signals["d"]}, 1)
    rows |= planted(study, {name: signals[name] for name in "ac"}, 4) | planted(study, {"d": signals["d"]}, 2)
    ends = [now.steps for now in rounds(study, rows | planted(study, {"a": signals["a"]}, 8))]
    assert ends == [{"a": 2, "b": 2, "c": 2, "d": 1}, {"a": 4, "c": 4, "d": 2}, {"a": 8, "d": 4}]
    read_elsewhere = {
        ("d", 0, 1): replace(rows["d", 0, 1], data="y"),
        ("a", 0, 2): replace(rows["a", 0, 2], data="x"),
    }
    assert survivors_of(study, rows | read_elsewhere)[1] == ["a", "b", "c"]
    assert "after 1/4 of their steps and after 1/2 of their steps one of 2" in build_page(
        results_of(study, rows)
    )
    probes = {one.name: PROBE for one in study.variants}
    lines = announcement(study, {}, probes, places=1, limited_by="", seconds=1.0, threads=1)
    assert any(
        "all run to 1/4 of their steps; one of 2 goes on to 1/2 of their steps, then to their end" in line
        for line in lines
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('by = "gradients"\n', "halving.by in mine.toml is not one of its choices"),
        ("by = 1\n", "halving.by in mine.toml is not one of its choices"),
        ("bye = 1\n", "unknown key halving.bye"),
    ],
)
def test_what_cannot_rank_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        study_of("abc", tail="[halving]\n" + text)


@pytest.mark.parametrize("setting", ["model.width = 64", "objective.z_loss = 1e-3", "adapter.rank = 4"])
def test_norms_of_other_models_and_losses_are_refused(setting: str) -> None:
    text = f'[settings]\ntrain.steps = 8\n[[variants]]\nname = "a"\n[[variants]]\nname = "b"\n{setting}\n[halving]\n'
    if "adapter" in setting:
        text = text.replace("[[variants]]", 'model.weights = "w"\n[[variants]]', 1)
    parse_study(text, name="mine", where="mine.toml")
    with pytest.raises(ConfigError, match="differs between variants") as refusal:
        parse_study(text + 'by = "early-signal"\n', name="mine", where="mine.toml")
    assert "early signals" in str(refusal.value.expected)
