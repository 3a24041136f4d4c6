"""What gpt-oss moves besides in Megatron-Core: biases of experts, clamped gates, positions that YaRN scales."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import setting, shape

from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.block_times import block_seconds
from scrimp.planner.layout.execution import Execution
from scrimp.planner.layout.predict import kernels_of

OSS = shape("gpt-oss-120b")
TOKENS, EXPERTS, WIDTH, QUERIES_KEYS = 4096, 4, 2880, 64 * 64 + 8 * 64


def bytes_of(model: ModelShape, **execution: object) -> tuple[float, float]:
    """Moved by each pass of a block beside products and attention, on one device, all in a graph."""
    one = setting(model, "64xgb300", of="megatron", ep=64, fsdp=1, dp=64, zero=1)
    one = dataclasses.replace(one, execution=Execution(graphs=("step",), **execution))  # type: ignore[arg-type]
    kernels, block = kernels_of(one), one.model.blocks[0]
    found = block_seconds(block, one, kernels)
    bare = dataclasses.replace(one, software=dataclasses.replace(one.software, traffic=1e-9))
    without = block_seconds(block, bare, kernels)
    return tuple(  # type: ignore[return-value]
        (getattr(found, name).compute - getattr(without, name).compute)
        * kernels.bandwidth
        / one.software.traffic
        for name in ("forward", "backward")
    )


@pytest.mark.parametrize(
    ("dispatcher", "biases"), [("alltoall", (12, 12)), ("hybridep", (28, 40)), ("deepep", (28, 40))]
)
def test_biases_clamps_and_rotation_are_operations_of_their_own(
    dispatcher: str, biases: tuple[float, float]
) -> None:
    """Where NCCL carries tokens, the router's shares are bf16, and so are the biases that they scale."""
    plain = dataclasses.replace(OSS, biases=False)
    more = [
        one - other
        for one, other in zip(
            bytes_of(OSS, dispatcher=dispatcher), bytes_of(plain, dispatcher=dispatcher), strict=True
        )
    ]
    copies = TOKENS * EXPERTS * WIDTH
    rotated = TOKENS * QUERIES_KEYS
    expected = [(bias + clamp) * copies for bias, clamp in zip(biases, (16, 20), strict=True)]
    assert more == pytest.approx([expected[0] + 20 * rotated, expected[1] + 24 * rotated])


def test_fused_experts_clamp_and_add_in_their_kernel_but_rotate_all_the_same() -> None:
    plain = dataclasses.replace(OSS, biases=False)
    pairs = zip(bytes_of(OSS, fused_experts=True), bytes_of(plain, fused_experts=True), strict=True)
    more = [one - other for one, other in pairs]
    assert more == pytest.approx([20 * TOKENS * QUERIES_KEYS, 24 * TOKENS * QUERIES_KEYS])


def test_gates_that_are_made_again_are_clamped_again() -> None:
    one = setting(OSS, "64xgb300", of="megatron", ep=64, fsdp=1, dp=64, zero=1, recompute="selective")
    one = dataclasses.replace(one, execution=Execution(graphs=("step",)), recompute_parts=("swiglu",))
    kernels = kernels_of(one)
    seconds = block_seconds(one.model.blocks[0], one, kernels).parts
    gates = 3 * 2 + 16
    assert seconds == pytest.approx(
        one.software.traffic * gates * TOKENS * EXPERTS * WIDTH / kernels.bandwidth, rel=1e-3
    )
