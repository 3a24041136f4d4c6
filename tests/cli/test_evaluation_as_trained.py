"""`scrimp eval` measures a run the way it was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.cli.trained import evaluate_target, load_executable
from scrimp.data import CorpusSpec, open_corpus
from scrimp.training.evaluation import evaluate
from scrimp.training.trained_weights import open_target


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.slow
def test_eval_keeps_documents_apart_only_if_training_did(
    tmp_path: Path, masked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    options = [
        "--train.steps=2",
        "--optimizer.lr=0.1",
        "--data.mask-documents" if masked else "--data.no-mask-documents",
    ]
    assert main(flags(write_corpus(tmp_path), run_dir, *options)) == 0
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} rivers run to the sea"}) + "\n" for n in range(40)))
    target = open_target(run_dir)
    spec = CorpusSpec(source=str(text), tokenizer="bytes", held_out=0.0)
    corpus = open_corpus(spec, cache=tmp_path / "cache", progress=False)
    losses = {
        mask: evaluate(
            load_executable(target, "cpu"),
            corpus.train,
            sequence=64,
            micro_batch=8,
            max_tokens=None,
            mask_documents=mask,
        ).loss
        for mask in (True, False)
    }
    assert losses[True] != losses[False]
    assert evaluate_target(run_dir, str(text), device="cpu").loss == losses[masked]
    assert ("not kept apart, as trained" in capsys.readouterr().out) is not masked
