"""The chat template of a tokenizer: conversations to text, and which part of it the assistant wrote.

Method     A template is a Jinja program that comes with a model, as `chat_template.jinja` or in
           tokenizer_config.json. It is somebody else's code, so that it runs in Jinja's immutable sandbox, as in
           transformers, whose rules it is written for: whitespace around blocks trimmed, `raise_exception`, `tojson`,
           loop controls, the tokenizer's special tokens by name.
Answers    What the assistant wrote lies in {% generation %} blocks, where a template has them. In others, an answer
           is what a rendering of the conversation up to it adds to a rendering that ends where the assistant is to
           begin (add_generation_prompt), but for whitespace behind the control token that ends the turn. Both must
           be beginnings of the whole conversation's rendering, or the spans are not known: a template that writes
           earlier turns otherwise once later ones follow is refused.
Weights    Answers of weight 0 (see conversations) are written and not marked. A template with markers says which block
           is whose answer by its order alone, so that beside weights it has to have one block for each answer.
Tokens     The whole text is encoded at once, special tokens included, none added. A token belongs to an answer if one
           of its characters does.
End        A turn ends with the first special token behind what the assistant said; where a template has none there,
           with the tokenizer's own end.
Limits     A conversation whose messages spell a control token ("<|im_end|>") gets that token, as in transformers.
           Prepared data must not depend on the day: `strftime_now` is defined for chatting alone, and a template
           that asks for the date without looking whether it can is refused.
Checked    tests/data/test_chat_template.py, against transformers' apply_chat_template
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scrimp.data.conversations import is_learnt
from scrimp.errors import DataError, ModelError
from scrimp.files import read_bounded

if TYPE_CHECKING:
    import jinja2

    from scrimp.data.tokenizer import TokenArray, Tokenizer

Span = tuple[int, int]
"""Where a text's characters begin and end."""
Message = Mapping[str, Any]
"""role, content, and whatever else a template reads."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OTHER_TEMPLATE = "give another one with --data.chat-template FILE, such as one with {% generation %} markers"
_LONGEST_TEMPLATE = 1 << 20
_PROBE = "Scrimp looks for the end of this."


def read_template(file: Path) -> str:
    """The text of a Jinja file; DataError where it cannot be read."""
    do = "give a Jinja file, such as a model's chat_template.jinja"
    if not file.is_file():
        raise DataError(f"there is no file {file}", do=do)
    try:
        return read_bounded(file, error=DataError, do=do, at_most=_LONGEST_TEMPLATE).decode()
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text", do=do) from None


@dataclass(frozen=True)
class EncodedChat:
    """A conversation in tokens."""

    tokens: TokenArray
    answers: npt.NDArray[np.bool_]
    """Whether the assistant wrote it and it is to be learnt, for each token."""
    answer_bytes: int
    """UTF-8 bytes of these, ends of turns included."""


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: with a template.

    Raises:
        ModelError: the tokenizer has none, or it is no Jinja template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer {tokenizer.name} has no chat template",
                got="no chat_template.jinja, and no chat_template in tokenizer_config.json",
                do="give one with --data.chat-template FILE (scrimp chat: --chat-template), or take a model that has "
                "been tuned for chats",
            )
        self.tokenizer, self.source = tokenizer, tokenizer.chat_template
        self.has_markers = _GENERATION.search(self.source) is not None
        self._compiled = self._compile()

    @property
    def digest(self) -> str:
        """SHA-256 of the template's text."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def encode(self, messages: Sequence[Message], where: str) -> EncodedChat:
        """A conversation in tokens, with the assistant's own marked.

        Args:
            messages: at least one of them the assistant's.
            where: what errors call it.

        Raises:
            DataError: the template refuses the conversation, or what the assistant wrote cannot be found.
        """
        text, spans = (
            self._marked(messages, where) if self.has_markers else self._by_prefixes(messages, where)
        )
        ids, offsets = self.tokenizer.encode_rendered(text)
        spans = self._learnt(messages, spans, where)
        starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        answers = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            answers |= (starts < end) & (ends > start)
        if not answers.any():
            raise DataError(
                f"{where}: the chat template of {self.tokenizer.name} marks nothing as the assistant's",
                do=_OTHER_TEMPLATE,
            )
        tokens = np.array(ids, dtype=self.tokenizer.dtype)
        return EncodedChat(tokens, answers, sum(len(text[start:end].encode()) for start, end in spans))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the assistant begins its next answer.

        Raises:
            DataError: the template refuses the conversation.
        """
        text = self._render(messages, "the conversation", add_generation_prompt=True, knows_date=True)
        return self.tokenizer.encode_rendered(text)[0]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that end an answer, the tokenizer's own ends among them."""
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        text = self._render(probe, "a question and its answer", add_generation_prompt=False, knows_date=True)
        ids, offsets = self.tokenizer.encode_rendered(text)
        end = text.rfind(_PROBE) + len(_PROBE)
        special = self.tokenizer.special_ids
        behind = [
            id_ for id_, (start, _) in zip(ids, offsets, strict=True) if start >= end and id_ in special
        ]
        return self.tokenizer.end_ids | set(behind[:1])

    # -- rendering -----------------------------------------------------------------------------

    def _compile(self) -> jinja2.Template:
        import jinja2

        from scrimp.data.jinja_sandbox import sandbox

        try:
            return sandbox().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"the chat template of {self.tokenizer.name} is no Jinja template",
                got=f"{error} (line {getattr(error, 'lineno', '?')})",
                do="repair it, or give another one with --data.chat-template FILE",
            ) from None

    def _render(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        add_generation_prompt: bool,
        knows_date: bool = False,
        pieces: list[str] | None = None,
    ) -> str:
        """The text of messages.

        Args:
            knows_date: the template may ask for today's date.
            pieces: a list that gets the text piece by piece, for markers to know where they are.
        """
        import jinja2

        values: dict[str, Any] = {
            **self.tokenizer.special_tokens,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if knows_date:
            values["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            if pieces is None:
                return self._compiled.render(values)
            for piece in self._compiled.generate(values):
                pieces.append(piece)
            return "".join(pieces)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            today = "strftime_now" in str(error)
            raise DataError(
                f"{where}: the chat template of {self.tokenizer.name} cannot write it",
                got="a question for today's date, on which prepared data must not depend" if today else error,
                do="write a date into the template, and give it with --data.chat-template FILE"
                if today
                else "repair or remove the conversation, or " + _OTHER_TEMPLATE,
            ) from None

    def _learnt(self, messages: Sequence[Message], spans: list[Span], where: str) -> list[Span]:
        """The spans of answers that are learnt."""
        learnt = [is_learnt(message) for message in messages if message["role"] == "assistant"]
        if all(learnt):
            return spans
        if len(spans) != len(learnt):
            raise DataError(
                f"{where}: the chat template of {self.tokenizer.name} does not say which answer has which weight",
                got=f"{len(spans)} {{% generation %}} blocks, {len(learnt)} answers",
                expected="a block for each answer",
                do=_OTHER_TEMPLATE,
            )
        return [span for span, is_kept in zip(spans, learnt, strict=True) if is_kept]

    def _marked(self, messages: Sequence[Message], where: str) -> tuple[str, list[Span]]:
        pieces: list[str] = []
        environment: Any = self._compiled.environment
        with environment.marking(pieces) as spans:
            text = self._render(messages, where, add_generation_prompt=False, pieces=pieces)
        return text, spans

    def _by_prefixes(self, messages: Sequence[Message], where: str) -> tuple[str, list[Span]]:
        whole = self._render(messages, where, add_generation_prompt=False)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], where, add_generation_prompt=True)
            until = self._render(messages[: number + 1], where, add_generation_prompt=False)
            if not (whole.startswith(until) and until.startswith(before)):
                raise DataError(
                    f"{where}: what the assistant wrote cannot be found by the chat template of {self.tokenizer.name}",
                    got="a template without {% generation %} markers that writes earlier messages otherwise once "
                    "later ones follow, or the beginning of an answer otherwise than the answer",
                    do=_OTHER_TEMPLATE,
                )
            spans.append((len(before), self._end_of_answer(until)))
        return whole, spans

    def _end_of_answer(self, text: str) -> int:
        """Where an answer at the end of a text ends: whitespace behind the token that ends the turn is nobody's."""
        stripped = text.rstrip()
        return len(stripped if stripped.endswith(self.tokenizer.added_texts) else text)
