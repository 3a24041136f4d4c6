"""Every recipe's run, made small: low formats under a memory plan, SNIP, a run that goes on, and two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs_on_ranks import check_same_course, goes_on, on_ranks
from tiny_run import losses, records

from scrimp.cli import main
from scrimp.recipes import recipes

pytestmark = pytest.mark.slow

SMALL = [
    "--device=cpu",
    "--train.sequence=64",
    "--train.batch-tokens=256",
    "--train.micro-batch=2",
    "--evaluation.tokens=1024",
    "--checkpoint.every=2",
    "--checkpoint.keep-last=9",
    "--layout.no-search",
]
LOW = ["--precision=fp8", "--memory.activations=block"]
SNIP = ["--precision=snip", "--snip.first=1", "--snip.every=2", "--snip.delay=1"]


OWN = {"memory-efficient": ["--schedule.warmup-steps=1", "--optimizer.refactor-every=2"]}
"""What a run of few steps needs besides."""
REFUSED_BY_SNIP = {"source-weighting": "precision snip is not carried out beside objective.reference_losses"}


def words(name: str, folder: Path, run: str, *more: str, steps: int = 4) -> list[str]:
    """The command of a small run of a recipe."""
    cache = f"--data.cache={folder / name}"
    return [
        "train",
        f"recipe:{name}",
        *SMALL,
        cache,
        f"--run.dir={folder / run}",
        f"--train.steps={steps}",
        *OWN.get(name, []),
        *more,
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared texts are kept."""
    return tmp_path_factory.mktemp("recipes")


def runs_of(run: Path) -> list[Path]:
    """The run's folder, or those of its stages."""
    return sorted(run.glob("stage-*")) or [run]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in records(run, "events.jsonl") if one["kind"] == kind]


@pytest.mark.parametrize("name", recipes())
def test_low_formats_and_a_memory_plan_work_and_a_run_goes_on(
    name: str, folder: Path, tmp_path: Path
) -> None:
    assert main(words(name, folder, f"{name}-low", *LOW)) == 0
    for number, run in enumerate(runs_of(folder / f"{name}-low")):
        assert "fp8 by " in events(run, "start")[0]["backends"]
        assert "gave the numbers of their formats" in events(run, "proof")[0]["reason"]
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        assert {one["activations"] for one in plan["blocks"].values()} == {"block"}
        again = tmp_path / str(number)
        assert main(goes_on(run, again, 2)) == 0
        assert events(again, "resume")[0]["step"] == 2
        assert sorted(losses(again)) == [1, 2, 3, 4]
        assert losses(again) == losses(run)


@pytest.mark.parametrize("name", recipes())
def test_snip_plans_each_of_its_runs_or_says_why_not(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(words(name, folder, f"{name}-snip", *SNIP, steps=6))
    if name in REFUSED_BY_SNIP:
        assert code == 2
        assert REFUSED_BY_SNIP[name] in capsys.readouterr().err
        return
    assert code == 0
    for run in runs_of(folder / f"{name}-snip"):
        first = events(run, "replan")[0]
        assert first["reason"].startswith("first plan")
        assert first["changed"] > 0
        assert first["fp4_flops"] >= 0.75


@pytest.mark.parametrize("name", recipes())
def test_two_ranks_train_as_one_process(name: str, folder: Path, tmp_path: Path) -> None:
    assert main(words(name, folder, f"{name}-alone")) == 0
    on_ranks(
        2,
        tmp_path / "ranks",
        words(name, folder, f"{name}-ranks", "--layout.fsdp=2", "--train.micro-batch=1"),
    )
    found, expected = (runs_of(folder / f"{name}-{end}") for end in ("ranks", "alone"))
    for run, alone in zip(found, expected, strict=True):
        check_same_course(run, alone)
