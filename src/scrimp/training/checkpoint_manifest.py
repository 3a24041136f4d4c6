"""What a complete folder looks like: a list of its files with their checksums, written last.

Problem  A run can be killed at any byte of a checkpoint, a disk can lose or flip bytes later,
         and a copy can be cut short. A folder that merely exists proves nothing.
Method   `seal` reads back and hashes every file, flushes each one to the disk, and then writes
         ``manifest.json`` beside itself and renames it: the manifest is there only if all it
         names is there. The writer renames the whole folder after that. `verify` compares
         sizes first (free), then SHA-256 (a read of the folder, files side by side).
         The version in the manifest is that of the folder's layout; a newer one is refused
         instead of being half understood. The manifest also says what a reader must know before
         it takes the weights: which tensors hold a NaN or an infinity, and how many steps of the
         run were skipped.
Limits   A checksum tells accidents from good data. It is no signature: who can write the
         folder can write a matching manifest. Files beside those listed are ignored, except
         tensor files, because a reader that lists the folder would take them in.
Checked  tests/training/test_checkpoint_faults.py: truncated, flipped, missing, newer, foreign.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from scrimp.errors import CheckpointError
from scrimp.files import read_bounded, replaced_file
from scrimp.json_files import decode_json

MANIFEST: Final = "manifest.json"
VERSION: Final = 1
TENSOR_SUFFIX: Final = ".safetensors"

_Result = TypeVar("_Result")
_CHUNK: Final = 1 << 20
_HASH_THREADS: Final = 4
_MAX_BYTES: Final = 64 << 20
_FALL_BACK: Final = "use an older checkpoint, or restore this folder from a copy"


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is known of one complete checkpoint."""

    step: int
    files: dict[str, FileRecord]
    not_finite: tuple[str, ...] | None = None
    """Tensors that hold a NaN or an infinity; None in manifests of earlier versions, which do not say."""
    skipped_steps: int | None = None
    """Steps of the run that moved no weight, as their loss or gradient was not finite; None as above."""


@dataclass(frozen=True)
class _Version:
    scrimp_checkpoint: int


@dataclass(frozen=True)
class _Content:
    """manifest.json"""

    scrimp_checkpoint: int
    step: int
    files: dict[str, FileRecord]
    finite: bool | None = None
    not_finite: tuple[str, ...] = ()
    skipped_steps: int | None = None


def step_name(step: int) -> str:
    """The name of the folder of a complete checkpoint."""
    return f"step-{step:08d}"


def seal(folder: Path, step: int, *, not_finite: Collection[str] = (), skipped_steps: int = 0) -> Manifest:
    """Hash and flush every file of `folder`, then write its manifest. Raises OSError.

    Args:
        not_finite: names of tensors that hold a NaN or an infinity.
        skipped_steps: steps of the run so far that moved no weight.
    """
    files = hash_files(folder, apart_from=MANIFEST)
    manifest = Manifest(step, files, tuple(not_finite), skipped_steps)
    body = {
        "scrimp_checkpoint": VERSION,
        "step": step,
        "skipped_steps": skipped_steps,
        "finite": not not_finite,
        **({"not_finite": list(not_finite)} if not_finite else {}),
        "files": {name: vars(record) for name, record in files.items()},
    }
    with replaced_file(folder / MANIFEST) as file:
        file.write((json.dumps(body, indent=1) + "\n").encode())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`; CheckpointError if it is missing, damaged or of a newer version."""
    path = folder / MANIFEST
    if not path.exists():
        raise CheckpointError(
            f"{folder.name} is not complete", got=f"no {MANIFEST} in {folder}", do=_FALL_BACK
        )
    raw = read_bounded(path, error=CheckpointError, do=_FALL_BACK, at_most=_MAX_BYTES)
    reading = functools.partial(decode_json, raw, origin=str(path), error=CheckpointError, do=_FALL_BACK)
    version = reading(_Version, closed=False).scrimp_checkpoint
    if version > VERSION:
        raise CheckpointError(
            f"{folder.name} was written by a newer Scrimp",
            got=f"checkpoint version {version}",
            expected=f"at most {VERSION}",
            do="install the Scrimp that wrote it",
        )
    content = reading(_Content)
    is_known = content.finite is not None
    odd = [name for name in content.files if Path(name).name != name]
    if version != VERSION or odd or (is_known and content.finite != (not content.not_finite)):
        got = f"the file name {odd[0]!r}" if odd else f"version {version}, finite {content.finite}"
        raise CheckpointError(f"{path} is damaged", got=got, do=_FALL_BACK)
    return Manifest(
        content.step, content.files, content.not_finite if is_known else None, content.skipped_steps
    )


def verify(folder: Path) -> Manifest:
    """Compare `folder` with its manifest: sizes of all files first, then their checksums.

    Raises:
        CheckpointError: naming the first file that is missing, truncated, altered or foreign.
    """
    manifest = read_manifest(folder)
    verify_sizes(folder, manifest)
    verify_files(folder, manifest.files, do=_FALL_BACK)
    return manifest


def hash_files(folder: Path, *, apart_from: str) -> dict[str, FileRecord]:
    """Size and checksum of every file of a folder, each flushed to the disk. Raises OSError."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and entry.name != apart_from)
    records = _in_parallel(lambda name: _hash_file(folder / name, flush=True), names)
    return dict(zip(names, records, strict=True))


def verify_files(folder: Path, files: Mapping[str, FileRecord], *, do: str) -> None:
    """Compare the checksums of files.

    Raises:
        CheckpointError: with the advice `do`, naming the first file that is missing, differs, or cannot be read.
    """

    def check(name: str) -> tuple[str, str | None] | None:
        try:
            found = _hash_file(folder / name)
        except FileNotFoundError:
            return "is missing", None
        except OSError as error:
            return "cannot be read", error.strerror or str(error)
        return None if found == files[name] else ("is altered", "another checksum than when it was written")

    names = sorted(files)
    for name, problem in zip(names, _in_parallel(check, names), strict=True):
        if problem is not None:
            raise CheckpointError(f"{folder / name} {problem[0]}", got=problem[1], do=do)


def verify_sizes(folder: Path, manifest: Manifest) -> None:
    """The part of `verify` that reads no file: every file is there in its full size."""
    for name, record in sorted(manifest.files.items()):
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            what = "is missing" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})"
            raise CheckpointError(
                f"{path} {what}", expected=f"{record.bytes:,} bytes", do=_FALL_BACK
            ) from error
        if size != record.bytes:
            what = "is truncated" if size < record.bytes else "has grown"
            raise CheckpointError(
                f"{path} {what}", got=f"{size:,} bytes", expected=f"{record.bytes:,} bytes", do=_FALL_BACK
            )
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read", got=error.strerror or error, do=_FALL_BACK
        ) from error
    for entry in entries:
        if entry.endswith(TENSOR_SUFFIX) and entry not in manifest.files:
            raise CheckpointError(
                f"{folder / entry} does not belong to this checkpoint",
                expected=f"only the files of {MANIFEST}",
                do="move it out of the folder",
            )


def _hash_file(path: Path, *, flush: bool = False) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
        if flush:
            os.fsync(file.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def _in_parallel(work: Callable[[str], _Result], names: list[str]) -> list[_Result]:
    # hashlib lets go of the interpreter lock, so that threads do hash side by side.
    try:
        with ThreadPoolExecutor(max_workers=min(_HASH_THREADS, max(1, len(names)))) as pool:
            return list(pool.map(work, names))
    except RuntimeError as error:
        if not is_out_of_threads(error):
            raise
    return [work(name) for name in names]


def is_out_of_threads(error: RuntimeError) -> bool:
    """Whether a thread was refused: by a limit of processes, or of memory, which its stack takes."""
    return "start new thread" in str(error)
