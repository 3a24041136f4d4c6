"""Snapshots from a CUDA device: pinned slabs, reused, and equal to what was on the device."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from scrimp.training import snapshot
from scrimp.training.checkpoint import CheckpointStore
from scrimp.training.snapshot import HostCopies, _lay_out

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def tensors(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"model.{i}": torch.randn((i, 33), generator=generator) for i in range(1, 40)}
    made |= {
        "model.bf16": torch.randn((7, 5), generator=generator).bfloat16().t(),
        "model.n": torch.tensor(3),
    }
    return {name: tensor.to(device) for name, tensor in made.items()} | {"random": generator.get_state()}


def test_slabs_hold_every_tensor_once_aligned_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SLAB_BYTES", 2048)
    given = tensors("cpu") | {"model.large": torch.zeros(1000), "model.empty": torch.empty(0)}
    places, sizes = _lay_out(given)
    assert places.keys() == given.keys()
    taken: dict[int, list[tuple[int, int]]] = {}
    for name, (slab, start) in places.items():
        assert start % 64 == 0
        assert start + given[name].nbytes <= sizes[slab]
        taken.setdefault(slab, []).append((start, start + given[name].nbytes))
    for spans in taken.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.gpu
@needs_cuda
def test_a_checkpoint_of_a_cuda_state_is_equal_and_loads_onto_the_device(tmp_path: Path) -> None:
    store, given = CheckpointStore(tmp_path, keep_last=2, keep_every=0), tensors("cuda")
    wanted = {name: tensor.clone() for name, tensor in given.items()}
    store.save(1, given, {}, {})
    for tensor in given.values():
        tensor.zero_()
    store.wait()
    checkpoint, _ = store.latest()
    assert checkpoint is not None
    checkpoint.load(given)
    assert all(torch.equal(given[name], wanted[name]) for name in wanted)


@pytest.mark.gpu
@needs_cuda
def test_pinned_slabs_are_used_again() -> None:
    copies, given = HostCopies(), tensors("cuda")
    first = copies.take(given)
    assert first is not None
    assert first["model.1"].is_pinned()
    places = {name: tensor.data_ptr() for name, tensor in first.items() if given[name].is_cuda}
    second = copies.take(given)
    assert second is not None
    assert {name: second[name].data_ptr() for name in places} == places
    assert all(torch.equal(second[name], given[name].cpu()) for name in given)


@pytest.mark.gpu
@needs_cuda
def test_where_pinning_is_not_allowed_a_pageable_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_PINNED_SHARE", 0.0)
    given = tensors("cuda")
    copies = HostCopies().take(given)
    assert copies is not None
    assert not copies["model.1"].is_pinned()
    assert all(torch.equal(copies[name], given[name].cpu()) for name in given)
