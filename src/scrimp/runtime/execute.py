"""From a plan to a model that runs by it: formats, placement, compilation.

The model is described on the meta device, allocated once on its device in the format of its
parameters, then initialised or loaded: no second copy ever exists. GEMMs in bf16 over fp32
parameters run under autocast; over bf16 parameters they need nothing. Where the plan gives any GEMM a
quantized recipe, the linear layers are swapped for planned ones, parameters untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from scrimp.config import Architecture
from scrimp.config.activations import Activations
from scrimp.errors import PlanError
from scrimp.gemm import (
    Backend,
    BackendChooser,
    PlannedLayer,
    PlannedModel,
    backends_for,
    refuse_unrunnable,
    swap_in,
)
from scrimp.gemm.problem import Shape, shape_of
from scrimp.model import Block, Decoder, LossSums
from scrimp.planner import Plan, linear_shapes
from scrimp.precision import GEMMS, HIGH_PRECISION, LinearPrecision
from scrimp.runtime.memory import HostMemory, HostRoom, carry_out, uses_host, weights_on_host

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEAD = "head"
MOST_GRAPHS = 64
"""Of a block: its layers save inputs, codes or nothing, in training and evaluation, as far as plans mix them."""


@dataclass(frozen=True)
class Executable:
    """A model with the precision that the plan gives it."""

    model: Decoder
    device: torch.device
    precision: str
    """Working format of the activations, fp32 or bf16: every GEMM that is not quantized runs in it."""
    loss_chunk: int = 0
    """Tokens whose logits exist at once; 0 for all."""
    z_loss: float = 0.0
    """Weight of the squared log-partition penalty."""
    planned: PlannedModel | None = None
    """The planned layers of the blocks, where the plan quantizes anything."""
    host: HostMemory | None = None
    """The host's part of the memory, where the plan has any."""
    most_tokens: int = 0
    """Of a micro-batch, for which the memory was planned; 0: not said."""
    longest: int = 0
    """Tokens of a sequence, for which it was planned; 0: not said."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Casts GEMM inputs to bf16 where the parameters are fp32."""
        parameter_dtype = self.model.head_weight.dtype
        if parameter_dtype == DTYPES[self.precision]:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.precision])

    def begin(self, step: int, first_row: int) -> None:
        """The next micro-batch is of this step, its first token this row of the step's batch: the address
        of its rounding noise."""
        if self.planned is not None:
            self.planned.clock.begin(step, first_row)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, document_starts: Tensor | None) -> LossSums:
        """Summed loss of one micro-batch; the tensors may still be on the host.

        Raises:
            PlanError: more tokens, or longer sequences, than the plan has memory for.
        """
        self._refuse_unplanned(*tokens_BT.shape)
        tokens_BT = tokens_BT.to(self.device, non_blocking=True)
        targets_BT = targets_BT.to(self.device, non_blocking=True)
        with self.autocast():
            return self.model.loss(
                tokens_BT, targets_BT, document_starts, chunk=self.loss_chunk, z_loss=self.z_loss
            )

    def _refuse_unplanned(self, rows: int, length: int) -> None:
        """As many tokens in fewer, longer sequences take more: attention's workspace grows with their length."""
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
        if self.host is None and any("+offload" in choice.activations for choice in plan.blocks.values()):
            raise PlanError(
                "activations cannot leave the device in a run that has taken no host memory",
                got=", ".join(dict.fromkeys(choice.activations for choice in plan.blocks.values())),
                do="start it with a plan that offloads",
            )
        leaving = set()
        for number, choice in plan.blocks.items():
            activations = Activations.parse(choice.activations)
            cast(Block, self.model.blocks[int(number)]).activations = activations
            if activations.is_offloaded:
                leaving.add(int(number))
        if self.host is not None:
            self.host.blocks.leaving = frozenset(leaving)

    def give_up(self) -> None:
        """A step was broken off: nothing of it waits or is on its way."""
        if self.host is not None:
            self.host.blocks.reset()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of all parameters, where they are kept between steps."""
        at_home = {}
        if self.host is not None:
            self.host.link.finish()
            at_home = self.host.weights.at_home()
        for name, parameter in self.model.named_parameters():
            yield name, at_home.get(parameter, parameter.detach())


def realise(
    plan: Plan,
    architecture: Architecture,
    fill: Callable[[Decoder], None],
    *,
    device: torch.device,
    parameters: str,
    compute: str,
    seed: int = 0,
    loss_chunk: int = 0,
    z_loss: float = 0.0,
    choose: BackendChooser | None = None,
    replans: bool = False,
    room: HostRoom | None = None,
    most_tokens: int = 0,
    longest: int = 0,
) -> Executable:
    """Allocate the model of a plan and fill its parameters.

    Args:
        fill: initialises the parameters, or loads them.
        parameters: their format, fp32 or bf16.
        compute: working format of the activations.
        seed: of the rounding noise.
        choose: back end per recipe and GEMM (`choose_backends`); unset: what works for every shape.
        replans: formats will change, so that layers are planned even where nothing is quantized yet.
        room: host memory that was taken for the plan (`take_room`), where it needs any.
        most_tokens: of a micro-batch; more are refused, since nobody planned for them.
        longest: tokens of a sequence; longer ones are refused too.

    Raises:
        PlanError: part of the plan lives on the host, and no room was taken there.
    """
    if room is None and uses_host(plan):
        raise PlanError(
            "part of the plan lives on the host, where no room was taken",
            do="take it with `take_room`, before the model is made",
        )
    with torch.device("meta"):
        model = Decoder(architecture, dtype=DTYPES[parameters])
    # Weights that live on the host never lie on the device all at once, nor on the host twice, not even to be filled.
    hosted = weights_on_host(plan)
    for index, block in enumerate(model.blocks):
        if room is not None and index in hosted:
            room.make_weights(block)
        else:
            block.to_empty(device=device)
    for name, module in model.named_children():
        if name != "blocks":
            module.to_empty(device=device)
    fill(model)
    planned = None
    if replans or quantizes(plan, compute):
        planned = plan_layers(model, plan, choose or backends_for(device), seed)
    host = None if room is None else carry_out(plan, model, room)
    executable = Executable(model, device, compute, loss_chunk, z_loss, planned, host, most_tokens, longest)
    executable.change_activations(plan)
    return executable


def choose_backends(
    plan: Plan,
    architecture: Architecture,
    device: torch.device,
    *,
    tokens: int,
    head_tokens: int = 0,
    backend: str = "auto",
) -> BackendChooser:
    """The back ends that run a plan in the shapes of its model: seen to work here, the fastest first.

    Args:
        tokens: of one micro-batch.
        head_tokens: of one chunk of the loss; 0: all.
        backend: the one that must run everything that is quantized, or auto.

    Raises:
        PlanError: no back end, or not the one that is asked for, runs a GEMM; with the nearest recipe that runs.
    """
    only = None if backend == "auto" else backend
    quantized = {
        layer: choice
        for layer, choice in precisions_of(plan).items()
        if set(recipes_of(choice)) - {*HIGH_PRECISION}
    }
    shapes = {layer: _sizes(architecture, layer) for layer in quantized}
    refuse_unrunnable({k: v for k, v in quantized.items() if k != HEAD}, shapes, tokens, device, only)
    if HEAD in quantized:
        chunk = head_tokens or tokens
        for rows in {min(chunk, tokens), tokens % chunk} - {0}:
            refuse_unrunnable({HEAD: quantized[HEAD]}, shapes, rows, device, only)
    return preferred_backends(device, backend)


def preferred_backends(device: torch.device, backend: str = "auto") -> BackendChooser:
    """What runs each GEMM if it can: of quantized ones the back end that is asked for, or the fastest."""
    selection = backends_for(device)
    if backend == "auto":
        return selection
    forced = backends_for(device, backend)

    def choose(recipe: str, gemm: str, shape: Shape, device: torch.device) -> Backend:
        return (selection if recipe in HIGH_PRECISION else forced)(recipe, gemm, shape, device)

    return choose


def describe_backends(
    plan: Plan, architecture: Architecture, choose: BackendChooser, device: torch.device, *, tokens: int
) -> str:
    """Which back end runs which recipe: "fp8 by torch, nvfp4 by reference (emulated)"."""
    chosen: dict[str, dict[str, None]] = {}
    for layer, choice in precisions_of(plan).items():
        for gemm in GEMMS:
            recipe, shape = choice.gemm(gemm), shape_of(gemm, tokens, *_sizes(architecture, layer))
            if recipe not in HIGH_PRECISION:
                backend = choose(recipe, gemm, shape, device)
                label = backend.name + (" (emulated)" if backend.emulates(recipe) else "")
                chosen.setdefault(recipe, {})[label] = None
    return ", ".join(f"{recipe} by {' and '.join(labels)}" for recipe, labels in chosen.items())


def _sizes(architecture: Architecture, layer: str) -> tuple[int, int]:
    """(inputs, outputs) of a layer by its name in the plan."""
    outputs, inputs = linear_shapes(architecture)[layer.split(".", 2)[-1]]
    return inputs, outputs


def recipes_of(choice: LinearPrecision) -> tuple[str, str, str]:
    """The recipes of fprop, dgrad and wgrad."""
    return choice.fprop, choice.dgrad, choice.wgrad


def precisions_of(plan: Plan) -> dict[str, LinearPrecision]:
    """Layer to the recipes of its GEMMs and what it saves."""
    return {
        layer: LinearPrecision(choice.fprop, choice.dgrad, choice.wgrad, choice.saved)
        for layer, choice in plan.gemms.items()
    }


def quantizes(plan: Plan, compute: str) -> bool:
    """Whether any GEMM differs from the working format, or any input is not simply saved."""
    return any(choice != LinearPrecision.of(compute) for choice in precisions_of(plan).values())


def plan_layers(model: Decoder, plan: Plan, choose: BackendChooser, seed: int) -> PlannedModel:
    """Swap the blocks' linear layers for planned ones, and plan the head's GEMMs inside the loss."""
    precisions = precisions_of(plan)
    head = precisions.pop(HEAD)
    planned = swap_in(model, precisions, seed=seed, choose=choose)
    model.planned_head = PlannedLayer(HEAD, head, planned.clock, choose)
    return planned


def compile_blocks(model: Decoder) -> None:
    """torch.compile every block in place: equal blocks share one compiled graph.

    Blocks whose plans save different things (inputs, codes, nothing) have graphs of their own. More of them than torch
    allows would quietly run uncompiled: the limit is raised to what a block's four layers can need, and hitting
    it is an error.
    """
    import torch._dynamo  # a second to import, and only needed here

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in model.blocks:
        block.compile()
