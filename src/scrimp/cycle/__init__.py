"""One cycle of precision: measure, solve beside the training, switch, watch; for runs, plain loops and trainers."""

from scrimp.cycle.model_in_training import Event, ModelInTraining, Probed, Promoted, Switched, Timed
from scrimp.cycle.precision_cycle import PrecisionCycle
from scrimp.cycle.settings import CycleSettings
from scrimp.cycle.state import CycleState, Waiting, read_cycle
from scrimp.cycle.step_times import StepTimes

__all__ = [
    "CycleSettings",
    "CycleState",
    "Event",
    "ModelInTraining",
    "PrecisionCycle",
    "Probed",
    "Promoted",
    "StepTimes",
    "Switched",
    "Timed",
    "Waiting",
    "read_cycle",
]
