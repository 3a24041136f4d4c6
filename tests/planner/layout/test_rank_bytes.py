"""Bytes of ranks beside published formulas, and what must hold between settings."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import GPT_22B, LLAMA_8B, ROUTED, setting

from scrimp.planner.layout.setting import BlockPlan, Offload
from scrimp.planner.layout.stage_memory import host_bytes, kept_bytes, peak_bytes, waiting_bytes


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
    assert two["weights"] == one["weights"] == pytest.approx(2 * numbers)
    assert three["gradients"] == two["gradients"] == pytest.approx(one["gradients"] / 8)
    assert three["optimizer"] == two["optimizer"] == one["optimizer"] == pytest.approx(12 * numbers / 8)


def test_the_first_rank_of_a_pipeline_has_most_passes_in_flight() -> None:
    found = [one.categories["activations"] for one in peak_bytes(setting(pp=4, fsdp=2))]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(4 * found[3])
    assert peak_bytes(setting(pp=4, fsdp=2))[3].categories["logits"] > 0


def test_recomputation_and_offload_take_less() -> None:
    keep, some, all_again = (
        peak_bytes(setting(recompute=one))[0].categories["activations"] for one in ("none", 16, "full")
    )
    assert all_again < some < keep
    leaving = dataclasses.replace(
        setting(), offload=Offload(activation_layers=30, optimizer=True, master=True)
    )
    found = peak_bytes(leaving)[0].categories
    assert found["optimizer"] == 0
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
    assert 32 * host_bytes(left) == pytest.approx(12 * numbers)
