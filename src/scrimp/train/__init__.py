"""Training and what is done with its results: the loop, checkpoints, guards, metrics."""

from scrimp.train.finish import RunSummary
from scrimp.train.session import train
from scrimp.train.verify import verify_path

__all__ = ["RunSummary", "train", "verify_path"]
