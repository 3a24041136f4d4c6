"""Cloze scores against a float64 decoder of its own, one pass for each choice."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from decoder_reference import FAMILIES, document_logits, filled, weights_of

from scrimp.config import Architecture
from scrimp.data import Tokenizer, load_tokenizer
from scrimp.data.bpe import train_bpe
from scrimp.data.tokenizer import END_OF_TEXT, own_tokenizer
from scrimp.errors import ModelError
from scrimp.models.model import Model
from scrimp.runtime import Executable
from scrimp.tasks import Item, Task, score
from scrimp.tasks.scoring import Row, RowScore, encode, score_rows

BYTES = load_tokenizer("bytes")


def executable_of(model: Model) -> Executable:
    return Executable(model.eval(), torch.device("cpu"), "fp32", loss_chunk=1024)


def by_hand(model: Model, row: Row) -> RowScore:
    """The score of a row by the reference alone, which reads its tokens but the last."""
    context = model.architecture.context
    tokens = torch.tensor([*row.before, *row.tokens][-(context + 1) :])
    logits = document_logits(model.architecture, weights_of(model), tokens[:-1])
    log_p = logits.detach().log_softmax(-1)[-len(row.tokens) :]
    targets = tokens[-len(row.tokens) :]
    greedy = bool((log_p.argmax(-1) == targets).all())
    return RowScore(float(log_p.gather(-1, targets[:, None]).sum()), greedy)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_all_lengths_score_as_one_pass_each(family: str) -> None:
    architecture: Architecture = FAMILIES[family]
    model = filled(architecture)
    generator = torch.Generator().manual_seed(3)
    rows = [
        Row(
            *(torch.randint(architecture.vocab_size, (size,), generator=generator).tolist() for size in sizes)
        )
        for sizes in [(1, 1), (5, 3), (40, 24), (64, 1), (65, 1), (90, 10), (1, 64), (17, 2)] * 12
    ]
    # Batches of several rows, some of them longer than the context.
    found = score_rows(executable_of(model), rows)
    for row, one in list(zip(rows, found, strict=True))[:16]:
        assert one.log_p == pytest.approx(by_hand(model, row).log_p, rel=1e-5, abs=1e-4)


def test_the_tokens_that_a_model_writes_itself_are_greedy() -> None:
    model = filled(FAMILIES["llama"])
    ids = [5, 9, 2]
    for _ in range(4):
        ids.append(
            int(document_logits(model.architecture, weights_of(model), torch.tensor(ids))[-1].argmax())
        )
    other = [*ids[:-1], (ids[-1] + 1) % model.architecture.vocab_size]
    first, second = score_rows(executable_of(model), [Row(ids[:3], ids[3:]), Row(other[:3], other[3:])])
    assert first.is_greedy
    assert not second.is_greedy
    assert first.log_p > second.log_p


def small_model() -> Model:
    return filled(dataclasses.replace(FAMILIES["llama"], vocab_size=257))


def test_items_are_right_where_nats_per_byte_say_so() -> None:
    model = small_model()
    task = Task(
        "mine",
        (
            Item("The sky is", (" blue", " a very large fish", " é"), 1),
            Item("", ("yes", "no"), 0),
            Item("  ", ("yes", "no"), 1),
            Item("Two and two ", ("make four", "sing"), 1),
        ),
    )
    found = score(executable_of(model), BYTES, task)
    for item, is_right, margin in zip(task.items, found.is_right, found.margins, strict=True):
        kept = item.context.rstrip()
        before, space = [256, *kept.encode()], item.context[len(kept) :]
        scores = [
            by_hand(model, Row(before, list((space + choice).encode()))).log_p / len(choice.encode())
            for choice in item.choices
        ]
        right = scores.pop(item.answer)
        assert margin == pytest.approx(right - sum(scores) / len(scores), abs=1e-4)
        assert is_right == (right > max(scores))
    assert found.shortened == 0


def test_a_tie_is_wrong() -> None:
    model = small_model()
    torch.nn.init.zeros_(model.head_weight)
    task = Task("mine", (Item("a", ("b", "c"), 0), Item("a", ("bb", "c"), 1)))
    found = score(executable_of(model), BYTES, task)
    assert found.is_right == (False, False)
    assert found.margins == pytest.approx((0, 0), abs=1e-6)


def test_long_contexts_lose_their_beginning_and_are_counted_long_choices_are_refused() -> None:
    model = small_model()
    most = model.architecture.context
    # Before the context stands the delimiter; a choice's last token is not read.
    fits = Item("x" * (most - 2), ("ab", "cd"), 0)
    long = Item("y" + "x" * most, ("b", "d"), 0)
    longer = Item("z" * 9 + "x" * most, ("b", "d"), 0)
    found = score(executable_of(model), BYTES, Task("mine", (fits, long, longer)))
    assert found.shortened == 2
    assert found.margins[1] == pytest.approx(found.margins[2], abs=1e-5)
    with pytest.raises(ModelError, match="a choice is longer"):
        score(executable_of(model), BYTES, Task("mine", (Item("a", ("b", "c" * (most + 1)), 0),)))


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    """A tokenizer in which brackets after each other are one token, and words carry their space."""
    texts = ["f(x) and g() of the words, the words; " * 20]
    return own_tokenizer(train_bpe(texts, 300, END_OF_TEXT), "bpe")


def test_context_and_choice_are_encoded_together(bpe: Tokenizer) -> None:
    assert encode(bpe, "of the ", "words").tokens == encode(bpe, "of the", " words").tokens
    row = encode(bpe, "of the", " words")
    assert [*row.before, *row.tokens] == bpe.encode_prompt("of the words")
    # g( and ) share a token: nothing is left of the bracket, so it is encoded alone.
    assert len(bpe.encode_prompt("g()")) == len(bpe.encode_prompt("g("))
    assert encode(bpe, "g(", ")") == Row(bpe.encode_prompt("g("), bpe.encode_prompt(")")[1:])
