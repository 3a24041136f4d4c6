"""The model's weights as a Hugging Face folder that transformers loads.

Problem  A folder that is half there (killed, disk full) looks like a model. A model may be
         larger than the memory beside it.
Method   The folder is written beside the destination (files.whole_folder): when all went well,
         every file is flushed to the disk and the folder renamed to the destination at once,
         and when not, it is removed. Inside, tensors are taken one by one, split into their
         Hugging Face pieces and written to their place.
         Both factors of a layer that is a product (`Architecture.rank`) are multiplied in float32, and a sparse matrix
         is added: any tool loads it.
Memory   One parameter of the stream and one piece of it in the format written; of a product all its parts, and it.
Checked  tests/models/test_huggingface_export.py, tests/models/test_huggingface_parity.py
         (transformers loads every family without missing or unexpected keys).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError
from scrimp.files import whole_folder
from scrimp.gemm import whole_matrix
from scrimp.models.huggingface.config_json import config_from_architecture
from scrimp.models.huggingface.streamed_files import FORMATS, ShardWriter
from scrimp.models.huggingface.tensor_names import Fused, fused_parameters, split_parameter

MAX_SHARD_BYTES = 5_000_000_000
"""Largest file of an export, unless a single tensor is larger."""

OWN_TOKENIZER_RULES = frozenset({"qwen2"})
"""Families whose tokenizer AutoTokenizer of transformers 5 loads by rules of its own, whatever the folder says."""

_ENDS = (".A.weight", ".B.weight")
"""Ends of the names of what a matrix is made of that is a product."""
_SPARSE_ENDS = (*_ENDS, ".S")
"""The same, with a sparse matrix beside the product."""

Weights = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def export_model(
    weights: Weights,
    architecture: Architecture,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    bos_id: int | None = None,
    eos_ids: Iterable[int] = (),
    save_tokenizer: Callable[[Path], object] | None = None,
) -> None:
    """Write config.json and the weights, and the tokenizer through `save_tokenizer(folder)`.

    Args:
        weights: the model, its parameters by name, or a stream of (name, parameter) in any
            order, of which one is held at a time.
        dtype: format to write. None keeps the parameters' own, which must then be one.
        eos_ids: tokens that end a text; they end generation in transformers too.

    The folder `out` must not exist or be empty. It appears complete or not at all.
    """
    eos = sorted(set(eos_ids))
    with whole_folder(out) as folder:
        write_weights(
            weights,
            architecture,
            folder,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            bos_id=bos_id,
            eos_ids=eos,
        )
        if save_tokenizer is not None:
            save_tokenizer(folder)


def write_weights(
    weights: Weights,
    architecture: Architecture,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
) -> None:
    """Write config.json and safetensors into an existing folder; see `export_model`."""
    table = {fused.name: fused for fused in fused_parameters(architecture)}
    stream = _stream(weights)
    if architecture.rank is not None:
        stream = _multiplied_out(stream, dtype, _ENDS if architecture.sparse_share is None else _SPARSE_ENDS)
    first = [next(stream, None)]  # a list, so that nothing else holds the tensor while the rest is read
    if first[0] is None:
        raise ModelError("there are no weights to export", expected=f"{len(table)} parameters")
    target = dtype or first[0][1].dtype
    if target not in FORMATS:
        raise ModelError(
            "weights cannot be exported in this format", got=target, expected="a floating-point format"
        )
    config = config_from_architecture(
        architecture, dtype=str(target).removeprefix("torch."), bos_id=bos_id, eos_ids=eos_ids
    )
    pieces = [(piece.name, piece.shape) for fused in table.values() for piece in fused.pieces]
    with ShardWriter(folder, pieces, dtype=target, max_bytes=max_shard_bytes) as writer:
        item = first.pop()
        while item is not None:
            _write_parameter(writer, table, *item, dtype=target if dtype is None else None)
            item = None  # the next parameter is read when this one is gone
            item = next(stream, None)
    if table:
        raise ModelError("weights to export are missing", got=f"none named {', '.join(list(table)[:4])}")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_parameter(
    writer: ShardWriter, table: dict[str, Fused], name: str, tensor: Tensor, *, dtype: torch.dtype | None
) -> None:
    """Write the pieces of one parameter and strike it off the table of those still to come."""
    fused = table.pop(name, None)
    if fused is None:
        raise ModelError(f"{name} is no parameter of this architecture, or came twice")
    if tuple(tensor.shape) != fused.shape:
        raise ModelError(f"{name} has the wrong shape", got=tuple(tensor.shape), expected=fused.shape)
    if dtype is not None and tensor.dtype != dtype:
        raise ModelError(f"{name} has another format than the rest", got=tensor.dtype, expected=dtype)
    for piece, rows in split_parameter(fused, tensor).items():
        writer.write(piece, rows)


def _multiplied_out(
    stream: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None, ends: tuple[str, ...]
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of layers that are one matrix: where all of its parts came, what they make.

    Args:
        dtype: of what they make; None: that of the parts.
        ends: of the parts' names.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stream:
        end = next((one for one in ends if name.endswith(one)), None)
        if end is None:
            yield name.replace(".B.bias", ".bias"), tensor
            continue
        layer = name.removesuffix(end)
        parts = waiting.setdefault(layer, {})
        if end in parts:
            raise ModelError(f"{name} came twice")
        parts[end] = tensor.detach()
        if len(parts) == len(ends):
            del waiting[layer]
            first, second, *values = (parts[one].float() for one in ends)
            whole = whole_matrix(first, second, values[0], layer) if values else second @ first
            yield f"{layer}.weight", whole.to(dtype or tensor.dtype)
    for layer in waiting:
        raise ModelError(
            f"{layer} lacks one of its {len(ends)} parts",
            expected=" and ".join(f"{layer}{one}" for one in ends),
        )


def _stream(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    if isinstance(weights, nn.Module):
        return iter(weights.named_parameters())
    if isinstance(weights, Mapping):
        return iter(weights.items())
    return iter(weights)
