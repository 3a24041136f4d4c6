"""What `scrimp demonstrate` does: examples with the nearest ones of a bank before each, as conversations.

Checked  tests/cli/test_demonstrate.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from scrimp.cli.show import plain_console
from scrimp.data.demonstrations import (
    Example,
    Scorer,
    at_random,
    by_bm25,
    conversation,
    read_examples,
    retrieved,
)
from scrimp.data.progress_line import Progress
from scrimp.errors import ConfigError
from scrimp.files import refuse_taken, replaced_file, storage

if TYPE_CHECKING:
    from scrimp.cli.commands import Demonstrate


def refuse_options_of_others(command: Demonstrate, given: frozenset[str]) -> None:
    """Refuse what another way to choose would need, a name that training would read as text, and a file that is there.

    Raises:
        ConfigError, StorageError: by the option, or the file.
    """
    if (command.model is None) == (command.by == "embedding"):
        raise ConfigError(
            "--by embedding needs --model" if command.model is None else "--model needs --by embedding",
            got=f"--by {command.by}",
            expected="a run or a Hugging Face folder, whose embeddings are compared",
        )
    for option, kinds in {"seed": ("random",), "device": ("embedding",)}.items():
        if option in given and command.by not in kinds:
            raise ConfigError(
                f"--{option} has no effect with --by {command.by}",
                expected=f"--by {kinds[0]}",
                do="leave it out",
            )
    if command.by == "none" and (useless := given & {"count", "bank", "tasks"}):
        raise ConfigError(
            f"--{min(useless)} has no effect with --by none, which chooses no examples", do="leave it out"
        )
    if command.out.suffix != ".jsonl":
        raise ConfigError("conversations are written as JSONL", got=command.out, expected="NAME.jsonl")
    refuse_taken(command.out)


def demonstrate(command: Demonstrate) -> int:
    """Write the conversations, and say how many demonstrations they have."""
    need_tasks = command.tasks != "any"
    asked = read_examples(command.src, need_tasks=need_tasks)
    bank = asked if command.bank is None else read_examples(command.bank, need_tasks=need_tasks)
    scorer = _scorer(command, asked, bank)
    count = 0 if command.by == "none" else command.count
    sizes: Counter[int] = Counter()
    with (
        Progress("choosing for", sum(len(one.question) for one in asked)) as bar,
        storage(command.out, "write"),
        replaced_file(command.out) as file,
    ):
        done = 0
        for example, found in zip(asked, retrieved(asked, bank, scorer, count, command.tasks), strict=True):
            messages = conversation(found, example)
            file.write(json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n")
            sizes[len(found)] += 1
            done += len(example.question)
            bar.update(done)
    _say(command.out, len(asked), count, sizes)
    return 0


def _scorer(command: Demonstrate, asked: list[Example], bank: list[Example]) -> Scorer:
    match command.by:
        case "bm25":
            return by_bm25(asked, bank)
        case "embedding":
            assert command.model is not None, "options were checked"
            return _by_embedding(command.model, command.device, asked, bank)
        case "random" | "none":
            return at_random(bank, command.seed)


def _by_embedding(model: Path, device: str, asked: list[Example], bank: list[Example]) -> Scorer:
    from scrimp.cli.trained import load_executable
    from scrimp.tasks.embedding import embeddings
    from scrimp.training.trained_weights import open_target

    target = open_target(model)
    executable = load_executable(target, device)
    texts = list(dict.fromkeys(one.question for one in (*asked, *bank)))
    sizes, done = sum(map(len, texts)), 0
    with Progress("embedding", sizes) as bar:

        def count(characters: int) -> None:
            nonlocal done
            done += characters
            bar.update(done)

        found = embeddings(executable, target.tokenizer, texts, count)
    row_of = {text: number for number, text in enumerate(texts)}
    of_bank = found[[row_of[one.question] for one in bank]]
    return lambda number: of_bank @ found[row_of[asked[number].question]]


def _say(out: Path, rows: int, count: int, sizes: Counter[int]) -> None:
    fewer = sum(number for size, number in sizes.items() if size < count)
    text = f"{out}: {rows:,} conversations, {count:,} demonstrations before each"
    if fewer:
        mean = sum(size * number for size, number in sizes.items()) / rows
        text += f"; {fewer:,} have fewer, since no more fit (mean {mean:.1f})"
    plain_console().print(text, soft_wrap=True)
