"""Every baseline by hand on a small example, as section 9 of the specification has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import names, profile, profiles, with_statistics
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.planner.precision.divergence import (
    SNIP,
    Method,
    Weights,
    gemm_costs,
    layer_costs,
    mean_divergence,
)
from scrimp.planner.precision.policies import (
    POLICIES,
    costs_of,
    extremes,
    is_per_gemm,
    last_blocks,
    order_of,
    protect,
)
from scrimp.planner.precision.profile import PrecisionProfile

HUGGING_FACE = [
    f"model.layers.{block}.{layer}"
    for block in range(3)
    for layer in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
]
BY_TYPE = ["down_proj", "o_proj", "v_proj", "k_proj", "q_proj", "up_proj", "gate_proj"]


def ordered(policy: str, layers: list[str] | tuple[str, ...]) -> list[str]:
    order = order_of(policy, layers)
    assert order is not None
    return [layers[index] for index in order]


# -- orders ------------------------------------------------------------------------------------


def test_layer_types_are_visited_one_after_the_other_from_the_last_block_backwards() -> None:
    found = ordered("layer-type", HUGGING_FACE)
    assert [name.rpartition(".")[2] for name in found] == [kind for kind in BY_TYPE for _ in range(3)]
    assert [int(name.split(".")[2]) for name in found] == [2, 1, 0] * 7


def test_blocks_are_visited_from_both_ends() -> None:
    found = ordered("first-last", HUGGING_FACE)
    assert [int(name.split(".")[2]) for name in found] == [0] * 7 + [2] * 7 + [1] * 7
    assert [name.rpartition(".")[2] for name in found] == BY_TYPE * 3
    five = ordered("first-last", [f"blocks.{block}.mlp.down" for block in range(5)])
    assert [name.split(".")[1] for name in five] == ["0", "4", "1", "3", "2"]


def test_fused_layers_stand_where_their_parts_do() -> None:
    expected = ["mlp.down", "attention.out", "attention.qkv", "mlp.gate_up"]
    assert ordered("layer-type", names(1)) == [f"blocks.0.{name}" for name in expected]


@pytest.mark.parametrize(
    "in_order",
    [
        "0.mlp.linear_fc2 0.self_attention.linear_proj 0.self_attention.linear_qkv 0.mlp.linear_fc1",
        "h.0.mlp.c_proj h.0.attn.c_proj h.0.attn.c_attn h.0.mlp.c_fc",
        "0.mlp.dense_4h_to_h 0.attention.dense 0.attention.query_key_value 0.mlp.dense_h_to_4h",
        "0.ffn.w2 0.attention.wo 0.attention.wv 0.attention.wk 0.attention.wq 0.ffn.w3 0.ffn.w1",
        "0.fc2 0.attn.out_proj 0.attn.value 0.attn.key 0.attn.query 0.fc1 0.something",
    ],
)
def test_names_of_other_families_are_read(in_order: str) -> None:
    layers = in_order.split()
    assert ordered("layer-type", sorted(layers)) == layers


def test_layers_without_a_number_come_before_the_first_block() -> None:
    layers = ["blocks.0.mlp.down", "blocks.10.mlp.down", "stem2", "blocks.9.mlp.down"]
    assert ordered("first-last", layers) == [
        "stem2",
        "blocks.10.mlp.down",
        "blocks.0.mlp.down",
        "blocks.9.mlp.down",
    ]


@pytest.mark.parametrize("policy", ["snip", "snip-layer", "random", "last-blocks", "nonsense"])
def test_other_policies_have_no_order(policy: str) -> None:
    assert order_of(policy, HUGGING_FACE) is None


# -- protection --------------------------------------------------------------------------------


def test_layers_are_protected_while_they_fit() -> None:
    shares = np.array([0.3, 0.1, 0.2, 0.4])
    # 0.35 need not be 4-bit: the first fits, the second no longer, the third neither, the last neither.
    assert protect([0, 1, 2, 3], shares, 0.65).tolist() == [True, False, False, False]
    assert protect([3, 2, 1, 0], shares, 0.65).tolist() == [False, True, True, False]
    assert protect([0, 1, 2, 3], shares, 0.6).tolist() == [True, True, False, False]
    assert protect([0, 1, 2, 3], shares, 1.0).tolist() == [False] * 4
    assert protect([0, 1, 2, 3], shares, 0.0).tolist() == [True] * 4


@examples(50)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=12), st.floats(0, 1), st.randoms())
def test_protection_never_takes_more_than_it_may(sizes: list[float], share: float, random: object) -> None:
    shares = np.array(sizes) / sum(sizes)
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    kept = protect(order, shares, share)
    assert shares[kept].sum() <= 1 - share + 1e-6
    left = 1 - share - shares[kept].sum()
    assert all(kept[index] or shares[index] > left - 1e-6 for index in order)


def test_the_last_blocks_are_whole_and_hold_the_share() -> None:
    layers = names(10)
    shares = np.full(40, 1 / 40)
    kept = last_blocks(layers, shares)
    assert [layer.split(".")[1] for layer, flag in zip(layers, kept, strict=True) if flag] == ["8"] * 4 + [
        "9"
    ] * 4
    assert last_blocks(layers, shares, 0.1).sum() == 4
    assert last_blocks(layers, shares, 0.0).sum() == 0
    assert last_blocks(layers, shares, 1.0).all()


@pytest.mark.parametrize(
    ("formats", "high", "low"),
    [
        (("fp8", "fp4"), "fp8", "fp4"),
        (("bf16", "nvfp4", "fp8"), "fp8", "nvfp4"),
        (("nvfp4", "bf16"), "bf16", "nvfp4"),
        (("fp32", "bf16", "mxfp4"), "bf16", "mxfp4"),
        (("mxfp4", "fp4", "fp8", "mxfp8"), "fp8", "mxfp4"),
        (("fp8", "bf16"), "bf16", "fp8"),
        (("nvfp4",), "nvfp4", "nvfp4"),
    ],
)
def test_baselines_choose_between_two_formats(formats: tuple[str, ...], high: str, low: str) -> None:
    assert tuple(formats[index] for index in extremes(formats)) == (high, low)


# -- costs -------------------------------------------------------------------------------------


def by_hand(statistics: PrecisionProfile, relative: bool) -> np.ndarray:
    """|eX| + |eW| + |eG| with the operands of fprop, and of dgrad for G; means over batches."""
    found = np.zeros((len(statistics.layers), len(statistics.formats)))
    for batch in statistics.batches:
        for layer, p in np.ndindex(found.shape):
            of_x, of_w, of_g = (
                batch.errors[layer, 0, p, 0],
                batch.errors[layer, 0, p, 1],
                batch.errors[layer, 1, p, 0],
            )
            if relative:
                of_x, of_w, of_g = of_x / batch.x[layer], of_w / batch.w[layer], of_g / batch.g[layer]
            found[layer, p] += (of_x + of_w + of_g) / len(statistics.batches)
    return found


@examples(20)
@given(profiles(batches=3))
def test_local_errors_are_summed_absolutely_and_relatively(made: PrecisionProfile) -> None:
    assert np.allclose(costs_of("min-abs-err", made), by_hand(made, relative=False))
    assert np.allclose(costs_of("min-rel-err", made), by_hand(made, relative=True))


@examples(20)
@given(profiles(batches=2), st.builds(Weights, *[st.floats(0, 3)] * 3))
def test_snip_decides_by_gemm_and_by_layer(made: PrecisionProfile, weights: Weights) -> None:
    found = mean_divergence(made)
    expected = gemm_costs(made, found, weights)
    assert np.allclose(costs_of("snip", made, weights=weights), expected.reshape(-1, 3))
    assert np.allclose(costs_of("snip-layer", made, weights=weights), expected.sum(1))
    papers = layer_costs(made, mean_divergence(made, SNIP), weights)
    assert np.allclose(costs_of("snip-paper", made, weights=weights), papers)
    assert np.allclose(costs_of("snip-paper", made, weights=weights, method=Method()), papers)
    other = gemm_costs(made, mean_divergence(made, SNIP), weights)
    assert np.allclose(costs_of("snip", made, weights=weights, method=SNIP), other.reshape(-1, 3))


def test_random_costs_are_of_the_lowest_format_alone_and_drawn_by_seed() -> None:
    made = profile(200)
    first, again, other = (costs_of(f"random:{seed}", made) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert (first[:, :2] == 0).all()
    assert 0 <= first[:, 2].min() < 0.1 < 0.9 < first[:, 2].max() <= 1
    assert first[:, 2].mean() == pytest.approx(0.5, abs=0.06)
    assert np.array_equal(costs_of("random", made), costs_of("random:0", made))


@pytest.mark.parametrize(
    "policy", ["snap", "random:x", "random:-1", "snip:1", "min-abs-err:1", "first-last", ""]
)
def test_unknown_policies_are_refused(policy: str) -> None:
    with pytest.raises(PlanError, match=f"there is no such policy - got {policy}.*expected snip, snip-layer"):
        costs_of(policy, profile())


def test_some_policies_decide_for_each_gemm() -> None:
    found = [policy for policy in POLICIES if is_per_gemm(policy)]
    assert found == ["snip", "random-gemm", "min-abs-err-gemm", "min-rel-err-gemm", "backward-first"]
    assert is_per_gemm("random-gemm:3")


@examples(20)
@given(profiles(batches=2))
def test_local_errors_of_a_gemm_are_those_of_its_two_operands(made: PrecisionProfile) -> None:
    absolute, relative = np.zeros((2, len(made.layers), 3, len(made.formats)))
    for batch in made.batches:
        sizes = {"x": batch.x, "w": batch.w, "g": batch.g}
        for layer, gemm, p in np.ndindex(absolute.shape):
            for operand, name in enumerate(("xw", "gw", "gx")[gemm]):
                error = batch.errors[layer, gemm, p, operand] / len(made.batches)
                absolute[layer, gemm, p] += error
                relative[layer, gemm, p] += error / sizes[name][layer]
    assert np.allclose(costs_of("min-abs-err-gemm", made), absolute.reshape(-1, len(made.formats)))
    assert np.allclose(costs_of("min-rel-err-gemm", made), relative.reshape(-1, len(made.formats)))


def test_random_costs_of_gemms_are_drawn_one_by_one() -> None:
    found = costs_of("random-gemm:1", profile(20))
    assert found.shape == (60, 3)
    assert len(np.unique(found[:, 2])) == 60


@pytest.mark.parametrize("policy", ["snip", "snip-layer", "snip-paper", "min-abs-err", "min-rel-err"])
def test_a_layer_that_nothing_is_known_of_costs_as_much_as_the_worst(policy: str) -> None:
    made = profile(4)
    errors = made.batches[0].errors.copy()
    errors[2, 0, 1, 0] = np.nan
    found = costs_of(policy, with_statistics(made, errors=errors)).reshape(4, -1, 3)
    others = found[[0, 1, 3]]
    assert np.isfinite(found).all()
    assert np.array_equal(found[2], others.max(axis=0))
    nothing = costs_of(policy, with_statistics(made, loss=np.nan))
    assert (nothing == 0).all()
