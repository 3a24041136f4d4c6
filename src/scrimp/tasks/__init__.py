"""What a model can already do, early in training: small tasks, their scores, and which of them tell models apart.

items -> scores -> figures      `read_task`, `BUILT_IN`, `score`
scores of checkpoints -> signal `early_signal`
"""

from scrimp.tasks.built_in import BUILT_IN, read_texts
from scrimp.tasks.curves import EarlySignal, early_signal
from scrimp.tasks.figures import Figure, figures_of
from scrimp.tasks.items import Item, Task, read_task
from scrimp.tasks.scoring import TaskScores, score

__all__ = [
    "BUILT_IN",
    "EarlySignal",
    "Figure",
    "Item",
    "Task",
    "TaskScores",
    "early_signal",
    "figures_of",
    "read_task",
    "read_texts",
    "score",
]
