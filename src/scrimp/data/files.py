"""The file system at the edge: atomic writes, a lock, and errors that name the path.

Everything that `scrimp.data` writes is written beside its final name, flushed to the disk
(fsync) and renamed, so a name either does not exist or holds the whole content, whatever
kills the process. An `OSError` leaves this room only as a `StorageError`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scrimp.errors import StorageError

_ADVICE = {
    errno.ENOSPC: "free some space or choose a folder on another disk, then run the same command again",
    errno.EDQUOT: "free some of your quota or choose a folder on another disk, then run the same command again",
    errno.EFBIG: "raise the largest allowed file size, or choose a folder on another file system",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EROFS: "choose a folder on a file system that can be written",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EEXIST: "a file of that name is in the way: choose another path",
    errno.ENOENT: "check the spelling of the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


@contextmanager
def storage(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that names `path` and what was being done."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = _ADVICE.get(error.errno or 0, "check the path and the disk, then run the same command again")
        raise StorageError(f"cannot {doing} {path}", got=reason, do=advice) from error


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that nobody ever sees a part of it."""
    beside = path.with_name(f".{path.name}.partial")
    with storage(path, "write"):
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents; one that exists is fine."""
    with storage(folder, "create the folder"):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def folder_lock(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the folder for this process; a second one waits. A killed process releases it.

    `waiting` is called once if another process holds the folder.

    The lock is taken on the folder itself, so that no lock file is left in it. Where the file
    system has no locks (some network mounts) the block runs without one.
    """
    import fcntl

    with storage(folder, "open"):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EBADF):
                raise
        yield
    finally:
        os.close(descriptor)
