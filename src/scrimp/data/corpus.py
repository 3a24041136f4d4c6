"""A prepared corpus, opened for training: its tokenizer and two streams of tokens.

`open_corpus` takes a folder of shards as it is, and prepares any other source once into the
cache, under a key of its text and settings. What is checked on opening: the manifest against its
digest, its figures against the tokenizer and every shard's header, and the shards' sizes; of a
corpus up to 256 MiB also every byte. In a larger one every 64 KiB block is checked when it is
first read (see shards), so that an altered shard is never trained on at any size. A corpus of a
version that wrote no digest is checked whole once, and gets one.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from bisect import bisect_right
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scrimp.data.chat_template import ChatTemplate
from scrimp.data.corpus_manifest import (
    HELD_OUT,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    TRAIN,
    Manifest,
    ShardEntry,
    corpus_digest,
    earlier_corpus_digest,
    is_corpus,
    read_manifest,
    shards_at,
)
from scrimp.data.corpus_text import CorpusSpec, CorpusText
from scrimp.data.interleave import Interleave
from scrimp.data.prepare import EARLIER_RULES, corpus_settings, open_text_source, prepare
from scrimp.data.progress_line import note
from scrimp.data.shards import BoolArray, Int64Array, Shard, damaged, read_header
from scrimp.data.sources import HUB
from scrimp.data.tokenizer import Tokenizer, load_tokenizer
from scrimp.data.written import WrittenText
from scrimp.errors import DataError, StorageError
from scrimp.files import make_folder, user_cache

CHECKED_ON_OPEN = 256 << 20


class TokenStream:
    """The tokens of one split, one document after the other across all its shards.

    Args:
        folder: where the shards are.
        entries: the shards, in order.
        closing_id: id that ends a document and has no meaningful target, or None.
        has_answers: documents are conversations, their answers marked.
    """

    def __init__(
        self,
        folder: Path,
        entries: list[ShardEntry],
        *,
        closing_id: int | None = None,
        has_answers: bool = False,
    ) -> None:
        self._folder, self._entries, self.has_answers = folder, entries, has_answers
        self._shards: dict[int, Shard] = {}
        self._ends = np.cumsum([entry.num_tokens for entry in entries]).tolist() if entries else []
        self.closing_id = closing_id
        self.beside: tuple[WrittenText, Interleave] | None = None
        """Rows that are trained on beside it, and whose turn a sample is: its own, or theirs."""
        self.num_tokens: int = sum(entry.num_tokens for entry in entries)
        self.num_documents: int = sum(entry.num_documents for entry in entries)
        self.text_bytes: int = sum(entry.text_bytes for entry in entries)
        """UTF-8 bytes of the documents, for bits per byte."""

    def first(self, num_tokens: int) -> TokenStream:
        """The first so many tokens as a stream of their own; all, where there are no more."""
        found = copy.copy(self)
        found.num_tokens = min(num_tokens, self.num_tokens)
        found.num_documents = len(self.document_starts(0, found.num_tokens))
        found.text_bytes = round(self.text_bytes_between(0, found.num_tokens))
        return found

    def _shard(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = Shard(self._folder / self._entries[number].name)
        return shard

    def _parts(self, start: int, stop: int) -> list[tuple[Shard, int, int, int]]:
        """(shard, its first token in the stream, start and stop within it) that make up [start, stop)."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.num_tokens}")
        parts, number = [], bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[number] - self._entries[number].num_tokens
            end = min(stop, self._ends[number])
            parts.append((self._shard(number), first, start - first, end - first))
            start, number = end, number + 1
        return parts

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The tokens [start, stop), in the shards' own integer type."""
        parts = [shard.tokens(begin, end) for shard, _, begin, end in self._parts(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def mask(self, start: int, stop: int) -> BoolArray:
        """Which of the tokens [start, stop) the assistant wrote; of conversations alone."""
        parts = [shard.answers(begin, end) for shard, _, begin, end in self._parts(start, stop)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=bool)

    def document_starts(self, start: int, stop: int) -> Int64Array:
        """Positions within [start, stop) at which documents begin, counted in the stream."""
        parts = [
            shard.document_starts(begin, end) + first for shard, first, begin, end in self._parts(start, stop)
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def text_bytes_between(self, start: int, stop: int) -> float:
        """UTF-8 bytes of the tokens [start, stop); a document that is cut counts by its share of tokens."""
        parts = self._parts(start, stop)
        return sum(
            shard.text_bytes_before(end) - shard.text_bytes_before(begin) for shard, _, begin, end in parts
        )


class Corpus:
    """A complete folder of token shards, checked."""

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        if not manifest.complete:
            raise DataError(
                f"the corpus {folder} is not complete",
                got="a preparation that was interrupted",
                do="run the `scrimp prepare` command that began it again, with the same options",
            )
        self.folder, self.manifest = folder, manifest
        self.tokenizer: Tokenizer = check_tokenizer(folder, manifest)
        self.checked = check_shards(folder, manifest)
        """What was checked when the corpus was opened, in words."""
        if manifest.written_digest is None:
            with contextlib.suppress(StorageError):  # a folder that cannot be written is counted each time
                manifest.write(folder)
        self.train, self.held_out = (
            TokenStream(
                folder,
                manifest.splits.get(name, []),
                closing_id=manifest.tokenizer.closing_id,
                has_answers=manifest.holds_conversations,
            )
            for name in (TRAIN, HELD_OUT)
        )
        self.digest: str = corpus_digest(manifest)

    @property
    def parts(self) -> tuple[Corpus, ...]:
        """What a mixture has several of."""
        return (self,)

    @property
    def holds_conversations(self) -> bool:
        """Whether documents are conversations, their answers marked."""
        return self.manifest.holds_conversations

    def is_that_of(self, digest: str) -> bool:
        """Whether a run whose checkpoint carries `digest` saw this corpus; runs of earlier versions too."""
        return digest in (self.digest, earlier_corpus_digest(self.manifest))


def check_entry(folder: Path, entry: ShardEntry, *, whole: bool) -> None:
    """Check that a shard is the one of the manifest and, if `whole`, every byte of it."""
    path = folder / entry.name
    counted = ShardEntry.of(entry.name, read_header(path))
    if counted.sha256 != entry.sha256:
        raise damaged(path, "a shard of another corpus", expected="the one that corpus.json names")
    for key, figure in asdict(counted).items():
        if asdict(entry)[key] != figure:
            raise DataError(
                f"{folder / MANIFEST} and the shard {path} disagree",
                got=f"{key} {asdict(entry)[key]:,}",
                expected=f"{figure:,}, by the shard's header",
                do="run `scrimp prepare` again with the same source and folder: it counts again",
            )
    if whole:
        Shard(path).check_all()


def check_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer of a corpus, which must be the one of the manifest in every figure."""
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if tokenizer.digest != manifest.tokenizer.digest:
        raise DataError(
            f"the tokenizer in {folder / TOKENIZER} is not the one that the shards were made with",
            got=f"digest {tokenizer.digest[:12]}",
            expected=f"{str(manifest.tokenizer.digest)[:12]}",
            do="run `scrimp prepare` again with the same source and folder: it puts the tokenizer back",
        )
    if manifest.holds_conversations and ChatTemplate(tokenizer).digest != manifest.settings["chat_template"]:
        raise DataError(
            f"the chat template in {folder / TOKENIZER} is not the one that the shards were made with",
            do="run `scrimp prepare` again with the same source and folder: it puts the tokenizer back",
        )
    for key, figure in asdict(tokenizer.figures()).items():
        if asdict(manifest.tokenizer)[key] != figure:
            raise DataError(
                f"{folder / MANIFEST} and the tokenizer in {folder / TOKENIZER} disagree",
                got=f"{key} {asdict(manifest.tokenizer)[key]}",
                expected=f"{figure}, by the tokenizer",
                do="run `scrimp prepare` again with the same source and folder: it counts again",
            )
    return tokenizer


def check_shards(folder: Path, manifest: Manifest) -> str:
    """Check the shards as far as opening does, and say how far that is."""
    entries = [entry for name in SPLITS for entry in manifest.splits.get(name, [])]
    size = sum(entry.file_bytes for entry in entries)
    whole = size <= CHECKED_ON_OPEN or manifest.written_digest is None
    for entry in entries:
        check_entry(folder, entry, whole=whole)
    what = f"{len(entries)} shard{'s' if len(entries) != 1 else ''}, {size / 1e6:,.1f} MB"
    if whole:
        return f"{what}: every checksum matches"
    return f"{what}: headers and sizes match; content is checked as it is first read (`scrimp verify` checks all)"


def open_corpus(
    spec: CorpusSpec,
    *,
    cache: Path | None,
    progress: bool = True,
    digest: str | None = None,
    text: CorpusText | None = None,
) -> Corpus:
    """The corpus of a spec: ready shards as they are, any other source prepared once into the cache.

    Args:
        spec: source and settings; of ready shards the held-out share is theirs.
        cache: folder for prepared shards; None for scrimp/ in the user's cache folder.
        progress: show what is being done on standard error.
        digest: of the corpus that a run was begun with. Where the cache still holds it from an earlier version,
            whose rules gave another split, it is opened.
        text: the spec's, where other sources decide it too; None: it is alone.
    """
    shards = shards_at(spec.source)
    if shards is not None:
        corpus = Corpus(shards)
        _check_wanted_kind(spec, corpus)
        check_wanted_tokenizer(spec.tokenizer, shards, corpus.manifest)
        return corpus
    spec = replace(spec, tokenizer="bpe" if spec.tokenizer == "auto" else spec.tokenizer)
    source, given = open_text_source(spec)
    settings = corpus_settings(spec, source, given) | ({} if text is None else text.settings)
    cache = cache or user_cache()
    if digest is not None and (earlier := _earlier(cache, source.name, settings, digest)) is not None:
        return earlier
    folder = cache / f"{_slug(source.name)}-{cache_key(settings)}"
    if is_corpus(folder):
        try:
            return Corpus(folder)
        except DataError as error:  # interrupted or damaged: prepare puts it right
            note(f"preparing again: {error.what}", enabled=progress)
    make_folder(folder.parent)
    return Corpus(prepare(spec, folder, progress=progress, text=text))


def _earlier(cache: Path, name: str, settings: dict[str, Any], digest: str) -> Corpus | None:
    """The corpus with this digest that an earlier version prepared from the same text and settings."""
    for rules in EARLIER_RULES:
        folder = cache / f"{_slug(name)}-{cache_key(settings | {'rules': rules})}"
        if is_corpus(folder):
            with contextlib.suppress(DataError):  # interrupted or damaged
                corpus = Corpus(folder)
                if corpus.is_that_of(digest):
                    return corpus
    return None


def cache_key(settings: dict[str, Any]) -> str:
    """Key of a prepared corpus: its text and settings, not the path of the source."""
    decisive = {key: value for key, value in settings.items() if key != "source"}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _slug(name: str) -> str:
    stem = Path(name.removeprefix(HUB)).name.split(".")[0]
    return "".join(letter if letter.isalnum() else "-" for letter in stem)[:32] or "corpus"


def _check_wanted_kind(spec: CorpusSpec, corpus: Corpus) -> None:
    """Ready shards of text have no answers to learn from, and those of conversations are no text."""
    there = corpus.manifest.holds_conversations
    if spec.conversations != there:
        kinds = ("text", "conversations")
        raise DataError(
            f"the shards in {corpus.folder} hold {kinds[there]}",
            expected=kinds[spec.conversations],
            do=f"{'set' if there else 'leave out'} --objective.name sft, or give other data",
        )


def check_wanted_tokenizer(tokenizer: str, folder: Path, manifest: Manifest) -> None:
    """Ready shards keep their tokenizer; a different one that was asked for is an error."""
    there = manifest.settings.get("tokenizer")
    match tokenizer:
        case "auto":
            return
        case "bpe":
            fits, wanted = there == "bpe", "a BPE trained on the corpus"
        case name:
            fits, wanted = load_tokenizer(name).digest == manifest.tokenizer.digest, name
    if not fits:
        raise DataError(
            f"the shards in {folder} were made with another tokenizer",
            got=f"tokenizer {tokenizer}",
            expected=f"the tokenizer in {folder / TOKENIZER}, not {wanted}",
            do="use the tokenizer that the shards have, or prepare the text again with the one you want",
        )
