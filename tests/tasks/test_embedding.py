"""Embeddings against transformers' hidden states of the same model, a pass for each text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import flags, write_corpus
from transformers import AutoModel

from scrimp.cli import main
from scrimp.cli.trained import load_executable
from scrimp.tasks.embedding import embeddings
from scrimp.training.trained_weights import open_target

TEXTS = ["a", "two words", "no words", "a", "Straße 🙂", "long " * 40]


def test_an_embedding_is_the_mean_of_transformers_hidden_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--train.steps=3", "--model.context=64"]
    assert main(flags(write_corpus(tmp_path), tmp_path / "run", *words)) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "theirs")]) == 0
    target = open_target(tmp_path / "run")
    monkeypatch.setattr("scrimp.tasks.embedding._BATCH_TOKENS", 20)  # two texts of 10 tokens at once
    done: list[int] = []
    found = embeddings(load_executable(target, "cpu"), target.tokenizer, TEXTS, done.append)
    model = AutoModel.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    for text, row in zip(TEXTS, found, strict=True):
        ids = target.tokenizer.encode_prompt(text)[:64]
        with torch.no_grad():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0).double()
        np.testing.assert_allclose(row, (mean / mean.norm()).numpy(), atol=2e-5)
    assert sum(done) == sum(map(len, TEXTS))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1)
