"""GaLore and Fira on several ranks: updates of one process, one owner of every state, bytes of the formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from distributed import spawn
from parity import Bounds, Case, check_parity, made
from torch import Tensor

from scrimp.optim.shared_maps import maps_of, stacked_rows
from scrimp.parts import TensorPart
from scrimp.profiler.collectives import counting_collectives
from scrimp.world import World

GALORE = {
    "optimizer.name": "galore",
    "optimizer.lr": 1e-3,
    "optimizer.rank": 40,
    "optimizer.refresh_every": 2,
    "model.num_layers": 2,
}
"""Keys and values have 32 rows: they are updated in full. The second projector comes in the last step."""
FIRA = {**GALORE, "optimizer.name": "fira"}
TWO = {
    "shards": Case(settings=GALORE, with_documents=True),
    "shards, by fira": Case(settings=FIRA),
    "pieces of layers": Case({"tp": 2}, FIRA),
    "stages": Case({"pp": 2}, GALORE),
    "pieces of experts": Case({"etp": 2}, GALORE, "mixtral-8m", routers=10.0),
    "rows that do not divide": Case(settings={**FIRA, "model.ffn_width": 121}),
}
FOUR = {
    "copies of shards": Case({"dp": 2, "fsdp": 2}, GALORE),
    "pieces and shards": Case({"tp": 2, "fsdp": 2}, FIRA),
    "experts of copies": Case({"dp": 2, "fsdp": 2, "ep": 2}, GALORE, "mixtral-8m", routers=10.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_ranks_train_as_one_process(ranks: int, cases: Mapping[str, Case], tmp_path: Path) -> None:
    # Where a gradient is next to nothing Adam's first step follows its sign, which a last bit may decide.
    near = {name: dataclasses.replace(case, bounds=Bounds(later=1e-4)) for name, case in cases.items()}
    check_parity(ranks, near, tmp_path)


STATES = ("projector", "exp_avg", "exp_avg_sq", "rest_norm")


def given(executable: object) -> dict[str, Tensor]:
    """The same whole gradients on every rank."""
    generator = torch.Generator().manual_seed(5)
    parameters = sorted(executable.model.named_parameters())  # type: ignore[attr-defined]
    return {name: torch.randn(p.shape, generator=generator) for name, p in parameters}


def stepped(
    world: World, ranks: int, case: Case
) -> tuple[dict[str, TensorPart], dict[str, TensorPart], float, int]:
    """Weights and states of matrices after two steps by given gradients, bytes that the last one sent, and numbers."""
    _, executable, optimizer, lr = made(case, world, ranks)
    whole = given(executable)
    for _ in range(2):
        for name, part in executable.parameters():
            parameter = executable.model.get_parameter(name)
            rows = slice(part.offsets[0], part.offsets[0] + part.local.shape[0])
            parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            grad.copy_(whole[name][rows])
        with counting_collectives() as counted:
            optimizer.step(lr)
        optimizer.zero_grad()
    spec = executable.model.spec
    rows = {name: found for name in whole if (found := stacked_rows(spec, name)) is not None}
    states = {n: p for n, p in optimizer.parts() if n.rpartition(".")[0] in rows and n.endswith(STATES)}
    maps = maps_of(rows, {name: whole[name].shape[1] for name in rows})
    numbers = sum(one.rows * one.columns for one in maps)
    return dict(executable.parameters()), states, counted.sent("all-to-all"), numbers


def on_ranks(rank: int, case: Case) -> tuple[dict[str, TensorPart], dict[str, TensorPart], float, int]:
    return stepped(World(rank, 2), 2, case)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [GALORE, FIRA], ids=["galore", "fira"])
def test_the_same_gradients_give_the_bits_of_one_process_and_every_state_one_owner(
    settings: dict[str, object], tmp_path: Path
) -> None:
    case = Case(settings=settings)
    weights, states, _, numbers = stepped(World(), 1, case)
    ranks = spawn(2, on_ranks, tmp_path, case)
    for place, expected in ((0, weights), (1, states)):
        for name, whole in expected.items():
            found = torch.full_like(whole.local, torch.nan)
            written = 0
            for rank in ranks:
                for box in rank[place][name].boxes():
                    found[box.place] = box.local
                    written += box.local.numel()
            assert torch.equal(found, whole.local), name
            assert written == whole.whole_numel, name
    held = [sum(part.local.numel() for part in rank[1].values()) for rank in ranks]
    assert max(held) <= 1.1 * sum(held) / 2
    assert sum(rank[2] for rank in ranks) <= 2 * (2 * 4 * numbers / 2 * (1 / 2))
