"""`scrimp score --card`: seconds to a workload's target on a card that is not here, as the planner predicts them.

Problem  A study of low formats on a machine that emulates them counts steps. Whether fewer steps in bf16 or faster ones
         in FP8 come first, it cannot say: seconds of an emulation are none of the format's.
Method   With n the median steps of a submission to the target and s the planner's seconds of a step of its model, batch
         and formats on the card (its best layout, as `scrimp plan --hardware` finds it), n s. A plan of SNIP has its
         share of 4 bits where these save most.
Limits   Predicted, and named so wherever it is shown. Evaluations are left out. Models of workloads that ship are so
         small that launches are most of a step. A submission with a setting that predictions do not know has no figure,
         and the reason is named. With several trials formats are those of the first.
Checked  tests/study/test_score_seconds.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from scrimp.cli.plan_question import READ, architecture_asked, model_asked
from scrimp.config import Config, replace_values
from scrimp.errors import ConfigError, PlanError, ScrimpError
from scrimp.planner.hardware import Cluster, load_hardware
from scrimp.planner.layout.asked import question_asked
from scrimp.planner.layout.objectives import Searching
from scrimp.study.score_page import Predicted
from scrimp.study.workloads import Standing, Workload
from scrimp.training.run_data import expected_vocabulary, fit_vocabulary

_KNOWN_PARTS: Final = ("data", "evaluation", "checkpoint", "layout", "model", "run", "schedule", "snip")
_KNOWN: Final = (
    *READ,
    *(f"optimizer.{name}" for name in ("lr", "embedding_lr_ratio", "weight_decay", "beta1", "beta2", "eps")),
    *("train.steps", "objective.z_loss", "optimizer.from_weights"),
)
"""Settings that predictions read, or that leave a step's seconds as they are."""


def predict(found: Standing, card: str) -> Predicted:
    """What the planner says of all submissions on all workloads.

    Args:
        card: a name or a file of hardware, as of `scrimp plan --hardware`.

    Raises:
        ConfigError: there is no such hardware.
    """
    cluster = load_hardware(card)
    seconds: dict[str, dict[str, float | None]] = {}
    unknown: dict[str, None] = {}
    for workload in found.workloads:
        of_workload = seconds[workload.name] = {}
        for name in found.scores:
            try:
                of_workload[name] = _step_seconds(_settings_of(workload, name), cluster)
            except ScrimpError as error:
                of_workload[name] = None
                unknown[f"{name}: {error.what}"] = None
    return Predicted(card=card, step_seconds=seconds, unknown=tuple(unknown))


def _settings_of(workload: Workload, submission: str) -> Mapping[str, Any]:
    study = workload.study
    return study.settings_of(study.named(study.submissions[submission][0]), study.seeds[0])


def _step_seconds(settings: Mapping[str, Any], cluster: Cluster) -> float:
    """Seconds of a step by its best layout.

    Raises:
        ScrimpError: a setting that predictions do not know, or nothing fits.
    """
    others = [name for name in settings if name not in _KNOWN and name.partition(".")[0] not in _KNOWN_PARTS]
    if others:
        raise ConfigError(f"predictions do not know {', '.join(sorted(others))}")
    config = replace_values(Config(), dict(settings))
    architecture = architecture_asked(config)
    config, _ = fit_vocabulary(config, architecture, expected_vocabulary(config, architecture))
    family, sequence, tokens = model_asked(None, config)
    question = question_asked(
        config,
        model=family.member(family.given).model,
        cluster=cluster,
        sequence=sequence,
        global_batch=tokens // sequence,
        given={},
    )
    best = Searching().best(question).best
    if not best:
        raise PlanError("no layout fits on it")
    return best[0].seconds
