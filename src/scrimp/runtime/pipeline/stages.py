"""Runs the stages that a rank of a pipeline holds, in the order of a schedule.

Method   A rank has a model of its stages' blocks alone (`scrimp.models.model.ModelPart`). For a micro-batch m a stage
         takes what the stage before has made, x_m, runs its blocks, and hands on y_m; later it takes dL/dy_m, and hands
         back dL/dx_m. All ranks of a pipeline read the same rows, so each stage knows documents and positions, and all
         know the shape of what they send one another.
         Between two passes of a micro-batch a stage keeps x_m, what its blocks keep, and of y_m the place in the graph
         alone: its numbers go as soon as they are sent.
Sums     The micro-batches of a step are those that gradients are accumulated over: each loss is divided by the targets
         of the whole batch. Only the rank with the last stage knows them (`RankMesh.gathered`).
Bytes    What a rank sends of a micro-batch of B rows of T tokens, to each neighbour stage on another rank, forward or
         backward: B T D e. Where ranks share layers (`layout.tp`, n of them), the residual stream is cut along the
         sequence already, and each sends its tokens alone: B T D e / n. That is what PTD-P's scatter and gather at the
         ends of stages send between nodes; without anything to gather.
Copies   Where embedding and head are one matrix, the first and the last stage have each a copy. Their gradients are
         added up after the last pass (`add_up_copies`), so that both are updated alike, bit for bit.
Limits   What ranks send waits for the reader in memory of its own.
Source   GPipe, arXiv 1811.06965; PTD-P, arXiv 2104.04473
Checked  tests/parity/, tests/runtime/pipeline/test_stages.py

Shapes: B rows, T tokens, D width, e bytes a number, n ranks of tp.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from scrimp.config.pipeline import Pipeline
from scrimp.data import Batch
from scrimp.gemm.weight_gradients import WeightGradients
from scrimp.models.model import Model, StagePass
from scrimp.objectives import LossSums
from scrimp.runtime.parallel.mesh import RankMesh
from scrimp.runtime.parallel.parallelise import WORDS
from scrimp.runtime.pipeline.orders import Action, everything_forward, orders_of

Run = Callable[[Batch], Tensor | LossSums]
"""Runs the model's stage on a micro-batch: the residual stream after it, or the sums of the loss."""
Key = tuple[str, int, int]
"""Pass, stage and micro-batch that made a tensor."""


@dataclass
class PassSums:
    """Sums over the micro-batches of a step."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)

    def add(self, sums: LossSums) -> None:
        """One more."""
        self.loss += sums.loss.detach()
        for name, metric in sums.metrics.items():
            self.metrics[name] = self.metrics[name] + metric if name in self.metrics else metric


class Stages:
    """The stages of this rank.

    Args:
        model: it has their blocks alone.
    """

    def __init__(self, model: Model, pipeline: Pipeline, mesh: RankMesh) -> None:
        self.model, self.pipeline, self.mesh = model, pipeline, mesh
        self._made: dict[Key, Tensor] = {}
        """What stages have made, or will have received, for others."""
        self._works: dict[Key, list[Any]] = {}
        """What to wait for before it is read."""
        self._sent: deque[tuple[list[Any], Tensor]] = deque()
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._outputs: dict[tuple[int, int], Any] = {}
        self._weights: dict[tuple[int, int], WeightGradients] = {}
        self._evaluated = 0

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the pipeline."""
        return self.mesh.devices["pp"].get_group()

    def passes(
        self,
        batches: Sequence[Batch],
        run: Run,
        begin: Callable[[int, bool], None],
        num_targets: int,
        *,
        is_probe: bool = False,
    ) -> PassSums:
        """Forward and backward passes of a step.

        Args:
            batches: its micro-batches, the same on all ranks of the pipeline.
            run: called with the model's stage set.
            begin: called before each pass with the micro-batch's number, and whether it is the rank's last pass.
            num_targets: that the sums are divided by before they are differentiated.
            is_probe: any number of micro-batches, one after another.
        """
        order = (everything_forward if is_probe else orders_of)(self.pipeline, len(batches))
        own = order[self.mesh.pipeline_rank]
        last = max(index for index, action in enumerate(own) if action.transfer is None)
        sums = PassSums(torch.zeros((), device=self._device))
        for index, action in enumerate(own):
            if action.transfer is not None:
                self._move(action, batches[action.micro_batch])
                continue
            begin(action.micro_batch, index == last)
            if action.kind == "forward":
                found = self._forward(action.stage, action.micro_batch, batches[action.micro_batch], run)
                if isinstance(found, LossSums):
                    sums.add(found)
                    total = found.total / max(1, num_targets)
                    self._outputs[action.stage, action.micro_batch] = total
                del found
            else:
                self._backward(action)
        self.settle()
        return sums

    def evaluate(self, batch: Batch, run: Run) -> LossSums:
        """The loss of a micro-batch, without gradients; nothing but zeros on ranks that have not the last stage."""
        assert not torch.is_grad_enabled(), "a pipeline's passes with gradients are those of a step"
        rank, number = self.mesh.pipeline_rank, self._evaluated
        self._evaluated += 1
        zero = torch.zeros((), device=self._device)
        sums = LossSums(zero, zero)
        for stage in self.pipeline.stages_of(rank):
            before = stage - 1
            if stage > 0 and self.pipeline.rank_of(before) != rank:
                self._move(Action("forward", before, number, "receive"), batch)
            found = self._forward(stage, number, batch, run)
            if isinstance(found, LossSums):
                sums = found
            elif self.pipeline.rank_of(stage + 1) != rank:
                self._move(Action("forward", stage, number, "send"), batch)
        while len(self._sent) > 2 * self.pipeline.num_stages:  # the first stage must not run far ahead
            self._wait(self._sent.popleft()[0])
        return sums

    def settle(self) -> None:
        """Wait until all that was sent is received."""
        while self._sent:
            self._wait(self._sent.popleft()[0])

    def add_up_copies(self, gradients: Mapping[str, Tensor]) -> None:
        """Add up the gradients of the two copies of one matrix, where there are two.

        Args:
            gradients: of what lies here; every rank of the pipeline must call it.
        """
        last = self.pipeline.last_rank
        ends = (0, last)
        own = gradients.get(WORDS)
        is_tied = self.model.architecture.tied_embeddings and last != 0
        if not is_tied or self.mesh.pipeline_rank not in ends or own is None or not own.numel():
            return
        peer = last if self.mesh.pipeline_rank == 0 else 0
        other = torch.empty_like(own)
        moves = [
            dist.P2POp(dist.isend, own, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        self._wait(dist.batch_isend_irecv(moves))
        own += other

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _forward(self, stage: int, number: int, batch: Batch, run: Run) -> Tensor | LossSums:
        x_BTD = None if stage == 0 else self._take("forward", stage - 1, number)
        if x_BTD is not None and torch.is_grad_enabled():
            x_BTD.requires_grad_()
        self.model.stage = StagePass(self.pipeline.stages[stage], x_BTD)
        try:
            found = run(batch)
        finally:
            self.model.stage = None
        if isinstance(found, Tensor):
            self._made["forward", stage, number] = found.detach()
            if torch.is_grad_enabled():
                self._outputs[stage, number] = get_gradient_edge(found)
        if torch.is_grad_enabled():
            self._inputs[stage, number] = x_BTD
        return found

    def _backward(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        if action.kind == "weights":
            self._weights.pop(key).make()
            return
        later = WeightGradients()
        if self.pipeline.splits_backward:
            with later.waiting():
                self._inputs_of(*key)
        else:
            self._inputs_of(*key)
        if action.kind == "backward":
            later.make()
        else:
            self._weights[key] = later

    def _inputs_of(self, stage: int, number: int) -> None:
        """The backward pass of a stage."""
        output = self._outputs.pop((stage, number))
        if stage == self.pipeline.num_stages - 1:
            output.backward()
        else:
            torch.autograd.backward(output, self._take("inputs", stage + 1, number))
        x_BTD = self._inputs.pop((stage, number))
        if x_BTD is not None:
            self._made["inputs", stage, number] = cast(Tensor, x_BTD.grad)

    def _take(self, kind: str, stage: int, number: int) -> Tensor:
        """What a stage has made, here or on another rank."""
        key = kind, stage, number
        self._wait(self._works.pop(key, []))
        return self._made.pop(key)

    def _move(self, action: Action, batch: Batch) -> None:
        """Send what a stage here has made, or begin to receive what another has."""
        key = action.kind, action.stage, action.micro_batch
        while self._sent and all(work.is_completed() for work in self._sent[0][0]):
            self._sent.popleft()
        step = 1 if action.kind == "forward" else -1
        if action.transfer == "send":
            tensor = self._made.pop(key).contiguous()
            move = dist.P2POp(
                dist.isend, tensor, group=self.group, group_peer=self._rank_of(action.stage + step)
            )
            self._sent.append((dist.batch_isend_irecv([move]), tensor))
            return
        tensor = self._made[key] = self._boundary(batch)
        move = dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=self._rank_of(action.stage))
        self._works[key] = dist.batch_isend_irecv([move])

    def _rank_of(self, stage: int) -> int:
        return self.pipeline.rank_of(stage)

    def _boundary(self, batch: Batch) -> Tensor:
        """Memory for the residual stream of a micro-batch between two stages."""
        rows, length = batch.tokens_BT.shape
        width = self.model.architecture.width
        return torch.empty(
            rows, length // self.mesh.layout.tp, width, dtype=self.model.dtype, device=self._device
        )

    @staticmethod
    def _wait(works: Sequence[Any]) -> None:
        for work in works:
            work.wait()


def first_rows(batches: Sequence[Batch], first_row: int, cp: int) -> list[int]:
    """The address of each micro-batch's first token, among those of a batch."""
    sizes = [batch.tokens_BT.numel() // cp for batch in batches]
    return [first_row + before for before in itertools.accumulate(sizes[:-1], initial=0)]
