"""Runs that repeat themselves bit for bit, or take the fastest kernels: `train.deterministic`.

Problem  The fastest kernels of attention's backward pass add up the queries' gradient in whatever order its parts are
         ready. Two runs then differ in last bits, and a little later in everything. Kernels that keep an order are
         slower, and take more memory (`scrimp.models.flash`).
Method   On CUDA the setting decides (`kernels_for`)::

             deterministic   torch's deterministic algorithms: FlashAttention-2 with ordered sums. cuDNN's attention
                             and everything else that torch does not know to repeat itself is refused by torch.
             not             torch's own choice: cuDNN's attention where torch prefers it (compute capability 9.0 and
                             10.0) and no documents or window keep tokens apart; else FlashAttention-2, atomic sums.

         The memory-efficient attention is off in both: no account of memory knows what it takes, and that it repeats
         itself, which torch's source says of it under deterministic settings, was not tested on a GPU. cuBLAS takes
         part by `CUBLAS_WORKSPACE_CONFIG`, which `scrimp.profiler.resolve_device` sets before any product on a GPU; a
         value of the user's stays, and is refused here where torch would refuse it.
         A CPU's kernels are deterministic: nothing is set there, and the setting costs nothing.
Kept     Whatever decides or proves by equal bits depends on no attention: kernels are tried beside operators on
         operands of their own (`may_run`), proofs compare a product with its own operands
         (`scrimp.gemm.fingerprints`), ranks decide by what one of them says (`scrimp.world`), copies are updated by
         one sum that all have, rounding noise is a function of its address. Statistics of formats compare passes,
         within bounds (`scrimp.statistics.stream`).
Limits   Of cuDNN's kernel nothing was measured: what it takes for itself is counted as FlashAttention-2's, and that its
         forward pass repeats itself, on which a router relies that is made again, is taken from its having no setting
         for that. FlashAttention-2's does (flash-attention issue 349).
Checked  tests/runtime/test_determinism.py and tests/training/test_train_run.py on the CPU, benchmarks/gpu.py on a GPU
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from scrimp.errors import DeviceError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")


@dataclass(frozen=True)
class KernelSettings:
    """What torch's process-wide settings say of kernels."""

    algorithms: bool
    """Only deterministic ones."""
    warn_only: bool
    """Others warn, and run."""
    fill: bool
    """New tensors are written before they are used."""
    efficient: bool
    """The memory-efficient attention may run."""

    @classmethod
    def now(cls) -> KernelSettings:
        """Those in force."""
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        )

    def put_in_force(self) -> None:
        """From now on."""
        torch.use_deterministic_algorithms(self.algorithms, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill  # type: ignore[attr-defined]
        torch.backends.cuda.enable_mem_efficient_sdp(self.efficient)


def kernels_for(device_type: str, *, deterministic: bool) -> KernelSettings | None:
    """What a run sets; None: nothing."""
    if device_type != "cuda":
        return None
    # Filling would write every new tensor twice.
    return KernelSettings(algorithms=deterministic, warn_only=False, fill=False, efficient=False)


def refuse_undetermined(device: torch.device) -> None:
    """Raise DeviceError where the environment keeps cuBLAS from equal sums in every run."""
    value = os.environ.get(WORKSPACE, _WORKSPACES[0])
    if device.type == "cuda" and value not in _WORKSPACES:
        raise DeviceError(
            "the environment keeps products on the GPU from repeating themselves",
            got=f"{WORKSPACE}={value}",
            expected=" or ".join(_WORKSPACES),
            do=f"unset {WORKSPACE}; Scrimp sets it (or --train.no-deterministic)",
        )


@contextlib.contextmanager
def deterministic(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Kernels whose sums always come in the same order, so that equal seeds give equal losses; what was set before is
    set again at the end.

    Args:
        wanted: as `train.deterministic` says; False: the fastest kernels, whatever their order.
    """
    settings = kernels_for(device.type, deterministic=wanted)
    if settings is None:
        yield
        return
    before = KernelSettings.now()
    try:
        settings.put_in_force()
        yield
    finally:
        before.put_in_force()
