"""What LLMQ's source does, beside the same by hand."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import LLAMA_8B, setting

from scrimp.planner.hardware import load_device
from scrimp.planner.layout.predict import kernels_of, planned_seconds
from scrimp.planner.layout.product_times import product_seconds
from scrimp.planner.layout.setting import FULL, BlockPlan, Offload, Setting
from scrimp.planner.layout.software import software
from scrimp.planner.layout.stage_memory import peak_bytes

BLOCK = LLAMA_8B.sizes.blocks[0]
NUMBERS = sum(one.inputs * one.outputs for one in BLOCK.linears)


def on_one_card(of: str = "llmq", precision: str = "bf16", **offload: bool) -> Setting:
    one = setting(of=of, hardware="rtx5090")
    return dataclasses.replace(one, precision=precision, offload=Offload(**offload))


def waits(one: Setting) -> tuple[float, ...]:
    """Seconds of each pass of a block beyond those of the same with nothing on the host."""
    passes = (
        planned_seconds(0, BlockPlan(), like, kernels_of(like))
        for like in (one, dataclasses.replace(one, offload=Offload()))
    )
    return tuple(moved.total - bare.total for moved, bare in zip(*passes, strict=True))


def test_full_recomputation_ends_before_the_last_product() -> None:
    one = on_one_card(precision="fp8_tensor")
    whole = dataclasses.replace(one, software=dataclasses.replace(one.software, full_leaves_last=False))
    kernels = kernels_of(one)
    passes = [planned_seconds(0, BlockPlan(recompute=FULL), like, kernels)[1] for like in (whole, one)]
    last = product_seconds(BLOCK.linears[-1], "fprop", "fp8_tensor", one, kernels)
    assert passes[0].total - passes[1].total == pytest.approx(last)


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensor"])
def test_weights_on_the_host_came_between_kernels_in_2025(precision: str) -> None:
    """Two bytes of each number in each pass, whatever products multiply; since then a stream of its own brings them."""
    link = load_device("rtx5090").host_link
    alone = 2.0 * NUMBERS / link.bytes_per_second
    assert waits(on_one_card("llmq-2025", precision, master=True)) == pytest.approx((alone, alone))
    later = on_one_card("llmq", precision, master=True)
    assert waits(dataclasses.replace(later, micro_batch=32)) == pytest.approx((0.0, 0.0))


def test_sums_of_gradients_on_the_host_are_read_and_written_by_the_pass() -> None:
    link = load_device("rtx5090").host_link
    both = 2.0 * NUMBERS / (link.bytes_per_second * link.both_ways)
    assert waits(on_one_card(gradients=True)) == pytest.approx((0.0, both))


def test_blocks_are_gathered_as_codes_where_products_multiply_codes() -> None:
    wide, codes = (setting(of="llmq", fsdp=8, zero=3), setting(of="llmq", fsdp=8, zero=3))
    codes = dataclasses.replace(codes, precision="fp8_tensor")
    assert (wide.block_weight_bytes, codes.block_weight_bytes) == (2.0, 1.0)
    gathered = [peak_bytes(one)[0].categories["gathered"] for one in (wide, codes)]
    assert gathered[0] - gathered[1] == pytest.approx(2 * NUMBERS)


def test_embedding_and_head_share_the_memory_that_they_are_gathered_into() -> None:
    one = setting(of="llmq", fsdp=8, zero=3)
    apart = dataclasses.replace(one, software=dataclasses.replace(one.software, one_end_buffer=False))
    sizes = [peak_bytes(like)[0].categories["gathered"] for like in (apart, one)]
    assert sizes[0] - sizes[1] == pytest.approx(2.0 * 128256 * 4096)


def test_codes_of_a_weight_are_transposed_in_every_backward_pass() -> None:
    one = on_one_card(precision="fp8_tensor")
    bare = dataclasses.replace(one, software=dataclasses.replace(one.software, transposed_weight_bytes=0.0))
    linear, kernels = BLOCK.linears[0], kernels_of(one)
    seconds = [product_seconds(linear, "dgrad", "fp8_tensor", like, kernels) for like in (one, bare)]
    assert seconds[0] - seconds[1] == pytest.approx(2.0 * linear.inputs * linear.outputs / kernels.bandwidth)


def test_fp8_runs_at_the_plain_rate_of_geforce() -> None:
    """gn-kernels measured 480 TFLOP/s on an RTX 5090, 660 with blocks of scales."""
    card = load_device("rtx5090")
    assert software("llmq").on(card).rate("fp8") == pytest.approx(480e12, rel=1e-3)
    assert software("llmq-2025").on(card).rate("fp8") == pytest.approx(480e12, rel=1e-3)
    assert (card.rate("fp8") or 0) > 600e12
