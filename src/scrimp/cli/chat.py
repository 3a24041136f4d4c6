"""`scrimp chat`: messages in, answers out, by the chat template of a model's tokenizer.

On a terminal a prompt asks for each message. Elsewhere each line of standard input is a message, and each answer is
printed as it comes, so that a pipe can drive it. An answer ends where the template ends a turn. The whole conversation
goes to the model each time. The same seed and messages give the same answers.
Checked  tests/training/test_sft.py
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scrimp.cli.trained import load_executable, new_text
from scrimp.config import Sampling
from scrimp.data import ChatTemplate, Tokenizer
from scrimp.data.chat_template import read_template
from scrimp.errors import ModelError, ScrimpError, typed
from scrimp.models.generation import generate
from scrimp.report.units import printable
from scrimp.runtime import Executable
from scrimp.training.trained_weights import open_target

PROMPT = "> "
_HELP = "/reset begins a new conversation, /quit ends"


class Conversation:
    """A conversation with a model.

    Args:
        tokens: most of an answer.
        sampling: how they are drawn, with another seed in each turn.
        system: what stands before the first message; None: nothing.
    """

    def __init__(
        self,
        executable: Executable,
        template: ChatTemplate,
        tokens: int,
        sampling: Sampling,
        system: str | None = None,
    ) -> None:
        self._executable, self._template = executable, template
        self._tokens, self._sampling = tokens, sampling
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._first)

    def reset(self) -> None:
        """Begin anew, with the system's message alone."""
        self.messages = list(self._first)

    def answer(self, text: str) -> Iterator[str]:
        """The answer to a message, piece by piece. One that breaks off leaves the conversation as it was.

        Raises:
            DataError: the template refuses the conversation. ModelError: it does not fit the model's context.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self._template.prompt(asked)
        context = self._executable.model.architecture.context
        room = context - len(prompt)
        if room < 1:
            raise ModelError(
                "the conversation fills the model's context",
                got=f"{len(prompt):,} tokens",
                expected=f"fewer than {context:,}",
                do="begin a new one with /reset",
            )
        tokens = generate(
            self._executable.model,
            prompt,
            max_tokens=min(self._tokens, room),
            sampling=replace(self._sampling, seed=(self._sampling.seed + len(asked)) % 2**63),
            end_ids=self._template.end_ids,
        )
        ids = list(prompt)
        yield from new_text(self._template.tokenizer, ids, tokens)
        answer = self._template.tokenizer.decode(ids[len(prompt) :])
        self.messages = [*asked, {"role": "assistant", "content": answer}]


def chat(
    folder: Path,
    *,
    system: str | None = None,
    tokens: int,
    sampling: Sampling,
    device: str = "auto",
    chat_template: Path | None = None,
) -> None:
    """Answer the messages of standard input until it ends.

    Args:
        folder: a run, one of its checkpoints, or a Hugging Face folder.
        chat_template: a Jinja file in place of the tokenizer's own template.

    Raises:
        ModelError: there is no template; without a terminal also what `Conversation.answer` raises.
    """
    target = open_target(folder)
    template = _template(target.tokenizer, chat_template, folder)
    conversation = Conversation(load_executable(target, device), template, tokens, sampling, system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{folder}: {_HELP}", file=sys.stderr)
    for line in _messages(is_terminal):
        message = line.strip()
        if message == "/quit":
            return
        if message == "/reset":
            conversation.reset()
        elif message.startswith("/") and is_terminal:
            print(f"there is no command {printable(message.split()[0])}: {_HELP}", file=sys.stderr)
        elif message:
            try:
                _print_answer(conversation, message)
            except ScrimpError as error:
                if not is_terminal:
                    raise
                print(error, file=sys.stderr)


def _template(tokenizer: Tokenizer, given: Path | None, folder: Path) -> ChatTemplate:
    if given is not None:
        return ChatTemplate(tokenizer.with_chat_template(read_template(given)))
    if tokenizer.chat_template is None:
        tune = typed(
            "train", "--objective.name", "sft", "--data.source", "CHATS.jsonl", "--model.weights", folder
        )
        raise ModelError(
            f"{folder} has no chat template: it continues texts",
            do=f"tune it with {tune}, give its template with --chat-template FILE, or use "
            f"{typed('generate', folder, '--prompt', 'TEXT')}",
        )
    return ChatTemplate(tokenizer)


def _messages(is_terminal: bool) -> Iterator[str]:
    if not is_terminal:
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and remembers them
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return


def _print_answer(conversation: Conversation, message: str) -> None:
    """Print as it comes; an interrupt on a terminal ends the answer, and the conversation stays as it was."""
    try:
        for piece in conversation.answer(message):
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    sys.stdout.write("\n")
    sys.stdout.flush()
