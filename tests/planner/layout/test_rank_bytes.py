"""Bytes of ranks beside published formulas, and what must hold between settings."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import GPT_22B, LLAMA_8B, ROUTED, setting

from scrimp.config import preset
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.layout.block_activations import kept_bytes, waiting_bytes, working_bytes
from scrimp.planner.layout.held_states import host_bytes, state_bytes
from scrimp.planner.layout.setting import BlockPlan, Offload
from scrimp.planner.layout.software import software
from scrimp.planner.layout.stage_memory import peak_bytes


def test_activations_are_those_of_the_published_formula() -> None:
    """Korthikanti et al., table 2: 34 s b h bytes a block, of which 2 are masks of dropout; here without scores."""
    one = setting(GPT_22B, "8xa100-80", of="megatron", sequence=2048, global_batch=4, micro_batch=4, tp=8)
    formula = 32 * 2048 * 4 * 6144 / 8
    assert kept_bytes(one.model.blocks[0], one) == pytest.approx(formula, rel=0.01)


def test_scores_in_memory_are_those_of_the_published_formula() -> None:
    """Table 2 there: s b h (34 + 5 a s / h) bytes; selective recomputation keeps none of the scores."""
    like = setting(
        GPT_22B, "8xa100-80", of="megatron-2021", sequence=2048, global_batch=4, micro_batch=4, tp=8
    )
    block = like.model.blocks[0]
    scores = 5 * 64 * 2048 * 2048 * 4 / 8
    formula = 32 * 2048 * 4 * 6144 / 8 + scores
    assert kept_bytes(block, like) == pytest.approx(formula, rel=0.01)
    selective = BlockPlan(recompute="selective")
    assert waiting_bytes(block, selective, like) == pytest.approx(formula - scores, rel=0.01)


def test_what_scrimp_keeps_besides_is_counted() -> None:
    """Queries and keys twice, and whole what ranks of tp gather: as a simulated step has it."""
    one, other = (setting(of=of, tp=4) for of in ("scrimp", "megatron"))
    width, keys, tokens = 4096, 1024, 4096
    more = 2 * tokens * ((width + keys) / 4 + 2 * width * (1 - 1 / 4))
    block = one.model.blocks[0]
    assert kept_bytes(block, one) - kept_bytes(block, other) == pytest.approx(more)


def test_states_are_shared_as_the_stage_of_zero_says() -> None:
    three, two, one = (peak_bytes(setting(zero=zero))[0].categories for zero in (3, 2, 1))
    numbers = LLAMA_8B.sizes.parameters
    assert three["weights"] == pytest.approx(2 * numbers / 8)
    # What was gathered, and a rank's own part beside it.
    assert two["weights"] == one["weights"] == pytest.approx(2 * numbers * (1 + 1 / 8))
    assert three["gradients"] == two["gradients"] == pytest.approx(one["gradients"] / 8)
    assert three["optimizer"] == two["optimizer"] == one["optimizer"] == pytest.approx(12 * numbers / 8)


def test_the_first_rank_of_a_pipeline_has_most_passes_in_flight() -> None:
    like = setting(dataclasses.replace(LLAMA_8B, vocab_size=8000), pp=4, fsdp=2)
    found = [one.categories["activations"] for one in peak_bytes(like)]
    block = like.model.blocks[0]
    one_more = 8 * kept_bytes(block, like)  # a rank has 8 blocks
    assert found[0] - found[3] == pytest.approx(3 * one_more)
    assert found[3] == pytest.approx(one_more + working_bytes(block, like))


def test_recomputation_and_offload_take_less() -> None:
    keep, some, all_again = (
        peak_bytes(setting(recompute=one))[0].categories["activations"] for one in ("none", 16, "full")
    )
    assert all_again < some < keep
    leaving = dataclasses.replace(
        setting(), offload=Offload(activation_layers=30, optimizer=True, master=True)
    )
    found = peak_bytes(leaving)[0].categories
    ends = 2 * 128256 * 4096
    assert found["optimizer"] == pytest.approx(12 * ends / 8)
    assert found["activations"] < keep / 4


def test_low_precision_keeps_fewer_bytes() -> None:
    block = LLAMA_8B.sizes.blocks[0]
    assert kept_bytes(block, setting(precision="fp8_tensor")) < kept_bytes(block, setting())


def test_shards_of_experts_are_those_that_have_the_same_ones() -> None:
    """8 ranks share all weights; of experts each has an eighth, however many of the 8 are for ep."""
    sizes = [peak_bytes(setting(ROUTED, zero=3, ep=ep))[0].categories for ep in (1, 2, 8)]
    assert [one["weights"] for one in sizes] == pytest.approx([sizes[0]["weights"]] * 3)
    assert [one["optimizer"] for one in sizes] == pytest.approx([sizes[0]["optimizer"]] * 3)


def test_experts_are_shared_by_their_own_ranks() -> None:
    shared, whole = (peak_bytes(setting(ROUTED, zero=1, ep=ep))[0].categories for ep in (8, 1))
    assert shared["weights"] < whole["weights"] / 2


@pytest.mark.parametrize(
    ("ep", "tp", "zero"), [(1, 1, 3), (8, 1, 3), (4, 2, 3), (8, 1, 1), (8, 8, 1), (2, 4, 3)]
)
def test_all_ranks_together_hold_every_state_once(ep: int, tp: int, zero: int) -> None:
    """Ranks with other experts share none of them: what ep has cut, shards cut no more."""
    one = setting(ROUTED, "4x8xh100", ep=ep, tp=tp, zero=zero)
    found = peak_bytes(one)[0].categories
    numbers = ROUTED.sizes.parameters
    assert 32 * found["optimizer"] == pytest.approx(12 * numbers)
    if zero == 3:
        assert 32 * found["weights"] == pytest.approx(2 * numbers)
        assert 32 * found["gradients"] == pytest.approx(4 * numbers)
    left = dataclasses.replace(one, offload=Offload(optimizer=True, master=True))
    ends = ROUTED.sizes.embedding_parameters + ROUTED.sizes.head_parameters
    assert 32 * host_bytes(left) == pytest.approx(12 * (numbers - ends))
    assert 32 * state_bytes(left, 0) == pytest.approx(12 * ends)
    other = dataclasses.replace(left, software=software("megatron"))
    assert 32 * host_bytes(other) == pytest.approx(12 * numbers)


def test_a_peak_is_one_moment_and_not_the_sum_of_all() -> None:
    """Where the loss holds most, nothing is made again; where blocks are, no logits are there."""
    wide, narrow = (
        setting(
            dataclasses.replace(LLAMA_8B, vocab_size=vocab), of="torchtitan", micro_batch=4, recompute="full"
        )
        for vocab in (128256, 8000)
    )
    for one, moment in ((wide, "loss"), (narrow, "backward")):
        (peak,) = peak_bytes(one)
        assert peak.moment == moment
        assert (peak.categories["logits"] > 0) == (moment == "loss")
    tokens, numbers = 4 * 4096, LLAMA_8B.sizes.parameters
    block = LLAMA_8B.sizes.blocks[0].parameters
    ends = 2 * 128256 * 4096
    states = 16 * numbers / 8
    stream = 2 * tokens * 4096
    passes = 32 * stream + 14 * tokens * 128256 + 2 * stream  # what the last norm and the head read
    gathered = 2 * (2 * block + ends)  # and once more in the buffers that they are copied from, which stay
    assert peak_bytes(wide)[0].total == pytest.approx(states + gathered + 1.03 * (passes + gathered))


def test_an_update_may_need_most() -> None:
    """Megatron makes bf16 gradients float32: 4 bytes a number of its shard."""
    one = setting(of="megatron", tp=8, recompute="full", sequence=512, dp=1, fsdp=1, zero=1)
    (peak,) = peak_bytes(one)
    assert peak.moment == "update"
    assert peak.total == pytest.approx((2 + 2 + 12 + 1.03 * 4) * LLAMA_8B.sizes.parameters / 8)


def test_an_allocator_without_growing_segments_loses_more_between_the_passes_of_a_pipeline() -> None:
    """It loses nothing of what is allocated once, nor where passes free in the reverse order."""
    for pp, share in ((1, 0.03), (2, 0.15)):
        one = setting(of="aa-scaling", pp=pp, dp=8 // pp, fsdp=1, zero=1)
        for peak in peak_bytes(one):
            sizes = peak.categories
            stays = sum(sizes[name] for name in ("weights", "gradients", "optimizer"))
            goes = peak.total - stays - sizes["margin"]
            assert goes > 0
            assert sizes["margin"] == pytest.approx(share * goes)


def test_norms_in_float32_keep_their_input_in_four_bytes() -> None:
    """Two norms each keep more for a number: the other half of the input, and what is normed before its weight."""
    fused, apart = (setting(of=of, dp=8, fsdp=1, zero=1) for of in ("aa-scaling", "aa-scaling-unfused"))
    block = LLAMA_8B.sizes.blocks[0]
    more = kept_bytes(block, apart) - kept_bytes(block, fused)
    assert more == pytest.approx(2 * (2 + 2) * 4096 * 4096)


def test_fine_tuning_in_nemo_keeps_states_in_two_bytes() -> None:
    """Weights, gradients, both moments and masters; in pretraining moments have four, and masters the rest of four."""
    for of, each in (("megatron-2024-sft", 6), ("megatron-2024", 10)):
        one = setting(of=of, tp=8, dp=1, fsdp=1, zero=1)
        (peak,) = peak_bytes(one)
        numbers = LLAMA_8B.sizes.parameters / 8
        found = [peak.categories[name] / numbers for name in ("weights", "gradients", "optimizer")]
        assert found == pytest.approx([2, 2, each])


def test_parts_that_are_named_are_made_again() -> None:
    """A part that another one is made of goes with it."""
    like = setting(of="llmq", hardware="h100", recompute="selective")
    block, plan = like.model.blocks[0], BlockPlan(recompute="selective")
    whole = kept_bytes(block, like)
    named = dataclasses.replace(like, recompute_parts=("att",))
    of_attention = 2 * 4096 * (4096 + 2 * 1024 + 4096)
    assert whole - waiting_bytes(block, plan, named) == pytest.approx(of_attention)
    assert waiting_bytes(
        block, plan, dataclasses.replace(like, recompute_parts=("swiglu",))
    ) == pytest.approx(whole - 2 * 4096 * 14336)
    # Without names: gate, up, what they give, and norms.
    assert waiting_bytes(block, plan, like) == pytest.approx(of_attention + 2 * 2 * 4096 * 4096)


def test_norms_of_queries_and_keys_keep_their_inputs() -> None:
    """Qwen3 norms them, Gemma 3 besides what attention and the MLP give."""
    for name, more in (("qwen3-0.6b", 2048 + 1024), ("gemma3-270m", 1024 + 256 + 2 * 640)):
        model = sizes_of(spec_of(preset(name)))
        like = dataclasses.replace(setting(of="megatron", tp=1), model=model)
        block = model.blocks[0]
        plain = dataclasses.replace(
            block, layers=tuple(one for one in block.layers if not one.name.endswith("norm.weight"))
        )
        assert kept_bytes(block, like) - kept_bytes(plain, like) == pytest.approx(2 * 4096 * more)
