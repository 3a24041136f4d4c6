"""Statistics of a model in training: what each number format would do to its loss and its next update."""

from scrimp.statistics.collect import GAINS, Subject, collect, fingerprint
from scrimp.statistics.optimizer_view import OptimizerView, UpdateRule
from scrimp.statistics.plan_probe import Probe, probe
from scrimp.statistics.ranks import Ranks, SharedRows
from scrimp.statistics.structure import Structure, find_structure
from scrimp.statistics.untouched import untouched

__all__ = [
    "GAINS",
    "OptimizerView",
    "Probe",
    "Ranks",
    "SharedRows",
    "Structure",
    "Subject",
    "UpdateRule",
    "collect",
    "find_structure",
    "fingerprint",
    "probe",
    "untouched",
]
