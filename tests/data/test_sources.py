"""Every kind of source gives its texts, and everything that is not text is refused by name."""

from __future__ import annotations

import gzip
import io
import json
import os
import sysconfig
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from scrimp.data.documents import documents
from scrimp.data.find_source import open_source
from scrimp.data.streams import BLOCK, Meter
from scrimp.errors import DataError, StorageError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def texts(source: str | Path, column: str = "text") -> list[str]:
    return list(open_source(str(source), column).texts(Meter()))


def zst(content: bytes, *, write_checksum: bool = False) -> bytes:
    return zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: int(write_checksum)})


def test_stdlib_is_the_library_without_tests_and_installed_packages() -> None:
    source = open_source("stdlib", "text")
    names = {file.name for file in source.files}
    root = Path(sysconfig.get_path("stdlib"))
    assert {"json/decoder.py", "argparse.py"} <= names
    assert not any(
        part in {"site-packages", "test", "tests", "idlelib"} for name in names for part in name.split("/")
    )
    assert (root / "argparse.py").read_text() in set(source.texts(Meter()))
    assert 5e6 < source.num_bytes < 50e6
    assert sum(1 for _ in documents(source.texts(Meter()))) > 300


def test_a_package_of_stdlib_is_its_files_alone() -> None:
    source, root = open_source("stdlib:email", "text"), Path(sysconfig.get_path("stdlib"))
    assert "".join(source.texts(Meter())) == "".join(
        (root / "email" / file.name).read_text() for file in source.files
    )
    assert {"message.py", "mime/text.py"} <= {file.name for file in source.files}
    assert source.fingerprint() != open_source("stdlib:xml", "text").fingerprint()
    with pytest.raises(DataError, match="has no package emails"):
        open_source("stdlib:emails", "text")
    with pytest.raises(DataError, match="no file or folder"):
        open_source("stdlib:../email", "text")


@pytest.mark.slow
def test_a_text_file_comes_back_whole_whatever_its_compression(tmp_path: Path, text_file: Path) -> None:
    content = text_file.read_bytes() * 40
    files = {
        "a.txt": content,
        "a.txt.gz": gzip.compress(content),
        "two.txt.gz": gzip.compress(content[:1000]) + gzip.compress(content[1000:]),
        "a.txt.zst": zst(content),
        "two.txt.zst": zst(content[:1000]) + zst(content[1000:]),
    }
    pieces = {}
    for name, stored in files.items():
        (tmp_path / name).write_bytes(stored)
        pieces[name] = texts(tmp_path / name)
        assert "".join(pieces[name]) == content.decode()
    assert len({tuple(value) for value in pieces.values()}) == 1  # the same documents, too


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert texts(tmp_path / "a.txt") == ["hello"]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b/1.txt", "a/2.txt", "a/10.txt", "c.md", ".hidden/x.txt", ".secret"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"text": "row 1"}\n\n{"text": null}\n{"text": "row 2"}\n')
    (tmp_path / "data.json").write_text('["not JSONL, just a text"]')
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"z"))
    assert texts(tmp_path) == [
        "a/10.txt", "a/2.txt", "b/1.txt", "c.md", '["not JSONL, just a text"]', "row 1", "row 2", "z",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json"])
def test_jsonl_gives_its_text_column(tmp_path: Path, name: str) -> None:
    rows = [{"body": f"text {number} é\n", "id": number} for number in range(100)]
    content = "\n".join(json.dumps(row) for row in rows).encode()
    pack = {".gz": gzip.compress, ".zst": zst}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(content))
    assert texts(tmp_path / name, "body") == [row["body"] for row in rows]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_gives_its_text_column(tmp_path: Path, kind: pa.DataType) -> None:
    expected = [f"row {number}" for number in range(1000)]
    column = pa.array([*expected[:500], None, *expected[500:]]).cast(kind)
    pq.write_table(
        pa.table({"body": column, "n": list(range(1001))}), tmp_path / "a.parquet", row_group_size=300
    )
    source = open_source(str(tmp_path / "a.parquet"), "body")
    meter = Meter()
    assert list(source.texts(meter)) == expected
    assert source.skipped == {"rows without text": 1}
    assert meter.bytes == source.num_bytes


def test_saved_datasets_are_read_from_disk(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(600)], "n": list(range(600))})
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": table.select([5]), "train": table.select(range(3))}).save_to_disk(
        str(tmp_path / "two")
    )
    assert texts(tmp_path / "one") == table["text"][:]
    assert texts(tmp_path / "two") == ["row 0", "row 1", "row 2"]
    with pytest.raises(DataError, match=r"no column 'body'.*n, text"):
        texts(tmp_path / "one", "body")
    first, second = (open_source(str(tmp_path / name), "text").fingerprint() for name in ("one", "two"))
    assert first != second
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"broken")
    with pytest.raises(DataError, match="cannot be loaded as a saved data set"):
        texts(tmp_path / "one")


def test_the_hub_out_of_reach_is_a_data_error_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    began = time.monotonic()
    with pytest.raises(DataError, match="hf:nobody/nothing cannot be read from the Hugging Face hub"):
        texts("hf:nobody/nothing")
    assert time.monotonic() - began < 20
    for name in ("hf:", "hf:a/b/c", "hf:/b", "hf::config"):
        with pytest.raises(DataError, match="not the name of a data set"):
            open_source(name, "text")


def test_hub_rows_are_streamed_at_one_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    asked = []

    class Info:
        sha = "abc123"

    def load(
        name: str, config: str | None, *, split: str, streaming: bool, revision: str
    ) -> list[dict[str, object]]:
        asked.append((name, config, split, streaming, revision))
        return [{"text": "a"}, {"text": None}, {"text": "b"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, timeout: Info)
    assert texts("hf:owner/name:config") == ["a", "b"]
    assert asked == [("owner/name", "config", "train", True, "abc123")]
    fingerprints = {open_source(name, "text").fingerprint() for name in ("hf:a/b:en", "hf:a/b", "hf:a/c")}
    assert len(fingerprints) == 3
    assert all(fingerprint.endswith("@abc123") for fingerprint in fingerprints)
    with pytest.raises(DataError, match="no column 'body'"):
        texts("hf:owner/name", "body")


def refused(path: Path, content: bytes, match: str, column: str = "text") -> None:
    path.write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        texts(path, column)
    assert path.name in str(caught.value)


def test_files_that_are_not_text_are_named_with_the_byte_offset(tmp_path: Path) -> None:
    refused(tmp_path / "a.txt", b"abc\0def", "NUL byte at byte offset 3")
    refused(tmp_path / "a.txt", b"abc\xff", "0xff at byte offset 3")
    refused(tmp_path / "a.txt", b"\xff\xfea\0", "0xff at byte offset 0|NUL")
    refused(tmp_path / "a.txt", b"ab\xe6\x95", "0xe6 at byte offset 2")  # cut in the middle of a letter
    refused(tmp_path / "a.txt", b"x" * BLOCK + b"\0", f"byte offset {BLOCK:,}")
    refused(tmp_path / "a.txt", b"x" * (BLOCK - 1) + b"\xe6\x95" + b"x", f"0xe6 at byte offset {BLOCK - 1:,}")
    refused(tmp_path / "a.txt", b"x" * BLOCK + b"\xff", f"byte offset {BLOCK:,}")
    refused(tmp_path / "a.bin", bytes(range(256)), "NUL byte at byte offset 0")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "fine.txt").write_text("fine")
    (tmp_path / "folder" / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"image\.png is not UTF-8 text.*0x89 at byte offset 0"):
        texts(tmp_path / "folder")


def test_letters_across_block_borders_are_kept(tmp_path: Path) -> None:
    for shift in range(4):
        text = "x" * (BLOCK - shift) + "數🙂é" * 5
        (tmp_path / "a.txt").write_text(text)
        assert "".join(texts(tmp_path / "a.txt")) == text


def test_archives_that_end_early_or_are_damaged_are_refused(tmp_path: Path) -> None:
    content = os.urandom(300_000).hex().encode()
    for name, packed in (
        ("a.txt.gz", gzip.compress(content)),
        ("a.txt.zst", zst(content, write_checksum=True)),
    ):
        refused(tmp_path / name, packed[: len(packed) // 2], "is damaged")
        refused(tmp_path / name, packed[:-1], "is damaged")
        refused(tmp_path / name, b"not an archive at all", "is damaged")
        altered = bytearray(packed)
        altered[len(packed) // 2] ^= 0xFF
        refused(tmp_path / name, bytes(altered), "is damaged|is not UTF-8")


def test_bad_jsonl_is_named_with_its_line(tmp_path: Path) -> None:
    good = b'{"text": "a", "id": 1}\n'
    refused(tmp_path / "a.jsonl", good + b'{"text": \n', "line 2 is not JSON")
    refused(tmp_path / "a.jsonl", good + b"[1, 2]\n", "line 2 has the wrong type - got a list of length 2")
    refused(tmp_path / "a.jsonl", good, "no column 'body'.*the columns id, text", "body")
    refused(tmp_path / "a.jsonl", good + b'{"text": 5}', "column 'text' does not hold text.*int")
    refused(tmp_path / "a.jsonl", b'{"text": "\xff"}\n', "line 1 is not JSON")
    refused(tmp_path / "a.json", b'[{"text": "a"}]', "line 1 has the wrong type")
    nested = b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    refused(tmp_path / "a.jsonl", good + nested, "line 2 cannot be read|line 2 is not JSON")


def test_only_the_text_column_of_jsonl_must_be_sound(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"text": "a", "score": float("nan")},
        {"text": 'NaN "Infinity" \\', "score": [float("-inf"), {"NaN": float("inf")}]},
        {"\x00\x1b[2J": 1, "text": "\x1b", "NaN": float("nan")},
        {"text": "d", "score": 10**200},
    ]
    lines = [*map(json.dumps, rows), '{"text": "e", "score": 1e999, "\\u0007": -Infinity}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert texts(tmp_path / "a.jsonl") == ["a", rows[1]["text"], "\x1b", "d", "e"]
    for constant in (b"NaN", b"-Infinity"):
        line = b'{"text": ' + constant + b"}"
        refused(tmp_path / "a.jsonl", line, "line 1: column 'text' does not hold text.*float")
    refused(tmp_path / "a.jsonl", b'{"x": NaN, "y": nan}', "line 1 is not JSON.*byte 18")
    refused(tmp_path / "a.jsonl", b'{"x": NaNNaN, "text": "a"}', "line 1 is not JSON")
    refused(tmp_path / "a.jsonl", b'{"text": "' + b'\\"' * 10**6, "line 1 is not JSON")  # in linear time
    (tmp_path / "a.jsonl").write_bytes(b'{"\\u001b[2J": 1}')
    with pytest.raises(DataError, match="no column 'text'") as caught:
        texts(tmp_path / "a.jsonl")
    assert "\x1b" not in str(caught.value)


@given(row=st.dictionaries(st.text(max_size=4), JSON, max_size=4), text=st.text())
def test_rows_that_python_writes_give_their_text(row: dict[str, object], text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_text(json.dumps(row | {"text": text}) + "\n")
        assert texts(path) == [text]


def test_a_lone_surrogate_is_named_with_file_and_line(tmp_path: Path) -> None:
    good = b'{"text": "a \\ud83d\\ude00 b", "id": 18446744073709551616}\n'
    for bad in (b'"a \\ud800 b"', b'"a \\udc00"', b'"\xed\xa0\x80"', b'"\\ud800\\u0041"', b'"\\ud800"'):
        line = b'{"id": 1, "text": ' + bad + b"}\n"
        refused(tmp_path / "a.jsonl", good + line, r"a\.jsonl, line 2 is not valid Unicode.*a lone surrogate")
    (tmp_path / "a.jsonl").write_bytes(good)
    assert texts(tmp_path / "a.jsonl") == ["a 😀 b"]


def test_bad_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a" * 50] * 2000, "n": [1] * 2000})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="none", use_dictionary=False)
    content = sink.getvalue()
    refused(path, content, "no column 'body'.*the columns n, text", "body")
    refused(path, content, "column 'n' does not hold text.*int64", "n")
    refused(path, content[: len(content) // 2], "cannot be read as Parquet")
    refused(path, b"no parquet", "cannot be read as Parquet")
    refused(path, content[:100] + b"\xff" * 60 + content[160:], "cannot be read as Parquet")


def test_paths_that_are_not_there_empty_or_not_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hf:OWNER/NAME") as caught:
        open_source("owner/name", "text")
    assert "hf:owner/name" in str(caught.value)
    with pytest.raises(DataError, match="there is no file or folder"):
        open_source(str(tmp_path / "none.txt"), "text")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="is empty"):
        open_source(str(tmp_path / "empty.txt"), "text")
    with pytest.raises(DataError, match=r"all files in .* are empty"):
        open_source(str(tmp_path), "text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        open_source(str(tmp_path / "folder"), "text")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a file"):
        open_source(str(tmp_path / "pipe"), "text")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_a_storage_error(text_file: Path) -> None:
    text_file.chmod(0)
    with pytest.raises(StorageError, match="Permission denied"):
        texts(text_file)


def test_fingerprints_follow_the_content(tmp_path: Path, text_file: Path) -> None:
    first = open_source(str(text_file), "text").fingerprint()
    content = text_file.read_bytes()
    text_file.write_bytes(content)
    os.utime(text_file, (1, 1))
    assert open_source(str(text_file), "text").fingerprint() == first
    text_file.write_bytes(b"X" + content[1:])
    assert open_source(str(text_file), "text").fingerprint() != first


def test_the_copy_task_is_the_same_digits_twice_and_never_the_same_text() -> None:
    found = texts("copy")
    assert found == texts("copy")
    halves = [text.split("=") for text in found]
    assert all(first == second and len(first) == 8 for first, second in halves)
    assert len(set(found)) == len(found) == 50_000
    digits = "".join(first for first, _ in halves)
    assert all(abs(digits.count(digit) / len(digits) - 1 / 16) < 0.002 for digit in "0123456789abcdef")
    with pytest.raises(DataError):
        open_source("copy", "messages", conversations=True)
