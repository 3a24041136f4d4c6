"""Training and what is done with its results: the loop, checkpoints, guards, metrics."""

from scrimp.training.finish import RunSummary
from scrimp.training.session import train
from scrimp.training.staged import train_stages
from scrimp.training.verify import verify_path

__all__ = ["RunSummary", "train", "train_stages", "verify_path"]
