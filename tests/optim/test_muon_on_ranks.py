"""Muon and optimizers of one's own on several ranks: the updates of one process, the bytes of the formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from distributed import spawn
from parity import Bounds, Case, Trained, all_trained, check_parity, compared, made
from torch import Tensor

from scrimp import user_code
from scrimp.optim.newton_schulz import orthogonalised
from scrimp.optim.shared_maps import Map, SharedMaps, maps_of
from scrimp.parts import TensorPart
from scrimp.profiler.collectives import counting_collectives
from scrimp.world import World

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_optimizer.py"
MUON = {"optimizer.name": "muon", "optimizer.lr": 1e-3, "model.num_layers": 2}
BF16 = {"precision": "bf16", "train.parameters": "bf16"}
TWO = {
    "shards": Case(settings=MUON, with_documents=True),
    "shared rows, zero 1": Case({"cp": 2, "zero": 1}, MUON),
    "pieces of layers": Case({"tp": 2}, MUON),
    "stages": Case({"pp": 2}, MUON),
    "pieces of experts": Case({"etp": 2}, MUON, "mixtral-8m", routers=10.0),
    "stages of experts": Case({"pp": 2}, MUON, "mixtral-8m", routers=10.0, counts_bytes=False),
    "rows that do not divide": Case(settings={**MUON, "model.ffn_width": 121}),
}
MASTERS = Case(settings=MUON | BF16, bounds=Bounds(gradients=1e-2, later=1e-3), counts_bytes=False)
FOUR = {
    "stages of shards": Case({"pp": 2, "fsdp": 2}, MUON, counts_bytes=False),
    "stages of pieces": Case({"pp": 2, "tp": 2}, MUON, counts_bytes=False),
    "stages of shared experts": Case(
        {"pp": 2, "ep": 2}, MUON, "mixtral-8m", routers=10.0, counts_bytes=False
    ),
    "copies of shards": Case({"dp": 2, "fsdp": 2}, MUON),
    "pieces and shards": Case({"tp": 2, "fsdp": 2}, MUON),
    "experts of copies": Case({"dp": 2, "fsdp": 2, "ep": 2}, MUON, "mixtral-8m", routers=10.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_ranks_train_as_one_process(ranks: int, cases: Mapping[str, Case], tmp_path: Path) -> None:
    # Newton-Schulz is in bf16: a last bit more or less of a gradient may be a last bit of bf16 in an update.
    near = {name: dataclasses.replace(case, bounds=Bounds(later=1e-4)) for name, case in cases.items()}
    check_parity(ranks, {**near, "bf16": MASTERS} if ranks == 2 else near, tmp_path)


SHAPES = {"fused": (9, 8), "down": (4, 10), "router": (3, 8), "small": (2, 8)}
ROWS = {"fused": (4, 5), "down": (4,), "router": (3,), "small": (2,)}


def parts(rank: int, tensors: Mapping[str, Tensor]) -> dict[str, TensorPart]:
    """Three ranks: of both maps of a fused matrix some rows, of another its columns, a copy, and rows on one alone."""
    fused, down, router, small = tensors.values()
    rows = [(range(2), range(4, 6)), (range(2, 3), range(6, 7)), (range(3, 4), range(7, 9))][rank]
    columns = [slice(0, 4), slice(4, 7), slice(7, 10)][rank]
    here = torch.cat([fused[one.start : one.stop] for one in rows])
    alone = small if rank == 1 else small[:0]
    return {
        "fused": TensorPart(here, (9, 8), (rows[0].start, 0), rows=rows),
        "down": TensorPart(down[:, columns].clone(), (4, 10), (0, columns.start)),
        "router": TensorPart(router.clone(), (3, 8), (0, 0), is_writer=rank == 0),
        "small": TensorPart(alone.clone(), (2, 8), (0 if rank == 1 else 2, 0)),
    }


def matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def exchanged(rank: int) -> tuple[dict[str, Tensor], float, list[str]]:
    own = parts(rank, matrices())
    maps = maps_of(ROWS, {name: shape[1] for name, shape in SHAPES.items()})
    shared = SharedMaps(maps, own, None, torch.bfloat16)
    found = {name: torch.full_like(part.local, torch.nan) for name, part in own.items()}
    seen: list[str] = []

    def follow(one: Map, rows: slice, move: Tensor) -> None:
        found[one.name][rows] = move.float() * one.rows

    def make(one: Map) -> Callable[[Tensor], Tensor]:
        def made(whole: Tensor) -> Tensor:
            seen.append(str(tuple(whole.shape)))
            return orthogonalised(whole)

        assert one in shared.owned
        return made

    with counting_collectives() as counted:
        shared.update(SHAPES, lambda name, rows: own[name].local[rows], make, follow)
    return found, counted.sent(), seen


@pytest.mark.slow
def test_each_map_is_whole_on_one_rank_and_the_same_bit_for_bit(tmp_path: Path) -> None:
    expected = {
        name: torch.cat(
            [orthogonalised(one.bfloat16()).float() * len(one) for one in whole.split(ROWS[name])]
        )
        for name, whole in matrices().items()
    }
    ranks = spawn(3, exchanged, tmp_path)
    for rank, (found, _, _) in enumerate(ranks):
        for name, part in parts(rank, expected).items():
            assert torch.equal(found[name], part.local), (rank, name)
    # By hand: the first owns 5 x 8 and the router, the second 4 x 10 and 2 x 8, the third 4 x 8.
    to_owners, back = (16 + 16, 8 + 8, 16 + 12), (8 + 16 + 2 * 24, 16 + 12, 16 + 8)
    assert [sent for _, sent, _ in ranks] == [
        2 * (there + here) for there, here in zip(to_owners, back, strict=True)
    ]
    assert sorted(shape for _, _, seen in ranks for shape in seen) == sorted(
        str((rows, SHAPES[name][1])) for name, sizes in ROWS.items() for rows in sizes
    )


def in_a_step(rank: int) -> tuple[float, float]:
    _, executable, optimizer, lr = made(Case(settings=MUON, micro_batches=1), World(rank, 2), 2)
    for parameter in executable.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with counting_collectives() as counted:
        optimizer.step(lr)
    matrices = [part for name, part in optimizer.parts() if name.endswith("momentum_buffer")]
    return counted.sent("all-to-all"), 2 * 2 * sum(part.whole_numel for part in matrices) / 2 * (1 / 2)


@pytest.mark.slow
def test_ranks_send_less_than_equal_parts_would(tmp_path: Path) -> None:
    """A rank has whole maps of fused matrices, all of q, gate and up; k and v are on one rank, which owns one."""
    (one, bound), (other, _) = spawn(2, in_a_step, tmp_path)
    width, inner, keys = 64, 128, 32
    travel = width * inner // 2 + width * width // 2 + keys * width  # of down, out, and of k or v
    assert one + other == 2 * 2 * 2 * travel  # there and back, in two bytes, in two blocks
    assert one + other <= 2 * bound


OWN = """
import torch

class Own(torch.optim.Adam):
    elementwise = True
"""


def own_on_ranks(rank: int, ranks: int, cases: Mapping[str, Case]) -> dict[str, Trained]:
    with user_code.trusting(True):
        return all_trained(rank, ranks, cases)


@pytest.mark.slow
def test_optimizers_of_ones_own_move_as_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    adam = {"optimizer.name": f"{tmp_path / 'own.py'}:Own"}
    lion = {"optimizer.name": f"{EXAMPLE}:Lion", "optimizer.lr": 1e-4}
    cases = {
        "Adam in shards": Case(settings=adam),
        "Adam in pieces of layers": Case({"tp": 2}, adam),
        "Adam in stages": Case({"pp": 2}, adam),
        "Lion in shards": Case(settings=lion),
    }
    (tmp_path / "ranks").mkdir()
    found = spawn(2, own_on_ranks, tmp_path / "ranks", 2, cases)
    with user_code.trusting(True):
        for name, case in cases.items():
            assert compared(name, case, [rank[name] for rank in found]).gradient <= 1, name
