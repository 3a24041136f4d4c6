"""`corpus.json`: what a folder of token shards holds, and from which text and settings.

It is written when `prepare` starts, with ``"complete": false`` and the settings, so that a
second start knows what it continues, and written again when the last shard is done, with the
shards of both splits. A folder without a complete manifest is never trained on.

Digest   The file carries a SHA-256 over everything else in it, so that no altered figure is believed.
         `corpus_digest` is another: it covers every figure that decides what a run sees, and not where the
         text was found; checkpoints carry it.
Checked  tests/data/test_corpus_manifest.py: every altered value is noticed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from scrimp.data.shards import ShardHeader
from scrimp.data.sources import HUB, is_built_in
from scrimp.data.split import Split, SplitContent
from scrimp.errors import DataError
from scrimp.files import storage, write_whole
from scrimp.json_files import read_json

MANIFEST = "corpus.json"
FORMAT = 1
TOKENIZER = "tokenizer"
TRAIN, HELD_OUT = "train", "held-out"
SPLITS = (TRAIN, HELD_OUT)
_LONGEST = 256 << 20
AGAIN = (
    "run `scrimp prepare` again with the same source and folder: it keeps intact shards and counts again; "
    "if it refuses the folder, the settings were altered: prepare the corpus again into an empty folder"
)
_ANEW = "prepare the corpus again into an empty folder"


def shard_name(split: str, number: int) -> str:
    """File name of a shard."""
    return f"{split}-{number:05d}.tokens"


@dataclass(frozen=True)
class ShardEntry:
    """One shard, as the manifest knows it."""

    name: str
    num_tokens: int
    num_documents: int
    text_bytes: int
    file_bytes: int
    sha256: str
    """SHA-256 of the shard's body, as in its header."""

    @classmethod
    def of(cls, name: str, header: ShardHeader) -> ShardEntry:
        """The entry for a shard with this header."""
        return cls(
            name,
            header.num_tokens,
            header.num_documents,
            header.text_bytes,
            header.file_bytes,
            header.sha256.hex(),
        )


@dataclass(frozen=True)
class TokenizerFigures:
    """What the manifest says of the tokenizer; unset until it is settled."""

    digest: str | None = None
    vocab_size: int = 0
    delimiter_id: int | None = None
    closing_id: int | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of corpus.json."""

    settings: dict[str, Any]
    """Source, tokenizer, split: what decides the shards, to compare with on a second start."""
    tokenizer: TokenizerFigures = TokenizerFigures()
    split: Split | None = None
    """Which documents are held out; None until the corpus was looked through."""
    splits: dict[str, list[ShardEntry]] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> rows or files of the source that were left out."""
    complete: bool = False
    written_digest: str | None = field(default=None, compare=False)
    """The digest in the file; None in files of versions that wrote none."""

    def content(self) -> dict[str, Any]:
        """What stands in the file, but for the digest."""
        return {
            "scrimp_corpus": FORMAT,
            "complete": self.complete,
            "settings": self.settings,
            "tokenizer": asdict(self.tokenizer),
            "split": None if self.split is None else asdict(self.split.content()),
            "skipped": self.skipped,
            "splits": {name: [asdict(entry) for entry in entries] for name, entries in self.splits.items()},
        }

    @property
    def holds_conversations(self) -> bool:
        """Whether documents are conversations, their answers marked."""
        return "chat_template" in self.settings

    @property
    def digest(self) -> str:
        """SHA-256 over the content."""
        return hashlib.sha256(json.dumps(self.content(), sort_keys=True).encode()).hexdigest()

    @property
    def is_altered(self) -> bool:
        """Whether the file holds other values than were written."""
        return self.written_digest is not None and self.written_digest != self.digest

    def write(self, folder: Path) -> None:
        """Write corpus.json into the folder."""
        content = self.content() | {"digest": self.digest}
        write_whole(folder / MANIFEST, json.dumps(content, indent=2) + "\n", shared=True)


def corpus_digest(manifest: Manifest) -> str:
    """Identifies what a run sees of a corpus: its tokenizer and every figure of its shards."""
    shards = [[name, asdict(entry)] for name in SPLITS for entry in manifest.splits.get(name, [])]
    return hashlib.sha256(json.dumps([asdict(manifest.tokenizer), shards]).encode()).hexdigest()


def earlier_corpus_digest(manifest: Manifest) -> str:
    """The digest that checkpoints of earlier versions carry: without sizes and the tokenizer's figures."""
    shards = [[name, entry.sha256] for name in SPLITS for entry in manifest.splits.get(name, [])]
    return hashlib.sha256(json.dumps([manifest.tokenizer.digest, shards]).encode()).hexdigest()


def is_corpus(folder: Path) -> bool:
    """Whether the folder is one of token shards, complete or not."""
    with storage(folder, "read"):
        return (folder / MANIFEST).is_file()


def shards_at(source: str) -> Path | None:
    """The folder of ready shards that a source is, if it is one."""
    if is_built_in(source) or source.startswith(HUB):
        return None
    path = Path(source).expanduser()
    return path if is_corpus(path) else None


@dataclass
class _Version:
    scrimp_corpus: int


@dataclass
class _File(_Version):
    """corpus.json with the types that it must have."""

    complete: bool
    settings: dict[str, Any]
    tokenizer: TokenizerFigures
    skipped: dict[str, int]
    splits: dict[str, list[ShardEntry]]
    split: SplitContent | None = None
    threshold: float | None = None
    """What earlier versions wrote for `split`: a whole number up to 2**64, which 64 bits cannot hold."""
    digest: str | None = None


def read_manifest(folder: Path, *, check: bool = True) -> Manifest:
    """The manifest of a folder of token shards.

    Args:
        check: refuse one whose values are not those that were written.
    """
    path = folder / MANIFEST
    if not is_corpus(folder):
        raise DataError(
            f"{folder} is not a folder of token shards",
            got="no corpus.json",
            do="make one with `scrimp prepare SOURCE FOLDER`",
        )
    version = read_json(path, _Version, error=DataError, do=_ANEW, at_most=_LONGEST, closed=False)
    if version.scrimp_corpus != FORMAT:
        raise DataError(
            f"{path} has another format",
            got=f"version {version.scrimp_corpus}",
            expected=f"version {FORMAT}",
            do="prepare the corpus again with this version of Scrimp",
        )
    content = read_json(path, _File, error=DataError, do=_ANEW, at_most=_LONGEST)
    for split, entries in content.splits.items():
        names = [shard_name(split, number) for number in range(len(entries))]
        if split not in SPLITS or [entry.name for entry in entries] != names:
            raise DataError(f"{path}: the shards of {split!r} are not in order", do=_ANEW)
    manifest = Manifest(
        settings=content.settings,
        tokenizer=content.tokenizer,
        split=_split(content, path),
        skipped=content.skipped,
        splits=content.splits,
        complete=content.complete,
        written_digest=content.digest,
    )
    if check and manifest.is_altered:
        raise DataError(
            f"{path} was altered",
            got=f"figures with the digest {manifest.digest[:12]}",
            expected=str(manifest.written_digest)[:12],
            do=AGAIN,
        )
    return manifest


def _split(content: _File, path: Path) -> Split | None:
    if content.split is not None:
        try:
            return content.split.split()
        except ValueError as error:
            raise DataError(f"{path}: split cannot be read", got=error, do=_ANEW) from None
    if content.threshold is None:
        return None
    fields = read_json(path, dict[str, msgspec.Raw], error=DataError, do=_ANEW, at_most=_LONGEST)
    raw = bytes(fields["threshold"])
    if not raw.isdigit() or len(raw) > 20:
        raise DataError(f"{path}: threshold cannot be read", got=raw[:40].decode(), do=_ANEW)
    return Split(int(raw))
