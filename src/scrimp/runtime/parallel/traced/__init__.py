"""The tensor-parallel plan of any module, found by tracing it, and carried out in place.

`find` says what of each layer every rank gets (`TensorPlan`), `SharedLayers` leaves this rank its pieces. Scrimp's own
models are cut by `scrimp.models.cut_layers`, which also cuts tokens between layers; the two find the same cuts
(tests/runtime/parallel/traced/test_own_kinds.py).
"""

from scrimp.runtime.parallel.traced.find import find
from scrimp.runtime.parallel.traced.shared_layers import SharedLayers
from scrimp.runtime.parallel.traced.tensor_plan import TensorPlan

__all__ = ["SharedLayers", "TensorPlan", "find"]
