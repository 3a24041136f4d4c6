"""A layout proven by its first steps: predicted beside measured, corrections, and another layout where it is better."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shlex
import signal
from pathlib import Path

import pytest
from distributed import spawn
from hypothesis import given
from hypothesis import strategies as st
from ranks import Run, environment, start
from runs_on_ranks import on_ranks
from tiny_run import flags, losses, records, scrimp, write_corpus

from scrimp.cli import main
from scrimp.cli.launch import End
from scrimp.config import Config, preset, replace_values, resolve
from scrimp.launchers import ELSEWHERE
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.layout.at_hand import setting_of_run
from scrimp.planner.layout.predict import Prediction, predict
from scrimp.profiler.collectives import Collective
from scrimp.profiler.measured_cluster import RankRates
from scrimp.training import setup
from scrimp.training.chosen_layout import RanksHere, program_of
from scrimp.training.layout_proof import (
    FirstSteps,
    Row,
    axes_of,
    better_layout,
    corrected,
    exchange_rows,
    factors_of,
    table_of,
)
from scrimp.training.memory import block_seconds
from scrimp.training.setup import decide

RATES = RankRates(5e10, 5e10, 3e10, 3e10, 1e10, 5e-6, link=1e9, latency_seconds=1e-4)
FREE = dataclasses.replace(RATES, link=1e15, latency_seconds=1e-12)
"""Ranks between which messages cost nothing."""
HERE = RanksHere(RATES, 2, "here", 2**33)
CONFIG = resolve(
    replace_values(
        Config(),
        {"train.batch_tokens": 2048, "train.sequence": 256, "train.micro_batch": 2, "layout.fsdp": 2},
    ),
    preset("llama-8m"),
    device_type="cpu",
    ranks=2,
).config


def prediction(here: RanksHere) -> Prediction:
    spec = spec_of(preset("llama-8m"))
    found = setting_of_run(CONFIG, sizes_of(spec), here.cluster, program_of(CONFIG, here.cluster, "cpu"))
    assert found is not None
    return predict(found)


@pytest.mark.parametrize("degrees", [(1, 2, 3, 1, 2), (2, 2, 1, 2, 1), (1, 1, 4, 1, 1)])
def test_axes_are_those_whose_coordinates_differ(degrees: tuple[int, ...]) -> None:
    names = ("pp", "dp", "fsdp", "cp", "tp")
    places = list(itertools.product(*map(range, degrees)))
    for one, other in itertools.combinations(range(len(places)), 2):
        differ = [places[one][axis] != places[other][axis] for axis in range(5)]
        assert axes_of((one, other), degrees, names) == tuple(itertools.compress(names, differ))


@given(slower=st.floats(0.2, 5), share=st.floats(0.05, 0.9))
def test_corrected_rates_predict_the_step_that_was_measured(slower: float, share: float) -> None:
    before = prediction(HERE)
    seconds = slower * before.step_seconds
    free = prediction(
        dataclasses.replace(HERE, rates=dataclasses.replace(RATES, link=math.inf, latency_seconds=0))
    )
    found = factors_of(before, free, FirstSteps(seconds, share * seconds, [None], []))
    after = prediction(dataclasses.replace(HERE, rates=corrected(RATES, found)))
    assert after.step_seconds == pytest.approx(seconds, rel=0.02)
    exchanges = after.seconds["communication_exposed"]
    assert exchanges == pytest.approx(share * seconds, rel=0.02)


def test_seconds_of_exchanges_that_are_not_known_leave_one_factor() -> None:
    before = prediction(HERE)
    found = factors_of(before, before, FirstSteps(2 * before.step_seconds, None, [None], []))
    assert found.computing == found.exchanging == pytest.approx(2.0)


def test_a_collective_counts_for_the_axes_of_its_group_and_others_are_shown_without_a_prediction() -> None:
    gather = Collective("all-gather", 2, 100, 50.0, 0.0, (0, 1))
    rows = exchange_rows(
        CONFIG, spec_of(preset("llama-8m")), [gather, dataclasses.replace(gather, operation="broadcast")]
    )
    shown = {row.name: (row.predicted is None, row.measured) for row in rows}
    assert shown == {
        "fsdp/cp all-gather and reduce-scatter: collectives": (False, 1),
        "fsdp/cp all-gather and reduce-scatter: bytes sent": (False, 50.0),
        "fsdp broadcast: collectives": (True, 1),
        "fsdp broadcast: bytes sent": (True, 50.0),
    }


def test_a_better_layout_is_found_whether_the_optimizer_was_named_or_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_seconds, "LIMIT_S", 0.0)
    slow = dataclasses.replace(HERE, rates=dataclasses.replace(RATES, link=2e7))
    sizes = {"device": "cpu", "data.tokenizer": "bytes", "model.preset": "llama-8m", "train.sequence": 256}
    sizes |= {"train.batch_tokens": 2048, "train.micro_batch": 2, "memory.activations": "keep"}
    found = []
    for optimizer in ("adamw", "auto"):
        asked = replace_values(Config(), sizes | {"optimizer.name": optimizer, "budget.device_memory": "4GB"})
        decided = decide(replace_values(asked, {"layout.fsdp": 2}), plans_ahead=True)
        better = better_layout(dataclasses.replace(decided, asked=asked), slow)
        assert better is not None
        found.append(better.values)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("measured", "off"), [(1.09, "nothing"), (0.91, "nothing"), (1.12, "a step"), (0.8, "a step")]
)
def test_what_is_off_by_more_than_a_tenth_is_named(measured: float, off: str) -> None:
    row = Row("a step", 1.0, measured, str)
    assert table_of([row], "title").splitlines()[-1] == f"  off by more than 10 %: {off}"


LAYOUTS = {
    "shards": ["--layout.fsdp=2", "--layout.gathered=1"],
    "zero 1": ["--layout.fsdp=2", "--layout.zero=1"],
    "layers": ["--layout.tp=2", "--model.num-kv-heads=2"],
}


@pytest.mark.slow
def test_ranks_exchange_what_was_planned(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    sizes = ["--train.steps=5", "--train.micro-batch=1", "--checkpoint.every=0"]
    lines = [flags(corpus, tmp_path / name, *sizes, *more) for name, more in LAYOUTS.items()]
    on_ranks(2, tmp_path / "ranks", *lines)
    for name in LAYOUTS:
        (found,) = [one for one in records(tmp_path / name, "events.jsonl") if one["kind"] == "layout-proof"]
        exchanged = {
            key: pair for key, pair in found["figures"].items() if "bytes" in key or "collectives" in key
        }
        known = [pair for pair in exchanged.values() if pair[0] is not None]
        assert len(known) == 2, name
        for planned, counted in known:
            assert counted == pytest.approx(planned, rel=0.02), (name, exchanged)


def taught_wrong(rank: int, words: list[str]) -> int:
    """A run that believes that messages cost nothing."""
    setup.measured_ranks = lambda *given: dataclasses.replace(HERE, rates=FREE)  # type: ignore[assignment]
    return main(words)


@pytest.mark.slow
def test_a_run_that_was_taught_wrong_stops_for_a_better_layout_and_goes_on_in_it(tmp_path: Path) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    settings = [
        "--train.micro-batch=1",
        "--optimizer.lr=1e-3",
        "--schedule.name=constant",
        "--evaluation.every=0",
    ]
    settings += ["--schedule.warmup-steps=2", "--checkpoint.every=0", "--train.steps=1000000"]
    (tmp_path / "ranks").mkdir()
    words = flags(corpus, run, *settings, "--layout.search", "--layout.switch")
    assert spawn(2, taught_wrong, tmp_path / "ranks", words) == [ELSEWHERE] * 2
    assert End(ELSEWHERE, is_asked=False, lost=[]).is_final  # no launcher starts it again as it was
    check = [one for one in records(run, "events.jsonl") if one["kind"] == "layout-check"]
    assert len(check) == 1
    assert len(losses(run)) == 5
    command = re.search(r"`scrimp (launch --ranks 2 .*)`", check[0]["reason"])
    assert command is not None
    again = start(["-m", "scrimp", *shlex.split(command[1])], environment(tmp_path))
    with Run(again, run) as going:
        going.wait_for_steps(8)
        again.send_signal(signal.SIGTERM)
        assert going.end()[0] == 128 + signal.SIGTERM
    assert json.loads((run / "plan.json").read_text())["layout"]["fsdp"] == 1
    settings[-1] = "--train.steps=8"
    assert scrimp(*flags(corpus, tmp_path / "alone", *settings)).returncode == 0
    expected = losses(tmp_path / "alone")
    found = losses(run)
    assert [found[step] for step in expected] == pytest.approx(list(expected.values()), rel=1e-5)
