"""What ranks that cut layers write to a checkpoint, and what ranks of another layout read from it: bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from parity import Case, batch_of, made
from safetensors.torch import load_file, save_file

from scrimp.models.huggingface.load import load_weights
from scrimp.models.huggingface.tensor_names import fused_parameters
from scrimp.optim import Optimizer
from scrimp.parts import TensorPart
from scrimp.runtime import Executable
from scrimp.training import tensor_files
from scrimp.world import World

WRITING = Case({"tp": 2}, preset="qwen2.5-0.5b")
"""With biases, and one matrix of words."""


def parts_of(executable: Executable, optimizer: Optimizer) -> dict[str, TensorPart]:
    return {**{f"model.{n}": p for n, p in executable.parameters()}, **dict(optimizer.parts())}


def filled(case: Case, world: World, ranks: int) -> dict[str, TensorPart]:
    """After a step, so that the optimizer's states are no zeros."""
    _, executable, optimizer, lr = made(case, world, ranks)
    executable.begin(0, 0)
    executable.loss(batch_of(case, 0, executable.mesh.data_rank)).total.backward()
    optimizer.step(lr)
    optimizer.zero_grad()
    return parts_of(executable, optimizer)


def load(rank: int, ranks: int, folder: Path) -> list[str]:
    """Parameters that differ from what a Hugging Face folder holds, after it was loaded."""
    _, executable, _, _ = made(WRITING, World(rank, ranks), ranks)
    load_weights(executable.model, folder)
    stored = load_file(folder / "model.safetensors")
    whole = {
        fused.name: torch.cat([stored[piece.name] for piece in fused.pieces])
        for fused in fused_parameters(executable.model.architecture)
    }
    return [
        name
        for name, part in executable.parameters()
        for box in part.boxes()
        if not torch.equal(box.local, whole[name][box.place])
    ]


def write_and_read(rank: int, ranks: int, folder: Path, layouts: list[dict[str, int]]) -> bool:
    """Whether what other layouts read, and write again, is the same files."""
    world = World(rank, ranks)
    _write(rank, filled(WRITING, world, ranks), folder / "first")
    for number, degrees in enumerate(layouts):
        _, executable, optimizer, _ = made(dataclasses.replace(WRITING, layout=degrees), world, ranks)
        parts = parts_of(executable, optimizer)
        tensor_files.read_parts(folder / "first", parts)
        _write(rank, parts, folder / f"again-{number}")
    return True


def _write(rank: int, parts: dict[str, TensorPart], folder: Path) -> None:
    layout = tensor_files.lay_out(parts)
    if rank == 0:
        folder.mkdir()
        tensor_files.create_files(folder, layout)
    dist.barrier()
    assert tensor_files.write_parts(folder, layout, parts) == []
    dist.barrier()


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(2, [{"tp": 2}, {"fsdp": 2}]), pytest.param(4, [{"tp": 2}, {"dp": 2}, {}], marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_checkpoints_do_not_depend_on_how_layers_were_cut(
    ranks: int, layouts: list[dict[str, int]], tmp_path: Path
) -> None:
    spawn(ranks, write_and_read, tmp_path, ranks, tmp_path, layouts)
    written = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    for number in range(len(layouts)):
        again = {path.name: path.read_bytes() for path in (tmp_path / f"again-{number}").iterdir()}
        assert again == written
    # And as one process without ranks reads them: its own first weights, moved by one step.
    decisions, executable, optimizer, lr = made(dataclasses.replace(WRITING, layout={}), World(), ranks)
    ratio = decisions.config.optimizer.embedding_lr_ratio
    assert ratio is not None
    assert ratio > 1
    parts = parts_of(executable, optimizer)
    before = {name: part.local.clone() for name, part in parts.items()}
    tensor_files.read_parts(tmp_path / "first", parts)
    for name, part in parts.items():
        moved = (part.local - before[name]).abs().max()
        most = 1.01 * lr * (ratio if "embedding" in name else 1.0)
        assert 0 < moved <= (most if name.startswith("model.") else torch.inf), name


@pytest.mark.slow
def test_each_rank_loads_its_pieces_of_a_hugging_face_folder(tmp_path: Path) -> None:
    _, executable, _, _ = made(dataclasses.replace(WRITING, layout={}), World(), 4)
    shapes = {
        piece.name: piece.shape
        for fused in fused_parameters(executable.model.architecture)
        for piece in fused.pieces
    }
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert spawn(4, load, tmp_path, 4, tmp_path) == [[]] * 4
