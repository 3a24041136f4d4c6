"""Back ends: the reference that defines every recipe, torch's own kernels, Triton's, and Numba's for CPUs."""

from scrimp.gemm.backends.base import Backend
from scrimp.gemm.backends.native import TorchBackend
from scrimp.gemm.backends.numba import NumbaBackend
from scrimp.gemm.backends.reference import ReferenceBackend
from scrimp.gemm.backends.triton import TritonBackend

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (TorchBackend(), TritonBackend(), NumbaBackend(), ReferenceBackend())
}
"""One of each by name, the usually fastest first; one object per name, so that both gradients can share a pass."""

__all__ = ["BACKENDS", "Backend", "NumbaBackend", "ReferenceBackend", "TorchBackend", "TritonBackend"]
