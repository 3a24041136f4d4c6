"""Tensors without memory beside torch's own: the same bytes, the same results, and no compiler."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from test_peaks import LLAMA, QWEN2
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scrimp.config import Architecture, preset
from scrimp.cpu import operators_alone
from scrimp.models import spec_of
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.planner.memory.costs import StepCosts
from scrimp.precision import parse_rules
from scrimp.profiler.memory_trace import StorageTracker, TracedStep, meta_mode, trace
from scrimp.profiler.memory_trace.meta_mode import MetaMode, MetaTensor
from scrimp.profiler.memory_trace.result_shapes import RULES, result_of

LLAMA3, GEMMA3, EXPERTS = preset("llama-3.1-8b"), preset("gemma3-8m"), preset("qwen3-moe-8m")


def traced(architecture: Architecture, rules: str, device: str) -> StepCosts:
    """A step whose rows hold several documents."""
    parsed = parse_rules(rules)
    parameters = "fp32" if rules == "fp32" else "bf16"
    return TracedStep(
        architecture,
        precision=parsed.compute,
        parameters=parameters,
        optimizer=AdamWMemory(parameters),
        micro_batch=2,
        sequence=128,
        loss_chunk=100,
        activations=("keep", "qkv", "block", "qkv+offload"),
        linears=parsed.assign(spec_of(architecture).origins),
        device_functions=device,  # type: ignore[arg-type]
        documents=True,
    ).costs()


@pytest.mark.parametrize(
    ("architecture", "rules", "device"),
    [
        (QWEN2, "bf16", "cuda"),
        (LLAMA, "nvfp4,*.mlp.*=fp8", "cpu"),
        (GEMMA3, "fp32", "cuda"),
        (EXPERTS, "bf16", "cpu"),
    ],
    ids=["qwen2", "formats", "gemma3", "experts"],
)
@pytest.mark.every(4)
def test_a_trace_has_the_bytes_of_torchs_fake_tensors_and_checkpoint(
    monkeypatch: pytest.MonkeyPatch, architecture: Architecture, rules: str, device: str
) -> None:
    found = traced(architecture, rules, device)
    monkeypatch.setattr(trace, "MetaMode", lambda: FakeTensorMode(allow_non_fake_inputs=True))
    monkeypatch.setattr(trace, "running_again_by", lambda _: contextlib.nullcontext())
    assert found == traced(architecture, rules, device)


def test_every_rule_answers_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = set()

    def compared(operator: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        found = result_of(operator, args, named)
        if found is not None:
            assert described(found) == described(operator(*args, **named)), operator
            answered.add(operator)
        return found

    monkeypatch.setattr(meta_mode, "result_of", compared)
    with operators_alone():
        traced(LLAMA3, "fp32", "cpu")
        traced(QWEN2, "bf16", "cuda")
        for rules, device in (("bf16", "cuda"), ("fp32", "cpu")):
            traced(GEMMA3, rules, device)
    missing = {str(rule) for rule in RULES} - {str(rule) for rule in answered}
    assert not missing


def described(result: Any) -> Any:
    """All that a trace can know of tensors without memory."""
    if isinstance(result, list | tuple):
        return [described(one) for one in result]
    return result.shape, result.dtype, result.stride(), result.untyped_storage().nbytes()


NO_COMPILER = """
import sys
import scrimp.cli.dry_run
from scrimp.config import preset
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.profiler.memory_trace import TracedStep

CHOICES = ("block", "qkv+offload")
for model, device in (("qwen2.5-7b", "cuda"), ("gemma3-1b", "cpu")):
    TracedStep(
        preset(model), precision="bf16", parameters="bf16", optimizer=AdamWMemory("bf16"), micro_batch=1,
        sequence=256, loss_chunk=64, activations=CHOICES, device_functions=device,
    ).costs()
print(sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_the_account_of_a_usual_decoder_loads_no_compiler() -> None:
    """Which takes longer than the account; an operator without a rule loads it all the same."""
    done = subprocess.run([sys.executable, "-c", NO_COMPILER], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tensors_without_memory_pass_for_the_cpus() -> None:
    with MetaMode(), torch.autocast("cpu", torch.bfloat16):
        x = torch.zeros(2**40, 4)
        assert isinstance(x, MetaTensor)
        assert x.device.type == "cpu"
        assert x.is_cpu
        assert (x @ x.new_empty(4, 8)).dtype == torch.bfloat16
        assert x.add_(1) is x


def test_views_share_storage_and_results_in_place_are_not_new() -> None:
    with MetaMode(), StorageTracker() as tracker:
        x = torch.empty(100, 10)
        views = [x.t(), x[:50], x.view(-1)]
        assert x.mul_(2).t_().unsqueeze_(0).shape == (1, 10, 100)
        views.append(x + 1)
        assert views[-1].shape == (1, 10, 100)
        assert (tracker.live, tracker.peak) == (8000, 8000)
        del x, views
        assert tracker.live == 0


def test_real_tensors_stay_as_they_are_and_numbers_can_be_read() -> None:
    real = torch.ones(3)
    with MetaMode():
        count = torch.tensor(3.0)
        count += 1
        torch._foreach_add_([count], 1)
        torch.zeros(3).mul_(count)
        assert (count.item(), (2 * count).item()) == (5.0, 10.0)
        count += torch.zeros(())
        with pytest.raises(RuntimeError):
            count.item()
        assert isinstance(real.add_(1), Tensor)
        assert isinstance(real + 1, MetaTensor)
        with pytest.raises(RuntimeError):
            torch.zeros(()).item()
    assert real.tolist() == [1.0, 1.0, 1.0]
