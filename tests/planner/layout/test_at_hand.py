"""The layouts that are open on the ranks at hand, and which is predicted to be fastest on links that are known."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from scrimp.config import Config, preset, replace_values, resolve
from scrimp.config.layout import AXES
from scrimp.config.schema import LayoutConfig
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.layout.at_hand import Predicted, fastest, open_layouts
from scrimp.profiler.measured_cluster import RankRates, cluster_of, software_here

RATES = RankRates(5e10, 1e10, 3e10, 3e10, 1e10, 5e-6, link=1e9, latency_seconds=1e-4)
ARCHITECTURE = preset("llama-8m")


def found(rates: RankRates, ranks: int = 4, memory: int = 2**33, **asked: object) -> list[Predicted]:
    settings = {
        "train.batch_tokens": 2048,
        "train.sequence": 256,
        "train.micro_batch": 2,
        "precision": "fp32",
    }
    config = replace_values(Config(), {**settings, **{f"layout.{key}": one for key, one in asked.items()}})
    decided = resolve(config, ARCHITECTURE, device_type="cpu", ranks=ranks).config
    cluster = cluster_of(rates, ranks=ranks, name="here", memory_bytes=memory)
    program = software_here(cluster, "cpu", compute="fp32", compiled=False)
    return fastest(decided, config.layout, sizes_of(spec_of(ARCHITECTURE)), cluster, program)


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_all_degrees_of_the_ranks_are_open_where_nothing_is_given(ranks: int) -> None:
    listed = {tuple(getattr(one, axis) for axis in AXES) for one in open_layouts(LayoutConfig(), ranks)}
    expected = {
        degrees
        for degrees in itertools.product(range(1, ranks + 1), repeat=len(AXES))
        if math.prod(degrees) == ranks
    }
    assert listed == expected


def test_what_is_given_stays() -> None:
    for one in open_layouts(LayoutConfig(tp=2, zero=2), 8):
        assert (one.tp, one.pp, one.cp, one.zero, one.ranks) == (2, 1, 1, 2, 8)


def test_slow_links_take_whole_copies_and_fast_links_and_small_memory_take_shards() -> None:
    slow = dataclasses.replace(RATES, link=1e8)
    of_stage = {(one.layout.dp, one.layout.zero): one for one in found(slow, 2) if one.layout.data_ranks == 2}
    assert of_stage[2, 3].seconds < of_stage[1, 3].seconds  # gathers in every pass
    copies, shards = of_stage[2, 3], of_stage[1, 3]
    between = int((copies.peak_bytes + shards.peak_bytes) / 2)
    assert all(one.layout.dp == 1 or one.layout.shards > 1 for one in found(slow, 2, memory=between))


def test_an_emulated_format_is_predicted_slower_than_the_working_format() -> None:
    def seconds(precision: str) -> float:
        settings = {"train.batch_tokens": 2048, "train.sequence": 256, "precision": precision}
        config = replace_values(Config(), {**settings, "layout.fsdp": 1, "layout.dp": 2})
        decided = resolve(config, ARCHITECTURE, device_type="cpu", ranks=2).config
        cluster = cluster_of(RATES, ranks=2, name="here", memory_bytes=2**33)
        program = software_here(cluster, "cpu", compute="fp32", compiled=False)
        best, *_ = fastest(decided, config.layout, sizes_of(spec_of(ARCHITECTURE)), cluster, program)
        return best.seconds

    assert seconds("nvfp4") > 1.5 * seconds("fp32")
