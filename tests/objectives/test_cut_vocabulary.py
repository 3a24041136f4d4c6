"""The loss whose logits lie on several ranks, against the loss of one process, on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from torch import Tensor

from scrimp.objectives.base import LossSums
from scrimp.objectives.cross_entropy import cross_entropy_sums
from scrimp.objectives.cut_vocabulary import CutVocabulary
from scrimp.profiler.collectives import counting_collectives

TOKENS, WIDTH, WORDS = 23, 8, 31
CASES = {
    "plain": {"chunk": 0, "z_loss": 0.0},
    "z-loss in chunks": {"chunk": 7, "z_loss": 0.1},
}


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = 4 * torch.randn(TOKENS, WIDTH, generator=generator)
    hidden[1] *= 100  # one target hopeless, its logits beyond what exp can hold
    weight = torch.randn(WORDS, WIDTH, generator=generator)
    targets = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    targets[::5] = -100
    return hidden.requires_grad_(), weight, targets


def differentiated(
    case: dict[str, float], words: range, vocabulary: CutVocabulary | None
) -> tuple[LossSums, Tensor, Tensor]:
    hidden, whole, targets = tensors()
    weight = whole[words.start : words.stop].clone().requires_grad_()
    sums = cross_entropy_sums(
        hidden, weight, targets, chunk=int(case["chunk"]), z_loss=case["z_loss"], vocabulary=vocabulary
    )
    (0.25 * sums.total).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return sums, hidden.grad, weight.grad


def on_rank(rank: int, ranks: int) -> dict[str, tuple[list[float], Tensor, Tensor, list[int]]]:
    words = range(WORDS * rank // ranks, WORDS * (rank + 1) // ranks)
    found = {}
    for name, case in CASES.items():
        with counting_collectives() as counted:
            assert dist.group.WORLD is not None
            vocabulary = CutVocabulary(words, dist.group.WORLD)
            sums, hidden, weight = differentiated(case, words, vocabulary)
        dist.all_reduce(hidden)
        numbers = [float(sums.loss.detach()), float(sums.penalty.detach())]
        found[name] = numbers, hidden, weight, [one.num_bytes for one in counted.calls]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_ranks_with_parts_of_the_vocabulary_find_the_loss_of_one_process(ranks: int, tmp_path: Path) -> None:
    found = spawn(ranks, on_rank, tmp_path, ranks)
    for name, case in CASES.items():
        sums, hidden, weight = differentiated(case, range(WORDS), None)
        for rank in found:
            assert rank[name][0] == pytest.approx([sums.loss.item(), sums.penalty.item()], rel=1e-6)
            torch.testing.assert_close(rank[name][1], hidden, rtol=1e-5, atol=1e-5)
            # Three numbers of each token, whatever the vocabulary.
            assert sum(rank[name][3]) == 4 * 3 * TOKENS
        torch.testing.assert_close(torch.cat([rank[name][2] for rank in found]), weight, rtol=1e-5, atol=1e-4)
