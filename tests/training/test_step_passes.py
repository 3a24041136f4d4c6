"""The passes of a run's step: its account, the event, and the section of the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import flags, records, write_corpus

from scrimp.cli import main
from scrimp.config import Config, replace_values
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.step_account import Above
from scrimp.profiler import resolve_device
from scrimp.report.page import build_page
from scrimp.report.read_run import read_run
from scrimp.training import setup, step_passes
from scrimp.training.setup import Decisions, decide
from scrimp.training.step_passes import passes_on

GROWN = {
    "model.preset": "qwen2.5-0.5b",
    "precision": "bf16",
    "data.tokenizer": "bytes",
    "train.batch_tokens": 65536,
    "train.sequence": 1024,
    "train.micro_batch": 8,
    "train.compile": "on",
}


@pytest.fixture(autouse=True)
def _much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much this machine has left: a step that is recomputed or offloaded has no account."""
    monkeypatch.setattr(
        setup, "resolve_device", lambda *given: replace(resolve_device(*given), available_bytes=2**36)
    )


def decided(**more: object) -> Decisions:
    return decide(
        replace_values(Config(), GROWN | {key.replace("__", "."): one for key, one in more.items()})
    )


def account(decisions: Decisions) -> list[Above] | None:
    return passes_on(decisions, decisions.plan, load_hardware("h100"))


def by_name(found: list[Above] | None) -> dict[str, Above]:
    assert found is not None
    return {one.taken.name: one for one in found}


def test_the_account_is_that_of_the_run() -> None:
    plain = by_name(account(decided()))
    again = by_name(account(decided(memory__activations="block")))
    low = by_name(account(decided(precision="fp8_tensor")))
    assert plain["products"].taken.launches == 24 * 4 * 3 * 8
    assert "made again" not in plain
    assert again["made again"].taken.seconds > 0
    assert low["operands in 8 or 4 bits"].seconds > 0
    assert low["products"].taken.seconds < plain["products"].taken.seconds
    seconds = [one.seconds for one in plain.values()]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    "more",
    [
        {"precision": "fp32"},
        {"model__preset": "llama-3m", "memory__activations": "keep+offload"},
        {"optimizer__name": "muon"},
        {"precision": "fp8,*.wgrad=bf16"},
        {"memory__activations": "keep,0=block"},
        {"optimizer__name": "galore"},
        {"optimizer__name": "nadamw"},
        {"precision": "fp8_tensor,*=bf16"},
        {"precision": "bf16,*=fp8_tensor"},
    ],
)
@pytest.mark.every(4)
def test_what_has_no_account_has_none(more: dict[str, object]) -> None:
    assert account(decided(**more)) is None


def test_a_run_on_a_known_card_shows_its_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    monkeypatch.setattr(step_passes, "known_name", lambda device: "h100")
    assert main(flags(corpus, run, "--train.steps=8", "--precision=bf16")) == 0
    (event,) = [one for one in records(run, "events.jsonl") if one["kind"] == "step-passes"]
    assert event["card"] == "h100"
    assert event["measured_seconds"] > 0
    page = build_page(read_run(run))
    for one in event["passes"]:
        assert f">{one['name']}</th>" in page
    assert page.count("step-passes") == 0
    above = sum(one["seconds"] - one["floor"] for one in event["passes"])
    assert above > 0


def test_a_run_on_a_cpu_has_no_such_section(tmp_path: Path) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    assert main(flags(corpus, run, "--train.steps=2", "--precision=bf16")) == 0
    assert not [one for one in records(run, "events.jsonl") if one["kind"] == "step-passes"]
    assert "step's time goes" not in build_page(read_run(run))
