"""Checkpoints of several ranks: the same files from every layout, read under every other; what one rank cannot do, none
does."""

from __future__ import annotations

import errno
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import spawn
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from scrimp.errors import CheckpointError, ScrimpError
from scrimp.parts import TensorPart, part_of
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training import snapshot, tensor_files
from scrimp.training.checkpoint import CheckpointStore
from scrimp.world import World, told_by

Layout = tuple[tuple[int, ...], tuple[Placement, ...]]
"""Shape of the mesh, and how every tensor lies on it."""

Both = tuple[Path, list[dict[str, Any]]]
"""A folder, and what the two ranks found there."""

LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "copies": ((2,), (Replicate(),)),
        "rows": ((2,), (Shard(0),)),
        "columns": ((2,), (Shard(1),)),
    },
    4: {
        "rows": ((4,), (Shard(0),)),
        "columns": ((4,), (Shard(1),)),
        "copies of rows": ((2, 2), (Replicate(), Shard(0))),
        "rows of copies": ((2, 2), (Shard(0), Replicate())),
        "rows and columns": ((2, 2), (Shard(0), Shard(1))),
        "rows twice": ((2, 2), (Shard(0), Shard(0))),
    },
}
STEP, STATE, FILES = 3, {"step": 3, "loss": 0.1}, {"config.toml": "# größer\n"}


def wholes() -> dict[str, Tensor]:
    """Even and uneven, fewer rows than ranks, none, larger than a piece, of several types."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "model.even": random(8, 6),
        "model.uneven": random(7, 5),
        "model.few": random(1, 1),
        "model.none": random(0, 3),
        "model.vector": random(9).bfloat16(),
        "model.cube": random(4, 3, 5),
        "optimizer.large": random(1001, 701),
        "optimizer.flags": random(6, 6) > 0,
        "optimizer.codes": random(6, 6).to(torch.float8_e4m3fn),
        "optimizer.updates": torch.tensor(2**53 + 1),
    }


def distributed(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, DTensor]:
    """By torch; what has no such dimension is shared out along its last one, and a scalar not at all."""
    mesh = init_device_mesh("cpu", layout[0])

    def one(tensor: Tensor) -> DTensor:
        last = tensor.dim() - 1
        placements = [
            Replicate() if last < 0 or not isinstance(place, Shard) else Shard(min(place.dim, last))
            for place in layout[1]
        ]
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    return {name: one(tensor) for name, tensor in tensors.items()}


def store_in(folder: Path, world: World, keep_last: int = 2) -> CheckpointStore:
    return CheckpointStore(folder, keep_last=keep_last, keep_every=0, world=world)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def saved_and_read(rank: int, folder: Path) -> dict[str, Any]:
    """Save under each layout in the background, and read each of these under each layout; say what differs."""
    world, seen = World.current(), {}
    layouts = LAYOUTS[world.size]
    for name, layout in layouts.items():
        store, given = store_in(folder / name, world), distributed(wholes(), layout)
        plain = {"random.torch": torch.arange(5) + 10 * rank}
        store.save(STEP, given | plain, STATE, FILES)
        for tensor in given.values():
            tensor.to_local().zero_()  # training goes on
        store.wait()
        seen[name] = store.poll()
    wrong = []
    for written in layouts:
        (checkpoint,) = store_in(folder / written, world).complete()
        for name, layout in layouts.items():
            wanted = distributed(wholes(), layout)
            into = distributed({name: torch.zeros_like(one) for name, one in wholes().items()}, layout)
            plain = {"random.torch": torch.zeros(5, dtype=torch.int64)}
            checkpoint.load(into | plain, world)
            equal = all(
                torch.equal(bits(into[one].to_local()), bits(wanted[one].to_local())) for one in wanted
            )
            if not equal or not torch.equal(plain["random.torch"], torch.arange(5)):
                wrong.append((written, name))
    return {"seen": seen, "wrong": wrong}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def all_of_it(rank: int, folder: Path) -> dict[str, Any]:
    """In one start of two processes."""
    return saved_and_read(rank, folder) | trouble(rank, folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("files")
    return folder, spawn(2, all_of_it, tmp_path_factory.mktemp("meeting"), folder)


def check_layouts(folder: Path, ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What all ranks found, and that the files of every layout are those of one rank; the tensors, by safetensors."""
    names = LAYOUTS[len(ranks)]
    for found in ranks:
        assert found["seen"] == {name: [STEP] for name in names}
        assert found["wrong"] == []
    plain = {"random.torch": torch.arange(5)}
    store_in(folder / "one", World()).save(STEP, wholes() | plain, STATE, FILES, wait=True)
    expected = contents(folder / "one")
    assert len(expected) > 5
    for name in names:
        assert contents(folder / name) == expected, name
    return {
        name: tensor
        for file in (folder / "one").rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_ranks_write_the_files_of_one_which_other_tools_read(both: Both) -> None:
    folder, ranks = both
    by_safetensors = check_layouts(folder, ranks)
    by_torch = {name: torch.zeros_like(tensor) for name, tensor in wholes().items()}
    stored = folder / "rows" / "checkpoints" / "step-00000003"
    load(by_torch, storage_reader=HuggingFaceStorageReader(str(stored)), no_dist=True)
    for name, tensor in wholes().items():
        for found in (by_torch, by_safetensors):
            assert found[name].shape == tensor.shape, name
            assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.slow
def test_four_ranks_write_the_files_of_one_which_transformers_reads(tmp_path: Path) -> None:
    from transformers.modeling_utils import load_state_dict

    (tmp_path / "meeting").mkdir()
    check_layouts(tmp_path, spawn(4, saved_and_read, tmp_path / "meeting", tmp_path))
    found = dict[str, Tensor]()
    for file in (tmp_path / "columns").rglob("*.safetensors"):
        found |= load_state_dict(str(file), map_location="cpu")
    for name, tensor in wholes().items():
        assert torch.equal(bits(found[name]), bits(tensor)), name


# -- FSDP over tensor parallelism --------------------------------------------------------------


def over_tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def saved_over_tensor_parallel(rank: int, folder: Path) -> dict[str, Any]:
    world = World.current()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = over_tensor_parallel(mesh)
    given = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    kinds = {type(one) for parameter in given.values() for one in parameter.placements}
    whole = {name: parameter.full_tensor().detach() for name, parameter in given.items()}
    store = store_in(folder, world)
    store.save(STEP, given, {}, {}, wait=True)
    with torch.no_grad():
        for parameter in given.values():
            parameter.to_local().zero_()
    store.at(STEP).load(given, world)
    same = all(torch.equal(parameter.full_tensor(), whole[name]) for name, parameter in given.items())
    return {"same": same, "strided": _StridedShard in kinds, "whole": whole}


@pytest.mark.slow
def test_fsdp_over_tensor_parallelism_writes_whole_tensors(tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    for found in spawn(4, saved_over_tensor_parallel, tmp_path / "meeting", tmp_path / "run"):
        assert found["strided"]
        assert found["same"]
    (checkpoint,) = store_in(tmp_path / "run", World()).complete()
    stored = dict(checkpoint.tensors())
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4, bias=False)).state_dict()
    for name, tensor in found["whole"].items():
        assert torch.equal(stored[name], tensor)
        assert torch.equal(stored[name], plain[name.removeprefix("model.")])


# -- what one rank cannot do -------------------------------------------------------------------


def halves(rank: int, value: float, size: int = 1000) -> dict[str, TensorPart]:
    """A vector of which each of two ranks has a half."""
    return {"model.x": TensorPart(torch.full((size,), value), (2 * size,), (rank * size,), is_writer=True)}


def said(act: Callable[[], object]) -> str:
    """What is raised, in words."""
    try:
        act()
    except (ScrimpError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def value_of(store: CheckpointStore, rank: int) -> tuple[int, float]:
    newest, errors = store.latest()
    assert newest is not None
    assert errors == []
    into = halves(rank, 0.0)
    newest.load(into, World.current())
    assert (into["model.x"].local == into["model.x"].local[0]).all()
    return newest.step, float(into["model.x"].local[0])


def polled(store: CheckpointStore) -> tuple[list[int], str]:
    """What `poll` says in the end, after some time of nothing."""
    found: list[int] = []

    def until_something() -> None:
        while not found:
            found.extend(store.poll())
            time.sleep(0.01)

    return found, said(until_something)


def full_disk(*words: Any, **named: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def a_bug(*words: Any, **named: Any) -> int:
    raise KeyError("surprise")


def shown(act: Callable[[], object]) -> tuple[str, int | None, list[str]]:
    """What is raised: its type, the rank that shows it, and the functions of its traceback."""
    try:
        act()
    except Exception as error:
        return (
            type(error).__name__,
            told_by(error),
            [one.name for one in traceback.extract_tb(error.__traceback__)],
        )
    return "", None, []


def trouble(rank: int, folder: Path) -> dict[str, Any]:
    """One thing after another goes wrong on one rank."""
    world, found = World.current(), dict[str, Any]()
    store = store_in(folder / "run", world)
    store.save(1, halves(rank, 1.0), {}, {})
    found["goes well"] = polled(store), value_of(store, rank)
    for wait in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(os, "pwrite", full_disk)
            refusal = said(lambda: store.save(2, halves(rank, 2.0), {}, {}, wait=wait))  # noqa: B023
            found[f"full disk, waits {wait}"] = refusal if wait else polled(store)[1]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(manifests, "seal", full_disk)
        store.save(2, halves(rank, 2.0), {}, {})
        found["cannot be sealed"] = said(store.wait)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "pwrite", a_bug)
        store.save(2, halves(rank, 2.0), {}, {})
        found["a bug"] = shown(store.wait)
    found["older one"] = value_of(store, rank), store.poll(), sorted(os.listdir(store.folder))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(snapshot, "host_memory_available", lambda: 100)
        store.save(3, halves(rank, 3.0), {}, {})
        found["no room for a copy"] = store.poll(), value_of(store, rank)
    with pytest.MonkeyPatch.context() as patch:
        write = tensor_files.write_parts

        def slow(*words: Any, **named: Any) -> list[str]:
            time.sleep(0.5 * rank)
            return write(*words, **named)

        patch.setattr(tensor_files, "write_parts", slow)
        store.save(4, halves(rank, float("nan") if rank else 4.0), {}, {})
        early = store.poll(), store.poll(), [one.step for one in store.complete()]
        found["slow"] = early, polled(store), store.not_finite[4], store.at(4).not_finite
    return found | refusals(rank, store)


def refusals(rank: int, store: CheckpointStore) -> dict[str, Any]:
    """Mistakes of the caller, and checkpoints of something else."""
    world, found = World.current(), dict[str, Any]()
    both = halves(rank, 5.0)["model.x"]
    mistakes: dict[str, dict[str, TensorPart]] = {
        "a hole": {"model.x": replace(both, is_writer=rank == 0)},
        "twice": {"model.x": part_of(torch.zeros(5))},
        "other names": {f"model.{rank}": both},
    }
    for name, tensors in mistakes.items():
        found[name] = said(lambda: store.save(5, tensors, {}, {}))  # noqa: B023
    into = {"model.x": torch.zeros(2000)} if rank == 0 else {"model.x": torch.zeros(2001)}
    found["another model"] = said(lambda: store.at(3).load(into, world)), int(into["model.x"].sum())
    store.save(5, halves(rank, 5.0), {}, {}, wait=True)
    found["in the end"] = store.poll(), sorted(os.listdir(store.folder))
    return found


def test_each_rank_writes_its_half_in_the_background(both: Both) -> None:
    for rank in both[1]:
        assert rank["goes well"] == (([1], ""), (1, 1.0))


def test_what_one_rank_cannot_write_or_seal_is_an_error_on_all_and_older_ones_stay(
    both: Both,
) -> None:
    for rank in both[1]:
        for what in ("full disk, waits True", "full disk, waits False", "cannot be sealed"):
            assert "StorageError" in rank[what]
            assert "checkpoint of step 2 was not written" in rank[what]
            assert "No space left" in rank[what]
        assert rank["older one"] == ((1, 1.0), [], ["step-00000001"])
    assert "rank 1: " in both[1][0]["full disk, waits False"]
    assert "rank 1: " not in both[1][1]["full disk, waits False"]


def test_a_bug_in_the_thread_of_one_rank_is_shown_there_with_its_traceback(both: Both) -> None:
    (kind, by, _), (own_kind, own_by, functions) = (rank["a bug"] for rank in both[1])
    assert (kind, own_kind) == ("RankFailedError", "KeyError")
    assert by == own_by == 1
    assert functions[-1] == "a_bug"


def test_where_one_rank_has_no_room_for_a_copy_all_wait(both: Both) -> None:
    for rank in both[1]:
        assert rank["no room for a copy"] == ([3], (3, 3.0))


def test_a_checkpoint_is_complete_when_the_slowest_rank_has_written(both: Both) -> None:
    for rank in both[1]:
        assert rank["slow"] == (([], [], [1, 3]), ([4], ""), ("model.x",), ("model.x",))


def test_parts_that_are_not_the_whole_are_refused_on_all(both: Both) -> None:
    for rank in both[1]:
        assert "model.x: ranks write 1,000 numbers of 2,000" in rank["a hole"]
        assert "model.x: ranks write 10 numbers of 5" in rank["twice"]
        assert "model.1: ranks write 1,000 numbers of 2,000" in rank["other names"]


def test_a_model_that_differs_on_one_rank_is_filled_on_none(both: Both) -> None:
    for rank in both[1]:
        words, total = rank["another model"]
        assert CheckpointError.__name__ in words
        assert "model.x of shape [2000] instead of [2001]" in words
        assert total == 0


def test_the_folder_holds_complete_checkpoints_alone(both: Both) -> None:
    for rank in both[1]:
        assert rank["in the end"] == ([5], ["step-00000003", "step-00000005"])
