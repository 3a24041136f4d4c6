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
MARKED = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
MARKED += "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
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


def prepared(
    folder: Path,
    source: Path,
    *,
    held_out: float | Path = 0.0,
    column: str = "text",
    template: str = TEMPLATE,
) -> Corpus:
    file = folder / "template.jinja"
    file.write_text(template)
    spec = CorpusSpec(
        source=str(source),
        text_column=column,
        conversations=True,
        chat_template=file,
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
        "conversations without an answer to learn": 2,
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


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["prefixes", "markers"])
def test_answers_of_weight_0_are_read_and_not_learnt(template: str, tmp_path: Path) -> None:
    source, weights = tmp_path / "chats.jsonl", (0, 1, None, 0)
    messages = []
    for number, weight in enumerate(weights):
        messages.append({"role": "user", "content": f"question {number}"})
        answer: dict[str, Any] = {"role": "assistant", "content": f"answer {number}"}
        messages.append(answer if weight is None else answer | {"weight": weight})
    source.write_text(json.dumps({"messages": messages}) + "\n")
    corpus = prepared(tmp_path, source, template=template)
    stream = corpus.train
    tokens, learnt = stream.read(0, stream.num_tokens), stream.mask(0, stream.num_tokens)
    assert corpus.tokenizer.decode(tokens[learnt].tolist()) == "answer 1answer 2"
    assert learnt.sum() == 2 * (len("answer 1") + 1)
    assert stream.text_bytes == 2 * len("answer 1<|endoftext|>")
    assert "answer 0" in corpus.tokenizer.decode(tokens.tolist())


def test_rows_of_which_nothing_is_learnt_are_counted_and_parquet_has_weights(tmp_path: Path) -> None:
    chats = [row["messages"] for row in rows(2)]
    chats[0][1]["weight"] = 0
    pq.write_table(pa.table({"messages": chats}), tmp_path / "chats.parquet")
    corpus = prepared(tmp_path, tmp_path / "chats.parquet")
    assert corpus.train.num_documents == 1
    assert read_manifest(corpus.folder).skipped == {"conversations without an answer to learn": 1}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"role": "assistant", "content": "!", "weight": 0.5},
            "message 2 .* weight that is not possible - got 0.5",
        ),
        ({"role": "assistant", "content": "!", "weight": True}, "not possible - got True"),
        ({"role": "assistant", "content": "!", "weight": "0"}, "not possible - got '0'"),
        ({"role": "user", "content": "!", "weight": 1}, "message 2 .* has a weight - got role 'user'"),
    ],
)
def test_other_weights_are_refused_with_their_line(
    message: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}, message]}) + "\n")
    with pytest.raises(DataError, match=expected) as caught:
        prepared(tmp_path, source)
    assert "line 1" in str(caught.value)


def test_a_template_with_fewer_blocks_than_answers_cannot_say_their_weights(tmp_path: Path) -> None:
    """One that marks the last answer alone."""
    template = MARKED.replace("m.role == 'assistant'", "loop.last")
    source = tmp_path / "chats.jsonl"
    messages = [message for row in rows(2) for message in row["messages"]]
    source.write_text(json.dumps({"messages": messages}) + "\n")
    assert prepared(tmp_path, source, template=template).train.num_documents == 1
    messages[1]["weight"] = 0
    source.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=r"which answer has which weight - got 1 .* 2 answers"):
        prepared(tmp_path, source, template=template)
