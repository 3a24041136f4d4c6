"""Bytes of a step on the ranks of a pipeline beside each rank's own account."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from distributed import spawn
from parity import Case, batch_of, made

from scrimp.profiler.tensor_peak import counting_tensors
from scrimp.runtime.passes import run_passes
from scrimp.world import World

pytestmark = pytest.mark.slow

KEEP = {"memory.activations": "keep"}
"""Nothing else is traced."""
WEIGHTS = {**KEEP, "model.num_layers": 4, "model.width": 256, "model.ffn_width": 704, "model.num_heads": 8}
"""Weights outweigh activations."""
TOKENS = {**KEEP, "model.num_layers": 8, "model.width": 64, "train.loss_chunk": 16}
"""Activations outweigh weights."""
PP = {"pp": 2}
TWO = {
    "weights": Case(PP, WEIGHTS, micro_batches=4),
    "1f1b": Case(PP, TOKENS, micro_batches=6),
    "gpipe": Case({**PP, "schedule": "gpipe"}, TOKENS, micro_batches=6),
    "uneven": Case({**PP, "stages": "6,2"}, TOKENS, micro_batches=4),
    "interleaved": Case({**PP, "virtual": 2}, TOKENS, micro_batches=6),
    "one matrix of words": Case(PP, TOKENS, preset="qwen2.5-0.5b", micro_batches=4),
    "recomputed": Case(PP, {**TOKENS, "memory.activations": "block"}, activations="block", micro_batches=6),
    "zbv": Case({**PP, "schedule": "zbv"}, TOKENS, micro_batches=6),
    "dualpipev": Case({**PP, "schedule": "dualpipev"}, TOKENS, micro_batches=6),
    "zbv, recomputed": Case(
        {**PP, "schedule": "zbv"},
        {**TOKENS, "memory.activations": "block"},
        activations="block",
        micro_batches=6,
    ),
}
EXPERTS = {**KEEP, "model.num_layers": 4, "model.width": 64, "train.loss_chunk": 16}
TWO |= {
    "experts": Case(PP, EXPERTS, preset="mixtral-8m", micro_batches=4),
    "experts, zbv": Case({**PP, "schedule": "zbv"}, EXPERTS, preset="mixtral-8m", micro_batches=4),
}
FOUR = {
    "fsdp": Case(PP, WEIGHTS, micro_batches=4),
    "fsdp, zbv": Case({**PP, "schedule": "zbv"}, WEIGHTS, micro_batches=4),
    "fsdp, zbv, tokens": Case({**PP, "schedule": "zbv"}, TOKENS, micro_batches=4),
    "rows": Case({**PP, "cp": 2}, TOKENS, micro_batches=4),
    "shared experts": Case({**PP, "ep": 2}, EXPERTS, preset="mixtral-8m", micro_batches=4),
    "dp, dualpipev": Case({**PP, "dp": 2, "schedule": "dualpipev"}, WEIGHTS, micro_batches=4),
}


def measured(rank: int, ranks: int, cases: dict[str, Case]) -> dict[str, tuple[int, int]]:
    """Predicted bytes, and the fewest that a step but the first took: a busy machine ends exchanges later."""
    found = {}
    for name, case in cases.items():
        gc.collect()
        with counting_tensors() as left:  # by the cases before
            pass
        decisions, executable, optimizer, lr = made(case, World(rank, ranks), ranks // 2)
        took = []
        for step in range(4):
            with counting_tensors() as counted:
                batches = [batch_of(case, step, number) for number in range(case.micro_batches)]
                run_passes(executable, batches, 1000, step=step)
                del batches
                executable.add_up_copies(optimizer.gradients)
                optimizer.gradient_norm()
                optimizer.step(lr)
                optimizer.zero_grad()
            assert counted.num_bytes is not None
            took.append(counted.num_bytes - (left.num_bytes or 0))
        peaks = decisions.plan.predicted.stage_bytes
        assert peaks is not None
        found[name] = peaks[executable.mesh.pipeline_rank], min(took[1:])
        del executable, optimizer
    return found


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_a_rank_takes_what_its_account_says(ranks: int, cases: dict[str, Case], tmp_path: Path) -> None:
    for rank, found in enumerate(spawn(ranks, measured, tmp_path, ranks, cases)):
        for name, (predicted, counted) in found.items():
            assert 0.95 * counted <= predicted <= 1.4 * counted, (rank, name, predicted, counted)
