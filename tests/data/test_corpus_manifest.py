"""Every figure of a prepared corpus is held to the digest, the shards and the tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scrimp.data import CorpusSpec, open_corpus, prepare, verify
from scrimp.data.corpus_manifest import corpus_digest, read_manifest
from scrimp.errors import DataError


def open_ready(folder: Path) -> Any:
    return open_corpus(CorpusSpec(source=str(folder)), cache=None)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a JSON file stand."""
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case None:
            return 1
        case []:
            return ["0"]
        case str():
            return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return {"rows without text": 1}


def altered(content: dict[str, Any], path: tuple[Any, ...]) -> str:
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    tail = {"document": "0", "at": 1}
    inner[path[-1]] = tail if path[-1] == "tail" else other(inner[path[-1]])
    return json.dumps(copy)


def without_digest(folder: Path) -> dict[str, Any]:
    """Rewrite corpus.json as versions without a digest did."""
    content = json.loads((folder / "corpus.json").read_text())
    del content["digest"]
    (folder / "corpus.json").write_text(json.dumps(content, indent=2) + "\n")
    return content


@pytest.mark.slow
def test_every_altered_value_is_noticed_and_put_right(prepared: Path, text_file: Path) -> None:
    path = prepared / "corpus.json"
    raw = path.read_text()
    content = json.loads(raw)
    found = list(leaves(content))
    assert len(found) > 40
    for leaf in found:
        path.write_text(altered(content, leaf))
        with pytest.raises(DataError, match=r"was altered|another format|cannot be read|not in order"):
            open_ready(prepared)
        if leaf == ("scrimp_corpus",) or leaf[-1] == "name":
            continue
        report = verify(prepared, progress=False)
        assert not report.ok
        assert "corpus.json: altered: its figures do not match its digest" in str(report)
    spec = CorpusSpec(source=str(text_file), tokenizer="bytes", held_out=0.1)
    shards = {path: path.stat().st_ino for path in prepared.glob("*.tokens")}
    for leaf in found:
        if leaf[0] in ("settings", "scrimp_corpus") or leaf[-1] == "name":
            continue
        path.write_text(altered(content, leaf))
        prepare(spec, prepared, shard_tokens=10_000, progress=False)
        assert path.read_text() == raw
    assert {path: path.stat().st_ino for path in prepared.glob("*.tokens")} == shards


FIGURES = [
    ("tokenizer", "vocab_size"),
    ("tokenizer", "delimiter_id"),
    ("tokenizer", "closing_id"),
    *((("splits", "train", 1, key)) for key in ("num_tokens", "num_documents", "text_bytes", "file_bytes", "sha256")),
]  # fmt: skip


def test_advice_for_altered_settings_and_names_works(prepared: Path, text_file: Path, tmp_path: Path) -> None:
    path = prepared / "corpus.json"
    raw = path.read_text()
    content = json.loads(raw)
    spec = CorpusSpec(source=str(text_file), tokenizer="bytes", held_out=0.1)
    for leaf in leaves(content):
        if leaf[0] not in ("settings", "scrimp_corpus") and leaf[-1] != "name":
            continue
        path.write_text(altered(content, leaf))
        with pytest.raises(DataError) as caught:
            open_ready(prepared)
        assert caught.value.do is not None
        if leaf[0] == "settings":
            assert "if it refuses the folder" in caught.value.do
            assert caught.value.do in str(verify(prepared, progress=False))
        if leaf == ("settings", "source"):
            prepare(spec, prepared, shard_tokens=10_000, progress=False)
            assert path.read_text() == raw
            continue
        assert "prepare the corpus again" in caught.value.do
        with pytest.raises(DataError):
            prepare(spec, prepared, shard_tokens=10_000, progress=False)
    anew = prepare(spec, tmp_path / "anew", shard_tokens=10_000, progress=False)
    assert (anew / "corpus.json").read_text() == raw


@pytest.mark.parametrize("leaf", FIGURES, ids=lambda leaf: leaf[-1])
def test_figures_are_held_to_shards_and_tokenizer_where_there_is_no_digest(
    prepared: Path, leaf: tuple[Any, ...]
) -> None:
    content = without_digest(prepared)
    (prepared / "corpus.json").write_text(altered(content, leaf))
    with pytest.raises(DataError, match=r"disagree.*scrimp prepare|a shard of another corpus"):
        open_ready(prepared)
    assert not verify(prepared, progress=False).ok
    assert "digest" not in json.loads((prepared / "corpus.json").read_text())


def test_a_corpus_of_an_earlier_version_opens_and_gets_a_digest(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, digest = (prepared / "corpus.json").read_text(), open_ready(prepared).digest
    content = without_digest(prepared)
    monkeypatch.setattr("scrimp.data.corpus.CHECKED_ON_OPEN", 0)
    corpus = open_ready(prepared)
    assert "every checksum matches" in corpus.checked  # once, whatever its size
    assert (prepared / "corpus.json").read_text() == raw
    assert corpus.digest == digest
    assert "as it is first read" in open_ready(prepared).checked
    # a run of an earlier version carries its digest
    shards = [
        [split, entry["sha256"]] for split in ("train", "held-out") for entry in content["splits"][split]
    ]
    earlier = hashlib.sha256(json.dumps([content["tokenizer"]["digest"], shards]).encode()).hexdigest()
    assert corpus.is_that_of(earlier)
    assert corpus.is_that_of(digest)
    assert not corpus.is_that_of(earlier[::-1])


def test_a_damaged_corpus_of_an_earlier_version_gets_no_digest(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_digest(prepared)
    monkeypatch.setattr("scrimp.data.corpus.CHECKED_ON_OPEN", 0)
    shard = prepared / "train-00001.tokens"
    shard.write_bytes(shard.read_bytes()[:1000] + b"\xee" + shard.read_bytes()[1001:])
    with pytest.raises(DataError, match=r"train-00001\.tokens is damaged"):
        open_ready(prepared)
    assert read_manifest(prepared).written_digest is None


def test_the_digest_of_a_run_covers_the_figures(prepared: Path) -> None:
    """Also where the file's own digest was made anew."""
    digest = open_ready(prepared).digest
    manifest = read_manifest(prepared)
    for key in ("num_tokens", "num_documents", "text_bytes", "file_bytes", "sha256"):
        first, *others = manifest.splits["train"]
        changed = replace(first, **{key: other(getattr(first, key))})
        assert (
            corpus_digest(replace(manifest, splits=manifest.splits | {"train": [changed, *others]})) != digest
        )
    for key in ("vocab_size", "delimiter_id", "closing_id"):
        changed = replace(manifest.tokenizer, **{key: other(getattr(manifest.tokenizer, key))})
        assert corpus_digest(replace(manifest, tokenizer=changed)) != digest
    # but not where the text was found
    moved = replace(manifest, settings=manifest.settings | {"source": "elsewhere"})
    assert corpus_digest(moved) == digest
