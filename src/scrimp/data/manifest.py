"""`corpus.json`: what a folder of token shards holds, and from which text and settings.

It is written when `prepare` starts, with ``"complete": false`` and the settings, so that a
second start knows what it continues, and written again when the last shard is done, with the
shards of both splits. A folder without a complete manifest is never trained on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scrimp.data.shards import ShardHeader
from scrimp.errors import DataError
from scrimp.files import storage, write_whole

MANIFEST = "corpus.json"
FORMAT = 1
TOKENIZER = "tokenizer"
TRAIN, HELD_OUT = "train", "held-out"
SPLITS = (TRAIN, HELD_OUT)


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
class Manifest:
    """The content of corpus.json."""

    settings: dict[str, Any]
    """What decides the shards: source, tokenizer, held-out share, shard size."""
    tokenizer_digest: str | None = None
    """None until the tokenizer is made."""
    document_form: dict[str, int | None] = field(default_factory=dict)
    """Ids of the delimiter and (or null) of the closing token."""
    vocab_size: int = 0
    threshold: int | None = None
    """Documents with a hash below this are held out; None until the corpus was looked through."""
    splits: dict[str, list[ShardEntry]] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> rows or files of the source that were left out."""
    complete: bool = False

    def write(self, folder: Path) -> None:
        """Write corpus.json into the folder."""
        content = {
            "scrimp_corpus": FORMAT,
            "complete": self.complete,
            "settings": self.settings,
            "tokenizer": {
                "digest": self.tokenizer_digest,
                "vocab_size": self.vocab_size,
                **self.document_form,
            },
            "threshold": self.threshold,
            "skipped": self.skipped,
            "splits": {name: [vars(entry) for entry in entries] for name, entries in self.splits.items()},
        }
        write_whole(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


def is_corpus(folder: Path) -> bool:
    """Whether the folder is one of token shards, complete or not."""
    with storage(folder, "read"):
        return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder of token shards."""
    path = folder / MANIFEST
    with storage(path, "read"):
        if not path.is_file():
            raise DataError(
                f"{folder} is not a folder of token shards",
                got="no corpus.json",
                do="make one with `scrimp prepare SOURCE FOLDER`",
            )
        raw = path.read_bytes()
    try:
        content = json.loads(raw)
        version = content["scrimp_corpus"]
        if version != FORMAT:
            raise DataError(
                f"{path} has another format",
                got=f"version {version}",
                expected=f"version {FORMAT}",
                do="prepare the corpus again with this version of Scrimp",
            )
        tokenizer = dict(content["tokenizer"])
        return Manifest(
            settings=dict(content["settings"]),
            tokenizer_digest=tokenizer.pop("digest"),
            vocab_size=int(tokenizer.pop("vocab_size")),
            document_form=tokenizer,
            threshold=content["threshold"],
            skipped=dict(content["skipped"]),
            splits={
                name: [ShardEntry(**entry) for entry in entries]
                for name, entries in content["splits"].items()
            },
            complete=bool(content["complete"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged",
            got=f"{type(error).__name__}: {error}",
            do="prepare the corpus again into an empty folder",
        ) from error
