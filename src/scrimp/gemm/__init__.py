"""Planned GEMMs: linear layers whose fprop, dgrad and wgrad each run in their own number format.

`swap_in` plans the linear layers of any module, `PlannedModel.replan` changes the plan between steps, and
`swap_out` undoes it. Back ends run the GEMMs: a reference that defines every recipe, torch's own
low-precision kernels, and Triton's; which one is decided by what works and is fastest on the device.
"""

from scrimp.gemm.adapted import AdaptedLinear, adapt, merged
from scrimp.gemm.backends import Backend
from scrimp.gemm.clock import Clock
from scrimp.gemm.convert import PlannedModel, swap_in
from scrimp.gemm.deferred import Gate
from scrimp.gemm.factored import FactoredLinear
from scrimp.gemm.fingerprints import Fingerprints, changed_gemms
from scrimp.gemm.flop_formulas import register_flop_formulas
from scrimp.gemm.gated_products import defers, gate_alone, gated_products, gates_run, last_products
from scrimp.gemm.head import HeadGemms
from scrimp.gemm.layer import BackendChooser, PlannedLayer, reference_only
from scrimp.gemm.linear import PlannedLinear, of_made_again, planned_linear, recomputed, run_again_before
from scrimp.gemm.linear_kinds import has_own_forward, is_linear, is_transposed, linear_modules, weight_matrix
from scrimp.gemm.observe import Execution, is_running, observing, without_witnesses
from scrimp.gemm.problem import compute_dtype
from scrimp.gemm.recompute import is_running_again, run_again
from scrimp.gemm.select import Recorded, backends_for, refuse_unrunnable
from scrimp.gemm.sparse_low_rank import SparseLowRankLinear, whole_matrix
from scrimp.gemm.stored_weight import StoredWeight, store, stored_values
from scrimp.gemm.summed_linear import SummedLinear
from scrimp.precision import LinearPrecision

__all__ = [
    "AdaptedLinear",
    "Backend",
    "BackendChooser",
    "Clock",
    "Execution",
    "FactoredLinear",
    "Fingerprints",
    "Gate",
    "HeadGemms",
    "LinearPrecision",
    "PlannedLayer",
    "PlannedLinear",
    "PlannedModel",
    "Recorded",
    "SparseLowRankLinear",
    "StoredWeight",
    "SummedLinear",
    "adapt",
    "backends_for",
    "changed_gemms",
    "compute_dtype",
    "defers",
    "gate_alone",
    "gated_products",
    "gates_run",
    "has_own_forward",
    "is_linear",
    "is_running",
    "is_running_again",
    "is_transposed",
    "last_products",
    "linear_modules",
    "merged",
    "observing",
    "of_made_again",
    "planned_linear",
    "recomputed",
    "reference_only",
    "refuse_unrunnable",
    "register_flop_formulas",
    "run_again",
    "run_again_before",
    "store",
    "stored_values",
    "swap_in",
    "weight_matrix",
    "whole_matrix",
    "without_witnesses",
]
