"""Where chat templates run: Jinja's immutable sandbox, with what transformers gives templates there.

Apart from `scrimp.data.chat_template`, so that Jinja is imported only where there are conversations.

Threads   Conversations are encoded on several: each thread has spans of its own.
Checked   tests/data/test_chat_template.py
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Span = tuple[int, int]


class _Thread(threading.local):
    pieces: list[str] | None = None
    """The text so far, where spans are wanted."""
    spans: list[Span]


class Markers(Extension):
    """{% generation %}: what is inside, the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own form

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(marking=self.marking)
        self._here = _Thread()

    def parse(self, parser: Any) -> nodes.Node:
        """The block as a call of `_mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text, here = str(caller()), self._here
        if here.pieces is not None:
            start = sum(map(len, here.pieces))
            here.spans.append((start, start + len(text)))
        return text

    @contextmanager
    def marking(self, pieces: list[str]) -> Iterator[list[Span]]:
        """Inside, the spans of blocks are noted: where they begin and end in the text.

        Args:
            pieces: the text so far, to which the caller adds.
        """
        self._here.pieces, self._here.spans = pieces, []
        try:
            yield self._here.spans
        finally:
            self._here.pieces = None


class _PublicNamespace(Namespace):
    """Without names that Python keeps for itself."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace of a chat template cannot hold {name!r}")
        super().__setitem__(name, value)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def sandbox() -> jinja2.Environment:
    """An environment as transformers makes it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Markers, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "namespace": _PublicNamespace,
        "dict": lambda *pairs, **items: dict(*pairs, **items),
    }
    return environment
