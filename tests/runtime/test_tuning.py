"""What Triton's GEMM tries is tried before the run: once per bucket of rows, on buffers that are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scrimp.data import Batch

pytest.importorskip("triton", reason="triton is not installed")

import triton
from test_proof import UNTIED, realised

from scrimp.gemm import Backend, reference_only
from scrimp.gemm.backends import BACKENDS
from scrimp.gemm.kernels import matmul
from scrimp.gemm.kernels.matmul import bucket, scaled_matmul_kernel, tuning_bytes
from scrimp.gemm.problem import DTYPES, Shape
from scrimp.runtime.backends import tune, tuned_gemms

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts in triton's interpreter")


def by_triton(recipe: str, *site: object) -> Backend:
    return BACKENDS["triton" if recipe != "bf16" else "torch"]


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 2), (3, 4), (127, 128), (128, 128), (129, 256)])
def test_a_bucket_is_the_next_power_of_two(size: int, expected: int) -> None:
    assert bucket(size) == expected


def test_the_bytes_of_trying_are_those_of_operands_result_and_timer() -> None:
    """The result twice: one that is added to must be put back between two tries."""
    codes, scales, result = (300 + 200) * 260, 4 * 3 * (300 + 200), 2 * 300 * 200
    assert tuning_bytes(300, 200, 260, torch.bfloat16) == codes + scales + 2 * result + 256 * 2**20
    assert tuning_bytes(300, 200, 260, torch.float32) == codes + scales + 4 * result + 256 * 2**20


def test_all_sizes_of_a_run_and_its_proof_are_tried_but_of_kernels_with_tiles_only() -> None:
    plan, _ = realised("fp8,*.mlp.*=nvfp4,*.wgrad=bf16,head=fp4", "fp32", UNTIED)
    found = tuned_gemms(plan, UNTIED, by_triton, GPU, tokens=512, head_tokens=200, out=torch.bfloat16)
    assert {one.recipe for one in found} == {"fp8", "fp4"}
    blocks = {(one.gemm, one.shape.m) for one in found if one.recipe == "fp8"}
    assert blocks == {(gemm, rows) for gemm in ("fprop", "dgrad") for rows in (512, 128)}
    head = {one.shape.m for one in found if one.recipe == "fp4" and one.gemm == "fprop"}
    assert head == {200, 512 % 200, 128}
    assert tuned_gemms(plan, UNTIED, reference_only, GPU, tokens=512, out=torch.bfloat16) == []


def test_products_that_add_are_tried_in_the_type_of_their_sums() -> None:
    plan, _ = realised("fp8,head=fp4", "fp32", UNTIED)
    found = tuned_gemms(plan, UNTIED, by_triton, GPU, tokens=512, out=torch.bfloat16, sums=torch.float32)
    wide = {one.shape.k for one in found if one.out == torch.float32}
    assert wide == {512}, "the probe adds to no sum"
    assert {(one.gemm, one.recipe) for one in found if one.out == torch.float32} == {("wgrad", "fp8")}
    alike = tuned_gemms(plan, UNTIED, by_triton, GPU, tokens=512, out=torch.bfloat16, sums=torch.bfloat16)
    assert alike == tuned_gemms(plan, UNTIED, by_triton, GPU, tokens=512, out=torch.bfloat16)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What triton's autotuner tries, which has two shapes to choose from."""
    configs = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": 64, "GROUP_M": 8}, num_warps=4, num_stages=1)
        for m in (32, 64)
    ]
    tried: list[Any] = []

    def bench(*args: Any, config: Any, **named: Any) -> list[float]:
        tried.append(config)
        return [1.0, 1.0, 1.0]

    monkeypatch.setattr(scaled_matmul_kernel, "configs", configs)
    monkeypatch.setattr(scaled_matmul_kernel, "cache", {})
    monkeypatch.setattr(scaled_matmul_kernel, "_bench", bench)
    return tried


@interpreted
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.every(2)
@pytest.mark.slow
def test_the_layers_of_a_run_try_nothing_in_either_working_format(tried: list[Any], compute: str) -> None:
    rules = f"{compute},blocks.0.*=fp8,head=fp8"
    plan, executable = realised(rules, "fp32", UNTIED, by_triton)
    tune(tuned_gemms(plan, UNTIED, by_triton, CPU, tokens=64, out=DTYPES[compute]), CPU)
    count = len(tried)
    assert count > 0
    tokens = torch.randint(UNTIED.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    executable.loss(Batch.of(tokens[:, :-1], tokens[:, 1:])).total.backward()
    assert len(tried) == count, "the run's own products found their shapes"


@interpreted
@pytest.mark.slow
def test_a_bucket_is_tried_once_and_never_in_the_run(tried: list[Any]) -> None:
    plan, _ = realised("fp8", "fp32", UNTIED)
    gemms = tuned_gemms(plan, UNTIED, by_triton, CPU, tokens=256, out=torch.bfloat16)
    tune(gemms, CPU)
    count = len(tried)
    assert count == 2 * len(scaled_matmul_kernel.cache) > 0
    for one in gemms[:3]:  # what the run calls then, and a last batch of the same bucket
        for shape in (one.shape, Shape(one.shape.m - 3, one.shape.n, one.shape.k)):
            is_block = one.gemm != "wgrad"
            codes = torch.float8_e4m3fn
            matmul.tune(shape.m, shape.n, shape.k, one.out, is_block=is_block, codes=codes, device=CPU)
    assert len(tried) == count
