"""Free host memory in the control groups of systemd, Slurm and containers: trees of files, and a real nested group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from control_group import nested_group

from scrimp.host_memory import host_memory_available

GB = 10**9
FREE = 20 * GB
UNLIMITED = "9223372036854771712"
V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


def mounted(group: str, folder: str, version: int, controllers: str = "memory") -> str:
    kind = "cgroup2 cgroup2 rw" if version == 2 else f"cgroup cgroup rw,{controllers}"
    return f"35 31 0:32 {group} {folder} rw,relatime shared:9 - {kind}\n"


def system(root: Path, *, groups: str, mounts: str, files: Mapping[str, str]) -> Path:
    """A machine with 20 GB free.

    Args:
        groups: /proc/self/cgroup.
        mounts: of /proc/self/mountinfo, those of control groups.
        files: path to content.
    """
    other = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:5 / /proc rw - proc proc rw\n"
    everything = {
        "/proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {FREE // 1024} kB\n",
        "/proc/self/cgroup": groups,
        "/proc/self/mountinfo": other + mounts,
        **files,
    }
    for name, content in everything.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


def group_1(
    folder: str, limit: int | str, used: int, cache: int = 0, hierarchy: str = UNLIMITED, active: int = 0
) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.use_hierarchy": "1\n",
        f"{folder}/memory.stat": f"cache 7\nhierarchical_memory_limit {hierarchy}\ninactive_file 1\n"
        f"active_file 1\ntotal_inactive_file {cache}\ntotal_active_file {active}\n",
    }


def group_2(
    folder: str, limit: int | str, used: int, cache: int = 0, high: int | str = "max", active: int = 0
) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cache}\nactive_file {active}\n",
    }


def test_without_a_limit_all_that_is_free_counts(tmp_path: Path) -> None:
    slices = f"{V2}/user.slice"
    root = system(
        tmp_path, groups="0::/user.slice\n", mounts=mounted("/", V2, 2), files=group_2(slices, "max", GB)
    )
    assert host_memory_available(root) == FREE // 1024 * 1024


def test_the_scope_that_systemd_run_made_limits_the_process_in_it(tmp_path: Path) -> None:
    scope = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope"
    files = group_2(f"{V2}{scope}", 1_500_000_000, 400_000_000, cache=100_000_000)
    root = system(tmp_path, groups=f"0::{scope}\n", mounts=mounted("/", V2, 2), files=files)
    assert host_memory_available(root) == 1_200_000_000


def test_memory_high_counts_like_a_limit(tmp_path: Path) -> None:
    files = group_2(f"{V2}/run.scope", 8 * GB, GB, high=3 * GB)
    root = system(tmp_path, groups="0::/run.scope\n", mounts=mounted("/", V2, 2), files=files)
    assert host_memory_available(root) == 2 * GB


@pytest.mark.parametrize("version", [1, 2])
def test_slurms_limit_lies_on_the_job_above_the_task(tmp_path: Path, version: int) -> None:
    job = "/slurm/uid_1000/job_7" if version == 1 else "/system.slice/slurmstepd.scope/job_7"
    task = f"{job}/step_0/user/task_0"
    top, group = (V1, group_1) if version == 1 else (V2, group_2)
    files = {
        **group(f"{top}{job}", 4 * GB, 3 * GB, cache=GB // 2),  # other tasks of the job take their part
        **group(f"{top}{job}/step_0", 6 * GB, GB),
        **group(f"{top}{task}", UNLIMITED if version == 1 else "max", GB // 4),
    }
    groups = f"9:cpu,cpuacct:/other\n4:memory:{task}\n0::/\n" if version == 1 else f"0::{task}\n"
    root = system(tmp_path, groups=groups, mounts=mounted("/", top, version), files=files)
    assert host_memory_available(root) == 3 * GB // 2


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_that_were_read_twice_can_be_given_back_too(tmp_path: Path, version: int) -> None:
    top, group = (V1, group_1) if version == 1 else (V2, group_2)
    groups = "4:memory:/run\n" if version == 1 else "0::/run\n"
    files = group(f"{top}/run", 4 * GB, 3 * GB, cache=GB // 2, active=2 * GB)
    root = system(tmp_path, groups=groups, mounts=mounted("/", top, version), files=files)
    assert host_memory_available(root) == 7 * GB // 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_group_as_the_mount(tmp_path: Path, version: int) -> None:
    """Version 1 with the host's names of groups, version 2 in a namespace of groups."""
    own, shown = ("/docker/c0ffee", "/docker/c0ffee") if version == 1 else ("/", "/")
    top, group = (V1, group_1) if version == 1 else (V2, group_2)
    groups = f"4:memory:{own}\n" if version == 1 else f"0::{own}\n"
    root = system(tmp_path, groups=groups, mounts=mounted(shown, top, version), files=group(top, 2 * GB, GB))
    assert host_memory_available(root) == GB


def test_limits_above_a_containers_mount_are_known_to_version_1(tmp_path: Path) -> None:
    files = group_1(V1, UNLIMITED, GB, hierarchy=str(2 * GB))
    mounts = mounted("/kubepods/pod1/c1", V1, 1)
    root = system(tmp_path, groups="4:memory:/kubepods/pod1/c1\n", mounts=mounts, files=files)
    assert host_memory_available(root) == GB


@pytest.mark.parametrize(
    ("own", "shown"), [("/", "/../.."), ("/../../pod/inner", "/"), ("/elsewhere", "/pod")]
)
def test_where_a_namespace_hides_the_way_the_group_that_lists_the_process_counts(
    tmp_path: Path, own: str, shown: str
) -> None:
    inner = f"{V2}/pod/inner"
    files = {
        **group_2(f"{V2}/pod", 3 * GB, GB),
        **group_2(inner, "max", GB),
        f"{V2}/pod/cgroup.procs": "1\n",
        f"{inner}/cgroup.procs": f"1\n{os.getpid()}\n",
        **group_2(f"{V2}/other", GB, GB),
    }
    root = system(tmp_path, groups=f"0::{own}\n", mounts=mounted(shown, V2, 2), files=files)
    assert host_memory_available(root) == 2 * GB


def test_where_no_group_lists_the_process_the_mounts_own_limit_counts(tmp_path: Path) -> None:
    root = system(tmp_path, groups="0::/../x\n", mounts=mounted("/", V2, 2), files=group_2(V2, 2 * GB, GB))
    assert host_memory_available(root) == GB


def test_both_versions_side_by_side_and_a_mount_with_a_space_in_its_name(tmp_path: Path) -> None:
    mounts = mounted("/", r"/sys/fs/c\040group/memory", 1) + mounted("/", f"{V2}/unified", 2)
    mounts += mounted("/", f"{V2}/cpu", 1, controllers="cpu")
    files = {
        **group_1("/sys/fs/c group/memory/a:b", 2 * GB, GB // 2),
        f"{V2}/unified/run/cgroup.procs": "",
        **group_1(f"{V2}/cpu/run", 1, 0),
    }
    groups = "4:memory:/a:b\n3:cpu:/run\n1:name=systemd:/\n0::/run\n"
    root = system(tmp_path, groups=groups, mounts=mounts, files=files)
    assert host_memory_available(root) == 3 * GB // 2


def test_a_group_of_version_1_without_hierarchy_does_not_limit_those_below(tmp_path: Path) -> None:
    above = group_1(f"{V1}/a", 2 * GB, GB) | {f"{V1}/a/memory.use_hierarchy": "0\n"}
    files = {**above, **group_1(f"{V1}/a/b", 5 * GB, GB)}
    root = system(tmp_path, groups="4:memory:/a/b\n", mounts=mounted("/", V1, 1), files=files)
    assert host_memory_available(root) == 4 * GB


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    root = system(
        tmp_path, groups="0::/a\n", mounts=mounted("/", V2, 2), files=group_2(f"{V2}/a", GB, 2 * GB)
    )
    assert host_memory_available(root) == 0


def test_a_system_without_control_groups_has_what_is_free(tmp_path: Path) -> None:
    root = system(tmp_path, groups="", mounts="", files={})
    assert host_memory_available(root) == FREE // 1024 * 1024
    assert host_memory_available(tmp_path / "nothing") > 0


def test_a_real_process_in_a_real_nested_group_knows_its_limit() -> None:
    code = (
        "import pathlib, sys; pathlib.Path(sys.argv[1], 'cgroup.procs').write_text('0');"
        "from scrimp.host_memory import host_memory_available; print(host_memory_available())"
    )
    with nested_group(1_500_000_000) as group:
        found = subprocess.run(
            [sys.executable, "-c", code, str(group)], capture_output=True, text=True, check=True, timeout=60
        )
    assert 500_000_000 < int(found.stdout) < 1_500_000_000
