"""Seconds of a block beside its products one by one, and what must hold between settings."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from published_settings import LLAMA_8B, ROUTED, setting

from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout import block_times, product_times
from scrimp.planner.layout.block_times import block_seconds, exposed, head_seconds
from scrimp.planner.layout.execution import Execution
from scrimp.planner.layout.kernels import Kernels
from scrimp.planner.layout.predict import kernels_of, planned_seconds
from scrimp.planner.layout.setting import BlockPlan


def test_a_block_takes_its_products_attention_and_traffic() -> None:
    one = setting()
    kernels, block = Kernels(one.device), LLAMA_8B.sizes.blocks[0]
    found = block_seconds(block, one, kernels)
    products = sum(kernels.product(4096, linear.outputs, linear.inputs, "bf16") for linear in block.linears)
    assert found.products == pytest.approx(products)
    assert found.forward.total == pytest.approx(products + found.attention + found.cheap)
    assert 1.9 < found.backward.total / found.forward.total < 2.6


def test_ranks_that_share_layers_compute_less_and_exchange() -> None:
    block = LLAMA_8B.sizes.blocks[0]
    alone, shared = (block_seconds(block, one, Kernels(one.device)) for one in (setting(), setting(tp=8)))
    assert shared.products < alone.products / 6
    assert shared.forward.communication > alone.forward.communication == 0


def test_without_sequence_parallelism_every_rank_moves_the_whole_residual_stream() -> None:
    """Norms read and write 2 D each, sums 3 D: 10 D of a token; rotation and gates are shared all the same."""
    shared, whole = (dataclasses.replace(setting(tp=8), sequence_parallel=one) for one in (True, False))
    kernels, block = Kernels(shared.device), LLAMA_8B.sizes.blocks[0]
    more = block_seconds(block, whole, kernels).cheap - block_seconds(block, shared, kernels).cheap
    assert more == pytest.approx(kernels.moved(7 / 8 * 10 * 4096 * 4096 * 2.0))


def test_experts_are_shared_and_balanced() -> None:
    block = ROUTED.sizes.blocks[0]
    whole, shared = (
        block_seconds(block, one, Kernels(one.device)) for one in (setting(ROUTED), setting(ROUTED, ep=8))
    )
    assert shared.products <= whole.products
    assert shared.forward.communication > 0


def test_an_exchange_hides_behind_what_runs_beside_it() -> None:
    assert exposed(2.0, 1.0, 2.0, 0.7).communication == pytest.approx(0.3)
    assert exposed(2.0, 1.0, 0.2, 0.7).communication == pytest.approx(0.8)
    assert exposed(2.0, 1.0, 0.2, 0.7).hidden == pytest.approx(0.2)


@pytest.mark.parametrize("tp", [4, 8])
def test_a_block_without_experts_has_no_tokens_to_wait_for(tp: int) -> None:
    """Nor where its backward pass hides more than half of what both passes compute."""
    one = setting(hardware="8xl40s", of="megatron", tp=tp)
    bare = dataclasses.replace(one, software=dataclasses.replace(one.software, hidden_exchanges=0.0))
    found, plain = (block_seconds(one.model.blocks[0], each, kernels_of(each)) for each in (one, bare))
    exchange = plain.backward.communication
    most = one.software.hidden_exchanges * exchange
    assert found.backward.hidden == pytest.approx(min(most, plain.backward.compute), rel=0.1)
    assert found.backward.hidden > (found.forward.compute + found.backward.compute) / 2
    assert found.backward.communication + found.backward.hidden == pytest.approx(exchange)


@pytest.mark.parametrize("method", ["zigzag", "ulysses"])
def test_ranks_that_share_rows_send_what_the_runtime_is_counted_to_send(method: str) -> None:
    """`axis_traffic`, which tests/parity holds against counted bytes; of one pass of a rank's tokens."""
    one = setting(cp=4, cp_method=method, dp=2, zero=1, hardware="8xh100")
    group = one.groups["cp"]
    bare = dataclasses.replace(one, software=dataclasses.replace(one.software, hidden_rings=0.0))
    block = LLAMA_8B.sizes.blocks[0]
    found = block_seconds(block, bare, kernels_of(bare))
    empty = {"zigzag": group.hops, "ulysses": group.latency}[method]
    seconds = found.forward.communication + found.backward.communication - 2 * empty
    heads, keys, size, cp = block.attention.num_heads, block.attention.num_kv_heads, 2, 4
    tokens, head_size = one.tokens, block.attention.head_size
    expected = {
        "zigzag": tokens * 2 * keys * head_size * (2 * (cp - 1) * size + 4 * cp),
        "ulysses": tokens * 4 * size * (heads + keys) * head_size * (cp - 1) / cp,
    }[method]
    assert seconds * group.inside.bandwidth == pytest.approx(expected)


def test_a_ring_hides_behind_attention_and_ulysses_behind_nothing() -> None:
    ring, heads = (
        block_seconds(LLAMA_8B.sizes.blocks[0], one, kernels_of(one)).backward
        for one in (
            setting(cp=4, cp_method=method, sequence=32768, dp=2, zero=1) for method in ("zigzag", "ulysses")
        )
    )
    assert ring.hidden > 0 == heads.hidden
    assert ring.communication < heads.communication


def test_layers_of_their_own_are_products_of_their_own() -> None:
    """Queries, keys and values, gate and up: each reads the input once more, and narrow ones fill no tile."""
    one = setting(tp=8, of="torchtitan")
    kernels, block = kernels_of(one), LLAMA_8B.sizes.blocks[0]
    found = block_seconds(block, one, kernels).products
    columns = [512, 128, 128, 1792, 1792]
    expected = sum(kernels.product(4096, each, 4096, "bf16") for each in columns)
    expected += sum(kernels.product(4096, 4096, inner, "bf16") for inner in (512, 1792))
    assert found == pytest.approx(expected)
    stacked = dataclasses.replace(one, software=dataclasses.replace(one.software, stacks_layers=True))
    assert found > block_seconds(block, stacked, kernels).products


def test_exchanges_of_the_second_dimension_are_copied() -> None:
    """Four of a pass, each written and read once more; in pieces two of them are added up."""
    one = setting(tp=8, of="torchtitan")
    bare = dataclasses.replace(one.software, exchange_copies=0.0)
    block, size = LLAMA_8B.sizes.blocks[0], 4096 * 4096 * 2.0
    for execution, moved in ((Execution(), 4 * 2.0), (Execution(async_tp=True), 2 * 1.0)):
        with_copies = dataclasses.replace(one, execution=execution)
        without = dataclasses.replace(with_copies, software=bare)
        passes = [block_seconds(block, like, kernels_of(like)) for like in (with_copies, without)]
        for at in ("forward", "backward"):
            more = getattr(passes[0], at).communication - getattr(passes[1], at).communication
            assert more == pytest.approx(moved * size / one.device.bandwidth), (execution, at)


def test_codes_are_gathered_and_sums_are_not() -> None:
    one = setting(tp=8, of="torchtitan", precision="fp8_tensor")
    bare = dataclasses.replace(one.software, exchange_copies=0.0)
    codes, plain = (
        dataclasses.replace(one, software=dataclasses.replace(bare, gathers_codes=which))
        for which in (True, False)
    )
    block, group, size = LLAMA_8B.sizes.blocks[0], one.groups["tp"], 4096 * 4096 * 2.0
    less = [block_seconds(block, like, kernels_of(like)).forward.communication for like in (plain, codes)]
    assert less[0] - less[1] == pytest.approx(2 * (group.gathered(size) - group.gathered(size / 2)))


@pytest.mark.parametrize(
    ("precision", "inputs", "gradients"),
    [
        ("bf16", 2.0, 2.0),
        ("fp8_tensor", 1.0, 1.0),
        ("mxfp8", 1 + 1 / 32, 2 + 2 / 32),
        ("nvfp4", 0.5 + 1 / 16, 1 + 2 / 16),
    ],
)
def test_megatron_gathers_what_products_read(precision: str, inputs: float, gradients: float) -> None:
    """Forward two gathers and two sums in bf16; backward gradients are gathered along rows and along columns where
    their scales are not one, and inputs once more."""
    one = setting(hardware="8xb200", tp=8, of="megatron", precision=precision)
    found = block_times._exchanges(LLAMA_8B.sizes.blocks[0], one)
    numbers, group = 4096 * 4096, one.groups["tp"]
    seconds = [group.gathered(numbers * each) for each in (2.0, inputs, gradients)]
    assert found == pytest.approx((2 * (seconds[0] + seconds[1]), 2 * sum(seconds)))


def test_nothing_of_an_exchange_is_hidden_where_products_are_whole() -> None:
    """Megatron turns tp_comm_overlap off in NVFP4."""
    one = setting(hardware="8xb200", tp=8, of="megatron", precision="nvfp4")
    block = LLAMA_8B.sizes.blocks[0]
    whole = block_seconds(block, one, kernels_of(one)).forward.communication
    assert whole == pytest.approx(block_times._exchanges(block, one)[0])
    apart = dataclasses.replace(one, software=dataclasses.replace(one.software, whole_exchanges=()))
    assert block_seconds(block, apart, kernels_of(apart)).forward.communication < 0.5 * whole


def test_keys_that_are_repeated_go_round_a_ring_for_every_head() -> None:
    one = setting(cp=4, of="torchtitan", dp=2)
    few = dataclasses.replace(one, software=dataclasses.replace(one.software, repeats_keys=False))
    block, hops = LLAMA_8B.sizes.blocks[0], one.groups["cp"].hops
    sent = [block_seconds(block, like, kernels_of(like)).forward.communication - hops for like in (one, few)]
    assert sent[0] == pytest.approx(32 / 8 * sent[1])


def test_what_is_gathered_is_gathered_again_where_it_is_not_kept() -> None:
    one = setting(tp=8, of="torchtitan", recompute="selective")
    kept = dataclasses.replace(one, software=dataclasses.replace(one.software, selective_gathers=0.0))
    plan = BlockPlan(recompute="selective")
    again, once = (planned_seconds(0, plan, like, kernels_of(like)) for like in (one, kept))
    assert again[0] == once[0]
    assert again[1].communication - once[1].communication == pytest.approx(once[0].communication / 2)


def test_a_device_waits_until_the_host_has_read_how_long_sequences_are() -> None:
    """Five operations of Python, forward; backward and products are as without."""
    one = setting(of="aa-scaling", dp=8, fsdp=1, zero=1)
    ahead = dataclasses.replace(one, software=dataclasses.replace(one.software, attention_reads=0.0))
    block = LLAMA_8B.sizes.blocks[0]
    waits, runs = (block_seconds(block, like, kernels_of(like)) for like in (one, ahead))
    idle = 5 * one.software.host_ops * one.place.node.host_op_seconds
    assert waits.forward.compute - runs.forward.compute == pytest.approx(idle)
    assert waits.backward == runs.backward


def test_the_head_is_shared_by_words() -> None:
    one, eight = (head_seconds(one, Kernels(one.device)) for one in (setting(), setting(tp=8)))
    assert eight.forward.compute < one.forward.compute / 6


def test_a_program_that_gathers_logits_works_on_all_words() -> None:
    whole = dataclasses.replace(setting().software, gathers_logits=True)
    one, eight = (dataclasses.replace(like, software=whole) for like in (setting(), setting(tp=8)))
    kernels = Kernels(one.device)
    assert head_seconds(eight, kernels).cheap == pytest.approx(head_seconds(one, kernels).cheap)


@pytest.mark.slow
def test_what_is_counted_once_is_what_every_setting_has() -> None:
    """Whatever seconds follow from differs somewhere here; each setting alone knows none of the others."""
    model, clusters = ROUTED.sizes, {name: load_hardware(name) for name in ("16xh100", "16xb200", "4x4xh100")}
    settings = [
        dataclasses.replace(
            setting(ROUTED, hardware, of=of, sequence=sequence, micro_batch=size, **degrees),
            model=model,
            cluster=clusters[hardware],
            precision=precision,
            sequence_parallel=parallel,
        )
        for hardware, of, sequence, size, precision, parallel, degrees in itertools.product(
            clusters,
            ("scrimp", "megatron"),
            (2048, 4096),
            (1, 2),
            ("bf16", "fp8_tensor"),
            (True, False),
            (
                {},
                {"tp": 2},
                {"cp": 8},
                {"ep": 4},
                {"ep": 4, "tp": 2},
                {"ep": 4, "etp": 2, "tp": 2},
                {"pp": 2},
            ),
        )
    ]
    block = model.blocks[0]
    together = [block_seconds(block, one, Kernels(one.device)) for one in settings]
    for one, found in zip(settings, together, strict=True):
        block_times._counted.cache_clear()
        product_times.counted_layer.cache_clear()
        assert block_seconds(block, one, Kernels(one.device)) == found
