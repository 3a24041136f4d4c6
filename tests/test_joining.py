"""What a rank does before the group is made: NCCL's variables, of which none of the user's is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import by_environment, environment, free_port

from scrimp.joining import NCCL_PRESETS, TRACES, prepare_nccl

NAMES = [name for names, _ in (*NCCL_PRESETS, (TRACES, "")) for name in names]


def test_collectives_of_nccl_are_recorded() -> None:
    environ: dict[str, str] = {}
    prepare_nccl(environ, "/runs/one/flight-recorder-rank-")
    assert environ == {
        "NCCL_DEBUG": "WARN",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/one/flight-recorder-rank-",
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_set_stays(name: str) -> None:
    """Under either of its names."""
    environ = {name: "own"}
    prepare_nccl(environ, "here")
    assert environ.pop(name) == "own"
    (row,) = (names for names in (*(names for names, _ in NCCL_PRESETS), TRACES) if name in names)
    assert not set(environ) & set(row)
    assert len(environ) == len(NCCL_PRESETS)


def test_a_run_without_a_name_leaves_the_files_to_torch() -> None:
    environ: dict[str, str] = {}
    prepare_nccl(environ, None)
    assert not set(environ) & set(TRACES)


JOINING = """
import json, os, sys, torch
from scrimp import joining
from scrimp.launchers import place_of
uses_cuda = sys.argv[1] == "cuda"
# There is no GPU here: the device is said to be taken, and where NCCL would begin, gloo does.
joining._take_device = lambda place, name: uses_cuda
make = joining._make_group
joining._make_group = lambda meeting, backend, timeout: (print(backend), make(meeting, "cpu:gloo", timeout))
joined = joining.join(place_of(os.environ), {}, device="auto", failure=None, say=print, tell=print, order=(0, 1),
                      traces="traces")
print(json.dumps({name: value for name, value in os.environ.items() if "NCCL" in name or "_FR_" in name}))
joined.leave(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_they_are_set_where_nccl_is_used_alone(kind: str, tmp_path: Path) -> None:
    ranks, port = [], free_port()
    for rank in range(2):
        own = by_environment(rank, 2, port)
        command = [sys.executable, "-c", JOINING, kind]
        environ = {k: v for k, v in environment(tmp_path, **own).items() if k not in NAMES}
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ))
    for one in ranks:
        output, _ = one.communicate(timeout=120)
        backend, variables = output.splitlines()
        assert backend == ("cpu:gloo,cuda:nccl" if kind == "cuda" else "cpu:gloo")
        assert ("TORCH_FR_DUMP_TEMP_FILE" in variables) == (kind == "cuda")
        assert ("NCCL_DEBUG" in variables) == (kind == "cuda")
