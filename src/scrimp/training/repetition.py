"""Whether a run repeats itself, and what that costs it, in words: a row of `scrimp plan`.

Method   `train.deterministic` says the first, `scrimp.planner.layout.attention_price` the second, of the run's own step
         on the hardware file of its card.
Limits   One GPU with a hardware file that has rates of the run's formats, working in bf16; of others no price is said.
         Nothing else than attention has one: what scattered sums and sorted gradients of torch's deterministic
         operators take more was not measured.
Checked  tests/training/test_repetition.py
"""

from __future__ import annotations

from scrimp.errors import PlanError
from scrimp.planner.hardware import Cluster, load_hardware
from scrimp.planner.layout.attention_price import price_text
from scrimp.planner.layout.predict import predict
from scrimp.profiler.this_device import known_name
from scrimp.training.chosen_layout import step_of_run
from scrimp.training.setup import Decisions

ON_A_CPU = "bit for bit; on a CPU that costs nothing"


def repetition_text(decisions: Decisions) -> str:
    """How a run repeats itself, and at which price."""
    if decisions.device.is_host:
        return ON_A_CPU
    card = known_name(decisions.device)
    return text_on(decisions, None if card is None else load_hardware(card))


def text_on(decisions: Decisions, cluster: Cluster | None) -> str:
    """The same on a GPU.

    Args:
        cluster: one such device; None: no hardware file has it.
    """
    config = decisions.config
    how = "bit for bit" if config.train.deterministic else "up to rounding"
    unknown = f"{how}; what that costs here is not predicted"
    if cluster is None or config.layout.ranks > 1 or config.precision_rules.compute != "bf16":
        return unknown
    setting = step_of_run(config, decisions.architecture, cluster, decisions.plan.placement.activations)
    if setting is None:
        return unknown
    try:
        price = price_text(setting, predict(setting).step_seconds)
    except PlanError:  # a format of which the file has no rate
        return unknown
    return f"{how}; {price or 'nothing is predicted to be faster here'}"
