"""What blocks do, beside all that they could do."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from published_settings import LLAMA_8B, setting

from scrimp.planner.layout.block_activations import waiting_bytes
from scrimp.planner.layout.block_choices import Blocks, leanest
from scrimp.planner.layout.block_menus import Quality, flops_in_4_bits, menus_of, profiles
from scrimp.planner.layout.predict import kernels_of, planned_seconds, predict
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Setting
from scrimp.planner.layout.stage_memory import peak_bytes

SMALL = dataclasses.replace(LLAMA_8B, layers=3)


def with_memory(one: Setting, memory: float) -> Setting:
    group = one.cluster.groups[0]
    device = dataclasses.replace(one.device, memory_bytes=int(memory))
    groups = (dataclasses.replace(group, node=dataclasses.replace(group.node, device=device)),)
    return dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, groups=groups))


def with_plans(one: Setting, plan: BlockPlan) -> Setting:
    return dataclasses.replace(one, blocks=(plan,) * len(one.model.blocks))


def quality(one: Setting, limit: float) -> Quality:
    return Quality(formats=("nvfp4", "bf16"), harm=flops_in_4_bits(one.model), limit=limit)


def chosen(one: Setting, wanted: Quality | None = None) -> Setting | None:
    return Blocks(one, wanted).solve()


def harm(one: Setting, wanted: Quality) -> float:
    return sum(
        wanted.harm(block, product.rpartition(".")[0], product.rpartition(".")[2], recipe)
        for block, plan in enumerate(one.blocks)
        for product, recipe in plan.formats
    )


def every(one: Setting, sets: list[tuple[tuple[str, str], ...]], ranks: int) -> list[Setting]:
    """All settings of equal blocks; those of one rank in one order alone."""
    whole = (False, True) if one.layout.zero == 3 else (False,)
    plans = [
        BlockPlan(recompute=recompute, offload=offload, gathered=gathered, formats=formats)
        for recompute, offload, gathered, formats in itertools.product(
            (NONE, SELECTIVE, FULL), (False, True), whole, sets
        )
    ]
    each = len(one.model.blocks) // ranks
    of_rank = list(itertools.combinations_with_replacement(plans, each))
    return [
        dataclasses.replace(one, blocks=tuple(itertools.chain.from_iterable(rows)))
        for rows in itertools.product(of_rank, repeat=ranks)
    ]


@pytest.mark.parametrize("share", [0.15, 0.45, 0.8, 1.1])
@pytest.mark.parametrize("layout", [{"zero": 3}, {"zero": 1}])
def test_no_choice_of_blocks_that_fits_is_faster(layout: dict[str, int], share: float) -> None:
    like = setting(SMALL, "4xh100", micro_batch=4, **layout)
    lean, whole = (
        max(rank.total for rank in peak_bytes(one)) for one in (leanest(like), with_plans(like, BlockPlan()))
    )
    like = with_memory(like, lean + share * (whole - lean))
    found = chosen(like)
    assert found is not None
    assert max(one.total for one in peak_bytes(found)) <= like.device.memory_bytes
    seconds = [
        predict(one).step_seconds
        for one in every(like, [()], 1)
        if max(rank.total for rank in peak_bytes(one)) <= like.device.memory_bytes
    ]
    assert predict(found).step_seconds == pytest.approx(min(seconds), rel=2e-3)


def test_ranks_of_a_pipeline_share_harm_and_have_bytes_of_their_own() -> None:
    like = setting(dataclasses.replace(LLAMA_8B, layers=2), "2xb200", pp=2, fsdp=1, micro_batch=8)
    lean, whole = (
        max(rank.total for rank in peak_bytes(one)) for one in (leanest(like), with_plans(like, BlockPlan()))
    )
    like = with_memory(like, lean + 0.6 * (whole - lean))
    wanted = quality(like, 0.5)
    found = chosen(like, wanted)
    assert found is not None
    assert harm(found, wanted) <= 0.5
    sets = profiles(like, wanted, 0, NONE).formats
    seconds = [
        predict(one).step_seconds
        for one in every(like, sets, 2)
        if harm(one, wanted) <= 0.5
        and max(rank.total for rank in peak_bytes(one)) <= like.device.memory_bytes
    ]
    assert predict(found).step_seconds == pytest.approx(min(seconds), rel=2e-3)
    # The last rank has the head: the first one can do with less of what harms.
    low = [len(plan.formats) for plan in found.blocks]
    assert low[1] > low[0]


@pytest.mark.parametrize("kernel", ["best", "flash-2"])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_without_harm_to_spend_blocks_are_those_without_other_formats(share: float, kernel: str) -> None:
    """A rank's ways that do without formats are looked at, though others are faster at any price of harm."""
    like = setting(dataclasses.replace(LLAMA_8B, layers=8), "4xb200", pp=2, fsdp=2, zero=1, micro_batch=4)
    like = dataclasses.replace(like, software=dataclasses.replace(like.software, attention_kernel=kernel))
    lean, whole = (
        max(rank.total for rank in peak_bytes(one)) for one in (leanest(like), with_plans(like, BlockPlan()))
    )
    like = with_memory(like, lean + share * (whole - lean))
    found, expected = chosen(like, quality(like, 0.0)), chosen(like)
    assert found is not None
    assert expected is not None
    assert predict(found).step_seconds == pytest.approx(predict(expected).step_seconds, rel=1e-9)


@pytest.mark.parametrize("limit", [0.0, 0.3, 0.75])
def test_the_bound_is_below_what_is_found(limit: float) -> None:
    like = setting(dataclasses.replace(LLAMA_8B, layers=8), "4xb200", pp=2, fsdp=2, zero=1, micro_batch=4)
    lean, whole = (
        max(rank.total for rank in peak_bytes(one)) for one in (leanest(like), with_plans(like, BlockPlan()))
    )
    like = with_memory(like, lean + 0.4 * (whole - lean))
    blocks = Blocks(like, quality(like, limit))
    found = blocks.solve()
    assert found is not None
    passes = sum(predict(found).seconds[name] for name in ("compute", "communication_exposed", "bubble"))
    assert blocks.least_seconds() <= passes * 2 / like.micro_batches
    assert blocks.least_seconds() >= 0.8 * passes * 2 / (like.micro_batches + 1)


def test_harm_is_spent_on_the_products_that_save_most_for_it() -> None:
    like = setting(LLAMA_8B, "8xb200", micro_batch=2)
    wanted = quality(like, 1.0)
    sets = profiles(like, wanted, 0, NONE)
    assert (sets.formats[0], sets.harm[0]) == ((), 0.0)
    harms = sets.harm.tolist()
    assert harms == sorted(harms)
    assert harms[-1] <= 1.0 / len(like.model.blocks) * (1 + 1e-9)
    free = Quality(
        formats=("nvfp4", "bf16"), harm=lambda *key: float(key[2:] == ("fprop", "nvfp4")), limit=9.0
    )
    first = profiles(like, free, 0, NONE)
    assert first.harm[0] == 0.0
    assert {name.rpartition(".")[2] for name, _ in first.formats[0]} == {"dgrad", "wgrad"}
    # What runs twice saves twice.
    once, twice = (
        [len(formats) for formats in profiles(like, wanted, 0, recompute).formats]
        for recompute in (NONE, FULL)
    )
    assert once[-1] == twice[-1]
    names = [
        [name for name, _ in profiles(like, wanted, 0, recompute).formats[1]] for recompute in (NONE, FULL)
    ]
    assert sum(name.endswith("fprop") for name in names[1]) > sum(name.endswith("fprop") for name in names[0])


def test_a_menu_says_what_each_of_its_plans_takes() -> None:
    """Blocks of other harm are worked out together; one at a time, as they are spelt out, they take the same."""
    like = setting(dataclasses.replace(LLAMA_8B, layers=4), "2xb200", fsdp=2, micro_batch=2)
    flops = flops_in_4_bits(like.model)
    weights = {"fprop": 1.0, "dgrad": 3.0, "wgrad": 0.5}
    wanted = Quality(
        formats=("nvfp4", "fp8_tensor", "bf16"),
        harm=lambda block, linear, gemm, recipe: (
            flops(block, linear, gemm, recipe) * weights[gemm] * (1 + block * len(linear) % 5)
            + 1e-4 * (recipe == "fp8_tensor")
        ),
        limit=0.5,
    )
    for number, menu in enumerate(menus_of(like, wanted)):
        block = like.model.blocks[number]
        for at in range(0, len(menu.seconds), 5):
            plan = menu.plan(at)
            own = like.in_formats(plan.formats)
            passes = planned_seconds(number, plan, like, kernels_of(like))
            assert menu.seconds[at] == pytest.approx(
                sum(one.slowed(like.software.contention).total for one in passes)
            )
            assert menu.waiting[at] == waiting_bytes(block, plan, own)
            assert menu.stays[at] != plan.offload
            recipes = {name: "bf16" for one in block.linears for name in (f"{one.name}.{g}" for g in weights)}
            recipes |= dict(plan.formats)
            total = sum(wanted.harm(number, *name.rsplit(".", 1), one) for name, one in recipes.items())
            assert menu.harm[at] + menu.least == pytest.approx(total)
    alone = profiles(like, dataclasses.replace(wanted, known={}, menus={}), 3, NONE)
    like_3 = dataclasses.replace(wanted, harm=lambda block, *rest: wanted.harm(3, *rest), known={}, menus={})
    assert profiles(like, like_3, 0, NONE).formats == alone.formats


def test_blocks_of_other_harm_are_treated_otherwise() -> None:
    """Where the first blocks suffer ten times as much, the last ones go to 4 bits."""
    like = setting(dataclasses.replace(LLAMA_8B, layers=8), "2xb200", fsdp=2, micro_batch=2)
    flops = flops_in_4_bits(like.model)
    wanted = Quality(
        formats=("nvfp4", "bf16"),
        harm=lambda block, *rest: flops(block, *rest) * (10.0 if block < 4 else 1.0),
        limit=0.5,
    )
    found = chosen(like, wanted)
    assert found is not None
    low = [len(plan.formats) for plan in found.blocks]
    assert min(low[4:]) > max(low[:4])


def test_all_in_4_bits_is_no_more_than_the_whole() -> None:
    """61 equal parts of 1 add up to a little more."""
    like = setting(dataclasses.replace(LLAMA_8B, layers=61), "8xb200")
    four = Quality(formats=("nvfp4", "mxfp4"), harm=flops_in_4_bits(like.model), limit=1.0)
    assert Blocks(like, four).solve() is not None
