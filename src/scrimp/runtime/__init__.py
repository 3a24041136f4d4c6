"""Carries a plan out on a model, and proves that it took effect."""

from scrimp.runtime.determinism import deterministic
from scrimp.runtime.execute import (
    Executable,
    choose_backends,
    compile_blocks,
    describe_backends,
    precisions_of,
    preferred_backends,
    quantizes,
    realise,
)
from scrimp.runtime.proof import StepCount, prove

__all__ = [
    "Executable",
    "StepCount",
    "choose_backends",
    "compile_blocks",
    "describe_backends",
    "deterministic",
    "precisions_of",
    "preferred_backends",
    "prove",
    "quantizes",
    "realise",
]
