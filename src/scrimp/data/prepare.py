"""`scrimp prepare`: a source becomes a folder of token shards.

    OUT/corpus.json                 what it holds, from which text and settings (see manifest)
    OUT/tokenizer/                  the tokenizer, in the form transformers loads
    OUT/train-00000.tokens …        shards of the training split
    OUT/held-out-00000.tokens …     shards of the held-out split

Stream     Documents are read, hashed, encoded and written in one pass, a few megabytes at a
           time; a shard ends with the first document that fills it. Passes before it look
           which documents to hold out (see split), and sample what a BPE is trained on; the
           documents of a small source are held meanwhile, not read again (see passes).
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

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from scrimp.data.chat_template import ChatTemplate, read_template
from scrimp.data.corpus_manifest import (
    HELD_OUT,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    TRAIN,
    Manifest,
    ShardEntry,
    TokenizerFigures,
    is_corpus,
    read_manifest,
    shard_name,
    shards_at,
)
from scrimp.data.corpus_text import MIXTURE, CorpusSpec, CorpusText, held_out_source, in_words
from scrimp.data.documents import Document
from scrimp.data.encoding import encode_documents
from scrimp.data.progress_line import note
from scrimp.data.sources import HUB, Source, is_built_in
from scrimp.data.tokenizer import SMALLEST_BPE, Tokenizer, load_tokenizer
from scrimp.data.writing import SplitWriter
from scrimp.errors import DataError, StorageError, typed
from scrimp.files import folder_lock, make_folder, storage
from scrimp.launchers import num_cores

SHARD_TOKENS = 1 << 26
RULES = 3
"""Raised when cutting, splitting or encoding change: older shards are then not made again, but kept."""

EARLIER_RULES = (1, 2)
"""Rules whose corpora open, and are repaired, as they are."""

WRONG_IDS = 2
"""Rules that gave ordinary added tokens of some tokenizer folders wrong ids; nothing is added to such shards."""


def prepare(
    spec: CorpusSpec,
    out: Path,
    *,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = True,
    text: CorpusText | None = None,
) -> Path:
    """Write the token shards of a source to `out`, or continue where an earlier call was interrupted.

    Args:
        spec: the source and what decides its tokens.
        out: a folder that is new, empty, or was begun with the same source and settings.
        workers: documents encoded at a time; None, or not fewer than there are cores: all cores.
        shard_tokens: a shard ends with the document that brings it to this many tokens.
        progress: show what is being done on standard error.
        text: the spec's, where other sources decide it too; None: it is alone.

    Returns:
        `out`.
    """
    workers = _checked_counts(spec, workers, shard_tokens)
    source, given = open_text_source(spec, out)
    text = text or CorpusText(spec, source, progress=progress)
    settings = corpus_settings(spec, source, given, shard_tokens) | text.settings
    _check_out(out, settings)
    if not is_corpus(out):
        text.look_through()  # what cannot be read leaves no folder behind
    make_folder(out)
    with folder_lock(out, lambda: note(f"waiting for another process that prepares {out}", enabled=progress)):
        manifest = _begin(out, settings)
        if manifest.split is None:
            manifest = replace(manifest, split=text.look_through())
            manifest.write(out)
        tokenizer, manifest = _settle_tokenizer(out, manifest, text, given)
        _write_corpus(out, manifest, text, tokenizer, shard_tokens, workers)
    text.forget()
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
    if not isinstance(spec.held_out, Path) and not 0.0 <= spec.held_out < 1.0:
        raise DataError(
            "the held-out share is not possible", got=spec.held_out, expected="0 or more and less than 1"
        )
    return workers or num_cores()


def open_text_source(spec: CorpusSpec, out: Path | None = None) -> tuple[Source, Tokenizer | None]:
    """The source of a spec, and its tokenizer where that exists before the corpus is read."""
    shards, path = shards_at(spec.source), Path(spec.source).expanduser()
    if shards is not None:
        raise DataError(
            f"{shards} already holds token shards",
            expected="a source of text",
            do=f"train on it as it is: {typed('train', '--data.source', shards)}",
        )
    is_folder = not (is_built_in(spec.source) or spec.source.startswith(HUB)) and path.is_dir()
    if out is not None and is_folder and out.resolve().is_relative_to(path.resolve()):
        raise DataError(
            f"the output folder {out} lies inside the source {path}",
            do="choose a folder outside the source",
        )
    given = None if spec.tokenizer in ("auto", "bpe") else load_tokenizer(spec.tokenizer)
    source = spec.open(spec.source)
    return source, chat_tokenizer(spec, given, source.chat_template) if spec.conversations else given


def chat_tokenizer(spec: CorpusSpec, given: Tokenizer | None, usual: str | None = None) -> Tokenizer:
    """The tokenizer of conversations, with the template that writes them.

    Args:
        usual: the template of the source, for a tokenizer without one.

    Raises:
        DataError: there is none yet. ModelError: it has no template.
    """
    if given is None:
        raise DataError(
            "conversations need a tokenizer that there is already",
            got="one that would be trained on them",
            expected="the tokenizer of a model, or bytes",
            do="give --model.weights FOLDER, or --data.tokenizer (scrimp prepare: --tokenizer)",
        )
    if spec.chat_template is not None:
        given = given.with_chat_template(read_template(spec.chat_template))
    elif given.chat_template is None and usual is not None:
        given = given.with_chat_template(usual)
    ChatTemplate(given)
    return given


def corpus_settings(
    spec: CorpusSpec, source: Source, given: Tokenizer | None, shard_tokens: int = SHARD_TOKENS
) -> dict[str, Any]:
    """Everything that decides the shards, as it stands in the manifest."""
    held_out = held_out_source(spec, source)
    template = {}
    if spec.conversations:
        assert given is not None
        # Before weights of answers were read, all answers were learnt.
        template = {"chat_template": ChatTemplate(given).digest, "answers": "by weight"}
    return template | {
        "source": source.name.encode("utf-8", "backslashreplace").decode(),
        "fingerprint": source.fingerprint(),
        "text_column": spec.column,
        "tokenizer": "bpe" if given is None else given.digest,
        "bpe_vocab_size": spec.bpe_vocab_size if given is None else None,
        "held_out": spec.held_out if held_out is None else f"text {held_out.fingerprint()}",
        "shard_tokens": shard_tokens,
        "rules": RULES,
    }


def _difference(there: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What differs between two settings, in words; the source's path may differ, its text may not.

    A corpus of earlier rules goes on by them: its split stands in its manifest.
    """
    goes_on = there.get("rules") in EARLIER_RULES
    if there.get("rules") == WRONG_IDS:
        goes_on = there.get("tokenizer") in ("bpe", load_tokenizer("bytes").digest)
    for key in (*now, MIXTURE):
        if key == "rules" and goes_on:
            continue
        if key != "source" and there.get(key) != now.get(key):
            if key == "fingerprint":
                return "the source's text changed"
            if key == "rules" and there.get(key) == WRONG_IDS:
                return "shards of an earlier version, in which added tokens may have wrong ids"
            return f"{key} is {there.get(key)} there and {now.get(key)} now"
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
    difference = _difference(read_manifest(out, check=False).settings, settings)
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
        manifest = read_manifest(out, check=False)
        is_begun = manifest.split is not None or manifest.settings.get("rules") == RULES
        if is_begun and _difference(manifest.settings, settings) is None:
            return _counted_again(out, manifest, settings) if manifest.is_altered else manifest
    if (out / TOKENIZER).exists():
        _remove_tree(out / TOKENIZER)
    return Manifest(settings)


def _counted_again(out: Path, manifest: Manifest, settings: dict[str, Any]) -> Manifest:
    """What is left of an altered manifest: its rules, and the tokenizer that lies beside the shards."""
    note(f"{out / MANIFEST} was altered: counting again")
    try:
        figures = load_tokenizer(out / TOKENIZER).figures()
    except DataError:
        figures = TokenizerFigures()
    return Manifest(settings | {"rules": manifest.settings["rules"]}, figures)


def _remove_tree(folder: Path) -> None:
    import shutil

    with storage(folder, "remove"):
        shutil.rmtree(folder)


def _settle_tokenizer(
    out: Path, manifest: Manifest, text: CorpusText, given: Tokenizer | None
) -> tuple[Tokenizer, Manifest]:
    """The corpus's tokenizer: the one of an earlier call, the given one, or a BPE trained now."""
    folder = out / TOKENIZER
    assert manifest.split is not None
    if manifest.tokenizer.digest is not None:
        tokenizer = given
        if tokenizer is None and folder.is_dir():
            tokenizer = load_tokenizer(folder)
        if tokenizer is None or tokenizer.digest != manifest.tokenizer.digest:
            tokenizer = text.train_tokenizer(manifest.split)
        if tokenizer.digest != manifest.tokenizer.digest:
            raise DataError(
                f"the tokenizer in {out} cannot be made again",
                got="another one from the same text",
                expected="the one that the finished shards were made with",
                do="remove the folder and prepare from the beginning",
            )
    else:
        tokenizer = given or text.train_tokenizer(manifest.split)
    tokenizer.save(folder)
    settled = replace(manifest, tokenizer=tokenizer.figures())
    if settled != manifest:
        settled.write(out)
    return tokenizer, settled


def _write_corpus(
    out: Path, manifest: Manifest, text: CorpusText, tokenizer: Tokenizer, shard_tokens: int, workers: int
) -> None:
    """The main pass: write the shards that are missing, then the complete manifest."""
    chats = ChatTemplate(tokenizer) if manifest.holds_conversations else None
    writers = {
        name: SplitWriter(out, name, tokenizer.dtype, shard_tokens, has_answers=chats is not None)
        for name in SPLITS
    }
    if manifest.complete and _all_there(manifest, writers):
        note(f"{out} is complete and intact: nothing to do", enabled=text.progress)
        return

    def side(document: Document) -> SplitWriter:
        return writers[HELD_OUT if document.held_out else TRAIN]

    assert manifest.split is not None
    began = time.monotonic()
    documents = text.sides(manifest.split, "tokenizing")
    missing = (document for document in documents if not side(document).take_finished(document))
    try:
        for document, encoded in encode_documents(missing, tokenizer, workers, chats):
            side(document).add(document, encoded)
        for writer in writers.values():
            writer.close()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    entries = {name: writer.entries for name, writer in writers.items()}
    _remove_strangers(out, {entry.name for split_entries in entries.values() for entry in split_entries})
    manifest = replace(manifest, splits=entries, skipped=dict(text.source.skipped), complete=True)
    manifest.write(out)
    written = sum(writer.num_tokens for writer in writers.values())
    rate = (
        f"{written / max(time.monotonic() - began, 1e-9):,.0f} tokens/s"
        if written
        else "no shard was missing"
    )
    note(f"{out / MANIFEST}: {describe(manifest)} ({rate})", enabled=text.progress)


def _all_there(manifest: Manifest, writers: dict[str, SplitWriter]) -> bool:
    """Whether every shard of a complete manifest is there, intact and the one that the manifest names."""
    return all(
        {entry.name: entry for entry in entries}
        == {
            name: ShardEntry.of(name, header)
            for number, header in writers[split].finished.items()
            for name in [shard_name(split, number)]
        }
        for split, entries in manifest.splits.items()
    )


def _remove_strangers(out: Path, names: set[str]) -> None:
    """Remove shards that do not belong to the corpus (they were damaged and are past its end)."""
    with storage(out, "write to"):
        for path in out.glob("*.tokens"):
            if path.name not in names:
                path.unlink()


def describe(manifest: Manifest) -> str:
    """Tokens and documents of both sides, how much is held out, and what was left out."""
    parts = []
    what = "conversations" if manifest.holds_conversations else "documents"
    for name, shards in manifest.splits.items():
        tokens, number = (
            sum(getattr(entry, key) for entry in shards) for key in ("num_tokens", "num_documents")
        )
        parts.append(f"{name} {tokens:,} tokens in {number:,} {what}")
    text_bytes = {name: sum(entry.text_bytes for entry in shards) for name, shards in manifest.splits.items()}
    asked = manifest.settings.get("held_out")
    if text_bytes.get(HELD_OUT):
        text = "answers" if manifest.holds_conversations else "text"
        share = f"{text_bytes[HELD_OUT] / sum(text_bytes.values()):.2%} of the {text}"
        parts[-1] += f" ({share}, {asked:.2%} asked for)" if isinstance(asked, float) else f" ({share})"
    if manifest.split is not None and manifest.split.tail is not None:
        parts.append("cut off from the end of a document: no whole documents hold so little")
    if manifest.skipped:
        parts.append(f"left out: {in_words(manifest.skipped)}")
    return "; ".join([", ".join(parts[:2]), *parts[2:]])
