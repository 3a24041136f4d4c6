"""What happens between the steps of a run: one file each."""

from __future__ import annotations

from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.callbacks.checkpoints import Checkpoints
from scrimp.training.callbacks.evaluations import Evaluations
from scrimp.training.callbacks.guards import Guards
from scrimp.training.callbacks.layout_proof import ProveLayout
from scrimp.training.callbacks.local_steps import LocalSteps
from scrimp.training.callbacks.memory_check import CheckMemory
from scrimp.training.callbacks.metrics import MeasureStep, WriteRecord
from scrimp.training.callbacks.precision import PlanPrecision
from scrimp.training.callbacks.rank_findings import RankFindings
from scrimp.training.callbacks.refactorization import Refactorization

__all__ = [
    "Callback",
    "CheckMemory",
    "Checkpoints",
    "Evaluations",
    "Guards",
    "LocalSteps",
    "MeasureStep",
    "PlanPrecision",
    "ProveLayout",
    "RankFindings",
    "Record",
    "Refactorization",
    "WriteRecord",
]
