"""Memory of a training step from a trace of the code that runs it.

`trace_costs` makes the planner's costs, `StorageTracker` counts the bytes of any code, and `OptimizerMemory` is what an
optimizer says of itself.
"""

from scrimp.profiler.memory_trace.optimizer_memory import GradientSums, OptimizerMemory, Tracing
from scrimp.profiler.memory_trace.trace import KnownBlocks, batch_bytes, trace_costs
from scrimp.profiler.memory_trace.tracker import StorageTracker

__all__ = [
    "GradientSums",
    "KnownBlocks",
    "OptimizerMemory",
    "StorageTracker",
    "Tracing",
    "batch_bytes",
    "trace_costs",
]
