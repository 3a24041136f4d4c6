"""Kernels over rows, with OpenMP and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="an extra of its own")

from scrimp.cpu.numbers import over_exact_rows
from scrimp.cpu.rows import as_numpy, by_rows, span_of

FORK = """
import os, sys
import torch
from scrimp.models import cpu_passes
def run():
    x = torch.randn(70, 192, generator=torch.Generator().manual_seed(0))
    return cpu_passes.norm(x, torch.ones(192), 1e-5, torch.bfloat16)[0]
torch.set_num_threads(1)
expected = run()
assert torch.get_num_threads() == 1
pid = os.fork()
if pid == 0:
    os._exit(not torch.equal(run(), expected))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
PROGRAM = """
import sys
import numba, torch
from scrimp.cpu import numbers
from scrimp.models import cpu_passes
torch.set_num_threads(2)
x = torch.randn(700, 192, generator=torch.Generator().manual_seed(0))
y, r = cpu_passes.norm(x, torch.ones(192), 1e-5, torch.bfloat16)
dx, dw = cpu_passes.norm_gradients(x, torch.ones(192), y, r)
torch.save([numbers.OPENMP, y, r, dx, dw], sys.argv[1])
"""


@pytest.mark.slow  # compiles every kernel of a norm anew
def test_kernels_without_openmp_give_the_same_by_threads_of_a_pool(tmp_path: Path) -> None:
    found = {}
    for layer in ("default", "workqueue"):
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / layer)],
            check=True,
            env=os.environ | {"NUMBA_THREADING_LAYER": layer},
        )
        found[layer] = torch.load(tmp_path / layer)
    if not found["default"][0]:
        pytest.skip("this system has no OpenMP")
    assert not found["workqueue"][0]
    for one, two in zip(found["default"][1:], found["workqueue"][1:], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_a_forked_process_runs_kernels_and_torch_keeps_its_number_of_threads() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


def test_memory_of_views_is_that_of_their_numbers() -> None:
    x = torch.arange(24).view(2, 3, 4)
    assert as_numpy(x[1]).tolist() == x[1].tolist()
    assert span_of(x[:, 1:, 2:]).tolist() == list(range(6, 24))
    assert span_of(x.transpose(0, 2)[1:2]).tolist() == list(range(1, 22))
    assert span_of(x[:0]).size == 0


def test_memory_is_there_as_long_as_an_array_is() -> None:
    array = as_numpy(torch.full((100_000,), 7))
    others = [torch.zeros(100_000, dtype=torch.long) for _ in range(4)]
    assert (array == 7).all()
    assert not any(one.any() for one in others)


def test_a_tensor_without_memory_is_given_back() -> None:
    meta = torch.empty(2, 3, device="meta")
    assert as_numpy(meta) is meta
    assert span_of(meta) is meta


def test_a_full_disk_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where compiled kernels cannot be kept each process compiles its own, and says so."""

    import numba

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    @over_exact_rows()
    def doubled(x: Any, first: int, last: int, out: Any) -> None:
        for i in numba.prange(first, last):
            out[i] = 2 * x[i]

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    x, out = torch.arange(5.0), torch.zeros(5)
    with pytest.warns(UserWarning, match="cannot be kept"):
        by_rows(doubled, as_numpy(x), 5, 1, as_numpy(out))
    assert torch.equal(out, 2 * x)
