"""Kernels, bytes and FLOPs against counts by hand, the planner's FLOPs, and the figures of predictions."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrimp.config import OptimizerConfig, preset
from scrimp.config.activations import LEVELS
from scrimp.config.resolved import ResolvedLayout
from scrimp.cpu import operators_alone
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.objectives.cross_entropy import cross_entropy_sums
from scrimp.optim import AdamW
from scrimp.planner import count_flops
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.host_times import layer_ops, other_ops
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import software
from scrimp.profiler.counted_step import FusedCounter, KernelCounter, Passes, Work, count_block
from scrimp.profiler.measured_cluster import EAGER, EAGER_HOST_OPS, FP32_LOGIT_BYTES

pytestmark = pytest.mark.slow  # torch's FLOP counter imports Triton
MODEL, SEQUENCE, TOKENS = preset("llama-3m"), 128, 256
SCRIMP, UNCOMPILED = software("scrimp"), software("scrimp-eager")


@cache
def block(compiled: bool, level: str = "keep") -> Passes:
    return count_block(MODEL, compiled=compiled, level=level, rows=TOKENS // SEQUENCE, sequence=SEQUENCE)


def test_operators_read_operands_and_write_results_and_views_do_nothing() -> None:
    x, y, index = torch.ones(4, 8), torch.ones(8, 4), torch.zeros(4, 1, dtype=torch.int64)
    with KernelCounter() as counter:
        x + y.T
        assert counter.take() == Work(1, moved=3 * 128)
        x.add_(1)
        assert counter.take() == Work(1, moved=2 * 128)
        x.copy_(y.T)
        assert counter.take() == Work(1, moved=2 * 128)
        torch.exp(x, out=x)
        assert counter.take() == Work(1, moved=2 * 128)
        torch.empty(4), x.view(32), x[1]
        assert counter.take() == Work()
        x @ y
        assert counter.take() == Work(1, products=2 * 128 + 64, flops=2 * 4 * 4 * 8)
        x.new_full((), 1.0)
        assert counter.take() == Work(1, moved=4)
        x.gather(1, index)
        assert counter.take() == Work(1, moved=4 * (8 + 4 + 4))


def test_a_fused_sum_gate_and_norm_take_one_kernel_that_touches_each_tensor_once() -> None:
    def part(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(F.silu(x) * y + x, (64,), weight, 1e-5)

    counter, eager = FusedCounter(), KernelCounter()
    x, y, weight = torch.randn(256, 64), torch.randn(256, 64), torch.ones(64)
    with torch.no_grad():
        found = torch.compile(part, backend=counter, fullgraph=True)(x, y, weight)
        with eager:
            expected = part(x, y, weight)
    torch.testing.assert_close(found, expected)
    assert counter.forward == Work(1, moved=3 * x.nbytes + weight.nbytes)
    assert eager.take().launches > 3


@pytest.mark.parametrize("compiled", [False, True])
def test_flops_of_a_block_are_the_planners(compiled: bool) -> None:
    flops, found = count_flops(spec_of(MODEL), SEQUENCE), block(compiled)
    products = flops.blocks / 3 / MODEL.num_layers
    attention = flops.attention_full / 3 / MODEL.num_layers
    assert found.forward.flops == TOKENS * (products + attention)
    # Flash attention makes the scores again: 2.5 times its forward pass.
    assert found.backward.flops == TOKENS * (2 * products + 2.5 * attention)


def test_bytes_of_a_compiled_block_are_those_that_its_specification_says() -> None:
    """`Traffic` is what must be moved; a prediction multiplies it by `Software.traffic`."""
    found, traffic = block(compiled=True), spec_of(MODEL).block(0).traffic
    said = sum(one.forward + one.backward for one in traffic) * TOKENS * SCRIMP.activation_bytes
    counted = found.forward.moved + found.backward.moved
    assert counted / said == pytest.approx(SCRIMP.traffic, rel=0.1)
    eager = block(compiled=False)
    assert (eager.forward.moved + eager.backward.moved) / said == pytest.approx(UNCOMPILED.traffic, rel=0.01)
    assert UNCOMPILED.traffic == EAGER["cuda"]
    assert UNCOMPILED.host_ops == EAGER_HOST_OPS
    assert eager.forward.launches >= 2 * found.forward.launches
    assert eager.forward.moved > 3 * found.forward.moved
    assert eager.forward.products == found.forward.products


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_level_makes_again_is_the_forward_pass_of_its_part(compiled: bool) -> None:
    """A compiler tells all levels apart: no product runs again of which only the result is read."""
    keep = block(compiled).backward
    gate_up, qkv, out = (
        2 * TOKENS * one.parameters_per_token
        for one in _linears("mlp.gate_up", "attention.qkv", "attention.out")
    )
    attention = 4 * TOKENS * SEQUENCE * MODEL.attention_width
    of_levels = (0, 0, gate_up, gate_up + qkv, gate_up + qkv + attention, gate_up + qkv + attention + out)
    again = {level: block(compiled, level).backward - keep for level in LEVELS[1:]}
    assert {level: one.flops for level, one in again.items()} == dict(zip(LEVELS[1:], of_levels, strict=True))
    moved = [again[level].moved + again[level].products + again[level].attention for level in LEVELS[1:]]
    assert all(less < more for less, more in itertools.pairwise(moved))


def _linears(*names: str) -> list[Any]:
    by_name = {one.name: one for one in spec_of(MODEL).block(0).linears}
    return [by_name[name] for name in names]


@pytest.mark.parametrize(
    ("dtype", "predicted"), [(torch.bfloat16, SCRIMP.bytes_per_logit), (torch.float32, FP32_LOGIT_BYTES)]
)
def test_bytes_of_the_loss_for_each_logit_are_those_of_the_prediction(
    dtype: torch.dtype, predicted: float
) -> None:
    """Two widths are counted, so that what the weight takes falls out."""

    def moved(width: int) -> float:
        hidden = torch.randn(64, width).to(dtype).requires_grad_()
        weight = torch.randn(8192, width).to(dtype).requires_grad_()
        with operators_alone(), KernelCounter() as counter:
            cross_entropy_sums(hidden, weight, torch.arange(64)).total.backward()
        return float(counter.take().moved / (64 * 8192))

    assert 2 * moved(8) - moved(16) == pytest.approx(predicted, rel=0.02)


def test_bytes_of_an_update_with_masters_are_those_of_the_prediction() -> None:
    weight = nn.Parameter(torch.randn(512, 512).bfloat16())
    optimizer = AdamW({"weight": weight}, dataclasses.replace(OptimizerConfig(), master_weights=True))
    found = []
    for _ in range(2):
        with KernelCounter() as counter:
            (weight * 1.0).sum().backward()
            counter.take()
            norm = optimizer.gradient_norm()
            optimizer.clip(norm, norm / 2)
            optimizer.step(0.01)
            found.append(counter.take())
        optimizer.zero_grad()
    assert found[1].moved / weight.numel() == pytest.approx(SCRIMP.optimizer_bytes, rel=0.01)


def test_bytes_of_a_gradient_that_is_added_to_its_sum_are_those_of_the_prediction() -> None:
    total, gradient = torch.zeros(512, 512), torch.ones(512, 512, dtype=torch.bfloat16)
    with KernelCounter() as counter:
        total += gradient
    assert counter.take().moved / total.numel() == SCRIMP.gradient_sum_bytes


@pytest.mark.parametrize(("compiled", "host_ops"), [(True, SCRIMP.host_ops), (False, EAGER_HOST_OPS)])
def test_operations_of_the_host_are_the_launches_that_are_counted(compiled: bool, host_ops: float) -> None:
    """`host_times` says how many operations a block has; a program launches `host_ops` of them."""
    one = spec_of(MODEL).block(0)
    plain = Setting(
        model=sizes_of(spec_of(MODEL)),
        cluster=load_hardware("h100"),
        sequence=SEQUENCE,
        global_batch=2,
        micro_batch=2,
        layout=ResolvedLayout(dp=1, fsdp=1),
        software=dataclasses.replace(SCRIMP, host_ops=1.0),
    )
    said = other_ops(one, plain) + sum(layer_ops(linear, "bf16", plain) for linear in one.linears)
    found = block(compiled)
    assert found.forward.launches == pytest.approx(host_ops * said, rel=0.1)
    assert found.backward.launches <= 2 * host_ops * said
