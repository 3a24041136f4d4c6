"""A run of a version whose checkpoints carry another digest of the corpus goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.data import corpus
from scrimp.data.corpus_manifest import earlier_corpus_digest


@pytest.mark.slow
def test_a_run_with_the_earlier_digest_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_corpus(tmp_path)
    with monkeypatch.context() as before:
        before.setattr(corpus, "corpus_digest", earlier_corpus_digest)
        assert main(flags(text, tmp_path / "run", "--train.steps=2")) == 0
    assert main(flags(text, tmp_path / "run", "--train.steps=2", "--resume")) == 0
    with monkeypatch.context() as before:
        before.setattr(corpus, "earlier_corpus_digest", lambda manifest: "another")
        assert main(flags(text, tmp_path / "run", "--train.steps=2", "--resume")) == 2
    assert "the data are not those that the run was trained on" in capsys.readouterr().err
