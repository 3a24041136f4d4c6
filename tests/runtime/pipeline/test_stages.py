"""Pipelines on gloo: every product of a step is made once, whatever halves a schedule cuts backward passes into.

Losses, gradients and bytes of every schedule are rows of the matrix (`tests/parity/matrix.py`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import spawn
from parity import Case, alone, batch_of, made, on_ranks
from parity.matrix import FIXED
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.gemm import observing
from scrimp.precision import GEMMS
from scrimp.profiler.collectives import counting_collectives
from scrimp.runtime.passes import run_passes
from scrimp.world import World

PP = {"pp": 2}
FP32 = {"model.num_layers": 4, "train.parameters": "fp32"}
QUANTIZED = {
    "fp8, 1f1b": Case(PP, {**FP32, "precision": "fp8"}, micro_batches=4, steps=1),
    "scales of tensors, zbv": Case(
        {**PP, "schedule": "zbv"},
        {**FP32, "precision": "fp8_tensor,*.qkv=bf16,head=fp8"},
        micro_batches=4,
        steps=1,
    ),
    "random rounding, dualpipev": Case(
        {**PP, "schedule": "dualpipev"},
        {**FP32, "precision": "nvfp4,*.wgrad=bf16"},
        micro_batches=4,
        steps=1,
    ),
    "mxfp4, interleaved, recomputed": Case(
        {**PP, "virtual": 2}, {**FP32, "precision": "mxfp4"}, activations="norms", micro_batches=4, steps=1
    ),
    "fp8, zbv, recomputed": Case(
        {**PP, "schedule": "zbv"},
        {**FP32, "precision": "fp8", "memory.activations": "block"},
        activations="block",
        micro_batches=4,
        steps=1,
    ),
    "experts in fp8, zbv": Case(
        {**PP, "schedule": "zbv"},
        {**FP32, "precision": "fp8", "model.num_layers": 4},
        preset="mixtral-8m",
        micro_batches=4,
        steps=1,
        routers=FIXED,
    ),
}
"""With fp32 weights: beside bf16 ones, autograd rounds the sum of a matrix of words' two gradients to bf16 where one
process has both, and a pipeline does not."""


@pytest.mark.slow
def test_quantized_operands_are_those_of_one_process(tmp_path: Path) -> None:
    cases = {name: dataclasses.replace(case, counts_bytes=False) for name, case in QUANTIZED.items()}
    for name, found in on_ranks(2, cases, tmp_path).items():
        one = alone(2, cases[name])
        assert found[0].losses == pytest.approx(one.losses, rel=1e-6), name
        for matrix, expected in one.gradients.items():
            if matrix != "embedding.weight":  # one process adds up another order of its two
                assert torch.equal(found[0].gradients[matrix], expected), (name, matrix)


CASES = {
    name: Case({"pp": 2, "schedule": name}, {"model.num_layers": 4}, micro_batches=4)
    for name in ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
}
CASES |= {
    f"fp8, {name}": dataclasses.replace(
        case, settings={**FP32, "precision": "fp8,head=fp8", "backend": "reference"}
    )
    for name, case in CASES.items()
}
LAYERS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def counted(rank: int) -> dict[str, tuple[object, object]]:
    """Products of a step, or the planned ones by layer, and those that this rank's blocks and head have."""
    found: dict[str, tuple[object, object]] = {}
    for name, case in CASES.items():
        _, executable, _, _ = made(case, World(rank, 2), 1)
        batches = [batch_of(case, 0, number) for number in range(case.micro_batches)]
        planned: Counter[tuple[str, str]] = Counter()

        def note(one: Any, planned: Counter[tuple[str, str]] = planned) -> None:
            planned[one.layer, one.gemm] += 1

        with Products() as products, observing(note):
            run_passes(executable, batches, 100)
        part = executable.model.part
        layers = [f"blocks.{i}.{one}" for i in part.blocks for one in LAYERS] + ["head"] * part.is_last
        each = {(one, gemm): case.micro_batches for one in layers for gemm in GEMMS}
        quantizes = "fp8" in name
        found[name] = (dict(planned), each) if quantizes else (products.count, sum(each.values()))
    return found


@pytest.mark.slow
def test_every_product_is_made_once(tmp_path: Path) -> None:
    for rank in spawn(2, counted, tmp_path):
        for name, (count, expected) in rank.items():
            assert count == expected, name


def reduced(rank: int) -> dict[str, tuple[float, int]]:
    """Bytes that a rank sends to reduce gradients in a step, and its products."""
    found = {}
    for name, case in REDUCED.items():
        _, executable, _, _ = made(case, World(rank, 4), 2)
        batches = [
            batch_of(case, 0, 2 * number + executable.mesh.data_rank) for number in range(case.micro_batches)
        ]
        with Products() as products, counting_collectives() as sent:
            run_passes(executable, batches, 100)
        found[name] = sent.sent("reduce-scatter"), products.count
    return found


REDUCED = {
    f"{schedule}, zero {zero}, {level}": Case(
        {"pp": 2, "schedule": schedule, "zero": zero},
        {"model.num_layers": 4},
        preset="llama-1b",  # two matrices of words
        activations=level,
        micro_batches=4,
    )
    for schedule in ("interleaved", "zbv", "dualpipev")
    for zero, level in ((1, "keep"), (3, "keep"), (3, "block"))
}


@pytest.mark.slow
def test_split_backward_passes_multiply_and_reduce_as_others_do(tmp_path: Path) -> None:
    ranks = spawn(4, reduced, tmp_path)
    for name in REDUCED:
        _, _, rest = name.partition(", ")
        reduces, products = (sum(rank[name][at] for rank in ranks) for at in range(2))
        wanted = [sum(rank[f"interleaved, {rest}"][at] for rank in ranks) for at in range(2)]
        assert products == wanted[1], name
        if "zero 1" in rest:
            assert reduces == wanted[0], "once a step"
        else:  # gradients of vectors are reduced with those of the weights that come next
            assert 0.97 * wanted[0] <= reduces <= wanted[0], name
