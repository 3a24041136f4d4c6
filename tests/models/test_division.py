"""Rows divided over ranks: every token once, found again, and batches cut alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.data import IGNORED, Batch
from scrimp.errors import ConfigError
from scrimp.models.context_parallel.division import SCHEMES, Division

DIVISIONS = st.builds(
    lambda scheme, ranks, unit: Division(scheme, unit * ranks * (2 if scheme == "zigzag" else 1), ranks),
    st.sampled_from(SCHEMES),
    st.integers(1, 6),
    st.integers(1, 5),
)


@given(DIVISIONS)
def test_every_token_is_on_one_rank_in_rising_order(division: Division) -> None:
    found = [division.positions(rank).tolist() for rank in range(division.ranks)]
    assert sorted(one for part in found for one in part) == list(range(division.length))
    assert all(len(part) == division.part and part == sorted(part) for part in found)


@given(DIVISIONS, st.integers(0, 70))
def test_tokens_before_a_position_are_counted_on_every_rank(division: Division, position: int) -> None:
    for rank in range(division.ranks):
        expected = sum(1 for one in division.positions(rank).tolist() if one < position)
        assert division.before(rank, position) == expected


@given(DIVISIONS, st.integers(0, 2))
def test_parts_that_were_cut_join_to_the_whole(division: Division, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = division.length
    x = torch.randn(shape)
    parts = [division.cut(x, rank, dim=dim) for rank in range(division.ranks)]
    assert torch.equal(division.joined(parts, dim=dim), x)


@given(DIVISIONS)
def test_a_batch_is_cut_with_its_targets_counted(division: Division) -> None:
    tokens = torch.randint(0, 9, (2, division.length))
    targets = torch.where(tokens > 5, IGNORED, tokens)
    starts = torch.tensor([0, division.length, 2 * division.length], dtype=torch.int32)
    whole = Batch.of(tokens, targets, starts)
    parts = [whole.at(division.positions(rank)) for rank in range(division.ranks)]
    assert sum(part.num_targets for part in parts) == whole.num_targets
    assert torch.equal(division.joined([part.tokens_BT for part in parts]), tokens)
    assert torch.equal(division.joined([part.targets_BT for part in parts]), targets)
    assert all(part.document_starts is starts for part in parts)


def test_zigzag_and_stripes_balance_causal_work_and_contiguous_parts_do_not() -> None:
    work = {
        scheme: [int((Division(scheme, 64, 4).positions(rank) + 1).sum()) for rank in range(4)]
        for scheme in SCHEMES
    }
    assert len(set(work["zigzag"])) == 1
    assert max(work["striped"]) - min(work["striped"]) == 3 * 16
    assert max(work["contiguous"]) > 6 * min(work["contiguous"])


@pytest.mark.parametrize(
    ("scheme", "length", "advice"),
    [
        ("zigzag", 12, "8 or 16 tokens"),
        ("zigzag", 4, "use sequences of 8 tokens"),
        ("striped", 14, "12 or 16 tokens"),
        ("contiguous", 15, "12 or 16 tokens"),
        ("striped", 0, "use sequences of 4 tokens"),
    ],
)
def test_rows_that_do_not_divide_are_refused(scheme: str, length: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        Division(scheme, length, 4)  # type: ignore[arg-type]
