"""A run is planned once where its tokenizer is known beforehand, and again where a trained one came out smaller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scrimp.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from scrimp.training import setup
from scrimp.training.start import fresh_start

TEXT = "the quick brown fox jumps over the lazy dog. " * 400


@pytest.fixture
def config(tmp_path: Path) -> Config:
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    return Config(
        model=ModelConfig(
            preset="llama-3m", num_layers=1, width=32, num_heads=2, num_kv_heads=1, ffn_width=32
        ),
        data=DataConfig(source=str(source), tokenizer="bytes", held_out=0.0, cache=tmp_path / "cache"),
        train=TrainConfig(steps=2, sequence=16, batch_tokens=64),
        run=RunConfig(dir=tmp_path / "run"),
        device="cpu",
    )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The embedding's rows of every architecture that was planned."""
    rows: list[int] = []
    real = setup.decide_micro_batch

    def recorded(device, config, architecture, reasons):  # type: ignore[no-untyped-def]
        rows.append(architecture.vocab_size)
        return real(device, config, architecture, reasons)

    monkeypatch.setattr(setup, "decide_micro_batch", recorded)
    return rows


def test_a_tokenizer_that_exists_gives_the_rows_before_the_first_plan(
    config: Config, planned: list[int]
) -> None:
    start = fresh_start(config)
    entries = start.corpus.tokenizer.vocab_size
    assert planned == [-(-entries // 64) * 64]
    assert start.decisions.architecture.vocab_size == planned[0]
    assert "entries" in start.decisions.reasons["model.vocab_size"]


def test_a_trained_tokenizer_that_comes_out_smaller_is_planned_again(
    config: Config, planned: list[int]
) -> None:
    """One sentence has no 4,096 pieces."""
    start = fresh_start(replace(config, data=replace(config.data, tokenizer="bpe")))
    entries = start.corpus.tokenizer.vocab_size
    first, second = planned
    assert second == -(-entries // 64) * 64 < first
    assert start.decisions.architecture.vocab_size == second
    assert start.decisions.config.model.vocab_size == second
