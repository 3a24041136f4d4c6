"""Host memory that this process may still take: what the system has free, and what its control groups leave.

Problem  A process that takes more than a control group of its allows is killed without a message, and every group above
         its own limits it too: systemd puts a limit on a scope, Slurm on a job some levels above the task, a container
         runtime on the container. The memory that the system reports as free knows none of these.
Method   /proc/self/cgroup names the process's group in each hierarchy, /proc/self/mountinfo the folder that each
         hierarchy is mounted at and which group that folder is. From the process's own group up to the mount, each
         leaves::

             version 2   min(memory.max, memory.high) - memory.current + inactive_file + active_file
             version 1   memory.limit_in_bytes - memory.usage_in_bytes + total_inactive_file + total_active_file
                         hierarchical_memory_limit instead of its own, which knows the groups above the mount

         and the least counts. Both lists of file pages (of memory.stat) are page cache. A group at its limit takes from
         the inactive one, ages the active one into it, and kills only when both are used up. A run's own share of free
         memory (`scrimp.training.memory.limits`) leaves the pages that are in use. memory.high kills nobody, but
         whoever is above it is slowed to a crawl. Where the path leads out of the mount (a namespace of control groups
         shows /.. for what is outside it), the group is the one under the mount whose cgroup.procs lists the process;
         where there is none, the mount's own.
Limits   Of groups above the mount version 2 shows nothing. Swap is not memory. Elsewhere than on Linux all physical
         memory is the best that is known.
Checked  tests/test_host_memory.py: file trees of systemd, Slurm and containers; a real nested group where the
         machine allows one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


def host_memory_available(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take.

    Args:
        root: of the file system that is read.
    """
    return min([_system_available(root), *_left_by_groups(root)])


def trim_heap() -> bool:
    """Give whole pages of freed heap back to the system; whether the C library can do that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return trim is not None


@dataclass(frozen=True)
class _Files:
    """What a version of control groups calls its files and figures."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    """Figures of memory.stat: page cache that is given back on demand."""


_VERSION_1 = _Files(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


@dataclass(frozen=True)
class _Mount:
    """A hierarchy of control groups in the file system."""

    group: str
    """The group that its folder shows: / is the hierarchy's root, or the namespace's."""
    folder: Path
    files: _Files


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that are left in each control group of the process that has a limit."""
    groups = _own_groups(root)
    for mount in _mounts(root):
        own = groups.get(mount.files)
        if own is None or not mount.folder.is_dir():
            continue
        folder = _folder_of(own, mount)
        while True:
            left = _left(folder, mount.files)
            if left is not None:
                yield left
            # Without a hierarchy (version 1, once) a group's limit is not that of the groups below it.
            if folder == mount.folder or _number(folder.parent / "memory.use_hierarchy") == 0:
                break
            folder = folder.parent


def _own_groups(root: Path) -> dict[_Files, str]:
    """The process's path in the hierarchies that may limit memory."""
    found = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            found[_VERSION_2] = path
        elif "memory" in controllers.split(","):
            found[_VERSION_1] = path
    return found


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        group, folder = _unescaped(fields[3]), root / _unescaped(fields[4]).lstrip("/")
        if kind[0] == "cgroup2":
            yield _Mount(group, folder, _VERSION_2)
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield _Mount(group, folder, _VERSION_1)


def _folder_of(path: str, mount: _Mount) -> Path:
    """The process's group under a mount."""
    own, top = PurePosixPath(path), PurePosixPath(mount.group)
    if ".." not in (*own.parts, *top.parts) and own.is_relative_to(top):
        folder = mount.folder / own.relative_to(top)
        if folder.is_dir():
            return folder
    process = str(os.getpid())
    for found, _, _ in os.walk(mount.folder):
        if process in _lines(Path(found, "cgroup.procs")):
            return Path(found)
    return mount.folder


def _left(folder: Path, files: _Files) -> int | None:
    """Bytes that a group leaves; None where it has no limit."""
    usage = _number(folder / files.usage)
    statistics = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    limits = [_number(folder / name) for name in files.limits]
    limits.append(_integer(statistics.get("hierarchical_memory_limit", "")))
    known = [limit for limit in limits if limit is not None]
    if usage is None or not known:
        return None
    cache = sum(_integer(statistics.get(name, "")) or 0 for name in files.cache)
    return max(0, min(known) - usage + cache)


def _system_available(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _number(path: Path) -> int | None:
    return _integer("".join(_lines(path)))


def _integer(text: str) -> int | None:
    """None for "max", and for nothing."""
    return int(text) if text.strip().isdecimal() else None


def _unescaped(text: str) -> str:
    """A path of mountinfo, in which spaces are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
