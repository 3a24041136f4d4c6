"""Carries a plan out on a model, and proves that it took effect."""

from scrimp.runtime.execute import (
    Executable,
    choose_backends,
    compile_blocks,
    describe_backends,
    precisions_of,
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
    "precisions_of",
    "prove",
    "quantizes",
    "realise",
]
