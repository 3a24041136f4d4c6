"""Bytes by category: torch's own MemTracker has the same peak, and storages that are resized count as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from scrimp.profiler.memory_trace.by_category import ACTIVATIONS, WEIGHTS, CategoryTracker


def passes(model: nn.Module) -> None:
    model(torch.empty(64, 32)).sum().backward()


def of_torch() -> int:
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            passes(model)
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def test_torchs_tracker_has_the_same_peak() -> None:
    with FakeTensorMode():
        tracker = CategoryTracker()
        with tracker:
            with tracker.making(WEIGHTS):
                model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
            passes(model)
    assert tracker.peak == pytest.approx(of_torch(), rel=0.01)
    assert tracker.at_peak[WEIGHTS] == 4 * 4 * (32 * 32 + 32)
    assert tracker.at_peak.total() == tracker.peak


def test_storages_that_are_resized_count_as_they_are() -> None:
    original = torch.UntypedStorage.resize_
    with FakeTensorMode(), CategoryTracker() as tracker:
        x = torch.empty(100)
        x.untyped_storage().resize_(0)
        assert tracker.live == 0
        x.untyped_storage().resize_(1200)
        assert (tracker.live, tracker.peak, tracker.most[ACTIVATIONS]) == (1200, 1200, 1200)
    assert torch.UntypedStorage.resize_ is original


def test_what_is_found_is_of_the_category_where_it_is() -> None:
    kept: list[torch.Tensor] = []
    with FakeTensorMode(), CategoryTracker(found=lambda: {WEIGHTS: kept}) as tracker:
        kept.append(torch.empty(100))
        torch.empty(50)
    assert tracker.at_peak[WEIGHTS] == 400
    assert tracker.at_peak[ACTIVATIONS] == 200
