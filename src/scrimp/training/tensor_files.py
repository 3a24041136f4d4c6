"""Named tensors in a folder of safetensors files, written and read by any number of ranks.

Problem  A checkpoint must be readable without pickle, by other tools, and by other numbers of ranks than wrote it. A
         model that needs many ranks fits into the memory of none, nor does a file of it need to.
Method   Tensors are laid into files of at most `MAX_FILE_BYTES` in their given order, those whose names begin alike
         (``model.``, ``optimizer.``) together, so that weights can be copied alone. Where every byte belongs follows
         from names, types and shapes of the whole tensors alone: one rank creates the files with their headers and in
         their full size, then each writes the boxes that it holds (`scrimp.parts`) at their places. In a
         tensor of shape (S1, ..., Sn) a box whose last dimension that is not whole is k is made of runs of
         b_k * S_(k+1) * ... * S_n numbers without a gap: one run where only rows are shared out, one per row where
         columns are. No tensor is gathered, no file is assembled in memory. A reader takes slices in the same way.
         ``model.safetensors.index.json`` maps names to files. Before anything is read into a caller's tensors, names,
         shapes and types are compared. The same tensors give the same bytes, under every layout: those of earlier
         versions, which wrote through `torch.distributed.checkpoint`, whose metadata is kept.
Limits   What does not lie on the host in the order of its numbers goes through pieces of `PIECE_BYTES`. Types that
         safetensors cannot give back (E8M0, packed E2M1) are refused when saving. Files are created with a hole in the
         place of every tensor: a full disk is noticed by who writes, not before. Where boxes meet, two nodes may write
         into one page: their file system must keep that apart. Tried on local ones alone.
Source   https://github.com/huggingface/safetensors#format; the order within a file is that of its own writer.
Checked  tests/training/test_checkpoint.py, test_tensor_files.py (torch's and safetensors' own writers and readers),
         test_checkpoint_layouts.py (gloo)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from scrimp.errors import CheckpointError
from scrimp.json_files import read_json
from scrimp.parts import TensorPart

INDEX: Final = "model.safetensors.index.json"
MAX_FILE_BYTES: Final = 512 << 20
"""Files are hashed and compared side by side."""
PIECE_BYTES: Final = 1 << 20
"""Most that is copied at once of what must be copied before it is written."""
_PART: Final = 1 << 20
MAX_INDEX_BYTES: Final = 64 << 20

_TYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""What comes back from a file as it went in, by its name in the file, in the order of safetensors' own list: later ones
stand first in a file, so that large numbers are aligned."""
_NAMES: Final = {dtype: name for name, dtype in _TYPES.items()}
_RANKS: Final = {dtype: rank for rank, dtype in enumerate(_TYPES.values())}


@dataclass(frozen=True)
class _Index:
    """What is read of an index; sizes stand beside it."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class Layout:
    """Where every byte of a checkpoint's tensors belongs: the same on all ranks, whatever each of them holds."""

    heads: dict[str, bytes]
    """File to what it begins with: the length of its header, and the header."""
    sizes: dict[str, int]
    """File to its bytes."""
    places: dict[str, tuple[str, int]]
    """Tensor to its file, and its first byte there; in the order in which they were given."""
    index: str
    """The text of the index."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values()) + len(self.index.encode())


# -- writing -----------------------------------------------------------------------------------


def check_types(parts: Mapping[str, TensorPart]) -> None:
    """Refuse a type that a reader could not give back: a mistake in the caller."""
    for name, part in parts.items():
        if part.local.dtype not in _NAMES:
            raise TypeError(f"{name}: {part.local.dtype} cannot be stored in a checkpoint; view it as uint8")


def assign_files(sizes: Mapping[str, int], max_file_bytes: int) -> dict[str, int]:
    """File number (from 1) of every tensor, by its bytes: groups by the first part of the name, files filled in
    order."""
    groups: dict[str, list[str]] = {}
    for name in sizes:
        groups.setdefault(name.partition(".")[0], []).append(name)
    numbers: dict[str, int] = {}
    number = 0
    for names in groups.values():
        number, filled = number + 1, 0
        for name in names:
            if filled and filled + sizes[name] > max_file_bytes:
                number, filled = number + 1, 0
            filled += sizes[name]
            numbers[name] = number
    return numbers


def lay_out(parts: Mapping[str, TensorPart]) -> Layout:
    """The files of the whole tensors, of which `parts` may be any share."""
    numbers = assign_files({name: part.whole_nbytes for name, part in parts.items()}, MAX_FILE_BYTES)
    count, files = max(numbers.values(), default=1), dict[str, list[str]]()
    for name in parts:
        files.setdefault(f"model-{numbers[name]:05}-of-{count:05}.safetensors", []).append(name)
    heads, sizes, places = dict[str, bytes](), dict[str, int](), dict[str, tuple[str, int]]()
    for file, names in files.items():
        heads[file], begins = _head({name: parts[name] for name in names})
        sizes[file] = len(heads[file]) + sum(parts[name].whole_nbytes for name in names)
        places |= {name: (file, begins[name]) for name in names}
    total = sum(part.whole_nbytes for part in parts.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return Layout(heads, sizes, {name: places[name] for name in parts}, json.dumps(index, indent=2))


def _head(parts: Mapping[str, TensorPart]) -> tuple[bytes, dict[str, int]]:
    """What a file of these tensors begins with, and the first byte of each in the file."""
    whole = {name: {"saved_offsets": [0] * len(part.shape)} for name, part in parts.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(whole), "DCP_VERSION": "1.0", "format": "pt"}
    header: dict[str, Any] = {"__metadata__": metadata}
    begin, begins = 0, dict[str, int]()
    for name, part in sorted(parts.items(), key=lambda item: (-_RANKS[item[1].local.dtype], item[0])):
        begins[name], end = begin, begin + part.whole_nbytes
        dtype = _NAMES[part.local.dtype]
        header[name] = {"dtype": dtype, "shape": list(part.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def create_files(folder: Path, layout: Layout) -> None:
    """Make the files in their full size, and the index. Raises OSError."""
    for name, head in layout.heads.items():
        with open(folder / name, "xb") as file:
            file.write(head)
            file.truncate(layout.sizes[name])
    (folder / INDEX).write_text(layout.index, encoding="utf-8", newline="\n")


def write_parts(
    folder: Path,
    layout: Layout,
    parts: Mapping[str, TensorPart],
    *,
    stopped: threading.Event | None = None,
) -> list[str]:
    """Write what this rank is to write into files that are there, and flush it to the disk.

    Args:
        stopped: ends the writing before the next piece once it is set.

    Returns:
        Names of the tensors with a NaN or an infinity in what was written.

    Raises:
        OSError: no space, no file.
    """
    files: dict[str, list[str]] = {}
    for name, part in parts.items():
        if part.is_writer and part.local.numel():
            files.setdefault(layout.places[name][0], []).append(name)
    bad: list[str] = []
    for file, names in files.items():
        # Not for reading too: a network file system then fetches what lies around a box, and writes it back.
        descriptor = os.open(folder / file, os.O_WRONLY)
        try:
            for name in names:
                is_good = True
                for piece in itertools.chain.from_iterable(map(_pieces, parts[name].boxes())):
                    if stopped is not None and stopped.is_set():
                        return bad
                    _write_box(descriptor, layout.places[name][1], piece)
                    is_good = is_good and is_finite(piece.local)
                if not is_good:
                    bad.append(name)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return bad


def _pieces(part: TensorPart) -> Iterator[TensorPart]:
    """Smaller boxes of one, of at most `PIECE_BYTES`, cut along the first dimensions; on the host, in order."""
    local = part.local
    if local.nbytes <= PIECE_BYTES:
        yield dataclasses.replace(part, local=local.cpu().contiguous())
        return
    cut = next(dimension for dimension, size in enumerate(local.shape) if size > 1)
    size = local.shape[cut]
    step = max(1, PIECE_BYTES * size // local.nbytes)
    for first in range(0, size, step):
        offsets = (*part.offsets[:cut], part.offsets[cut] + first, *part.offsets[cut + 1 :])
        piece = local.narrow(cut, first, min(step, size - first))
        yield from _pieces(TensorPart(piece, part.shape, offsets, part.is_writer))


def _write_box(descriptor: int, begin: int, part: TensorPart) -> None:
    """Write a part into a tensor that begins at this byte of an open file."""
    data, size = part.local.reshape(-1).view(torch.uint8).numpy().data, part.local.element_size()
    run, places = _runs(tuple(part.local.shape), part.shape, part.offsets)
    for number, place in enumerate(places):
        rest, at = data[number * run * size : (number + 1) * run * size], begin + place * size
        while rest:
            count = os.pwrite(descriptor, rest, at)
            rest, at = rest[count:], at + count


def _runs(box: tuple[int, ...], whole: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, list[int]]:
    """Numbers of a box that follow one another in the whole without a gap, and where each such run begins there."""
    strides = [math.prod(whole[dimension + 1 :]) for dimension in range(len(whole))]
    last = max((dimension for dimension in range(len(box)) if box[dimension] != whole[dimension]), default=0)
    begins = np.array(sum(at * stride for at, stride in zip(offsets, strides, strict=True)))
    for size, stride in zip(box[:last], strides[:last], strict=True):
        begins = begins[..., None] + np.arange(size) * stride
    return math.prod(box[last:]), begins.reshape(-1).tolist()


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the floating-point tensors that hold a NaN or an infinity; reads one at a time."""
    return [name for name, tensor in tensors if not is_finite(tensor)]


def is_finite(tensor: Tensor) -> bool:
    """Whether every number is finite; integers are. Takes `_PART` numbers of fp32 beside the tensor at most."""
    if not tensor.is_floating_point():
        return True
    parts = tensor.detach().reshape(-1).split(_PART)
    # The extremes pass a NaN on, and need no memory for a mask. 8-bit formats have no such operation.
    extremes = (
        torch.aminmax(part.float() if part.element_size() == 1 else part) for part in parts if len(part)
    )
    return all(bool(torch.isfinite(low) & torch.isfinite(high)) for low, high in extremes)


# -- reading -----------------------------------------------------------------------------------


def refuse_other_tensors(folder: Path, wanted: Mapping[str, TensorPart], prefix: str = "") -> None:
    """Compare what a folder holds, of the tensors whose name starts with `prefix`, with what is to be filled from it.

    Raises:
        CheckpointError: names, shapes or types are those of another model, or a file is damaged.
    """
    stored = {name: shape for name, shape in describe(folder).items() if name.startswith(prefix)}
    problems = differences(stored, wanted)
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(
            f"{folder} is a checkpoint of another model",
            got=shown,
            do="resume with the configuration that wrote it, or choose another run folder",
        )


def read_parts(folder: Path, into: Mapping[str, TensorPart]) -> None:
    """Fill what this rank holds, in place, from a folder that `refuse_other_tensors` has passed.

    Raises:
        CheckpointError: a file cannot be read.
    """
    for path, names in _open_order(folder):
        with _opened(path) as file:
            for name in names:
                for box in into[name].boxes() if name in into else ():
                    if box.local.numel():
                        box.local.copy_(file.get_slice(name)[box.place])


def describe(folder: Path) -> dict[str, tuple[torch.dtype | str, tuple[int, ...]]]:
    """Type and shape of every stored tensor, from the files' headers."""
    found: dict[str, tuple[torch.dtype | str, tuple[int, ...]]] = {}
    for path, names in _open_order(folder):
        with _opened(path) as file:
            for name in names:
                part = file.get_slice(name)
                dtype = part.get_dtype()
                found[name] = (_TYPES.get(dtype, dtype), tuple(part.get_shape()))
    return found


def differences(
    stored: Mapping[str, tuple[torch.dtype | str, tuple[int, ...]]], wanted: Mapping[str, TensorPart]
) -> list[str]:
    """What differs between a checkpoint and the tensors of this run, one sentence per tensor."""
    problems = [f"no {name}" for name in wanted if name not in stored]
    problems += [f"unexpected {name}" for name in stored if name not in wanted]
    for name, part in wanted.items():
        if name not in stored:
            continue
        dtype, shape = stored[name]
        if shape != part.shape:
            problems.append(f"{name} of shape {list(shape)} instead of {list(part.shape)}")
        elif dtype != part.local.dtype:
            problems.append(f"{name} in {_short(dtype)} instead of {_short(part.local.dtype)}")
    return problems


def stream_tensors(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors whose name starts with `prefix`, one at a time, with their full names."""
    for path, names in _open_order(folder):
        chosen = [name for name in names if name.startswith(prefix)]
        if chosen:
            with _opened(path) as file:
                for name in chosen:
                    yield name, file.get_tensor(name)


def _open_order(folder: Path) -> Iterable[tuple[Path, list[str]]]:
    do = "use an older checkpoint"
    index = read_json(
        folder / INDEX, _Index, error=CheckpointError, do=do, at_most=MAX_INDEX_BYTES, closed=False
    )
    files: dict[str, list[str]] = {}
    for name, file in index.weight_map.items():
        files.setdefault(Path(file).name, []).append(name)
    return [(folder / file, names) for file, names in sorted(files.items())]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read", got=error, do="use an older checkpoint") from error


def _short(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
