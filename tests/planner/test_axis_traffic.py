"""Axes of a layout that have one rank; for those that have more, tests/parity/ counts bytes beside the formulas."""

from __future__ import annotations

import pytest
from parity import Case, made

from scrimp.config import closed
from scrimp.models import spec_of
from scrimp.planner.axis_traffic import degrees_of, traffic_of
from scrimp.world import World


@pytest.mark.slow
def test_an_axis_of_one_rank_sends_nothing() -> None:
    decisions, _, _, _ = made(Case(), World(), 1)
    config = closed(decisions.config)
    assert traffic_of(spec_of(decisions.architecture), config) == []
    assert set(degrees_of(config.layout).values()) == {1}
