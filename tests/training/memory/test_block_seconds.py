"""Where the planner's seconds come from: measured where that is quick, from the work where it is not."""

import dataclasses

import pytest

from scrimp.config import Config, MemoryConfig, ModelConfig, TrainConfig
from scrimp.errors import ScrimpError
from scrimp.training.memory import block_seconds as memory_times
from scrimp.training.setup import Decisions, decide

SMALL = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=4),
    train=TrainConfig(steps=4, sequence=64, batch_tokens=512, micro_batch=2),
    memory=MemoryConfig(optimizer="device"),
)


def seconds(found: Decisions) -> dict[str, float]:
    [kind] = found.memory.costs.classes
    return {name: cost.forward_seconds + cost.backward_seconds for name, cost in kind.choices.items()}


@pytest.mark.slow
def test_a_small_model_is_timed_and_the_plan_says_so() -> None:
    found = decide(SMALL)
    assert found.memory.costs.seconds_origin == "measured"
    assert found.memory.costs.ends.seconds > 0
    assert found.plan.predicted.step_seconds == found.memory.timeline.seconds
    assert seconds(found)["keep"] <= seconds(found)["block"]


@pytest.mark.slow
def test_what_would_take_too_long_is_predicted_from_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_times, "LIMIT_S", 1e-6)
    found = decide(SMALL)
    assert found.memory.costs.seconds_origin == "predicted"
    assert 0 < seconds(found)["keep"] < seconds(found)["block"]


@pytest.mark.slow
def test_a_format_that_nothing_runs_is_still_refused_by_name() -> None:
    # A width that 4-bit blocks of 16 do not divide.
    odd = dataclasses.replace(SMALL.model, width=72, num_heads=3, num_kv_heads=3, ffn_width=100)
    with pytest.raises(ScrimpError, match=r"nvfp4|multiple|blocks"):
        decide(dataclasses.replace(SMALL, model=odd, precision="nvfp4", backend="torch")).backends()
