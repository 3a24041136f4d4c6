"""Whoever runs a loss runs the objective's own; names are checked without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from losses import next_token_loss
from torch import Tensor

from scrimp.config import Architecture, ObjectiveConfig
from scrimp.data import Batch
from scrimp.errors import ConfigError
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.objectives import LossSums, build, check
from scrimp.objectives.next_token import NextToken
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.profiler.memory_trace import TracedStep
from scrimp.runtime import Executable

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=512,
    num_layers=1,
    width=32,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    ffn_width=64,
    context=64,
)


@dataclass(frozen=True)
class Plain(NextToken):
    """The same loss from whole logits, which autograd keeps."""

    def head_loss(self, model: Model, hidden_SD: Tensor, targets_S: Tensor, *, chunk: int = 0) -> LossSums:
        logits = model.logits(hidden_SD).float()
        loss = torch.nn.functional.cross_entropy(logits, targets_S, reduction="sum")
        right = (logits.argmax(-1) == targets_S).sum()
        return LossSums(loss, loss.new_zeros(()), {"right": right})


def batch() -> Batch:
    stream = torch.randint(512, (2, 33), generator=torch.Generator().manual_seed(0))
    return Batch.of(stream[:, :-1], stream[:, 1:])


def test_a_run_has_the_loss_and_the_metrics_of_its_objective() -> None:
    model = build_model(ARCHITECTURE)
    initialise(model, 0)
    own, usual = (
        Executable(model, torch.device("cpu"), "fp32", objective=one) for one in (Plain(), NextToken())
    )
    sums = own.loss(batch())
    torch.testing.assert_close(sums.total, usual.loss(batch()).total)
    assert 0 <= int(sums.metrics["right"]) <= 64
    penalised = Executable(model, torch.device("cpu"), "fp32", objective=NextToken(z_loss=0.1)).loss(batch())
    assert torch.equal(
        penalised.penalty,
        next_token_loss(model, *(batch().tokens_BT, batch().targets_BT), z_loss=0.1).penalty,
    )


@pytest.mark.slow
def test_the_memory_account_is_of_the_loss_that_runs() -> None:
    """In chunks the logits of 128 tokens never exist at once; whole, float32 logits and their gradient do."""
    settings = {"precision": "fp32", "parameters": "fp32", "optimizer": AdamWMemory("fp32"), "micro_batch": 4}
    chunked, whole = (
        TracedStep(ARCHITECTURE, **settings, sequence=32, loss_chunk=8, objective=one).costs().ends.head_peak  # type: ignore[arg-type]
        for one in (NextToken(), Plain())
    )
    assert whole - chunked > 1.5 * 128 * 512 * 4


def test_the_head_runs_once_per_chunk() -> None:
    assert [NextToken().head_passes(100, chunk) for chunk in (0, 100, 33, 1)] == [1, 1, 4, 100]


def test_an_unknown_objective_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="did you mean next-token") as caught:
        check(ObjectiveConfig(name="next_tokn"))
    assert "next-token" in caught.value.expected
    with pytest.raises(ConfigError, match="names no objective"):
        build(ObjectiveConfig(name="ppo"))
    assert build(ObjectiveConfig(z_loss=0.5)) == NextToken(0.5)


def test_names_are_checked_without_torch() -> None:
    code = "import sys, scrimp.config as c, scrimp.objectives as o; o.check(c.ObjectiveConfig()); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
