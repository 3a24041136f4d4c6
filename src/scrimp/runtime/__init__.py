"""Carries a plan out on a model, and proves that it took effect."""

from scrimp.runtime.execute import Executable, compile_blocks, realise
from scrimp.runtime.proof import StepCount, prove

__all__ = ["Executable", "StepCount", "compile_blocks", "prove", "realise"]
