"""The average of a model's weights, against the formula by hand in float64; of real ranks in parallel/."""

from __future__ import annotations

import pytest
import torch
from test_proof import ARCHITECTURE, realised
from torch import Tensor

from scrimp.runtime.averaged_weights import AveragedWeights

STEPS = 20


def copied(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().double().clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
def test_the_average_is_that_by_hand(parameters: str, momentum: float) -> None:
    _, executable = realised("bf16", parameters, ARCHITECTURE)
    average = AveragedWeights(executable, momentum)
    expected = copied(executable.model)
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        for parameter in executable.model.parameters():
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        average.follow()
        now = copied(executable.model)
        expected = {name: momentum * expected[name] + (1 - momentum) * now[name] for name in now}
    found = dict(average.parts())
    assert found.keys() == expected.keys()
    for name, part in found.items():
        assert part.local.dtype is torch.float32
        # Each update rounds twice, by half a unit in the last place at most.
        bound = 2 * STEPS * torch.finfo(torch.float32).eps * float(expected[name].abs().max())
        torch.testing.assert_close(part.local.double(), expected[name], rtol=0, atol=bound)


def test_it_begins_as_the_model_and_is_a_model_of_its_own() -> None:
    _, executable = realised("fp32", "fp32", ARCHITECTURE)
    average = AveragedWeights(executable, 0.9)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        before = executable.model(tokens)
        assert torch.equal(average.model(tokens), before)
        for parameter in executable.model.parameters():
            parameter.zero_()
        assert torch.equal(average.model(tokens), before)
    assert not any(one.requires_grad for one in average.model.parameters())
