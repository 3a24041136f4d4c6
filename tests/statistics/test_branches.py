"""In isolation noise stays in its sub-layer: everyone else's gradients do not change by a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MlpModel, batch, decoder, linear_names, losses
from torch import Tensor, nn

from scrimp.statistics import Structure, find_structure
from scrimp.statistics.branches import BranchTape, Isolated
from scrimp.statistics.stream import Injection, StreamTape, gaussian, generator_of, square
from scrimp.statistics.structure import SubLayer

SHARE, SEED = 0.05, 3
Gradients = dict[str, Tensor]


def structure_of(model: nn.Module) -> Structure:
    structure = find_structure(model, linear_names(model), lambda: list(losses(model, batch(0))))
    assert structure is not None
    return structure


def only(structure: Structure, s: int) -> Structure:
    """All exits, but the entries of one sub-layer alone."""
    subs = [SubLayer(sub.entries if i == s else (), sub.exit) for i, sub in enumerate(structure.sublayers)]
    return Structure(structure.nodes, tuple(subs))


def run(model: nn.Module, tape: BranchTape) -> tuple[list[float], Gradients]:
    found, tape.micro_batch = [], 0
    for loss in losses(model, batch(1)):
        loss.backward()
        found.append(float(loss.detach()))
        tape.micro_batch += 1
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found, gradients


def isolated(
    model: nn.Module, structure: Structure, kind: str, turn: int = 0
) -> tuple[list[float], Gradients, Isolated]:
    tape = BranchTape(model, structure)
    with tape.recording():
        run(model, tape)
    with tape.isolated(kind, SHARE, SEED, turn) as noise:
        loss, gradients = run(model, tape)
    return loss, gradients, noise


@pytest.mark.parametrize("kind", ["tokens", "weights"])
@pytest.mark.parametrize("make", [MlpModel, decoder])
def test_noise_in_one_sublayer_leaves_all_other_planned_layers_as_they_were(make: Any, kind: str) -> None:
    model = make()
    structure = structure_of(model)
    loss, clean = run(model, BranchTape(model, structure))
    all_loss, together, noise = isolated(model, structure, kind)
    assert all_loss == loss
    for s, sub in enumerate(structure.sublayers):
        own = {f"{layer}.weight" for layer in (*sub.entries, sub.exit)}
        found_loss, found, alone = isolated(model, only(structure, s), kind)
        assert found_loss == loss
        assert alone.injected == {s: noise.injected[s]}
        assert {number for number, size in alone.arrived.items() if size} == {s}
        assert alone.arrived[s] == noise.arrived[s]
        for layer in (*linear_names(model), "head"):
            name = f"{layer}.weight"
            assert torch.equal(found[name], clean[name]) == (name not in own), name
        for name in own:
            assert torch.equal(found[name], together[name])
        # What comes before the first exit still hears of it: the documented exception.
        assert not torch.equal(found["embedding.weight"], clean["embedding.weight"])


@pytest.mark.parametrize("kind", ["tokens", "weights"])
def test_weights_of_a_branch_change_as_they_do_by_hand(kind: str) -> None:
    model = MlpModel(blocks=2)
    structure = structure_of(model)
    _, found, noise = isolated(model, structure, kind)
    weights = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    size = arrived = 0.0
    targets = sum(goal.numel() for _, goal in batch(1))
    for number, (tokens, goal) in enumerate(batch(1)):
        block: Any = model.blocks[1]
        x = model.blocks[0](model.embedding(tokens))
        after = block(x)
        logits = model.head(model.final_norm(after)).flatten(0, 1)
        loss = F.cross_entropy(logits, goal.flatten(), reduction="sum") / targets
        (g,) = torch.autograd.grad(loss, after)
        y = block.up(block.norm(x.detach()))
        key = (SEED, 1, 0, 0 if kind == "weights" else number)  # sub-layer, its entry, micro-batch
        z = gaussian(y.detach(), SHARE, kind, generator_of(torch.device("cpu"), *key))
        size += square(z)
        given = block.down(F.gelu(y + z))
        arrived += square(given - block.down(F.gelu(y)))
        given.backward(g)
        for name in ("blocks.1.up.weight", "blocks.1.down.weight"):
            weights[name] += model.get_parameter(name).grad
        model.zero_grad()
    assert noise.injected[1] == pytest.approx(size, rel=1e-6)
    assert noise.arrived[1] == pytest.approx(arrived, rel=1e-4)
    for name in ("blocks.1.up.weight", "blocks.1.down.weight"):
        assert torch.allclose(found[name], weights[name], rtol=1e-4, atol=1e-7)


def test_changes_of_gradients_at_exits_are_compared_with_the_clean_run() -> None:
    model = MlpModel()
    structure = structure_of(model)
    branches, stream = BranchTape(model, structure), StreamTape(model, structure)

    def both() -> None:
        stream.micro_batch = 0
        branches.micro_batch = 0
        for loss in losses(model, batch(1)):
            loss.backward()
            stream.micro_batch += 1
            branches.micro_batch += 1

    with stream.recording(), branches.recording():
        both()
    inputs: list[Tensor] = []
    exits = [model.get_submodule(sub.exit) for sub in structure.sublayers]
    sums = dict.fromkeys(range(2), 0.0)
    with stream.comparing(Injection(2, "backward", "tokens", SHARE, SEED)) as changes:
        for number, module in enumerate(exits):
            module.register_full_backward_hook(
                lambda m, gi, go, n=number: inputs.append((n, gi[0])),  # type: ignore[misc]
            )
        with branches.comparing(sums):
            both()
    expected = dict.fromkeys(range(2), 0.0)
    seen = dict.fromkeys(range(2), 0)
    for number, g in inputs:
        expected[number] += square(g - branches._kept["gx", number, seen[number]])
        seen[number] += 1
    assert changes.injected[2] > 0
    assert sums == pytest.approx(expected, rel=1e-6)
    assert min(sums.values()) > 0


class InPlaceBlock(nn.Module):
    """Adds the stream to its result in place."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down = block.norm, block.up, block.down

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return result.add_(x)


def test_a_model_that_changes_results_in_place_gives_the_same_gradients() -> None:
    first, second = MlpModel(), MlpModel()
    second.blocks = nn.ModuleList(InPlaceBlock(block) for block in second.blocks)
    expected = isolated(first, structure_of(first), "tokens")
    tape = BranchTape(second, structure_of(second))
    with tape.recording():
        run(second, tape)
    for _ in range(2):  # the second pass would show what the first has left in the tape
        with tape.isolated("tokens", SHARE, SEED, 0):
            _, found = run(second, tape)
        for name in expected[1]:
            assert torch.allclose(found[name], expected[1][name], rtol=1e-5, atol=1e-8), name


@pytest.mark.parametrize("kind", ["tokens", "weights"])
def test_recomputed_blocks_meet_the_same_noise_once(kind: str) -> None:
    found = []
    for checkpointed in (False, True):
        model = MlpModel(checkpointed=checkpointed)
        found.append(isolated(model, structure_of(model), kind))
    assert found[0][2] == found[1][2]
    assert all(torch.equal(g, found[1][1][name]) for name, g in found[0][1].items())


def test_passes_without_gradients_are_left_alone() -> None:
    model = MlpModel()
    tape = BranchTape(model, structure_of(model))
    with tape.recording():
        run(model, tape)
    tokens = batch(2)[0][0]
    with torch.no_grad():
        expected = model(tokens)
        with tape.isolated("tokens", SHARE, SEED, 0) as noise:
            assert torch.equal(model(tokens), expected)
    assert not noise.injected
