"""JSON lines of a run that may have died at any byte."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import CheckpointError, StorageError
from scrimp.report import read_jsonl
from scrimp.report.records import scan_jsonl

RECORDS = [{"step": 1, "loss": 8.3}, {"step": 2, "loss": None}, {"step": 3, "text": "a\nb\u2028\U0001f600"}]


def encode(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def test_a_missing_file_is_empty(tmp_path):
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("cut", range(len(encode(RECORDS)) + 1))
def test_a_file_cut_at_any_byte_gives_the_lines_before_the_cut(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    data = encode(RECORDS)[:cut]
    path.write_bytes(data)
    read = read_jsonl(path)
    assert read == RECORDS[: len(read)]
    assert len(read) >= data.count(b"\n")


def test_a_tail_of_nul_bytes_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode(RECORDS) + b"\0" * 4096)
    assert read_jsonl(path) == RECORDS


@pytest.mark.parametrize("bad", [b"{torn", b"[1, 2]", b"7", b"\xff\xfe{}", b"[" * 200_000])
def test_a_damaged_line_in_the_middle_is_refused_by_number(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode(RECORDS[:1]) + bad + b"\n" + encode(RECORDS[1:]))
    with pytest.raises(CheckpointError, match="line 2"):
        read_jsonl(path)
    assert [number for number, record in scan_jsonl(path) if record is None] == [2]
    assert [record for _, record in scan_jsonl(path) if record is not None] == RECORDS


def test_non_finite_numbers_are_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"loss": NaN, "lr": -Infinity}\n')
    assert read_jsonl(path) == [{"loss": None, "lr": None}]


def test_a_file_that_cannot_be_read_names_its_path(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        read_jsonl(tmp_path / "metrics.jsonl")


@given(
    st.lists(
        st.dictionaries(st.text(), st.none() | st.integers(-(10**18), 10**18) | st.text() | st.booleans())
    )
)
def test_what_json_writes_is_read_back(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("records") / "events.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_jsonl(path) == records
