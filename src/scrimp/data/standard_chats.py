"""Conversations that every machine has: what a function of the standard library does, and which function does it.

    stdlib-docstrings   asked for a function, its name and arguments, the assistant says the first paragraph of its
                        docstring
    stdlib-signatures   the other way round: asked with that paragraph, it says the function

Written by hand by many people, short, and about 6,000 of each. A tokenizer without a chat template gets `TEMPLATE` for
them, so that a model of text can be fine-tuned without any file of one's own.

Limits   Both have the same facts: who has learnt one has read the other's answers. Questions are one sentence each, all
         alike, and nothing here is a conversation of several turns.
Checked  tests/data/test_standard_chats.py
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from functools import cache

from scrimp.data.columns import Column
from scrimp.data.sources import DOCSTRINGS, Source, StandardLibrary
from scrimp.data.streams import Meter
from scrimp.files import storage

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""How these conversations are written where the tokenizer does not say."""


class StandardChats(Source):
    """Questions about functions of the standard library, with answers.

    Args:
        name: stdlib-docstrings or stdlib-signatures.
        column: of messages.
    """

    chat_template = TEMPLATE

    def __init__(self, name: str, column: Column) -> None:
        super().__init__(name)
        self._column, self._library = column, StandardLibrary()

    def texts(self, meter: Meter) -> Iterator[str]:
        self.skipped = {}
        for signature, summary in _documented(self._library.fingerprint()):
            question, answer = f"What does {signature} do?", summary
            if self.name != DOCSTRINGS:
                question, answer = f"Which function does this? {summary}", signature
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            text = self._column.text(messages, self.name, self.skipped)
            if text is not None:
                yield text

    def fingerprint(self) -> str:
        return f"{self.name}-1-{self._library.fingerprint()}"


@cache
def _documented(fingerprint: str) -> tuple[tuple[str, str], ...]:
    """Name with arguments, and first paragraph of the docstring, of every function that has one, each pair once.

    Args:
        fingerprint: of the library, which is parsed once in a process.
    """
    found: dict[tuple[str, str], None] = {}
    for file in StandardLibrary().files:
        with storage(file.path, "read"):
            content = file.path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in somebody else's strings
            try:
                tree = ast.parse(content)
            except (SyntaxError, ValueError):  # kept as examples of what cannot be read
                continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                summary = " ".join(text.split("\n\n")[0].split())
                found[f"{node.name}({ast.unparse(node.args)})", summary] = None
    return tuple(found)
