"""The file system at the edge: whole files, whole folders, a lock, and errors that name the path.

Problem  A process can be killed, and a machine lose power, between any two operations. What is
         then half there must not look like something that is whole.
Method   Write beside the final name, flush the content to the disk (fsync), rename, flush the
         folder that holds the name. A name then either does not exist, or stands for the old
         content, or for all of the new; and of two files written one after the other, the
         second is never there without the first.
         `storage` turns an `OSError` into a `StorageError` with advice by its number, the same
         in every room; `storage_error` does it where the sentence is not "cannot write PATH".
         `replaced_file` and `sync_folder` raise `OSError`, for callers with a sentence of their own.
Limits   Some network file systems cannot flush a folder or lock one. Both are then left out:
         such a system orders its names by itself, or nobody can.
Checked  tests/test_files.py, and in the rooms that write: tests/training/test_checkpoint_kill.py
         (kill -9 before every operation), tests/data/test_prepare.py (full disks),
         tests/models/test_huggingface_export.py, tests/report/test_page.py
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from scrimp.errors import ScrimpError, StorageError

_ADVICE: Final = {
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EDQUOT: "free some of your quota, or choose a folder on another disk",
    errno.EFBIG: "raise the largest allowed file size, or choose a folder on another file system",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EROFS: "choose a folder on a file system that can be written",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EISDIR: "a folder of that name is in the way: choose another path",
    errno.EEXIST: "a file of that name is in the way: choose another path",
    errno.ENOENT: "check the spelling of the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


# -- errors ------------------------------------------------------------------------------------


def storage_error(error: OSError, what: str) -> StorageError:
    """`error` as a StorageError that begins with `what`, and says what helps."""
    # One path is often named by two: the folder that the user knows, and the file in it that failed.
    name = str(error.filename) if error.filename else ""
    where = f" ({name})" if name and name not in what else ""
    advice = _ADVICE.get(error.errno or 0, "check the path and the disk")
    result = StorageError(what, got=f"{error.strerror or error}{where}", do=advice)
    result.__cause__ = error  # also where it is kept, and raised later
    return result


@contextmanager
def storage(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that names `path` and what was being done."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, f"cannot {doing} {path}") from error


# -- files -------------------------------------------------------------------------------------


def read_bounded(path: Path, *, error: type[ScrimpError], do: str | None, at_most: int) -> bytes:
    """The content of a regular file of at most `at_most` bytes; a larger one is refused before it is read.

    Raises:
        error: with the advice `do`; the file is missing, too large, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = b"" if size > at_most else file.read(size)  # more would be allocated before it is read
    except FileNotFoundError as problem:
        raise error(f"{path} is missing", do=do) from problem
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the path
        number, got = getattr(problem, "errno", None), getattr(problem, "strerror", None) or problem
        advice = _ADVICE[number] if number in (errno.EACCES, errno.EPERM, errno.EMFILE) else do
        raise error(f"{path} cannot be read", got=got, do=advice) from problem
    if size > at_most:
        raise error(f"{path} is too large", got=f"{size:,} bytes", expected=f"at most {at_most:,}", do=do)
    return content


def open_regular(path: Path) -> BinaryIO:
    """A file to read, never a named pipe or a device, which could make its reader wait. Raises OSError."""

    def opened(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` has an error of its own for a folder
            return descriptor
        os.close(descriptor)
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device"
        raise OSError(errno.EINVAL, f"{kind} instead of a file", name)

    return open(path, "rb", opener=opened)


def write_whole(path: Path, content: bytes | str, *, shared: bool = False) -> None:
    """Write `content` (text as UTF-8) to `path` so that nobody ever sees a part of it."""
    with storage(path, "write"), replaced_file(path, shared=shared) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replaced_file(path: Path, *, shared: bool = False) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the block ends without an error. Raises OSError.

    Args:
        shared: no lock keeps a second process from writing `path` at the same time.
    """
    # One name for all attempts, so that the next clears what a killed one left. Where two processes may
    # write at once, their numbers keep them apart instead.
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial" if shared else f".{path.name}.partial")
    try:
        with open(beside, "wb") as file:
            yield file
            publish(file, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def publish(file: BinaryIO, path: Path) -> None:
    """Flush an open file to the disk, close it, and give it the name `path`. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
    sync_folder(path.parent)


# -- folders -----------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents; one that exists is fine."""
    with storage(folder, "create the folder"):
        folder.mkdir(parents=True, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush the entries of `folder` (names made, renamed, removed) to the disk. Raises OSError."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes `out` when the block ends without an error.

    Raises:
        StorageError: `out` is there and not empty, or cannot be written; also for an OSError of the block.
    """
    out = Path(out).absolute()
    # Always the same name, so that the next call clears what a killed one left: folders are large.
    partial = out.with_name(f".{out.name}.partial")
    with storage(out, "write"):
        _refuse_used_folder(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            yield partial
            for entry in [*partial.rglob("*"), partial]:
                if entry.is_dir():
                    sync_folder(entry)
                else:
                    _sync(entry)
            os.rename(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(out.parent)


def refuse_taken(out: Path) -> None:
    """Refuse a name for a new file that is taken, by a dangling link too, or that lies in no folder.

    Raises:
        StorageError: by the name.
    """
    if out.exists() or out.is_symlink():
        raise StorageError(f"{out} exists already", do="choose another name; nothing is overwritten")
    if not out.absolute().parent.is_dir():
        raise StorageError(
            f"{out} cannot be written", got=f"no folder {out.parent}", do="make the folder first"
        )


def _refuse_used_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StorageError(
            f"{out} exists already",
            got="a folder with files in it" if out.is_dir() else "a file",
            expected="a new or empty folder",
            do="choose another folder, or remove this one",
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the folder for this process; a second one waits. A killed process releases it.

    `waiting` is called once if another process holds the folder.

    The lock is taken on the folder itself, so that no lock file is left in it. Where the file
    system has no locks (some network mounts) the block runs without one. (The lock of a run is
    another: it refuses instead of waiting, and never goes without; see scrimp.training.run_folder.)
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
                raise storage_error(error, f"cannot lock {folder}") from error
        yield
    finally:
        os.close(descriptor)


def user_cache() -> Path:
    """scrimp/ in the user's cache folder; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "scrimp"
