"""AdamW's update in one kernel: the bits of torch's operators, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from scrimp.config import OptimizerConfig
from scrimp.errors import PlanError
from scrimp.formats import Noise
from scrimp.gemm import kernels
from scrimp.gemm.kernels import adamw
from scrimp.optim import AdamW, MomentFormat, Moments, Step
from scrimp.optim.moments import dense

updates: Any = importlib.import_module("scrimp.optim.update")  # the package has a function of this name
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = Step(3, 0.01, 0.9, 0.95, 1e-8, 0.1, clip=0.3)
DTYPES = (torch.float32, torch.bfloat16)
FORMATS: tuple[MomentFormat, ...] = ("fp32", "bf16", "8bit")
COMBINATIONS = list(itertools.product(DTYPES, DTYPES, FORMATS))
INF, NAN, MOST = float("inf"), float("nan"), torch.finfo(torch.float32).max


def right_sqrt(x: Tensor, *, out: Tensor) -> Tensor:
    """As a GPU rounds it, and the standard wants it: MKL's, which torch takes on a CPU, are a last place off."""
    return out.copy_(torch.from_numpy(np.sqrt(x.numpy())))


def by_operators(*arguments: Any) -> None:
    with patch.object(torch, "sqrt", right_sqrt):
        updates.update_by_operators(*arguments)


def copied(moments: Moments, device: torch.device) -> Moments:
    return Moments.over({name: one.to(device, copy=True) for name, one in moments.tensors().items()})


def both(
    weight: Tensor, gradient: Tensor, moments: Moments, step: Step, noise: Noise
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All states after the step by operators, and by the kernel."""
    results = []
    for update_by, device in ((by_operators, torch.device("cpu")), (updates.update_by_kernel, DEVICE)):
        own, averages = weight.to(device, copy=True), copied(moments, device)
        with np.errstate(all="ignore"):  # of the interpreter
            update_by(own, gradient.to(device, copy=True), averages, step, noise)
        results.append({"weight": own, **averages.tensors()})
    return results[0], {name: one.cpu() for name, one in results[1].items()}


def started(weight: Tensor, format_: MomentFormat, seed: int = 0) -> Moments:
    """Averages after two gradients of very different sizes."""
    generator, moments = torch.Generator().manual_seed(seed), Moments.zeros(format_, weight)
    for number in (1, 2):
        gradient = torch.randn(weight.shape, generator=generator)
        gradient *= 10.0 ** torch.randint(-9, 3, weight.shape, generator=generator)
        updates.update_by_operators(
            weight.clone(), gradient, moments, dataclasses.replace(STEP, number=number), Noise(number)
        )
    return moments


def assert_same_bits(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """But of a NaN any, and of codes whose scale is not finite."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    for name, one in expected.items():
        other, kind = found[name], kinds[one.element_size()]
        are_same = one.view(kind) == other.view(kind)
        if one.is_floating_point():
            are_same |= one.isnan() & other.isnan()
        else:
            scales = expected[f"{name}_scale"].repeat_interleave(128, 1)[:, : one.shape[1]]
            are_same |= ~scales.isfinite()
        assert are_same.all(), (name, one[~are_same], other[~are_same])


@pytest.mark.parametrize(("weight", "gradient", "format_"), COMBINATIONS)
@pytest.mark.every(3)
def test_every_format_has_the_bits_of_torchs_operators(
    weight: torch.dtype, gradient: torch.dtype, format_: MomentFormat
) -> None:
    generator = torch.Generator().manual_seed(1)
    own, g = (torch.randn(9, 130, generator=generator) for _ in range(2))
    own, g = own.to(weight), g.to(gradient)
    expected, found = both(own, g, started(own, format_), STEP, Noise(2**63 + 5, 2**40, 7))
    assert not torch.equal(expected["weight"], own)
    assert_same_bits(expected, found)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, adamw.ROWS + 1),
    columns=st.integers(1, 200),
    dtypes=st.sampled_from(COMBINATIONS),
    key=st.integers(0, 2**64 - 1),
    first=st.tuples(st.integers(0, 2**33), st.integers(0, 2**33)),
    number=st.integers(1, 100_000),
    size=st.sampled_from([1e-30, 1e-12, 1e-3, 1.0, 1e18]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_size_has_the_bits_of_torchs_operators(
    rows, columns, dtypes, key, first, number, size, seed
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(dtypes[0])
    gradient = (size * torch.randn(rows, columns, generator=generator)).to(dtypes[1])
    step = dataclasses.replace(STEP, number=number, clip=[1.0, 1e-3][seed % 2])
    expected, found = both(weight, gradient, started(weight, dtypes[2], seed), step, Noise(key, *first))
    assert_same_bits(expected, found)


SPOILT = [NAN, INF, -INF, 0.0, -0.0, MOST, -MOST, 1e-45, -1e-45, 1e-40, 3e38, 1.0, 2.0**70, -(2.0**121)]


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_zeros_and_denormals_are_alike(dtype: torch.dtype, format_: MomentFormat) -> None:
    """Each alone among ones, and beside zeros: a block of 128 has one scale."""
    rows = torch.zeros(8, 2 * 128 + 3)
    for number, value in enumerate(SPOILT):
        rows[number % 8, 128 * (number // 8)] = value
    rows[3:6] += 1.0
    gradient = rows.to(dtype)
    weight = torch.cat([gradient[4:], gradient[:4]])
    moments = started(torch.ones_like(weight), format_)
    expected, found = both(weight, gradient, moments, dataclasses.replace(STEP, clip=1.0), Noise(7))
    assert_same_bits(expected, found)
    assert not expected["weight"].isfinite().all()
    for one in (expected, found):
        average = Moments.over({name: tensor for name, tensor in one.items() if name != "weight"})
        assert not dense(average.square, weight)[0, 0].isfinite()
        assert dense(average.mean, weight)[0, 128].isfinite()


def test_a_nan_whose_mantissa_is_full_stays_one_in_eight_bits() -> None:
    """A GPU's own NaN: a scale that is rounded up by its integer carries it into minus zero."""
    nan = torch.full((1, 200), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    weight = torch.ones(1, 200)
    moments = Moments.zeros("8bit", weight)
    for results in both(weight, nan, moments, STEP, Noise(1)):
        averages = Moments.over({name: one for name, one in results.items() if name != "weight"})
        assert dense(averages.mean, weight).isnan().all()
        assert dense(averages.square, weight).isnan().all()


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_keys_and_sizes_that_a_launcher_might_take_for_constants(key: int) -> None:
    weight, gradient = torch.full((1, 1), 1.001).bfloat16(), torch.ones(1, 1).bfloat16()
    expected, found = both(weight, gradient, started(weight, "8bit"), STEP, Noise(key, 1, 1))
    assert_same_bits(expected, found)


def test_zero_gradients_leave_averages_of_zero_and_what_decay_keeps() -> None:
    weight = torch.ones(2, 130)
    expected, found = both(weight, torch.zeros(2, 130), Moments.zeros("8bit", weight), STEP, Noise(1))
    assert_same_bits(expected, found)
    averages = Moments.over({name: one for name, one in found.items() if name != "weight"})
    assert not dense(averages.mean, weight).any()
    assert not dense(averages.square, weight).any()
    torch.testing.assert_close(found["weight"], torch.full((2, 130), 1 - 0.01 * 0.1))


@pytest.mark.parametrize("masters", [False, True])
def test_an_optimizer_takes_one_launch_for_a_parameter_and_moves_as_by_operators(masters: bool) -> None:
    """A GPU's way in `update`, taken here in the interpreter: matrices, a vector, a number; clipped, with masters."""
    config = OptimizerConfig(master_weights=masters, moments="8bit")
    results, launches = [], []

    def launched(kernel: Any, *arguments: Any, **options: Any) -> None:
        launches.append(kernel)
        run(kernel, *arguments, **options)

    run = adamw.run
    for takes_kernel in (False, True):
        generator = torch.Generator().manual_seed(0)
        named = {
            name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(DEVICE))
            for name, shape in (("matrix", (3, 150)), ("stack", (2, 3, 5)), ("norm", (9,)), ("number", ()))
        }
        optimizer = AdamW(named, config, seed=5)
        with (
            patch.object(updates, "_takes_kernel", lambda *_, takes=takes_kernel: takes),
            patch.object(adamw, "run", launched),
            patch.object(torch, "sqrt", torch.sqrt if DEVICE.type == "cuda" else right_sqrt),
        ):
            for parameter in named.values():
                (parameter.float() ** 2).sum().backward()
            norm = optimizer.gradient_norm()
            optimizer.clip(norm, norm / 3)
            optimizer.step(0.01)
        results.append({name: one.local for name, one in optimizer.parts()} | dict(named))
    # Vectors keep averages in float32: beside a master all is float32, which torch's own kernel updates.
    assert len(launches) == (2 if masters else 4)
    for name, one in results[0].items():
        assert torch.equal(one, results[1][name]), name


def test_the_kernel_is_tried_before_it_runs_and_warns_where_it_is_wrong(monkeypatch) -> None:
    asked = DEVICE, torch.bfloat16, torch.bfloat16, "8bit"
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "sqrt", right_sqrt)
    updates._may_run.cache_clear()
    assert updates._may_run(*asked)
    updates._may_run.cache_clear()
    monkeypatch.setattr(kernels, "update_adamw", lambda weight, *_, **numbers: weight.mul_(numbers["kept"]))
    with pytest.warns(
        UserWarning, match=r"AdamW \(8bit\) kernel does not run here.*its numbers are not theirs"
    ):
        assert not updates._may_run(*asked)
    updates._may_run.cache_clear()
    monkeypatch.setattr(kernels, "update_adamw", lambda *_, **numbers: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        assert not updates._may_run(*asked)
    updates._may_run.cache_clear()


def test_a_parameter_without_rows_stays() -> None:
    """A rank may have none."""
    weight = torch.empty(0, 4)
    expected, found = both(weight, torch.empty(0, 4), Moments.zeros("8bit", weight), STEP, Noise(1))
    assert all(one.shape == found[name].shape for name, one in expected.items())


def averages(**changes: Tensor) -> dict[str, Tensor]:
    return {"exp_avg": torch.zeros(2, 4), "exp_avg_sq": torch.zeros(2, 4)} | changes


@pytest.mark.parametrize(
    ("weight", "gradient", "states", "noise"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 5), averages(), Noise()),
        (torch.zeros(2, 4).half(), torch.zeros(2, 4), averages(), Noise()),
        (torch.zeros(4, 2).t(), torch.zeros(2, 4), averages(), Noise()),
        (torch.zeros(2, 4), torch.zeros(2, 4), averages(exp_avg=torch.zeros(2, 4).half()), Noise()),
        (torch.zeros(2, 4), torch.zeros(2, 4), averages(exp_avg_sq=torch.zeros(4, 2).t()), Noise()),
        (torch.zeros(2, 4), torch.zeros(2, 4), averages(exp_avg=torch.zeros(2, 4).char()), Noise()),
        (
            torch.zeros(2, 4),
            torch.zeros(2, 4),
            averages(exp_avg=torch.zeros(2, 4).char(), exp_avg_scale=torch.zeros(1, 2).bfloat16()),
            Noise(),
        ),
        (torch.zeros(2, 4), torch.zeros(2, 4), averages(), Noise(columns=(range(2), range(6, 8)))),
    ],
)
def test_what_the_kernel_does_not_read_is_refused(weight, gradient, states, noise) -> None:
    numbers = dict.fromkeys(("clip", "beta1", "beta2", "root", "eps", "rate", "kept"), 0.5)
    states = {name: one.to(DEVICE) for name, one in states.items()}
    with pytest.raises(PlanError):
        kernels.update_adamw(weight.to(DEVICE), gradient.to(DEVICE), states, noise, **numbers)
