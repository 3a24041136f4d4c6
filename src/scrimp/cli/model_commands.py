"""The commands on a trained model: measure it, continue a prompt, talk to it, export it (as `scrimp.cli.commands`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from scrimp.cli import eval_options
from scrimp.config import RANGES, Range, Sampling, check_device, check_range

_COUNT = Range(1, 2**31 - 1)


@dataclass(frozen=True)
class Evaluate:
    """Measure a model on text it has not seen: loss, perplexity, bits per byte; or, with --tasks, on tasks."""

    target: Positional[Path]
    """A run folder, one of its checkpoints, or a Hugging Face model folder."""
    data: str | None = None
    """Text to measure on, or to make tasks from: a file, or any source that `scrimp prepare` takes."""
    tasks: str | None = None
    """Tasks with commas between them: continuation, word-order, closing (made from --data), copying; a JSONL file of
    rows {"context": ..., "choices": [...], "answer": 0}; or lm-eval:NAME, lm-eval:FILE.yaml (needs scrimp[lm-eval])."""
    checkpoints: FlagCreatePairsOff[bool] = False
    """With --tasks: all checkpoints that the run has kept, and what each task says of them early."""
    beside: Annotated[tuple[str, ...], UseAppendAction] = ()
    """With --tasks: another run or model to compare; once for each. Runs that differ in their seed are one model."""
    text_column: str = "text"
    """Column (JSONL key) that holds the text; of conversations, messages unless another is named."""
    conversations: FlagCreatePairsOff[bool] = False
    """The data hold conversations: measured is what the assistant wrote."""
    sequence: int | None = None
    """Tokens per sequence. Unset: as trained, at most the model's context."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    trust_code: FlagCreatePairsOff[bool] = False
    """Run the code of a run whose model is a kind of its own, and code that a task of lm-eval names."""

    def execute(self, given: frozenset[str]) -> int:
        eval_options.refuse_options_of_others(self)
        check_device(self.device, "--device")
        if self.tasks is not None:
            from scrimp.cli.eval_tasks import evaluate_tasks

            return evaluate_tasks(self)
        assert self.data is not None, "options were checked"
        if self.sequence is not None:
            check_range("--sequence", self.sequence, RANGES["train.sequence"])
        from scrimp.cli.trained import evaluate_target

        evaluate_target(
            self.target,
            self.data,
            device=self.device,
            sequence=self.sequence,
            text_column=self.text_column,
            conversations=self.conversations,
        )
        return 0


@dataclass(frozen=True)
class Generate:
    """Continue a prompt."""

    target: Positional[Path]
    """A run folder, one of its checkpoints, or a Hugging Face model folder."""
    prompt: str
    """Text to continue."""
    tokens: int = 128
    """Most new tokens."""
    sampling: Annotated[Sampling, arg(name="")] = field(default_factory=Sampling)
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    trust_code: FlagCreatePairsOff[bool] = False
    """Run the code of a run whose model is a kind of its own."""

    def execute(self, given: frozenset[str]) -> int:
        _check_drawing(self)
        from scrimp.cli.trained import generate_text

        generate_text(
            self.target,
            self.prompt,
            tokens=self.tokens,
            sampling=self.sampling,
            device=self.device,
        )
        return 0


@dataclass(frozen=True)
class Chat:
    """Talk to a model that has a chat template: a message a line, /reset begins anew, /quit ends."""

    target: Positional[Path]
    """A run folder, one of its checkpoints, or a Hugging Face model folder."""
    system: str | None = None
    """What the model is told before the first message."""
    chat_template: Path | None = None
    """Jinja file that writes the conversation. Unset: the tokenizer's own template."""
    tokens: int = 512
    """Most tokens of an answer."""
    sampling: Annotated[Sampling, arg(name="")] = field(default_factory=Sampling)
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    trust_code: FlagCreatePairsOff[bool] = False
    """Run the code of a run whose model is a kind of its own."""

    def execute(self, given: frozenset[str]) -> int:
        _check_drawing(self)
        from scrimp.cli.chat import chat

        chat(
            self.target,
            system=self.system,
            tokens=self.tokens,
            sampling=self.sampling,
            device=self.device,
            chat_template=self.chat_template,
        )
        return 0


def _check_drawing(command: Generate | Chat) -> None:
    """Ranges of what decides how tokens are drawn."""
    check_range("--tokens", command.tokens, _COUNT)
    command.sampling.check()
    check_device(command.device, "--device")


@dataclass(frozen=True)
class ChooseBase:
    """Choose the formats that frozen weights beside adapters lie in, under a budget of bytes: by how far each moves the
    model's predictions on a text. Prints what to give to --adapter.base."""

    target: Positional[Path]
    """The base: a Hugging Face model folder, a run, or one of its checkpoints."""
    data: str
    """Text like that which the model will read: a file, or any source that `scrimp prepare` takes."""
    budget: float
    """Most bytes of the blocks' linear layers but experts and routers, as a share of theirs in bf16: 4 bits take 0.25,
    8 bits 0.5."""
    formats: str = "nvfp4,fp8"
    """Recipes to choose from, beside bf16."""
    tokens: int = 4096
    """Tokens of the text that are read."""
    text_column: str = "text"
    """Column (JSONL key) that holds the text; of conversations, messages unless another is named."""
    conversations: FlagCreatePairsOff[bool] = False
    """The data hold conversations, which are read as the chat template writes them."""
    sequence: int | None = None
    """Tokens per sequence. Unset: as trained, at most the model's context."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def execute(self, given: frozenset[str]) -> int:
        check_device(self.device, "--device")
        check_range("--tokens", self.tokens, _COUNT)
        check_range("--budget", self.budget, Range(0, 1, above=True))
        if self.sequence is not None:
            check_range("--sequence", self.sequence, RANGES["train.sequence"])
        from scrimp.cli.base_formats import choose_base

        choose_base(self)
        return 0


@dataclass(frozen=True)
class Export:
    """Write a run's newest checkpoint as a Hugging Face folder: safetensors, config.json, tokenizer."""

    run: Positional[Path]
    """Run folder, or one of its checkpoints."""
    out: Positional[Path]
    """New folder for the model."""
    adapter: FlagCreatePairsOff[bool] = False
    """Write a run's adapters alone, as a folder that peft loads beside the base; else they are merged."""
    trust_code: FlagCreatePairsOff[bool] = False
    """Run the code of a run whose model is a kind of its own."""

    def execute(self, given: frozenset[str]) -> int:
        if self.adapter:
            from scrimp.cli.trained import export_adapter_of

            export_adapter_of(self.run, self.out)
            return 0
        from scrimp.cli.trained import export_run

        export_run(self.run, self.out)
        return 0
