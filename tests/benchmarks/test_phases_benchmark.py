"""What `benchmarks/phases.py` runs, compares and says; its figures need a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import phases
import phases_work
import pytest
import torch

from scrimp.config import Sampling
from scrimp.data.loader import IGNORED
from scrimp.models.generation import generate

ROOT = Path(__file__).resolve().parents[2]
LOAD = phases.LOADS["cpu"]


@pytest.mark.slow
def test_on_a_cpu_every_policy_runs_and_nothing_is_written(tmp_path: Path) -> None:
    words = ("--device=cpu", "--policies", "default", "pools", "--iterations=1", "--out", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "benchmarks/phases.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no caching allocator" in done.stdout
    assert "2 policies ran, losses equal" in done.stdout
    assert not any(tmp_path.iterdir())


def test_sequences_that_are_generated_in_turns_are_those_generated_alone() -> None:
    work = phases_work.Work(LOAD)
    texts = work._generate(0)
    assert len(texts) == 2 * LOAD.prompts
    for index, (ids, prompt) in enumerate(texts):
        assert LOAD.prompt_tokens[0] <= prompt <= LOAD.prompt_tokens[1]
        with work.trained.autocast():
            alone = generate(
                work.trained.model,
                ids[:prompt],
                max_tokens=len(ids) - prompt,
                sampling=Sampling(1.0, seed=index),
            )
            assert list(alone) == ids[prompt:]


def test_only_what_was_generated_is_a_target() -> None:
    tokens_BT, targets_BT = phases_work.batch_of([([5, 6, 7, 8], 2), ([1, 2], 1)])
    assert tokens_BT.tolist() == [[5, 6, 7], [1, 0, 0]]
    assert targets_BT.tolist() == [[IGNORED, 7, 8], [2, IGNORED, IGNORED]]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [name for name in phases_work.POLICIES if name != "expandable"])
def test_on_a_gpu_every_policy_is_accounted_for(policy: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    row = phases_work.run(policy, replace(LOAD, device="cuda"))
    assert row["ended"] is None
    assert row["peak_reserved"] >= row["peak_allocated"] > 0
    assert row["releases"] == (3 * LOAD.iterations if policy == "always" else 0)


# -- processes and pages -----------------------------------------------------------------------


def test_settings_of_the_allocator_are_the_policys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    found = {
        policy: {v for k, v in phases.environment_of(policy).items() if k.endswith("ALLOC_CONF")}
        for policy in phases_work.POLICIES
    }
    assert found.pop("expandable") == {"expandable_segments:True"}
    assert set(map(len, found.values())) == {0}


def row(
    policy: str, number: int = 0, reserved: float = 10.0, seconds: float = 1.0, **changes: Any
) -> phases.Row:
    """A process as `phases_work.run` reports it; the first iteration is slow."""
    values = {
        "policy": policy,
        "round": number,
        "multiple": 0.0,
        "seconds": [9.0, seconds],
        "losses": [2.0],
        "ended": None,
        "peak_reserved": reserved * 2**30,
        "peak_allocated": 5 * 2**30,
        "slack": {"generation": [2**30], "training": [3 * 2**30]},
        "releases": 0,
        "retries": 0,
        "expandable": policy == "expandable",
    }
    return values | changes


def line(rows: list[phases.Row], policy: str) -> dict[str, str]:
    default = [r for r in rows if r["policy"] == "default"]
    cells = phases.summary([r for r in rows if r["policy"] == policy], default)
    return {
        f"{index} {name}": cell for index, (name, cell) in enumerate(zip(phases.COLUMNS, cells, strict=True))
    }


def test_policies_are_compared_within_a_round_without_warm_up() -> None:
    rows = [
        *(row("default", 0, 10.0, 1.0), row("always", 0, 7.5, 1.02)),
        *(row("default", 1, 20.0, 2.0), row("always", 1, 15.0, 2.04)),
    ]
    found = line(rows, "always")
    assert (found["2 against default"], found["6 against default"]) == ("-25.0%", "+2.0%")
    assert found["4 largest slack at an edge, GiB"] == "3.00"


def test_a_process_that_ran_out_of_memory_is_counted_and_not_compared() -> None:
    ended = row("pools", 0, 1.0, seconds=0.1, ended="out of memory in training, iteration 1")
    rows = [row("default", 0), row("default", 1), ended, row("pools", 1, 12.0)]
    found = line(rows, "pools")
    assert (found["2 against default"], found["9 out of memory"]) == ("+20.0%", "1 of 2")


def test_a_setting_that_torch_ignored_voids_the_comparison() -> None:
    assert not any("VOID" in text for text in phases.checks([row("expandable")]))
    assert any("VOID" in text for text in phases.checks([row("expandable", expandable=False)]))


def test_the_page_has_a_table_per_limit() -> None:
    rows = [row(policy, multiple=multiple) for multiple in (0.0, 1.1) for policy in phases_work.POLICIES]
    record = {
        "load": asdict(LOAD),
        "rows": rows,
        "device": "a GPU",
        "versions": {"torch": "2"},
        "command": "python",
        "commit": "none",
    }
    text = phases.page(record)
    assert text.count("| default |") == text.count("| pools |") == 2
    assert "Limited to 1.1 times what is allocated" in text
