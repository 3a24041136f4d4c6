"""Where text comes from: one `Source` per kind, each a stream of texts in a fixed order.

    stdlib              the Python files of the running Python's own standard library
    stdlib:PACKAGE      those of one package, as stdlib:email
    copy                a task: random letters, and the same again
    stdlib-docstrings, stdlib-signatures   conversations about its functions (`scrimp.data.standard_chats`)
    label-maps:KIND     conversations about tasks that only examples tell, with demonstrations before the question
                        that are chosen by KIND, or few examples to tune on (see label_maps)
    FILE                text, JSONL (.jsonl, .ndjson, .json) or Parquet; text and JSONL also .gz, .zst
    FOLDER              such files, in the order of their paths (a .json file in a folder is text);
                        names that begin with a dot are left out
    SAVED DATASET       a folder written by `datasets`' save_to_disk: its train split, if it has splits
    hf:OWNER/NAME[:CONFIG]   the train split of a data set on the Hugging Face hub, streamed

A source says what it is by its `fingerprint`, so that prepared shards are never continued
from, or taken for, another text. Up to 256 MiB the fingerprint is a hash of the files'
content; above that of their names, sizes and modification times, and `prepare` also compares
a digest of the documents themselves when it continues.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scrimp.data.columns import Column, jsonl_texts, parquet_texts
from scrimp.data.documents import LONGEST_DOCUMENT, cut, text_target
from scrimp.data.streams import COMPRESSED, Meter, content_suffix, open_bytes, text_blocks
from scrimp.errors import DataError
from scrimp.files import storage

HUB = "hf:"
_STDLIB = "stdlib"
LABEL_MAPS = tuple(f"label-maps:{kind}" for kind in ("bm25", "random", "none", "few-shot"))
DOCSTRINGS = f"{_STDLIB}-docstrings"
CHATS = frozenset({DOCSTRINGS, f"{_STDLIB}-signatures", *LABEL_MAPS})
"""Built-in sources of conversations; the others are of text."""
BUILT_IN = frozenset({_STDLIB, "copy"}) | CHATS
"""Sources that are names, never paths: ./stdlib is the folder. So is stdlib:PACKAGE (`is_built_in`)."""
_PACKAGE = re.compile(rf"{_STDLIB}:(\w+)")
_COPIES = 50_000
_HASHED_CONTENT = 256 << 20
_JSONL = frozenset({".jsonl", ".ndjson"})
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


class Source(ABC):
    """A stream of texts in a fixed order."""

    name: str
    """What errors and the progress line call it."""
    num_bytes: int | None = None
    """Size of the files, where it is known; for the progress line."""
    chat_template: str | None = None
    """What writes its conversations where the tokenizer has no template."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.skipped: dict[str, int] = {}
        """Reason -> how many were left out in the last pass."""

    @abstractmethod
    def texts(self, meter: Meter) -> Iterator[str]:
        """The texts, from the first to the last; may be called again for another pass."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Says which text this is: another fingerprint is another text."""

    def validation(self) -> Source | None:
        """The text that this data set itself keeps for evaluation."""
        return None


@dataclass(frozen=True)
class SourceFile:
    """A file of a source and the name it goes by inside it."""

    name: str
    path: Path
    size: int
    modified: int


class Files(Source):
    """Text, JSONL and Parquet files, one after the other."""

    def __init__(self, name: str, files: list[SourceFile], column: Column, *, alone: bool) -> None:
        super().__init__(name)
        self.files, self.column, self.alone = files, column, alone
        self.num_bytes = sum(file.size for file in files)

    def texts(self, meter: Meter) -> Iterator[str]:
        self.skipped = {}
        for file in self.files:
            match content_suffix(file.path):
                case ".parquet":
                    yield from parquet_texts(file.path, self.column, meter, self.skipped)
                case suffix if suffix in _JSONL or (suffix == ".json" and self.alone):
                    yield from jsonl_texts(file.path, self.column, meter, self.skipped)
                case _ if self.column.is_messages:
                    raise no_conversations(str(file.path))
                case _:
                    target = text_target(_text_bytes(file)) if self.alone else LONGEST_DOCUMENT
                    yield from cut(text_blocks(file.path, meter), target)

    def fingerprint(self) -> str:
        return fingerprint_files(self.files)


def is_built_in(source: str) -> bool:
    """Whether a source is a name, never a path."""
    return source in BUILT_IN or _PACKAGE.fullmatch(source) is not None


class StandardLibrary(Files):
    """The standard library of this Python: a real corpus on every machine.

    Args:
        name: stdlib, or stdlib:PACKAGE for a package of it.
    """

    def __init__(self, name: str = _STDLIB) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        if (found := _PACKAGE.fullmatch(name)) is not None:
            root /= found[1]
            if not root.is_dir():
                raise DataError(
                    f"the standard library has no package {found[1]}",
                    got=f"no folder {root}",
                    expected="a package of it, as stdlib:email",
                )
        files = [file for file in walk_files(root, suffix=".py", left_out=_STDLIB_LEFT_OUT) if file.size]
        if not files:
            raise DataError(
                f"this Python has no source files of {name}",
                got=f"no .py file in {root}",
                do="give a text with data.source",
            )
        super().__init__(name, files, Column("text"), alone=False)

    def texts(self, meter: Meter) -> Iterator[str]:
        self.skipped = {}
        for file in self.files:
            try:
                pieces = list(cut(text_blocks(file.path, meter), LONGEST_DOCUMENT))
            except DataError:  # a few files declare an older encoding
                self.skipped["files that are not UTF-8"] = self.skipped.get("files that are not UTF-8", 0) + 1
                continue
            yield from pieces

    def fingerprint(self) -> str:
        return f"{platform.python_version()}-{super().fingerprint()}"


class CopyTask(Source):
    """Texts ``w=w`` of eight hexadecimal digits w: nobody can predict the first w, a model that copies has the second.

    A perfect model loses ln 16 nats on each of eight digits. Digits are those of a hash of the text's number, so that
    all machines have the same texts.
    """

    def __init__(self) -> None:
        super().__init__("copy")

    def texts(self, meter: Meter) -> Iterator[str]:
        for number in range(_COPIES):
            word = hashlib.sha256(b"copy %d" % number).hexdigest()[:8]
            yield f"{word}={word}"

    def fingerprint(self) -> str:
        return f"copy-{_COPIES}"


def fingerprint_files(files: list[SourceFile]) -> str:
    """A hash of the files' names and content, or of names, sizes and times where they are large."""
    digest = hashlib.sha256()
    by_content = sum(file.size for file in files) <= _HASHED_CONTENT
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0".encode("utf-8", "surrogateescape"))
        if by_content:
            with storage(file.path, "read"), open(file.path, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        else:
            digest.update(f"{file.modified}\0".encode())
    return digest.hexdigest()


def _text_bytes(file: SourceFile) -> int:
    """Bytes of text in a file; for an archive counted, as far as the cutting rule needs it."""
    if file.path.suffix.lower() not in COMPRESSED:
        return file.size
    enough, count = 256 * 64 * 1024, 0
    with open_bytes(file.path, Meter()) as stream:
        while count < enough and (block := stream.read(1 << 16)):
            count += len(block)
    return min(count, enough)


def walk_files(root: Path, *, suffix: str = "", left_out: Iterable[str] = ()) -> list[SourceFile]:
    """The regular files under `root` in the order of their relative paths."""
    left_out, found = frozenset(left_out), []

    def refuse(error: OSError) -> None:
        raise error

    with storage(root, "read the folder"):
        above = len(os.path.join(root, ""))
        for folder, folders, names in os.walk(root, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
            for name in names:
                if name.startswith(".") or not name.endswith(suffix):
                    continue
                path = os.path.join(folder, name)
                if (file := source_file(Path(path), path[above:].replace(os.sep, "/"))) is not None:
                    found.append(file)
    return sorted(found, key=lambda file: file.name)


def source_file(path: Path, name: str) -> SourceFile | None:
    """The file with its size and time; None for sockets, pipes and devices."""
    with storage(path, "read"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        return None
    return SourceFile(name, path, status.st_size, status.st_mtime_ns)


def no_conversations(name: str) -> DataError:
    """For a source of text where conversations are wanted."""
    return DataError(
        f"{name} holds text, not conversations",
        expected="JSONL or Parquet files, or a data set, with a column of messages",
        do="give conversations, or leave --objective.name out to train on text",
    )
