"""Cloze scores: how probable a model finds each choice of an item behind its context.

Problem  Which of several continuations does a model take for the right one? Asked for its letter, a model that has
         just begun to learn answers at random; what it finds probable is known from the first step.
Method   With c_1 … c_n the tokens of a choice and p the model's probabilities,

             score = Σ_i log p(c_i | context, c_1 … c_(i-1)) / bytes of the choice in UTF-8

         Without the division short choices win. Bytes, since a token is what a tokenizer makes of it: scores of models
         with different ones are compared, as by `acc_bytes` of lm-eval (its `acc_norm` divides by characters, the same
         in ASCII). An item is right where its right choice scores higher than each other: a tie is wrong. Its margin
         is the score of the right choice less the mean of the others, in nats per byte. Of a model that prefers choices
         at random it is 0 on average, however sharply it prefers.
Boundary As lm-eval has it: white space at the context's end goes to the choice; context and choice are encoded
         together, and the choice's tokens are those behind as many as the context alone has. Where nothing is left,
         since both share one token, the choice is encoded by itself. Before an empty context stands the delimiter.
Batches  One row for each choice, the longest first, filled up on the right, where causal attention sees nothing of it.
         Logits exist for the tokens of choices alone. A sequence that is longer than the model's context loses its
         beginning, and the item is counted; a choice that is longer is refused.
Limits   A context is computed once for each of its choices.
Checked  tests/tasks/test_scoring.py: one pass for each choice through a float64 decoder; tests/tasks/test_harness.py:
         lm-eval on the same items

Shapes: B rows, T tokens, D width, V vocabulary, N tokens of choices in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from scrimp.data import Tokenizer
from scrimp.errors import ModelError
from scrimp.models.functions import at_least_float32
from scrimp.runtime import Executable
from scrimp.tasks.items import Item, Task

_BATCH_TOKENS = 4096
_CHUNK = 1024
"""Tokens whose logits exist at once."""


@dataclass(frozen=True)
class Row:
    """Tokens to be scored, and those before them."""

    before: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class RowScore:
    """What a model says of a row."""

    log_p: float
    """Sum over its tokens."""
    is_greedy: bool
    """Whether each token is the most probable one."""


@dataclass(frozen=True)
class TaskScores:
    """What a model says of a task's items."""

    task: Task
    is_right: tuple[bool, ...]
    """Whether the right choice of each item scores higher than each other."""
    margins: tuple[float, ...]
    """The score of each item's right choice less the mean of the others, in nats per byte."""
    shortened: int
    """Items whose context did not fit the model's."""


def encode(tokenizer: Tokenizer, context: str, choice: str) -> Row:
    """The tokens of a choice and of the context before it."""
    kept = context.rstrip()
    choice = context[len(kept) :] + choice
    if not kept:
        return Row([tokenizer.delimiter_id], tokenizer.encode_rendered(choice)[0])
    before = tokenizer.encode_prompt(kept)
    tokens = tokenizer.encode_prompt(kept + choice)[len(before) :]
    return Row(before, tokens or tokenizer.encode_rendered(choice)[0])


def score(executable: Executable, tokenizer: Tokenizer, task: Task) -> TaskScores:
    """Ask a model all items of a task.

    Raises:
        ModelError: a choice is longer than the model's context.
    """
    rows = [[encode(tokenizer, item.context, choice) for choice in item.choices] for item in task.items]
    scores = iter(score_rows(executable, [row for of_item in rows for row in of_item]))
    by_item = [_compared(item, [next(scores).log_p for _ in item.choices]) for item in task.items]
    is_right, margins = zip(*by_item, strict=True)
    most = executable.model.architecture.context + 1
    shortened = sum(any(len(row.before) + len(row.tokens) > most for row in of_item) for of_item in rows)
    return TaskScores(task, is_right, margins, shortened)


def _compared(item: Item, log_p: Sequence[float]) -> tuple[bool, float]:
    """Whether the right choice scores highest, and its margin."""
    scores = [one / len(choice.encode()) for one, choice in zip(log_p, item.choices, strict=True)]
    right = scores.pop(item.answer)
    return right > max(scores), right - fmean(scores)


@torch.no_grad()
def score_rows(executable: Executable, rows: Sequence[Row]) -> list[RowScore]:
    """The log-probabilities of rows, in their order.

    Raises:
        ModelError: tokens to be scored are more than the model's context holds.
    """
    room = executable.model.architecture.context
    longest = max((len(row.tokens) for row in rows), default=0)
    if longest > room:
        raise ModelError(
            "a choice is longer than the model's context",
            got=f"{longest:,} tokens",
            expected=f"at most {room:,}",
            do="shorten the task's choices, or take a model with a longer context",
        )
    found: dict[int, RowScore] = {}
    for numbers in _batches(rows, room):
        batch = [rows[number] for number in numbers]
        found |= zip(numbers, _scores_of(executable, batch, room), strict=True)
    return [found[number] for number in range(len(rows))]


def _batches(rows: Sequence[Row], room: int) -> Iterator[list[int]]:
    """Numbers of rows that are scored together, the longest first."""
    length = [min(len(row.before) + len(row.tokens) - 1, room) for row in rows]
    order = sorted(range(len(rows)), key=lambda number: -length[number])
    while order:
        size = max(1, _BATCH_TOKENS // max(1, length[order[0]]))
        yield order[:size]
        order = order[size:]


def _scores_of(executable: Executable, batch: Sequence[Row], room: int) -> list[RowScore]:
    model = executable.model
    # The last token is predicted, not read.
    sequences = [[*row.before, *row.tokens][-(room + 1) :] for row in batch]
    width = max(len(sequence) for sequence in sequences) - 1
    tokens_BT = torch.zeros(len(batch), width, dtype=torch.int64)
    places: list[int] = []
    for number, (row, sequence) in enumerate(zip(batch, sequences, strict=True)):
        read = sequence[:-1]
        tokens_BT[number, : len(read)] = torch.tensor(read)
        places += range(number * width + len(read) - len(row.tokens), number * width + len(read))
    with executable.autocast():
        hidden_BTD = model(tokens_BT.to(executable.device))
        hidden_ND = hidden_BTD.flatten(0, 1)[torch.tensor(places, device=executable.device)]
        target_N = torch.tensor([token for row in batch for token in row.tokens], device=executable.device)
        log_p_N, is_greedy_N = _of_targets(executable, hidden_ND, target_N)
    sizes = [len(row.tokens) for row in batch]
    return [
        RowScore(float(log_p.sum()), bool(is_greedy.all()))
        for log_p, is_greedy in zip(log_p_N.split(sizes), is_greedy_N.split(sizes), strict=True)
    ]


def _of_targets(executable: Executable, hidden_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets in float64 on the host, and whether each is the most probable token."""
    log_p, is_greedy = [], []
    for hidden, target in zip(hidden_ND.split(_CHUNK), target_N.split(_CHUNK), strict=True):
        all_log_p = at_least_float32(executable.model.logits(hidden)).log_softmax(-1)
        log_p.append(all_log_p.gather(-1, target[:, None])[:, 0].double().cpu())
        is_greedy.append((all_log_p.argmax(-1) == target).cpu())
    return torch.cat(log_p), torch.cat(is_greedy)
