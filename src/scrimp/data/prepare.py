"""`scrimp prepare`: a source becomes a folder of token shards.

    OUT/corpus.json                 what it holds, from which text and settings (see manifest)
    OUT/tokenizer/                  the tokenizer, in the form transformers loads
    OUT/train-00000.tokens …        shards of the training split
    OUT/held-out-00000.tokens …     shards of the held-out split

Stream     Documents are read, hashed, encoded and written in one pass, a few megabytes at a
           time; a shard ends with the first document that fills it. Two shorter passes may
           come before: for the held-out threshold (it ends after some 1 / held_out
           documents) and for the sample that a BPE is trained on.
Cores      Documents are encoded on all cores (see encoding).
Resume     A finished shard is never written again. When a run continues, the documents of
           the finished shards at the beginning are read and hashed, not encoded, and their
           digest is compared with the shards', so that a changed source cannot go unseen.
           A damaged shard counts as not finished, and is the only one rewritten.
Same bytes Order, cutting, split and shard ends depend on text and settings alone: not on
           workers, interruptions or the machine.
Limits     The text of the finished part is read again on resume.
Checked    tests/data/test_prepare.py: kills at random moments, worker counts, full disks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scrimp.data.bpe import sample, train_bpe
from scrimp.data.documents import Document, Split, choose_threshold, documents
from scrimp.data.encoding import encode_documents, num_cores
from scrimp.data.manifest import (
    HELD_OUT,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    TRAIN,
    Manifest,
    ShardEntry,
    is_corpus,
    read_manifest,
)
from scrimp.data.progress import Progress, note
from scrimp.data.sources import HUB, Source, open_source
from scrimp.data.streams import Meter
from scrimp.data.tokenizer import (
    END_OF_TEXT,
    SMALLEST_BPE,
    Tokenizer,
    load_tokenizer,
    own_tokenizer,
)
from scrimp.data.writing import SplitWriter
from scrimp.errors import DataError, StorageError
from scrimp.files import folder_lock, make_folder, storage

SHARD_TOKENS = 1 << 26
RULES = 1
"""Raised when cutting, splitting or encoding change: older shards are then not continued."""


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """Which text, and what decides its tokens."""

    source: str
    """stdlib, a file, a folder, a saved data set, a folder of token shards, or hf:OWNER/NAME."""
    text_column: str = "text"
    """Column (JSONL key) that holds the text."""
    tokenizer: str = "auto"
    """bytes, bpe, or a folder with a tokenizer.json. auto: that of ready shards, else bpe."""
    bpe_vocab_size: int = 4096
    """Vocabulary of a BPE trained on the corpus."""
    held_out: float = 0.02
    """Share of the documents kept for evaluation."""


def prepare(
    spec: CorpusSpec,
    out: Path,
    *,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = True,
) -> Path:
    """Write the token shards of a source to `out`, or continue where an earlier call was interrupted.

    Args:
        spec: the source and what decides its tokens.
        out: a folder that is new, empty, or was begun with the same source and settings.
        workers: documents encoded at a time; None, or not fewer than there are cores: all cores.
        shard_tokens: a shard ends with the document that brings it to this many tokens.
        progress: show what is being done on standard error.

    Returns:
        `out`.
    """
    workers = _checked_counts(spec, workers, shard_tokens)
    source, given = open_text_source(spec, out)
    settings = corpus_settings(spec, source, given, shard_tokens)
    _check_out(out, settings)
    split = None if is_corpus(out) else _look_through(source, spec.held_out, progress)
    make_folder(out)
    with folder_lock(out, lambda: note(f"waiting for another process that prepares {out}", enabled=progress)):
        manifest = _begin(out, settings)
        if split is None and manifest.threshold is None:
            split = _look_through(source, spec.held_out, progress)
        if split is not None:
            manifest = replace(manifest, threshold=split.threshold)
            manifest.write(out)
        assert manifest.threshold is not None
        split = Split(manifest.threshold)
        tokenizer, manifest = _settle_tokenizer(out, manifest, spec, source, split, given, progress)
        _write_corpus(out, manifest, source, split, tokenizer, shard_tokens, workers, progress)
    return out


def _checked_counts(spec: CorpusSpec, workers: int | None, shard_tokens: int) -> int:
    """The number of workers; refuses numbers that make no sense."""
    if workers is not None and workers < 1:
        raise DataError("the number of workers is not possible", got=workers, expected="1 or more")
    if shard_tokens < 1:
        raise DataError(
            "the number of tokens per shard is not possible", got=shard_tokens, expected="1 or more"
        )
    if spec.tokenizer in ("auto", "bpe") and spec.bpe_vocab_size < SMALLEST_BPE:
        raise DataError(
            "the BPE vocabulary is too small",
            got=spec.bpe_vocab_size,
            expected=f"{SMALLEST_BPE} or more: the bytes and the delimiter",
        )
    if not 0.0 <= spec.held_out < 1.0:
        raise DataError(
            "the held-out share is not possible", got=spec.held_out, expected="0 or more and less than 1"
        )
    return workers or num_cores()


def open_text_source(spec: CorpusSpec, out: Path | None = None) -> tuple[Source, Tokenizer | None]:
    """The source of a spec, and its tokenizer where that exists before the corpus is read."""
    path = Path(spec.source).expanduser()
    if spec.source != "stdlib" and not spec.source.startswith(HUB) and path.is_dir():
        if is_corpus(path):
            raise DataError(
                f"{path} already holds token shards",
                expected="a source of text",
                do="train on it as it is: data.source takes a folder of shards",
            )
        if out is not None and out.resolve().is_relative_to(path.resolve()):
            raise DataError(
                f"the output folder {out} lies inside the source {path}",
                do="choose a folder outside the source",
            )
    source = open_source(spec.source, spec.text_column)
    return source, None if spec.tokenizer in ("auto", "bpe") else load_tokenizer(spec.tokenizer)


def corpus_settings(
    spec: CorpusSpec, source: Source, given: Tokenizer | None, shard_tokens: int = SHARD_TOKENS
) -> dict[str, Any]:
    """Everything that decides the shards, as it stands in the manifest."""
    return {
        "source": source.name,
        "fingerprint": source.fingerprint(),
        "text_column": spec.text_column,
        "tokenizer": "bpe" if given is None else given.digest,
        "bpe_vocab_size": spec.bpe_vocab_size if given is None else None,
        "held_out": spec.held_out,
        "shard_tokens": shard_tokens,
        "rules": RULES,
    }


def _difference(there: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What differs between two settings, in words; the source's path may differ, its text may not."""
    for key in now:
        if key != "source" and there.get(key) != now[key]:
            if key == "fingerprint":
                return "the source's text changed"
            return f"{key} is {there.get(key)} there and {now[key]} now"
    return None


def _check_out(out: Path, settings: dict[str, Any]) -> None:
    """Refuse an output folder that holds something else, or finished shards of another corpus."""
    with storage(out, "read"):
        if not out.exists():
            return
        if not out.is_dir():
            raise StorageError(
                f"{out} is a file", expected="a new or empty folder", do="choose another folder"
            )
        others = [path.name for path in out.iterdir() if not path.name.endswith(".partial")]
    if not is_corpus(out):
        if others:
            raise StorageError(
                f"the folder {out} holds something else",
                got=", ".join(sorted(others)[:3]),
                expected="a new or empty folder, or one begun by `scrimp prepare`",
                do="choose another folder",
            )
        return
    difference = _difference(read_manifest(out).settings, settings)
    if difference is not None and any(name.endswith(".tokens") for name in others):
        raise DataError(
            f"{out} was begun with another source or other settings",
            got=difference,
            do="choose another folder, or remove that one to prepare from the beginning",
        )


def _begin(out: Path, settings: dict[str, Any]) -> Manifest:
    """The manifest to go on from. What an interrupted call left half-written is removed."""
    _check_out(out, settings)  # again, now that nobody else writes
    with storage(out, "write to"):
        for path in out.iterdir():
            if path.name.startswith(".") and path.name.endswith(".partial"):
                if path.is_dir():
                    _remove_tree(path)
                else:
                    path.unlink()
    if is_corpus(out):
        manifest = read_manifest(out)
        if _difference(manifest.settings, settings) is None:
            return manifest
    if (out / TOKENIZER).exists():
        _remove_tree(out / TOKENIZER)
    manifest = Manifest(settings)
    manifest.write(out)
    return manifest


def _remove_tree(folder: Path) -> None:
    import shutil

    with storage(folder, "remove"):
        shutil.rmtree(folder)


def _stream(source: Source, label: str, progress: bool) -> Iterator[Document]:
    """One pass over the source's documents, with a progress line."""
    meter = Meter()
    with Progress(label, source.num_bytes, enabled=progress) as bar:
        for document in documents(source.texts(meter)):
            bar.update(meter.bytes)
            yield document


def _look_through(source: Source, held_out: float, progress: bool) -> Split:
    """The split; also finds out early whether the source can be read and holds text."""
    stream = _stream(source, f"looking through {source.name}", progress)
    first = next(stream, None)
    if first is None:
        raise DataError(
            f"{source.name} holds no text",
            got="only blank text" if not source.skipped else _in_words(source.skipped),
            expected="at least one document",
        )
    return choose_threshold(itertools.chain([first], stream), held_out)


def _in_words(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())


def _settle_tokenizer(
    out: Path,
    manifest: Manifest,
    spec: CorpusSpec,
    source: Source,
    split: Split,
    given: Tokenizer | None,
    progress: bool,
) -> tuple[Tokenizer, Manifest]:
    """The corpus's tokenizer: the one of an earlier call, the given one, or a BPE trained now."""
    folder = out / TOKENIZER
    if manifest.tokenizer_digest is not None:
        tokenizer = given
        if tokenizer is None and folder.is_dir():
            tokenizer = load_tokenizer(folder)
        if tokenizer is None or tokenizer.digest != manifest.tokenizer_digest:
            tokenizer = _train(spec, source, split, progress)
        if tokenizer.digest != manifest.tokenizer_digest:
            raise DataError(
                f"the tokenizer in {out} cannot be made again",
                got="another one from the same text",
                expected="the one that the finished shards were made with",
                do="remove the folder and prepare from the beginning",
            )
    else:
        tokenizer = given or _train(spec, source, split, progress)
    tokenizer.save(folder)
    form = {"delimiter_id": tokenizer.delimiter_id, "closing_id": tokenizer.closing_id}
    settled = replace(
        manifest, tokenizer_digest=tokenizer.digest, vocab_size=tokenizer.vocab_size, document_form=form
    )
    if settled != manifest:
        settled.write(out)
    return tokenizer, settled


def _train(spec: CorpusSpec, source: Source, split: Split, progress: bool) -> Tokenizer:
    texts = sample(_stream(source, f"sampling {source.name} for the tokenizer", progress), split)
    megabytes = sum(len(text) for text in texts) / 1e6
    note(
        f"training a BPE with {spec.bpe_vocab_size:,} tokens on {megabytes:.1f} MB of text", enabled=progress
    )
    return own_tokenizer(train_bpe(texts, spec.bpe_vocab_size, END_OF_TEXT), "bpe")


def _write_corpus(
    out: Path,
    manifest: Manifest,
    source: Source,
    split: Split,
    tokenizer: Tokenizer,
    shard_tokens: int,
    workers: int,
    progress: bool,
) -> None:
    """The main pass: write the shards that are missing, then the complete manifest."""
    writers = {name: SplitWriter(out, name, tokenizer.dtype, shard_tokens) for name in SPLITS}
    if manifest.complete and _all_there(manifest, writers):
        note(f"{out} is complete and intact: nothing to do", enabled=progress)
        return

    def side(document: Document) -> SplitWriter:
        return writers[HELD_OUT if split.is_held_out(document) else TRAIN]

    began = time.monotonic()
    stream = _stream(source, f"tokenizing {source.name}", progress)
    missing = (document for document in stream if not side(document).take_finished(document))
    try:
        for document, tokens in encode_documents(missing, tokenizer, workers):
            side(document).add(document, tokens)
        for writer in writers.values():
            writer.close()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    entries = {name: writer.entries for name, writer in writers.items()}
    _remove_strangers(out, {entry.name for split_entries in entries.values() for entry in split_entries})
    replace(manifest, splits=entries, skipped=dict(source.skipped), complete=True).write(out)
    _summary(
        out,
        entries,
        source,
        sum(writer.num_tokens for writer in writers.values()),
        time.monotonic() - began,
        progress,
    )


def _all_there(manifest: Manifest, writers: dict[str, SplitWriter]) -> bool:
    """Whether every shard of a complete manifest is intact."""
    return all(
        [entry.sha256 for entry in entries]
        == [header.sha256.hex() for _, header in sorted(writers[name].finished.items())]
        for name, entries in manifest.splits.items()
    )


def _remove_strangers(out: Path, names: set[str]) -> None:
    """Remove shards that do not belong to the corpus (they were damaged and are past its end)."""
    with storage(out, "write to"):
        for path in out.glob("*.tokens"):
            if path.name not in names:
                path.unlink()


def _summary(
    out: Path,
    entries: dict[str, list[ShardEntry]],
    source: Source,
    written: int,
    seconds: float,
    progress: bool,
) -> None:
    parts = []
    for name, shards in entries.items():
        tokens, number = (
            sum(entry.num_tokens for entry in shards),
            sum(entry.num_documents for entry in shards),
        )
        parts.append(f"{name} {tokens:,} tokens in {number:,} documents")
    rate = f"{written / max(seconds, 1e-9):,.0f} tokens/s" if written else "no shard was missing"
    left_out = f"; left out: {_in_words(source.skipped)}" if source.skipped else ""
    note(f"{out / MANIFEST}: {', '.join(parts)} ({rate}){left_out}", enabled=progress)
