"""Sharing layers through the library's door: positions and keywords, and what is refused before anything changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import spawn
from small_nets import net
from torch import nn

import scrimp
from scrimp.errors import ConfigError, ModelError, ScrimpError


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def test_an_example_is_a_tensor_positions_or_keywords() -> None:
    x = torch.zeros(3, 8)
    plans = [scrimp.tensor_plan(Mlp(), example, 2) for example in (x, (x,), {"x": x})]
    assert plans[0] == plans[1] == plans[2]
    head, *rows = str(plans[0]).splitlines()
    assert head == ("97.1% of the parameters are shared out among 2 ranks; 1 sums of gradients, 1 of results")
    assert [row.split() for row in rows] == [
        ["up", "outputs", "16", "parts"],
        ["down", "inputs", "16", "parts"],
    ]


@pytest.mark.slow
def test_wrapped_models_and_single_processes_are_refused() -> None:
    with pytest.raises(ModelError, match="before a model is compiled or wrapped"):
        scrimp.tensor_plan(torch.compile(Mlp()), torch.zeros(3, 8), 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no process group"):
        scrimp.share_layers(Mlp(), torch.zeros(3, 8))


def sharing(rank: int) -> tuple[torch.Tensor, str, torch.Tensor]:
    torch.manual_seed(0)
    model = Mlp()
    shared = scrimp.share_layers(model, torch.zeros(3, 8))
    found = model(torch.ones(3, 8)).detach()
    torch.manual_seed(rank)
    refused = ""
    try:
        scrimp.share_layers(Mlp(), torch.zeros(3, 8))
    except ScrimpError as error:
        refused = str(error)
    return found, refused, shared.whole_state_dict()["up.weight"]


@pytest.mark.slow
def test_ranks_with_other_weights_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mlp()
    for found, refused, weight in spawn(2, sharing, tmp_path):
        torch.testing.assert_close(found, model(torch.ones(3, 8)).detach())
        assert torch.equal(weight, model.up.weight)
        assert "up.weight differs on rank 1 of the group" in refused


def test_a_net_of_blocks_is_traced() -> None:
    """The net that the other tests of this door train."""
    plan = scrimp.tensor_plan(net(), torch.zeros((2, 6), dtype=torch.long), 2)
    assert {layer.kind for layer in plan.layers} >= {"outputs", "inputs"}
