"""AdamW under FSDP2 with states on the host: torch's own AdamW on the same shards, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from distributed import spawn
from late_link import LateLink
from states import states_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from scrimp.config import OptimizerConfig
from scrimp.optim import AdamW, Homes
from scrimp.optim.streaming import StreamedAdamW
from scrimp.runtime.memory import HostArena, HostWeights

pytestmark = pytest.mark.slow

RANKS = 2
CPU = torch.device("cpu")
TRAIN = OptimizerConfig(clip=0.0, weight_decay=0.1, master_weights=False, moments="fp32")
MICRO_BATCHES = 2


class Small(nn.Module):
    """Rows that divide by the ranks, rows that do not, and one row that leaves a rank with nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(*sizes) for sizes in ((12, 16), (16, 7), (7, 16)))
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)  # type: ignore[no-any-return]


def block_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


def sharded(*, is_mixed: bool = False, on_host: bool = False) -> Small:
    model = Small()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if is_mixed else None, reduce_dtype=torch.float32
    )
    offload = CPUOffloadPolicy(pin_memory=False) if on_host else OffloadPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return model


def homes(optimizer: frozenset[int]) -> Homes:
    arena, link = HostArena(1 << 20, CPU, poisons=True), LateLink(CPU)
    return Homes(arena, link, block_of, HostWeights({}, arena, link), frozenset(), optimizer)


def make(model: Small, train: OptimizerConfig = TRAIN, on_host: tuple[int, ...] = ()) -> StreamedAdamW:
    return StreamedAdamW(dict(model.named_parameters()), train, homes(frozenset(on_host)), seed=5)


def passes(model: Small, number: int) -> None:
    """Sums of two micro-batches, other ones on every rank."""
    generator = torch.Generator().manual_seed(100 * number + torch.distributed.get_rank())
    for _ in range(MICRO_BATCHES):
        model(torch.randn(5, 12, generator=generator)).square().sum().backward()


def steps(model: Small, optimizer: AdamW, limit: float = 0.0, first: int = 0) -> list[float]:
    norms = []
    for number in range(first, first + 3):
        passes(model, number)
        norms.append(optimizer.gradient_norm())
        optimizer.clip(norms[-1], limit)
        optimizer.step(1e-2)
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    return norms


def weights(model: Small) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.full_tensor().detach().clone()
    return found


def by_torch(model: Small, limit: float = 0.0) -> list[float]:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(
        groups, lr=1e-2, betas=(TRAIN.beta1, TRAIN.beta2), eps=TRAIN.eps, fused=True
    )
    norms = []
    for number in range(3):
        passes(model, number)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))
        assert isinstance(norm, DTensor)
        norms.append(float(norm.full_tensor()))
        reference.step()
        reference.zero_grad()
    return norms


def on_a_rank(rank: int) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for is_mixed in (False, True):
        model = sharded(is_mixed=is_mixed)
        found[f"torch {is_mixed}"] = by_torch(model), weights(model)
        for on_host in ((), (0,), (1, 2), (0, 1, 2)):
            model = sharded(is_mixed=is_mixed)
            found[f"{on_host} {is_mixed}"] = steps(model, make(model, on_host=on_host)), weights(model)
    model = sharded(on_host=True)
    found["offloaded by FSDP2 False"] = steps(model, make(model)), weights(model)
    model = sharded()
    found["torch clipped"] = by_torch(model, 0.5), weights(model)
    for on_host in ((), (0, 1, 2)):
        model = sharded()
        found[f"{on_host} clipped"] = steps(model, make(model, on_host=on_host), 0.5), weights(model)
    eight_bit = dataclasses.replace(TRAIN, moments="8bit")
    for on_host in ((), (0, 1, 2)):
        model = sharded()
        found[f"{on_host} 8bit"] = steps(model, make(model, eight_bit, on_host)), weights(model)
    found["resumed"] = resumed()
    return found


def resumed() -> tuple[list[float], dict[str, Tensor]]:
    """Three steps that went on from the state of none, by other choices."""
    model = sharded()
    first = make(model, on_host=(0, 1))
    passes(model, 0)
    norms = [first.gradient_norm()]
    first.step(1e-2)
    first.zero_grad()
    second = make(model, on_host=(2,))
    for (name, kept), (other, target) in zip(
        states_of(first).items(), states_of(second).items(), strict=True
    ):
        assert name == other
        target.copy_(kept)
    second.restore_updates(1)
    for number in (1, 2):
        passes(model, number)
        norms.append(second.gradient_norm())
        second.step(1e-2)
        second.zero_grad()
    return norms, weights(model)


@functools.cache
def ranks(folder: Path) -> list[dict[str, tuple[list[float], dict[str, Tensor]]]]:
    return spawn(RANKS, on_a_rank, folder)


@pytest.fixture
def found(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, tuple[list[float], dict[str, Tensor]]]]:
    folder = tmp_path_factory.getbasetemp() / "sharded"
    folder.mkdir(exist_ok=True)
    return ranks(folder)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("is_mixed", [False, True], ids=["fp32", "mixed"])
@pytest.mark.parametrize("on_host", ["()", "(0,)", "(1, 2)", "(0, 1, 2)"])
def test_shards_are_updated_as_by_torch(found, on_host: str, is_mixed: bool) -> None:
    for rank in found:
        (norms, mine), (oracle_norms, oracle) = rank[f"{on_host} {is_mixed}"], rank[f"torch {is_mixed}"]
        assert norms == pytest.approx(oracle_norms, rel=1e-6)
        assert same(mine, oracle)


def test_the_norm_is_of_all_ranks_and_clips_alike_everywhere(found) -> None:
    assert found[0]["() clipped"][0] == found[1]["() clipped"][0]
    for rank in found:
        norms, mine = rank["() clipped"]
        oracle_norms, oracle = rank["torch clipped"]
        assert norms == pytest.approx(oracle_norms, rel=1e-6)
        assert min(norms) > 0.5
        for name, tensor in oracle.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-5, atol=1e-6)
        assert same(rank["(0, 1, 2) clipped"][1], mine)


def test_shards_that_fsdp_keeps_on_the_host_are_updated_there(found) -> None:
    for rank in found:
        assert same(rank["offloaded by FSDP2 False"][1], rank["torch False"][1])


def test_eight_bit_states_on_the_host_change_no_bit(found) -> None:
    for rank in found:
        assert same(rank["(0, 1, 2) 8bit"][1], rank["() 8bit"][1])
        assert not same(rank["() 8bit"][1], rank["() False"][1])


def test_a_run_goes_on_with_other_choices(found) -> None:
    for rank in found:
        assert rank["resumed"][0] == rank["() False"][0]
        assert same(rank["resumed"][1], rank["() False"][1])
