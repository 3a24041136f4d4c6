"""Every kernel compiles to a binary for GPUs that are not here, within their registers, by exact instructions."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("compile_kernels.py")
HOPPER = 90


@functools.cache
def compiled(capability: int, only: str = "") -> tuple[dict[str, Any], ...]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability), only],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return tuple(json.loads(line) for line in done.stdout.splitlines())


def names(cases: list[dict[str, Any]]) -> list[str]:
    return [f"{case['kernel']} {case['case']}" for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, HOPPER, 120])
def test_products_of_integers_run_on_tensor_cores_and_need_no_fp8(capability: int) -> None:
    integers = compiled(capability, "int8")
    assert {case["kernel"] for case in integers} == {
        "quantize_tiles_kernel",
        "quantize_blocks_kernel",
        "scaled_matmul_kernel",
    }
    products = [case for case in integers if case["kernel"] == "scaled_matmul_kernel"]
    assert len(products) == 4 + 3 * 6
    assert not names([case for case in products if not case["integer_products"]])
    # With second codes one of six shapes of tiles spills four registers on consumer Blackwell: they are timed.
    spills = 16 if capability == 120 else 0
    assert not names([case for case in integers if case["stack"] > spills])
    assert not names([case for case in integers if case["div_approximate"] or case["flush"]])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, HOPPER])
def test_second_codes_take_room_for_one_tile_of_them_and_leave_the_first_as_they_were(
    capability: int,
) -> None:
    """The loads of first codes are as deep a queue in shared memory as without second ones."""
    products = {
        case["case"]: case
        for case in compiled(capability, "int8")
        if case["kernel"] == "scaled_matmul_kernel"
    }
    twice = {name: case for name, case in products.items() if "fallback" in name}
    assert len(twice) == 2 * 6
    for name, case in twice.items():
        shape = name.partition(" int8 ")[0]
        alone, rows = products[f"{shape} int8 alone"], int(shape.partition("x")[0])
        assert 0 <= case["shared"] - alone["shared"] <= rows * 128 + 1024
        assert case["integer_products"] == 2 * alone["integer_products"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, HOPPER, 100, 120])
def test_every_kernel_compiles(capability: int) -> None:
    kernels = {case["kernel"] for case in compiled(capability)}
    assert kernels == {
        "quantize_tiles_kernel",
        "quantize_blocks_kernel",
        "quantize_rows_kernel",
        "largest_magnitudes_kernel",
        "write_codes_kernel",
        "quantize_groups_kernel",
        "gate_matrix_kernel",
        "largest_magnitude_kernel",
        "add_rounded_kernel",
        "cross_entropy_kernel",
        "adamw_kernel",
        "scaled_matmul_kernel",
        "address_hashes_kernel",
        "widen_codes_kernel",
        "group_values_kernel",
        "apply_scales_kernel",
    }


@pytest.mark.slow
def test_no_kernel_spills_registers_on_hopper_but_the_promotion_that_only_measures() -> None:
    """And four registers of GELU's gradients, beside a block of 128 x 128 that is quantized both ways."""
    spilled = [case for case in compiled(HOPPER) if case["stack"]]
    assert names(spilled) == [
        "quantize_tiles_kernel gate gradients of gelu e4m3",
        "scaled_matmul_kernel tiles promoted every 32",
    ]
    assert spilled[0]["stack"] <= 16


@pytest.mark.slow
def test_quantizers_divide_exactly_and_flush_nothing() -> None:
    others = ("scaled_matmul_kernel", "cross_entropy_kernel")  # the loss takes exponentials, as gates do
    quantizers = [
        case
        for case in compiled(HOPPER)
        if case["kernel"] not in others and not case["case"].startswith("gate ")
    ]
    assert not names([case for case in quantizers if case["div_approximate"] or case["flush"]])
    kernels = ("quantize_tiles_kernel", "quantize_rows_kernel", "write_codes_kernel")
    with_codes = [case for case in quantizers if case["kernel"] in kernels]
    assert {case["kernel"] for case in with_codes} == set(kernels)
    assert not names([case for case in with_codes if not case["div_rn"]])
    others = ("e5m2", "int8")
    assert not names(
        [
            case
            for case in with_codes
            if not case["to_e4m3"] and not any(one in case["case"] for one in others)
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, HOPPER, 100, 120])
def test_updates_round_every_operation_and_spill_nothing(capability: int) -> None:
    """Four programs of 128 threads share 65,536 registers; a row of a block is exchanged in 4 KiB."""
    updates = [case for case in compiled(capability) if case["kernel"] == "adamw_kernel"]
    assert len(updates) == 6
    assert not names([case for case in updates if case["stack"] or case["registers"] > 128])
    assert not names([case for case in updates if case["shared"] > 4096])
    inexact = ("fused", "flush", "div_approximate", "sqrt_approximate")
    assert not names([case for case in updates if any(case[one] for one in inexact)])
    assert not names([case for case in updates if not (case["div_rn"] and case["sqrt_rn"])])


@pytest.mark.slow
def test_as_many_warps_of_the_rows_quantizer_fit_a_multiprocessor_as_it_has_room_for() -> None:
    """2,048 threads share 65,536 registers: rows.py counts on four rows of 512 threads at work, and no more."""
    rows = [case for case in compiled(HOPPER) if case["kernel"] == "quantize_rows_kernel"]
    assert not names([case for case in rows if case["registers"] > 32])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, HOPPER, 100, 120])
def test_two_programs_of_groups_fit_a_multiprocessor(capability: int) -> None:
    """Each has 256 threads at 128 registers; a rotated block of 64 x 64 lies in shared memory as float32."""
    groups = [case for case in compiled(capability) if case["kernel"] == "quantize_groups_kernel"]
    assert len(groups) == 14
    assert not names([case for case in groups if case["stack"] or case["registers"] > 128])
    assert not names([case for case in groups if case["shared"] > 18 * 1024])


@pytest.mark.slow
def test_rotations_use_no_tf32() -> None:
    assert not names([case for case in compiled(HOPPER) if case["tf32"]])


@pytest.mark.slow
def test_the_product_runs_on_hoppers_tensor_cores_in_every_configuration() -> None:
    products = [case for case in compiled(HOPPER) if case["kernel"] == "scaled_matmul_kernel"]
    assert len(products) > 6
    assert not names([case for case in products if not case["wgmma"]])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, HOPPER, 100, 120])
def test_products_that_add_take_what_those_take_that_store(capability: int) -> None:
    """On data-center Blackwell up to 64 bytes of a thread's 255 registers lie on the stack, as 16 of a ragged one."""
    products = {
        case["case"]: case for case in compiled(capability) if case["kernel"] == "scaled_matmul_kernel"
    }
    adding = {name: case for name, case in products.items() if " adds " in name}
    assert len(adding) == 12
    assert not names([case for case in adding.values() if case["stack"] > (64 if capability == 100 else 0)])
    for name, case in adding.items():
        assert case["shared"] <= products[name.partition(" adds ")[0]]["shared"] + 1024
