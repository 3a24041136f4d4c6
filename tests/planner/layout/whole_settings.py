"""All settings of small models, each priced and weighed by the one prediction: what searches are measured by."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from hypothesis import strategies as st
from published_settings import LLAMA_8B, setting

from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.block_choices import has_room_as_planned
from scrimp.planner.layout.block_menus import Quality, flops_in_4_bits, profiles
from scrimp.planner.layout.predict import predict, rank_seconds
from scrimp.planner.layout.questions import ON_HOST
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Setting
from scrimp.planner.layout.stage_memory import peak_bytes
from scrimp.planner.layout.stages import blocks_of_stages

GAP = 2e-3
"""By how much a plan may be slower than the best of all."""
PLAYED_GAP = 0.1
"""The same of a pipeline, whose plans are the best by `summed_of`, before its schedule is played. Measured, not proven:
of about 8,000 random pipelines of two stages 9 were slower than the best by more than 0.2 %, the worst by 6.8 %."""
MOST = 6000


def with_memory(one: Setting, memory: float, host: float | None = None) -> Setting:
    """On devices, and a host for each, of so many bytes."""
    group = one.cluster.groups[0]
    device = dataclasses.replace(one.device, memory_bytes=int(memory))
    node = dataclasses.replace(group.node, device=device)
    if host is not None:
        node = dataclasses.replace(node, host_memory_bytes=int(host * group.used))
    groups = (dataclasses.replace(group, node=node),)
    return dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, groups=groups))


def planned(one: Setting, *plans: BlockPlan) -> Setting:
    """With blocks that are planned so; a single plan is that of all."""
    return dataclasses.replace(one, blocks=plans if len(plans) > 1 else plans * len(one.model.blocks))


def most_bytes(one: Setting) -> float:
    """Peak bytes of the fullest rank."""
    return max(rank.total for rank in peak_bytes(one))


def fits(one: Setting) -> bool:
    """Whether its devices and hosts hold it, where it is carried out: pipelines keep all on their devices."""
    stays = one.layout.pp == 1 or not any(plan.offload for plan in one.blocks)
    return stays and has_room_as_planned(one, peak_bytes(one))


def harm(one: Setting, wanted: Quality) -> float:
    """That its formats do."""
    return sum(
        wanted.harm(block, *product.rsplit(".", 1), recipe)
        for block, plan in enumerate(one.blocks)
        for product, recipe in plan.formats
    )


def every(one: Setting, wanted: Quality | None) -> Iterator[Setting]:
    """All settings of equal blocks, those of one rank in one order alone; none of more than `MOST`."""
    whole = (False, True) if one.shares_weights and one.layout.zero == 3 else (False,)
    plans = [
        BlockPlan(recompute=recompute, offload=offload, gathered=gathered, formats=formats)
        for recompute, offload in ((NONE, False), (SELECTIVE, False), (FULL, False), (NONE, True))
        for formats in (
            profiles(one, wanted, 0, FULL if recompute == FULL else NONE).formats if wanted else [()]
        )
        for gathered in whole
    ]
    stages = [len(blocks) for blocks in blocks_of_stages(one)]
    if math.prod(math.comb(len(plans) + number - 1, number) for number in stages) <= MOST:
        of_ranks = [itertools.combinations_with_replacement(plans, number) for number in stages]
        for rows in itertools.product(*of_ranks):
            yield planned(one, *itertools.chain.from_iterable(rows))


def seconds_of(one: Setting) -> float:
    """Seconds of a step that hides as much as can be of what is reduced once: how much of it the last passes hide is
    not known where blocks are decided (`block_choices`)."""
    return predict(one).least


def summed_of(one: Setting) -> float:
    """Seconds of a step's passes as a search takes them when it decides blocks: each rank is as slow as the sum of its
    passes, and the slowest counts in every micro-batch (`shared_harm`). What a schedule makes of them is unknown."""
    ranks = rank_seconds(one)
    return (one.micro_batches - 1) * max(ranks) + sum(ranks)


def fitting(one: Setting, wanted: Quality | None) -> list[Setting]:
    """All that fit."""
    return [
        each
        for each in every(one, wanted)
        if (wanted is None or harm(each, wanted) <= wanted.limit * (1 + 1e-9)) and fits(each)
    ]


def fastest(one: Setting, wanted: Quality | None) -> Setting | None:
    """The best of those that fit."""
    return min(fitting(one, wanted), key=seconds_of, default=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Setting, Quality | None]:
    """A small model on devices that hardly hold it, and what formats may spoil."""
    width, layers = draw(st.sampled_from([2048, 4096])), draw(st.integers(2, 4))
    shape = dataclasses.replace(
        LLAMA_8B,
        layers=layers,
        width=width,
        heads=width // 128,
        ffn_width=draw(st.integers(2, 4)) * width,
        vocab_size=draw(st.sampled_from([8192, 32000, 128256])),
    )
    hardware = draw(
        st.sampled_from(["h100", "2xh100", "4xh100", "2xb200", "4xl40s", "rtx4060ti", "2xrtx5090"])
    )
    devices, micro_batch = load_hardware(hardware).devices, draw(st.sampled_from([1, 2, 4]))
    layouts = (
        [{}, {"zero": 3}, {"zero": 1}, {"pp": 2, "zero": 1, "schedule": "1f1b"}] if devices > 1 else [{}]
    )
    like = setting(
        shape,
        hardware,
        of=draw(st.sampled_from(["scrimp", "megatron", "torchtitan"])),
        sequence=draw(st.sampled_from([2048, 4096, 8192])),
        micro_batch=micro_batch,
        global_batch=draw(st.sampled_from([1, 2, 4, 8])) * micro_batch * devices,
        **draw(st.sampled_from(layouts)),
    )
    formats = draw(
        st.sampled_from([None, ("nvfp4", "bf16"), ("fp8_tensor", "bf16"), ("bf16", "fp8_tensor", "nvfp4")])
    )
    limit = draw(st.sampled_from([0.0, 0.3, 0.5, 0.8]))
    wanted = Quality(formats=formats, harm=flops_in_4_bits(like.model), limit=limit) if formats else None
    if like.layout.pp == 1:
        like = dataclasses.replace(like, offload=draw(st.sampled_from(ON_HOST)))
    plans = BlockPlan(), BlockPlan(recompute=FULL), BlockPlan(offload=True), BlockPlan(gathered=True)
    sizes = [most_bytes(planned(like, one)) for one in plans]
    low, high = 0.98 * min(sizes), 1.01 * max(sizes)
    host = draw(st.one_of(st.none(), st.floats(0, 20e9)))
    return with_memory(like, low + draw(st.floats(0, 1)) * (high - low), host), wanted
