"""Names stand for whole contents, folders are flushed, and errors say what helps."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scrimp.errors import StorageError
from scrimp.files import (
    replaced_file,
    storage,
    storage_error,
    sync_folder,
    user_cache,
    whole_folder,
    write_whole,
)


def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is flushed or renamed, in order."""
    calls: list[str] = []

    def recorded(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def wrapped(what: object, *rest: object) -> None:
            is_open = isinstance(what, int)
            path = Path(os.readlink(f"/proc/self/fd/{what}")) if is_open else Path(str(rest[0]))
            calls.append(f"{name} {path.name}")
            call(what, *rest)

        return wrapped

    for name in ("fsync", "replace", "rename"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    return calls


def test_content_is_flushed_before_its_name_and_the_name_before_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record(monkeypatch)
    write_whole(tmp_path / "plan.json", "{}")
    write_whole(tmp_path / "config.toml", "a = 'ü'\n")
    folder = f"fsync {tmp_path.name}"
    assert calls == [
        *("fsync .plan.json.partial", "replace plan.json", folder),
        *("fsync .config.toml.partial", "replace config.toml", folder),
    ]
    assert (tmp_path / "config.toml").read_bytes() == "a = 'ü'\n".encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "plan.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def write_half() -> None:
        with replaced_file(path) as file:
            file.write(b"ne")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_a_shared_name_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with replaced_file(path, shared=True) as file:
        assert str(os.getpid()) in str(file.name)
        file.write(b"one")
    assert path.read_bytes() == b"one"


def test_what_a_killed_writer_left_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".plan.json.partial").write_text("half")
    write_whole(tmp_path / "plan.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_gets_its_name_after_all_of_it_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record(monkeypatch)
    with whole_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
        assert not (tmp_path / "out").exists()
    assert sorted(calls[:3]) == ["fsync .out.partial", "fsync file", "fsync inner"]
    assert calls[3:] == ["rename out", f"fsync {tmp_path.name}"]
    assert (tmp_path / "out" / "inner" / "file").read_text() == "x"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_a_folder_is_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    sync_folder(tmp_path)


def test_a_disk_that_fails_is_not_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
    with pytest.raises(StorageError, match=r"cannot write .*file - got Input/output error - check the path"):
        write_whole(tmp_path / "file", b"")


def test_an_error_names_the_path_once_and_says_what_helps(tmp_path: Path) -> None:
    path = tmp_path / "not-there"
    with pytest.raises(StorageError) as caught, storage(path, "read"):
        path.read_bytes()
    assert (
        str(caught.value)
        == f"cannot read {path} - got No such file or directory - check the spelling of the path"
    )
    error = PermissionError(errno.EACCES, "Permission denied", str(path / "inner"))
    assert f"got Permission denied ({path / 'inner'})" in str(storage_error(error, f"cannot write {path}"))


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere/scrimp")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert user_cache() == Path("/home/someone/.cache/scrimp")
