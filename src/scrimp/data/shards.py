"""Token shards: memory-mapped files of token ids that notice when they are damaged.

A shard is one file, little-endian::

    header     HEADER_BYTES   version, sizes, checksums (see `ShardHeader`)
    tokens     uint16 or uint32, one document after the other, padded to 8 bytes   \\
    starts     uint64 per document: its first token, counted within the shard       | body
    bytes      uint64 per document: UTF-8 bytes of the documents before it         |
    answers    of conversations: one bit per token, whether the assistant wrote    /
               it, padded to 8 bytes
    blocks     uint32 per 64 KiB of the body: CRC-32 of that block

Truncation  is seen when a shard is opened: its size must be the one the header gives.
Alteration  of the header or block table is seen when a shard is opened (they carry CRC-32s);
            of the body, at the latest when a block is first read: `Shard` checks each
            64 KiB block once, before its first token is used, at 1 to 3 GB/s. The SHA-256
            of the body, which `scrimp verify` checks, also stands in the corpus's
            manifest, so that a shard swapped for a valid one of other text is noticed.
Writing     `ShardWriter` streams the tokens to `.NAME.partial` and renames it when it is
            complete and on the disk; memory grows with the documents' starts only.
Checked     tests/data/test_shards.py: every single altered byte is found.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from scrimp.errors import DataError
from scrimp.files import publish, storage

MAGIC = b"SCRIMPTK"
VERSION = 1
BLOCK_BYTES = 1 << 16
HEADER_BYTES = 256
_HEADER = struct.Struct("<8sIIQQQII32s32sI")
_CRC = struct.Struct("<I")

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ShardHeader:
    """The sizes and checksums of a shard; also what the manifest says about it."""

    token_bytes: int
    """2 for uint16 tokens, 4 for uint32."""
    num_tokens: int
    num_documents: int
    text_bytes: int
    """UTF-8 bytes of the documents."""
    blocks_crc: int
    """CRC-32 of the block table."""
    sha256: bytes
    """SHA-256 of the body."""
    documents_digest: bytes
    """SHA-256 over the documents' hashes: which text the shard was made from."""
    has_answers: bool = False
    """Whether tokens of answers are marked; what was padding before there were conversations says no."""

    @property
    def tokens_bytes(self) -> int:
        """Bytes of the token section, with its padding."""
        return -(-self.num_tokens * self.token_bytes // 8) * 8

    @property
    def body_bytes(self) -> int:
        """Bytes of tokens, starts, byte counts and marks."""
        return self.answers_start + self.has_answers * (-(-self.num_tokens // 64) * 8)

    @property
    def answers_start(self) -> int:
        """Where in the body the marks begin."""
        return self.tokens_bytes + 16 * self.num_documents

    @property
    def num_blocks(self) -> int:
        """Entries of the block table."""
        return -(-self.body_bytes // BLOCK_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size that the file must have."""
        return HEADER_BYTES + self.body_bytes + 4 * self.num_blocks

    def pack(self) -> bytes:
        """The header as it stands in the file, with its own CRC-32 at the end."""
        token_bytes, tokens, documents, text, blocks, sha256, digest, marks = astuple(self)
        fields = _HEADER.pack(
            MAGIC, VERSION, token_bytes, tokens, documents, text, BLOCK_BYTES, blocks, sha256, digest, marks
        )
        padded = fields.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return padded + _CRC.pack(zlib.crc32(padded))


def damaged(path: Path, reason: str, *, expected: str | None = None) -> DataError:
    """The error for a shard that must not be trained on."""
    return DataError(
        f"the shard {path} is damaged",
        got=reason,
        expected=expected,
        do="run `scrimp prepare` again with the same source and folder: it rewrites the damaged shards only",
    )


def read_header(path: Path) -> ShardHeader:
    """The header of a shard, checked against itself and the size of the file."""
    with storage(path, "read"):
        if not path.is_file():
            raise damaged(path, "no such file")
        with open(path, "rb") as file:
            raw, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    if len(raw) < HEADER_BYTES:
        raise damaged(path, f"{size:,} bytes", expected=f"a header of {HEADER_BYTES} bytes: it is truncated")
    if raw[:8] != MAGIC:
        raise damaged(path, "other content than a token shard")
    version = struct.unpack_from("<I", raw, 8)[0]
    if version != VERSION:
        raise DataError(
            f"the shard {path} has another format",
            got=f"version {version}",
            expected=f"version {VERSION}",
            do="prepare the corpus again with this version of Scrimp",
        )
    if zlib.crc32(raw[: -_CRC.size]) != _CRC.unpack(raw[-_CRC.size :])[0]:
        raise damaged(path, "a header that does not match its checksum")
    _, _, token_bytes, tokens, documents, text, _, blocks_crc, sha256, digest, marks = _HEADER.unpack_from(
        raw
    )
    header = ShardHeader(token_bytes, tokens, documents, text, blocks_crc, sha256, digest, bool(marks))
    if size != header.file_bytes:
        kind = "truncated" if size < header.file_bytes else "longer than written"
        raise damaged(
            path, f"{size:,} bytes", expected=f"{header.file_bytes:,} bytes by its header: it is {kind}"
        )
    return header


class ShardWriter:
    """Writes one shard, document by document, beside its final name.

    Args:
        path: the final name.
        dtype: uint16 or uint32, little-endian.
        has_answers: every document comes with marks.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], *, has_answers: bool = False) -> None:
        self.path, self._dtype = path, dtype
        self._answers: list[BoolArray] | None = [] if has_answers else None
        self._beside = path.with_name(f".{path.name}.partial")
        self.num_tokens = self.text_bytes = 0
        self._starts: list[int] = []
        self._bytes: list[int] = []
        self._sha256, self._documents = hashlib.sha256(), hashlib.sha256()
        self._crcs: list[int] = []
        self._crc = self._in_block = 0
        with storage(path, "write"):
            self._file: BinaryIO = open(self._beside, "wb", buffering=1 << 20)  # noqa: SIM115  closed by finish or abandon
            self._file.write(b"\0" * HEADER_BYTES)

    def add(
        self,
        tokens: npt.NDArray[Any],
        *,
        text_bytes: int,
        document_hash: int,
        answers: BoolArray | None = None,
    ) -> None:
        """Append one document, with its marks where the shard has any."""
        if self._answers is not None:
            assert answers is not None
            self._answers.append(answers)
        self._starts.append(self.num_tokens)
        self._bytes.append(self.text_bytes)
        self._documents.update(document_hash.to_bytes(8, "little"))
        self._write(np.ascontiguousarray(tokens, dtype=self._dtype).data.cast("B"))
        self.num_tokens += len(tokens)
        self.text_bytes += text_bytes

    def _write(self, content: memoryview) -> None:
        self._sha256.update(content)
        with storage(self.path, "write"):
            self._file.write(content)
        while content:
            part = content[: BLOCK_BYTES - self._in_block]
            content = content[len(part) :]
            self._crc = zlib.crc32(part, self._crc)
            self._in_block += len(part)
            if self._in_block == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._crcs.append(self._crc)
        self._crc = self._in_block = 0

    def finish(self) -> ShardHeader:
        """Write documents, checksums and header, flush to the disk, and give the file its name."""
        self._write(memoryview(b"\0" * (-self.num_tokens * self._dtype.itemsize % 8)))
        for column in (self._starts, self._bytes):
            self._write(np.array(column, dtype="<u8").data.cast("B"))
        if self._answers is not None:
            bits = np.packbits(np.concatenate(self._answers), bitorder="little")
            self._write(np.pad(bits, (0, -len(bits) % 8)).data)
        if self._in_block:
            self._end_block()
        blocks = np.array(self._crcs, dtype="<u4").tobytes()
        header = ShardHeader(
            self._dtype.itemsize,
            self.num_tokens,
            len(self._starts),
            self.text_bytes,
            zlib.crc32(blocks),
            self._sha256.digest(),
            self._documents.digest(),
            self._answers is not None,
        )
        with storage(self.path, "write"):
            self._file.write(blocks)
            self._file.seek(0)
            self._file.write(header.pack())
            publish(self._file, self.path)
        return header

    def abandon(self) -> None:
        """Drop what was written so far."""
        with contextlib.suppress(OSError):  # a full disk refuses the last buffer too
            self._file.close()
        self._beside.unlink(missing_ok=True)


class Shard:
    """One shard, memory-mapped; every block is checked before its first use."""

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, read_header(path)
        header = self.header
        with storage(path, "read"):
            self._map: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        self._body = self._map[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        blocks = self._map[HEADER_BYTES + header.body_bytes :]
        if zlib.crc32(blocks.data) != header.blocks_crc:
            raise damaged(path, "a block table that does not match its checksum")
        self._blocks = blocks.view("<u4") if blocks.ctypes.data % 4 == 0 else blocks.copy().view("<u4")
        self._unchecked = np.ones(header.num_blocks, dtype=bool)
        tokens = self._body[: header.num_tokens * header.token_bytes]
        self._tokens = tokens.view(f"<u{header.token_bytes}")
        documents = self._body[header.tokens_bytes : header.answers_start].view("<u8")
        self._starts, self._bytes = documents[: header.num_documents], documents[header.num_documents :]

    def tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The tokens [start, stop) of this shard."""
        size = self.header.token_bytes
        self._check(start * size, stop * size)
        return self._tokens[start:stop]

    def answers(self, start: int, stop: int) -> BoolArray:
        """Which of the tokens [start, stop) the assistant wrote; of conversations alone."""
        first, last = start // 8, -(-stop // 8)
        begin = self.header.answers_start
        self._check(begin + first, begin + last)
        bits = np.unpackbits(self._body[begin + first : begin + last], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(bool)

    def document_starts(self, start: int, stop: int) -> Int64Array:
        """Where documents begin within [start, stop)."""
        self._check(self.header.tokens_bytes, self.header.answers_start)
        first, last = np.searchsorted(self._starts, np.array([start, stop], dtype=np.uint64))
        return self._starts[first:last].astype(np.int64)

    def text_bytes_before(self, position: int) -> float:
        """UTF-8 bytes of the tokens before `position`; a cut document counts by its share of tokens."""
        header = self.header
        if position >= header.num_tokens:
            return float(header.text_bytes)
        self._check(header.tokens_bytes, header.answers_start)
        document = int(np.searchsorted(self._starts, np.uint64(position), side="right")) - 1
        last = document + 1 == header.num_documents
        start, before = int(self._starts[document]), int(self._bytes[document])
        stop = header.num_tokens if last else int(self._starts[document + 1])
        after = header.text_bytes if last else int(self._bytes[document + 1])
        return before + (after - before) * (position - start) / (stop - start)

    def _check(self, start: int, stop: int) -> None:
        """Check the blocks that hold the bytes [start, stop) of the body, once each."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        if not self._unchecked[first:last].any():
            return
        for block in range(first, last):
            if self._unchecked[block]:
                self._check_block(block)

    def _check_block(self, block: int) -> None:
        start = block * BLOCK_BYTES
        if zlib.crc32(self._body[start : start + BLOCK_BYTES].data) != self._blocks[block]:
            where = HEADER_BYTES + start
            raise damaged(
                self.path, f"altered content in the 64 KiB from byte {where:,}", expected="its checksum"
            )
        self._unchecked[block] = False

    def check_all(self) -> None:
        """Check every block and the SHA-256 of the body."""
        self._check(0, self.header.body_bytes)
        if hashlib.sha256(self._body.data).digest() != self.header.sha256:
            raise damaged(self.path, "content that does not match its SHA-256")
