"""Label maps: each task has a map of its own, demonstrations are its own and tell it, and none stands before itself."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from scrimp.data import Corpus, CorpusSpec, prepare
from scrimp.data.find_source import open_source
from scrimp.data.sources import LABEL_MAPS, Source
from scrimp.data.streams import Meter
from scrimp.errors import DataError

Messages = list[dict[str, Any]]


def source(kind: str) -> Source:
    return open_source(f"label-maps:{kind}", "messages", conversations=True)


def conversations(one: Source | None) -> list[Messages]:
    assert one is not None
    return [json.loads(text) for text in one.texts(Meter())]


def share_told(chats: list[Messages]) -> float:
    """For how many questions a demonstration has the letter, and so the label, which then is the answer's."""
    told = 0
    for chat in chats:
        *before, question, answer = chat
        same = {
            a["content"]
            for q, a in zip(before[::2], before[1::2], strict=True)
            if q["content"][-1] == question["content"][-1]
        }
        assert same <= {answer["content"]}  # one task, one map
        assert question["content"] not in [one["content"] for one in before]
        told += bool(same)
    return told / len(chats)


def test_demonstrations_tell_the_answer_as_often_as_their_kind_says() -> None:
    """Four of 12 at random, of which two have the letter: 1 - C(10, 4) / C(12, 4) = 0.576."""
    assert share_told(conversations(source("bm25").validation())) == 1
    assert share_told(conversations(source("few-shot"))) == 1
    assert share_told(conversations(source("random"))) == pytest.approx(1 - 210 / 495, abs=0.02)
    assert share_told(conversations(source("none"))) == 0


@pytest.mark.slow
def test_all_kinds_ask_the_same_and_hold_the_same_out() -> None:
    for found in zip(*(conversations(source(kind)) for kind in ("bm25", "random", "none")), strict=True):
        assert found[0][-2:] == found[1][-2:] == found[2][-2:]
        assert [len(one) for one in found[1:]] == [10, 2]
        assert 2 * 2 + 2 <= len(found[0]) <= 10  # fewer where digits do not match
    held_out = {
        kind: conversations(source(kind).validation()) for kind in ("bm25", "random", "none", "few-shot")
    }
    assert held_out["few-shot"] == held_out["bm25"]
    assert all(
        [one[-2:] for one in chats] == [one[-2:] for one in held_out["none"]] for chats in held_out.values()
    )
    assert {len(chats) for chats in held_out.values()} == {480}


def test_a_model_is_tuned_on_what_is_shown_and_never_on_what_is_asked() -> None:
    """Twelve examples of each held-out task in its bank, 24 questions about it."""
    tuned, asked = conversations(source("few-shot")), conversations(source("few-shot").validation())
    assert len(tuned) == 240
    for task in range(20):
        bank = {(one[-2]["content"], one[-1]["content"]) for one in tuned[12 * task : 12 * task + 12]}
        assert len(bank) == 12
        for chat in asked[24 * task : 24 * task + 24]:
            shown = {(q["content"], a["content"]) for q, a in zip(chat[:-2:2], chat[1:-2:2], strict=True)}
            assert shown <= bank
            assert chat[-2]["content"] not in {question for question, _ in bank}


def test_a_letter_has_every_label_in_some_task_about_as_often() -> None:
    labels: dict[str, list[str]] = defaultdict(list)
    for chat in conversations(source("none")):
        labels[chat[0]["content"][-1]].append(chat[1]["content"])
    assert len(labels) == 26
    counts = [found.count(label) / len(found) for found in labels.values() for label in "ABCD"]
    assert 0.05 < min(counts) < max(counts) < 0.5


def test_it_is_the_same_everywhere() -> None:
    texts = [
        text for kind in LABEL_MAPS for text in open_source(kind, "m", conversations=True).texts(Meter())
    ]
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] == "a195eab02e9b9593"
    assert len({source(name.partition(":")[2]).fingerprint() for name in LABEL_MAPS}) == 4


def test_text_is_refused_and_shards_count_the_last_answer_alone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds conversations"):
        open_source("label-maps:bm25", "text")
    spec = CorpusSpec(source="label-maps:few-shot", conversations=True, tokenizer="bytes")
    corpus = Corpus(prepare(spec, tmp_path / "shards", progress=False))
    assert corpus.held_out.num_documents == 480
    stream = corpus.train
    assert stream.mask(0, stream.num_tokens).sum() == 2 * stream.num_documents
    starts = stream.document_starts(0, stream.num_tokens)
    first = stream.read(0, int(starts[1]))
    assert corpus.tokenizer.decode(first[-2:].tolist()) in "ABCD"
    assert stream.mask(0, int(starts[1])).tolist() == [False] * (len(first) - 2) + [True] * 2
