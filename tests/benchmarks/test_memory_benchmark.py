"""What `benchmarks/memory.py` concludes: from real runs on a CPU, and from the same with planted figures."""

from __future__ import annotations

import copy
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import memory
import memory_checks as checks
import pytest
from memory_cases import (
    CARDS,
    PEAKS,
    REFERENCES,
    TIMES,
    TINY,
    TRACED,
    Case,
    case,
    keeping,
)

from scrimp.cli.build import build
from scrimp.config import base_architecture, resolve

SMALL = ("--model.num-layers=2", "--model.vocab-size=512")
CASES = (
    case("resident", TINY, 1, 128, TRACED, *SMALL),
    case("block, two micro-batches", TINY, 1, 128, keeping("block"), *SMALL, micro_batches=2),
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script wrote of two real configurations, and its exit status."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(memory.PEAKS, "cpu", CASES)
        status = memory.main(["--device=cpu", "--part=peaks", f"--out={out}", "--date=today"])
    record: dict[str, Any] = json.loads((out / "today-memory-peaks-cpu.json").read_text(encoding="utf-8"))
    page = (out / "today-memory-peaks-cpu.md").read_text(encoding="utf-8")
    return record | {"status": status, "page": page}


@pytest.fixture
def runs(result: dict[str, Any]) -> list[dict[str, Any]]:
    return copy.deepcopy(result["runs"])


def scaled(run: dict[str, Any], factor: float) -> None:
    run["predicted"]["device"] *= factor


# -- real runs ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_configurations_hold_and_are_written(result: dict[str, Any]) -> None:
    assert [held for _, held, _ in result["checks"]] == [True] * 3, result["checks"]
    assert result["status"] == 0
    assert {run["name"] for run in result["runs"]} == {one.name for one in CASES}
    for run in result["runs"]:
        assert len(run["seconds"]) == 3
        assert abs(checks.peak_error(run)) < 0.01
        assert run["name"] in result["page"]


@pytest.mark.parametrize(
    ("factor", "near", "fits"), [(0.9, False, False), (0.97, True, False), (1.1, False, True)]
)
@pytest.mark.slow
def test_a_false_prediction_is_reported(
    runs: list[dict[str, Any]], factor: float, near: bool, fits: bool
) -> None:
    scaled(runs[0], factor)
    found = checks.peaks_near(runs), checks.no_false_fits(runs)
    assert [held for _, held, _ in found] == [near, fits]
    for _, held, figure in found:
        assert held or runs[0]["name"] in figure


@pytest.mark.slow
def test_more_while_the_model_is_built_is_no_fit_either(runs: list[dict[str, Any]]) -> None:
    runs[1]["building"] = 2 * runs[1]["device"]
    assert not checks.no_false_fits(runs)[1]


@pytest.mark.parametrize("how", ["failure", "replan"])
@pytest.mark.slow
def test_what_did_not_run_by_its_plan_counts_as_not_held(runs: list[dict[str, Any]], how: str) -> None:
    if how == "failure":
        runs[0] = {"name": "lost", "failure": "exit status 1:\n  CUDA error", "wall": 1.0}
    else:
        runs[0]["events"].append("memory-replan")
    for judged in (checks.ran(runs, 2), checks.peaks_near(runs), checks.no_false_fits(runs)):
        assert not judged[1]
    assert memory.page({"runs": runs, "part": "peaks", "checks": [], **PAGE}).count("failed") > 3


PAGE = {"device": "here", "versions": {"torch": "2"}, "command": "python", "commit": "none"}


@pytest.mark.slow
def test_a_configuration_that_was_not_begun_counts_as_not_held(runs: list[dict[str, Any]]) -> None:
    assert checks.ran(runs, 2)[1]
    assert not checks.ran(runs, 3)[1]


@pytest.mark.slow
def test_a_compiled_run_may_take_less_but_no_more(runs: list[dict[str, Any]]) -> None:
    scaled(runs[0], 1.5)
    bounds = frozenset({runs[0]["name"]})
    assert checks.peaks_near(runs, bounds)[1]
    scaled(runs[0], 0.5)
    assert checks.peaks_near(runs, bounds)[1]
    assert not checks.no_false_fits(runs)[1]


# -- time --------------------------------------------------------------------------------------


def timed(name: str, seconds: float, predicted: float | None, device: int = 10) -> dict[str, Any]:
    return {
        "name": name,
        "seconds": [9.0] * 5 + [0.9 * seconds, *[seconds] * 8, 1.2 * seconds],
        "predicted": {"seconds": predicted, "device": device},
        "events": [],
    }


@pytest.mark.parametrize(
    ("predicted", "expected"), [(1.04, True), (0.94, False), (1.06, False), (None, False)]
)
def test_step_times_are_compared_after_the_warm_up(predicted: float | None, expected: bool) -> None:
    run = timed("a", 1.0, predicted)
    assert checks.step_seconds(run) == (1.0, 0.9, 1.2)
    assert checks.times_near([run])[1] is expected


@pytest.mark.parametrize(
    ("chosen", "other_device", "expected"), [(1.02, 10, True), (1.1, 10, False), (1.1, 30, True)]
)
def test_regret_is_against_the_fastest_that_fits_the_same_budget(
    chosen: float, other_device: int, expected: bool
) -> None:
    runs = [timed("chosen", chosen, 1.0), timed("other", 1.0, 1.0, other_device)]
    assert checks.regret(runs, {"chosen": 20}, "model")[1] is expected
    assert not checks.regret(runs, {"chosen": 20, "lost": 20}, "model")[1]


# -- cards -------------------------------------------------------------------------------------


def on_card(**changes: Any) -> dict[str, Any]:
    run = {"name": "a", "device": 80, "reserved": 90, "context": 5, "events": [], "losses": [3.0, 2.0]}
    return run | {"trouble": {"num_ooms": 0, "num_alloc_retries": 1}, "plan": "keep"} | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"losses": [3.0, 2.0000001]}, False),
        ({"losses": [3.0]}, False),
        ({"trouble": {"num_ooms": 1}}, False),
        ({"context": 11}, False),
        ({"events": ["memory-replan"]}, False),
        ({"failure": "killed"}, False),
    ],
)
def test_a_card_must_be_kept_to(changes: dict[str, Any], expected: bool) -> None:
    assert checks.kept_to_card("a card", on_card(), on_card(**changes), 100)[1] is expected


def test_a_card_whose_plan_is_that_of_the_full_device_shows_nothing() -> None:
    card = CARDS["cpu"][0]
    big = on_card(device=1, reserved=1, context=0)
    assert memory.on_card(card, big, big | {"plan": "block"})[1]
    assert not memory.on_card(card, big, big)[1]


# -- the script --------------------------------------------------------------------------------


def test_a_part_without_time_begins_nothing_and_does_not_hold(tmp_path: Path) -> None:
    bench = memory.Bench(
        tmp_path, tmp_path, "peaks", "today", -1.0, device="cpu", device_bytes=2**30, is_written=False
    )
    memory.run_part(bench)
    assert {run["failure"] for run in bench.found} == {"the time was up"}
    assert not any(held for _, held, _ in bench.outcomes)


def test_runs_side_by_side_fit_together() -> None:
    room, lock, now, most = memory.Room(10.0), threading.Lock(), 0.0, 0.0

    def run(gib: float) -> None:
        nonlocal now, most
        with room.take(gib):
            with lock:
                now += min(gib, 10.0)
                most = max(most, now)
            time.sleep(0.002)
            with lock:
                now -= min(gib, 10.0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, [4.0, 7.0, 3.0, 99.0, 5.0, 5.0, 2.0, 8.0] * 3))
    assert 5.0 < most <= 10.0


def everything() -> dict[str, tuple[str, ...]]:
    """Options of all that is run on a GPU, by name."""
    found: dict[str, tuple[str, ...]] = {}
    cases: list[Case] = [*PEAKS["cuda"], *(card.case for card in CARDS["cuda"])]
    for one in [*cases, *(size.case for size in TIMES["cuda"])]:
        found[f"{one.name} {one.gib}"] = one.options
    for name, one in REFERENCES["cuda"].items():
        found[name] = (
            f"--model.preset={one.model}",
            f"--train.batch-tokens={one.batch_tokens}",
            *one.options,
        )
    return found


@pytest.mark.slow
def test_every_configuration_for_a_gpu_can_be_resolved() -> None:
    for options in everything().values():
        command, _ = build("train", list(options))
        config = command.config  # type: ignore[attr-defined]
        resolved = resolve(config, base_architecture(config, None), device_type="cuda").config
        assert resolved.train.batch_tokens % (resolved.train.micro_batch * resolved.train.sequence) == 0


def test_the_matrix_has_thirty_configurations_of_different_names() -> None:
    names = [one.name for one in PEAKS["cuda"]]
    assert len(set(names)) == len(names) >= 30
    assert {one.name.split(",")[0].split(" ")[0] for one in PEAKS["cuda"]} == {
        "60M",
        "300M",
        "0.6B",
        "1.7B",
        "4B",
    }
