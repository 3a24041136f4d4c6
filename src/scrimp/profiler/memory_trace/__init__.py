"""Memory of a training step from a trace of the code that runs it.

`trace_costs` makes the planner's costs, `StorageTracker` counts the bytes of any code.
"""

from scrimp.profiler.memory_trace.trace import batch_bytes, trace_costs
from scrimp.profiler.memory_trace.tracker import StorageTracker

__all__ = ["StorageTracker", "batch_bytes", "trace_costs"]
