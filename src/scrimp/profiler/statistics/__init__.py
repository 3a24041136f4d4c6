"""Statistics of a model in training: what each number format would do to its loss and its next update."""

from scrimp.profiler.statistics.collect import GAINS, Subject, collect, fingerprint
from scrimp.profiler.statistics.probe import Probe, probe
from scrimp.profiler.statistics.ranks import Ranks
from scrimp.profiler.statistics.sensitivity import OptimizerView, TorchOptimizer, UpdateRule
from scrimp.profiler.statistics.structure import Structure, find_structure
from scrimp.profiler.statistics.untouched import untouched

__all__ = [
    "GAINS",
    "OptimizerView",
    "Probe",
    "Ranks",
    "Structure",
    "Subject",
    "TorchOptimizer",
    "UpdateRule",
    "collect",
    "find_structure",
    "fingerprint",
    "probe",
    "untouched",
]
