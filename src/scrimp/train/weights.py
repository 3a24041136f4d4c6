"""Trained weights from either kind of folder: a Scrimp run, or a Hugging Face model.

A run folder is known by its ``config.toml``, a Hugging Face folder by its ``config.json``. From a
run the newest checkpoint that verifies is taken; damaged newer ones are never read: a line on
standard error names them, or the error where no good one is left.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from scrimp.config import Architecture, RopeScaling
from scrimp.data import Tokenizer, load_tokenizer
from scrimp.errors import CheckpointError, ModelError
from scrimp.model import Decoder, load_weights, read_architecture
from scrimp.train.checkpoint import Checkpoint, CheckpointStore
from scrimp.train.run_folder import CHECKPOINTS, CONFIG, TOKENIZER

MODEL_PREFIX = "model."


def is_run(folder: Path) -> bool:
    """Whether `folder` is a Scrimp run."""
    return (folder / CONFIG).is_file()


def is_huggingface(folder: Path) -> bool:
    """Whether `folder` is a Hugging Face model."""
    return (folder / "config.json").is_file()


def newest_checkpoint(run_dir: Path) -> Checkpoint:
    """The newest checkpoint of a run that verifies.

    Raises:
        CheckpointError: there is none.
    """
    checkpoint, errors = CheckpointStore(run_dir, keep_last=1, keep_every=0).latest()
    if checkpoint is not None:
        for error in errors:
            print(f"using {checkpoint.folder.name}, an older checkpoint: {error}", file=sys.stderr)
        return checkpoint
    raise CheckpointError(
        f"{run_dir} has no usable checkpoint",
        got="; ".join(str(error) for error in errors) or f"nothing complete in {run_dir / CHECKPOINTS}",
        do="train it first, or give a Hugging Face folder",
    )


def architecture_of_checkpoint(checkpoint: Checkpoint) -> Architecture:
    """The architecture that a checkpoint's weights belong to."""
    try:
        fields = dict(checkpoint.state["architecture"])
        scaling = fields.pop("rope_scaling")
        return Architecture(rope_scaling=RopeScaling(**scaling) if scaling else None, **fields)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.folder} describes its model in a way that this version does not know",
            got=error,
            do="use the version of Scrimp that wrote it",
        ) from None


def architecture_of_weights(folder: Path) -> Architecture:
    """The architecture of a run or a Hugging Face folder.

    Raises:
        ModelError: the folder is neither, or not a model that the decoder supports.
    """
    _refuse_stranger(folder)
    return (
        architecture_of_checkpoint(newest_checkpoint(folder)) if is_run(folder) else read_architecture(folder)
    )


def fill_from_weights(model: Decoder, folder: Path) -> None:
    """Fill every parameter of `model` from a run or a Hugging Face folder, tensor by tensor."""
    _refuse_stranger(folder)
    if not is_run(folder):
        load_weights(model, folder)
        return
    fill_from_checkpoint(model, newest_checkpoint(folder))


@torch.no_grad()
def fill_from_checkpoint(model: Decoder, checkpoint: Checkpoint) -> None:
    """Fill every parameter of `model` from a checkpoint, tensor by tensor."""
    parameters = dict(model.named_parameters())
    for name, tensor in checkpoint.tensors(MODEL_PREFIX):
        parameter = parameters.pop(name.removeprefix(MODEL_PREFIX), None)
        if parameter is None or parameter.shape != tensor.shape:
            raise CheckpointError(
                f"{checkpoint.folder} belongs to another model",
                got=f"{name} of shape {list(tensor.shape)}",
                expected="no such tensor" if parameter is None else f"shape {list(parameter.shape)}",
            )
        parameter.copy_(tensor)
    if parameters:
        raise CheckpointError(
            f"{checkpoint.folder} belongs to another model",
            got=f"no tensor for {', '.join(sorted(parameters)[:3])}",
        )


def tokenizer_of_weights(folder: Path) -> Path | None:
    """The tokenizer folder that belongs to a run or a Hugging Face folder, if it has one."""
    candidate = folder / TOKENIZER if is_run(folder) else folder
    return candidate if (candidate / "tokenizer.json").is_file() else None


@dataclass(frozen=True)
class Target:
    """What `eval`, `generate` and `export` act on."""

    folder: Path
    architecture: Architecture
    checkpoint: Checkpoint | None
    """None for a Hugging Face folder."""
    tokenizer: Tokenizer
    tokenizer_folder: Path

    def fill(self, model: Decoder) -> None:
        """Fill the parameters of `model`."""
        if self.checkpoint is None:
            load_weights(model, self.folder)
        else:
            fill_from_checkpoint(model, self.checkpoint)


def open_target(folder: Path) -> Target:
    """A run or a Hugging Face folder with its tokenizer.

    Raises:
        ModelError: neither, or without a tokenizer. CheckpointError: a run without a checkpoint.
    """
    _refuse_stranger(folder)
    checkpoint = newest_checkpoint(folder) if is_run(folder) else None
    architecture = architecture_of_checkpoint(checkpoint) if checkpoint else read_architecture(folder)
    tokenizer_folder = tokenizer_of_weights(folder)
    if tokenizer_folder is None:
        raise ModelError(
            f"{folder} has no tokenizer",
            expected="a tokenizer.json",
            do="copy the model's tokenizer files into it",
        )
    tokenizer = load_tokenizer(tokenizer_folder)
    if tokenizer.vocab_size > architecture.vocab_size:
        raise ModelError(
            f"the tokenizer in {tokenizer_folder} is not this model's",
            got=f"{tokenizer.vocab_size:,} entries",
            expected=f"at most {architecture.vocab_size:,}, the model's embedding rows",
            do="copy the model's own tokenizer files into the folder",
        )
    return Target(folder, architecture, checkpoint, tokenizer, tokenizer_folder)


def _refuse_stranger(folder: Path) -> None:
    if not folder.exists():
        raise ModelError(f"{folder} does not exist", expected="a Scrimp run or a Hugging Face folder")
    if not folder.is_dir() or not (is_run(folder) or is_huggingface(folder)):
        raise ModelError(
            f"{folder} is neither a Scrimp run nor a Hugging Face folder",
            expected=f"a folder with {CONFIG} or config.json",
        )
