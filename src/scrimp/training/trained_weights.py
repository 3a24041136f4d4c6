"""Trained weights from a folder: a Scrimp run or one of its checkpoints, or a Hugging Face model.

A run folder is known by its ``config.toml``, a checkpoint by the manifest beside it, a Hugging Face
folder by its ``config.json``. From a run the newest checkpoint that verifies is taken; damaged newer
ones are never read: a line on standard error names them, or the error where no good one is left.
Weights that are not finite are refused, not passed over: they are what the run came to, and its user
chooses what to take instead.

A run with adapters keeps these alone, and the digest of the base that they stand beside. Whoever reads its weights gets
those of the base, as the run stored them (`adapter.base`), with the adapters merged, one at a time, in the format in
which they were trained beside::

    W + alpha / r B A

A run whose optimizer evaluates an average of the weights (`OptimizerFacts.averages`) has in its checkpoints what it
trains, and states that say the average. Whoever reads its weights gets the average.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scrimp import user_code
from scrimp.config import Architecture, Config, flatten, replace_values
from scrimp.config.optimizers import facts_of
from scrimp.data import Tokenizer, load_tokenizer
from scrimp.errors import CheckpointError, ConfigError, ModelError
from scrimp.files import storage
from scrimp.gemm import merged, stored_values
from scrimp.gemm.problem import DTYPES
from scrimp.models import spec_of
from scrimp.models.huggingface.config_json import read_architecture
from scrimp.models.huggingface.load import check_weights, load_weights, stream_parameters, stream_weights
from scrimp.models.model import ADAPTER, Model
from scrimp.optim import evaluated
from scrimp.parts import part_of
from scrimp.training.checkpoint import Checkpoint, CheckpointStore, not_finite_error
from scrimp.training.checkpoint_manifest import MANIFEST, read_manifest
from scrimp.training.export_seal import read_seal
from scrimp.training.run_folder import CHECKPOINTS, CONFIG, TOKENIZER, run_of, saved_config
from scrimp.training.run_record import checked_record, read_record
from scrimp.training.run_state import RunState, read_state
from scrimp.training.tensor_files import is_finite, not_finite
from scrimp.user_code import is_code

MODEL_PREFIX, OPTIMIZER_PREFIX = "model.", "optimizer."
_OF_STATES = (
    "optimizer.name",
    "optimizer.rank",
    "optimizer.moments",
    "optimizer.master_weights",
    "train.parameters",
)
"""Settings that say which states an optimizer keeps."""
_OF_AVERAGE = "optimizer.beta1"
"""The one that says which average of the weights they are of."""
_OF_GROUPS = "optimizer.embedding_lr_ratio"
"""The one that says which groups the user's own optimizer has."""


def is_run(folder: Path) -> bool:
    """Whether `folder` is a Scrimp run, or one of its checkpoints."""
    return (folder / CONFIG).is_file()


def is_huggingface(folder: Path) -> bool:
    """Whether `folder` is a Hugging Face model."""
    return (folder / "config.json").is_file()


def checkpoint_of(folder: Path) -> Checkpoint:
    """The checkpoint that a folder is, or the newest one of a run that verifies.

    Raises:
        CheckpointError: there is none, or its weights are not finite.
    """
    if (folder / MANIFEST).is_file():
        itself = Checkpoint(read_manifest(folder).step, folder)
        itself.verify()
        itself.refuse_not_finite(MODEL_PREFIX, do="name an older checkpoint of the run")
        return itself
    store = CheckpointStore(folder, keep_last=1, keep_every=0)
    checkpoint, errors = store.latest()
    if checkpoint is None:
        raise CheckpointError(
            f"{folder} has no usable checkpoint",
            got="; ".join(str(error) for error in errors) or f"nothing complete in {folder / CHECKPOINTS}",
            do="train it first, or give a Hugging Face folder",
        )
    if any(name.startswith(MODEL_PREFIX) for name in checkpoint.not_finite):
        sound, _ = store.latest(finite=True)
        do = f"name {sound.folder} instead" if sound else "no checkpoint of this run is finite: train anew"
        checkpoint.refuse_not_finite(MODEL_PREFIX, do=do)
    for error in errors:
        print(f"using {checkpoint.folder.name}, an older checkpoint: {error}", file=sys.stderr)
    return checkpoint


@dataclass(frozen=True)
class Base:
    """The weights that adapters stand beside."""

    folder: Path
    """A Hugging Face folder, or a checkpoint of a run."""
    digest: str
    """SHA-256 of the folder's weights, or of the checkpoint's manifest, which has the checksums of its files."""


def find_base(folder: Path, digest: str | None = None) -> Base:
    """The base in a folder: a Hugging Face model, or the newest checkpoint of a run.

    Args:
        digest: of the one that is wanted, which may be an older checkpoint.

    Raises:
        CheckpointError: it is not there.
    """
    if not (is_run(folder) or is_huggingface(folder)):
        raise CheckpointError(
            "the base model that adapters were trained beside is not there",
            got=f"no model in {folder}",
            expected="the folder that model.weights named",
            do="put it back there",
        )
    if digest is None or not is_run(folder) or (folder / MANIFEST).is_file():
        found = [checkpoint_of(folder).folder if is_run(folder) else folder]
    else:
        store = CheckpointStore(folder, keep_last=1, keep_every=0)
        found = [one.folder for one in reversed(store.complete())]
    for one in found:
        own = weights_digest(one)
        if digest in (None, own):
            return Base(one, own)
    raise CheckpointError(
        f"the base model in {folder} is not the one that adapters were trained beside",
        got=f"digest {weights_digest(found[0])[:12]}" if found else "no checkpoint",
        expected=(digest or "")[:12],
        do="put the weights back that model.weights named",
    )


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights in a checkpoint, by its manifest, or in a Hugging Face folder, by their bytes."""
    paths = [folder / MANIFEST] if is_run(folder) else sorted(folder.glob("*.safetensors"))
    with storage(folder, "read"):
        stats = [(path, path.stat()) for path in paths]
    return _hashed(tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats))


@functools.lru_cache(maxsize=8)
def _hashed(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, *_ in files:
        with storage(path, "read"), open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def base_of(checkpoint: Checkpoint, state: RunState) -> Base:
    """The base that the adapters in a checkpoint stand beside.

    Raises:
        CheckpointError: it is not there.
    """
    folder = saved_config(checkpoint.folder).model.weights
    if folder is None:
        raise CheckpointError(
            f"{checkpoint.folder / CONFIG} is not the one of its adapters",
            got="no model.weights",
            expected="the base model that they were trained beside",
            do="use another checkpoint",
        )
    return find_base(folder, state.base)


def finite_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint, one at a time by their names in the model; adapters merged into those of their base.

    Raises:
        CheckpointError: one of them is not finite, whatever the manifest says, or the base is not there.
    """
    state, stored = read_state(checkpoint), finite_tensors(checkpoint)
    if state.architecture.adapter is None:
        yield from stored
        return
    folder, adapters = base_of(checkpoint, state).folder, dict(stored)
    dtype = DTYPES[saved_config(checkpoint.folder).train.parameters]
    layers = spec_of(state.architecture).layers()
    for name, weight in _weights_in(folder):
        linear = layers.get(name.removesuffix(".weight"))
        weight = weight.to(dtype)
        if linear is not None and linear.stored:
            weight = stored_values(weight, linear.stored)
        yield name, _merged(name, weight, adapters, state.architecture)


def _weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    if is_run(folder):
        return finite_weights(checkpoint_of(folder))
    return stream_parameters(read_architecture(folder), folder)


def _merged(name: str, weight: Tensor, adapters: Mapping[str, Tensor], architecture: Architecture) -> Tensor:
    layer, spec, adapter = name.removesuffix(".weight"), spec_of(architecture), architecture.adapter
    a, b = (adapters.get(f"{layer}{end}") for end in ADAPTER)
    if a is None or b is None or adapter is None:
        return weight
    return merged(weight, a, b, spec.linear(layer).stacked, adapter.scale)


def finite_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint itself holds of the model, one at a time: all weights, or adapters; as they are evaluated.

    Raises:
        CheckpointError: one of them is not finite, whatever the manifest says.
    """
    settings = saved_config(checkpoint.folder).optimizer
    for full, stored in checkpoint.tensors(MODEL_PREFIX):
        name, tensor = full.removeprefix(MODEL_PREFIX), stored
        if facts_of(settings.name).averages:
            tensor = _average(checkpoint, name, stored, settings.beta1)
        if not is_finite(tensor):
            raise not_finite_error(checkpoint.folder, [full], do="name an older checkpoint of the run")
        yield name, tensor


def _average(checkpoint: Checkpoint, name: str, weight: Tensor, beta1: float) -> Tensor:
    """What is evaluated in the place of a weight that an optimizer averages."""
    states = {
        end: state
        for end in ("z", "master")
        for _, state in checkpoint.tensors(f"{OPTIMIZER_PREFIX}{name}.{end}")
    }
    return evaluated(states.get("master", weight), states["z"], beta1).to(weight.dtype)


def architecture_of_weights(folder: Path) -> Architecture:
    """The architecture of a run or a Hugging Face folder; of adapters that of their base, which they are merged into.

    Raises:
        ModelError: the folder is neither, or not a model that the decoder supports.
    """
    _refuse_stranger(folder)
    return read_state(checkpoint_of(folder)).architecture.base if is_run(folder) else _of_huggingface(folder)


def _of_huggingface(folder: Path) -> Architecture:
    architecture = read_architecture(folder)
    check_weights(architecture, folder)
    return architecture


def fill_from_weights(model: Model, folder: Path) -> None:
    """Fill every parameter of `model` but adapters from a run or a Hugging Face folder, tensor by tensor."""
    _refuse_stranger(folder)
    if is_run(folder):
        fill_from_checkpoint(model, checkpoint_of(folder))
    else:
        fill_from_huggingface(model, folder)


def refuse_unusable_weights(folder: Path) -> None:
    """Look through the weights of a run or a Hugging Face folder before anything is written for a run from them.

    Raises:
        ScrimpError: a weight is not finite, or the tokenizer or run.json of the run is not its own.
    """
    _refuse_stranger(folder)
    if not is_run(folder):
        weights = stream_weights(read_architecture(folder), folder)
        names = [name for name, tensor in weights if not is_finite(tensor)]
        if names:
            raise _not_finite_in(folder, names)
        return
    checkpoint = checkpoint_of(folder)
    if tokenizer_of_weights(folder) is not None:
        checked_record(run_of(folder), run_of(folder) / TOKENIZER, read_state(checkpoint))
    for _ in finite_weights(checkpoint):
        pass


def refuse_other_states(config: Config) -> None:
    """Refuse to begin with an optimizer's states (`optimizer.from_weights`) that are not there, or are of another one.

    Raises:
        ConfigError: nothing but a run has such states, and those of another optimizer are kept otherwise.
        CheckpointError: one of them is not finite.
    """
    folder = config.model.weights
    if not config.optimizer.from_weights:
        return
    if folder is None or not is_run(folder):
        raise ConfigError(
            "optimizer.from_weights needs a run to take the optimizer's states from",
            got="no model.weights" if folder is None else f"model.weights {folder}, which is no Scrimp run",
            expected="the folder of a run, or one of its checkpoints, as model.weights",
            do="give one, or leave optimizer.from_weights out",
        )
    refuse_states_of_others(config, saved_config(folder), f"the optimizer's states of {folder}")
    checkpoint_of(folder).refuse_not_finite(OPTIMIZER_PREFIX, do="name an older checkpoint of the run")


def going_on(config: Config, before: Config | None = None) -> Config:
    """A configuration that begins with a run's optimizer's states: the embedding moves at that run's rate where nothing
    is said.

    Args:
        before: of the run; None: as its folder says, if it is there.
    """
    settings, folder = config.optimizer, config.model.weights
    if folder is None or not settings.from_weights or settings.embedding_lr_ratio is not None:
        return config
    if before is None:
        before = saved_config(folder) if is_run(folder) else None
    if before is None:
        return config
    return replace_values(config, {_OF_GROUPS: before.optimizer.embedding_lr_ratio})


def refuse_states_of_others(config: Config, before: Config, whose: str) -> None:
    """Refuse the states of a run whose settings say that it kept others than this one does.

    Args:
        config, before: resolved settings of this run, and of the one before.
        whose: the states, as a sentence begins with them.

    Raises:
        ConfigError: naming those settings.
    """
    now, then = flatten(config), flatten(before)
    keys = (*_OF_STATES, _OF_AVERAGE) if facts_of(config.optimizer.name).averages else _OF_STATES
    keys = (*keys, _OF_GROUPS) if is_code(config.optimizer.name) else keys
    others = [f"{key} = {now[key]} (the run has {then[key]})" for key in keys if now[key] != then[key]]
    if others:
        raise ConfigError(
            f"{whose} are not those that this run keeps",
            got="; ".join(others),
            expected="the run's own values",
            do="give those, or begin with empty ones: optimizer.from_weights = false",
        )


def fill_from_huggingface(model: Model, folder: Path) -> None:
    """Fill every parameter of `model` but adapters from a Hugging Face folder; ModelError if one is not finite."""
    load_weights(model, folder)
    names = not_finite((name, part_of(parameter).local) for name, parameter in model.of_base().items())
    if names:
        raise _not_finite_in(folder, names)


def _not_finite_in(folder: Path, names: list[str]) -> ModelError:
    return ModelError(
        f"the weights in {folder} are not finite",
        got=f"NaN or infinity in {', '.join(names[:3])}" + (" ..." if len(names) > 3 else ""),
        do="export an older checkpoint, or download the model again",
    )


@torch.no_grad()
def fill_from_checkpoint(model: Model, checkpoint: Checkpoint) -> None:
    """Fill every parameter of `model` but adapters from a checkpoint, tensor by tensor."""
    parameters = model.of_base()
    for name, tensor in finite_weights(checkpoint):
        if name not in parameters and not model.has_here(name):
            continue
        parameter = parameters.pop(name, None)
        part = None if parameter is None else part_of(parameter)
        if part is None or part.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{checkpoint.folder} belongs to another model",
                got=f"{name} of shape {list(tensor.shape)}",
                expected="no such tensor" if part is None else f"shape {list(part.shape)}",
            )
        for box in part.boxes():
            box.local.copy_(tensor[box.place])
    if parameters:
        raise CheckpointError(
            f"{checkpoint.folder} belongs to another model",
            got=f"no tensor for {', '.join(sorted(parameters)[:3])}",
        )


def tokenizer_of_weights(folder: Path) -> Path | None:
    """The tokenizer folder that belongs to a run or a Hugging Face folder, if it has one.

    Raises:
        CheckpointError: a run's tokenizer is not the one that it began with.
    """
    candidate = run_of(folder) / TOKENIZER if is_run(folder) else folder
    if not (candidate / "tokenizer.json").is_file():
        return None
    record = read_record(run_of(folder)) if is_run(folder) else None
    if record is not None:
        record.refuse_other_tokenizer(load_tokenizer(candidate), candidate)
    return candidate


@dataclass(frozen=True)
class Target:
    """What `eval`, `generate` and `export` act on."""

    folder: Path
    architecture: Architecture
    checkpoint: Checkpoint | None
    """None for a Hugging Face folder."""
    tokenizer: Tokenizer
    tokenizer_folder: Path

    @property
    def masks_documents(self) -> bool:
        """Whether attention keeps documents apart: as the run was trained; where no run says, it does."""
        if self.checkpoint is not None:
            return saved_config(self.folder).data.mask_documents
        seal = read_seal(self.folder)
        return seal is None or seal.mask_documents is not False

    def fill(self, model: Model) -> None:
        """Fill the parameters of `model`."""
        if self.checkpoint is None:
            fill_from_huggingface(model, self.folder)
        else:
            fill_from_checkpoint(model, self.checkpoint)


def open_target(folder: Path) -> Target:
    """A run or a Hugging Face folder with its tokenizer.

    Raises:
        ModelError: neither, or without a tokenizer. CheckpointError: a run without a checkpoint.
    """
    _refuse_stranger(folder)
    checkpoint = checkpoint_of(folder) if is_run(folder) else None
    state = read_state(checkpoint) if checkpoint else None
    architecture = state.architecture.base if state else _of_huggingface(folder)
    tokenizer_folder = tokenizer_of_weights(folder)
    if tokenizer_folder is None:
        raise _no_tokenizer(folder)
    if state is not None:
        record = checked_record(run_of(folder), tokenizer_folder, state)
        if record is not None:
            record.refuse_other_kind(user_code.digests({user_code.MODEL_KIND: architecture.family}))
    tokenizer = load_tokenizer(tokenizer_folder)
    if tokenizer.vocab_size > architecture.vocab_size:
        raise ModelError(
            f"the tokenizer in {tokenizer_folder} is not this model's",
            got=f"{tokenizer.vocab_size:,} entries",
            expected=f"at most {architecture.vocab_size:,}, the model's embedding rows",
            do="copy the model's own tokenizer files into that folder",
        )
    return Target(folder, architecture, checkpoint, tokenizer, tokenizer_folder)


def _no_tokenizer(folder: Path) -> ModelError:
    if not is_run(folder):
        do = "copy the model's tokenizer files into it"
    elif (folder / MANIFEST).is_file() and run_of(folder) == folder:
        do = f"copy the folder {TOKENIZER} of its run to {folder / TOKENIZER}"
    else:
        do = f"copy the folder {TOKENIZER} of the run's prepared corpus to {run_of(folder) / TOKENIZER}"
    return ModelError(f"{folder} has no tokenizer", expected="a tokenizer.json", do=do)


def _refuse_stranger(folder: Path) -> None:
    if not folder.exists():
        raise ModelError(
            f"{folder} does not exist", expected="a Scrimp run or a Hugging Face folder", do="check the path"
        )
    if not folder.is_dir() or not (is_run(folder) or is_huggingface(folder)):
        raise ModelError(
            f"{folder} is neither a Scrimp run nor a Hugging Face folder",
            expected=f"a folder with {CONFIG} or config.json",
        )
