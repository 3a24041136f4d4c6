"""Windows of the token stream as batches, ready before they are asked for.

Samples    Sample i is the window of T + 1 tokens from token i * T: T inputs, and the same
           shifted by one as targets. Windows share only their border token, so one epoch
           uses every token of the stream as input once; a tail shorter than T + 1 is left
           out. Documents are packed without padding and may span windows.
           Conversations are packed whole instead (see packing): there a sample is a row of them.
Order      Position p of the run is sample `SampleIndex(num_samples, seed)[p]`. The position is
           the whole state: step s of any run takes the positions s * S to s * S + S - 1, cut
           into equal parts by rank. The union over ranks is the same for every world size.
Mixtures   Position p is a sample of the source that `Interleave` says, and of that source's own
           order the one after those that came before (see mixture). Text that models wrote is read the same way
           beside a stream (see written).
Documents  `document_starts` are the borders attention must not cross, over the flattened
           B * T tokens: every row begins a document, whatever it continues. The last token of
           a document has the next document's delimiter as target; where the tokenizer ends
           documents with its own EOS, the EOS has no target (IGNORED).
Thread     A daemon thread keeps `PREFETCHED_STEPS` steps ready, and in pinned memory if asked. An error
           in it surfaces in the main thread at the step that it belongs to.
Checked    tests/data/test_loader.py, against a brute-force loader.

Shapes     B sequences of a micro-batch, T tokens of a sequence.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from scrimp.data.batch import IGNORED, Batch, Row
from scrimp.data.corpus import TokenStream
from scrimp.data.index import SampleIndex
from scrimp.data.interleave import Interleave
from scrimp.data.mixture import MixedStream
from scrimp.data.packing import Packed, packed
from scrimp.data.written import WrittenText
from scrimp.errors import DataError

PREFETCHED_STEPS = 2
"""Steps whose batches are kept ready."""
_POLL_SECONDS = 0.1

Int64Array = npt.NDArray[np.int64]


class Windows:
    """The rows of a stream of text: every window of T + 1 tokens, T apart.

    Args:
        stream: of documents.
        sequence: T.
        mask_documents: say where documents begin.
        name: the split, for errors.
    """

    def __init__(
        self, stream: TokenStream, sequence: int, *, mask_documents: bool, name: str = "training"
    ) -> None:
        self._stream, self._sequence, self._mask_documents = stream, sequence, mask_documents
        self.num_samples = (stream.num_tokens - 1) // sequence
        if self.num_samples < 1:
            raise DataError(
                f"the {name} split is too small",
                got=f"{stream.num_tokens:,} token{'s' if stream.num_tokens != 1 else ''}",
                expected=f"at least {sequence + 1:,} for one sequence of {sequence:,} and its targets",
                do="give more text or a shorter train.sequence",
            )

    def row(self, number: int) -> Row:
        """One window."""
        start = number * self._sequence
        return _window(self._stream, start, start + self._sequence, self._mask_documents)


class Shuffled:
    """The rows of one stream, in another order in each epoch."""

    def __init__(self, rows: Windows | Packed | WrittenText, seed: int) -> None:
        self._rows, self._index = rows, SampleIndex(rows.num_samples, seed)
        self.num_samples = rows.num_samples

    def at(self, position: int) -> Row:
        """The row at a position of an endless run."""
        return self._rows.row(self._index[position])


class Mixed:
    """The rows of several streams, each in the order that it has alone."""

    def __init__(self, parts: list[Shuffled], order: Interleave) -> None:
        self._parts, self._order = parts, order
        self.num_samples = sum(part.num_samples for part in parts)

    def at(self, position: int) -> Row:
        """The row at a position of an endless run."""
        source, before = self._order[position]
        return self._parts[source].at(before)

    def sources_at(self, positions: Iterable[int]) -> torch.Tensor:
        """Numbers of the streams that the rows at some positions come from."""
        return torch.tensor([self._order[position][0] for position in positions])


def _ordered(
    stream: TokenStream | MixedStream, sequence: int, seed: int, mask_documents: bool
) -> Shuffled | Mixed:
    if isinstance(stream, MixedStream):
        parts = [Shuffled(_rows_of(one, sequence, mask_documents), seed) for one in stream.streams]
        return Mixed(parts, stream.order)
    own = Shuffled(_rows_of(stream, sequence, mask_documents), seed)
    if stream.beside is None:
        return own
    written, order = stream.beside
    return Mixed([own, Shuffled(written, seed)], order)


def passes_over(stream: MixedStream, sequence: int, samples: int) -> list[float]:
    """How often the first `samples` samples of a run read each source."""
    rows = [_rows_of(one, sequence, mask_documents=True).num_samples for one in stream.streams]
    return [count / num for count, num in zip(stream.order.counts(samples), rows, strict=True)]


def _rows_of(stream: TokenStream, sequence: int, mask_documents: bool) -> Windows | Packed:
    """The samples of a stream; conversations are always kept apart."""
    if stream.has_answers:
        return packed(stream, sequence)
    return Windows(stream, sequence, mask_documents=mask_documents)


def _window(stream: TokenStream, start: int, stop: int, mask_documents: bool) -> Row:
    """Inputs [start, stop), their targets, and the document starts within the inputs, from 0.

    Past the end of the stream targets are IGNORED.
    """
    end = min(stop + 1, stream.num_tokens)
    tokens = stream.read(start, end).astype(np.int64)
    targets = np.full(stop - start, IGNORED, dtype=np.int64)
    targets[: len(tokens) - 1] = tokens[1:]
    starts = np.empty(0, dtype=np.int64)
    if mask_documents or stream.closing_id is not None:
        starts = stream.document_starts(start, end) - start
        if stream.closing_id is not None:
            targets[starts[starts > 0] - 1] = IGNORED
        starts = starts[(starts > 0) & (starts < stop - start)]
    return tokens[: stop - start], targets, starts


def _batch(rows: list[Row], sequence: int, mask_documents: bool) -> Batch:
    """Stack windows of `sequence` tokens to a micro-batch."""
    tokens_BT = torch.from_numpy(np.stack([tokens for tokens, _, _ in rows]))
    targets = np.stack([targets for _, targets, _ in rows])
    document_starts = None
    if mask_documents:
        borders: list[Int64Array] = []
        for row, (_, _, starts) in enumerate(rows):
            borders += [np.array([row * sequence]), starts + row * sequence]
        borders.append(np.array([len(rows) * sequence]))
        document_starts = torch.from_numpy(np.concatenate(borders).astype(np.int32))
    return Batch(tokens_BT, torch.from_numpy(targets), document_starts, int((targets != IGNORED).sum()))


def held_bytes(tokens_per_step: int, *, mask_documents: bool) -> int:
    """Most bytes of batches at once: of the step that runs, of those that are ready, and of one that waits for a place.

    Each token takes its id, its target and, if documents are masked, a document start, which is more than there can be:
    a document has two tokens or more.
    """
    return (PREFETCHED_STEPS + 2) * tokens_per_step * (8 + 8 + 4 * mask_documents)


@dataclass(frozen=True)
class _Producer:
    """Makes the micro-batches of one step; knows nothing of threads."""

    rows: Shuffled | Mixed
    own: range
    """This rank's samples of a step."""
    micro_batch: int
    sequence: int
    mask_documents: bool
    pin: bool

    def step(self, position: int) -> list[Batch]:
        """This rank's micro-batches of the step whose first sample is at `position`."""
        batches = []
        for first in range(self.own.start, self.own.stop, self.micro_batch):
            offsets = range(first, min(first + self.micro_batch, self.own.stop))
            rows = [self.rows.at(position + offset) for offset in offsets]
            batch = _batch(rows, self.sequence, self.mask_documents)
            if isinstance(self.rows, Mixed):
                sources_B = self.rows.sources_at(position + offset for offset in offsets)
                batch = replace(batch, sources_B=sources_B)
            batches.append(batch.pin() if self.pin else batch)
        return batches


@dataclass(frozen=True)
class _Failure:
    """Carries an error from the thread to the caller."""

    error: BaseException


def _check_counts(
    sequence: int, sequences_per_step: int, micro_batch: int, rank: int, world_size: int
) -> None:
    """Refuse sizes that make no batch, and ranks that cannot share a step equally."""
    for name, value in (
        ("sequence", sequence),
        ("sequences per step", sequences_per_step),
        ("micro-batch", micro_batch),
    ):
        if value < 1:
            raise DataError(f"the {name} is not possible", got=value, expected="1 or more")
    if sequences_per_step % world_size or not 0 <= rank < world_size:
        raise DataError(
            "the sequences of a step cannot be shared by the ranks",
            got=f"{sequences_per_step} sequences over {world_size} ranks (rank {rank})",
            expected="a number of ranks that divides the sequences of a step",
            do="change train.batch_tokens or the number of ranks",
        )


class Loader:
    """An endless iterator over optimizer steps; each is a list of micro-batches.

    Args:
        stream: the training split, or those of a mixture.
        sequence: T, tokens per sequence.
        sequences_per_step: sequences of one optimizer step over all ranks.
        micro_batch: sequences per forward pass on one rank.
        seed: decides the order, with the epoch.
        first_sample: position to go on from: `position` of an earlier loader.
        rank: this rank.
        world_size: ranks that share every step; divides sequences_per_step.
        mask_documents: give document starts with the batches.
        pin: put batches in pinned memory (where there is CUDA).
    """

    def __init__(
        self,
        stream: TokenStream | MixedStream,
        *,
        sequence: int,
        sequences_per_step: int,
        micro_batch: int,
        seed: int,
        first_sample: int = 0,
        rank: int = 0,
        world_size: int = 1,
        mask_documents: bool = True,
        pin: bool = False,
    ) -> None:
        _check_counts(sequence, sequences_per_step, micro_batch, rank, world_size)
        rows, own = _ordered(stream, sequence, seed, mask_documents), sequences_per_step // world_size
        producer = _Producer(
            rows,
            range(rank * own, (rank + 1) * own),
            micro_batch,
            sequence,
            mask_documents=mask_documents or stream.has_answers,
            pin=pin and torch.cuda.is_available(),
        )
        self.num_samples: int = rows.num_samples
        """Samples in one epoch; of a mixture in one of each source."""
        self.position: int = first_sample
        """Samples consumed by all ranks together: the whole state."""
        self.wait_seconds: float = 0.0
        """Time the last `next` waited for its batches."""
        self._per_step = sequences_per_step
        self._ready: queue.Queue[list[Batch] | _Failure] = queue.Queue(maxsize=PREFETCHED_STEPS)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=_produce,
            args=(producer, first_sample, sequences_per_step, self._ready, self._stop),
            name="scrimp-loader",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Batch]:
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise StopIteration
        began = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds = time.perf_counter() - began
        if isinstance(item, _Failure):
            self._failure = item.error
            raise item.error
        self.position += self._per_step
        return item

    def close(self) -> None:
        """Stop the thread; `next` then ends the iteration."""
        self._stop.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        stop = getattr(self, "_stop", None)
        if stop is not None:
            stop.set()


def _produce(
    producer: _Producer,
    position: int,
    per_step: int,
    ready: queue.Queue[list[Batch] | _Failure],
    stop: threading.Event,
) -> None:
    """The thread: fills the queue until it is told to stop. Holds no reference to the Loader."""
    while not stop.is_set():
        item: list[Batch] | _Failure
        try:
            item = producer.step(position)
        except BaseException as error:  # surfaces in the main thread
            item = _Failure(error)
        position += per_step
        while not stop.is_set():
            try:
                ready.put(item, timeout=_POLL_SECONDS)
                break
            except queue.Full:
                continue
        if isinstance(item, _Failure):
            return


def evaluation_batches(
    stream: TokenStream,
    *,
    sequence: int,
    micro_batch: int,
    max_tokens: int | None,
    mask_documents: bool,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """The first `max_tokens` targets of a stream (None: all) in order, every one exactly once.

    Of conversations as many rows as hold so many positions, shuffled, since rows are packed by length.

    The last sequence is filled up with ignored targets, and so is the last micro-batch where
    there is more than one, so that all micro-batches have one shape (torch.compile).
    Ranks take every `world_size`-th micro-batch, equally many: the last may be nothing but ignored targets.
    """
    rows: Iterator[Row]
    if stream.has_answers:
        chats = packed(stream, sequence, "held-out")
        rows, mask_documents = map(chats.row, _evaluated_rows(chats, max_tokens)), True
    else:
        rows = _evaluated_windows(stream, sequence, max_tokens, mask_documents)
    taken = list(itertools.islice(rows, micro_batch))
    rows_per_batch = len(taken)
    nothing = np.zeros(sequence, dtype=np.int64)
    empty = (nothing, np.full(sequence, IGNORED, dtype=np.int64), np.empty(0, dtype=np.int64))
    while taken:
        for turn in range(world_size):
            if turn == rank:
                yield _batch(taken + [empty] * (rows_per_batch - len(taken)), sequence, mask_documents)
            taken = list(itertools.islice(rows, rows_per_batch))


def _evaluated_windows(
    stream: TokenStream, sequence: int, max_tokens: int | None, mask_documents: bool
) -> Iterator[Row]:
    if stream.num_tokens < 2:
        raise DataError(
            "the text to evaluate on is too short",
            got=f"{stream.num_tokens} token{'s' if stream.num_tokens != 1 else ''}",
            expected="at least 2",
            do="give more text",
        )
    total = stream.num_tokens - 1
    if max_tokens is not None:
        total = min(total, max(max_tokens, 1))
    for start in range(0, total, sequence):
        yield _padded(_window(stream, start, min(start + sequence, total), mask_documents), sequence)


def _evaluated_rows(chats: Packed, max_tokens: int | None) -> list[int]:
    count = chats.num_samples
    if max_tokens is not None:
        count = min(count, max(1, max_tokens // chats.sequence))
    index = SampleIndex(chats.num_samples, seed=0)
    return [index[position] for position in range(count)]


def evaluation_text_bytes(stream: TokenStream, sequence: int, max_tokens: int | None) -> float:
    """UTF-8 bytes of the text, or of the answers, that `evaluation_batches` covers: the denominator of bits per
    byte."""
    if stream.has_answers:
        chats = packed(stream, sequence, "held-out")
        return sum(map(chats.answer_bytes, _evaluated_rows(chats, max_tokens)))
    limit = stream.num_tokens if max_tokens is None else max(max_tokens, 1) + 1
    return stream.text_bytes_between(0, min(stream.num_tokens, limit))


def _padded(window: Row, sequence: int) -> Row:
    """A window filled up to `sequence` tokens with token 0 and ignored targets."""
    tokens, targets, starts = window
    missing = sequence - len(tokens)
    if not missing:
        return window
    return np.pad(tokens, (0, missing)), np.pad(targets, (0, missing), constant_values=IGNORED), starts
