"""A small training bench for precision: a checkpoint of a run, its data in order, any plan, its damage.

The lab takes a run that `scrimp train` made (with kept checkpoints), puts model and optimizer back to one of
them as often as needed, and trains on by any plan: same weights, same moments, same batches. It knows nothing of
policies.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scrimp.config import load_config
from scrimp.data import Batch, Loader
from scrimp.gemm import LinearPrecision, swap_in
from scrimp.gemm.problem import DTYPES
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.optim import AdamW
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import GEMMS
from scrimp.runtime import Executable
from scrimp.statistics import Subject, collect
from scrimp.statistics.stream import square
from scrimp.training.checkpoint import CheckpointStore
from scrimp.training.evaluation import evaluate
from scrimp.training.run_data import open_run_corpus
from scrimp.training.run_state import read_state
from scrimp.training.setup import decide

Choices = Mapping[str, Sequence[str]]
"""Layer to recipes of fprop, dgrad, wgrad."""
BASE = LinearPrecision.of("bf16")


class Lab:
    """One seed's model at one step of its run.

    Args:
        trunk: run folder with a kept checkpoint of `step`; at step 0 the weights that a run of it begins with.
    """

    def __init__(self, trunk: Path, step: int) -> None:
        config = load_config(trunk / "config.toml")
        store = CheckpointStore(trunk, keep_last=1, keep_every=0)
        checkpoint = next(c for c in store.complete() if step in (0, c.step))
        state = read_state(checkpoint)
        architecture = state.architecture
        self.decisions = decide(config, architecture=architecture)
        self.train_config = self.decisions.config.train
        self.corpus = open_run_corpus(self.decisions.config, self.decisions.world, progress=False)
        self.device = self.decisions.device.torch_device
        dtype = DTYPES[self.train_config.parameters]
        self.model = build_model(architecture, device=self.device, dtype=dtype)
        initialise(self.model, config.run.seed)
        self.optimizer = AdamW(dict(self.model.named_parameters()), self.decisions.config.optimizer)
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        tensors |= {f"optimizer.{name}": part.local for name, part in self.optimizer.parts()}
        tensors["random.torch"] = torch.get_rng_state()
        self.start, self._updates = step, 0
        if step:
            checkpoint.load(tensors)
            self._updates = state.position.updates
        self._tensors, self._saved = tensors, {name: t.clone() for name, t in tensors.items()}
        names = [name for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]
        self.layers = [name for name in names if name != "head"]
        self.planned = swap_in(
            self.model, dict.fromkeys(self.layers, BASE), seed=self.decisions.config.run.seed
        )
        self.executable = Executable(self.model, self.device, "bf16", planned=self.planned)
        self.reset()

    def reset(self) -> None:
        """Weights, moments and plan as they were."""
        for name, tensor in self._tensors.items():
            tensor.copy_(self._saved[name])
        self.optimizer.restore_updates(self._updates)
        self.optimizer.zero_grad()
        self.planned.replan(BASE)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Layer to (outputs, inputs)."""
        modules = dict(self.model.named_modules())
        return {name: tuple(modules[name].weight.shape) for name in self.layers}  # type: ignore[union-attr,misc]

    def batches(self, step: int, count: int = 1) -> Iterator[list[Batch]]:
        """Micro-batches of `count` steps from `step` on."""
        train = self.train_config
        per_step = train.batch_tokens // train.sequence
        loader = Loader(
            self.corpus.train,
            sequence=train.sequence,
            sequences_per_step=per_step,
            micro_batch=train.micro_batch,
            seed=self.decisions.config.run.seed,
            first_sample=step * per_step,
        )
        with loader:
            for _ in range(count):
                yield next(loader)

    def losses(self, step: int, micro_batches: list[Batch]) -> Iterator[torch.Tensor]:
        """Each micro-batch's share of the step's mean loss."""
        targets, first_row = sum(batch.num_targets for batch in micro_batches), 0
        for batch in micro_batches:
            self.executable.begin(step, first_row)
            sums = self.executable.loss(batch)
            first_row += batch.tokens_BT.numel()
            yield sums.total / targets

    def replan(self, choices: Choices) -> None:
        """Run by these recipes; inputs saved so that no number changes by it."""
        plan = {layer: LinearPrecision(*recipes, saved="bf16") for layer, recipes in choices.items()}
        self.planned.replan(dict.fromkeys(self.layers, BASE) | plan)

    def measure(
        self, step: int, count: int, formats: Sequence[str], gains: str = "ratios"
    ) -> PrecisionProfile:
        """A profile of the model as it is now, over `count` batches from `step` on."""
        subject = Subject(
            self.model,
            self.planned,
            self.optimizer,
            lambda batch: self.losses(step, batch),
            "bf16",
            self.decisions.device.name,
            self.optimizer.num_updates,
        )
        return collect(subject, self.batches(step, count), formats, gains=gains, seed=step)

    def train(
        self,
        steps: int,
        choices: Choices | None,
        lr: Callable[[int], float],
        between: Callable[[int], Choices | None] = lambda done: None,
    ) -> list[float]:
        """Train on from the start; losses by step.

        Args:
            lr: learning rate by steps done since the start.
            between: asked before each step for a new plan.
        """
        if choices is not None:
            self.replan(choices)
        losses = []
        for done, micro_batches in enumerate(self.batches(self.start, steps)):
            new = between(done)
            if new is not None:
                self.replan(new)
            total = 0.0
            for loss in self.losses(self.start + done, micro_batches):
                loss.backward()
                total += float(loss.detach())
            norm = self.optimizer.gradient_norm()
            if math.isfinite(norm) and math.isfinite(total):
                self.optimizer.clip(norm, self.decisions.config.optimizer.clip)
                self.optimizer.step(lr(done))
            self.optimizer.zero_grad()
            losses.append(total)
        return losses

    def held_out(self, tokens: int, *, in_plan: bool = False) -> float:
        """Held-out loss, by the bf16 forward pass unless `in_plan`."""
        before = {name: layer.precision for name, layer in self.planned.layers.items()}
        if not in_plan:
            self.planned.replan(BASE)
        result = evaluate(
            self.executable,
            self.corpus.held_out,
            sequence=self.train_config.sequence,
            micro_batch=self.train_config.micro_batch,
            max_tokens=tokens,
            mask_documents=True,
        )
        self.planned.replan(before)
        return result.loss

    # -- damage --------------------------------------------------------------------------------

    def response(self, step: int, micro_batches: list[Batch]) -> Response:
        """Loss and next update of one batch under the plan of now; nothing is updated."""
        loss = 0.0
        for part in self.losses(step, micro_batches):
            part.backward()
            loss += float(part.detach())
        gradients = self.optimizer.gradients()
        factor = self.optimizer.clip_factor(self.optimizer.gradient_norm())
        updates = {
            name: self.optimizer.rule(name).direction(gradient * factor)
            for name, gradient in gradients.items()
            if gradient.ndim >= 2
        }
        self.optimizer.zero_grad()
        return Response(loss, updates)

    def damage(
        self, choices: Choices, step: int, micro_batches: list[Batch], clean: Response
    ) -> tuple[float, float]:
        """Relative change of the loss (signed), and of the update: root of sum over weights of
        (|change of h| / |W|)^2."""
        self.replan(choices)
        found = self.response(step, micro_batches)
        self.planned.replan(BASE)
        weights = dict(self.model.named_parameters())
        moved = sum(
            square(found.updates[name] - h) / square(weights[name]) for name, h in clean.updates.items()
        )
        return (found.loss - clean.loss) / abs(clean.loss), math.sqrt(moved)


@dataclasses.dataclass
class Response:
    """What a batch makes of a model."""

    loss: float
    updates: dict[str, torch.Tensor]


def single_damages(lab: Lab, fmt: str, step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Every GEMM alone in a format: root mean squares over batches of the loss and update change, [L, 3]."""
    losses, updates = np.zeros((count, len(lab.layers), 3)), np.zeros((count, len(lab.layers), 3))
    for b, micro_batches in enumerate(lab.batches(step, count)):
        lab.planned.replan(BASE)
        clean = lab.response(step, micro_batches)
        for i, layer in enumerate(lab.layers):
            for j in range(len(GEMMS)):
                recipes = ["bf16"] * 3
                recipes[j] = fmt
                losses[b, i, j], updates[b, i, j] = lab.damage({layer: recipes}, step, micro_batches, clean)
        print(f"damage of {fmt}: batch {b + 1}/{count}", file=sys.stderr, flush=True)
    return np.sqrt((losses**2).mean(0)), np.sqrt((updates**2).mean(0))


def spearman(first: Any, second: Any) -> float:
    """Rank correlation, ties by order."""
    ranks = [np.argsort(np.argsort(np.ravel(values))) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])
