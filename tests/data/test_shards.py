"""Shards read back what was written, and notice every kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.data import TokenStream
from scrimp.data.shards import BLOCK_BYTES, HEADER_BYTES, Shard, ShardWriter, read_header
from scrimp.errors import DataError


def write(path: Path, documents: list[np.ndarray], dtype: str = "<u2") -> Path:
    writer = ShardWriter(path, np.dtype(dtype))
    for document in documents:
        writer.add(document, text_bytes=3 * len(document), document_hash=len(document))
    writer.finish()
    return path


def touch_everything(path: Path) -> None:
    """Read the whole shard as training would."""
    shard = Shard(path)
    shard.document_starts(0, shard.header.num_tokens)
    shard.tokens(0, shard.header.num_tokens)
    shard.check_all()


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    dtype=st.sampled_from(["<u2", "<u4"]),
    data=st.data(),
)
def test_tokens_and_documents_read_back(
    tmp_path: Path, lengths: list[int], dtype: str, data: st.DataObject
) -> None:
    documents = [np.arange(length) + 7 * number for number, length in enumerate(lengths)]
    shard = Shard(write(tmp_path / "a.tokens", documents, dtype))
    everything, starts = np.concatenate(documents), np.cumsum([0, *lengths[:-1]])
    start = data.draw(st.integers(0, len(everything)))
    stop = data.draw(st.integers(start, len(everything)))
    assert shard.tokens(start, stop).tolist() == everything[start:stop].tolist()
    assert shard.document_starts(start, stop).tolist() == [s for s in starts if start <= s < stop]
    assert shard.text_bytes_before(start) == pytest.approx(3 * start)
    assert shard.header.num_documents == len(lengths)
    shard.check_all()


def test_every_altered_byte_of_a_shard_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", [np.arange(9), np.arange(30)])
    content = path.read_bytes()
    for position in range(len(content)):
        altered = bytearray(content)
        altered[position] ^= 0x10
        path.write_bytes(altered)
        with pytest.raises(DataError, match=r"a\.tokens"):
            touch_everything(path)


@pytest.mark.parametrize("kept", [0, 1, 100, HEADER_BYTES, HEADER_BYTES + 3, -1])
def test_a_truncated_shard_is_named_when_it_is_opened(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "a.tokens", [np.arange(100)])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"a\.tokens is damaged.*truncated"):
        read_header(path)


def test_a_longer_shard_and_other_content_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", [np.arange(100)])
    content = path.read_bytes()
    path.write_bytes(content + b"x")
    with pytest.raises(DataError, match="longer than written"):
        read_header(path)
    path.write_bytes(b"Q" * 1000)
    with pytest.raises(DataError, match="other content"):
        read_header(path)
    path.write_bytes(content[:8] + b"\x09\0\0\0" + content[12:])
    with pytest.raises(DataError, match="version 9"):
        read_header(path)
    path.unlink()
    with pytest.raises(DataError, match="no such file"):
        read_header(path)


def test_an_altered_block_is_found_at_its_first_read_and_others_stay_readable(tmp_path: Path) -> None:
    documents = [np.arange(5000) for _ in range(60)]
    path = write(tmp_path / "a.tokens", documents)
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 2 * BLOCK_BYTES + 17] ^= 1
    path.write_bytes(content)
    shard = Shard(path)
    assert len(shard.tokens(0, BLOCK_BYTES)) == BLOCK_BYTES  # the first two blocks
    for _ in range(2):
        with pytest.raises(DataError, match=f"from byte {HEADER_BYTES + 2 * BLOCK_BYTES:,}"):
            shard.tokens(BLOCK_BYTES, BLOCK_BYTES + 1)


def test_an_unfinished_shard_has_no_name_and_can_be_dropped(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.tokens", np.dtype("<u2"))
    writer.add(np.arange(10), text_bytes=1, document_hash=1)
    assert [path.name for path in tmp_path.iterdir()] == [".a.tokens.partial"]
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), per_shard=st.integers(1, 6), data=st.data()
)
def test_a_stream_reads_across_shards(
    make_stream: Callable[..., TokenStream], lengths: list[int], per_shard: int, data: st.DataObject
) -> None:
    documents = [np.arange(length) + 31 * number for number, length in enumerate(lengths)]
    stream = make_stream(documents, per_shard=per_shard)
    everything, starts = np.concatenate(documents), np.cumsum([0, *lengths[:-1]])
    start = data.draw(st.integers(0, len(everything)))
    stop = data.draw(st.integers(start, len(everything)))
    assert (stream.num_tokens, stream.num_documents) == (len(everything), len(lengths))
    assert stream.read(start, stop).tolist() == everything[start:stop].tolist()
    assert stream.document_starts(start, stop).tolist() == [s for s in starts if start <= s < stop]
    assert stream.text_bytes_between(start, stop) == pytest.approx(2 * (stop - start))
    with pytest.raises(IndexError):
        stream.read(0, len(everything) + 1)
