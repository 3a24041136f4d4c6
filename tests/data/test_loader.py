"""Batches equal those of a brute-force loader, for any position and any number of ranks."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.data import (
    Batch,
    Loader,
    SampleIndex,
    TokenStream,
    evaluation_batches,
    evaluation_text_bytes,
    held_bytes,
)
from scrimp.data.loader import IGNORED
from scrimp.errors import DataError

quick = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths_of_documents = st.lists(st.integers(1, 25), min_size=4, max_size=25)

START, END = 1, 2


def documents_of(lengths: list[int], *, closing: bool = False) -> list[np.ndarray]:
    """Documents of distinct tokens (from 10) after a START, with an END if closing."""
    documents, token = [], 10
    for length in lengths:
        text = np.arange(token, token + length)
        documents.append(np.concatenate([[START], text, [END] if closing else []]))
        token += length
    return documents


def brute_window(
    documents: list[np.ndarray], start: int, sequence: int, closing: bool
) -> tuple[list, list, list]:
    """Inputs, targets and starts of a window, one token at a time."""
    flat = [(int(token), place) for document in documents for place, token in enumerate(document)]
    inputs, targets, starts = [], [], []
    for position in range(start, start + sequence):
        inputs.append(flat[position][0])
        following = flat[position + 1]
        targets.append(IGNORED if closing and following[1] == 0 else following[0])
        if flat[position][1] == 0 or position == start:
            starts.append(position - start)
    return inputs, targets, starts


@quick
@given(
    lengths=lengths_of_documents,
    sequence=st.integers(1, 12),
    closing=st.booleans(),
    micro_batch=st.integers(1, 5),
    per_step=st.integers(1, 6),
    seed=st.integers(0, 99),
    mask=st.booleans(),
)
def test_batches_equal_brute_force(
    make_stream: Callable[..., TokenStream], lengths: list[int], sequence: int, closing: bool, micro_batch: int,
    per_step: int, seed: int, mask: bool,
) -> None:  # fmt: skip
    documents = documents_of(lengths, closing=closing)
    stream = make_stream(documents, closing_id=END if closing else None)
    num_tokens = sum(map(len, documents))
    if (num_tokens - 1) // sequence < 1:
        return
    index = SampleIndex((num_tokens - 1) // sequence, seed)
    with Loader(
        stream,
        sequence=sequence,
        sequences_per_step=per_step,
        micro_batch=micro_batch,
        seed=seed,
        mask_documents=mask,
    ) as loader:
        position = 0
        for _ in range(4):
            batches = next(loader)
            assert [len(batch.tokens_BT) for batch in batches[:-1]] == [micro_batch] * (len(batches) - 1)
            assert sum(len(batch.tokens_BT) for batch in batches) == per_step
            for batch in batches:
                rows = len(batch.tokens_BT)
                windows = [
                    brute_window(documents, index[position + row] * sequence, sequence, closing)
                    for row in range(rows)
                ]
                position += rows
                assert batch.tokens_BT.tolist() == [window[0] for window in windows]
                assert batch.targets_BT.tolist() == [window[1] for window in windows]
                starts = [row * sequence + place for row, window in enumerate(windows) for place in window[2]]
                if mask:
                    assert batch.document_starts.tolist() == [*starts, rows * sequence]
                    assert batch.document_starts.dtype == torch.int32
                else:
                    assert batch.document_starts is None
                assert batch.num_targets == sum(
                    target != IGNORED for window in windows for target in window[1]
                )
                assert batch.tokens_BT.dtype == batch.targets_BT.dtype == torch.int64
                assert batch.tokens_BT.is_contiguous()
                assert batch.targets_BT.is_contiguous()
            assert loader.position == position


@quick
@given(lengths=lengths_of_documents, sequence=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_token_is_an_input_exactly_once_per_epoch(
    make_stream: Callable[..., TokenStream], lengths: list[int], sequence: int, seed: int
) -> None:
    stream = make_stream(documents_of(lengths))
    everything = stream.read(0, stream.num_tokens).tolist()
    samples = (stream.num_tokens - 1) // sequence
    if samples < 1:
        return
    with Loader(
        stream, sequence=sequence, sequences_per_step=samples, micro_batch=samples, seed=seed
    ) as loader:
        for _ in range(2):
            (batch,) = next(loader)
            seen = sorted(batch.tokens_BT.flatten().tolist())
            assert seen == sorted(everything[: samples * sequence])
            targets = batch.targets_BT.flatten().tolist()
            assert sorted(targets) == sorted(everything[1 : samples * sequence + 1])


def same(first: Batch, second: Batch) -> bool:
    return (
        torch.equal(first.tokens_BT, second.tokens_BT)
        and torch.equal(first.targets_BT, second.targets_BT)
        and torch.equal(first.document_starts, second.document_starts)
        and first.num_targets == second.num_targets
    )


@pytest.fixture
def stream(make_stream: Callable[..., TokenStream]) -> TokenStream:
    draw = np.random.default_rng(0)
    return make_stream(documents_of(draw.integers(1, 60, size=40).tolist()))


def load(stream: TokenStream, **settings: int) -> Loader:
    return Loader(
        stream, **{"sequence": 16, "sequences_per_step": 12, "micro_batch": 2, "seed": 5, **settings}
    )


@pytest.mark.parametrize("steps_before", [0, 1, 2, 7])
def test_a_run_resumed_at_its_position_gets_the_same_batches(stream: TokenStream, steps_before: int) -> None:
    with load(stream) as loader:
        for _ in range(steps_before):
            next(loader)
        position = loader.position
        time.sleep(0.02)  # steps that are ready but not taken do not count
        assert loader.position == position == 12 * steps_before
        expected = [next(loader) for _ in range(5)]
    with load(stream, first_sample=position) as resumed:
        for batches in expected:
            assert all(same(a, b) for a, b in zip(batches, next(resumed), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
@pytest.mark.every(5)
def test_the_ranks_together_get_the_step_of_one_rank(
    stream: TokenStream, world_size: int, micro_batch: int
) -> None:
    def rows(batches: list[Batch]) -> list[list[int]]:
        return [row for batch in batches for row in batch.tokens_BT.tolist()]

    with load(stream, micro_batch=12) as alone:
        expected = [rows(next(alone)) for _ in range(3)]
    loaders = [
        load(stream, micro_batch=micro_batch, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for step in expected:
        parts = [next(loader) for loader in loaders]
        assert [row for part in parts for row in rows(part)] == step
        assert len({len(part) for part in parts}) == 1
    assert {loader.position for loader in loaders} == {36}
    for loader in loaders:
        loader.close()


def test_a_position_of_one_world_size_continues_on_another(stream: TokenStream) -> None:
    with load(stream) as alone:
        next(alone)
        position, expected = alone.position, next(alone)
    with load(stream, first_sample=position, rank=1, world_size=2) as second:
        assert all(same(a, b) for a, b in zip(expected[3:], next(second), strict=True))


def test_ranks_that_do_not_divide_the_step_are_refused(stream: TokenStream) -> None:
    for ranks in ({"world_size": 5}, {"world_size": 2, "rank": 2}):
        with pytest.raises(DataError, match="cannot be shared by the ranks"):
            load(stream, **ranks)
    for name in ("sequence", "micro_batch", "sequences_per_step"):
        with pytest.raises(DataError, match="not possible"):
            load(stream, **{name: 0})


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_corpus_too_small_for_one_sequence_is_refused(
    make_stream: Callable[..., TokenStream], num_tokens: int
) -> None:
    with pytest.raises(DataError, match=f"got {num_tokens} token.*at least 17"):
        load(make_stream([np.arange(num_tokens)]))
    with pytest.raises(DataError, match="0 tokens"):
        load(make_stream([]))


def test_an_error_in_the_thread_surfaces_at_its_step_and_stays(
    stream: TokenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = TokenStream.read, [0]

    def failing(self: TokenStream, start: int, stop: int) -> np.ndarray:
        calls[0] += 1
        if calls[0] > 24:
            raise DataError("a shard is gone")
        return real(self, start, stop)

    monkeypatch.setattr(TokenStream, "read", failing)
    with load(stream) as loader:
        next(loader)
        next(loader)
        for _ in range(2):
            with pytest.raises(DataError, match="a shard is gone"):
                next(loader)
        assert loader.position == 24


def test_batches_are_ready_before_they_are_asked_for_and_waiting_is_measured(
    stream: TokenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(stream) as loader:
        next(loader)
        time.sleep(0.3)
        next(loader)
        assert loader.wait_seconds < 0.1
    real = TokenStream.read

    def slow(self: TokenStream, start: int, stop: int) -> np.ndarray:
        time.sleep(0.01)
        return real(self, start, stop)

    monkeypatch.setattr(TokenStream, "read", slow)
    with load(stream) as loader:
        next(loader)
        assert loader.wait_seconds > 0.08


@pytest.mark.parametrize("mask", [False, True])
def test_batches_take_no_more_memory_than_is_said(stream: TokenStream, mask: bool) -> None:
    def num_bytes() -> int:
        batches = [thing for thing in gc.get_objects() if type(thing) is Batch]
        tensors = [
            tensor for one in batches for tensor in (one.tokens_BT, one.targets_BT, one.document_starts)
        ]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    gc.collect()
    before = num_bytes()
    with Loader(
        stream, sequence=4, sequences_per_step=2, micro_batch=1, seed=0, mask_documents=mask
    ) as loader:
        running = next(loader)
        most = held_bytes(8, mask_documents=mask)
        tokens_and_targets = held_bytes(8, mask_documents=False)
        deadline = time.monotonic() + 10
        while num_bytes() - before < tokens_and_targets and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert tokens_and_targets <= num_bytes() - before <= most
        del running


def test_closing_ends_the_thread_and_the_iteration(stream: TokenStream) -> None:
    def threads() -> int:
        return sum(thread.name == "scrimp-loader" for thread in threading.enumerate())

    before = threads()
    loader = load(stream)
    next(loader)
    assert threads() == before + 1
    loader.close()
    loader.close()
    assert threads() == before
    assert list(loader) == []
    forgotten = load(stream)
    del forgotten
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threads() == before


@quick
@given(
    lengths=lengths_of_documents,
    sequence=st.integers(1, 12),
    micro_batch=st.integers(1, 5),
    max_tokens=st.integers(1, 400),
    closing=st.booleans(),
)
def test_evaluation_counts_every_target_once_in_order(
    make_stream: Callable[..., TokenStream], lengths: list[int], sequence: int, micro_batch: int, max_tokens: int,
    closing: bool,
) -> None:  # fmt: skip
    documents = documents_of(lengths, closing=closing)
    stream = make_stream(documents, closing_id=END if closing else None)
    everything = stream.read(0, stream.num_tokens).tolist()
    total = min(max_tokens, len(everything) - 1)
    targets, inputs = [], []
    shapes = set()
    for batch in evaluation_batches(
        stream, sequence=sequence, micro_batch=micro_batch, max_tokens=max_tokens, mask_documents=True
    ):
        shapes.add(tuple(batch.tokens_BT.shape))
        real = batch.targets_BT.flatten() != IGNORED
        targets += batch.targets_BT.flatten()[real].tolist()
        inputs += batch.tokens_BT.flatten()[real].tolist()
        assert batch.num_targets == int(real.sum())
        assert batch.document_starts[0] == 0
        assert batch.document_starts[-1] == batch.tokens_BT.numel()
        assert (batch.document_starts.diff() > 0).all()
        rows = np.arange(len(batch.tokens_BT)) * sequence
        assert set(rows.tolist()) <= set(batch.document_starts.tolist())
    kept = [n for n in range(total) if not (closing and everything[n] == END)]
    assert targets == [everything[n + 1] for n in kept]
    assert inputs == [everything[n] for n in kept]
    assert len(shapes) == 1
    assert evaluation_text_bytes(stream, sequence, max_tokens) == pytest.approx(2 * (total + 1))


def test_an_empty_held_out_split_is_refused(make_stream: Callable[..., TokenStream]) -> None:
    for documents in ([], [np.arange(1)]):
        with pytest.raises(DataError, match="text to evaluate on is too short"):
            list(
                evaluation_batches(
                    make_stream(documents), sequence=4, micro_batch=1, max_tokens=9, mask_documents=True
                )
            )


@pytest.mark.gpu
def test_batches_are_pinned_when_asked(stream: TokenStream) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with Loader(stream, sequence=16, sequences_per_step=4, micro_batch=2, seed=0, pin=True) as loader:
        assert all(batch.tokens_BT.is_pinned() and batch.targets_BT.is_pinned() for batch in next(loader))
