"""Memory of a training step from a trace of the code that runs it.

`TracedStep` makes the planner's costs, `StorageTracker` counts the bytes of any code, and `OptimizerMemory` is what an
optimizer says of itself.
"""

from scrimp.profiler.memory_trace.optimizer_memory import GradientSums, OptimizerMemory, Tracing
from scrimp.profiler.memory_trace.trace import KnownBlocks, TracedStep, batch_bytes
from scrimp.profiler.memory_trace.tracker import StorageTracker

__all__ = [
    "GradientSums",
    "KnownBlocks",
    "OptimizerMemory",
    "StorageTracker",
    "TracedStep",
    "Tracing",
    "batch_bytes",
]
