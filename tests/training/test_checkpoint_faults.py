"""Damage and full disks, made for real: what is named, what is used instead, what stays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from scrimp.errors import CheckpointError, StorageError
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training.checkpoint import Checkpoint, CheckpointStore

WEIGHTS = "model-00001-of-00001.safetensors"


def tensors(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"model.x": torch.full((size,), float(step))}


def save(store: CheckpointStore, step: int, size: int = 1000) -> None:
    store.save(step, tensors(step, size), {"step": step}, {}, wait=True)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path, keep_last=3, keep_every=0)
    for step in (1, 2, 3):
        save(made, step)
    return made


def load(checkpoint: Checkpoint | None, size: int = 1000) -> float:
    assert checkpoint is not None
    into = {"model.x": torch.zeros(size)}
    checkpoint.load(into)
    assert (into["model.x"] == into["model.x"][0]).all()
    return float(into["model.x"][0])


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def grow(file: Path) -> None:
    with open(file, "ab") as opened:
        opened.write(b"x")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("name", [WEIGHTS, "state.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [(truncate, "is truncated"), (grow, "has grown"), (flip, "is altered"), (remove, "is missing")],
)
def test_a_damaged_file_is_named_and_the_older_checkpoint_is_used(
    store: CheckpointStore, damage: Callable[[Path], None], words: str, name: str
) -> None:
    damage(store.folder / "step-00000003" / name)
    checkpoint, errors = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert load(checkpoint) == 2.0
    (error,) = errors
    assert f"step-00000003/{name} {words}" in str(error)
    assert (store.folder / "step-00000003").is_dir(), "a damaged checkpoint is evidence: it stays"


@pytest.mark.slow
def test_every_flipped_byte_of_a_checkpoint_is_noticed(store: CheckpointStore) -> None:
    folder = store.folder / "step-00000003"
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        places = range(len(whole)) if file.name == manifests.MANIFEST else range(0, len(whole), 37)
        for place in places:
            data = bytearray(whole)
            data[place] ^= 0x10
            if file.suffix == ".json" and file.name == manifests.MANIFEST and same_json(data, whole):
                continue
            file.write_bytes(data)
            with pytest.raises(CheckpointError):
                Checkpoint(3, folder).verify()
        file.write_bytes(whole)
    Checkpoint(3, folder).verify()


def same_json(first: bytes, second: bytes) -> bool:
    try:
        return bool(json.loads(first) == json.loads(second))
    except ValueError:
        return False


def test_a_folder_without_a_manifest_is_not_complete(store: CheckpointStore) -> None:
    (store.folder / "step-00000003" / "manifest.json").unlink()
    assert [checkpoint.step for checkpoint in store.complete()] == [1, 2]
    checkpoint, errors = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert "step-00000003 is not complete" in str(errors[0])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"scrimp_checkpoint": 1}', '{"files": {}, "step": 3}', "\x00"]
)
def test_a_damaged_manifest_is_named(store: CheckpointStore, text: str) -> None:
    (store.folder / "step-00000003" / "manifest.json").write_text(text)
    checkpoint, errors = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert "step-00000003/manifest.json" in str(errors[0])


def test_a_manifest_of_a_newer_version_is_refused_with_what_to_do(store: CheckpointStore) -> None:
    path = store.folder / "step-00000003" / "manifest.json"
    body = json.loads(path.read_text()) | {"scrimp_checkpoint": 2, "files": "in another form"}
    path.write_text(json.dumps(body))
    _, errors = store.latest()
    assert "written by a newer Scrimp - got checkpoint version 2, expected at most 1" in str(errors[0])


def test_a_folder_that_was_renamed_to_another_step_is_refused(store: CheckpointStore) -> None:
    (store.folder / "step-00000003").rename(store.folder / "step-00000009")
    checkpoint, errors = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert "got step 3, expected 9" in str(errors[0])


def test_a_foreign_tensor_file_in_the_folder_is_refused(store: CheckpointStore) -> None:
    folder = store.folder / "step-00000003"
    shutil.copy(folder / WEIGHTS, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors does not belong"):
        Checkpoint(3, folder).verify()


def test_when_all_are_damaged_every_one_is_named(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        truncate(store.folder / f"step-{step:08d}" / WEIGHTS)
    checkpoint, errors = store.latest()
    assert checkpoint is None
    assert [f"step-{step:08d}" in str(error) for step, error in zip((3, 2, 1), errors, strict=True)] == [
        True
    ] * 3


def test_a_damaged_step_that_is_reached_again_is_replaced_by_a_good_one(store: CheckpointStore) -> None:
    flip(store.folder / "step-00000003" / WEIGHTS)
    again = CheckpointStore(store.folder.parent, keep_last=3, keep_every=0)
    save(again, 3)
    checkpoint, errors = again.latest()
    assert errors == []
    assert load(checkpoint) == 3.0
    assert not list(store.folder.glob(".*"))


# -- disks ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in memory; skips where mounting is not allowed."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("mounting a small disk needs root; the file size limit is tested instead")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        store = CheckpointStore(disk, keep_last=2, keep_every=0)
        save(store, 1)
        with pytest.raises(StorageError, match=r"no space .* free, expected .* MiB, .* more") as caught:
            save(store, 2, size=500_000)
        assert caught.value.exit_code == 2
        assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]


def save_and_wait(store: CheckpointStore, step: int, size: int, *, wait: bool) -> None:
    store.save(step, tensors(step, size), {}, {}, wait=wait)
    store.wait()


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_fills_up_in_the_middle_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with small_disk(tmp_path / "disk", "1m") as disk:
        store = CheckpointStore(disk, keep_last=2, keep_every=0)
        save(store, 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)  # as if others took the space later
        with pytest.raises(StorageError, match=r"step 2 was not written .* No space left"):
            save_and_wait(store, 2, 500_000, wait=wait)
        assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]
        assert store.poll() == [1]
        save(store, 3)  # the run goes on, and the next one fits
        checkpoint, errors = store.latest()
        assert errors == []
        assert load(checkpoint) == 3.0


def test_an_error_of_the_background_comes_with_the_next_poll_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "seal", fail_with(errno.ENOSPC))
        store.save(1, tensors(1), {}, {})
        assert store._writing is not None
        store._writing.join()
    with pytest.raises(StorageError, match="No space left"):
        store.poll()
    assert store.poll() == []
    store.wait()
    save(store, 2)
    assert store.poll() == [2]


def fail_with(number: int) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_every=0)
    save(store, 1)
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if str(target).endswith(".removed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StorageError, match=r"old checkpoint was not removed .* Permission denied"):
        save(store, 2)
    assert store.poll() == [1, 2]
    checkpoint, _ = store.latest()
    assert load(checkpoint) == 2.0


def test_when_a_replacement_cannot_get_its_name_the_old_one_gets_it_back(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StorageError, match="Input/output error"):
        save(store, 3)
    assert sorted(path.name for path in store.folder.iterdir()) == [f"step-{step:08d}" for step in (1, 2, 3)]
    assert load(store.latest()[0]) == 3.0


def test_a_read_only_disk_is_a_clear_error_and_can_still_be_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        save(CheckpointStore(disk, keep_last=2, keep_every=0), 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        store = CheckpointStore(disk, keep_last=2, keep_every=0)
        assert load(store.latest()[0]) == 1.0
        with pytest.raises(StorageError, match="Read-only file system"):
            save(store, 2)
        assert load(store.latest()[0]) == 1.0


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=0)
    with pytest.raises(StorageError, match="checkpoints"):
        save(store, 1)
    with pytest.raises(CheckpointError, match="Not a directory"):
        store.latest()
    assert (tmp_path / "checkpoints").read_text() == "not a folder"


LIMITED = """
import resource, sys, pathlib, torch
from scrimp.errors import StorageError
from scrimp.training.checkpoint import CheckpointStore
store = CheckpointStore(pathlib.Path(sys.argv[1]), keep_last=2, keep_every=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store.save(1, {"model.x": torch.ones(1000)}, {}, {}, wait=True)
try:
    store.save(2, {"model.x": torch.ones(100_000)}, {}, {})
    store.wait()
except StorageError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_limit_on_file_sizes_is_a_clear_error_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "step 2 was not written" in done.stdout
    assert "File too large" in done.stdout
    assert done.stderr == ""
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


WITHOUT_THREADS = """
import resource, sys, threading
from pathlib import Path
import torch
from scrimp.training.checkpoint import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep_last=2, keep_every=0)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20),) * 2)
try:
    threading.Thread(target=print).start()
    sys.exit("a thread could be started")
except RuntimeError:
    pass
store.save(3, {f"model.{i}": torch.full((8,), float(i)) for i in range(4)}, {"position": 3}, {})
store.wait()
print(store.latest()[0].step)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_a_process_that_gets_no_more_threads_writes_its_checkpoint_by_itself(tmp_path: Path) -> None:
    """As after running out of memory, when the last checkpoint is worth most."""
    words = [sys.executable, "-c", WITHOUT_THREADS, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
