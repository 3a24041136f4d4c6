"""Training and what is done with its results: the loop, checkpoints, guards, metrics."""

from scrimp.training.finish import RunSummary
from scrimp.training.session import train
from scrimp.training.verify import verify_path

__all__ = ["RunSummary", "train", "verify_path"]
