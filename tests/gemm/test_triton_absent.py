"""The kernels' package loads triton only when a kernel is asked for, and refuses by name without it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from scrimp.errors import DeviceError
from scrimp.gemm import kernels
try:
    kernels.quantize_tiles(torch.ones(2, 2), "e4m3", by_row=True, by_column=False)
except DeviceError as error:
    assert "quantize_tiles" in str(error) and "triton" in str(error), error
else:
    raise SystemExit("not refused")
"""
IMPORT_ONLY = """
import sys
import scrimp.gemm
import scrimp.gemm.kernels
assert "triton" not in sys.modules
"""
ON_CPU = """
import torch
from scrimp.errors import DeviceError
from scrimp.gemm.kernels import quantize_blocks, scaled_matmul
codes = torch.zeros(2, 4, dtype=torch.float8_e4m3fn)
for call in (
    lambda: quantize_blocks(torch.ones(2, 2), "e4m3"),
    lambda: scaled_matmul(codes, torch.ones(2, 1), codes, torch.ones(2, 1)),
):
    try:
        call()
    except DeviceError as error:
        assert "CUDA" in str(error), error
    else:
        raise SystemExit("not refused")
"""


def assert_succeeds(script: str, **changes: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changes
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout


@pytest.mark.slow
def test_without_triton_a_kernel_is_refused_by_name() -> None:
    assert_succeeds(WITHOUT_TRITON)


@pytest.mark.slow
def test_importing_the_gemms_and_the_kernels_package_imports_no_triton() -> None:
    assert_succeeds(IMPORT_ONLY)


@pytest.mark.slow
def test_a_tensor_on_the_cpu_is_refused_where_nothing_is_interpreted() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert_succeeds(ON_CPU)
