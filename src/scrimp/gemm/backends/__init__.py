"""Back ends: the reference that defines every recipe, torch's own kernels, and Triton's."""

from scrimp.gemm.backends.base import Backend
from scrimp.gemm.backends.reference import ReferenceBackend

__all__ = ["Backend", "ReferenceBackend"]
