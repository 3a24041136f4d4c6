"""Conversations as documents: rows with `messages`, each a role and a content, in one canonical text.

What reads text (the split, hashes, passes, resuming) works on conversations unchanged, because a conversation is a text
to it: the JSON of its messages, keys sorted. Only the encoder reads it as messages again.

Weight   An answer with ``"weight": 0`` is there to be read and not to be learnt, as in OpenAI's files for fine-tuning;
         with 1, or none, it is learnt. So the turns of a demonstration stand before the one answer that counts.
Left out A row without an answer to learn is left out, counted. Anything else than a list of messages with text, and any
         other weight, is refused with file and row.
Checked  tests/data/test_conversations.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scrimp.data.documents import LONGEST_DOCUMENT
from scrimp.errors import DataError

MESSAGES = "messages"
"""Column of conversations, unless another is named."""
WEIGHT = "weight"
"""Key of an answer: 0 where it is not learnt."""


def checked_messages(value: object, column: str, where: str, skipped: dict[str, int]) -> str | None:
    """The canonical text of a row's messages; None, counted, where there is nothing to learn from."""
    reason = None
    if value is None:
        reason = "rows without messages"
    else:
        messages = [
            _message(one, column, where, number) for number, one in enumerate(_listed(value, column, where))
        ]
        text = json.dumps(messages, ensure_ascii=False, sort_keys=True)
        if not any(message["role"] == "assistant" and is_learnt(message) for message in messages):
            reason = "conversations without an answer to learn"
        elif len(text) > LONGEST_DOCUMENT:
            reason = f"conversations of more than {LONGEST_DOCUMENT >> 20} Mi characters"
    if reason is not None:
        skipped[reason] = skipped.get(reason, 0) + 1
        return None
    return text


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether an answer is to be learnt, or there to be read alone."""
    return bool(message.get(WEIGHT, 1))


def messages_of(text: str) -> list[dict[str, Any]]:
    """The messages of a canonical text."""
    messages: list[dict[str, Any]] = json.loads(text)
    return messages


def _listed(value: object, column: str, where: str) -> list[object]:
    if isinstance(value, list):
        return value
    raise DataError(
        f"{where}: column {column!r} does not hold messages",
        got=f"a {type(value).__name__}",
        expected='a list such as [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]',
        do="name the column with the messages in data.text_column",
    )


def _message(value: object, column: str, where: str, number: int) -> dict[str, Any]:
    # Parquet gives every message all keys that any has: those without a value are not there.
    message = (
        {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else {}
    )
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            kind = type(message[key]).__name__ if key in message else "nothing"
            raise DataError(
                f"{where}: message {number + 1} of column {column!r} has no {key} that is text",
                got=kind if isinstance(value, Mapping) else f"a {type(value).__name__}",
                expected='a message such as {"role": "user", "content": "Hi"}',
                do="repair or remove the row",
            )
    if WEIGHT in message:
        message[WEIGHT] = _weight(message, f"{where}: message {number + 1} of column {column!r}")
    return message


def _weight(message: Mapping[str, Any], which: str) -> int:
    weight = message[WEIGHT]
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(
            f"{which} has a weight that is not possible",
            got=repr(weight),
            expected="1, or 0 for an answer that is not learnt",
            do="repair it or leave it out",
        )
    if message["role"] != "assistant":
        raise DataError(
            f"{which} has a weight",
            got=f"role {message['role']!r}",
            expected="weights of the assistant's answers: nothing else is learnt",
            do="leave it out",
        )
    return int(weight)
