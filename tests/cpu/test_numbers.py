"""Numbers of kernels against numpy's in float64, and torch's rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="an extra of its own")

from scrimp.cpu import numbers
from scrimp.cpu.numbers import compiled, exponential, narrow, wide


@compiled()
def exponentials(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = exponential(x[i])


@compiled()
def rounded(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = narrow(x[i], out)


@compiled()
def widened(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = wide(x[i])


def test_exponentials_are_right_to_the_last_two_places() -> None:
    x = np.linspace(-87.3, 88.3, 1_000_003).astype(np.float32)
    found = np.empty_like(x)
    exponentials(x, found)
    right = np.exp(x.astype(np.float64))
    units = np.abs(found - right) / np.spacing(right.astype(np.float32))
    assert units.max() < 2


def test_exponentials_of_what_is_too_large_too_small_or_no_number() -> None:
    x = np.array([-np.inf, -200, -88, 0, -0.0, 89, np.inf, np.nan], np.float32)
    found = np.empty_like(x)
    exponentials(x, found)
    np.testing.assert_array_equal(found, [0, 0, 0, 1, 1, np.inf, np.inf, np.nan])


def test_bfloat16_is_rounded_and_widened_as_torch_does() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-42])
    x = torch.cat([bits.to(torch.int32).view(torch.float32), special])
    found = np.empty(len(x), np.int16)
    rounded(x.numpy(), found)
    right = x.to(torch.bfloat16)
    ours = torch.from_numpy(found).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), right.isnan())
    is_number = ~right.isnan()
    assert torch.equal(ours[is_number].view(torch.int16), right[is_number].view(torch.int16))
    wider = np.empty(len(x), np.float32)
    widened(found, wider)
    np.testing.assert_array_equal(wider, right.float().numpy())


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr("numba.config.CACHE_DIR", str(file))
    with pytest.warns(UserWarning, match="cannot be kept in .*file: each process"):
        assert numbers._cache_folder() is None
