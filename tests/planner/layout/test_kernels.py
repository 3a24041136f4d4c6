"""Products, attention and traffic by hand, and what must hold of any of them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import PlanError
from scrimp.models.flash import Gpu
from scrimp.planner.hardware import DEVICES, load_device
from scrimp.planner.layout.kernels import CUDNN_ON, SCORE_BYTES, Kernels, element_bytes, kind_of
from scrimp.precision import RECIPES

H100 = Kernels(load_device("h100"))
SIZES = st.integers(1, 2**16)


def test_a_large_product_runs_at_the_rate_of_the_file() -> None:
    device, size = H100.device, 16896  # 132 tiles of 128 rows, 66 of 256 columns: 66 whole waves
    seconds = H100.product(size, size, size, "bf16")
    rate = device.peak.bf16 * device.achieved.bf16 * size / (size + device.shape.k_half.bf16)
    assert 2 * size**3 / seconds == pytest.approx(rate)


def test_a_flat_product_takes_as_long_as_its_bytes() -> None:
    seconds = H100.product(8192, 8192, 16, "bf16")
    assert seconds == pytest.approx(2.0 * (8192 * 8192 + 2 * 8192 * 16) / H100.bandwidth)


def test_a_last_wave_costs_a_whole_one() -> None:
    tiles = [H100.product(128 * 132 * waves, 256, 4096, "bf16") for waves in (1, 2)]
    more = H100.product(128 * 132 + 1, 256, 4096, "bf16")
    assert tiles[0] < more <= tiles[1]


def test_the_smallest_tiles_are_not_halved() -> None:
    shape = dataclasses.replace(H100.device.shape, tile_rows=1, tile_columns=2)
    device = dataclasses.replace(H100.device, shape=shape)
    assert Kernels(device).product(8192, 8192, 4096, "bf16") > 0


@given(SIZES, SIZES, SIZES, st.sampled_from(["bf16", "fp8", "fp8_tensor"]))
def test_no_product_is_faster_than_the_peak_or_the_memory(m: int, n: int, k: int, recipe: str) -> None:
    seconds = H100.product(m, n, k, recipe)
    peak = H100.device.peak.bf16 if recipe == "bf16" else H100.device.peak.fp8
    assert peak is not None
    assert seconds >= 2.0 * m * n * k / peak
    assert seconds >= element_bytes(recipe) * (m * k + k * n) / H100.device.memory_bandwidth


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("recipe", ["fp16", *RECIPES])
def test_every_recipe_runs_somehow_on_every_device(name: str, recipe: str) -> None:
    device = load_device(name)
    if recipe.startswith("int8"):
        with pytest.raises(PlanError, match=f"no rate of INT8 products is known for {name}"):
            Kernels(device).product(4096, 4096, 4096, recipe)
        peak, achieved = (
            dataclasses.replace(device.peak, int8=1e15),
            dataclasses.replace(device.achieved, int8=0.5),
        )
        device = dataclasses.replace(device, peak=peak, achieved=achieved)
        assert device.rate("int8") == 5e14
    assert device.rate(kind_of(recipe, device), 4096)
    assert Kernels(device).product(4096, 4096, 4096, recipe) > 0


def test_attention_is_faster_for_long_sequences_and_slower_with_older_kernels() -> None:
    def rate(kernels: Kernels, keys: float, *, backward: bool = False) -> float:
        pairs, widths = keys * keys / 2, 2 * 4096.0
        seconds = kernels.attention(pairs, widths, keys=keys, head_size=128, backward=backward)
        return (5.0 if backward else 2.0) * pairs * widths / seconds

    device = H100.device
    assert rate(H100, 16384) == pytest.approx(device.peak.bf16 * device.achieved.attention_forward)
    # FlashAttention-3 and 2, arXiv 2407.08608, figure 5: 423 of 616 TFLOP/s, 260 of 335.
    assert rate(H100, 1024) / rate(H100, 16384) == pytest.approx(423 / 616, abs=0.03)
    older = Kernels(device, attention_kernel="flash-2")
    assert rate(older, 1024) / rate(older, 16384) == pytest.approx(260 / 335, abs=0.03)
    assert rate(older, 16384) == pytest.approx(0.36 * device.peak.bf16, rel=0.01)
    assert rate(older, 16384, backward=True) == pytest.approx(0.31 * device.peak.bf16, rel=0.01)
    assert rate(H100, 16384, backward=True) < rate(H100, 16384)


def test_an_older_kernel_is_slower_on_a_slower_card_too() -> None:
    """The card of 500 W has the kernels of the one of 700 W, and less power for each of them."""
    full, capped = load_device("h100"), load_device("h100-96")
    for backward in (False, True):
        whole, less = (
            [
                Kernels(one, attention_kernel=kernel).attention(
                    1e9, 8192.0, keys=16384, head_size=128, backward=backward
                )
                for one in (full, capped)
            ]
            for kernel in ("best", "flash-2")
        )
        assert less[1] / less[0] == pytest.approx(whole[1] / whole[0])
        assert less[1] > less[0] > whole[0]


# developer.nvidia.com/cuda-gpus
CAPABILITIES = {
    (8, 0): "a100-40 a100-80",
    (8, 6): "rtx3090",
    (8, 9): "l40s rtx4060ti rtx4090",
    (9, 0): "h100 h100-96 h200",
    (10, 0): "b200 gb200",
    (10, 3): "b300 gb300",
    (12, 0): "rtx5060ti rtx5090 rtxpro6000",
    (12, 1): "dgxspark",
}


def test_a_prediction_and_a_run_take_cudnns_attention_on_the_same_devices() -> None:
    by_name = {name: capability for capability, names in CAPABILITIES.items() for name in names.split()}
    assert by_name.keys() == {name for name in DEVICES if load_device(name).vendor == "NVIDIA"}
    takes = {name for name, one in by_name.items() if Gpu(capability=one, deterministic=False).prefers_cudnn}
    assert takes == set(CUDNN_ON)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("backward", [False, True])
def test_what_torch_chooses_is_the_best_only_where_it_has_cudnn_and_whole_rows(
    name: str, backward: bool
) -> None:
    def seconds(kernel: str, *, in_parts: bool = False) -> float:
        return Kernels(load_device(name), attention_kernel=kernel).attention(
            1e9, 8192.0, keys=8192, head_size=128, backward=backward, in_parts=in_parts
        )

    has_cudnn = name in ("h100", "h100-96", "h200", "b200", "gb200")
    assert seconds("torch") == seconds("best" if has_cudnn else "flash-2")
    assert seconds("torch", in_parts=True) == seconds("flash-2")
    # A B300 has a faster kernel, which torch does not take by itself; cards have FlashAttention-2 as their best.
    is_slower = has_cudnn or name in ("b300", "gb300")
    assert (seconds("flash-2") > 1.3 * seconds("best")) is is_slower
    assert is_slower or seconds("flash-2") == seconds("best")


def test_an_older_kernel_is_about_as_fast_on_a_b200_as_on_an_h100() -> None:
    """tritonbench PR 171: 361.6 TFLOP/s at 8,192 tokens."""

    def rate(name: str, *, backward: bool) -> float:
        kernels, pairs = Kernels(load_device(name), attention_kernel="flash-2"), 8192.0**2 / 2
        flops = (5.0 if backward else 2.0) * pairs * 8192.0
        return flops / kernels.attention(pairs, 8192.0, keys=8192, head_size=128, backward=backward)

    assert rate("b200", backward=False) == pytest.approx(361.6e12, rel=0.03)
    for backward in (False, True):
        assert rate("h100", backward=backward) < rate("b200", backward=backward)
        assert rate("b200", backward=backward) < 1.2 * rate("h100", backward=backward)
        assert rate("gb300", backward=backward) == pytest.approx(rate("b200", backward=backward))


def test_scores_in_memory_cost_their_square() -> None:
    """Twice the tokens of a sequence are four times the scores; no flash kernel is as slow."""
    device = load_device("a100-80")
    plain, flash = Kernels(device, attention_kernel="unfused"), Kernels(device)

    def seconds(kernels: Kernels, sequence: int, *, backward: bool) -> float:
        pairs = sequence * sequence / 2
        return kernels.attention(pairs, 2 * 64 * 128, keys=sequence, head_size=128, backward=backward)

    for backward in (False, True):
        assert seconds(plain, 8192, backward=backward) == pytest.approx(
            4 * seconds(plain, 4096, backward=backward)
        )
        assert seconds(plain, 4096, backward=backward) > 3 * seconds(flash, 4096, backward=backward)
    least = SCORE_BYTES[0] * 64 * 4096 * 4096 / device.bandwidth
    assert seconds(plain, 4096, backward=False) > least
