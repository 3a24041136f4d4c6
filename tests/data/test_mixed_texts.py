"""Sources of a mixture that overlap: what one holds out no other trains on, and one BPE learns from all of them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from scrimp.data import Corpus, CorpusSpec, Mixture, TokenStream, open_mixture
from scrimp.data.mixed_texts import mixed_texts
from scrimp.errors import DataError

WORDS = 60
"""Words of a document: so few 13-grams that all of them are compared."""


def document(seed: int, letters: str) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, k=6)) for _ in range(WORDS)]


def write(path: Path, documents: list[list[str]]) -> str:
    path.write_text("".join(json.dumps({"text": " ".join(words)}) + "\n" for words in documents))
    return str(path)


def opened(folder: Path, names: list[str], shares: tuple[int, ...], **settings: object) -> Mixture:
    spec = {"tokenizer": "bytes", "held_out": 0.1} | settings
    specs = [CorpusSpec(source=name, **spec) for name in names]
    return open_mixture(specs, shares, cache=folder / "cache", progress=False)


def texts_of(stream: TokenStream, corpus: Corpus) -> list[str]:
    starts = stream.document_starts(0, stream.num_tokens).tolist()
    ends = [*starts[1:], stream.num_tokens]
    ids = [stream.read(start, end).tolist() for start, end in zip(starts, ends, strict=True)]
    return [corpus.tokenizer.decode(one) for one in ids]


def grams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[n : n + 13]) for n in range(len(words) - 12)}


def share_of(held_out: str, trained: str) -> float:
    own = grams(held_out)
    return len(own & grams(trained)) / len(own)


@pytest.fixture
def overlapping(tmp_path: Path) -> list[str]:
    """Two sources of 60 documents, of which 30 stand in both: some as they are, some with words changed at the end."""
    first = [document(seed, "abcdefgh") for seed in range(60)]
    second = [document(seed, "stuvwxyz") for seed in range(100, 130)]
    for number, words in enumerate(first[:30]):
        changed = number % 3 * 4  # 0, 4 or 8 words: all, 44 or 40 of 48 13-grams stand in both
        second.append([*words[: WORDS - changed], *document(number + 500, "stuvwxyz")[:changed]])
    return [write(tmp_path / "first.jsonl", first), write(tmp_path / "second.jsonl", second)]


def test_nothing_like_a_held_out_document_is_trained_on(tmp_path: Path, overlapping: list[str]) -> None:
    mixture = opened(tmp_path, overlapping, (1, 1))
    held_out = [text for part in mixture.parts for text in texts_of(part.held_out, part)]
    trained = [text for part in mixture.parts for text in texts_of(part.train, part)]
    assert len(held_out) >= 8
    assert max(share_of(one, other) for one in held_out for other in trained) < 0.8
    # Each by itself, it would be.
    alone = mixed_texts([CorpusSpec(source=name, held_out=0.1) for name in overlapping], progress=False)
    kept = [
        [one.text for one in text.documents(text.alone, "reading", held_out=False)] for text in alone.values()
    ]
    own = [
        [one.text for one in text.documents(text.alone, "reading", held_out=True)] for text in alone.values()
    ]
    found = [
        other
        for mine, theirs in ((0, 1), (1, 0))
        for other in kept[theirs]
        if any(share_of(one, other) >= 0.8 for one in own[mine])
    ]
    assert len(found) >= 3
    # And only that is left out.
    assert len(trained) == sum(map(len, kept)) - len(found)
    assert sum(sum(part.manifest.skipped.values()) for part in mixture.parts) == len(found)


def test_one_bpe_learns_from_all_and_weights_share_their_shards(
    tmp_path: Path, overlapping: list[str]
) -> None:
    mixture = opened(tmp_path, overlapping, (7, 3), tokenizer="bpe", bpe_vocab_size=600)
    entries = json.loads(mixture.tokenizer.files()["tokenizer.json"])["model"]["vocab"]
    pieces = [piece for piece in entries if len(piece) > 2 and piece.isalpha()]
    assert any(set(piece) <= set("abcdefgh") for piece in pieces)
    assert any(set(piece) <= set("stuvwxyz") for piece in pieces)
    folders = sorted((tmp_path / "cache").iterdir())
    assert len(folders) == 2
    other = opened(tmp_path, overlapping[::-1], (1, 5), tokenizer="bpe", bpe_vocab_size=600)
    assert sorted((tmp_path / "cache").iterdir()) == folders
    assert other.tokenizer.digest == mixture.tokenizer.digest
    assert [part.folder for part in other.parts] == [part.folder for part in mixture.parts[::-1]]
    # What is lost is made again as it was.
    shutil.rmtree(folders[0])
    (folders[1] / "train-00000.tokens").unlink()
    again = opened(tmp_path, overlapping, (7, 3), tokenizer="bpe", bpe_vocab_size=600)
    assert again.digest == mixture.digest


def test_sources_that_decide_nothing_of_each_other_share_shards_with_runs_on_one(
    tmp_path: Path, overlapping: list[str]
) -> None:
    """A tokenizer that is there, and nothing held out."""
    opened(tmp_path, overlapping, (1, 1), held_out=0.0)
    third = write(tmp_path / "third.jsonl", [document(seed, "ijklmnop") for seed in range(200, 220)])
    mixture = opened(tmp_path, [overlapping[0], third], (1, 1), held_out=0.0)
    assert len(list((tmp_path / "cache").iterdir())) == 3
    assert "mixture" not in mixture.parts[0].manifest.settings


def test_a_source_of_which_nothing_is_left_is_named(tmp_path: Path, overlapping: list[str]) -> None:
    mixture = opened(tmp_path, overlapping, (1, 1), held_out=0.3)
    held_out = [text.split() for text in texts_of(mixture.parts[0].held_out, mixture.parts[0])]
    own = write(tmp_path / "own.jsonl", held_out)
    with pytest.raises(DataError, match=r"own\.jsonl: nothing is left to train on"):
        opened(tmp_path, [overlapping[0], own], (1, 1), held_out=0.3)
