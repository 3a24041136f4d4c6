"""A corpus opens ready or prepared, and a damaged shard is named and never trained on."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import scrimp.data.corpus
from scrimp.data import CorpusSpec, Loader, load_tokenizer, open_corpus, prepare, verify
from scrimp.data.corpus_manifest import read_manifest
from scrimp.data.shards import Shard, ShardWriter
from scrimp.errors import DataError, StorageError


def ready(folder: Path, **settings: str) -> CorpusSpec:
    return CorpusSpec(source=str(folder), **settings)


def test_a_source_is_prepared_once_into_the_cache(tmp_path: Path, text_file: Path) -> None:
    cache = tmp_path / "cache"
    spec = CorpusSpec(source=str(text_file), bpe_vocab_size=300)
    first = open_corpus(spec, cache=cache, progress=False)
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    second = open_corpus(spec, cache=cache, progress=False)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == made
    assert first.digest == second.digest
    assert first.tokenizer.vocab_size == 300
    assert first.folder.parent == cache
    other = open_corpus(CorpusSpec(source=str(text_file), tokenizer="bytes"), cache=cache, progress=False)
    assert other.digest != first.digest
    text_file.write_text(text_file.read_text() + "\n\nmore\n")
    assert open_corpus(spec, cache=cache, progress=False).folder != first.folder


def test_the_default_cache_is_the_users(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    spec = CorpusSpec(source=str(text_file), tokenizer="bytes")
    assert open_corpus(spec, cache=None, progress=False).folder.parent == tmp_path / "users" / "scrimp"
    monkeypatch.setenv("XDG_CACHE_HOME", str(text_file))
    with pytest.raises(StorageError, match=r"cannot create the folder|cannot read"):
        open_corpus(spec, cache=None, progress=False)


def test_a_damaged_cache_is_prepared_again(tmp_path: Path, text_file: Path) -> None:
    spec = CorpusSpec(source=str(text_file), tokenizer="bytes")
    first = open_corpus(spec, cache=tmp_path / "cache", progress=False)
    shard = next(first.folder.glob("train-*.tokens"))
    for damage in (b"", shard.read_bytes()[:-1], shard.read_bytes()[:1000] + b"\0" * 900):
        shard.write_bytes(damage)
        assert open_corpus(spec, cache=tmp_path / "cache", progress=False).digest == first.digest
        assert verify(first.folder, progress=False).ok
    (first.folder / "tokenizer" / "tokenizer.json").unlink()
    assert open_corpus(spec, cache=tmp_path / "cache", progress=False).digest == first.digest


def test_ready_shards_open_as_they_are(prepared: Path, tmp_path: Path) -> None:
    corpus = open_corpus(ready(prepared), cache=tmp_path / "unused", progress=False)
    assert not (tmp_path / "unused").exists()
    assert corpus.folder == prepared
    assert corpus.tokenizer.digest == load_tokenizer("bytes").digest
    assert "every checksum matches" in corpus.checked
    open_corpus(ready(prepared, tokenizer="bytes"), cache=None)
    open_corpus(ready(prepared, tokenizer=str(prepared / "tokenizer")), cache=None)
    with pytest.raises(DataError, match="made with another tokenizer"):
        open_corpus(ready(prepared, tokenizer="bpe"), cache=None)
    with pytest.raises(DataError, match="there is no tokenizer"):
        open_corpus(ready(prepared, tokenizer="typo"), cache=None)


def damage(path: Path, kind: str) -> None:
    raw = bytearray(path.read_bytes())
    match kind:
        case "truncated":
            path.write_bytes(raw[: len(raw) // 2])
        case "altered":
            raw[1000] ^= 1
            path.write_bytes(raw)
        case "removed":
            path.unlink()
        case "swapped":
            whole = Shard(path)  # a valid shard of other text, and of the same size
            starts = [*whole.document_starts(0, whole.header.num_tokens), whole.header.num_tokens]
            writer = ShardWriter(path, np.dtype("<u2"))
            for start, stop in itertools.pairwise(starts):
                writer.add(whole.tokens(start, stop)[::-1], text_bytes=int(stop - start) - 1, document_hash=1)
            writer.finish()
            assert path.stat().st_size == len(raw)
        case "header":
            raw[20] ^= 1
            path.write_bytes(raw)


@pytest.mark.parametrize("kind", ["truncated", "altered", "removed", "swapped", "header"])
def test_a_damaged_shard_is_named_when_the_corpus_is_opened_and_by_verify(prepared: Path, kind: str) -> None:
    assert verify(prepared, progress=False).ok
    damage(prepared / "train-00002.tokens", kind)
    with pytest.raises(DataError, match=r"train-00002\.tokens is damaged"):
        open_corpus(ready(prepared), cache=None)
    report = verify(prepared, progress=False)
    assert [found.name for found in report.damaged] == ["train-00002.tokens"]
    assert "train-00002.tokens" in str(report)


def test_verify_names_every_damaged_shard(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(prepared / "train-00001.tokens", "truncated")
    damage(prepared / "train-00003.tokens", "altered")
    damage(prepared / "held-out-00000.tokens", "header")
    report = verify(prepared)
    assert {found.name for found in report.damaged} == {
        "train-00001.tokens", "train-00003.tokens", "held-out-00000.tokens",
    }  # fmt: skip
    assert not report.ok
    assert "3 damaged" in str(report)


def test_in_a_corpus_too_large_to_check_on_opening_damage_stops_the_training(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrimp.data.corpus, "CHECKED_ON_OPEN", 0)
    damage(prepared / "train-00003.tokens", "altered")
    corpus = open_corpus(ready(prepared), cache=None)
    assert "as it is first read" in corpus.checked
    with Loader(corpus.train, sequence=64, sequences_per_step=4, micro_batch=4, seed=0) as loader:
        steps = iter(lambda: next(loader), None)
        with pytest.raises(DataError, match=r"train-00003\.tokens is damaged"):
            list(itertools.islice(steps, loader.num_samples))
    damage(prepared / "train-00001.tokens", "truncated")
    with pytest.raises(DataError, match=r"train-00001\.tokens is damaged"):
        open_corpus(ready(prepared), cache=None)


def test_an_altered_tokenizer_is_noticed(prepared: Path) -> None:
    path = prepared / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["Ā"], content["model"]["vocab"]["ā"] = 1, 0
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="not the one that the shards were made with"):
        open_corpus(ready(prepared), cache=None)
    assert [found.name for found in verify(prepared, progress=False).damaged] == ["tokenizer"]


def test_an_interrupted_or_damaged_manifest_is_refused(prepared: Path, tmp_path: Path) -> None:
    path = prepared / "corpus.json"
    raw = path.read_text()
    replace(read_manifest(prepared), complete=False).write(prepared)
    with pytest.raises(DataError, match=r"not complete.*scrimp prepare"):
        open_corpus(ready(prepared), cache=None)
    assert not verify(prepared, progress=False).ok
    for broken in ("", "{}", "[]", raw[:100], raw.replace('"scrimp_corpus": 1', '"scrimp_corpus": 2')):
        path.write_text(broken)
        with pytest.raises(DataError, match=r"corpus\.json (is not JSON|has the wrong|has another format)"):
            open_corpus(ready(prepared), cache=None)
    with pytest.raises(DataError, match="not a folder of token shards"):
        verify(tmp_path / "nowhere", progress=False)


def test_two_processes_preparing_the_same_take_turns(tmp_path: Path, text_file: Path) -> None:
    import os

    spec = CorpusSpec(source=str(text_file), tokenizer="bytes")
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                open_corpus(spec, cache=tmp_path / "cache", progress=False)
                os._exit(0)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    corpus = open_corpus(spec, cache=tmp_path / "cache", progress=False)
    assert verify(corpus.folder, progress=False).ok
    again = prepare(spec, tmp_path / "alone", progress=False)
    assert open_corpus(ready(again), cache=None).digest == corpus.digest


def test_the_first_tokens_of_a_stream_are_a_stream(tmp_path: Path, text_file: Path) -> None:
    spec = CorpusSpec(source=str(text_file), tokenizer="bytes")
    whole = open_corpus(spec, cache=tmp_path, progress=False).train
    few = whole.first(100)
    assert few.num_tokens == 100
    np.testing.assert_array_equal(few.read(0, 100), whole.read(0, 100))
    assert few.num_documents == len(whole.document_starts(0, 100))
    assert 0 < few.text_bytes < whole.text_bytes
    with pytest.raises(IndexError):
        few.read(0, 101)
    assert whole.first(10**9).num_tokens == whole.num_tokens
    with Loader(few, sequence=33, sequences_per_step=3, micro_batch=3, seed=0) as loader:
        assert loader.num_samples == 3
        seen = {tuple(row) for _ in range(4) for row in next(loader)[0].tokens_BT.tolist()}
    assert len(seen) == 3
