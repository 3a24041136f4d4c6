"""Runs that repeat themselves bit for bit.

Checked  tests/train/test_train_run.py on the CPU, benchmarks/gpu.py on a GPU
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Kernels whose sums always come in the same order, so that equal seeds give equal losses.

    On CUDA only; the CPU's kernels are deterministic. The memory-efficient attention has no deterministic
    backward pass and is switched off: flash attention and plain products have one.
    """
    if device.type != "cuda":
        yield
        return
    torch.use_deterministic_algorithms(True)
    # Filling would write every new tensor twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_mem_efficient_sdp(True)
