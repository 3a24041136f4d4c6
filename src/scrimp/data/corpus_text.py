"""The text of a corpus, before there are tokens: what decides these, what is held out, what a BPE learns from.

A source of a mixture has other documents to look at, too: see mixed_texts.
Checked  tests/data/test_prepare.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scrimp.data.bpe import sample, train_bpe
from scrimp.data.conversations import MESSAGES
from scrimp.data.documents import Document
from scrimp.data.find_source import open_source
from scrimp.data.passes import Passes
from scrimp.data.progress_line import note
from scrimp.data.sources import Source
from scrimp.data.split import Split, split_by_share, split_by_source
from scrimp.data.tokenizer import END_OF_TEXT, Tokenizer, own_tokenizer
from scrimp.errors import DataError

MIXTURE = "mixture"
"""Name in a manifest's settings of the texts beside which a corpus was prepared."""


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """Which text, and what decides its tokens."""

    source: str
    """stdlib, a file, a folder, a saved data set, a folder of token shards, or hf:OWNER/NAME."""
    text_column: str = "text"
    """Column (JSONL key) that holds the text; of conversations, `messages` unless another is named."""
    conversations: bool = False
    """The column holds messages, of which the assistant's are marked for training."""
    chat_template: Path | None = None
    """Jinja file that writes conversations. None: the tokenizer's own."""
    tokenizer: str = "auto"
    """bytes, bpe, or a folder with a tokenizer.json. auto: that of ready shards, else bpe."""
    bpe_vocab_size: int = 4096
    """Vocabulary of a BPE trained on the corpus."""
    held_out: float | Path = 0.02
    """Share of the text kept for evaluation, or a source of its own for it. Of a saved data set with a
    validation split: 0, or that split."""

    @property
    def column(self) -> str:
        """Where text, or messages, are read."""
        return MESSAGES if self.conversations and self.text_column == "text" else self.text_column

    def open(self, source: str) -> Source:
        """A source, read as this corpus is."""
        return open_source(source, self.column, conversations=self.conversations)


class CorpusText:
    """The documents of a source, and of one that is held out beside it.

    Args:
        spec: what decides the corpus.
        source: where its text comes from.
        progress: show what is being done on standard error.
    """

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the shards beside what `prepare` knows itself, as it stands in the manifest."""
        return {}

    def __init__(self, spec: CorpusSpec, source: Source, *, progress: bool) -> None:
        held_out = held_out_source(spec, source)
        self.spec, self.progress = spec, progress
        self.passes = Passes(source, progress)
        self._held_out = None if held_out is None else Passes(held_out, progress)
        self._split: Split | None = None

    @property
    def source(self) -> Source:
        """Where the documents come from."""
        return self.passes.source

    def look_through(self) -> Split:
        """What is held out, found once; also whether the source can be read and holds text."""
        if self._split is None:
            self._split = self._looked_through()
        return self._split

    def _looked_through(self) -> Split:
        if self._held_out is not None:
            return split_by_source(self._read, self._held_out.read("reading"))
        share = self.spec.held_out
        assert not isinstance(share, Path)
        if share == 0.0:
            next(self._read("looking through"))
        return split_by_share(self._read, share, may_cut=not self.spec.conversations)

    def _read(self, label: str) -> Iterator[Document]:
        stream = self.passes.read(label)
        first = next(stream, None)
        if first is None:
            raise DataError(
                f"{self.source.name} holds no {'conversations' if self.spec.conversations else 'text'}",
                got="only blank text" if not self.source.skipped else in_words(self.source.skipped),
                expected="at least one document",
            )
        yield first
        yield from stream

    def sides(self, split: Split, label: str) -> Iterator[Document]:
        """One pass over the documents, each marked with its side by this split."""
        skipped: dict[str, int] = {}
        yield from split.parts(self.passes.read(label), skipped)
        self.source.skipped.update(skipped)
        if self._held_out is not None:
            for document in self._held_out.read(label):
                yield replace(document, held_out=True)

    def train_tokenizer(self, split: Split) -> Tokenizer:
        """A BPE of the documents that this split trains on."""
        return bpe_of(self.sides(split, "sampling for the tokenizer from"), self.spec, progress=self.progress)

    def forget(self) -> None:
        """Hold no documents any more."""
        for one in (self.passes, self._held_out):
            if one is not None:
                one.forget()


def held_out_source(spec: CorpusSpec, source: Source) -> Source | None:
    """The text that is held out whole, where it is not a share: a source of its own, or the data set's own split."""
    if isinstance(spec.held_out, Path):
        return spec.open(str(spec.held_out))
    return source.validation() if spec.held_out else None


def bpe_of(corpus: Iterator[Document], spec: CorpusSpec, *, progress: bool) -> Tokenizer:
    """A BPE trained on the documents that are not held out."""
    texts = sample(corpus)
    megabytes = sum(len(one) for one in texts) / 1e6
    note(
        f"training a BPE with {spec.bpe_vocab_size:,} tokens on {megabytes:.1f} MB of text",
        enabled=progress,
    )
    return own_tokenizer(train_bpe(texts, spec.bpe_vocab_size, END_OF_TEXT), "bpe")


def in_words(skipped: dict[str, int]) -> str:
    """What was left out, for people."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
