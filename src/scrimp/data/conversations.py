"""Conversations as documents: rows with `messages`, each a role and a content, in one canonical text.

What reads text (the split, hashes, passes, resuming) works on conversations unchanged, because a conversation is a text
to it: the JSON of its messages, keys sorted. Only the encoder reads it as messages again.

A row without an answer of the assistant's teaches nothing and is left out, counted. Anything else than a list of
messages with text is refused with file and row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scrimp.data.documents import LONGEST_DOCUMENT
from scrimp.errors import DataError

MESSAGES = "messages"
"""Column of conversations, unless another is named."""


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
        if not any(message["role"] == "assistant" for message in messages):
            reason = "conversations without an answer"
        elif len(text) > LONGEST_DOCUMENT:
            reason = f"conversations of more than {LONGEST_DOCUMENT >> 20} Mi characters"
    if reason is not None:
        skipped[reason] = skipped.get(reason, 0) + 1
        return None
    return text


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
    return message
