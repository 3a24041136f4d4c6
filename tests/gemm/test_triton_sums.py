"""Sums of gradients in one kernel: the bits of torch's operators, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scrimp.errors import PlanError
from scrimp.formats import Noise
from scrimp.gemm import kernels
from scrimp.optim import targets
from scrimp.optim.targets import add_by_operators

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEYS = st.integers(0, 2**64 - 1)


def both(total: torch.Tensor, gradient: torch.Tensor, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum by operators, and by the kernel."""
    expected, found = total.clone(), total.to(DEVICE, copy=True)
    add_by_operators(expected, gradient, noise)
    kernels.add_rounded(found, gradient.to(DEVICE), noise)
    return expected, found.cpu()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """All of them; of a NaN any (torch's own differ between vectors and their rests)."""
    are_same = (one.view(torch.int16) == other.view(torch.int16)) | (one.isnan() & other.isnan())
    return bool(are_same.all())


@settings(max_examples=12)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 1100),
    key=KEYS,
    first=st.tuples(st.integers(0, 2**33), st.integers(0, 2**33)),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    seed=st.integers(0, 1000),
)
def test_sums_are_those_of_torchs_operators_bit_for_bit(rows, columns, key, first, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    total, gradient = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    scales = 10.0 ** torch.randint(-40, 39, (rows, columns), generator=generator)
    noise = Noise(key, first_row=first[0], first_column=first[1])
    expected, found = both(total.bfloat16(), (gradient * scales).to(dtype), noise)
    assert same_bits(expected, found)


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_keys_that_a_launcher_might_take_for_constants(key):
    expected, found = both(torch.zeros(3, 5).bfloat16(), torch.full((3, 5), 1.001), Noise(key, 1, 1))
    assert torch.equal(expected, found)


def test_what_is_not_finite_is_nan_and_zeros_keep_their_sign():
    inf, nan, most = float("inf"), float("nan"), torch.finfo(torch.float32).max
    total = torch.tensor([[1.0, inf, -inf, nan, -0.0, 0.0, inf, 3.0e38, -1e-45]]).bfloat16()
    gradient = torch.tensor([[nan, 1.0, 0.0, inf, -0.0, -0.0, -inf, most, -1e-45]])
    expected, found = both(total, gradient, Noise(7))
    assert same_bits(expected, found)


def test_small_gradients_are_not_lost():
    """Eight times a quarter of a step of bf16 from 1 on: rounded to nearest nothing would move."""
    total = torch.ones(64, 512, dtype=torch.bfloat16, device=DEVICE)
    gradient = torch.full_like(total, 2.0**-9)
    for number in range(8):
        kernels.add_rounded(total, gradient, Noise(3).derive(number))
    moved = float(total.float().mean()) - 1.0
    assert moved == pytest.approx(8 * 2.0**-9, rel=0.03)


def test_the_kernel_is_tried_before_it_runs_and_warns_where_it_is_wrong(monkeypatch):
    """A GPU's way in `add_rounded`, taken here in the interpreter."""
    targets._may_run.cache_clear()
    assert targets._may_run(DEVICE)
    targets._may_run.cache_clear()
    monkeypatch.setattr(kernels, "add_rounded", lambda total, gradient, noise: total.add_(gradient))
    with pytest.warns(UserWarning, match="its numbers are not theirs"):
        assert not targets._may_run(DEVICE)
    targets._may_run.cache_clear()
    monkeypatch.setattr(kernels, "add_rounded", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        assert not targets._may_run(DEVICE)
    targets._may_run.cache_clear()


def test_an_empty_sum_stays():
    """A rank may have no rows of a parameter: by operators this ended in a traceback."""
    expected, found = both(torch.empty(0, 4, dtype=torch.bfloat16), torch.empty(0, 4), Noise(1))
    assert found.shape == expected.shape == (0, 4)


@pytest.mark.parametrize(
    ("total", "gradient", "noise"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 4), Noise()),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(2, 5), Noise()),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(2, 4).half(), Noise()),
        (torch.zeros(4, 2).bfloat16().t(), torch.zeros(2, 4), Noise()),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(2, 4), Noise(columns=(range(2), range(6, 8)))),
    ],
)
def test_what_the_kernel_does_not_read_is_refused(total, gradient, noise):
    with pytest.raises(PlanError):
        kernels.add_rounded(total.to(DEVICE), gradient.to(DEVICE), noise)
