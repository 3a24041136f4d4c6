"""safetensors files written in any order, with one tensor in memory.

Problem  The safetensors library writes a file from tensors that are all in memory. An
         export streams from a checkpoint, whose order is its own, and a model may be larger
         than the memory.
Method   A safetensors file is 8 bytes with the header's length, the header (JSON: name ->
         format, shape, byte range), and the tensors' bytes in row-major order without gaps.
         Names and shapes follow from the architecture, so the headers are written first and
         every tensor goes to its place when it comes.
Limits   Little-endian hosts, as everything safetensors runs on.
Checked  tests/models/test_huggingface_export.py: read back by the safetensors library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from scrimp.models.huggingface.load import INDEX_FILE, SINGLE_FILE

FORMATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Formats that weights are exported in, and safetensors' names for them."""

_ALIGNMENT = 8


@dataclass(frozen=True)
class _Place:
    file: str
    offset: int
    shape: tuple[int, ...]


class ShardWriter:
    """Writes the named tensors into one or several safetensors files of a folder.

    A context manager; `write` each tensor once, in any order. All tensors have one format.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        *,
        dtype: torch.dtype,
        max_bytes: int,
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self._files: dict[str, BinaryIO] = {}
        self._places: dict[str, _Place] = {}
        self._stack = ExitStack()
        shards = _assign(shapes, dtype.itemsize, max_bytes)
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._create(name, shard)
        if len(shards) > 1:
            self._write_index()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor where the header says it is, cast to the files' format."""
        place = self._places[name]
        assert tuple(tensor.shape) == place.shape, (name, tensor.shape, place.shape)
        host = tensor.detach().to(device="cpu", dtype=self._dtype).contiguous()
        file = self._files[place.file]
        file.seek(place.offset)
        file.write(host.reshape(-1).view(torch.uint8).numpy().data)

    def _create(self, name: str, shard: list[tuple[str, tuple[int, ...]]]) -> None:
        """Write the file's header, and remember where each of its tensors goes."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor, shape in shard:
            start, end = end, end + math.prod(shape) * self._dtype.itemsize
            self._places[tensor] = _Place(file=name, offset=start, shape=shape)
            header[tensor] = {"dtype": FORMATS[self._dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        file = self._stack.enter_context((self._folder / name).open("wb"))
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        for tensor, _ in shard:
            place = self._places[tensor]
            self._places[tensor] = _Place(file=name, offset=first + place.offset, shape=place.shape)
        self._files[name] = file

    def _write_index(self) -> None:
        total = sum(math.prod(place.shape) for place in self._places.values())
        index = {
            "metadata": {"total_parameters": total, "total_size": total * self._dtype.itemsize},
            "weight_map": {name: place.file for name, place in sorted(self._places.items())},
        }
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _assign(
    shapes: Iterable[tuple[str, tuple[int, ...]]], itemsize: int, max_bytes: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Fill shards in order; a tensor larger than the limit gets a shard of its own."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, shape in shapes:
        size = math.prod(shape) * itemsize
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append((name, shape))
        used += size
    return shards
