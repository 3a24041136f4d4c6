"""A control group of memory, where the machine lets the tests make one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def nested_group(limit: int) -> Iterator[Path]:
    """A group without a limit in one with this limit, for real; skips where the machine allows none."""
    for top, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        outer = top / f"scrimp-test-{os.getpid()}"
        inner = outer / "inner"
        try:
            inner.mkdir(parents=True)
            (outer / name).write_text(str(limit), encoding="ascii")
        except OSError:
            _remove(inner, outer)
            continue
        try:
            yield inner
        finally:
            _remove(inner, outer)
        return
    pytest.skip(
        "NOT TESTED: this machine lets nobody make a control group of memory (root, and a free controller)"
    )


def _remove(*folders: Path) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
