"""What is held out is bounded, stated, and like nothing that is trained on."""

from __future__ import annotations

import functools
import itertools
import json
import random
import string
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.data import Corpus, CorpusSpec, open_corpus, prepare, verify
from scrimp.data.corpus_manifest import read_manifest
from scrimp.data.documents import Document, cut, documents, text_target
from scrimp.data.grams import GRAM_WORDS
from scrimp.data.split import Split, split_by_share
from scrimp.errors import DataError


def numbered(seed: int, count: int) -> str:
    """Words that stand in no text of another seed."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.getrandbits(30)}" for _ in range(count))


@functools.cache
def grams_of(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[start : start + GRAM_WORDS]) for start in range(len(words) - GRAM_WORDS + 1)}


def shared(text: str, other: str) -> float:
    """Share of the 13-grams of a text that stand in another."""
    mine = grams_of(text)
    return len(mine & grams_of(other)) / len(mine) if mine else 0.0


def divided(texts: list[str], share: float) -> tuple[Split, list[Document], list[Document]]:
    """The split, the documents held out and those trained on."""
    corpus = list(documents(texts))
    split = split_by_share(lambda label: iter(corpus), share)
    parts = list(split.parts(corpus))
    return split, [one for one in parts if one.held_out], [one for one in parts if not one.held_out]


def held_share(texts: list[str], share: float) -> float:
    _, held_out, trained = divided(texts, share)
    held = sum(one.num_bytes for one in held_out)
    assert held
    assert trained
    return held / (held + sum(one.num_bytes for one in trained))


@pytest.mark.parametrize("share", [0.02, 0.1])
@pytest.mark.parametrize("seed", range(14))
def test_few_documents_one_of_them_large(seed: int, share: float) -> None:
    texts = [numbered(100 * seed + number, 200) for number in range(3)]
    texts.insert(seed % 4, numbered(100 * seed + 3, 20_000))
    assert share / 2 <= held_share(texts, share) <= 2 * share


def test_one_long_line() -> None:
    text = numbered(1, 100_000)
    pieces = list(cut([text], text_target(len(text))))
    assert 0.01 <= held_share(pieces, 0.02) <= 0.04
    assert divided([text], 0.02)[0].tail is not None  # one document
    assert 0.01 <= held_share([text], 0.02) <= 0.04


@pytest.mark.parametrize("copies", [5, 500])
def test_many_copies_of_one_text(copies: int) -> None:
    """Their common hash puts all copies on one side: the training side, where they are more than twice the share."""
    for seed in range(10):
        texts = [numbered(1000 * seed, 400)] * copies + [
            numbered(1000 * seed + n, 400) for n in range(1, 100)
        ]
        assert 0.01 <= held_share(texts, 0.02) <= 0.04


def test_nothing_but_copies() -> None:
    _, held_out, trained = divided([numbered(1, 400)] * 50, 0.02)
    assert {one.text for one in held_out}.isdisjoint({one.text for one in trained})
    assert len({one.text for one in held_out}) == 1
    assert 0.01 <= held_share([numbered(1, 400)] * 50, 0.02) <= 0.04


@examples(60)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    share=st.sampled_from([0.001, 0.02, 0.1, 0.5, 0.9]),
)
def test_never_more_than_twice_the_share(sizes: list[int], share: float) -> None:
    # another letter at each end: of few words hardly more than that is cut off
    texts = [f"{numbered(seed, size)} {string.ascii_letters[seed]}" for seed, size in enumerate(sizes)]
    split, held_out, trained = divided(texts, share)
    total = sum(len(text) for text in texts)
    size = sum(one.num_bytes for one in held_out)
    assert size > 0
    assert trained
    if split.tail is None:
        assert size <= 2 * share * total
        assert {one.text for one in (*held_out, *trained)} == set(texts)
    else:
        assert size <= 2 * share * total + 1
        assert held_out[0].text not in texts
        assert sum(one.num_bytes for one in (*held_out, *trained)) == total


def test_the_share_is_the_one_asked_for() -> None:
    texts = [f"document {number} of many" for number in range(20_000)]
    assert abs(held_share(texts, 0.1) - 0.1) < 0.001
    assert divided(texts, 0.0)[0] == Split()


def altered(text: str, seed: int) -> str:
    """The text with a few words changed, so that it shares 80 % to 97 % of its 13-grams."""
    draw = random.Random(seed)
    words = text.split()
    for _ in range(draw.randint(1, max(1, len(words) // 100))):
        words[draw.randrange(len(words))] = f"altered{seed}"
    return " ".join(words)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.every(4)
def test_documents_that_share_80_per_cent_are_on_one_side(seed: int) -> None:
    """A third of the documents have relatives, some of those relatives of their own."""
    draw = random.Random(seed)
    texts = [numbered(1000 * seed + number, draw.choice([60, 300, 1000])) for number in range(300)]
    for generation in range(2):
        texts += [altered(draw.choice(texts), 7000 * seed + 1000 * generation + n) for n in range(60)]
    draw.shuffle(texts)
    _, held_out, trained = divided(texts, 0.1)
    assert len(held_out) > 20
    assert len(trained) > 300
    worst = max(shared(one.text, other.text) for one, other in itertools.product(held_out, trained))
    assert worst < 0.8
    # a split by hash alone would have left pairs on both sides
    bound = max(one.hash for one in held_out)
    naive = [one for one in documents(texts) if one.hash <= bound]
    rest = [one for one in documents(texts) if one.hash > bound]
    assert max(shared(one.text, other.text) for one, other in itertools.product(naive, rest)) >= 0.8


def test_an_end_that_stands_elsewhere_is_not_cut_off() -> None:
    """Four large documents; the two largest end with the same text."""
    footer = " " + numbered(50, 2000)
    texts = [numbered(n, size) + (footer if n < 2 else "") for n, size in enumerate((9000, 8000, 7000, 6000))]
    split, held_out, trained = divided(texts, 0.02)
    assert split.tail is not None
    assert max(shared(held_out[0].text, other.text) for other in trained) < 0.8
    assert trained[2].text + held_out[0].text == texts[2] or held_out[0].text in texts[2]


def test_text_that_is_all_alike_is_refused_with_a_way_out() -> None:
    with pytest.raises(DataError, match=r"no text can be held out.*data\.held_out to a file"):
        divided([numbered(1, 400) + f" end {number}" for number in range(300)], 0.02)
    for texts in (["a"], ["a", "b"]):
        with pytest.raises(DataError, match=r"too small to hold documents out.*data\.held_out to 0"):
            divided(texts, 0.02)


def test_few_documents_that_are_alike_are_not_all_held_out_or_left_out() -> None:
    text = numbered(1, 400)
    texts = [altered(text, 1), altered(text, 2), *(numbered(n, 400) for n in range(3, 9))]
    _, held_out, trained = divided(texts, 0.15)
    assert len(trained) >= 5
    assert max(shared(one.text, other.text) for one, other in itertools.product(held_out, trained)) < 0.8
    with pytest.raises(DataError, match="no text can be held out"):
        divided([altered(text, seed) for seed in range(8)], 0.15)


def test_the_split_does_not_depend_on_the_order() -> None:
    texts = [numbered(number, 100) for number in range(200)]
    first, second = (divided(one, 0.1)[0] for one in (texts, texts[::-1]))
    assert first == second


@given(
    threshold=st.integers(0, 1 << 64),
    sets=st.tuples(*[st.frozensets(st.integers(0, (1 << 64) - 1), max_size=4)] * 2),
    tail=st.none() | st.tuples(st.integers(0, (1 << 64) - 1), st.integers(1, 1 << 24)),
)
def test_a_split_comes_back_from_its_content(
    threshold: int, sets: tuple[frozenset[int], frozenset[int]], tail: tuple[int, int] | None
) -> None:
    split = Split(threshold, *sets, tail)
    assert split.content().split() == split


# -- through prepare ---------------------------------------------------------------------------


def prepared(tmp_path: Path, source: Path, held_out: float | Path = 0.02, name: str = "out") -> Corpus:
    spec = CorpusSpec(source=str(source), tokenizer="bytes", held_out=held_out)
    return open_corpus(
        CorpusSpec(source=str(prepare(spec, tmp_path / name, shard_tokens=20_000))), cache=None
    )


def text_of(corpus: Corpus, split: str) -> str:
    stream = getattr(corpus, split)
    return str(corpus.tokenizer.decode(stream.read(0, stream.num_tokens)))


def rows(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def test_four_files_through_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number, size in enumerate((10, 10, 10, 9000)):
        (source / f"{number}.txt").write_text(numbered(number, size))
    corpus = prepared(tmp_path, source)
    said = capsys.readouterr().err
    held = corpus.held_out.text_bytes / (corpus.held_out.text_bytes + corpus.train.text_bytes)
    assert 0.01 <= held <= 0.04
    assert f"{held:.2%} of the text, 2.00% asked for" in said
    assert "cut off from the end of a document" in said
    whole = "".join((source / f"{number}.txt").read_text() for number in range(4))
    assert text_of(corpus, "train") + text_of(corpus, "held_out") == whole
    assert prepared(tmp_path, source, name="again").digest == corpus.digest


def near_copies(tmp_path: Path) -> Path:
    source = tmp_path / "rows.jsonl"
    texts = [numbered(number, 200) for number in range(200)]
    source.write_text(rows([*texts, *(altered(text, 1) for text in texts[:60])]))
    return source


@pytest.mark.slow
def test_near_copies_through_prepare_interrupted_or_not(tmp_path: Path) -> None:
    source = near_copies(tmp_path)
    corpus = prepared(tmp_path, source, 0.1)
    starts = corpus.held_out.document_starts(0, corpus.held_out.num_tokens).tolist()
    ends = [*starts[1:], corpus.held_out.num_tokens]
    held_out = [
        corpus.tokenizer.decode(corpus.held_out.read(a, b)) for a, b in zip(starts, ends, strict=True)
    ]
    train = text_of(corpus, "train")
    assert max(shared(text, train) for text in held_out) < 0.8
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    (tmp_path / "out" / "train-00001.tokens").unlink()
    (tmp_path / "out" / "held-out-00000.tokens").unlink()
    prepared(tmp_path, source, 0.1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")} == before


def test_a_file_is_held_out_whole_and_what_is_like_it_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, held_out = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    texts = [numbered(number, 200) for number in range(40)]
    valid = [altered(texts[3], 5), texts[7], numbered(99, 300), "a few words"]
    source.write_text(rows([*texts, "a few words"]))
    held_out.write_text(rows(valid))
    corpus = prepared(tmp_path, source, held_out)
    assert text_of(corpus, "held_out") == "".join(valid)
    assert text_of(corpus, "train") == "".join(text for n, text in enumerate(texts) if n not in (3, 7))
    assert corpus.manifest.skipped == {"documents like those of the other split": 3}
    assert "left out: 3 documents like those of the other split" in capsys.readouterr().err
    with pytest.raises(DataError, match="nothing is left to train on"):
        prepared(tmp_path, held_out, held_out, "same")
    with pytest.raises(DataError, match="there is no file or folder"):
        prepared(tmp_path, source, tmp_path / "typo.txt", "typo")
    # another text held out is another corpus, in the cache too
    spec = CorpusSpec(source=str(source), tokenizer="bytes", held_out=held_out)
    first = open_corpus(spec, cache=tmp_path / "cache", progress=False)
    assert text_of(first, "train") == text_of(corpus, "train")
    held_out.write_text(rows(valid[1:]))
    assert open_corpus(spec, cache=tmp_path / "cache", progress=False).folder != first.folder


def test_a_data_sets_own_validation_split_is_used(tmp_path: Path) -> None:
    texts = {
        "train": [numbered(number, 50) for number in range(100)],
        "validation": [numbered(number, 50) for number in range(100, 110)],
        "test": [numbered(number, 50) for number in range(110, 120)],
    }
    made = {name: datasets.Dataset.from_dict({"text": rows_}) for name, rows_ in texts.items()}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "data"))
    corpus = prepared(tmp_path, tmp_path / "data")
    assert text_of(corpus, "held_out") == "".join(texts["validation"])
    assert text_of(corpus, "train") == "".join(texts["train"])
    assert prepared(tmp_path, tmp_path / "data", 0.0, "none").held_out.num_tokens == 0
    own = prepared(tmp_path, tmp_path / "data", tmp_path / "data" / "test", "own")
    assert text_of(own, "held_out") == "".join(texts["test"])
    del made["validation"]
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "without"))
    assert 0 < prepared(tmp_path, tmp_path / "without", 0.1, "share").held_out.num_documents <= 20


# -- corpora of earlier versions -------------------------------------------------------------------------


def as_version_1(folder: Path, source: Path, threshold: int) -> None:
    """The corpus that the first rules made of a JSONL file, in the form in which they wrote it."""
    import numpy as np

    from scrimp.data.corpus_manifest import ShardEntry, shard_name
    from scrimp.data.shards import ShardWriter

    manifest = read_manifest(folder)
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    splits: dict[str, list[ShardEntry]] = {"train": [], "held-out": []}
    for path in folder.glob("*.tokens"):
        path.unlink()
    for name, is_held in (("train", False), ("held-out", True)):
        writer = ShardWriter(folder / shard_name(name, 0), np.dtype("<u2"))
        for one in documents(texts):
            if (one.hash < threshold) == is_held:
                tokens = np.array([256, *one.text.encode()], dtype="<u2")
                writer.add(tokens, text_bytes=one.num_bytes, document_hash=one.hash)
        splits[name].append(ShardEntry.of(shard_name(name, 0), writer.finish()))
    content = replace(manifest, splits=splits, settings=manifest.settings | {"rules": 1}).content()
    del content["split"]
    content["threshold"] = threshold
    (folder / "corpus.json").write_text(json.dumps(content, indent=2) + "\n")


def test_a_corpus_of_the_first_rules_opens_and_is_repaired_as_it_was(tmp_path: Path) -> None:
    source, threshold = near_copies(tmp_path), (1 << 64) - (1 << 63) // 2
    spec = CorpusSpec(source=str(source), tokenizer="bytes", held_out=0.1)
    out = prepare(spec, tmp_path / "out", progress=False)
    new = open_corpus(CorpusSpec(source=str(out)), cache=None).digest
    as_version_1(out, source, threshold)
    corpus = open_corpus(CorpusSpec(source=str(out)), cache=None)
    assert corpus.digest != new
    assert corpus.manifest.split == Split(threshold)
    assert verify(out, progress=False).ok
    shard = out / "train-00000.tokens"
    shard.write_bytes(shard.read_bytes()[:-9])
    prepare(spec, out, progress=False)
    assert open_corpus(CorpusSpec(source=str(out)), cache=None).digest == corpus.digest


def test_a_run_goes_on_with_the_corpus_of_the_first_rules_in_the_cache(tmp_path: Path) -> None:
    from scrimp.data.corpus import cache_key
    from scrimp.data.corpus_manifest import earlier_corpus_digest

    source = near_copies(tmp_path)
    spec = CorpusSpec(source=str(source), tokenizer="bytes", held_out=0.1)
    new = open_corpus(spec, cache=tmp_path / "cache", progress=False)
    key = cache_key(new.manifest.settings | {"rules": 1})
    earlier = prepare(spec, tmp_path / "cache" / f"rows-{key}", progress=False)
    as_version_1(earlier, source, 1 << 63)
    digest = earlier_corpus_digest(read_manifest(earlier))
    found = open_corpus(spec, cache=tmp_path / "cache", progress=False, digest=digest)
    assert found.folder == earlier
    assert found.is_that_of(digest)
    for other in (None, new.digest, "unknown"):
        assert open_corpus(spec, cache=tmp_path / "cache", progress=False, digest=other).folder == new.folder
