"""How a run repeats itself, as the plan says it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import dry_run, main
from scrimp.config import Config, replace_values
from scrimp.planner.hardware import load_hardware
from scrimp.profiler import this_device
from scrimp.training.memory import block_seconds
from scrimp.training.repetition import text_on
from scrimp.training.setup import Decisions, decide

RUN = {
    "model.preset": "qwen2.5-0.5b",
    "precision": "bf16",
    "data.tokenizer": "bytes",
    "train.batch_tokens": 65536,
    "train.sequence": 4096,
    "train.micro_batch": 2,
    "train.compile": "on",
}


def decided(**more: object) -> Decisions:
    return decide(replace_values(Config(), RUN | {key.replace("__", "."): one for key, one in more.items()}))


def test_the_price_is_that_of_the_runs_own_card() -> None:
    kept, free = decided(), decided(train__deterministic=False, data__mask_documents=False)
    h100, a100 = load_hardware("h100"), load_hardware("a100-80")
    assert text_on(kept, h100).startswith("bit for bit; attention held to FlashAttention-2: +")
    assert text_on(kept, a100) == "bit for bit; nothing is predicted to be faster here"
    assert text_on(free, h100).startswith(
        "up to rounding; attention by torch's choice, not FlashAttention-2: -"
    )
    tiny = decided(
        model__preset="llama-3m", train__sequence=128, train__batch_tokens=128, train__micro_batch=1
    )
    assert text_on(tiny, h100) == "bit for bit; nothing is predicted to be faster here", (
        "there are two kernels"
    )
    documents = text_on(decided(train__deterministic=False), h100)
    assert documents.startswith("up to rounding; attention held to FlashAttention-2: +"), "by documents"


def test_nothing_is_promised_of_what_is_not_known() -> None:
    unknown = "bit for bit; what that costs here is not predicted"
    assert text_on(decided(), None) == unknown
    assert text_on(decided(precision="fp32"), load_hardware("h100")) == unknown


@pytest.mark.parametrize("recipe", ["int8", "int8_fallback", "int8_hadamard"])
@pytest.mark.every(3)
def test_a_format_without_a_rate_is_planned_on_a_card_all_the_same(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks are weighed by the card's file, since one of them makes its activations again."""
    monkeypatch.setattr(block_seconds, "LIMIT_S", 1e-6)  # as of a model that would take too long to time
    monkeypatch.setattr(this_device, "known_name", lambda device: "a100-80")
    monkeypatch.setattr(dry_run, "repetition_text", lambda found: text_on(found, load_hardware("a100-80")))
    words = (f"--precision={recipe}", "--backend=reference", "--memory.activations=keep,0=block")
    command = flags(write_corpus(tmp_path), tmp_path / "run", *words)
    assert main(["plan", *command[1:]]) == 0
    assert "bit for bit; what that costs here is not predicted" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [(), ("--train.no-deterministic",)])
def test_on_a_cpu_it_costs_nothing(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = flags(write_corpus(tmp_path), tmp_path / "run", *words)
    assert main(["plan", *command[1:]]) == 0
    assert "bit for bit; on a CPU that costs nothing" in " ".join(capsys.readouterr().out.split())
