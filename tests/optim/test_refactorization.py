"""Factors of the same product, balanced: float64, a model's output, states, and parts on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from decoder_reference import FAMILIES, filled
from distributed import spawn
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from states import states_of
from torch import Tensor

from scrimp.config import OptimizerConfig
from scrimp.errors import TrainingError
from scrimp.optim.adamw import AdamW
from scrimp.optim.refactorization import balanced, refactor
from scrimp.parts import TensorPart, part_of

LAYERS = [
    f"blocks.{n}.{one}"
    for n in (0, 1)
    for one in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
]


def factors(rows: int, columns: int, rank: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(rank, columns, generator=generator) / scale
    return first, torch.randn(rows, rank, generator=generator) * scale


@examples(30)
@given(
    sides=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    share=st.floats(0, 1),
    seed=st.integers(0, 9),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_the_product_stays_and_the_factors_are_balanced(
    sides: tuple[int, int], share: float, seed: int, scale: float
) -> None:
    rank = 1 + round(share * (min(sides) - 1))
    first, second = factors(*sides, rank, seed, scale)
    a, b = (one.double() for one in balanced(first, second))
    before, after = second.double() @ first.double(), b @ a
    assert (after - before).norm() < 1e-6 * before.norm()
    expected = torch.linalg.svdvals(before)[:rank]
    for gram in (b.t() @ b, a @ a.t()):
        torch.testing.assert_close(gram, expected.diag(), rtol=0, atol=3e-6 * float(expected[0]))
    assert bool((b.gather(0, b.abs().argmax(0, keepdim=True)) > 0).all())


def test_balanced_factors_stay_as_they_are() -> None:
    once = balanced(*factors(20, 12, 5))
    for one, again in zip(once, balanced(*once), strict=True):
        torch.testing.assert_close(again, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_computes_what_it_did_and_only_averages_of_factors_are_cleared(dtype: torch.dtype) -> None:
    model = filled(replace(FAMILIES["qwen2"], rank=5), dtype=dtype)
    is_rounded = dtype == torch.bfloat16
    settings = OptimizerConfig(master_weights=is_rounded, moments="8bit" if is_rounded else "fp32")
    optimizer, tokens = AdamW(dict(model.named_parameters()), settings), torch.arange(48)[None] % 61
    model.logits(model(tokens)).float().square().mean().backward()
    optimizer.step(1e-3)
    optimizer.zero_grad()

    def logits() -> Tensor:
        """That of the exact weights, in float32."""
        exact = filled(replace(model.architecture))
        targets = {name: target.detach().float() for name, target in optimizer.targets().items()}
        exact.load_state_dict(targets)
        return exact.logits(exact(tokens)).detach()

    before, weights = logits(), {name: p.detach().clone() for name, p in model.named_parameters()}
    refactor(
        LAYERS,
        {name: part_of(parameter) for name, parameter in model.named_parameters()},
        dict(optimizer.parts()),
        None,
    )
    assert float((logits() - before).abs().max()) < 3e-6 * float(before.abs().max())
    for name, parameter in model.named_parameters():
        is_factor = name.endswith(("A.weight", "B.weight"))
        assert torch.equal(parameter, weights[name]) != is_factor, name
        assert torch.equal(parameter, optimizer.targets()[name].to(dtype)), name
    for name, state in states_of(optimizer).items():
        is_cleared = "A.weight" in name or "B.weight" in name
        assert bool(state.any()) == (not is_cleared or name.endswith("master")), name


def on_a_rank(rank: int, sizes: tuple[int, int, int]) -> list[Tensor]:
    """Two layers of which ranks have some rows, and of the second also a copy that is not written."""
    found = []
    for number, name in enumerate(("x", "y")):
        whole = dict(zip((f"{name}.A.weight", f"{name}.B.weight"), factors(*sizes, seed=number), strict=True))
        parts, states = {}, {}
        for key, tensor in whole.items():
            half = -(-len(tensor) // 2)
            local = (tensor if number else tensor[:half] if rank == 0 else tensor[half:]).clone()
            offsets = (half * (rank == 1 and not number), 0)
            parts[key] = TensorPart(local, tuple(tensor.shape), offsets, is_writer=rank == 0 or not number)
            states[f"{key}.exp_avg"] = TensorPart(torch.ones_like(local), tuple(tensor.shape), offsets)
        refactor([name], parts, states, dist.group.WORLD)
        assert not any(part.local.any() for part in states.values())
        found += [part.local for part in parts.values()]
    return found


@pytest.mark.slow
def test_parts_on_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    sizes = (21, 14, 5)
    one, two = spawn(2, on_a_rank, tmp_path, sizes)
    shared, copied = (balanced(*factors(*sizes, seed=seed)) for seed in (0, 1))
    for number, whole in enumerate(shared):
        assert torch.equal(torch.cat([one[number], two[number]]), whole)
    for number, whole in enumerate(copied, start=2):
        assert torch.equal(one[number], whole)
        assert torch.equal(two[number], whole)


def test_factors_that_are_not_finite_are_refused() -> None:
    weights = {f"layer.{name}": part_of(torch.full((4, 4), torch.nan)) for name in ("A.weight", "B.weight")}
    with pytest.raises(TrainingError, match="layer are not finite"):
        refactor(["layer"], weights, {}, None)
