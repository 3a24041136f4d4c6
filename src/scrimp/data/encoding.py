"""Encodes documents on all cores, in order, in bounded memory.

Reading and writing stay in the calling thread. Groups of documents are encoded by threads
that leave Python's lock for `tokenizers`' own (Rust) threads. Processes were measured too,
for the standard library on two cores: 1.31 s against 1.46 s once running, 2.24 s with their
start; not worth orphans after a kill.

Limits   Turning ids into arrays holds Python's lock for 0.1 microseconds a token, which
         bounds the rate at about 10 million tokens/s however many cores there are.
Checked  tests/data/test_prepare.py: the same shards for any number of workers.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from scrimp.data.documents import Document
from scrimp.data.tokenizer import TokenArray, Tokenizer

_GROUP_BYTES = 1 << 19
_GROUP_DOCUMENTS = 2048


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(corpus: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups that are worth a thread's while."""
    group: list[Document] = []
    size = 0
    for document in corpus:
        group.append(document)
        size += document.num_bytes
        if size >= _GROUP_BYTES or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_documents(
    corpus: Iterable[Document], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Document, TokenArray]]:
    """The documents with their tokens, in order, encoded by `workers` at a time."""
    encode = _encoder(tokenizer, workers)
    threads = min(workers + 1, 8) if workers >= num_cores() else workers
    pending: deque[tuple[list[Document], Future[list[TokenArray]]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="scrimp-encode")
    try:
        for group in _groups(corpus):
            pending.append((group, pool.submit(encode, group)))
            if len(pending) > threads + 1:
                done, future = pending.popleft()
                yield from zip(done, future.result(), strict=True)
        while pending:
            done, future = pending.popleft()
            yield from zip(done, future.result(), strict=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encoder(tokenizer: Tokenizer, workers: int) -> Callable[[list[Document]], list[TokenArray]]:
    """Encodes a group: on all cores, or (for fewer workers) one document at a time per thread."""
    if tokenizer.is_bytes:
        return lambda group: [tokenizer.encode_raw(document.raw) for document in group]
    if workers >= num_cores():
        return lambda group: tokenizer.encode_batch([document.text for document in group])
    return lambda group: [tokenizer.encode(document.text) for document in group]
