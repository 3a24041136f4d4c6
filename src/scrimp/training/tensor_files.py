"""Named tensors in a folder of safetensors files, through `torch.distributed.checkpoint` (DCP).

Problem  A checkpoint must be readable without pickle, by other tools, and later by any number
         of ranks. DCP's Hugging Face writer gives that; it builds each file in memory before
         writing it, and its reader takes every ``.safetensors`` file that lies in the folder.
Method   Tensors are laid into files of at most `MAX_FILE_BYTES` in their given order, those
         whose names begin alike (``model.``, ``optimizer.``) together, so that weights can be
         copied alone. ``model.safetensors.index.json`` maps names to files.
         Before anything is read into a caller's tensors, names, shapes and types are compared.
         The same tensors give the same bytes: safetensors writes a header's metadata in an order
         that changes from file to file, and it is put in order afterwards.
Limits   Needs host memory for one file beside the tensors. Types that safetensors cannot give
         back (E8M0, packed E2M1) are refused when saving. One process; sharded tensors later.
Checked  tests/training/test_checkpoint.py
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from scrimp.errors import CheckpointError
from scrimp.json_files import read_json

INDEX: Final = "model.safetensors.index.json"
MAX_FILE_BYTES: Final = 512 << 20
"""DCP's writer holds a whole file in memory, so that smaller files cost less of it."""
_PART: Final = 1 << 20
MAX_INDEX_BYTES: Final = 64 << 20

_TYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""What comes back from a file as it went in, by its name in the file."""
_SINGLE_PROCESS = (
    r"torch\.distributed is disabled, unavailable or uninitialized, "
    r"assuming the intent is to (save|load) in a single process"
)


@dataclass(frozen=True)
class _Index:
    """What is read of an index; DCP writes sizes beside it."""

    weight_map: dict[str, str]


def check_types(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a type that a reader could not give back: a mistake in the caller."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES.values():
            raise TypeError(f"{name}: {tensor.dtype} cannot be stored in a checkpoint; view it as uint8")


def assign_files(tensors: Mapping[str, Tensor], max_file_bytes: int) -> dict[str, int]:
    """File number (from 1) of every tensor: groups by the first part of the name, files filled in order."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(name.partition(".")[0], []).append(name)
    numbers: dict[str, int] = {}
    number = 0
    for names in groups.values():
        number, filled = number + 1, 0
        for name in names:
            if filled and filled + tensors[name].nbytes > max_file_bytes:
                number, filled = number + 1, 0
            filled += tensors[name].nbytes
            numbers[name] = number
    return numbers


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], *, max_file_bytes: int | None = None) -> None:
    """Write contiguous tensors into `folder`. Raises OSError (no space, no permission)."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    _silence_single_process_warning()
    writer = HuggingFaceStorageWriter(
        path=str(folder), fqn_to_index_mapping=assign_files(tensors, max_file_bytes or MAX_FILE_BYTES)
    )
    # The overlapping loader would touch CUDA from this thread, and keep nothing on the host faster.
    writer.per_thread_copy_ahead = 0
    try:
        save(dict(tensors), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error
    for file in folder.glob("*.safetensors"):
        _order_metadata(file)


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


def read_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill `into` in place from `folder`; nothing is touched unless everything fits.

    Raises:
        CheckpointError: names, shapes or types are those of another model, or a file is damaged.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    problems = differences(describe(folder), into)
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(
            f"{folder} is a checkpoint of another model",
            got=shown,
            do="resume with the configuration that wrote it, or choose another run folder",
        )
    _silence_single_process_warning()
    try:
        load(
            {name: tensor.detach() for name, tensor in into.items()},
            storage_reader=HuggingFaceStorageReader(path=str(folder)),
            no_dist=True,
        )
    except CheckpointException as error:
        cause = _cause(error)
        raise CheckpointError(f"{folder} cannot be read", got=cause, do="use an older checkpoint") from cause


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
    stored: Mapping[str, tuple[torch.dtype | str, tuple[int, ...]]], wanted: Mapping[str, Tensor]
) -> list[str]:
    """What differs between a checkpoint and the tensors of this run, one sentence per tensor."""
    problems = [f"no {name}" for name in wanted if name not in stored]
    problems += [f"unexpected {name}" for name in stored if name not in wanted]
    for name, tensor in wanted.items():
        if name not in stored:
            continue
        dtype, shape = stored[name]
        if shape != tuple(tensor.shape):
            problems.append(f"{name} of shape {list(shape)} instead of {list(tensor.shape)}")
        elif dtype != tensor.dtype:
            problems.append(f"{name} in {_short(dtype)} instead of {_short(tensor.dtype)}")
    return problems


def stream_tensors(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors whose name starts with `prefix`, one at a time, with their full names."""
    for path, names in _open_order(folder):
        chosen = [name for name in names if name.startswith(prefix)]
        if chosen:
            with _opened(path) as file:
                for name in chosen:
                    yield name, file.get_tensor(name)


def _order_metadata(file: Path) -> None:
    """Sort the metadata in the header of a safetensors file; its length, and all else, stays."""
    with open(file, "r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > size:
            raise AssertionError(f"the header of {file.name} grew from {size} to {len(text)} bytes")
        opened.seek(8)
        opened.write(text.ljust(size))


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


def _cause(error: BaseException) -> BaseException:
    # DCP's exception is a BaseException that carries the real one of each rank.
    failures = getattr(error, "failures", {})
    return next((wrapped[0] for wrapped in failures.values()), error)


def _silence_single_process_warning() -> None:
    # Not `warnings.catch_warnings`: it swaps process-wide state, and this runs beside the training thread.
    warnings.filterwarnings("ignore", message=_SINGLE_PROCESS, category=UserWarning)
