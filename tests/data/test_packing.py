"""Conversations in rows: whole, apart, each target once, and what is too long is cut or left out, and counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.data import IGNORED, Loader, TokenStream, evaluation_batches, evaluation_text_bytes, packed
from scrimp.data.corpus_manifest import ShardEntry, shard_name
from scrimp.data.packing import Packed, best_fit
from scrimp.data.shards import ShardWriter
from scrimp.errors import DataError

Chat = tuple[np.ndarray, np.ndarray]


def chats_of(lengths: list[int], seed: int = 0) -> list[Chat]:
    """Conversations in which every token occurs once: its number says where it comes from."""
    draw, found, at = np.random.default_rng(seed), [], 1
    for length in lengths:
        tokens = np.arange(at, at + length).astype("<u2")
        answers = draw.random(length) < 0.5
        answers[-1] = True
        found.append((tokens, answers))
        at += length
    return found


def stream_of(folder: Path, chats: list[Chat], per_shard: int = 4) -> TokenStream:
    entries = []
    for number, first in enumerate(range(0, len(chats), per_shard)):
        name = shard_name("train", number)
        writer = ShardWriter(folder / name, np.dtype("<u2"), has_answers=True)
        for tokens, answers in chats[first : first + per_shard]:
            writer.add(tokens, text_bytes=3 * len(tokens), document_hash=len(tokens), answers=answers)
        entries.append(ShardEntry.of(name, writer.finish()))
    return TokenStream(folder, entries, has_answers=True)


def expected_pairs(chats: list[Chat], sequence: int) -> set[tuple[int, int]]:
    """Inputs and their targets that count."""
    return {
        (int(tokens[i]), int(tokens[i + 1]))
        for tokens, answers in chats
        for i in range(min(len(tokens) - 1, sequence))
        if answers[i + 1]
    }


LENGTHS = [2, 9, 17, 30, 5, 5, 16, 3, 40, 8, 17, 2, 12, 33]


def test_every_answer_is_learnt_once_in_its_own_conversation(tmp_path: Path) -> None:
    chats = chats_of(LENGTHS)
    rows = Packed(stream_of(tmp_path, chats), 16)
    home = {int(token): number for number, (tokens, _) in enumerate(chats) for token in tokens}
    pairs = []
    for number in range(rows.num_samples):
        tokens, targets, starts = rows.row(number)
        assert len(tokens) == len(targets) == 16
        for part in np.split(np.arange(16), starts):
            held = {home[int(token)] for token in tokens[part] if token}
            assert len(held) == (1 if tokens[part].any() else 0)
            assert [int(t) for t in tokens[part]] == sorted(
                int(t) for t in tokens[part]
            )  # from its beginning on
        pairs += [(int(a), int(b)) for a, b in zip(tokens, targets, strict=True) if b != IGNORED]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected_pairs(chats, 16)
    assert rows.num_cut == sum(length > 17 for length in LENGTHS)
    assert "3 cut at the end, 0 left out" in rows.sentence


def test_what_has_no_answer_before_the_cut_is_left_out(tmp_path: Path) -> None:
    late = (np.arange(100, 140).astype("<u2"), np.arange(40) >= 30)
    soon = (np.arange(1, 11).astype("<u2"), np.arange(10) >= 5)
    rows = Packed(stream_of(tmp_path, [late, soon]), 16)
    assert (rows.num_cut, rows.num_left_out, rows.num_samples) == (0, 1, 1)
    assert "1 conversations in 1 sequences" in rows.sentence
    with pytest.raises(DataError, match="no conversation with an answer"):
        Packed(stream_of(tmp_path, [late]), 16)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), capacity=st.integers(20, 40))
def test_best_fit_keeps_every_length_within_a_row(lengths: list[int], capacity: int) -> None:
    rows = best_fit(np.array(lengths), capacity, np.arange(len(lengths)))
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    sums = [sum(lengths[number] for number in row) for row in rows]
    assert max(sums) <= capacity
    # Best-fit decreasing takes at most 11/9 of the fewest rows, and 4 (Johnson, 1973).
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // capacity) * 2 + 4
    # No two rows would fit into one: it had been filled first.
    assert all(a + b > capacity for i, a in enumerate(sums) for b in sums[i + 1 :])


def test_batches_are_shuffled_shared_and_repeated_exactly(tmp_path: Path) -> None:
    chats = chats_of([7, 12, 16, 5, 30, 9, 17, 11] * 3)
    stream = stream_of(tmp_path, chats)
    rows = packed(stream, 16)
    settings = {"sequence": 16, "micro_batch": 2, "seed": 5}
    with Loader(stream, sequences_per_step=4, **settings) as loader:  # type: ignore[arg-type]
        assert loader.num_samples == rows.num_samples
        steps = [next(loader) for _ in range(-(-rows.num_samples // 4))]
    seen = [tuple(row.tolist()) for step in steps for batch in step for row in batch.tokens_BT]
    assert set(seen) == {tuple(rows.row(number)[0].tolist()) for number in range(rows.num_samples)}
    with Loader(stream, sequences_per_step=4, first_sample=4, **settings) as later:  # type: ignore[arg-type]
        again = next(later)
    assert all(
        a.tokens_BT.equal(b.tokens_BT) and a.targets_BT.equal(b.targets_BT)
        for a, b in zip(again, steps[1], strict=True)
    )
    ranks = []
    for rank in range(2):
        with Loader(stream, sequences_per_step=4, rank=rank, world_size=2, **settings) as loader:  # type: ignore[arg-type]
            ranks += [tuple(row.tolist()) for batch in next(loader) for row in batch.tokens_BT]
    assert ranks == seen[:4]
    assert all(batch.document_starts is not None for step in steps for batch in step)


def test_an_evaluation_sees_every_answer_once_or_a_fixed_share(tmp_path: Path) -> None:
    chats = chats_of([7, 12, 16, 5, 9, 17, 11] * 3)
    stream = stream_of(tmp_path, chats)

    def targets(most: int | None) -> set[int]:
        batches = evaluation_batches(
            stream, sequence=16, micro_batch=3, max_tokens=most, mask_documents=False
        )
        found = [int(t) for batch in batches for t in batch.targets_BT.flatten() if t != IGNORED]
        assert len(found) == len(set(found))
        return set(found)

    whole = {target for _, target in expected_pairs(chats, 16)}
    assert targets(None) == targets(10**9) == whole
    assert targets(48) < whole
    assert targets(48) == targets(50)
    total = sum(3 * len(tokens) for tokens, _ in chats)
    for most in (None, 10**9):
        assert evaluation_text_bytes(stream, 16, most) == pytest.approx(total)


def test_an_altered_mark_is_noticed(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, chats_of([20, 30]))
    path = tmp_path / shard_name("train", 0)
    content = bytearray(path.read_bytes())
    content[-4 - 8] ^= 1  # the marks lie before the block table
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        stream.mask(0, 50)
