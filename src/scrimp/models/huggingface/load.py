"""Weights of a Hugging Face folder into the model, one tensor at a time.

Problem  A folder may be larger than the memory beside the model, and a wrong one (another
         model's, a half-finished download, a pickle) must be named, not loaded.
Method   First only the headers of the safetensors files are read: every name, shape and
         format is compared with what the architecture needs, so that the model is untouched
         if anything is wrong. Then each tensor is read and copied into its rows of the fused
         parameter, cast to the parameter's format on the way. Of several ranks each reads the rows
         that lie there.
Memory   The files are mapped, not read into buffers: beside the model there are only pages of
         the shard being copied, which the system may drop at any time.
Limits   Only safetensors. A pickle (pytorch_model.bin) can run code when it is opened and is
         refused; so is a quantized tensor.
Checked  tests/models/test_huggingface_load.py (table of damaged folders),
         tests/models/test_huggingface_parity.py (logits and gradients against transformers).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError, StorageError
from scrimp.files import storage_error
from scrimp.gemm import StoredWeight
from scrimp.json_files import read_json
from scrimp.models.huggingface.tensor_names import EMBEDDING, HEAD, Fused, Piece, fused_parameters
from scrimp.parts import TensorPart, part_of

if TYPE_CHECKING:
    from scrimp.config.architecture import Architecture
    from scrimp.models.model import Model

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATS = ("F64", "F32", "F16", "BF16")
# Buffers that older versions of transformers saved with the weights; the model computes its own.
_IGNORED_ENDINGS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
_SHOWN_NAMES = 4
_MOST_LISTED = 10_000
"""Layers whose tensors are listed whatever the folder holds, to name those that are missing."""
_LONGEST_NAME = 255
_MAX_INDEX_BYTES = 2**26
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class _Index:
    """What is read of an index."""

    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class _Stored:
    """A tensor of the folder, by its file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Target:
    """What is read of a stored tensor."""

    into: Tensor
    place: tuple[slice, ...]
    """In the stored tensor."""


def check_weights(architecture: Architecture, folder: Path) -> None:
    """Hold an architecture against the names, shapes and formats of the stored tensors, by their headers.

    Before a model of that architecture is built: nothing else bounds the sizes in a config.json.

    Raises:
        ModelError: what is missing, unexpected, mis-shaped or unreadable.
    """
    _checked_tensors(architecture, Path(folder))


def load_weights(model: Model, folder: Path) -> None:
    """Copy the weights of a Hugging Face folder into the model, in the model's own formats.

    ModelError names what is missing, unexpected, mis-shaped or unreadable; the model is not
    changed then. A tied model ties the folder's: a stored head must equal the embedding.
    """
    parameters = dict(model.named_parameters())
    if any(parameter.is_meta for parameter in parameters.values()):
        raise ModelError("the model has no storage to load weights into", got="the meta device")
    stored = _checked_tensors(model.architecture, Path(folder))
    targets: list[tuple[str, _Target]] = []
    stored_weights: list[Fused] = []
    for fused in fused_parameters(model.architecture):
        if not model.has_here(fused.name):
            continue
        if isinstance(parameters[fused.name], StoredWeight):
            stored_weights.append(fused)
            continue
        for box in part_of(parameters[fused.name]).boxes():
            for piece in fused.pieces:
                target = _target(box, piece)
                if target is not None:
                    targets.append((piece.name, target))
    _copy(stored, targets)
    with torch.no_grad():
        for fused in stored_weights:  # quantized as a whole
            parameters[fused.name].copy_(_whole(stored, fused))


def _target(part: TensorPart, piece: Piece) -> _Target | None:
    """Where the rows of a stored tensor go that lie in this box of its parameter; None: none of them do."""
    rows, *others = part.place
    first, last = max(rows.start, piece.start), min(rows.stop, piece.stop)
    if first >= last:
        return None
    return _Target(
        part.local[first - rows.start : last - rows.start],
        (slice(first - piece.start, last - piece.start), *others),
    )


def stream_weights(architecture: Architecture, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder that the architecture needs, by their names there, one at a time.

    ModelError as of `load_weights`, before the first one.
    """
    stored = _checked_tensors(architecture, Path(folder))
    for fused in fused_parameters(architecture):
        for piece in fused.pieces:
            yield piece.name, _read(stored[piece.name].file, piece.name)


def stream_parameters(architecture: Architecture, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The same, put together: the parameters of a model, by their names in it. ModelError as of `load_weights`."""
    stored = _checked_tensors(architecture, Path(folder))
    for fused in fused_parameters(architecture):
        yield fused.name, _whole(stored, fused)


def _whole(stored: Mapping[str, _Stored], fused: Fused) -> Tensor:
    return torch.cat([_read(stored[one.name].file, one.name) for one in fused.pieces])


def _read(file: Path, name: str) -> Tensor:
    read: list[Tensor] = []
    _with_file(file, lambda _, opened: read.append(opened.get_tensor(name)))
    return read[0]


def _checked_tensors(architecture: Architecture, folder: Path) -> dict[str, _Stored]:
    """The tensors of a folder, which are those of the architecture."""
    stored = _stored_tensors(folder)
    if architecture.num_layers > max(len(stored), _MOST_LISTED):
        raise ModelError(
            f"{folder} holds the weights of another model",
            got=f"{len(stored):,} tensors",
            expected=f"{architecture.num_layers:,} layers, as num_hidden_layers in config.json says",
            do="check that config.json and the weights belong together",
        )
    shapes = {piece.name: piece.shape for fused in fused_parameters(architecture) for piece in fused.pieces}
    tied_head = HEAD in stored and architecture.tied_embeddings
    if tied_head:
        shapes[HEAD] = shapes[EMBEDDING]
    _check_names(folder, stored, shapes)
    _check_tensors(stored, shapes)
    if tied_head:
        _check_tied(stored[HEAD], stored[EMBEDDING])
    return stored


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    """Every tensor of the folder by name, from the headers of its files."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return _read_headers([single])
    if not index.is_file():
        raise _no_weights(folder)
    do = "download it again"
    read = read_json(index, _Index, error=ModelError, do=do, at_most=_MAX_INDEX_BYTES, closed=False)
    weight_map = read.weight_map
    for name in weight_map.values():
        if Path(name).name != name or len(name) > _LONGEST_NAME:
            raise ModelError(
                f"{index} names a file outside the folder", got=repr(name), expected="a plain file name"
            )
    stored = _read_headers([folder / name for name in sorted(set(weight_map.values()))])
    for name, file in weight_map.items():
        if name not in stored or stored[name].file.name != file:
            raise ModelError(
                f"{folder / file} lacks the tensor {name}",
                expected=f"what {INDEX_FILE} says",
                do="download the folder again: its shards belong to different models",
            )
    return {name: stored[name] for name in weight_map}


def _no_weights(folder: Path) -> ModelError:
    """The error for a folder without safetensors, by what it holds instead."""
    if not folder.is_dir():
        return ModelError(f"{folder} is not a folder", expected="a Hugging Face folder")
    for pattern in ("pytorch_model*.bin*", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack"):
        for found in sorted(folder.glob(pattern)):
            return ModelError(
                f"{found} is not safetensors and is not opened",
                expected=SINGLE_FILE,
                do="convert it in an environment you trust: load the folder with transformers'"
                " AutoModelForCausalLM.from_pretrained and call save_pretrained",
            )
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return ModelError(
            f"{folder / INDEX_FILE} is missing", got=f"{len(shards)} shards", do="download it too"
        )
    return ModelError(f"{folder} holds no weights", expected=f"{SINGLE_FILE} or {INDEX_FILE} with its shards")


def _read_headers(files: Iterable[Path]) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}

    def collect(file: Path, opened: Any) -> None:
        for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
            header = opened.get_slice(name)
            stored[name] = _Stored(file=file, shape=tuple(header.get_shape()), dtype=header.get_dtype())

    for file in files:
        _with_file(file, collect)
    return stored


def _with_file(file: Path, use: Callable[[Path, Any], None]) -> None:
    """Open a safetensors file, and turn what can go wrong into an error that names it."""
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            use(file, opened)
    except FileNotFoundError:
        if os.path.exists(file):  # safetensors reports a file that may not be opened as one that is not there
            raise StorageError(f"{file} cannot be read", do="check its permissions") from None
        raise ModelError(f"{file} is missing", expected=f"every shard that {INDEX_FILE} names") from None
    except SafetensorError as error:
        do = "download or export it again"
        if file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs"):
            do = "it is a Git LFS pointer, not the weights: run `git lfs pull` in the folder"
        raise ModelError(f"{file} is truncated or no safetensors file", got=str(error), do=do) from None
    except OSError as error:
        raise storage_error(error, f"{file} cannot be read") from error


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN_NAMES} more" if len(ordered) > _SHOWN_NAMES else ""
    return ", ".join(ordered[:_SHOWN_NAMES]) + more


def _check_names(folder: Path, stored: Mapping[str, _Stored], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = shapes.keys() - stored.keys()
    unexpected = {name for name in stored.keys() - shapes.keys() if not name.endswith(_IGNORED_ENDINGS)}
    if not missing and not unexpected:
        return
    do = "check that config.json and the weights belong together"
    if missing == {HEAD}:
        do = "set tie_word_embeddings to true in config.json if the head is the embedding"
    found = [f"missing: {_listed(missing)}"] if missing else []
    found += [f"unexpected: {_listed(unexpected)}"] if unexpected else []
    raise ModelError(f"{folder} holds the weights of another model", got="; ".join(found), do=do)


def _check_tensors(stored: Mapping[str, _Stored], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        found = stored[name]
        if found.dtype not in _FLOATS:
            raise ModelError(
                f"{found.file}: {name} is quantized",
                got=found.dtype,
                expected=f"one of {', '.join(_FLOATS)}",
                do="use the model's unquantized weights",
            )
        if found.shape == shape:
            continue
        if name in (EMBEDDING, HEAD) and found.shape[1:] == shape[1:]:
            raise ModelError(
                f"{found.file}: vocabulary mismatch in {name}",
                got=f"{found.shape[0]:,} rows",
                expected=f"{shape[0]:,}, the model's vocab_size",
                do="use the config.json and tokenizer that belong to these weights",
            )
        raise ModelError(f"{found.file}: {name} has the wrong shape", got=found.shape, expected=shape)


def _copy(stored: Mapping[str, _Stored], targets: Sequence[tuple[str, _Target]]) -> None:
    """Read tensor by tensor, file by file, into the rows they belong to."""

    def copy(file: Path, opened: Any) -> None:
        for name, target in targets:
            if stored[name].file == file:
                target.into.copy_(opened.get_slice(name)[target.place])

    with torch.no_grad():
        for file in dict.fromkeys(stored[name].file for name, _ in targets):
            _with_file(file, copy)


def _check_tied(head: _Stored, embedding: _Stored) -> None:
    """A tied model has one matrix; a folder with two different ones is not that model."""

    def compare(_: Path, heads: Any) -> None:
        def compare_rows(_: Path, embeddings: Any) -> None:
            head_VD, embedding_VD = heads.get_slice(HEAD), embeddings.get_slice(EMBEDDING)
            for start in range(0, head.shape[0], _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                if not torch.equal(head_VD[rows], embedding_VD[rows]):
                    raise ModelError(
                        f"{head.file}: {HEAD} differs from {EMBEDDING}, but config.json ties them",
                        do="set tie_word_embeddings to false in config.json to load both",
                    )

        _with_file(embedding.file, compare_rows)

    _with_file(head.file, compare)
