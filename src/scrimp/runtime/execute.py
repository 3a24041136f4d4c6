"""From a plan to a model that runs by it: formats, placement, compilation.

The model is described on the meta device, laid over its ranks, allocated once on its device in the format of its
parameters, then initialised or loaded: no second copy ever exists. GEMMs in bf16 over fp32
parameters run under autocast; over bf16 parameters they need nothing. Where the plan gives any GEMM a
quantized recipe, the linear layers are swapped for planned ones, parameters untouched.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from scrimp.config import Architecture
from scrimp.config.activations import Activations
from scrimp.config.pipeline import V_SHAPED, Pipeline, pipeline_of
from scrimp.data import Batch
from scrimp.errors import PlanError
from scrimp.gemm import (
    BackendChooser,
    PlannedLayer,
    PlannedModel,
    backends_for,
    swap_in,
)
from scrimp.gemm.convert import split_products
from scrimp.gemm.problem import DTYPES
from scrimp.models import place
from scrimp.models.blocks import defer_gates
from scrimp.models.model import Model, build_model
from scrimp.objectives import LossSums, Objective
from scrimp.objectives.load_balance import with_load_balance
from scrimp.objectives.next_token import NEXT_TOKEN
from scrimp.parts import Cut, TensorPart, part_of, set_cut
from scrimp.planner import Plan
from scrimp.precision import LinearPrecision
from scrimp.runtime.memory import HostMemory, HostRoom, carry_out
from scrimp.runtime.parallel import (
    ONE_RANK,
    GradientSums,
    RankMesh,
    has_whole_copies,
    parallelise,
    part_of_rank,
    reduce_gradients,
    units,
)
from scrimp.runtime.parallel.quantized_gather import gather_codes
from scrimp.runtime.pieces import share_formats
from scrimp.runtime.pipeline import Boundary, Stages

HEAD = "head"
PLANNED_PROBE_TOKENS = 128
"""Tokens of the probe before training: a multiple of every group and of what kernels ask for."""


@dataclass(frozen=True)
class Executable:
    """A model with the precision that the plan gives it."""

    model: Model
    device: torch.device
    precision: str
    """Working format of the activations, fp32 or bf16: every GEMM that is not quantized runs in it."""
    loss_chunk: int = 0
    """Tokens whose logits exist at once; 0 for all."""
    objective: Objective = NEXT_TOKEN
    """What is trained."""
    planned: PlannedModel | None = None
    """The planned layers of the blocks, where the plan quantizes anything."""
    host: HostMemory | None = None
    """The host's part of the memory, where the plan has any."""
    most_tokens: int = 0
    """Tokens of a micro-batch for which the memory was planned; 0: not given."""
    longest: int = 0
    """Tokens of a sequence for which it was planned; 0: not given."""
    mesh: RankMesh = ONE_RANK
    """The ranks that the model is laid over."""
    stages: Stages | None = None
    """The stages of a pipeline that this rank has; None: it has all of the model."""
    sums: GradientSums | None = None
    """Over whole copies of the model, where there are any."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Casts GEMM inputs to bf16 where the parameters are fp32."""
        parameter_dtype = self.model.dtype
        if parameter_dtype == DTYPES[self.precision]:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.precision])

    def begin(self, step: int, first_row: int, *, is_last: bool = True) -> None:
        """The next micro-batch is of this step.

        Args:
            first_row: its first token's row in the step's batch: the address of its rounding noise.
            is_last: of this rank in the step.
        """
        if self.planned is not None:
            self.planned.clock.begin(step, first_row)
        if self.mesh.layout.schedule in V_SHAPED:  # gradients come after their pass
            return
        if self.sums is not None:
            self.sums.begin(is_last=is_last)
        elif self.mesh.layout.zero == 1:
            reduce_gradients(self.model, is_last)

    def loss(self, batch: Batch) -> LossSums:
        """Summed loss of one micro-batch; its tensors may still be on the host. In a pipeline without gradients alone
        (`scrimp.runtime.passes` has both), and zeros on ranks that have not the last stage.

        Raises:
            PlanError: more tokens, or longer sequences, than the plan has memory for.
        """
        if self.stages is not None:
            return self.stages.evaluate(batch, self.run)
        return cast(LossSums, self.run(batch))

    def run(self, batch: Batch) -> Boundary | LossSums:
        """The model, or its stage that is set, on a micro-batch: the loss, or of an earlier stage than the last what it
        hands on. PlanError as by `loss`."""
        part, stage = self._part_of(batch), self.model.stage
        self._refuse_unplanned(*part.tokens_BT.shape)
        with self.autocast():
            given = part.to(self.device)
            if stage is not None and stage.blocks.stop < self.model.spec.num_blocks:
                x_BTD = cast(Tensor, self.model(given.tokens_BT, given.document_starts))
                sums_2E = self.model.routing_so_far()
                return (x_BTD,) if sums_2E is None else (x_BTD, sums_2E)
            sums = self.objective.loss(self.model, given, chunk=self.loss_chunk)
        count = self.objective.count
        return with_load_balance(self.model, sums, count(batch), count(part))

    def _part_of(self, batch: Batch) -> Batch:
        """What this rank has of a micro-batch: all of it, or its tokens of every row."""
        shared = self.model.context_parallel
        if shared is None:
            return batch
        return batch.at(shared.division(batch.tokens_BT.shape[1]).positions(shared.rank))

    def _refuse_unplanned(self, rows: int, length: int) -> None:
        """Refuse a micro-batch that the memory was not planned for.

        Sequences count as well as tokens: as many tokens in fewer, longer sequences take more, since attention's
        workspace grows with their length.
        """
        if 0 < self.longest < length:
            what, most = "a sequence is longer than the planned one", f"{self.longest:,} tokens in a sequence"
        elif 0 < self.most_tokens < rows * length:
            what, most = (
                "a micro-batch is larger than the plan has memory for",
                f"{self.most_tokens:,} tokens in all",
            )
        else:
            return
        raise PlanError(
            what,
            got=f"{rows} sequences of {length:,} tokens",
            expected=f"at most {most}",
            do="plan for the longest sequences with --train.sequence, or cut them",
        )

    def end_backward(self) -> None:
        """A backward pass is over."""
        if self.host is not None:
            self.host.blocks.end_backward()

    def change_activations(self, plan: Plan) -> None:
        """Let blocks do with their activations what a plan says; between two steps.

        Raises:
            PlanError: activations that leave, in a run that has taken no host memory; nothing has changed.
        """
        placement = plan.placement
        if self.host is None and placement.offloaded:
            raise PlanError(
                "activations cannot leave the device in a run that has taken no host memory",
                got=", ".join(dict.fromkeys(placement.activations)),
                do="start it with a plan that offloads",
            )
        for number, block in zip(self.model.part.blocks, self.model.each_block(), strict=True):
            block.activations = Activations.parse(placement.activations[number])
        if self.host is not None:
            self.host.blocks.leaving = placement.offloaded

    def change_formats(self, plan: Plan) -> None:
        """Let the blocks' planned layers run in the formats of a plan; between two steps."""
        assert self.planned is not None, "formats change only in a model that was made for it"
        self.planned.replan({layer: plan.gemms[layer] for layer in self.planned.layers})

    @contextlib.contextmanager
    def in_working_format(self) -> Iterator[None]:
        """Forward passes inside run every GEMM in the working format; nothing is left of it."""
        layers = {} if self.planned is None else dict(self.planned.layers)
        if self.model.planned_head is not None:
            layers[HEAD] = self.model.planned_head
        before = {name: layer.precision for name, layer in layers.items()}
        for layer in layers.values():
            layer.replan(dataclasses.replace(layer.precision, fprop=self.precision))
        try:
            yield
        finally:
            for name, layer in layers.items():
                layer.replan(before[name])

    def give_up(self) -> None:
        """A step was broken off: nothing of it waits or is on its way."""
        if self.host is not None:
            self.host.blocks.reset()

    def settle(self) -> None:
        """After passes that were not followed by a backward pass: what ranks share is in its parts again."""
        if self.stages is not None:
            self.stages.settle()
        for unit in units(self.model):
            unit.reshard()

    def add_up_copies(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """Add up the gradients of what several ranks have copies of, after the passes of a step; all ranks must ask.

        Args:
            gradients: of what lies here (`Optimizer.gradients`).
        """
        if self.sums is not None:
            self.sums.finish()
        if self.stages is not None:
            self.stages.add_up_copies(gradients())

    def gemms_here(self, plan: Plan) -> Plan:
        """A plan with the GEMMs alone whose layers this rank has."""
        return dataclasses.replace(plan, gemms=gemms_in(self.model, plan))

    def parameters(self) -> Iterator[tuple[str, TensorPart]]:
        """Names and values of all parameters, where they are kept between steps."""
        at_home = {}
        if self.host is not None:
            self.host.link.finish()
            at_home = self.host.weights.at_home()
        self.settle()
        for name, parameter in self.model.named_parameters():
            yield name, part_of(at_home.get(parameter, parameter))


def realise(
    plan: Plan,
    architecture: Architecture,
    fill: Callable[[Model], None],
    *,
    device: torch.device,
    parameters: str,
    compute: str,
    seed: int = 0,
    loss_chunk: int = 0,
    objective: Objective = NEXT_TOKEN,
    choose: BackendChooser | None = None,
    replans: bool = False,
    room: HostRoom | None = None,
    most_tokens: int = 0,
    longest: int = 0,
    mesh: RankMesh = ONE_RANK,
    memory: contextlib.AbstractContextManager[object] | None = None,
) -> Executable:
    """Allocate the model of a plan and fill its parameters.

    Args:
        fill: initialises the parameters, or loads them.
        parameters: their format, fp32 or bf16.
        compute: working format of the activations.
        seed: of the rounding noise.
        objective: what is trained.
        choose: back end per recipe and GEMM (`choose_backends`); unset: what works for every shape.
        replans: formats will change, so that layers are planned even where nothing is quantized yet.
        room: host memory that was taken for the plan (`take_room`), where it needs any.
        most_tokens: of a micro-batch; more are refused, since nobody planned for them.
        longest: tokens of a sequence; longer ones are refused too.
        mesh: the ranks that the model is laid over, each of which calls this.
        memory: entered while the model gets memory and is filled: a mode of fake tensors gives it none.

    Raises:
        PlanError: part of the plan lives on the host, and no room was taken there.
    """
    if room is None and plan.placement.uses_host:
        raise PlanError(
            "part of the plan lives on the host, where no room was taken",
            do="take it with `take_room`, before the model is made",
        )
    model, pipeline = _described(architecture, parameters, mesh)
    cuts = parallelise(model, mesh)
    with memory or contextlib.nullcontext():
        _allocate(model, plan, device, room, cuts)
        fill(model)
    planned = None
    if replans or quantizes(plan, compute):
        planned = plan_layers(model, plan, choose or backends_for(device), seed, mesh)
        defer_gates(model, device)
        gather_codes(model, mesh)
    host = None if room is None else carry_out(plan.placement, model, room)
    stages = None if pipeline is None else Stages(model, pipeline, mesh)
    sums = GradientSums(mesh.devices["dp"].get_group()) if has_whole_copies(model, mesh) else None
    executable = Executable(
        model, device, compute, loss_chunk, objective, planned, host, most_tokens, longest, mesh, stages, sums
    )
    executable.change_activations(plan)
    return executable


def _described(architecture: Architecture, parameters: str, mesh: RankMesh) -> tuple[Model, Pipeline | None]:
    """What a rank has of the model, on the meta device, and the pipeline that it is a part of."""
    pipeline = pipeline_of(mesh.layout, architecture.num_layers) if mesh.layout.pp > 1 else None
    part = None if pipeline is None else part_of_rank(pipeline, mesh.pipeline_rank)
    with torch.device("meta"):
        model = build_model(architecture, dtype=DTYPES[parameters], part=part)
    if pipeline is not None and pipeline.splits_backward:
        split_products(model.blocks)
    return model, pipeline


def _allocate(
    model: Model, plan: Plan, device: torch.device, room: HostRoom | None, cuts: Mapping[str, Cut]
) -> None:
    """Give a model that is on the meta device memory where its plan says, and note what a rank has of cut layers."""
    # Weights that live on the host never lie on the device all at once, nor on the host twice, not even to be filled.
    hosted = plan.placement.states.on_host("weights")
    for number, block in zip(model.part.blocks, model.blocks, strict=True):
        if room is not None and number in hosted:
            room.make_weights(block)
        else:
            block.to_empty(device=device)
    for module in model.ends:
        module.to_empty(device=device)
    for name, parameter in model.named_parameters():
        if name in cuts:
            set_cut(parameter, cuts[name])


def quantizes(plan: Plan, compute: str) -> bool:
    """Whether any GEMM differs from the working format, or any input is not simply saved."""
    return any(choice != LinearPrecision.of(compute) for choice in plan.gemms.values())


def plan_layers(
    model: Model, plan: Plan, choose: BackendChooser, seed: int, mesh: RankMesh = ONE_RANK
) -> PlannedModel:
    """Swap the blocks' linear layers for planned ones, and plan the head's GEMMs inside the loss; of those that are
    here."""
    precisions = gemms_in(model, plan)
    head = precisions.pop(HEAD, None)
    planned = swap_in(model, precisions, seed=seed, choose=choose)
    if head is not None:
        model.planned_head = PlannedLayer(HEAD, head, planned.clock, choose)
    share_formats(model, planned, mesh)
    return planned


def gemms_in(model: Model, plan: Plan) -> dict[str, LinearPrecision]:
    """The formats of a plan for the layers that a model has here."""
    part = model.part
    return {
        layer: choice
        for layer, choice in plan.gemms.items()
        if (part.is_last if layer == HEAD else place(layer)[0] in part.blocks)
    }
