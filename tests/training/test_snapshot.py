"""A snapshot is made where there is room for it, by the memory that is free and by the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scrimp.training.checkpoint import CheckpointStore
from scrimp.training.snapshot import HostCopies

TENSORS = {f"model.{i}": torch.full((250,), float(i)) for i in range(4)}
"""Each has 1,000 bytes."""


@pytest.mark.parametrize(("room", "fits"), [(None, True), (4500, True), (4499, False), (0, False)])
def test_a_budget_limits_the_copy_and_what_is_taken_beside_it(room: int | None, fits: bool) -> None:
    found = HostCopies(room).take(TENSORS, extra_bytes=500)
    assert (found is not None) == fits
    if found is not None:
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        assert all(found[name].data_ptr() != tensor.data_ptr() for name, tensor in TENSORS.items())


@pytest.mark.parametrize(("room", "files"), [(None, 1), (10**6, 1), (2500, 2), (1000, 4), (0, 4)])
def test_files_are_no_larger_than_the_room_that_they_are_made_in(
    tmp_path: Path, room: int | None, files: int
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_every=0, room=room)
    store.save(1, TENSORS, {}, {})
    store.wait()
    assert len(list(store.folder.glob("step-00000001/*.safetensors"))) == files
    into = {name: torch.zeros(250) for name in TENSORS}
    found, errors = store.latest()
    assert found is not None
    assert not errors
    found.load(into)
    assert all(torch.equal(into[name], tensor) for name, tensor in TENSORS.items())
