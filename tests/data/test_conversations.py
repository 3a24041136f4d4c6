"""Rows of messages from every kind of source; what is no conversation is refused with its place."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scrimp.data import Corpus, CorpusSpec, prepare
from scrimp.data.corpus_manifest import read_manifest
from scrimp.errors import DataError

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
WORDS = """river stone cloud ember lantern copper meadow harbour thistle amber willow cinder orchid falcon""".split()  # noqa: SIM905


def rows(count: int = 200) -> list[dict[str, Any]]:
    draw = random.Random(3)
    found = []
    for _ in range(count):
        question, answer = (" ".join(draw.choices(WORDS, k=draw.randint(8, 20))) for _ in range(2))
        found.append(
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        )
    return found


def prepared(folder: Path, source: Path, *, held_out: float | Path = 0.0, column: str = "text") -> Corpus:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    spec = CorpusSpec(
        source=str(source),
        text_column=column,
        conversations=True,
        chat_template=template,
        tokenizer="bytes",
        held_out=held_out,
    )
    out = folder / f"shards-{len(list(folder.iterdir()))}"
    return Corpus(prepare(spec, out, progress=False, shard_tokens=4000))


@pytest.mark.slow
def test_every_kind_of_source_gives_the_same_shards(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows())
    (tmp_path / "plain.jsonl").write_text(text)
    with gzip.open(tmp_path / "small.jsonl.gz", "wt") as file:
        file.write(text)
    pq.write_table(pa.Table.from_pylist(rows()), tmp_path / "table.parquet")
    datasets.Dataset.from_list(rows()).save_to_disk(str(tmp_path / "saved"))
    names = ("plain.jsonl", "small.jsonl.gz", "table.parquet", "saved")
    plain, *others = (prepared(tmp_path, tmp_path / name) for name in names)
    assert plain.train.num_documents == 200
    assert len(plain.manifest.splits["train"]) > 1
    assert {other.digest for other in others} == {plain.digest}
    answers = sum(len(row["messages"][1]["content"].encode()) + len("<|endoftext|>") for row in rows())
    assert plain.train.text_bytes == answers
    assert plain.train.mask(0, plain.train.num_tokens).sum() == answers - 200 * (len("<|endoftext|>") - 1)


def test_whole_conversations_are_held_out(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(400)))
    corpus = prepared(tmp_path, source, held_out=0.1)
    assert corpus.train.num_documents + corpus.held_out.num_documents == 400
    assert 20 <= corpus.held_out.num_documents <= 80
    assert corpus.manifest.split is not None
    assert corpus.manifest.split.tail is None
    kept, held = (
        corpus.tokenizer.decode(one.read(0, one.num_tokens)) for one in (corpus.train, corpus.held_out)
    )
    for row in rows(400):
        question = row["messages"][0]["content"]
        assert (question in kept) != (question in held)


def test_few_conversations_are_never_cut_to_hold_some_out(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(3)))
    with pytest.raises(DataError, match="too small to hold documents out"):
        prepared(tmp_path, source, held_out=0.02)


def test_rows_that_teach_nothing_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    extra = [{"messages": None}, {"messages": [{"role": "user", "content": "?"}]}, {"messages": []}]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows(3), *extra]))
    corpus = prepared(tmp_path, source)
    assert corpus.train.num_documents == 3
    assert read_manifest(corpus.folder).skipped == {
        "rows without messages": 1,
        "conversations without an answer": 2,
    }
    source.write_text("".join(json.dumps(row) + "\n" for row in extra))
    with pytest.raises(DataError, match="holds no conversations"):
        prepared(tmp_path, source)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "Hi"}, "does not hold messages - got a str"),
        ({"messages": ["Hi"]}, "message 1 of column 'messages' has no role"),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant"}]}, "message 2 .* no content"),
        ({"messages": [{"role": "user", "content": ["?"]}]}, "got list"),
        ({"chat": []}, "has no column 'messages'"),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "not valid Unicode"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(row: Any, message: str, tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps(rows(1)[0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        prepared(tmp_path, source)
    assert "line 2" in str(caught.value)


def test_messages_may_stand_in_another_column(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps({"turns": row["messages"]}) + "\n" for row in rows(5)))
    assert prepared(tmp_path, source, column="turns").train.num_documents == 5


def test_an_interrupted_preparation_goes_on_and_gives_the_same(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    whole = prepared(tmp_path, source)
    spec_folder = tmp_path / "again"
    spec_folder.mkdir()
    again = prepared(spec_folder, source)
    damaged = sorted(again.folder.glob("train-*.tokens"))[1]
    content = bytearray(damaged.read_bytes())
    content[300] ^= 1
    damaged.write_bytes(content)
    template = spec_folder / "template.jinja"
    spec = CorpusSpec(
        source=str(source), conversations=True, chat_template=template, tokenizer="bytes", held_out=0.0
    )
    prepare(spec, again.folder, progress=False, shard_tokens=4000)
    assert Corpus(again.folder).digest == whole.digest
    other = template.read_text().replace("role }}:", "role }}>")
    template.write_text(other)
    with pytest.raises(DataError, match="begun with another source or other settings"):
        prepare(spec, again.folder, progress=False, shard_tokens=4000)
