"""Settings that earlier versions had under another name, or that are gone.

Files are kept for years, command lines are typed: a settings file or a run folder with the old name of a setting is
read as if it had the new one, and on the command line the old name is answered with the new one. A setting that is gone
is passed over in files, which run folders are full of, and answered on the command line.
"""

from __future__ import annotations

RENAMED: dict[str, str] = {
    "train.lr": "optimizer.lr",
    "train.weight_decay": "optimizer.weight_decay",
    "train.beta1": "optimizer.beta1",
    "train.beta2": "optimizer.beta2",
    "train.adam_eps": "optimizer.eps",
    "train.clip": "optimizer.clip",
    "train.master_weights": "optimizer.master_weights",
    "train.moments": "optimizer.moments",
    "train.schedule": "schedule.name",
    "train.warmup_steps": "schedule.warmup_steps",
    "train.final_lr_ratio": "schedule.final_lr_ratio",
    "train.z_loss": "objective.z_loss",
    "train.eval_every": "evaluation.every",
    "train.eval_tokens": "evaluation.tokens",
    "train.checkpoint_every": "checkpoint.every",
    "train.keep_last": "checkpoint.keep_last",
    "train.keep_every": "checkpoint.keep_every",
}
"""Old dotted key to new one."""

REMOVED: dict[str, str] = {
    "memory.speculate": "updates on the CPU begin after the backward pass; leave it out",
}
"""Dotted key to what to do instead. None of them changed a number of a run."""
