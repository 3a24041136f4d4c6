"""Rows that models wrote: what is read of them, and files that are damaged or missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scrimp.data import written
from scrimp.data.batch import IGNORED
from scrimp.data.tokenizer import Tokenizer, load_tokenizer
from scrimp.data.written import Ids, WrittenText, write_rows_to
from scrimp.errors import DataError

SEQUENCE = 6


class Writers:
    """Counts what it is asked for."""

    def __init__(self, ids: Ids) -> None:
        self.ids, self.asked = ids, list[int]()

    def __call__(self, chunk: int, rows: int) -> Ids:
        self.asked.append(chunk)
        first = chunk * written.CHUNK_ROWS
        return self.ids[first : first + rows]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "CHUNK_ROWS", 4)


def rows_of(count: int) -> Ids:
    ids = np.random.default_rng(0).integers(0, 256, (count, SEQUENCE + 1))
    ids[:, 0] = 256
    return ids


def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def test_rows_are_those_that_were_written_with_their_documents(tmp_path: Path) -> None:
    ids = rows_of(10)
    ids[7, 3] = 256
    write_rows_to(tmp_path, 10, Writers(ids))
    found = WrittenText(tmp_path, tokenizer())
    assert found.num_samples == 10
    for number in range(10):
        tokens, targets, starts = found.row(number)
        assert tokens.tolist() == ids[number, :-1].tolist()
        assert targets.tolist() == ids[number, 1:].tolist()
        assert starts.tolist() == ([3] if number == 7 else [])


def test_what_follows_the_end_of_a_document_is_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, closes = rows_of(1), tokenizer()
    ids[0, 2:4] = [65, 256]
    monkeypatch.setattr(closes, "closing_id", 65)
    write_rows_to(tmp_path, 1, Writers(ids))
    _, targets, starts = WrittenText(tmp_path, closes).row(0)
    assert targets.tolist() == [ids[0, 1], 65, IGNORED, *ids[0, 4:]]
    assert starts.tolist() == [3]


def test_writing_that_was_killed_goes_on_with_the_next_file(tmp_path: Path) -> None:
    ids = rows_of(10)
    whole = Writers(ids)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    write_rows_to(tmp_path / "whole", 10, whole)

    class Killed(Writers):
        def __call__(self, chunk: int, rows: int) -> Ids:
            if chunk == 2:
                raise KeyboardInterrupt
            return super().__call__(chunk, rows)

    with pytest.raises(KeyboardInterrupt):
        write_rows_to(tmp_path / "killed", 10, Killed(ids))
    with pytest.raises(DataError, match=r"written\.json"):
        WrittenText(tmp_path / "killed", tokenizer())
    again = Writers(ids)
    write_rows_to(tmp_path / "killed", 10, again)
    assert (whole.asked, again.asked) == ([0, 1, 2], [2])
    digests = {WrittenText(tmp_path / name, tokenizer()).digest for name in ("whole", "killed")}
    assert len(digests) == 1


@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_files_that_are_damaged_are_refused(tmp_path: Path, harm: str) -> None:
    write_rows_to(tmp_path, 10, Writers(rows_of(10)))
    file = tmp_path / "rows-00001.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content[:-8] if harm == "cut" else content)
    if harm == "gone":
        file.unlink()
    with pytest.raises(DataError) as refusal:
        WrittenText(tmp_path, tokenizer())
    assert "delete the folder" in (refusal.value.do or "")
