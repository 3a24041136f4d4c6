"""Small corpora and quick ways to prepare them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scrimp.data import CorpusSpec, TokenStream, prepare
from scrimp.data.corpus_manifest import ShardEntry, shard_name
from scrimp.data.shards import ShardWriter


def lines_of_words(seed: int, num_lines: int) -> str:
    """Text with blank lines, from a small vocabulary, with some letters beyond ASCII."""
    draw = random.Random(seed)
    words = ["the", "river", "of", "stone", "naïve", "Straße", "数", "runs", "and", "falls", "1234", "🙂"]
    lines = []
    for _ in range(num_lines):
        lines.append(" ".join(draw.choices(words, k=draw.randint(3, 12))))
        if draw.random() < 0.2:
            lines.append("")
    return "\n".join(lines) + "\n"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """About 60 KB of text."""
    path = tmp_path / "corpus.txt"
    path.write_text(lines_of_words(1, 1500))
    return path


@pytest.fixture
def prepared(tmp_path: Path, text_file: Path) -> Path:
    """The text file as bytes in several shards."""
    out = tmp_path / "shards"
    return prepare(
        CorpusSpec(source=str(text_file), tokenizer="bytes", held_out=0.1),
        out,
        shard_tokens=10_000,
        progress=False,
    )


@pytest.fixture
def make_stream(tmp_path: Path) -> Callable[..., TokenStream]:
    """Builds a stream from documents given as arrays, a few documents per shard."""

    def make(
        documents: list[np.ndarray], *, per_shard: int = 3, closing_id: int | None = None, name: str = "train"
    ) -> TokenStream:
        entries = []
        for number, first in enumerate(range(0, len(documents), per_shard)):
            writer = ShardWriter(tmp_path / shard_name(name, number), np.dtype("<u2"))
            for document in documents[first : first + per_shard]:
                writer.add(document, text_bytes=2 * len(document), document_hash=len(document))
            header = writer.finish()
            entries.append(ShardEntry.of(shard_name(name, number), header))
        return TokenStream(tmp_path, entries, closing_id=closing_id)

    return make
