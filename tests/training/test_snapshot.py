"""A snapshot is made where there is room for it, by the memory that is free and by the budget."""

from __future__ import annotations

import pytest
import torch

from scrimp.training.snapshot import HostCopies

TENSORS = {f"model.{i}": torch.full((250,), float(i)) for i in range(4)}
"""Each has 1,000 bytes."""


@pytest.mark.parametrize(("room", "fits"), [(None, True), (4000, True), (3999, False), (0, False)])
def test_a_budget_limits_the_copy(room: int | None, fits: bool) -> None:
    found = HostCopies(room).take(TENSORS)
    assert (found is not None) == fits
    if found is not None:
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        assert all(found[name].data_ptr() != tensor.data_ptr() for name, tensor in TENSORS.items())
