"""The texts of a mixture, looked through together: what one source holds out, no other one trains on.

Problem  Sources overlap: an encyclopedia's page stands in a crawl of the web too. Split each by itself, such a page may
         be held out of one and trained on in the other.
Method   Each source is split as if it were alone (see split), so that its held-out text is that of a run on it alone.
         Then the training documents of each are compared with what all others hold out, and left out where they are
         such a document or hold 80 % of its 13-grams: the rule for a held-out source. A BPE is trained on the training
         documents of all, by the sample of bpe: the lowest hashes out of what there is, whatever the weights are.
Caches   Both depend on which texts there are, not on their weights or order, so that runs on other weights share their
         shards. The manifest of each source names all texts; another set of sources is prepared anew.
Cost     Two more passes over every text, and 2 KB for each document that is held out (figures: docs/mixtures.md).
Limits   Folders of shards hold tokens, and no text to compare: they are read as they are. Which documents a source
         holds out does not depend on the others, so that one that stands nearly whole in another source's training
         text costs that source the document.
Checked  tests/data/test_mixed_texts.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

from scrimp.data.corpus_text import MIXTURE, CorpusSpec, CorpusText, bpe_of
from scrimp.data.documents import Document
from scrimp.data.sources import Source
from scrimp.data.split import HeldOutText, Split
from scrimp.data.tokenizer import Tokenizer
from scrimp.errors import DataError


class MixedText(CorpusText):
    """One text of several."""

    def __init__(self, spec: CorpusSpec, source: Source, *, progress: bool) -> None:
        super().__init__(spec, source, progress=progress)
        self.fingerprint = source.fingerprint()
        self.texts: Sequence[MixedText] = (self,)
        """All of them, this one too, in an order that does not depend on how they were given."""

    @property
    def settings(self) -> dict[str, Any]:
        """All texts, where they decide what this one becomes."""
        trains_tokenizer = self.spec.tokenizer in ("auto", "bpe")
        if len(self.texts) == 1 or not (self.spec.held_out or trains_tokenizer):
            return {}
        return {MIXTURE: [text.fingerprint for text in self.texts]}

    def _looked_through(self) -> Split:
        own = self.alone
        others = [text.held_out for text in self.texts if text is not self]
        hashes = frozenset(chain.from_iterable(text.hashes for text in others))
        if not hashes:
            return own
        known = HeldOutText(hashes, tuple(chain.from_iterable(text.sketches for text in others)))
        trained = self.documents(own, "comparing the documents of", held_out=False)
        try:
            alike = known.alike(trained)
        except DataError as error:
            raise DataError(
                f"{self.source.name}: {error.what}",
                got=error.got,
                expected="documents unlike those that the other sources of data.mix hold out",
                do="leave one of the sources out",
            ) from None
        return replace(own, left_out=own.left_out | alike)

    @cached_property
    def alone(self) -> Split:
        """The split of this text as if there were no others."""
        return super()._looked_through()

    @cached_property
    def held_out(self) -> HeldOutText:
        """What this text holds out."""
        return HeldOutText.of(self.documents(self.alone, "reading what is held out of", held_out=True))

    def documents(self, split: Split, label: str, *, held_out: bool) -> Iterator[Document]:
        """The documents of one side."""
        return (document for document in self.sides(split, label) if document.held_out == held_out)

    def train_tokenizer(self, split: Split) -> Tokenizer:
        """A BPE of the training documents of all texts."""
        return self.texts[0].common_tokenizer

    @cached_property
    def common_tokenizer(self) -> Tokenizer:
        """That BPE; asked of the first text, so that it is trained once."""
        label = "sampling for the tokenizer from"
        read = (text.sides(text.look_through(), label) for text in self.texts)
        return bpe_of(chain.from_iterable(read), self.spec, progress=self.progress)


def mixed_texts(specs: Sequence[CorpusSpec], *, progress: bool) -> dict[str, MixedText]:
    """The texts of a mixture by the names of their sources, which are opened here.

    Raises:
        DataError: a source is not there, or cannot be read.
    """
    found = {spec.source: MixedText(spec, spec.open(spec.source), progress=progress) for spec in specs}
    texts = sorted(found.values(), key=lambda text: text.fingerprint)
    for text in texts:
        text.texts = texts
        text.passes.beside = len(texts)
    return found
