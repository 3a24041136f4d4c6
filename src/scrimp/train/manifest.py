"""What a complete folder looks like: a list of its files with their checksums, written last.

Problem  A run can be killed at any byte of a checkpoint, a disk can lose or flip bytes later,
         and a copy can be cut short. A folder that merely exists proves nothing.
Method   `seal` reads back and hashes every file, flushes each one to the disk, and then writes
         ``manifest.json`` beside itself and renames it: the manifest is there only if all it
         names is there. The writer renames the whole folder after that. `verify` compares
         sizes first (free), then SHA-256 (a read of the folder, files side by side).
         The version in the manifest is that of the folder's layout; a newer one is refused
         instead of being half understood.
Limits   A checksum tells accidents from good data. It is no signature: who can write the
         folder can write a matching manifest. Files beside those listed are ignored, except
         tensor files, because a reader that lists the folder would take them in.
Checked  tests/train/test_checkpoint_faults.py: truncated, flipped, missing, newer, foreign.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from scrimp.errors import CheckpointError
from scrimp.files import replaced_file

MANIFEST: Final = "manifest.json"
VERSION: Final = 1
TENSOR_SUFFIX: Final = ".safetensors"

_Result = TypeVar("_Result")
_CHUNK: Final = 1 << 20
_HASH_THREADS: Final = 4
_FALL_BACK: Final = "use an older checkpoint, or restore this folder from a copy"


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one complete checkpoint."""

    step: int
    files: dict[str, FileRecord]


def seal(folder: Path, step: int) -> Manifest:
    """Hash and flush every file of `folder`, then write its manifest. Raises OSError."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and entry.name != MANIFEST)
    records = _in_parallel(lambda name: _hash_file(folder / name, flush=True), names)
    manifest = Manifest(step=step, files=dict(zip(names, records, strict=True)))
    body = {
        "scrimp_checkpoint": VERSION,
        "step": step,
        "files": {name: vars(record) for name, record in manifest.files.items()},
    }
    with replaced_file(folder / MANIFEST) as file:
        file.write((json.dumps(body, indent=1) + "\n").encode())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`; CheckpointError if it is missing, damaged or of a newer version."""
    path = folder / MANIFEST
    try:
        body: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder.name} is not complete", got=f"no {MANIFEST} in {folder}", do=_FALL_BACK
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}", got=error.strerror or error, do=_FALL_BACK) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged", got=f"no JSON ({error})", do=_FALL_BACK) from error
    version = body.get("scrimp_checkpoint") if isinstance(body, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{folder.name} was written by a newer Scrimp",
            got=f"checkpoint version {version}",
            expected=f"at most {VERSION}",
            do="install the Scrimp that wrote it",
        )
    try:
        files = {
            Path(name).name: FileRecord(bytes=int(record["bytes"]), sha256=str(record["sha256"]))
            for name, record in body["files"].items()
        }
        manifest = Manifest(step=int(body["step"]), files=files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged", got=f"an unknown form ({error!r})", do=_FALL_BACK
        ) from error
    if version != VERSION:
        raise CheckpointError(
            f"{path} is damaged", got=f"version {version!r}", expected=VERSION, do=_FALL_BACK
        )
    return manifest


def verify(folder: Path) -> Manifest:
    """Compare `folder` with its manifest: sizes of all files first, then their checksums.

    Raises:
        CheckpointError: naming the first file that is missing, truncated, altered or foreign.
    """
    manifest = read_manifest(folder)
    verify_sizes(folder, manifest)

    def check(name: str) -> str | None:
        try:
            found = _hash_file(folder / name)
        except OSError as error:
            return f"an error of the disk: {error.strerror or error}"
        return None if found == manifest.files[name] else "a checksum that is not the manifest's"

    names = sorted(manifest.files)
    for name, problem in zip(names, _in_parallel(check, names), strict=True):
        if problem is not None:
            raise CheckpointError(f"{folder / name} is altered", got=problem, do=_FALL_BACK)
    return manifest


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
    for entry in sorted(os.listdir(folder)):
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
    with ThreadPoolExecutor(max_workers=min(_HASH_THREADS, max(1, len(names)))) as pool:
        return list(pool.map(work, names))
