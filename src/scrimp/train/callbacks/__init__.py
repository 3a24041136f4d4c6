"""What happens between the steps of a run: one file each."""

from __future__ import annotations

from scrimp.train.callbacks.base import Callback, Record
from scrimp.train.callbacks.checkpoints import Checkpoints
from scrimp.train.callbacks.evaluations import Evaluations
from scrimp.train.callbacks.guards import Guards
from scrimp.train.callbacks.memory import CheckMemory
from scrimp.train.callbacks.metrics import MeasureStep, WriteRecord
from scrimp.train.callbacks.precision import PlanPrecision

__all__ = [
    "Callback",
    "CheckMemory",
    "Checkpoints",
    "Evaluations",
    "Guards",
    "MeasureStep",
    "PlanPrecision",
    "Record",
    "WriteRecord",
]
