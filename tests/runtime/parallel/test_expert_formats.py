"""Quantized experts that ranks share, on gloo: one process that takes the tokens of all ranks at once.

An expert sees the tokens of its group of ranks together, in the order of ranks: as in one process whose micro-batch is
all of theirs. The auxiliary loss is one of a micro-batch, and left out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import spawn
from parity import ROWS, SEQUENCE, Bounds, Case, Trained, batch_of, compared, gradients_of, made

from scrimp.data import Batch
from scrimp.runtime import StepProof, execute
from scrimp.runtime.passes import run_passes
from scrimp.world import World

RANKS = 2
EP, ETP = {"ep": 2}, {"etp": 2}


def case(layout: Any, recipe: str, **more: Any) -> Case:
    precision = f"fp32,*.experts.*={recipe}"
    settings = {
        "precision": precision,
        "train.parameters": "fp32",
        "model.num_layers": 1,
        "backend": "reference",
    }
    # Sums of parts in another order: a few numbers near a tie are rounded otherwise.
    bounds = Bounds() if layout == EP else Bounds(gradients=1e-2)
    return Case(
        layout,
        settings,
        "mixtral-8m",
        routers=10.0,
        micro_batches=2,
        steps=1,
        bounds=bounds,
        clip=0.0,
        **more,
    )


CASES = {
    **{f"ep, {recipe}": case(EP, recipe) for recipe in ("fp8", "fp8_tensor", "nvfp4", "mxfp4")},
    "ep, recomputed": case(EP, "nvfp4", activations="block"),
    **{f"etp, {recipe}": case(ETP, recipe) for recipe in ("fp8_tensor", "fp8_row", "nvfp4", "mxfp4")},
}


def trained(rank: int, case: Case, is_alone: bool = False) -> tuple[Trained, str]:
    """A step of one rank, or of one process with the micro-batches that ranks take side by side as one."""
    execute.with_load_balance = lambda model, sums, *counts: (model.take_routing(), sums)[1]  # type: ignore[assignment]
    world = World() if is_alone else World(rank, RANKS)
    decisions, executable, optimizer, _ = made(case, world, RANKS)
    each = [[batch_of(case, 0, turn * case.micro_batches + m) for turn in range(RANKS)] for m in range(2)]
    targets = sum(batch.num_targets for side_by_side in each for batch in side_by_side)
    batches = [joined(side_by_side) if is_alone else side_by_side[rank] for side_by_side in each]
    proof = StepProof(executable, decisions.plan, None)
    first_row = 0 if is_alone else rank * case.micro_batches * ROWS * SEQUENCE
    with proof.of_step(micro_batches=2, head_passes=2):
        sums = run_passes(executable, batches, targets, first_row=first_row)
    names = {name for name, p in executable.model.named_parameters() if p.grad is not None}
    gradients = gradients_of(executable, optimizer, world, names)
    losses = [sum(executable.mesh.gathered(float(sums.loss))) / targets]
    return Trained(losses, [optimizer.gradient_norm()], gradients), proof.sentence


def joined(batches: list[Batch]) -> Batch:
    return Batch.of(
        *(torch.cat([getattr(one, name) for one in batches]) for name in ("tokens_BT", "targets_BT"))
    )


def every(rank: int) -> dict[str, tuple[Trained, str]]:
    return {name: trained(rank, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Trained, str]]]:
    return spawn(RANKS, every, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_ranks_quantize_as_one_process(
    name: str, ranks: list[dict[str, tuple[Trained, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "with_load_balance", execute.with_load_balance)  # put back afterwards
    one, sentence = trained(0, CASES[name], is_alone=True)
    is_whole = name.startswith("ep")
    compared(name, CASES[name], [found[name][0] for found in ranks], one)
    for found in ranks:
        assert found[name][1] == sentence
        assert "nothing could be told" not in sentence
        for matrix, expected in one.gradients.items():
            difference = found[name][0].gradients[matrix] - expected
            assert float(difference.norm() / expected.norm()) < (1e-5 if is_whole else 2e-3), matrix
