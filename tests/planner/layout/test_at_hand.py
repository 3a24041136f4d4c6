"""What a run asks the search on links that are known, beside all settings that there are."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from scrimp.config import Config, ResolvedConfig, preset, replace_values, resolve
from scrimp.config.layout import AXES
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import PlanError
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.layout.at_hand import as_decided, question_of, setting_of_run
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.questions import Question, layouts, setting_of
from scrimp.planner.layout.search import Candidate, search
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Offload
from scrimp.planner.layout.stage_memory import peak_bytes
from scrimp.profiler.measured_cluster import RankRates, cluster_of, software_here

RATES = RankRates(5e10, 1e10, 3e10, 3e10, 1e10, 5e-6, link=1e9, latency_seconds=1e-4)
ARCHITECTURE = preset("llama-8m")
MODEL = sizes_of(spec_of(ARCHITECTURE))


def decided(ranks: int, **given: object) -> tuple[Config, ResolvedConfig]:
    settings = {"train.batch_tokens": 2048, "train.sequence": 256, "precision": "fp32"}
    settings |= {key.replace("__", "."): value for key, value in given.items()}
    config = replace_values(Config(), settings)
    return config, resolve(config, ARCHITECTURE, device_type="cpu", ranks=ranks).config


def asked(rates: RankRates = RATES, ranks: int = 4, memory: int = 2**33, **given: object) -> Question:
    config, found = decided(ranks, **given)
    cluster = cluster_of(rates, ranks=ranks, name="here", memory_bytes=memory)
    program = software_here(
        cluster, "cpu", compute="fp32" if config.precision == "fp32" else "bf16", compiled=False
    )
    return question_of(config, found, MODEL, cluster, program)


def best(question: Question) -> Candidate:
    return search(question, keep=1, has_families=False).best[0]


def test_all_degrees_and_stages_of_few_ranks_are_searched_where_nothing_is_given() -> None:
    """llama-8m has 8 heads and 4 key heads, 9 blocks; the batch has 8 sequences."""
    listed = {(*(getattr(one, axis) for axis in AXES), one.zero) for one in layouts(asked())}
    expected = {
        (*degrees, zero)
        for degrees in itertools.product((1, 2, 4), repeat=len(AXES))
        for zero in (1, 2, 3)
        if math.prod(degrees) == 4
        and not (degrees[3] > 1 and degrees[4] > 1)
        and (zero == 3 or degrees[2] * degrees[3] > 1)
    }
    assert listed == expected


def test_what_is_given_stays() -> None:
    question = asked(ranks=8, layout__tp=2, layout__zero=2, train__micro_batch=1)
    assert question.given == {"tp": 2, "zero": 2, "micro_batch": 1}
    for one in layouts(question):
        assert (one.tp, one.zero, one.ranks) == (2, 2, 8)
    config, found = decided(8, layout__tp=1)
    written = question_of(
        config, found, MODEL, question.cluster, question.software, {"layout.tp", "layout.schedule"}
    )
    assert written.given == {"tp": 1}
    assert {one.tp for one in layouts(written)} == {1}
    given = asked(memory__activations="mlp,0-3=block,8=keep+offload", memory__optimizer="3").memory
    assert [one.recompute for one in given.blocks(9)] == [FULL] * 4 + [SELECTIVE] * 4 + [NONE]
    assert [one.offload for one in given.blocks(9)] == [False] * 8 + [True]
    assert given.offload == Offload(optimizer=True, master=True)


@pytest.mark.parametrize("rates", [RATES, dataclasses.replace(RATES, link=3e7)], ids=["fast", "slow"])
@pytest.mark.parametrize("memory", [2**33, 90 * 2**20])
@pytest.mark.every(3)
def test_nothing_that_fits_is_faster_than_what_is_found(rates: RankRates, memory: int) -> None:
    question = asked(rates, memory=memory)
    found = best(question).seconds
    for degrees in itertools.product((1, 2, 4), repeat=len(AXES)):
        layout: dict[str, Any] = dict(zip(AXES, degrees, strict=True))
        if math.prod(degrees) != 4 or (layout["tp"] > 1 and layout["cp"] > 1):
            continue
        for zero, size, again, stays in itertools.product(
            (1, 2, 3), (1, 2, 4, 8), (NONE, SELECTIVE, FULL), (False, True)
        ):
            try:
                plain = ResolvedLayout(**layout, zero=zero, schedule="1f1b")
                one = setting_of(question, plain, size)
            except PlanError:
                continue
            if layout["pp"] > 1 and one.micro_batches < layout["pp"]:
                continue
            one = dataclasses.replace(one, blocks=(BlockPlan(recompute=again, gathered=stays),) * 9)
            if max(rank.total for rank in peak_bytes(one)) <= memory:
                assert predict(one).step_seconds >= found * (1 - 2e-3), plain


def test_a_run_is_predicted_as_the_search_predicts_it() -> None:
    question = asked(dataclasses.replace(RATES, link=3e7), memory=90 * 2**20)
    found = best(question).setting
    again = [{FULL: "block", SELECTIVE: "norms", NONE: "keep"}[one.recompute] for one in found.blocks]
    _, config = decided(4, layout__tp=2, layout__dp=2)
    config = dataclasses.replace(
        config,
        layout=found.layout,
        train=dataclasses.replace(config.train, micro_batch=found.micro_batch),
    )
    run = setting_of_run(config, MODEL, question.cluster, question.software, again)
    assert run is not None
    assert predict(run).step_seconds == pytest.approx(predict(found).step_seconds)


def test_blocks_that_stay_gathered_and_states_on_the_host_are_predicted() -> None:
    question = asked()
    _, config = decided(
        4, layout__fsdp=4, layout__gathered="0-2", memory__activations="block", memory__optimizer="host"
    )
    run = setting_of_run(config, MODEL, question.cluster, question.software)
    assert run is not None
    assert [one.gathered for one in run.blocks] == [True] * 3 + [False] * 6
    assert {one.recompute for one in run.blocks} == {FULL}
    assert run.offload == Offload(optimizer=True, master=True)


def test_a_layout_that_was_decided_is_the_only_one_that_is_searched() -> None:
    question = asked()
    for one in layouts(question):
        again = dataclasses.replace(question, given=as_decided(one))
        assert list(layouts(again)) == [one]


def test_slow_links_take_whole_copies_and_fast_links_and_small_memory_take_shards() -> None:
    slow = asked(dataclasses.replace(RATES, link=1e8), 2, train__micro_batch=2)

    def of(dp: int) -> Candidate:
        return best(dataclasses.replace(slow, given={**slow.given, "dp": dp, "pp": 1, "cp": 1, "tp": 1}))

    copies, shards = of(2), of(1)
    assert copies.seconds < shards.seconds  # which gathers, or reduces, more often
    sizes = [max(one.total for one in found.memory) for found in (copies, shards)]
    between = asked(dataclasses.replace(RATES, link=1e8), 2, int(sum(sizes) / 2), train__micro_batch=2)
    layout = best(between).setting.layout
    assert layout.dp == 1 or layout.shards > 1


def test_an_emulated_format_is_predicted_slower_than_the_working_format() -> None:
    plain: dict[str, Any] = {"layout__tp": 1, "train__micro_batch": 2}
    low = best(asked(ranks=2, precision="nvfp4", **plain)).seconds
    assert low > 1.5 * best(asked(ranks=2, precision="bf16", **plain)).seconds


@pytest.mark.slow
def test_formats_that_are_planned_count_as_a_share_of_flops() -> None:
    question = asked(precision="snip", budget__fp4_flops=0.5)
    assert question.formats is not None
    assert (question.formats.names, question.formats.share) == (("fp8", "nvfp4"), 0.5)
    fast = dataclasses.replace(RATES, low=5e10, low4=2e11)
    seconds = [
        best(asked(fast, precision="snip", budget__fp4_flops=share)).seconds for share in (0.0, 0.5, 1.0)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[2]
    assert asked(precision="snip", budget__divergence=0.1).formats is None
