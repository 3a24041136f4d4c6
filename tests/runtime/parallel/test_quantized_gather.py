"""Weights gathered in FP8 train as weights gathered in their own format do, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from distributed import spawn
from parity import Case, Trained, batch_of, made, trained

from scrimp.formats import Noise, QuantizedTensor
from scrimp.gemm.coded_weight import transposed
from scrimp.gemm.problem import Use
from scrimp.precision import HEAD, LinearPrecision, Operand
from scrimp.runtime.parallel import quantized_gather
from scrimp.runtime.passes import run_passes
from scrimp.world import World

WIDE = {"model.width": 256, "model.ffn_width": 256, "model.num_layers": 2}
"""All layers of a block have a multiple of 128 rows on each of two ranks, and none sums over more than 512 numbers: on
some CPUs MKL sums more of them in an order that depends on whether a matrix lies transposed in memory, as codes do."""
FP32 = {**WIDE, "train.parameters": "fp32"}
"""Four bytes a number, as the formulas of bytes have it."""


def cases(*, hybrid: bool) -> dict[str, Case]:
    """Formats and the ways weights live."""
    layout: dict[str, int | str] = {"dp": 2, "fsdp": 2} if hybrid else {}
    found = {
        f"{recipe}, zero {zero}": Case(
            {**layout, "zero": zero}, FP32 | {"precision": f"fp32,*={recipe}"}, steps=2
        )
        for recipe, zero in (
            (("fp8", 3), ("fp8_tensor", 1)) if hybrid else (("fp8", 3), ("fp8", 1), ("fp8_tensor", 2))
        )
    }
    if not hybrid:
        bf16 = Case({}, {**WIDE, "precision": "fp8_tensor"}, counts_bytes=False, steps=2)
        found |= {"bf16": bf16, "bf16, recomputed": dataclasses.replace(bf16, activations="block")}
    return found


def both(rank: int, ranks: int, hybrid: bool) -> dict[str, tuple[Trained, Trained, int]]:
    """Each case as it is and with the older path forced, and how many weights were gathered in codes."""
    wanted, found = quantized_gather._wanted, {}
    for name, case in cases(hybrid=hybrid).items():
        coded: list[object] = []

        def counted(shared: object, shards: int, coded: list[object] = coded) -> object:
            result = wanted(shared, shards)
            if result is not None and not any(one is shared for one in coded):
                coded.append(shared)
            return result

        quantized_gather._wanted = counted  # type: ignore[assignment]
        codes = trained(World(rank, ranks), case)
        quantized_gather._wanted = lambda shared, shards: None
        whole = trained(World(rank, ranks), case)
        found[name] = codes, whole, len(coded)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [False, True])
def test_codes_train_as_whole_weights(hybrid: bool, tmp_path: Path) -> None:
    ranks = 4 if hybrid else 2
    for rank in spawn(ranks, both, tmp_path, ranks, hybrid):
        for name, (codes, whole, count) in rank.items():
            assert count == 8, name  # of two blocks: queries to values as one, outputs, and two of an MLP
            assert codes.sent == codes.predicted, name
            if codes.sent:
                assert codes.sent["all-gather"] < 0.7 * whole.sent["all-gather"], name
            assert (codes.losses, codes.norms) == (whole.losses, whole.norms), name
            assert codes.gradients.keys() == whole.gradients.keys()
            for key, gradient in whole.gradients.items():
                assert torch.equal(codes.gradients[key], gradient), (name, key)


FORMATS = ("fp8", "fp32", "fp8_tensor", "fp8")


def replanned(world: World, zero: int, *, settles: bool) -> list[float]:
    """Losses and norms of a run whose plan changes after each step, with an evaluation in between.

    Args:
        settles: whether what the evaluation gathered is in shards again when the plan changes.
    """
    case = Case({"zero": zero}, FP32 | {"precision": "fp32,*=fp8"})
    decisions, executable, optimizer, lr = made(case, world, world.size)
    found = []
    for step, name in enumerate(FORMATS):
        gemms = {layer: LinearPrecision.of(name) for layer in decisions.plan.gemms if layer != HEAD}
        executable.change_formats(dataclasses.replace(decisions.plan, gemms=decisions.plan.gemms | gemms))
        batches = [batch_of(case, step, world.rank + world.size * number) for number in range(2)]
        sums = run_passes(executable, batches, 100, step=step)
        found += [float(sums.loss), optimizer.gradient_norm()]
        optimizer.step(lr)
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(float(executable.loss(batches[0]).loss))
        if settles:
            executable.settle()
    executable.settle()
    return found


def both_replanned(rank: int, ranks: int) -> list[tuple[list[float], list[float]]]:
    """With codes, and with the older path forced."""
    wanted, found = quantized_gather._wanted, []
    for zero, settles in ((3, True), (1, True), (1, False)):
        quantized_gather._wanted = wanted
        codes = replanned(World(rank, ranks), zero, settles=settles)
        quantized_gather._wanted = lambda shared, shards: None
        found.append((codes, replanned(World(rank, ranks), zero, settles=settles)))
    return found


@pytest.mark.slow
def test_each_step_gathers_what_its_plan_reads(tmp_path: Path) -> None:
    for rank in spawn(2, both_replanned, tmp_path, 2):
        for codes, whole in rank:
            assert codes == whole


@pytest.mark.parametrize("scaling", ["block", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_transpose_is_what_dgrad_reads(scaling: str, dtype: torch.dtype) -> None:
    weight = torch.randn(256, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    operand = Operand("e4m3", scaling)
    columns, rows = (Use(operand, axis, Noise()).codes(weight) for axis in (-1, -2))
    assert same(transposed(columns), rows)


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """All that a back end reads."""
    return (
        torch.equal(a.payload.view(torch.uint8), b.payload.view(torch.uint8))
        and torch.equal(a.scales, b.scales)
        and (a.axis, a.operand, a.shape) == (b.axis, b.operand, b.shape)
    )
