"""Scrimp trains language models with the bits, bytes and devices that its user has.

A whole run, as `scrimp train` makes it::

    run = scrimp.train("my.toml", {"train.steps": 200})

Its plans, for any PyTorch loop::

    profile = scrimp.measure(model, optimizer, batches, loss)
    plan = scrimp.plan(profile, 0.75)
    scrimp.apply(model, plan)

Its layers shared among ranks, in any PyTorch loop::

    shared = scrimp.share_layers(model, {"input_ids": tokens, "labels": tokens})

What a step takes on hardware that is not here, and the best layouts there::

    step = scrimp.predict(
        model="llama-3.1-8b", hardware="8xh100", sequence=8192, global_batch=128, micro_batch=1, layout={"fsdp": 8}
    )
    found = scrimp.search(model="llama-3.1-70b", hardware="64xh100", sequence=8192, global_batch=256)

Names are imported when they are first asked for, so that `import scrimp` itself needs neither torch nor time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scrimp.api.layer_sharing import share_layers, tensor_plan
    from scrimp.api.layouts import LayoutSearch, PredictedStep, predict, search
    from scrimp.api.pytorch import apply, measure, plan
    from scrimp.api.training import train
    from scrimp.errors import ScrimpError
    from scrimp.gemm import PlannedModel
    from scrimp.integrations.transformers import SnipCallback
    from scrimp.planner.precision import Budget, PrecisionPlan, PrecisionProfile, Weights

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "LayoutSearch",
    "PlannedModel",
    "PrecisionPlan",
    "PrecisionProfile",
    "PredictedStep",
    "ScrimpError",
    "SnipCallback",
    "Weights",
    "__version__",
    "apply",
    "measure",
    "plan",
    "predict",
    "search",
    "share_layers",
    "tensor_plan",
    "train",
]

_HOMES = {
    **dict.fromkeys(("apply", "measure", "plan"), "scrimp.api.pytorch"),
    **dict.fromkeys(("LayoutSearch", "PredictedStep", "predict", "search"), "scrimp.api.layouts"),
    "train": "scrimp.api.training",
    **dict.fromkeys(("share_layers", "tensor_plan"), "scrimp.api.layer_sharing"),
    **dict.fromkeys(("Budget", "PrecisionPlan", "PrecisionProfile", "Weights"), "scrimp.planner.precision"),
    "PlannedModel": "scrimp.gemm",
    "ScrimpError": "scrimp.errors",
    "SnipCallback": "scrimp.integrations.transformers",
}
"""Public name to the module that defines it."""


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """With the names that have not been asked for yet."""
    return sorted({*globals(), *__all__})
