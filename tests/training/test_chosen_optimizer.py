"""`optimizer.name = "auto"`: AdamW where its step fits in the budget, else the largest rank of Fira that does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed import spawn
from runs_on_ranks import check_same_course
from tiny_run import flags, losses, write_corpus

from scrimp.cli import main
from scrimp.config import Config, load_config, replace_values
from scrimp.errors import ConfigError, PlanError
from scrimp.planner.memory.room import NoRoomError, size_text
from scrimp.profiler import resolve_device
from scrimp.report.units import format_bytes
from scrimp.training import setup
from scrimp.training.chosen_layout import RanksHere, measured_ranks
from scrimp.training.memory import block_seconds
from scrimp.training.memory.limits import HOST_SHARE, PROCESS_BYTES
from scrimp.training.setup import Decisions, decide

WIDTH = 192
MODEL = {
    "device": "cpu",
    "data.tokenizer": "bytes",
    "model.preset": "llama-3m",
    "model.width": WIDTH,
    "model.num_layers": 2,
    "train.steps": 4,
    "train.sequence": 32,
    "train.batch_tokens": 64,
    "train.micro_batch": 1,
    "layout.search": False,
}
KEEP = {"memory.activations": "keep", "memory.optimizer": "device"}
"""Nothing is left to the plan of memory, so that a step takes what its account says and no less."""
TRIED = [("adamw", None), ("fira", WIDTH // 4), ("fira", WIDTH // 8), ("fira", WIDTH // 16)]


@pytest.fixture(autouse=True)
def nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_seconds, "LIMIT_S", 0.0)


def decided(settings: Mapping[str, Any], **more: Any) -> Decisions:
    return decide(replace_values(Config(), {**MODEL, **settings}), plans_ahead=True, **more)


def named(name: str, rank: int | None) -> dict[str, Any]:
    return {"optimizer.name": name, "optimizer.rank": rank}


def auto(budget: int | str) -> dict[str, Any]:
    size = f"{budget}B" if isinstance(budget, int) else budget
    return {"optimizer.name": "auto", "budget.device_memory": size}


def needed(found: Decisions) -> int:
    """The smallest budget: beside a step a CPU's memory holds what a checkpoint is written from."""
    return found.memory.account.peak + found.memory.costs.checkpoint_copy


@pytest.mark.parametrize("layout", [{}, {"layout.fsdp": 2}], ids=["alone", "fsdp"])
def test_the_first_that_fits_is_chosen_and_decided_as_if_it_were_named(layout: dict[str, Any]) -> None:
    alone = [decided(KEEP | layout | named(*one)) for one in TRIED]
    budgets = [needed(one) for one in alone]
    assert budgets == sorted(budgets, reverse=True)
    assert len(set(budgets)) == len(TRIED)
    for (name, rank), expected, budget in zip(TRIED, alone, budgets, strict=True):
        found = decided(KEEP | layout | auto(budget))
        assert (found.config.optimizer.name, found.config.optimizer.rank) == (name, rank)
        assert found.config.optimizer == expected.config.optimizer  # its rate, too
        assert found.memory.account == expected.memory.account
        assert found.plan.predicted.peak_device_bytes == expected.plan.predicted.peak_device_bytes
        assert found.asked.optimizer.name == "auto"  # decided anew where the vocabulary turns out another
        found.refuse_misfit()
    with pytest.raises(NoRoomError) as caught:
        decided(KEEP | layout | auto(budgets[-1] - 1))
    for one in (*(f"fira of rank {rank} takes" for _, rank in TRIED[1:]), "adamw takes"):
        assert one in str(caught.value)


def test_the_reason_says_what_adamw_needs_what_the_states_take_and_the_price() -> None:
    adamw, fira = (decided(KEEP | named(*one)) for one in TRIED[:2])
    budget = needed(fira)
    found = decided(KEEP | auto(budget))
    why = found.reasons["optimizer.name"]
    assert f"adamw takes a predicted peak of {adamw.memory.account.peak:,} bytes" in why
    assert f"there is at most {size_text(budget)} of device memory" in why
    rows = dict(fira.memory.account.device)
    assert f"{rows['optimizer states'] / 2**20:.2f} MiB of optimizer states" in why
    assert "0.02 above adamw at 1M (four seeds, -0.02 to +0.06), 0.04 above at 3M" in why
    assert found.reasons["optimizer.rank"] == "the width / 4, the largest of / 4, / 8, / 16 that fits"
    assert found.config.optimizer.lr == 4 * 0.003
    given = decided(KEEP | auto(budget) | {"optimizer.lr": 0.01})
    assert given.config.optimizer.lr == 0.01
    assert given.reasons["optimizer.name"].endswith(
        "of optimizer.lr, which is given, its matrices move by 0.25"
    )


def test_memory_that_is_free_decides_where_it_is_less_than_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fira = decided(KEEP | named(*TRIED[1])).memory.account.peak
    free = int(fira / HOST_SHARE) + PROCESS_BYTES + 2
    monkeypatch.setattr(
        setup, "resolve_device", lambda *given: replace(resolve_device(*given), available_bytes=free)
    )
    there_is = f"{size_text(fira)} of device memory, the part of {size_text(free)} free that a step may take"
    found = decided(KEEP | auto("1GB"))
    assert (found.config.optimizer.name, found.config.optimizer.rank) == TRIED[1]
    assert f"; there is at most {there_is}; " in found.reasons["optimizer.name"]
    assert "1GB" not in found.reasons["optimizer.name"]


def test_what_costs_time_alone_comes_before_a_rank() -> None:
    """AdamW recomputes where it may, and leaves its states on the host where there is one."""
    deep = {"model.num_layers": 4}
    fira = decided(KEEP | deep | named(*TRIED[1]))
    budget = deep | auto(fira.memory.account.peak) | {"budget.host_memory": "1GB"}
    found = decided(budget)
    assert found.config.optimizer.name == "adamw"
    device, host = (
        dict(rows)["optimizer states"] for rows in (found.memory.account.device, found.memory.account.host)
    )
    assert found.reasons["optimizer.name"].endswith(
        f"{format_bytes(device + host)} of optimizer states, of which {format_bytes(host)} on the host"
    )
    assert decided(KEEP | budget).config.optimizer.name == "fira"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer.moments": "8bit"}, "does not keep its state in that format"),
        ({"optimizer.master_weights": False, "precision": "bf16"}, "needs master weights"),
        ({"model.rank": 8, "optimizer.refactor_every": 2}, "not carried out beside optimizer.refactor_every"),
        ({"outer.every": 2, "layout.dp": 2}, "not carried out beside outer.every"),
    ],
)
def test_what_other_settings_refuse_is_not_tried(settings: dict[str, Any], says: str) -> None:
    adamw = needed(decided(KEEP | settings))
    assert decided(KEEP | settings | auto(adamw)).config.optimizer.name == "adamw"
    with pytest.raises(NoRoomError) as caught:
        decided(KEEP | settings | auto(adamw - 1))
    assert "fira is refused" in str(caught.value)
    assert says in str(caught.value)


def test_a_host_without_room_is_named_and_what_there_is() -> None:
    states = {"memory.optimizer": "host", "budget.host_memory": "1MB"}
    with pytest.raises(NoRoomError) as caught:
        decided(auto("20MB") | states)
    assert str(caught.value.got).startswith(
        "adamw fits on no device beside this host; there is 1.00 MB of the host's and 20.0 MB of device memory; "
        "fira is refused: "
    )
    assert "MB of the host's with this device" in str(caught.value.do)


def test_a_pipeline_that_was_given_nothing_is_not_told_to_leave_it_out() -> None:
    with pytest.raises(PlanError) as caught:
        decided({"budget.device_memory": "1MB", "layout.pp": 2}).refuse_misfit()
    assert caught.value.do == "give it that much, shorten --train.sequence, or raise --layout.pp"


def test_settings_that_no_optimizer_makes_right_are_refused_as_ever() -> None:
    with pytest.raises(ConfigError, match="batch_tokens") as auto_error:
        decided(auto("1MB") | {"train.batch_tokens": 65})
    with pytest.raises(ConfigError) as plain:
        decided({"train.batch_tokens": 65})
    assert str(auto_error.value) == str(plain.value)


@pytest.mark.slow
def test_budgets_that_are_named_are_enough() -> None:
    """Where the plan of memory is open, a search finds the smallest budget of each optimizer, and it is printed."""
    with pytest.raises(NoRoomError, match="no optimizer that auto tries fits in memory") as caught:
        decided(auto("1MB"))
    for name, rank in TRIED:
        words = name if rank is None else f"{name} of rank {rank}"
        size = re.search(f"{words} needs ([0-9.]+ MB)", str(caught.value))
        assert size is not None
        found = decided(auto(size[1]))
        assert (found.config.optimizer.name, found.config.optimizer.rank) == (name, rank)
    eight = re.search(r"--optimizer\.moments 8bit \(([0-9.]+ MB)\)", str(caught.value))
    assert eight is not None
    assert decided(auto(eight[1]) | {"optimizer.moments": "8bit"}).config.optimizer.name == "adamw"
    with pytest.raises(NoRoomError) as fira:
        decided(named(*TRIED[1]) | {"budget.device_memory": "1MB"})
    assert "optimizer.moments" not in str(fira.value)  # which it refuses


TINY_SETTINGS = {
    "device": "cpu",
    "data.tokenizer": "bytes",
    "model.num_layers": 2,
    "model.width": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.ffn_width": 64,
    "train.sequence": 64,
    "train.batch_tokens": 256,
    "train.micro_batch": 1,
}
"""As in `tiny_run`."""


def test_a_run_keeps_what_was_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    adamw = needed(decide(replace_values(Config(), TINY_SETTINGS | KEEP)))
    words = [
        f"--{key.replace('_', '-')}={value}"
        for key, value in (KEEP | {"train.micro_batch": 1} | auto(adamw - 1)).items()
    ]
    assert main(flags(corpus, run, *words, "--train.steps=4", "--checkpoint.every=2")) == 0
    saved, text = load_config(run / "config.toml"), (run / "config.toml").read_text(encoding="utf-8")
    assert (saved.optimizer.name, saved.optimizer.rank, saved.optimizer.lr) == ("fira", 8, 4 * 0.003)
    assert "adamw takes a predicted peak" in text
    whole = losses(run)
    # More memory, and a command that leaves the optimizer open again: it stays.
    more = ["--optimizer.name=auto", "--budget.device-memory=10GB"]
    assert main(["train", f"--run.dir={run}", "--resume-from=2", *more]) == 0
    assert losses(run) == whole
    after = load_config(run / "config.toml")
    assert (after.optimizer, after.budget.device_memory) == (saved.optimizer, "10GB")
    capsys.readouterr()
    assert main(["train", f"--run.dir={run}", "--resume", "--optimizer.name=adamw"]) == 2
    assert "optimizer.name = adamw (the run has fira)" in " ".join(capsys.readouterr().err.split())


def measuring(rank: int, words: list[str]) -> tuple[int, list[bool]]:
    """A run's exit code, and each time that its ranks were asked for whether they were measured."""
    measured: list[bool] = []

    def noted(*given: Any) -> RanksHere | None:
        here = measured_ranks(*given)
        measured.append(here is not None)
        return here

    setup.measured_ranks = noted  # type: ignore[assignment]
    return main(words), measured


@pytest.mark.slow
def test_ranks_whose_layout_is_searched_are_measured_once_and_choose_alike(tmp_path: Path) -> None:
    corpus, run, alone = write_corpus(tmp_path), tmp_path / "two", tmp_path / "alone"
    fira = needed(
        decide(
            replace_values(Config(), TINY_SETTINGS | KEEP | named("fira", 8) | {"layout.fsdp": 2}),
            plans_ahead=True,
        )
    )
    settings = ["--train.steps=3", "--train.micro-batch=1", "--checkpoint.every=0"]
    assert main(flags(corpus, alone, *settings, "--optimizer.name=fira", "--optimizer.rank=8")) == 0
    asked = [f"--{key.replace('_', '-')}={value}" for key, value in (KEEP | auto(fira)).items()]
    (tmp_path / "ranks").mkdir()
    words = flags(corpus, run, *settings, *asked, "--layout.search")
    assert spawn(2, measuring, tmp_path / "ranks", words) == [(0, [True])] * 2
    saved = load_config(run / "config.toml")
    assert (saved.optimizer.name, saved.optimizer.rank) == ("fira", 8)
    check_same_course(run, alone)
