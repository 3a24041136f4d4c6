"""Bytes of tensor files: those of safetensors' own writer, and of torch's, which earlier versions wrote through."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from scrimp.parts import TensorPart, parts_of
from scrimp.training import tensor_files
from scrimp.training.checkpoint import Checkpoint
from scrimp.training.checkpoint_manifest import seal
from scrimp.training.tensor_files import create_files, lay_out, write_parts

DTYPES = list(tensor_files._TYPES.values())


def tensors() -> dict[str, Tensor]:
    """Tensors of every type, by names that sort otherwise than they are given, with what JSON escapes."""
    generator = torch.Generator().manual_seed(0)
    names = [f"model.{9 - number}.{'äb'[number % 2]}" for number in range(9)]
    made = {
        f"{group}.{dtype}": torch.randint(0, 2, (number + 1, 3), generator=generator).to(dtype)
        for number, dtype in enumerate(DTYPES)
        for group in ("optimizer", "model")
    }
    made |= {name: torch.randn(3, 5, generator=generator) for name in names}
    made |= {'model."\\/€': torch.ones(2), "random": torch.tensor(7), "model.none": torch.empty(0, 2)}
    return made


def written(folder: Path, given: dict[str, Tensor]) -> dict[str, bytes]:
    folder.mkdir()
    parts = parts_of(given)
    layout = lay_out(parts)
    create_files(folder, layout)
    assert write_parts(folder, layout, parts) == []
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_order(content: bytes) -> bytes:
    """A file whose metadata is sorted: safetensors writes it in an order that changes with each process."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return content[:8] + text.ljust(size) + content[8 + size :]


def written_by_torch(folder: Path, given: dict[str, Tensor], max_file_bytes: int) -> None:
    """As earlier versions did."""
    sizes = {name: tensor.nbytes for name, tensor in given.items()}
    numbers = tensor_files.assign_files(sizes, max_file_bytes)
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers)
    save_by_torch(dict(given), storage_writer=writer, no_dist=True)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(in_order(file.read_bytes()))


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 200])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_are_those_that_earlier_versions_wrote_and_theirs_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_file_bytes: int
) -> None:
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", max_file_bytes)
    given, folder = tensors(), tmp_path / "step-00000001"
    found = written(tmp_path / "found", given)
    written_by_torch(folder, given, max_file_bytes)
    assert found == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (len(found) > 10) == (max_file_bytes == 200)
    seal(folder, 1)
    into = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    Checkpoint(1, folder).load(into)
    assert all(torch.equal(into[name].double(), tensor.double()) for name, tensor in given.items())


def test_a_file_is_that_of_safetensors_own_writer(tmp_path: Path) -> None:
    given = {name: tensor for name, tensor in tensors().items() if name.startswith("model")}
    found = written(tmp_path / "found", given)["model-00001-of-00001.safetensors"]
    size = int.from_bytes(found[:8], "little")
    metadata = json.loads(found[8 : 8 + size])["__metadata__"]
    assert found == in_order(save(given, metadata=metadata))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[slice]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    box = []
    for size in shape:
        begin = draw(st.integers(0, size))
        box.append(slice(begin, draw(st.integers(begin, size))))
    return shape, box


@given(boxes())
def test_runs_of_a_box_are_where_its_numbers_are_in_the_whole(
    drawn: tuple[tuple[int, ...], list[slice]],
) -> None:
    shape, box = drawn
    whole = torch.arange(math.prod(shape)).reshape(shape)
    wanted = whole[tuple(box)]
    if not wanted.numel():
        return
    run, begins = tensor_files._runs(tuple(wanted.shape), shape, tuple(one.start for one in box))
    found = [begin + number for begin in begins for number in range(run)]
    assert found == wanted.reshape(-1).tolist()
    if len(begins) > 1:  # no run could be longer
        assert all(second > first + run for first, second in itertools.pairwise(begins))


@pytest.mark.parametrize("turned", [False, True])
def test_pieces_are_small_and_together_the_part(monkeypatch: pytest.MonkeyPatch, turned: bool) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 100)
    whole = torch.arange(1.0, 7 * 9 * 11 + 1).reshape(7, 9, 11)
    local = whole[1:5, 2:, 3:]
    local = local.permute(2, 1, 0).contiguous().permute(2, 1, 0) if turned else local
    again = torch.zeros_like(whole)
    for piece in tensor_files._pieces(TensorPart(local, (7, 9, 11), (1, 2, 3), is_writer=True)):
        assert piece.local.nbytes <= 100
        assert piece.local.is_contiguous()
        place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.local.shape, strict=True))
        assert (again[place] == 0).all()
        again[place] = piece.local
    wanted = torch.zeros_like(whole)
    wanted[1:5, 2:, 3:] = local
    assert torch.equal(again, wanted)
