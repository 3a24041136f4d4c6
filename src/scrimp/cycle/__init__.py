"""One cycle of precision: measure, solve beside the training, switch, watch; for runs, plain loops and trainers."""

from scrimp.cycle.model_in_training import Event, ModelInTraining, Probed, Promoted, Switched
from scrimp.cycle.precision_cycle import PrecisionCycle
from scrimp.cycle.settings import CycleSettings

__all__ = ["CycleSettings", "Event", "ModelInTraining", "PrecisionCycle", "Probed", "Promoted", "Switched"]
