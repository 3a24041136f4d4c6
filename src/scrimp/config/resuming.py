"""What may differ between a run's saved configuration and that with which it goes on.

Checked  tests/config/test_resolve.py
"""

from __future__ import annotations

from collections.abc import Collection

from scrimp.config.fields import flatten, replace_values
from scrimp.config.schema import Config

MAY_CHANGE_ON_RESUME: frozenset[str] = frozenset(
    {
        # Where things lie and how often they are written: the numbers of the run stay.
        "run.dir",
        "data.cache",
        "budget.device_memory",
        "budget.host_memory",
        "evaluation.every",
        "evaluation.tokens",
        "evaluation.precision",
        "checkpoint.every",
        "checkpoint.keep_last",
        "checkpoint.keep_every",
        "train.nonfinite_patience",
        # Where teachers lie; who they are a digest in run.json says.
        "objective.teachers",
        # How the same step is carried out: the same run but for rounding.
        "device",
        "backend",
        "memory.activations",
        "memory.weights",
        "memory.gradients",
        "memory.optimizer",
        "memory.update",
        "train.micro_batch",
        "train.loss_chunk",
        "train.compile",
        "train.deterministic",
        "layout.dp",
        "layout.fsdp",
        "layout.cp",
        "layout.cp_method",
        "layout.tp",
        "layout.ep",
        "layout.etp",
        "layout.pp",
        "layout.virtual",
        "layout.schedule",
        "layout.stages",
        "layout.zero",
        "layout.gathered",
        "layout.switch",
        "layout.backends",
    }
)
"""Keys that may differ from the saved configuration when a run goes on."""
FOLLOWS_LAYOUT = ("memory.activations", "memory.optimizer", "layout.gathered", "train.compile")
"""Those that some layouts decide, and others leave open. The micro-batch is none: with it, scales and rounding would
be others; `scrimp.config.layout.for_ranks` opens it where it has to."""
_ENDS_ROUNDS = frozenset({"evaluation.every", "checkpoint.every"})
"""Steps at which copies that train alone (`outer.every`) meet: at other ones, other numbers."""


def may_change(saved: Config) -> frozenset[str]:
    """Keys in which a run may differ from its saved configuration when it goes on."""
    return MAY_CHANGE_ON_RESUME - _ENDS_ROUNDS if saved.outer.every else MAY_CHANGE_ON_RESUME


def decided_anew(config: Config, saved: Config, chosen: Collection[str]) -> Config:
    """A configuration to go on with, in which open is again what Scrimp decided for another layout.

    Args:
        config: with the layout of these ranks.
        saved: that of the run until now.
        chosen: dotted keys that Scrimp decided, not the user.
    """
    if config.layout == saved.layout:
        return config
    unset = flatten(Config())
    return replace_values(config, {key: unset[key] for key in FOLLOWS_LAYOUT if key in chosen})


def differences(saved: Config, now: Config) -> dict[str, tuple[object, object]]:
    """Settings that differ, by dotted key: (saved value, value now).

    Precisions are compared by what they mean, and one whose base is open now agrees with any base.
    """
    before, after = flatten(saved), flatten(now)
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    if "precision" in changed:
        old, new = saved.precision_rules, now.precision_rules
        if old.rules == new.rules and new.base in (None, old.base):
            del changed["precision"]
    return changed
