"""Batches of a mixture: the shares that were asked for, each source in its own order, from any position on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import lines_of_words
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.data import (
    Batch,
    CorpusSpec,
    Loader,
    Mixture,
    TokenStream,
    load_tokenizer,
    open_corpus,
    open_mixture,
    passes_over,
    prepare,
)
from scrimp.data.interleave import Interleave
from scrimp.data.mixture import MixedStream
from scrimp.errors import DataError

SEQUENCE = 4
quick = examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])

StreamMaker = Callable[..., TokenStream]


def streams(make_stream: StreamMaker, sizes: list[int]) -> tuple[TokenStream, ...]:
    """A stream for each size, in windows; all tokens are different."""
    found, first = [], 10
    for number, windows in enumerate(sizes):
        tokens = np.arange(first, first + windows * SEQUENCE + 1)
        first += len(tokens)
        found.append(make_stream([tokens[:5], tokens[5:]], name=f"train-{number}"))
    return tuple(found)


def rows(batches: list[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.tokens_BT.tolist()]


def read(
    stream: TokenStream | MixedStream, samples: int, *, seed: int = 3, first: int = 0
) -> list[list[int]]:
    with Loader(
        stream, sequence=SEQUENCE, sequences_per_step=1, micro_batch=1, seed=seed, first_sample=first
    ) as loader:
        return [row for _ in range(samples) for row in rows(next(loader))]


@quick
@given(sizes=st.lists(st.integers(2, 9), min_size=2, max_size=4), data=st.data(), seed=st.integers(0, 9))
def test_each_source_is_read_as_if_it_were_alone(
    make_stream: StreamMaker, sizes: list[int], data: st.DataObject, seed: int
) -> None:
    shares = data.draw(st.tuples(*(st.integers(0, 7) for _ in sizes)).filter(any))
    alone = streams(make_stream, sizes)
    mixed = MixedStream(alone, Interleave(shares))
    samples = 2 * sum(shares) + 3
    found = read(mixed, samples, seed=seed)
    for number, (stream, share) in enumerate(zip(alone, shares, strict=True)):
        own = set(stream.read(0, stream.num_tokens).tolist())
        part = [row for row in found if row[0] in own]
        assert abs(len(part) - samples * share / sum(shares)) < 1
        assert part == read(stream, len(part), seed=seed)
        assert passes_over(mixed, SEQUENCE, samples)[number] == len(part) / sizes[number]


@quick
@given(first=st.integers(0, 200), ranks=st.sampled_from([1, 2, 3]), micro_batch=st.integers(1, 4))
def test_any_position_and_any_ranks_read_the_same_samples(
    make_stream: StreamMaker, first: int, ranks: int, micro_batch: int
) -> None:
    mixed = MixedStream(streams(make_stream, [5, 2, 11]), Interleave((5, 3, 2)))
    found = []
    for rank in range(ranks):
        with Loader(
            mixed, sequence=SEQUENCE, sequences_per_step=6, micro_batch=micro_batch, seed=3, first_sample=first,
            rank=rank, world_size=ranks,
        ) as loader:  # fmt: skip
            found += rows(next(loader))
    assert found == read(mixed, first + 6)[first:]


def write_texts(folder: Path) -> list[str]:
    for number in range(3):
        (folder / f"{number}.txt").write_text(lines_of_words(number + 20, 300))
    return [str(folder / f"{number}.txt") for number in range(3)]


def mixture_of(folder: Path, names: list[str], shares: list[int], **settings: object) -> Mixture:
    spec = {"tokenizer": "bytes", "held_out": 0.1} | settings
    specs = [CorpusSpec(source=name, **spec) for name in names]
    return open_mixture(specs, shares, cache=folder / "cache", progress=False)


def test_the_digest_is_of_sources_shares_and_their_order(tmp_path: Path) -> None:
    one, two, three = write_texts(tmp_path)
    digests = [
        mixture_of(tmp_path, [one, two], [7, 3]).digest,
        mixture_of(tmp_path, [one, two], [3, 7]).digest,
        mixture_of(tmp_path, [two, one], [3, 7]).digest,
        mixture_of(tmp_path, [one, three], [7, 3]).digest,
        mixture_of(tmp_path, [one, two], [7, 3], held_out=0.2).digest,
    ]
    assert len(set(digests)) == len(digests)
    again = mixture_of(tmp_path, [one, two], [7, 3])
    assert again.digest == digests[0]
    assert again.is_that_of(digests[0])
    assert not again.is_that_of(digests[1])


def test_each_held_out_text_is_that_of_the_source_alone(tmp_path: Path) -> None:
    names = write_texts(tmp_path)
    mixture = mixture_of(tmp_path, names, [1, 1, 1])
    assert mixture.labels == ["0.txt", "1.txt", "2.txt"]
    for name, part in zip(names, mixture.parts, strict=True):
        alone = open_corpus(
            CorpusSpec(source=name, tokenizer="bytes", held_out=0.1), cache=tmp_path / "other"
        )
        held_out, size = part.held_out, alone.held_out.num_tokens
        assert held_out.num_tokens == size > 0
        assert np.array_equal(held_out.read(0, size), alone.held_out.read(0, size))


def test_shards_and_texts_go_together_with_one_tokenizer(tmp_path: Path) -> None:
    one, two, three = write_texts(tmp_path)
    shards = prepare(
        CorpusSpec(source=one, tokenizer="bpe", bpe_vocab_size=300), tmp_path / "shards", progress=False
    )
    mixture = mixture_of(tmp_path, [str(shards), two], [1, 1], tokenizer=str(shards / "tokenizer"))
    assert mixture.tokenizer.digest == load_tokenizer(shards / "tokenizer").digest
    assert mixture.folder == shards
    other = prepare(CorpusSpec(source=three, tokenizer="bytes"), tmp_path / "other", progress=False)
    with pytest.raises(DataError, match="different tokenizers"):
        mixture_of(tmp_path, [str(shards), str(other)], [1, 1], tokenizer="auto")


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    one, two, _ = write_texts(tmp_path)
    (tmp_path / "copy.txt").write_bytes(Path(one).read_bytes())
    with pytest.raises(DataError, match="hold the same text") as refused:
        mixture_of(tmp_path, [one, str(tmp_path / "copy.txt")], [1, 1])
    assert "copy.txt" in str(refused.value)
    with pytest.raises(DataError, match="there is no file or folder"):
        mixture_of(tmp_path / "none", [one, str(tmp_path / "none.txt")], [1, 1])
    assert not (tmp_path / "none").exists()  # before the first source was prepared
    shards = prepare(
        CorpusSpec(source=two, tokenizer="bytes", held_out=0.0), tmp_path / "all", progress=False
    )
    with pytest.raises(DataError, match="holds nothing out") as refused:
        mixture_of(tmp_path, [one, str(shards)], [1, 1])
    assert str(shards) in str(refused.value)
