"""A run is decided by the vocabulary that it gets: once where that is known, again where a trained one is smaller."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.config import (
    BudgetConfig,
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TrainConfig,
    replace_values,
)
from scrimp.data import load_tokenizer
from scrimp.errors import ConfigError, DataError, PlanError
from scrimp.training import setup
from scrimp.training.run_data import open_run_corpus
from scrimp.training.run_folder import saved_config
from scrimp.training.setup import decide
from scrimp.training.start import fresh_start
from scrimp.world import ALONE

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


def with_data(config: Config, **changes: Any) -> Config:
    return replace(config, data=replace(config.data, **changes))


def rows_for(entries: int) -> int:
    return -(-entries // 64) * 64


@pytest.mark.slow
def test_a_tokenizer_that_exists_gives_the_rows_before_the_first_plan(
    config: Config, planned: list[int]
) -> None:
    start = fresh_start(config)
    entries = start.corpus.tokenizer.vocab_size
    assert planned == [rows_for(entries)]
    assert start.decisions.architecture.vocab_size == planned[0]
    assert f"{entries} entries" in start.decisions.reasons["model.vocab_size"]


def test_a_trained_tokenizer_that_comes_out_smaller_is_decided_again(
    config: Config, planned: list[int]
) -> None:
    """One sentence has no 4,096 pieces."""
    start = fresh_start(with_data(config, tokenizer="bpe"))
    entries = start.corpus.tokenizer.vocab_size
    first, second = planned
    assert second == rows_for(entries) < first == 4096
    decisions = start.decisions
    assert decisions.architecture.vocab_size == decisions.config.model.vocab_size == second
    assert f"{entries} entries" in decisions.reasons["model.vocab_size"]


def test_a_tokenizer_may_get_more_entries_than_the_presets_rows(config: Config) -> None:
    decisions = decide(with_data(config, tokenizer="bpe", vocab_size=8192))
    assert decisions.architecture.vocab_size == 8192


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [16, pytest.param(None, marks=pytest.mark.slow)])
def test_what_a_run_decides_follows_the_vocabulary_that_it_gets(
    config: Config, micro_batch: int | None
) -> None:
    """With all the entries that its tokenizer may get it would have smaller micro-batches, or not fit at all."""
    tight = replace(
        with_data(config, tokenizer="bpe"),
        budget=BudgetConfig(device_memory="12MB", host_memory="200MB"),
        model=replace(config.model, num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=128),
        train=replace(config.train, sequence=64, batch_tokens=1024, micro_batch=micro_batch),
    )
    with contextlib.suppress(PlanError):
        assert decide(tight).config.train.micro_batch < 16
    fixed = replace(tight, model=replace(tight.model, vocab_size=320))
    found, expected = fresh_start(tight).decisions, decide(fixed)
    assert found.architecture.vocab_size == 320
    assert found.config.train == expected.config.train
    assert found.config.train.micro_batch == 16
    assert found.plan.placement == expected.plan.placement


@pytest.mark.slow
def test_chunks_of_the_loss_are_those_of_the_vocabulary(config: Config) -> None:
    wide = replace(config, train=replace(config.train, sequence=256, batch_tokens=4096))
    assert decide(wide).config.train.loss_chunk == 0  # bytes: 320 rows
    large = with_data(wide, tokenizer="bpe", vocab_size=8192)
    assert 0 < decide(large).config.train.loss_chunk < 4096


def test_a_dry_run_refuses_what_a_run_would(config: Config, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="need a tokenizer that there is already"):
        decide(replace(config, objective=ObjectiveConfig(name="sft"), data=DataConfig(source="chats.jsonl")))
    shards = fresh_start(with_data(config, tokenizer="bpe")).corpus.folder
    ready = with_data(config, source=str(shards), tokenizer="auto")
    decisions = decide(ready)
    assert decisions.config.data.vocab_size is None
    assert decisions.reasons["data.tokenizer"] == "the one that the shards were made with"
    with pytest.raises(DataError, match="made with another tokenizer"):
        decide(with_data(ready, tokenizer="bytes"))
    entries = load_tokenizer(shards / "tokenizer").vocab_size
    with pytest.raises(ConfigError, match="the tokenizer has more entries"):
        decide(with_data(ready, vocab_size=entries - 1))
    assert decide(with_data(ready, vocab_size=entries)).config.data.vocab_size == entries


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--data.tokens=64"], None),
        (["--data.tokens=63"], "shorter than one sequence"),
        (["--data.tokens=1000000"], "has fewer training tokens than data.tokens"),
        (["--data.tokens=0"], "out of range"),
        (["--data.tokens=100", "--objective.name=sft"], "data.tokens applies to text"),
    ],
)
def test_a_run_on_the_first_tokens_reads_no_others(
    tmp_path: Path, more: list[str], says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path)
    words = flags(corpus, tmp_path / "run", "--train.steps=2", *more)
    assert main(words) == (0 if says is None else 2)
    if says is not None:
        assert says in capsys.readouterr().err
        return
    config = saved_config(tmp_path / "run")
    few = open_run_corpus(config, ALONE).train
    whole = open_run_corpus(replace_values(config, {"data.tokens": None}), ALONE).train
    assert few.num_tokens == 65 < whole.num_tokens
    assert few.read(0, 65).tolist() == whole.read(0, 65).tolist()


def test_a_size_that_the_tokenizer_of_the_weights_keeps_is_no_contradiction(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe sets the size for its first run, and another run goes on from that one by the same file."""
    small = ["--model.num-layers=1", "--model.width=32", "--model.num-heads=2", "--train.sequence=16"]
    small += ["--model.num-kv-heads=1", "--model.ffn-width=32", "--train.batch-tokens=64", "--device=cpu"]
    data = [f"--data.source={config.data.source}", f"--data.cache={config.data.cache}", "--data.held-out=0"]
    first, second = tmp_path / "first", tmp_path / "second"
    command = ["train", *small, *data, "--data.vocab-size=300"]
    after = [*command, f"--model.weights={first}", f"--run.dir={second}", "--train.steps=2"]
    assert main([*command, f"--run.dir={first}", "--train.steps=2"]) == 0
    assert main(after) == 0
    assert main([*after, "--resume"]) == 0
    entries = load_tokenizer(first / "tokenizer").vocab_size
    assert load_tokenizer(second / "tokenizer").vocab_size == entries <= 300
    third = [f"--run.dir={tmp_path / 'third'}", f"--data.vocab-size={entries - 1}"]
    assert main([*after, *third]) == 2
    assert f"more entries than data.vocab_size\n  got      {entries} in" in capsys.readouterr().err
