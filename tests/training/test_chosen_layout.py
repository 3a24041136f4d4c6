"""The layout of runs that give none: by rates that are known, and on two ranks as they are here."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from pathlib import Path

import pytest
from distributed import spawn
from runs_on_ranks import check_same_course, goes_on, on_ranks
from tiny_run import flags, scrimp, write_corpus

from scrimp.cli import main
from scrimp.config import Config, preset, replace_values, resolve
from scrimp.config.activations import assign_activations
from scrimp.profiler.measured_cluster import RankRates, cluster_of
from scrimp.training import setup
from scrimp.training.chosen_layout import LEAST_GAIN, ChosenLayout, RanksHere, choose_on, is_open

AXES = ("pp", "dp", "fsdp", "cp", "tp")
RATES = RankRates(5e10, 5e10, 3e10, 3e10, 1e10, 5e-6, link=1e9, latency_seconds=1e-4)
FAST = dataclasses.replace(RATES, link=1e15, latency_seconds=1e-12)


def chosen(
    rates: RankRates, settings: dict[str, object] | None = None, memory: int = 2**33
) -> ChosenLayout | None:
    sizes = {"train.batch_tokens": 2048, "train.sequence": 256}
    config = replace_values(Config(), {**sizes, **(settings or {})})
    architecture = preset("llama-8m")
    default = resolve(config, architecture, device_type="cpu", ranks=2)
    cluster = cluster_of(rates, ranks=2, name="here", memory_bytes=memory)
    return choose_on(cluster, config, default, architecture, device_type="cpu")


SLOW = dataclasses.replace(RATES, link=2e7)


def test_slow_links_choose_another_layout_and_say_how_much_faster_it_is() -> None:
    found = chosen(SLOW)
    assert found is not None
    assert found.is_other
    assert found.before is not None
    assert found.before.seconds >= LEAST_GAIN * found.best.seconds
    degrees = [reason for key, reason in found.reasons.items() if key.startswith("layout.")]
    assert degrees
    assert all(" times as fast as fsdp 2, zero 3" in reason for reason in degrees)
    assert found.reasons.keys() == found.values.keys()


def test_shards_stay_where_links_cost_nothing_and_what_is_beside_them_is_searched() -> None:
    found = chosen(FAST)
    assert found is not None
    assert not found.is_other
    assert (found.values["layout.fsdp"], found.values["memory.activations"]) == (2, "keep")
    assert found.values["train.micro_batch"] == found.best.setting.micro_batch
    assert "no other layout" in found.reasons["layout.fsdp"]
    assert "searched with fsdp 2" in found.reasons["memory.activations"]


def test_where_nothing_fits_nothing_is_chosen() -> None:
    assert chosen(RATES, memory=1) is None


def test_little_memory_makes_blocks_again_and_the_run_has_the_setting_of_it() -> None:
    found = chosen(FAST, {"layout.tp": 1, "layout.zero": 1, "train.micro_batch": 4}, memory=150 * 2**20)
    assert found is not None
    plans = found.best.setting.blocks
    assert {one.recompute for one in plans} != {"none"}
    named = {"none": "keep", "selective": "norms", "full": "block"}
    given = assign_activations(found.values["memory.activations"], len(plans))
    assert [one.level for one in given] == [named[one.recompute] for one in plans]
    assert "train.micro_batch" not in found.values


def test_what_the_user_gave_is_no_value_of_the_search() -> None:
    given = {"train.micro_batch": 1, "memory.activations": "mlp", "layout.gathered": "0", "layout.zero": 3}
    found = chosen(FAST, given)
    assert found is not None
    assert not given.keys() & found.values.keys()
    assert {one.recompute for one in found.best.setting.blocks} == {"selective"}
    timed = chosen(FAST, {"memory.split": "fastest"})
    assert timed is not None
    assert all(key.startswith("layout.") for key in timed.values)


def test_formats_that_are_planned_later_count_and_are_not_chosen() -> None:
    found = chosen(FAST, {"precision": "snip"})
    assert found is not None
    assert {recipe for one in found.best.setting.blocks for _, recipe in one.formats} <= {"nvfp4", "fp8"}
    assert not any(key.startswith(("precision", "snip")) for key in found.values)
    assert "stay SNIP's" in found.reasons["memory.activations"]


def test_what_the_runtime_refuses_is_not_chosen() -> None:
    found = chosen(SLOW, {"optimizer.moments": "8bit"})
    assert found is not None
    assert found.best.setting.layout.tp == 1  # 8-bit moments beside tp are refused


def test_what_the_account_decides_is_left_out_second() -> None:
    found = chosen(FAST)
    assert found is not None
    (first, _), (second, why) = found.ways()
    assert first == found.values
    assert first.keys() - second.keys() == {"memory.activations", "layout.gathered"}
    assert "does not fit by the traced account" in why["memory.activations"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"layout.search": False}, False),
        ({"layout.tp": 2}, False),
        ({"layout.fsdp": 2}, False),
        ({"precision": "snip"}, True),
        ({"outer.every": 4}, False),
    ],
)
def test_a_layout_that_is_given_is_not_searched(settings: dict[str, object], expected: bool) -> None:
    config = replace_values(Config(), settings)
    default = resolve(config, preset("llama-8m"), device_type="cpu", ranks=2)
    assert is_open(config, default) is expected


@pytest.mark.slow
def test_a_run_without_a_layout_trains_keeps_its_layout_and_has_the_losses_of_one_process(
    tmp_path: Path,
) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "two"
    settings = ["--train.steps=6", "--checkpoint.every=3", "--train.micro-batch=1", "--layout.search"]
    assert scrimp(*flags(corpus, tmp_path / "alone", *settings[:-1])).returncode == 0
    on_ranks(2, tmp_path / "ranks", flags(corpus, run, *settings))
    check_same_course(run, tmp_path / "alone")
    on_ranks(2, tmp_path / "again", goes_on(run, tmp_path / "on", 3))
    kept = [tomllib.loads((one / "config.toml").read_text())["layout"] for one in (run, tmp_path / "on")]
    assert kept[0] == kept[1]
    assert math.prod(kept[0].get(axis, 1) for axis in AXES) == 2
    reasons = json.dumps(json.loads((run / "plan.json").read_text()))
    assert "predicted" in reasons


MEMORY = {"little": 550 * 2**10, "much": 2**33}
"""Bytes of device memory of a rank, as the search is told."""
BUDGETS = {"little": "8MiB", "much": "1000KiB"}
"""As there is."""


def told_of(rank: int, words: list[str], name: str) -> int:
    """A run that believes that its ranks have so much memory, and links that cost nothing."""
    here = RanksHere(FAST, 2, "here", MEMORY[name])
    setup.measured_ranks = lambda *given: here  # type: ignore[assignment]
    return main(words)


@pytest.mark.slow
def test_the_run_does_what_was_searched_unless_its_account_says_that_it_does_not_fit(tmp_path: Path) -> None:
    corpus, found = write_corpus(tmp_path), {}
    for name, budget in BUDGETS.items():
        (tmp_path / f"ranks-{name}").mkdir()
        more = ["--train.steps=1", "--train.micro-batch=2", "--layout.search", "--checkpoint.every=0"]
        words = flags(corpus, tmp_path / name, *more, f"--budget.device-memory={budget}")
        assert spawn(2, told_of, tmp_path / f"ranks-{name}", words, name) == [0, 0]
        plan = json.loads((tmp_path / name / "plan.json").read_text())
        config = tomllib.loads((tmp_path / name / "config.toml").read_text())
        did = [one["activations"] for one in plan["blocks"].values()]
        found[name] = (config["memory"]["activations"], did)
    asked, did = found["little"]
    assert "block" in did
    assert did == [str(one) for one in assign_activations(asked, 2)]
    asked, did = found["much"]
    assert asked == "auto"
    assert did != ["keep", "keep"]
