"""One family of exceptions, and one form for their messages.

A message answers three questions, in this order: what happened, what was got and what was
expected, what to do about it. `ScrimpError` takes the three apart as keywords so that no
error can forget one::

    raise DataError(
        "shard is truncated",
        got="train-00003.tokens with 1,048,576 bytes",
        expected="4,194,360 bytes, by its header",
        do="run `scrimp prepare` again: it rewrites the damaged shard only",
    )

prints as ``shard is truncated - got …, expected … - run `scrimp prepare` again: …``.

Exit codes: every error that the user's input can cause ends the command with 2;
`TrainingError` (the run itself went wrong) ends it with 1. Anything that is not a
`ScrimpError` is a bug in Scrimp, also 1, and the only case that shows a traceback.
"""

from __future__ import annotations

import shlex
from typing import ClassVar

LONGEST = 2000


def shortened(value: object) -> str:
    """The text of a part of a message, at most `LONGEST` characters of it: what was got may be a whole file."""
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"


def typed(*words: object) -> str:
    """A command of Scrimp as advice shows it: quoted so that a shell takes it as it stands."""
    return f"`{shlex.join(['scrimp', *map(str, words)])}`"


class ScrimpError(Exception):
    """Base of everything Scrimp raises on purpose.

    Args:
        what: what happened, in a few words, naming the key, file or tensor.
        got: what was found; left out where the sentence already says it.
        expected: what is allowed.
        do: what the user can do now.
    """

    exit_code: ClassVar[int] = 2

    def __init__(
        self,
        what: str,
        *,
        got: object | None = None,
        expected: object | None = None,
        do: str | None = None,
    ) -> None:
        self.what, self.got, self.expected, self.do = what, got, expected, do
        middle = [f"got {shortened(got)}"] if got is not None else []
        middle += [f"expected {shortened(expected)}"] if expected is not None else []
        parts = [shortened(what), ", ".join(middle), shortened(do or "")]
        super().__init__(" - ".join(part for part in parts if part))


class ConfigError(ScrimpError):
    """A key, a value or a combination of values in the configuration."""


class DataError(ScrimpError):
    """A source, a tokenizer or a token shard."""


class ModelError(ScrimpError):
    """A model folder, an architecture that the decoder does not support, or its weights."""


class CheckpointError(ScrimpError):
    """A checkpoint or run folder that is missing, damaged, or belongs to another run."""


class PlanError(ScrimpError):
    """A plan that cannot be read, or that this device or model cannot run."""


class DeviceError(ScrimpError):
    """A device that is not there or cannot do what was asked."""


class RanksError(ScrimpError):
    """Ranks that cannot train together: one never comes, another program has the port, or they differ."""


class StorageError(ScrimpError):
    """No space, no permission, or a path that is in the way."""


class TrainingError(ScrimpError):
    """The run itself failed: it diverged, or did not run as planned. Exit code 1."""

    exit_code: ClassVar[int] = 1
