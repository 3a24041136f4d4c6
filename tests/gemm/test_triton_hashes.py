"""Hashes of addresses by the kernel: those of `scrimp.formats.noise`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton_cases import DEVICE

from scrimp.formats import Noise
from scrimp.gemm.kernels.hashes import address_hashes

KEYS = st.integers(0, 2**64 - 1)
STARTS = st.integers(0, 2**40)


@given(
    keys=st.lists(KEYS, min_size=1, max_size=2, unique=True),
    first=st.tuples(STARTS, STARTS),
    pieces=st.lists(st.tuples(STARTS, st.integers(1, 30)), max_size=3),
    shape=st.tuples(st.integers(1, 1100), st.integers(100, 1100)),
    is_second=st.booleans(),
)
def test_hashes_of_one_or_two_streams(
    keys: list[int],
    first: tuple[int, int],
    pieces: list[tuple[int, int]],
    shape: tuple[int, int],
    is_second: bool,
) -> None:
    columns = tuple(range(start, start + length) for start, length in pieces)
    streams: list[Noise | None] = [Noise(key, *first, columns=columns) for key in keys]
    if len(streams) == 1:
        streams.insert(0 if is_second else 1, None)
    like = torch.zeros(1, device=DEVICE)
    found = address_hashes(*streams, *shape, like)
    for stream, (rows, its_columns) in zip(streams, (found[:2], found[2:]), strict=True):
        if stream is None:
            assert rows is like
            assert its_columns is like
        else:
            assert torch.equal(rows.cpu(), stream.row_hashes(shape[0], "cpu"))
            assert torch.equal(its_columns.cpu(), stream.column_hashes(shape[1], "cpu"))


@pytest.mark.parametrize("shape", [(0, 1), (1, 0)])
def test_a_matrix_may_have_no_rows_or_columns(shape: tuple[int, int]) -> None:
    rows, columns, *_ = address_hashes(Noise(3), None, *shape, torch.zeros(1, device=DEVICE))
    assert (len(rows), len(columns)) == shape
