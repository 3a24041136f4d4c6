"""The proof sees what really ran: it passes a plan that tells the truth and stops one that lies."""

import dataclasses

import pytest
import torch

from scrimp.config import Architecture, Config, TrainConfig, resolve
from scrimp.errors import TrainingError
from scrimp.gemm import reference_only
from scrimp.model import initialise
from scrimp.plan import Plan, build_plan
from scrimp.runtime import Executable, prove, realise

ARCHITECTURE = Architecture(
    family="qwen2",
    vocab_size=64,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_width=64,
    context=256,
    qkv_bias=True,
    tied_embeddings=True,
)


def realised(precision: str, parameters: str, architecture: Architecture) -> tuple[Plan, Executable]:
    config = Config(precision=precision, train=TrainConfig(parameters=parameters))
    resolution = resolve(config, architecture, device_type="cpu")
    plan = build_plan(
        resolution.config,
        architecture,
        device_name="test CPU",
        device_is_host=True,
        torch_version="2.13.0",
        reasons={},
    )
    executable = realise(
        plan,
        architecture,
        lambda model: initialise(model, 0),
        device=torch.device("cpu"),
        parameters=parameters,
        compute=config.precision_rules.compute,
        choose=reference_only,
    )
    return plan, executable


FORMATS = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")]
UNTIED = dataclasses.replace(ARCHITECTURE, family="llama", qkv_bias=False, tied_embeddings=False)


@pytest.mark.parametrize("architecture", [ARCHITECTURE, UNTIED], ids=["tied-bias", "untied"])
@pytest.mark.parametrize(("precision", "parameters"), FORMATS)
def test_a_true_plan_passes_and_leaves_no_trace(
    precision: str, parameters: str, architecture: Architecture
) -> None:
    plan, executable = realised(precision, parameters, architecture)
    before = {name: p.clone() for name, p in executable.model.named_parameters()}
    state = torch.get_rng_state()
    prove(executable, plan)
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in executable.model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize(("precision", "parameters"), FORMATS)
def test_a_plan_that_lies_about_one_gemm_is_stopped(precision: str, parameters: str) -> None:
    plan, executable = realised(precision, parameters, ARCHITECTURE)
    other = {"fp32": "bf16", "bf16": "fp32"}[precision]
    choice = dataclasses.replace(plan.gemms["blocks.1.mlp.down"], wgrad=other)
    lying = dataclasses.replace(plan, gemms=plan.gemms | {"blocks.1.mlp.down": choice})
    with pytest.raises(TrainingError, match=f"wgrad in {other}"):
        prove(executable, lying)
