"""Carries a plan out on a model, and proves that it took effect."""

from scrimp.models.compiled import compile_blocks
from scrimp.runtime.backends import (
    backends_text,
    choose_backends,
    describe_backends,
    preferred_backends,
    recorded_backends,
    tune,
    tuned_gemms,
)
from scrimp.runtime.determinism import deterministic
from scrimp.runtime.execute import Executable, quantizes, realise
from scrimp.runtime.proof import StepCount, StepProof, prove

__all__ = [
    "Executable",
    "StepCount",
    "StepProof",
    "backends_text",
    "choose_backends",
    "compile_blocks",
    "describe_backends",
    "deterministic",
    "preferred_backends",
    "prove",
    "quantizes",
    "realise",
    "recorded_backends",
    "tune",
    "tuned_gemms",
]
