"""What is seen and disturbed at the nodes of a stream, against tensors that are caught and changed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Batch, MlpModel, batch, linear_names, losses
from property_tests import examples
from torch import Tensor, nn

from scrimp.errors import ModelError
from scrimp.statistics import find_structure, stream
from scrimp.statistics.stream import Injection, StreamTape, gaussian, generator_of, square

SEED = 3


def generator(*key: int) -> torch.Generator:
    return generator_of(torch.device("cpu"), *key)


# -- noise -------------------------------------------------------------------------------------


def test_noise_of_tokens_is_a_share_of_each_tokens_size() -> None:
    x = torch.randn(3, 400, 256) * torch.logspace(-3, 3, 400)[:, None]
    z = gaussian(x, 0.05, "tokens", generator(1))
    ratios = z.norm(dim=-1) / x.norm(dim=-1)
    assert ratios.mean() == pytest.approx(0.05, rel=0.01)
    assert 0.03 < ratios.min() < ratios.max() < 0.07
    assert gaussian(torch.zeros(2, 8), 0.05, "tokens", generator(1)).abs().max() == 0
    unit = (z / x.norm(dim=-1, keepdim=True)).flatten(0, 1)
    neighbours = (unit[1:] * unit[:-1]).sum(-1) / (unit[1:].norm(dim=-1) * unit[:-1].norm(dim=-1))
    assert neighbours.abs().mean() < 0.1  # independent: 0.05 for 256 numbers


@examples(30)
@given(st.integers(0, 10**6), st.floats(-4, 4), st.integers(1, 40))
def test_noise_of_weights_is_one_linear_map_of_all_tokens(seed: int, factor: float, width: int) -> None:
    a, b = (torch.randn(7, width, generator=torch.Generator().manual_seed(seed + i)) for i in range(2))

    def noise(x: Tensor) -> Tensor:
        return gaussian(x, 0.1, "weights", generator(seed))

    assert torch.allclose(noise(a + factor * b), noise(a) + factor * noise(b), atol=1e-4)


def test_noise_of_weights_has_the_size_that_is_asked_for() -> None:
    x = torch.randn(50, 256)
    z = gaussian(x, 0.05, "weights", generator(1))
    assert float(z.norm() / x.norm()) == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("kind", ["tokens", "weights"])
def test_noise_is_a_function_of_its_key_and_of_nothing_else(kind: str) -> None:
    x, before = torch.randn(4, 8).bfloat16(), torch.get_rng_state()
    first, again, other = (gaussian(x, 0.1, kind, generator(*key)) for key in ((1, 2), (1, 2), (2, 1)))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


# -- the tape ----------------------------------------------------------------------------------


class Caught:
    """Activations and gradients at the nodes of one pass, by plain hooks; changed on the way if asked to."""

    def __init__(
        self,
        model: MlpModel,
        micro_batch: tuple[Tensor, Tensor],
        targets: int,
        forward: Callable[[int, Tensor], Tensor] = lambda node, x: x,
    ) -> None:
        self.x: list[Tensor] = []
        x = model.embedding(micro_batch[0])
        for node, block in enumerate(model.blocks):
            x = self._keep(forward(node, x))
            x = block(x)
        x = self._keep(forward(len(model.blocks), x))
        logits = model.head(model.final_norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), micro_batch[1].flatten(), reduction="sum")
        (loss / targets).backward()

    def _keep(self, x: Tensor) -> Tensor:
        x.retain_grad()
        self.x.append(x)
        return x

    @property
    def gradients(self) -> list[Tensor]:
        """R_j."""
        return [x.grad for x in self.x if x.grad is not None]


def tape_of(model: nn.Module) -> StreamTape:
    structure = find_structure(model, linear_names(model), lambda: list(losses(model, batch(0))))
    assert structure is not None
    return StreamTape(model, structure)


def run(model: nn.Module, tape: StreamTape, micro_batches: Batch) -> None:
    tape.micro_batch = 0
    for loss in losses(model, micro_batches):
        loss.backward()
        tape.micro_batch += 1
    for parameter in model.parameters():
        parameter.grad = None


def recorded(model: nn.Module, micro_batches: Batch) -> StreamTape:
    tape = tape_of(model)
    with tape.recording():
        run(model, tape, micro_batches)
    return tape


def caught(model: MlpModel, micro_batches: Batch, **how: Callable[[int, Tensor], Tensor]) -> list[Caught]:
    targets = sum(goal.numel() for _, goal in micro_batches)
    return [Caught(model, micro_batch, targets, **how) for micro_batch in micro_batches]


def test_the_clean_pass_sums_gradients_and_what_branches_add_to_them() -> None:
    model, micro_batches = MlpModel(), batch(1)
    tape = recorded(model, micro_batches)
    for node in range(3):
        expected = sum(square(one.gradients[node]) for one in caught(model, micro_batches))
        assert tape.gradient_squares[node] == pytest.approx(expected, rel=1e-5)
    for node, block in enumerate(model.blocks):
        through_branch = 0.0
        for one in caught(model, micro_batches):
            x = one.x[node].detach().requires_grad_()
            (g,) = torch.autograd.grad(block(x) - x, x, one.gradients[node + 1])
            through_branch += square(g)
        assert tape.branch_squares[node] == pytest.approx(through_branch, rel=1e-4)
    assert tape.first == 0


@pytest.mark.parametrize("kind", ["tokens", "weights"])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_forward_noise_changes_the_stream_as_it_does_by_hand(kind: str, node: int) -> None:
    model, micro_batches = MlpModel(), batch(1)
    tape = recorded(model, micro_batches)
    with tape.comparing(Injection(node, "forward", kind, 0.05, SEED)) as changes:
        run(model, tape, micro_batches)
    clean, number = caught(model, micro_batches), 0

    def disturbed(at: int, x: Tensor) -> Tensor:
        nonlocal number
        if at != node:
            return x
        z = gaussian(x.detach(), 0.05, kind, generator(SEED, node, 0 if kind == "weights" else number))
        number += 1
        return x + z

    noisy = caught(model, micro_batches, forward=disturbed)
    for j in range(3):
        dx = [a.x[j].detach() - b.x[j].detach() for a, b in zip(noisy, clean, strict=True)]
        dr = [a.gradients[j] - b.gradients[j] for a, b in zip(noisy, clean, strict=True)]
        assert changes.activation[j] == pytest.approx(sum(map(square, dx)), rel=1e-4, abs=1e-12)
        assert changes.gradient[j] == pytest.approx(sum(map(square, dr)), rel=1e-3)
        product = sum(float((a * b).sum()) for a, b in zip(dx, dr, strict=True))
        assert changes.product[j] == pytest.approx(product, rel=1e-3, abs=1e-10)
    assert changes.injected[node] == pytest.approx(changes.activation[node], rel=1e-4)
    assert set(changes.injected) == {node}


@pytest.mark.parametrize("kind", ["tokens", "weights"])
def test_backward_noise_arrives_at_earlier_nodes_alone(kind: str) -> None:
    model, micro_batches = MlpModel(), batch(1)
    tape = recorded(model, micro_batches)
    with tape.comparing(Injection(1, "backward", kind, 0.05, SEED)) as changes:
        run(model, tape, micro_batches)
    expected = {0: 0.0, 1: 0.0}
    for number, one in enumerate(caught(model, micro_batches)):
        r = one.gradients[1]
        z = gaussian(r, 0.05, kind, generator(SEED, 1, 0 if kind == "weights" else number))
        x = one.x[0].detach().requires_grad_()
        (carried,) = torch.autograd.grad(model.blocks[0](x), x, z)
        expected[0] += square(carried)
        expected[1] += square(z)
    assert changes.gradient[2] == 0
    assert all(changes.activation[j] == 0 for j in range(3))
    assert changes.injected[1] == pytest.approx(expected[1], rel=1e-5)
    for node in (0, 1):
        assert changes.gradient[node] == pytest.approx(expected[node], rel=1e-4)


def test_equal_micro_batches_share_noise_of_weights_but_not_of_tokens() -> None:
    model, micro_batches = MlpModel(), [*batch(1)[:1], *batch(1)[:1]]
    tape = recorded(model, micro_batches)
    found = {}
    for kind in ("weights", "tokens"):
        for count in (1, 2):
            with tape.comparing(Injection(0, "forward", kind, 0.05, SEED)) as changes:
                # Shares of the loss are of all that is given: the same for one and for two.
                targets = 2 * micro_batches[0][1].numel()
                tape.micro_batch = 0
                for tokens, goal in micro_batches[:count]:
                    logits = model(tokens).flatten(0, 1)
                    (
                        nn.functional.cross_entropy(logits, goal.flatten(), reduction="sum") / targets
                    ).backward()
                    tape.micro_batch += 1
            found[kind, count] = changes.gradient[0]
    assert found["weights", 2] == pytest.approx(2 * found["weights", 1], rel=1e-6)
    assert found["tokens", 2] != pytest.approx(2 * found["tokens", 1], rel=1e-6)


def test_few_rows_estimate_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, micro_batches = MlpModel(), batch(1, rows=8)
    every: dict[int, tuple[float, float]] = {}
    for rows in (4096, 64):
        monkeypatch.setattr(stream, "ROWS", rows)
        tape = recorded(model, micro_batches)
        with tape.comparing(Injection(0, "forward", "tokens", 0.05, SEED)) as changes:
            run(model, tape, micro_batches)
        assert all(len(kept) <= rows for kept in tape._clean.values())
        every[rows] = changes.activation[2], changes.gradient[0]
    assert every[64] == pytest.approx(every[4096], rel=0.3)
    assert every[64] != every[4096]


def test_a_stream_whose_start_is_not_trained_begins_at_the_next_node() -> None:
    model = MlpModel()
    model.embedding.requires_grad_(False)
    tape = recorded(model, batch(1))
    assert tape.first == 1
    assert 0 not in tape.gradient_squares


def test_a_model_without_embedding_keeps_the_users_batch_as_it_is() -> None:
    model = nn.Sequential(*MlpModel().blocks, nn.LayerNorm(24))
    x = torch.randn(2, 5, 24)
    before = x.clone()
    structure = find_structure(model, linear_names(model), lambda: model(x))
    assert structure is not None
    tape = StreamTape(model, structure)
    with tape.recording():
        model(x).square().sum().backward()
    with tape.comparing(Injection(tape.first, "forward", "tokens", 0.05, SEED)) as changes:
        model(x).square().sum().backward()
    assert torch.equal(x, before)
    assert changes.activation[2] > 0


# -- activation checkpointing ------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_recomputed_blocks_meet_the_same_noise_once(direction: str, node: int) -> None:
    found = []
    for checkpointed in (False, True):
        model, micro_batches = MlpModel(checkpointed=checkpointed), batch(1)
        tape = recorded(model, micro_batches)
        with tape.comparing(Injection(node, direction, "tokens", 0.05, SEED)) as changes:
            run(model, tape, micro_batches)
        found.append([tape.gradient_squares, tape.branch_squares, *vars(changes).values()])
    assert found[0] == found[1]


class Whole(nn.Module):
    """Several blocks as one, so that nodes lie inside what is checkpointed."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


@pytest.mark.parametrize("node", [0, 1, 2])
def test_noise_inside_what_is_recomputed_is_made_again(node: int) -> None:
    found = []
    for checkpointed in (False, True):
        model, micro_batches = MlpModel(checkpointed=checkpointed), batch(1)
        model.blocks = nn.ModuleList([Whole(*model.blocks)])
        tape = recorded(model, micro_batches)
        with tape.comparing(Injection(node, "forward", "tokens", 0.05, SEED)) as changes:
            run(model, tape, micro_batches)
        found.append(vars(changes))
    assert found[0] == found[1]
    assert math.sqrt(found[0]["gradient"][0]) > 0


class Unsteady(nn.Module):
    """A block whose sums come in another order each time, as kernels that are not deterministic have them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.calls = block, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.block(x)
        return out * (1.0 + 2.0**-20 * self.calls)


@pytest.mark.parametrize("node", [0, 1, 2])
def test_noise_is_made_again_where_activations_come_back_up_to_rounding(node: int) -> None:
    found = []
    for checkpointed in (False, True):
        model, micro_batches = MlpModel(checkpointed=checkpointed), batch(1)
        model.blocks = nn.ModuleList([Whole(*map(Unsteady, model.blocks))])
        tape = recorded(model, micro_batches)
        with tape.comparing(Injection(node, "forward", "tokens", 0.05, SEED)) as changes:
            run(model, tape, micro_batches)
        found.append(changes)
    for j in range(3):
        assert found[1].gradient[j] == pytest.approx(found[0].gradient[j], rel=1e-3)
        assert found[1].product[j] == pytest.approx(found[0].product[j], rel=1e-2, abs=1e-8)


def test_reentrant_checkpoints_are_refused() -> None:
    with pytest.raises(ModelError, match="use_reentrant=False"):
        recorded(MlpModel(checkpointed=True, reentrant=True), batch(1))
