"""Seconds to a workload's target on a card that is not here, as the planner predicts them.

Problem  A study of low formats on a machine that emulates them counts steps. Whether fewer steps in bf16 or faster ones
         in FP8 come first, it cannot say: seconds of an emulation are none of the format's.
Method   With n the median steps of a submission to the target and s the planner's seconds of a step of its model, batch
         and formats on the card (its best layout, `scrimp.planner.layout`), n s. A plan of SNIP has its share of 4 bits
         where these save most.
Limits   Predicted, and named so wherever it is shown. Evaluations are left out. Models of workloads that ship are so
         small that launches are most of a step. Optimizers whose update the planner does not know have no figure.
         With several trials formats are those of the first.
Checked  tests/study/test_predicted_seconds.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scrimp.config import Config, base_architecture, replace_values
from scrimp.errors import ScrimpError
from scrimp.planner.hardware import Cluster, load_hardware
from scrimp.planner.layout.asked import question_asked
from scrimp.planner.layout.objectives import Searching
from scrimp.planner.layout.scaled_models import family_of
from scrimp.study.workloads import Standing, Workload
from scrimp.training.run_data import expected_vocabulary, fit_vocabulary


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Seconds of a step on a card."""

    card: str
    step_seconds: dict[str, dict[str, float | None]]
    """By workload, then by submission; None: not known."""
    unknown: tuple[str, ...]
    """Why not, a sentence for each submission."""


def predict(found: Standing, card: str) -> Predicted:
    """What the planner says of all submissions on all workloads.

    Args:
        card: a name or a file of hardware, as of `scrimp plan --hardware`.

    Raises:
        ConfigError: there is no such hardware.
    """
    cluster, unknown = load_hardware(card), {}
    seconds: dict[str, dict[str, float | None]] = {}
    for workload in found.workloads:
        of_workload = seconds[workload.name] = {}
        for name in found.scores:
            try:
                of_workload[name] = _step_seconds(_settings_of(workload, name), cluster)
            except ScrimpError as error:
                of_workload[name] = None
                unknown[name] = f"{name}: {error.what}" + (f", {error.got}" if error.got else "")
    return Predicted(card=card, step_seconds=seconds, unknown=tuple(unknown.values()))


def _settings_of(workload: Workload, submission: str) -> Mapping[str, Any]:
    study = workload.study
    return study.settings_of(study.named(study.submissions[submission][0]), study.seeds[0])


def _step_seconds(settings: Mapping[str, Any], cluster: Cluster) -> float:
    """Seconds of a step by its best layout.

    Raises:
        ScrimpError: a setting that the search does not know, or nothing fits.
    """
    config = replace_values(Config(), dict(settings))
    architecture = base_architecture(config, None)
    entries = expected_vocabulary(config, architecture)
    config, architecture = fit_vocabulary(config, architecture, entries)
    family = family_of(architecture)
    sequence, tokens = settings["train.sequence"], settings["train.batch_tokens"]
    question = question_asked(
        config,
        model=family.member(family.given).model,
        cluster=cluster,
        sequence=sequence,
        global_batch=tokens // sequence,
        given={},
    )
    return Searching().best(question).best[0].seconds
