"""Several corpora that a run mixes by shares of its samples.

Each source is a corpus as it would be alone: its own shards in the cache, its own held-out text. They have one
tokenizer. `Interleave` says which source each sample of the run comes from; a source's own samples come in the order in
which a run on it alone would read them, epoch after epoch, so that a small source with a large share is read more often
than a large one.

Digest   of the digests of all sources, their shares and their order: a run goes on with the same mixture only.
Checked  tests/data/test_mixture.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scrimp.config.mixture import labels_of
from scrimp.data.corpus import Corpus, TokenStream, open_corpus
from scrimp.data.corpus_manifest import TOKENIZER, shards_at
from scrimp.data.corpus_text import CorpusSpec
from scrimp.data.interleave import Interleave
from scrimp.data.mixed_texts import mixed_texts
from scrimp.data.tokenizer import Tokenizer
from scrimp.errors import DataError


@dataclass(frozen=True)
class MixedStream:
    """The same split of all sources of a mixture."""

    streams: tuple[TokenStream, ...]
    order: Interleave

    @property
    def num_tokens(self) -> int:
        """Tokens of all sources, each counted once."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def has_answers(self) -> bool:
        """Whether documents are conversations, their answers marked."""
        return self.streams[0].has_answers


@dataclass(frozen=True)
class Mixture:
    """Corpora that a run mixes.

    Args:
        names: of the sources, as the run's settings have them.
        parts: a corpus for each.
        shares: samples of each in a round.

    Raises:
        DataError: corpora that do not go together.
    """

    names: tuple[str, ...]
    parts: tuple[Corpus, ...]
    shares: tuple[int, ...]

    def __post_init__(self) -> None:
        self._refuse_other_tokenizers()
        self._refuse_same_text()
        self._refuse_nothing_held_out()

    @property
    def order(self) -> Interleave:
        """Which source each sample of a run comes from."""
        return Interleave(self.shares)

    @property
    def labels(self) -> list[str]:
        """What records call the sources."""
        return labels_of(self.names)

    @property
    def train(self) -> MixedStream:
        """What is trained on."""
        return MixedStream(tuple(part.train for part in self.parts), self.order)

    @property
    def held_out(self) -> MixedStream:
        """What each source holds out."""
        return MixedStream(tuple(part.held_out for part in self.parts), self.order)

    @property
    def folder(self) -> Path:
        """The shards of the first source, whose tokenizer is that of all."""
        return self.parts[0].folder

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all sources."""
        return self.parts[0].tokenizer

    @property
    def holds_conversations(self) -> bool:
        """Whether documents are conversations, their answers marked."""
        return self.parts[0].holds_conversations

    @property
    def checked(self) -> str:
        """What was checked when the corpora were opened, in words."""
        found = zip(self.labels, self.parts, strict=True)
        return "; ".join(f"{label}: {part.checked}" for label, part in found)

    @property
    def digest(self) -> str:
        """Identifies what a run sees."""
        parts = [[part.digest, share] for part, share in zip(self.parts, self.shares, strict=True)]
        return hashlib.sha256(json.dumps(["mixture", parts]).encode()).hexdigest()

    @property
    def digest_of_sources(self) -> str:
        """Identifies what a run may see and what it is evaluated on, whatever the shares are."""
        parts = [part.digest for part in self.parts]
        return hashlib.sha256(json.dumps(["sources", parts]).encode()).hexdigest()

    def is_that_of(self, digest: str) -> bool:
        """Whether a run whose checkpoint carries `digest` saw this mixture."""
        return digest == self.digest

    def _refuse_other_tokenizers(self) -> None:
        first = self.parts[0]
        template = first.manifest.settings.get("chat_template")
        for name, part in zip(self.names, self.parts, strict=True):
            is_same = part.tokenizer.digest == first.tokenizer.digest
            if not is_same or part.manifest.settings.get("chat_template") != template:
                raise DataError(
                    f"the sources of data.mix have different {'chat templates' if is_same else 'tokenizers'}",
                    got=f"{part.folder / TOKENIZER} of {name}, {first.folder / TOKENIZER} of {self.names[0]}",
                    expected="one for all",
                    do=f"make shards with `scrimp prepare ... --tokenizer {first.folder / TOKENIZER}`",
                )

    def _refuse_same_text(self) -> None:
        names: dict[str, str] = {}
        for name, part in zip(self.names, self.parts, strict=True):
            if names.setdefault(part.digest, name) != name:
                raise DataError(
                    "two sources of data.mix hold the same text",
                    got=f"{names[part.digest]} and {name}",
                    do="give the text once, with both weights added",
                )

    def _refuse_nothing_held_out(self) -> None:
        tokens = [part.held_out.num_tokens for part in self.parts]
        if any(tokens) and not all(tokens):
            raise DataError(
                "a source of data.mix holds nothing out for evaluation",
                got=self.names[tokens.index(0)],
                expected="held-out documents of every source, or of none",
                do="prepare its shards again with a held-out share, or set data.held_out to 0 and train on texts alone",
            )


def open_mixture(
    specs: Sequence[CorpusSpec], shares: Sequence[int], *, cache: Path | None, progress: bool = True
) -> Mixture:
    """The corpora of a mixture, prepared into the cache where that was not done yet.

    Args:
        specs: one for each source, which differ in nothing else.
        shares: of each source.
        cache: folder for prepared shards; None for scrimp/ in the user's cache folder.
        progress: show what is being done on standard error.
    """
    texts = mixed_texts([spec for spec in specs if shards_at(spec.source) is None], progress=progress)
    parts = [open_corpus(spec, cache=cache, progress=progress, text=texts.get(spec.source)) for spec in specs]
    for text in texts.values():
        text.forget()
    return Mixture(tuple(spec.source for spec in specs), tuple(parts), tuple(shares))
