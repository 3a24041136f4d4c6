"""The steps of GaLore and Fira against their published formulas, written out in float64 with numpy's own SVD."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from low_rank_reference import Matrix, published
from torch import Tensor

from scrimp.optim.low_rank import LowRankState, direction, leading_vectors, state_shapes
from scrimp.optim.update import Step

SHAPES = [(24, 40), (40, 24), (32, 32)]
BETA1, BETA2, EPS, RANK, EVERY = 0.9, 0.95, 1e-8, 6, 3


def gradients(shape: tuple[int, int], count: int, seed: int = 0) -> list[Matrix]:
    """Matrices whose singular values fall from 1 to 1/30, so that each direction is one of its own."""
    drawn = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        u, s, v = np.linalg.svd(drawn.standard_normal(shape), full_matrices=False)
        found.append(u * (10 * np.logspace(0, -1.5, len(s))) @ v)
    return found


def stepped(given: Sequence[Matrix], rank: int, *, fira: bool) -> tuple[list[Matrix], LowRankState]:
    rows, columns = given[0].shape
    shapes = state_shapes(rows, columns, rank, keeps_rest=fira)
    state = LowRankState(**{name: torch.zeros(shape) for name, shape in shapes.items()})
    found = []
    for number, g in enumerate(given, start=1):
        step = Step(number, 1.0, BETA1, BETA2, EPS, 0.0)
        made = direction(state, torch.from_numpy(g).float(), step, refresh=number % EVERY == 1)
        found.append(made.double().numpy())
    return found, state


@pytest.mark.parametrize("fira", [False, True], ids=["galore", "fira"])
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_are_those_of_the_published_formulas(shape: tuple[int, int], fira: bool) -> None:
    given = gradients(shape, 8)
    expected, limited = published(given, RANK, EVERY, BETA1, BETA2, EPS, fira=fira)
    assert 0 < limited < len(given) - 1 or not fira
    found, state = stepped(given, RANK, fira=fira)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-4)
    assert tuple(state.exp_avg.shape) == (RANK, max(shape))


def test_what_is_left_out_grows_by_a_hundredth_where_it_would_grow_to_five_times() -> None:
    one = gradients((24, 40), 1)[0]
    u, sizes, v = np.linalg.svd(one, full_matrices=False)
    rest = (u[:, RANK:] * sizes[RANK:]) @ v[RANK:]
    found, state = stepped([one, one, one + 4 * rest], RANK, fira=True)
    inside, _ = stepped([one, one, one + 4 * rest], RANK, fira=False)
    rests = [float(np.linalg.norm(whole - part)) for whole, part in zip(found, inside, strict=True)]
    assert rests[1] == pytest.approx(rests[0], rel=1e-5)
    assert rests[2] == pytest.approx(1.01 * rests[1], rel=1e-5)
    assert float(state.rest_norm) == pytest.approx(rests[2], rel=1e-5)


def test_a_rest_of_nothing_limits_nothing_afterwards() -> None:
    one = gradients((24, 40), 1)[0]
    found, _ = stepped([one, np.zeros_like(one), one], RANK, fira=True)
    inside, _ = stepped([one, np.zeros_like(one), one], RANK, fira=False)
    np.testing.assert_allclose(found[1], inside[1])
    assert np.linalg.norm(found[2] - inside[2]) > 0.1 * np.linalg.norm(inside[2])


@pytest.mark.parametrize("rank", [24, 100])
@pytest.mark.parametrize("fira", [False, True], ids=["galore", "fira"])
def test_a_matrix_that_is_no_larger_than_the_rank_moves_by_adam(rank: int, fira: bool) -> None:
    given = gradients((40, 24), 4)
    found, _ = stepped(given, rank, fira=fira)
    weight = torch.nn.Parameter(torch.zeros(40, 24, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=1.0, betas=(BETA1, BETA2), eps=EPS)
    for g, mine in zip(given, found, strict=True):
        before = weight.detach().clone()
        weight.grad = torch.from_numpy(g)
        adam.step()
        np.testing.assert_allclose(mine, (before - weight.detach()).numpy(), atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_vectors_are_singular_ones_to_the_last_with_a_sign_of_their_own(scale: float) -> None:
    """Down to singular values of 3e-5 of the largest, which an eigenvector of a float32 square would not know."""
    drawn = np.random.default_rng(1)
    u, _, v = np.linalg.svd(drawn.standard_normal((30, 70)), full_matrices=False)
    exact = scale * (u * np.logspace(0, -4.5, 30)) @ v
    matrix = torch.from_numpy(exact).float()
    found = leading_vectors(matrix, 30)
    expected = np.linalg.svd(matrix.double().numpy())[0]
    cosines = (found.numpy() * expected).sum(0)
    np.testing.assert_allclose(np.abs(cosines), 1, atol=1e-6)
    assert (found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all()
    assert torch.equal(leading_vectors(-matrix, 30), found)


def test_a_gradient_of_nothing_gives_vectors_and_moves_nothing() -> None:
    nothing: Tensor = torch.zeros(8, 12)
    shapes = state_shapes(8, 12, 3, keeps_rest=True)
    state = LowRankState(**{name: torch.zeros(shape) for name, shape in shapes.items()})
    made = direction(state, nothing, Step(1, 1.0, BETA1, BETA2, EPS, 0.0), refresh=True)
    assert not made.any()
    torch.testing.assert_close(state.projector.T @ state.projector, torch.eye(3))
