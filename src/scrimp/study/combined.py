"""Models of several runs, evaluated together: the mean of their logits, or one model of the mean of their weights.

Problem  An ensemble and a merge of runs have no run of their own, and yet a held-out loss.
Method   They are evaluated on the tokens on which each of the runs was at its end, in the same rows, in the working
         format. An ensemble runs all models on each batch, as the teachers of a distillation do
         (`scrimp.objectives.soft_targets`), in float32. A merge adds up the weights in float64, a tensor at a time, out
         of files that are mapped: one model and sums of one tensor are in memory, and no run whole. Runs of a merge may
         have weights w_i:

             theta = sum_i w_i theta_i / sum_i w_i

         so that an average of averages is one too: of two units of one domain and one of another with weights 1, 1, 2.
         A process of its own does it and ends, so that the study keeps no memory of a GPU.
Limits   It runs on this machine, on the device that the first run names. Runs whose products were planned are
         evaluated in the working format, as `scrimp eval` does it.
Checked  tests/study/test_combined.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from scrimp.data import IGNORED, Batch
from scrimp.errors import ModelError, ScrimpError
from scrimp.formats.grouping import cut
from scrimp.gemm.problem import DTYPES
from scrimp.models.model import Model
from scrimp.objectives.base import LossSums
from scrimp.objectives.next_token import NextToken
from scrimp.precision import parse_rules
from scrimp.profiler import resolve_device
from scrimp.runtime import Executable
from scrimp.study.job import Job, data_digest, row_of, run_name, source_figures
from scrimp.study.rows import Curve, Row
from scrimp.training.distillation import frozen_model, soft_targets
from scrimp.training.evaluation import Evaluation, evaluate_held_out
from scrimp.training.run_data import open_run_corpus
from scrimp.training.run_folder import saved_config
from scrimp.training.trained_weights import architecture_of_weights, checkpoint_of, finite_weights
from scrimp.world import ALONE


def combined_row(job: Job) -> Row:
    """The row of models that are evaluated together."""
    began, folders = time.monotonic(), [job.folder / run_name(name, seed) for name, seed, _ in job.needs]
    assert job.combined is not None
    weights = ",".join(map(repr, job.combined.weights))
    words = [sys.executable, "-m", "scrimp.study.combined", job.combined.how, weights, *map(str, folders)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        return row_of(job, seconds=seconds, error=" ".join(done.stderr.split())[-400:])
    losses = json.loads(done.stdout.splitlines()[-1])
    figures = {"held_out_loss": losses["loss"]} | source_figures(losses["sources"])
    return replace(
        row_of(job, seconds=seconds, error=""),
        error=None,
        figures=figures,
        held_out=Curve(steps=[job.steps], values=[figures[job.figure]]),
        data=data_digest(folders[0], job.figure),
    )


def evaluate_together(folders: Sequence[Path], weights: Sequence[float] | None) -> Evaluation:
    """The runs in these folders, evaluated together on what the first holds out.

    Args:
        weights: of the runs in the mean of their weights; None: the mean of their logits.

    Raises:
        ScrimpError: a run has no checkpoint or no held-out text, or a model that does not go with the first.
    """
    is_merge = weights is not None
    _refuse_others(folders, is_merge=is_merge)
    config = saved_config(folders[0])
    device = resolve_device(config.device).torch_device
    dtype = DTYPES[config.train.parameters]
    models = [frozen_model(one, device, dtype) for one in (folders[:1] if is_merge else folders)]
    if weights is not None:
        average(models[0], folders, weights)
    executable = Executable(
        models[0],
        device,
        parse_rules(config.precision).compute,
        config.train.loss_chunk or 0,
        Ensemble(models=tuple(models)),
    )
    corpus = open_run_corpus(config, ALONE, progress=False)
    return evaluate_held_out(executable, corpus, config)


def _refuse_others(folders: Sequence[Path], *, is_merge: bool) -> None:
    """Refuse models whose weights have no mean, or whose logits are of other words."""
    first, *others = map(architecture_of_weights, folders)
    for folder, one in zip(folders[1:], others, strict=True):
        if one.vocab_size != first.vocab_size or (is_merge and one != first):
            raise ModelError(
                f"{folders[0].name} and {folder.name} are no {'merge' if is_merge else 'ensemble'}",
                got=f"{one}" if is_merge else f"{one.vocab_size:,} words",
                expected=f"{first}" if is_merge else f"{first.vocab_size:,} words",
            )


@torch.no_grad()
def average(model: Model, folders: Sequence[Path], weights: Sequence[float]) -> None:
    """Fill a model with the weighted mean of the weights of runs that are of its architecture."""
    parameters = dict(model.named_parameters())
    streams = [finite_weights(checkpoint_of(folder)) for folder in folders]
    for tensors in zip(*streams, strict=True):
        (name, first), *others = tensors
        total = weights[0] * first.double()
        for weight, (_, one) in zip(weights[1:], others, strict=True):
            total.add_(one, alpha=weight)
        parameters[name].copy_(total / sum(weights))


@dataclass(frozen=True)
class Ensemble(NextToken):
    """The loss of the mean of several models' logits; for evaluations alone."""

    models: tuple[Model, ...] = ()

    def loss(self, model: Model, batch: Batch, *, chunk: int = 0) -> LossSums:
        """The loss of all models, whichever is given."""
        soft, targets_S = soft_targets(self.models, batch, 1.0), batch.targets_BT.flatten()
        losses = [
            cross_entropy(soft.logits(part), targets_S[part], ignore_index=IGNORED, reduction="sum")
            for part in cut(len(targets_S), chunk or len(targets_S))
        ]
        return LossSums(torch.stack(losses).sum(), torch.zeros(()))


def main(how: str, weights: str, *folders: str) -> int:
    """Print the losses, or why there are none."""
    try:
        merged = [float(one) for one in weights.split(",")] if how == "merge" else None
        found = evaluate_together([*map(Path, folders)], merged)
        sources = {label: one.loss for label, one in found.sources.items()}
        print(json.dumps({"loss": found.loss, "sources": sources}))
    except ScrimpError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
