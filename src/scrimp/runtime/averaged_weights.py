"""The exponential average of a model's weights while it trains, as a model of its own.

    T <- m T + (1 - m) W        after each update, in float32; T = W before the first

Problem  The average of the last weights is often a better model than the last weights are, and can teach them. Torch's
         `swa_utils.AveragedModel` copies whole modules, and knows no shards.
Method   The average is laid over the ranks as the model is, by the same calls, so that each rank has the same boxes of
         T as of W: it averages what lies here, and nothing is sent. To run, its units gather themselves as the model's
         do. Their gathered weights go as soon as they have run, whatever `layout.zero` keeps of the model's, but for
         those of embedding, final norm and head, which the loss still reads: `settle` lets go of these, and must, or
         the next passes would read what was gathered before the update.
Bytes    4 a number of this rank's weights; beside them while a loss is made, where ranks have shards, the ends whole
         (`scrimp.planner.memory.average_costs`).
Limits   W is what passes read: of bf16 weights with fp32 masters the rounded ones. Parts of a model on other ranks than
         `layout.dp` and `layout.fsdp` give it, and weights on the host, are refused in `scrimp.config.own_average`.
Source   Tarvainen and Valpola 2017 (mean teachers), arXiv 1703.01780; Momentum-GS, arXiv 2412.04887, with m = 0.9
Checked  tests/runtime/test_averaged_weights.py; tests/runtime/parallel/test_averaged_shards.py: real ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from scrimp.models.model import Model, build_model
from scrimp.parts import TensorPart, part_of, set_cut
from scrimp.runtime.execute import Executable
from scrimp.runtime.parallel import parallelise, units


class AveragedWeights:
    """The average of an executable's weights; it begins as they are.

    Args:
        momentum: m, what it keeps of itself in an update.
    """

    def __init__(self, executable: Executable, momentum: float) -> None:
        self._executable, self._momentum = executable, momentum
        self.model = _laid_out(executable)
        """With these weights; it has no gradients."""
        with torch.no_grad():
            for weights, own in self._pairs():
                own.local.copy_(weights.local)

    def follow(self) -> None:
        """The model's weights have been updated."""
        with torch.no_grad():
            for weights, own in self._pairs():
                own.local.mul_(self._momentum).add_(weights.local, alpha=1.0 - self._momentum)

    def settle(self) -> None:
        """It has run, and its weights are in their parts again."""
        for unit in units(self.model):
            unit.reshard()

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """Name and storage of what lies here of its weights, as checkpoints have them."""
        self.settle()
        for name, parameter in self.model.named_parameters():
            yield name, part_of(parameter)

    def _pairs(self) -> Iterator[tuple[TensorPart, TensorPart]]:
        """What lies here of the model's weights, and of their average."""
        own = dict(self.parts())
        for name, part in self._executable.parameters():
            yield part, own[name]


def _laid_out(executable: Executable) -> Model:
    """A model like the executable's on the same ranks, in float32, its memory not yet filled."""
    with torch.device("meta"):
        model = build_model(executable.model.architecture, dtype=torch.float32)
    model.requires_grad_(False)
    cuts = parallelise(model, executable.mesh)
    for unit in units(model):
        if unit is not cast(object, model):
            unit.set_reshard_after_forward(True, recurse=False)
    model.to_empty(device=executable.device)
    for name, cut in cuts.items():
        set_cut(model.get_parameter(name), cut)
    return model.eval()
