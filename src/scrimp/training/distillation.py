"""Distillation: next-token prediction, and beside it what teachers say of every token.

Problem  A small model, or one that reads the same text many times, learns more from the probabilities that a better
         model gives all words than from the one word that stands there. The best teacher is often several models.
Method   `objective.teachers` names runs or Hugging Face folders. In every micro-batch they read the same tokens,
         without gradients. Their logits are averaged, and the cross-entropy of those probabilities takes
         `teacher_weight` of the loss (`scrimp.objectives.soft_targets`); at 0 they only write
         (`scrimp.training.written_text`). Shown and recorded is the loss of the tokens alone, and evaluations run no
         teacher: figures stay comparable with those of any run.
         A teacher has the parameters' format of the model that it teaches, and lies on the device as a whole.
Average  With `objective.teachers = "ema"` the teacher is the exponential average of the model's own weights
         (`scrimp.runtime.averaged_weights`), as of a mean teacher: `own_average` makes it, and a run's steps move it.
         It is in checkpoints. Whoever runs the loss without an average (timing, before there is a run) has the model
         itself as its teacher, which is what an average begins as.
Resuming A digest of each teacher stands in run.json: a run goes on with the teachers that it began with.
Memory   The account has the teachers' weights, their last hidden states and their logits. They run before the student
         does, when nothing is kept of it yet: what a forward pass takes for a moment is not counted.
Limits   One process, or copies and shards of data parallelism. Predicted seconds have no teachers in them.
Source   Hinton et al. 2015, arXiv 1503.02531; of ensembles Kim et al. 2025, arXiv 2509.14786
Checked  tests/training/test_distillation.py
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from scrimp.config import Architecture, Config, ObjectiveConfig, ranks_of
from scrimp.config.mixture import MOST_PARTS
from scrimp.config.own_average import EMA, learns_from_average
from scrimp.config.schema import decided
from scrimp.data import Batch, Corpus, Mixture, load_tokenizer
from scrimp.errors import ConfigError, ModelError
from scrimp.gemm.observe import running
from scrimp.gemm.problem import DTYPES
from scrimp.models import spec_of
from scrimp.models.model import Model, build_model
from scrimp.objectives.base import LossSums
from scrimp.objectives.next_token import NextToken
from scrimp.objectives.soft_targets import SoftTargets
from scrimp.objectives.source_weights import SourceWeights
from scrimp.runtime.averaged_weights import AveragedWeights
from scrimp.runtime.execute import PLANNED_PROBE_TOKENS, Executable
from scrimp.runtime.parallel import units
from scrimp.training.checkpoint_manifest import MANIFEST
from scrimp.training.trained_weights import (
    architecture_of_weights,
    checkpoint_of,
    fill_from_weights,
    is_huggingface,
    is_run,
    tokenizer_of_weights,
    weights_digest,
)

NAME = "distill"
TEACHERS = "objective.teachers"


@dataclass(frozen=True)
class Distillation(NextToken):
    """Each position predicts its target, and what teachers predict there."""

    teachers: tuple[Path, ...] = ()
    weight: float = 0.5
    """Share of the loss that is the teachers'."""
    is_own_average: bool = False
    """Whether the teacher is the average of the trained model's own weights."""
    _loaded: list[Model] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def build(cls, settings: ObjectiveConfig) -> Distillation:
        """As the settings say."""
        return cls(
            z_loss=settings.z_loss,
            teachers=teachers_in(settings),
            weight=settings.teacher_weight,
            is_own_average=learns_from_average(settings),
        )

    def loss(self, model: Model, batch: Batch, *, chunk: int = 0) -> LossSums:
        """See `Objective`; without gradients or weight the teachers do not run."""
        if not (self.weight and torch.is_grad_enabled()):
            return super().loss(model, batch, chunk=chunk)
        teachers = self._models(model, batch.tokens_BT.device)
        with self._in_format_of(model):
            soft = soft_targets(teachers, batch, self.weight)
        hidden_SD = model(batch.tokens_BT, batch.document_starts).flatten(0, 1)
        targets_S, weights = batch.targets_BT.flatten(), SourceWeights.of(batch)
        sums = self._sums(model, hidden_SD, targets_S, chunk, soft=soft, weights=weights)
        for teacher in self._loaded:
            for unit in units(teacher):  # the head was gathered until here
                unit.reshard()
        return sums

    def head_loss(self, model: Model, hidden_SD: Tensor, targets_S: Tensor, *, chunk: int = 0) -> LossSums:
        """See `Objective`: with stand-ins, without memory, of the teachers' states and heads."""
        if not self.weight:
            return super().head_loss(model, hidden_SD, targets_S, chunk=chunk)
        number = hidden_SD.new_empty((), dtype=torch.float32 if self.is_own_average else None)
        widths = [_architecture(one).width for one in self.teachers]
        widths += [hidden_SD.shape[1]] * self.is_own_average
        soft = SoftTargets(
            self.weight,
            tuple(number.expand(len(targets_S), width) for width in widths),
            tuple(number.expand(len(model.head_weight), width) for width in widths),
        )
        return self._sums(model, hidden_SD, targets_S, chunk, soft=soft)

    def resident_bytes(self, parameters: str, tokens: int) -> int:
        """The teachers' weights, and their last hidden states; of those that only write nothing, nor of the average,
        which ranks share (`scrimp.planner.memory.average_costs`)."""
        if not self.weight:
            return 0
        known = [_architecture(one) for one in self.teachers]
        count = sum(spec_of(one).parameters + tokens * one.width for one in known)
        return count * DTYPES[parameters].itemsize

    def learn_from(self, average: Model) -> None:
        """The average of the weights is there."""
        self._loaded[:] = [average]

    def _in_format_of(self, model: Model) -> contextlib.AbstractContextManager[object]:
        """The average is in float32, and computes in the format of a model that is not."""
        if self.is_own_average and model.dtype != torch.float32:
            return torch.autocast(model.head_weight.device.type, model.dtype)
        return contextlib.nullcontext()

    def _models(self, model: Model, device: torch.device) -> Sequence[Model]:
        if self.is_own_average:
            return self._loaded or [model]
        if not self._loaded:
            self._loaded.extend(frozen_model(one, device, model.dtype) for one in self.teachers)
        return self._loaded


@running
@torch.no_grad()
def soft_targets(models: Sequence[Model], batch: Batch, weight: float) -> SoftTargets:
    """What models say of a micro-batch."""
    hidden = (one(batch.tokens_BT, batch.document_starts).flatten(0, 1) for one in models)
    return SoftTargets(weight, tuple(hidden), tuple(one.head_weight for one in models))


def _architecture(folder: Path) -> Architecture:
    """What a teacher is; its checkpoint is verified once for all who ask."""
    files = [*folder.glob(f"*/*/{MANIFEST}"), *folder.glob(MANIFEST), *folder.glob("config.*")]
    return _known(folder, tuple(sorted((str(one), one.stat().st_mtime_ns) for one in files)))


@functools.lru_cache(maxsize=64)
def _known(folder: Path, files: tuple[tuple[str, int], ...]) -> Architecture:
    return architecture_of_weights(folder)


@running
def frozen_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Model:
    """A model that runs and never changes."""
    model = build_model(_architecture(folder), device=device, dtype=dtype)
    fill_from_weights(model, folder)
    return model.eval().requires_grad_(False)


def own_average(executable: Executable, settings: ObjectiveConfig) -> AveragedWeights | None:
    """The average of an executable's weights, its teacher from now on; None: others teach, or nobody."""
    if not learns_from_average(settings):
        return None
    assert isinstance(executable.objective, Distillation), "checked before"
    found = AveragedWeights(executable, settings.teacher_momentum)
    executable.objective.learn_from(found.model)
    return found


def teachers_in(settings: ObjectiveConfig) -> tuple[Path, ...]:
    """The folders that `objective.teachers` names.

    Raises:
        ConfigError: the average of the weights is to teach beside them.
    """
    if learns_from_average(settings):
        return ()
    names = [name.strip() for name in (settings.teachers or "").split(",")]
    if EMA in names:
        raise ConfigError(
            f"{TEACHERS} {EMA} stands alone",
            got=settings.teachers,
            do=f"leave the others out; a folder of that name is ./{EMA}",
        )
    return tuple(Path(name).expanduser() for name in names if name)


def check_teachers(config: Config) -> None:
    """Refuse teachers that are not there, or that nobody asks.

    Raises:
        ConfigError: with the setting to change. ModelError, CheckpointError: a folder has no model.
    """
    settings = config.objective
    teachers, layout = teachers_in(settings), config.layout
    _check_written(config)
    if (settings.name == NAME) != (bool(teachers) or learns_from_average(settings)):
        raise ConfigError(
            f"objective.name {settings.name} and {TEACHERS} do not go together",
            got=f"{TEACHERS} {settings.teachers}" if settings.name != NAME else f"no {TEACHERS}",
            expected=f"both or neither: objective.name {NAME} learns from teachers",
            do=f"set --objective.name {NAME}"
            if settings.name != NAME
            else f"name runs or folders, separated by commas, or {EMA}",
        )
    twice = next((one for one in teachers if teachers.count(one) > 1), None)
    if twice is not None:
        raise ConfigError(f"{TEACHERS} names a folder twice", got=twice, do="leave one of the two out")
    for one in teachers:
        _architecture(one)
    degrees = {key: getattr(layout, key) for key in ("cp", "tp", "pp", "ep")}
    shared = [f"layout.{key} {value}" for key, value in degrees.items() if value > 1]
    if teachers and ranks_of(layout) > 1 and shared:
        raise ConfigError(
            f"objective.name {NAME} runs whole models as teachers",
            got=", ".join(shared),
            expected="ranks of dp and fsdp",
            do="leave those out",
        )


def share_of(written: float) -> Fraction:
    """The share of samples that teachers write, as `Interleave` can keep it."""
    return Fraction(str(written)).limit_denominator(MOST_PARTS)


def _check_written(config: Config) -> None:
    written = config.objective.written
    if config.objective.name == NAME and not written and not config.objective.teacher_weight:
        raise ConfigError(
            "teachers without weight who write nothing teach nothing",
            got="objective.teacher_weight 0, objective.written 0",
            do="raise one of the two",
        )
    if config.objective.written_tokens is not None and not written:
        raise ConfigError(
            "objective.written_tokens has no effect where teachers write nothing",
            got=f"{config.objective.written_tokens:,}, objective.written 0",
            do="set --objective.written, or leave it out",
        )
    if written and config.objective.name != NAME:
        raise ConfigError(
            f"objective.written applies to objective.name {NAME}",
            got=f"{written:g} beside objective.name {config.objective.name}",
            do="leave it out: there are no teachers who write",
        )
    if written and share_of(written) in (0, 1):
        raise ConfigError(
            "objective.written is no share of samples",
            got=f"{written:g}",
            expected=f"at least {1 / MOST_PARTS:g}, and as much below 1",
            do="round it",
        )
    if written and config.data.mixed:
        raise ConfigError(
            "objective.written does not go with data.mix",
            got=f"{written:g} beside data.mix {config.data.mix}",
            expected="one source beside what teachers write",
            do="leave one of the two out",
        )


def refuse_other_teachers(config: Config, architecture: Architecture, corpus: Corpus | Mixture) -> None:
    """Refuse teachers that know other words than the model, or less context than its sequences.

    Args:
        config: decided.

    Raises:
        ModelError: with the setting to change.
    """
    for one in teachers_in(config.objective):
        folder, teacher = tokenizer_of_weights(one), _architecture(one)
        if folder is None or load_tokenizer(folder).digest != corpus.tokenizer.digest:
            raise ModelError(
                f"the teacher {one} does not have the tokenizer of the data",
                got="no tokenizer" if folder is None else str(folder),
                expected=f"{corpus.tokenizer.name}, {corpus.tokenizer.vocab_size:,} entries",
                do=f"leave --data.tokenizer out, or name {folder}" if folder else "name another teacher",
            )
        if teacher.vocab_size != architecture.vocab_size:
            raise ModelError(
                f"the teacher {one} has another number of words than the model",
                got=f"{teacher.vocab_size:,}",
                expected=f"{architecture.vocab_size:,}",
                do=f"set --model.vocab-size {teacher.vocab_size}",
            )
        longest = max(decided(config.train.sequence), min(architecture.context, PLANNED_PROBE_TOKENS))
        if teacher.context < longest:
            raise ModelError(
                f"the teacher {one} has a shorter context than the run's sequences",
                got=f"{teacher.context:,} tokens",
                expected=f"{longest:,} or more",
                do=f"lower --train.sequence or --model.context to {teacher.context:,}",
            )


def digests_of_teachers(config: Config) -> dict[str, str]:
    """SHA-256 over the teachers' checkpoints, as their manifests have them, or over the configurations and weights of
    Hugging Face folders, by dotted key; empty without teachers.

    Raises:
        ModelError: a teacher is not there.
    """
    found = hashlib.sha256()
    teachers = teachers_in(config.objective)
    for one in teachers:
        if is_run(one):
            found.update(weights_digest(checkpoint_of(one).folder).encode())
        elif not is_huggingface(one):
            raise ModelError(
                f"the teacher {one} is not there",
                got="neither a Scrimp run nor a Hugging Face folder",
                expected="the one that the run learns from",
                do="put it back, or say with --objective.teachers where it lies now",
            )
        else:
            found.update((one / "config.json").read_bytes() + weights_digest(one).encode())
    return {TEACHERS: found.hexdigest()} if teachers else {}
