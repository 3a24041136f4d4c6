"""Runs that repeat themselves bit for bit.

cuBLAS takes part by `CUBLAS_WORKSPACE_CONFIG`, which `scrimp.profiler.resolve_device` sets before any product on a GPU;
a value of the user's stays, and is refused here where torch would refuse it.

Checked  tests/runtime/test_determinism.py and tests/training/test_train_run.py on the CPU, benchmarks/gpu.py on a GPU
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from scrimp.errors import DeviceError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")


def refuse_undetermined(device: torch.device) -> None:
    """Raise DeviceError where the environment keeps cuBLAS from equal sums in every run."""
    value = os.environ.get(WORKSPACE, _WORKSPACES[0])
    if device.type == "cuda" and value not in _WORKSPACES:
        raise DeviceError(
            "the environment keeps products on the GPU from repeating themselves",
            got=f"{WORKSPACE}={value}",
            expected=" or ".join(_WORKSPACES),
            do=f"unset {WORKSPACE}; Scrimp sets it",
        )


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Kernels whose sums always come in the same order, so that equal seeds give equal losses.

    On CUDA only; the CPU's kernels are deterministic. Flash attention and plain products have deterministic backward
    passes. The memory-efficient attention is switched off: torch's source makes it deterministic under these settings
    too (it then splits no keys), but Scrimp has not tested that on a GPU. What was set before is set again at the end.
    """
    if device.type != "cuda":
        yield
        return
    was = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        # Filling would write every new tensor twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.backends.cuda.enable_mem_efficient_sdp(efficient)
