"""Evaluation holds a part of what a step's forward passes and head hold, so that it never sets the peak."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from allocator import allocator_peak
from real_steps import CPU, RealStep, Setting
from test_host_states import HostedStep
from test_peaks import FORMATS, LLAMA, SETTINGS

from scrimp.config.activations import LEVELS
from scrimp.data import TokenStream
from scrimp.data.corpus_manifest import ShardEntry
from scrimp.data.shards import ShardWriter
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.states import moments
from scrimp.profiler.memory_trace import TracedStep
from scrimp.runtime import Executable
from scrimp.training.evaluation import evaluate

EVALUATED = {
    f"{level} {name} {micro_batches}": Setting(
        LLAMA, activations=(level,), micro_batches=micro_batches, **format_
    )
    for level in LEVELS
    for name, format_ in FORMATS.items()
    for micro_batches in (1, 2)
    if name != "masters" and (micro_batches == 1 or level == "keep")
} | {
    name: SETTINGS[name]
    for name in ("offloaded, autocast", "large head", "large head, chunks", "short", "fp8, levels")
}


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    folder: Path = tmp_path_factory.mktemp("held-out")
    writer = ShardWriter(folder / "held-out.bin", np.dtype("<u2"))
    document = (np.arange(3000) % 700).astype("<u2")
    writer.add(document, text_bytes=3000, document_hash=1)
    return TokenStream(folder, [ShardEntry.of("held-out.bin", writer.finish())])


def most(costs: StepCosts, states: States, setting: Setting) -> int:
    """Bytes of forward passes, head and loss, above weights and optimizer states that are always there."""
    parts = [costs.classes[number] for number in costs.blocks]
    there = costs.ends.weights + costs.ends.optimizer
    there += sum(part.weights for part, host in zip(parts, states.weights, strict=True) if not host)
    there += sum(part.optimizer for part, host in zip(parts, states.optimizer, strict=True) if not host)
    found = moments(costs, Placement(tuple(setting.choices), states), setting.micro_batches > 1)
    return max(moment.bytes for moment in found if moment.phase in ("forward", "head")) - there


def evaluation_peak(step: RealStep, stream: TokenStream) -> int:
    setting = step.setting
    executable = Executable(step.model, CPU, setting.precision, setting.loss_chunk, planned=step.planned)
    return allocator_peak(
        lambda: evaluate(
            executable,
            stream,
            sequence=setting.sequence,
            micro_batch=setting.rows,
            max_tokens=None,
            mask_documents=False,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_takes_less_than_forward_pass_and_head_of_a_step(name: str, stream: TokenStream) -> None:
    setting = EVALUATED[name]
    costs = TracedStep(
        setting.architecture, activations=tuple(set(setting.choices)), **setting.arguments
    ).costs()
    real = evaluation_peak(RealStep(setting), stream)
    assert 0 < real <= most(costs, States.split(len(setting.choices)), setting)


@pytest.mark.slow
def test_it_does_with_weights_on_the_host(stream: TokenStream) -> None:
    setting = Setting(LLAMA, **FORMATS["bf16"])
    costs = TracedStep(setting.architecture, **setting.arguments).costs()
    states, step = States.split(3, weights=3), HostedStep(setting)
    step.place(states)
    assert 0 < evaluation_peak(step, stream) <= most(costs, states, setting)
