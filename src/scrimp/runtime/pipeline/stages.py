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
Experts  2 E numbers more: the sums of the auxiliary loss (`scrimp.objectives.load_balance`) grow from stage to stage;
         the last one makes the loss, and their gradients go back like those of any input.
Waiting  What is sent stays in memory until something has come that its reader sent later.
Copies   Where embedding and head are one matrix, the first and the last stage have each a copy. Their gradients are
         added up after the last pass (`add_up_copies`), so that both are updated alike, bit for bit.
Source   GPipe, arXiv 1811.06965; PTD-P, arXiv 2104.04473
Checked  tests/parity/, tests/runtime/pipeline/test_stages.py

Shapes: B rows, T tokens, D width, E experts, e bytes a number, n ranks of tp.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from scrimp.models.spec import EMBEDDING_WEIGHT
from scrimp.objectives import LossSums
from scrimp.runtime.parallel.mesh import RankMesh
from scrimp.runtime.parallel.parallelise import reduce_now, whole_weights
from scrimp.runtime.pipeline.orders import Action, everything_forward, orders_of

Boundary = tuple[Tensor, ...]
"""What a stage hands on: the residual stream, and in a model with experts what they have routed so far."""
Run = Callable[[Batch], Boundary | LossSums]
"""Runs the model's stage on a micro-batch: what it hands on, or the sums of the loss."""
Sent = tuple[Sequence[Any], Boundary]
"""Transfers to wait for, and what they move."""
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
        self._made: dict[Key, Boundary] = {}
        """What stages have made, or will have received, for others."""
        self._works: dict[Key, list[Sent]] = {}
        """What to wait for before it is read, and what has come to its sender before."""
        self._sent: dict[int, deque[Sent]] = {}
        """To each rank."""
        self._inputs: dict[tuple[int, int], Boundary] = {}
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
                self._backward(action, is_last=index == last)
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
        for sent in self._sent.values():
            while len(sent) > 2 * self.pipeline.num_stages:  # the first stage must not run far ahead
                self._wait([sent.popleft()])
        return sums

    def settle(self) -> None:
        """Wait until all that was sent is received."""
        for sent in self._sent.values():
            self._wait(sent)
        self._sent = {}

    def add_up_copies(self, gradients: Mapping[str, Tensor]) -> None:
        """Add up the gradients of the two copies of one matrix, where there are two.

        Args:
            gradients: of what lies here; every rank of the pipeline must call it.
        """
        last = self.pipeline.last_rank
        ends = (0, last)
        own = gradients.get(EMBEDDING_WEIGHT)
        is_tied = self.model.architecture.tied_embeddings and last != 0
        if not is_tied or self.mesh.pipeline_rank not in ends or own is None or not own.numel():
            return
        peer = last if self.mesh.pipeline_rank == 0 else 0
        other = torch.empty_like(own)
        moves = [
            dist.P2POp(dist.isend, own, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        self._wait([(dist.batch_isend_irecv(moves), (own, other))])
        own += other

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _forward(self, stage: int, number: int, batch: Batch, run: Run) -> Boundary | LossSums:
        given = () if stage == 0 else self._take("forward", stage - 1, number)
        if torch.is_grad_enabled():
            for one in given:
                one.requires_grad_()
            self._inputs[stage, number] = given
        self.model.stage = StagePass(self.pipeline.stages[stage], *given)
        try:
            found = run(batch)
        finally:
            self.model.stage = None
        if not isinstance(found, LossSums):
            self._made["forward", stage, number] = tuple(one.detach() for one in found)
            if torch.is_grad_enabled():
                edges = [get_gradient_edge(one) if one.requires_grad else None for one in found]
                self._outputs[stage, number] = edges
        return found

    def _backward(self, action: Action, *, is_last: bool) -> None:
        key = action.stage, action.micro_batch
        if not self.pipeline.splits_backward:
            self._inputs_of(*key)
            return
        if action.kind != "weights":
            self._weights[key] = WeightGradients()
            with self._weights[key].waiting():
                self._inputs_of(*key)
        if action.kind != "inputs":
            self._weights_of(action.stage, self._weights.pop(key), is_last=is_last)

    def _weights_of(self, stage: int, later: WeightGradients, *, is_last: bool) -> None:
        """Make the gradients of a stage's weights, and reduce them over the ranks that share it."""

        def made(blocks: Iterable[int]) -> Iterator[int]:
            for number in blocks:
                later.make(whole_weights(self.model, number))
                yield number

        own = made(self.pipeline.stages[stage])
        if self.mesh.layout.zero > 1:
            reduce_now(self.model, own, ends=False)
            return
        for _ in own:
            pass
        if is_last:
            reduce_now(self.model, self.model.part.blocks, ends=True)

    def _inputs_of(self, stage: int, number: int) -> None:
        """The backward pass of a stage."""
        output = self._outputs.pop((stage, number))
        if stage == self.pipeline.num_stages - 1:
            output.backward()
        else:
            gradients = self._take("inputs", stage + 1, number)
            own = [at for at, edge in enumerate(output) if edge is not None]
            torch.autograd.backward([output[one] for one in own], [gradients[one] for one in own])
        given = self._inputs.pop((stage, number))
        if given:
            self._made["inputs", stage, number] = tuple(cast(Tensor, one.grad) for one in given)

    def _take(self, kind: str, stage: int, number: int) -> Boundary:
        """What a stage has made, here or on another rank."""
        key = kind, stage, number
        self._wait(self._works.pop(key, []))
        return self._made.pop(key)

    def _move(self, action: Action, batch: Batch) -> None:
        """Send what a stage here has made, or begin to receive what another has."""
        key = action.kind, action.stage, action.micro_batch
        if action.transfer == "send":
            peer = self.pipeline.rank_of(action.stage + (1 if action.kind == "forward" else -1))
            moved = tuple(one.contiguous() for one in self._made.pop(key))
            self._sent.setdefault(peer, deque()).append((self._exchange(dist.isend, moved, peer), moved))
            return
        peer = self.pipeline.rank_of(action.stage)
        moved = self._made[key] = self._boundary(batch)
        # Its sender has noted all transfers between the two in the same order.
        before = self._sent.pop(peer, ())
        self._works[key] = [*before, (self._exchange(dist.irecv, moved, peer), moved)]

    def _exchange(self, move: Callable[..., Any], moved: Boundary, peer: int) -> Sequence[Any]:
        moves = [dist.P2POp(move, one, group=self.group, group_peer=peer) for one in moved]
        return cast("Sequence[Any]", dist.batch_isend_irecv(moves))

    def _boundary(self, batch: Batch) -> Boundary:
        """Memory for what is handed on of a micro-batch between two stages."""
        rows, length = batch.tokens_BT.shape
        routing, shared = self.model.spec.routing, self.model.context_parallel
        sharing = self.mesh.layout.tp * (1 if shared is None else shared.size)  # a probe is of whole rows
        shape = rows, length // sharing, self.model.architecture.width
        x_BTD = torch.empty(shape, dtype=self.model.dtype, device=self._device)
        if routing is None:
            return (x_BTD,)
        return x_BTD, torch.empty(2, routing.experts, device=self._device)

    @staticmethod
    def _wait(sent: Iterable[Sent]) -> None:
        for works, _ in sent:
            for work in works:
                work.wait()


def first_rows(batches: Sequence[Batch], first_row: int, cp: int) -> list[int]:
    """The address of each micro-batch's first token, among those of a batch."""
    sizes = [batch.tokens_BT.numel() // cp for batch in batches]
    return [first_row + before for before in itertools.accumulate(sizes[:-1], initial=0)]
