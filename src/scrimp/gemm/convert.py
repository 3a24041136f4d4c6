"""Make the linear layers of any module run by a plan, and back.

A linear layer becomes a planned one by a change of its class: the object, its parameters, hooks, names and
state dict stay what they are, so that optimizers, FSDP2, tensor-parallel styles and checkpoints notice
nothing. All requests are checked before the first layer changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from scrimp.errors import ModelError, PlanError
from scrimp.gemm.adapted import AdaptedLinear, PlannedAdapted
from scrimp.gemm.clock import Clock
from scrimp.gemm.fingerprints import Fingerprints, changed_gemms
from scrimp.gemm.grouped import GroupedLinear
from scrimp.gemm.layer import BackendChooser, PlannedLayer, check_precision
from scrimp.gemm.linear import PlannedLinear, PlannedTransposed
from scrimp.gemm.linear_kinds import has_own_forward, is_transposed, plannable_modules, weight_matrix
from scrimp.gemm.planned_grouped import PlannedGrouped, members_of
from scrimp.gemm.split_linear import PlannedSplit, SplitLinear
from scrimp.precision import LinearPrecision

_CLASSES: dict[type, type] = {}


class PlannedModel:
    """The planned layers of a model."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], clock: Clock) -> None:
        self._model, self._layers, self.clock = model, layers, clock
        self.proof: Fingerprints | None = None
        """The proof of the GEMMs that the last plan changed, where someone asked for it (`prove`)."""
        self._is_joint, self._passes = False, 0
        """Whether all ranks prove together and wait for numbers; forward passes since."""
        self._hook = model.register_forward_pre_hook(self._tick)

    @property
    def layers(self) -> dict[str, PlannedLayer]:
        """Name to planned layer."""
        return {name: cast(PlannedLayer, layer.planned) for name, layer in self._layers.items()}

    def replan(self, precisions: Mapping[str, LinearPrecision] | LinearPrecision | str) -> list[str]:
        """Change layers between two steps; returns the names of those that changed.

        Args:
            precisions: by layer; or one for all planned layers.

        Raises:
            PlanError: a layer that is not planned, or a recipe that does not exist; nothing has changed.
        """
        precisions = _by_layer(precisions, self._layers)
        unknown = sorted(set(precisions) - set(self._layers))
        if unknown:
            raise PlanError("the plan names layers that the model does not have", got=", ".join(unknown[:8]))
        for name, precision in precisions.items():
            self.layers[name].check(precision)
        layers = self.layers
        changed = [name for name, new in precisions.items() if layers[name].precision != new]
        for name in changed:
            layers[name].replan(precisions[name])
        return changed

    def prove(self, before: Mapping[str, LinearPrecision], *, on_all_ranks: bool = False) -> Fingerprints:
        """Prove the GEMMs that were planned otherwise before, each when it runs next; see `Fingerprints`.

        A GEMM that did not run in its format raises a TrainingError where it runs, in the forward or the backward pass.
        A rank that stopped there would leave the others waiting: with `on_all_ranks` all raise it together, when the
        next forward pass in training begins (`check_proof`).

        Args:
            before: the precisions before this plan; layers that are not in it are new.
            on_all_ranks: all ranks of the default process group call this, and make as many forward passes.
        """
        if self.proof is not None:
            self.proof.release()
        layers = self.layers
        now = {name: layer.precision for name, layer in layers.items()}
        unproven = set() if self.proof is None else self.proof.pending | self.proof.undecided
        self.proof = Fingerprints(now, changed_gemms(before, now) | unproven, at_once=not on_all_ranks)
        self.proof.watch(layers)
        self._is_joint, self._passes = on_all_ranks, 0
        return self.proof

    def check_proof(self) -> None:
        """Say what the proof has found so far: on all ranks where they prove together, each of which calls this.

        The model's forward passes do it themselves, but for a model that is compiled as a whole.

        Raises:
            TrainingError: GEMMs did not run in their formats; names them, and their ranks.
        """
        if self.proof is None:
            return
        if self._is_joint:
            self._is_joint = self.proof.join()
        self.proof.check()

    def locate_shards(self) -> None:
        """Tell tensor-parallel layers which piece is theirs: before compiling; eager layers find out themselves."""
        from torch.distributed.tensor import DTensor  # slow to import, and rarely needed

        from scrimp.gemm.tensor_parallel import locate

        for layer in self._layers.values():
            if isinstance(layer.weight, DTensor):
                locate(cast(PlannedLayer, layer.planned), layer.weight)

    def swap_out(self) -> None:
        """Ordinary linear layers again.

        Raises:
            ModelError: another library has changed a layer's class since; nothing has changed.
        """
        for name, layer in self._layers.items():
            if "__scrimp_original__" not in vars(type(layer)):
                raise ModelError(
                    f"{name} has become another class since it was planned, which swap_out would undo",
                    got=type(layer).__name__,
                    do="plan layers after they are sharded one by one, or replan them to the compute format",
                )
        if self.proof is not None:
            self.proof.release()
        for layer in self._layers.values():
            _to_class(layer, type(layer).__scrimp_original__)  # type: ignore[attr-defined]
            del layer.planned
        self._hook.remove()
        self._layers = {}

    def _tick(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            self.clock.tick()
            if not torch.compiler.is_compiling() and self._is_joint:
                self._passes += 1
                # After 1, 2, 4, 8, ... passes: a GEMM that never shows anything must not cost a wait in each.
                if self._passes > 1 and (self._passes - 1).bit_count() == 1:
                    self.check_proof()


def swap_in(
    model: nn.Module,
    precisions: Mapping[str, LinearPrecision] | LinearPrecision | str,
    *,
    seed: int = 0,
    choose: BackendChooser | None = None,
) -> PlannedModel:
    """Give linear layers of a model a plan.

    Args:
        model: any module; a linear layer itself too (its name is then "").
        precisions: by the layers' names in the model; or one for all linear layers.
        seed: of the rounding noise. Every forward pass of `model` in training mode is a new step of it,
            unless a loop says which with `clock.begin`; a loop that calls parts of the model must.
        choose: back end per recipe and GEMM; unset: what `scrimp.gemm.backends_for` finds best on the device.

    Raises:
        PlanError: a name that is no linear layer, a layer that is planned already or has a forward of its
            own, an unknown recipe.
    """
    if not isinstance(model, nn.Module):
        raise ModelError("only modules are planned", got=type(model).__name__, expected="a torch.nn.Module")
    linears = plannable_modules(model)
    if not linears:
        raise ModelError("the model has no linear layer", got=type(model).__name__)
    precisions = _by_layer(precisions, linears)
    missing = sorted(set(precisions) - set(linears))
    if missing:
        raise PlanError(
            "the plan names what is no linear layer of the model",
            got=", ".join(missing[:8]),
            expected=", ".join(list(linears)[:8]) + (", ..." if len(linears) > 8 else ""),
        )
    for name, precision in precisions.items():
        check_precision(precision, name)
        _check_layer(linears[name], name)
    if choose is None:
        from scrimp.gemm.select import backends_for  # late: it probes the device

        choose = backends_for(weight_matrix(next(iter(linears.values()))).device)
    clock = Clock(seed)
    layers = {}
    for name, precision in precisions.items():
        layer = layers[name] = linears[name]
        planned = PlannedLayer(name, precision, clock, choose)
        if isinstance(layer, GroupedLinear):
            planned.members = members_of(planned, layer.experts)
        layer.planned = planned  # type: ignore[assignment]
        _to_class(layer, _planned_class(layer))
    return PlannedModel(model, layers, clock)


def split_products(module: nn.Module) -> None:
    """Let the gradients of the weights of a module's linear layers wait, where a backward pass asks for it.

    Raises:
        ModelError: a layer has a forward method of its own.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, GroupedLinear):
            layer.splits = True
        if not isinstance(layer, nn.Linear) or hasattr(layer, "planned"):
            continue
        if has_own_forward(layer):
            raise ModelError(
                "a schedule that splits backward passes cannot split this layer's",
                got=f"{name}: {type(layer).__name__}, with a forward method of its own",
                do="choose layout.schedule 1f1b",
            )
        layer.__class__ = SplitLinear


def _by_layer(
    precisions: Mapping[str, LinearPrecision] | LinearPrecision | str, layers: Mapping[str, nn.Module]
) -> Mapping[str, LinearPrecision]:
    """One precision per layer, whichever way it was given."""
    if isinstance(precisions, str):
        precisions = LinearPrecision.of(precisions)
    if isinstance(precisions, LinearPrecision):
        return dict.fromkeys(layers, precisions)
    wrong: list[object] = [] if isinstance(precisions, Mapping) else [precisions]
    wrong += (
        [] if wrong else [value for value in precisions.values() if not isinstance(value, LinearPrecision)]
    )
    if wrong:
        raise PlanError(
            "this is no precision of a layer",
            got=repr(wrong[0]),
            expected="a recipe's name or a LinearPrecision for all layers, or a LinearPrecision by layer name",
        )
    return precisions


def _check_layer(layer: nn.Module, name: str) -> None:
    if hasattr(layer, "planned"):
        raise PlanError(f"{name} is planned already", do="call replan or swap_out of its PlannedModel")
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        raise PlanError(
            f"{name} is read by its attention module, which never calls it",
            got="the output projection of nn.MultiheadAttention",
            do="leave it out: name the layers of the plan",
        )
    if has_own_forward(layer):
        raise PlanError(
            f"{name} has a forward of its own, which a plan would replace",
            got=type(layer).__name__,
            do="leave it out: name the layers of the plan",
        )


def _planned_class(layer: nn.Module) -> type:
    original = type(layer)
    if original not in _CLASSES:
        planned: type = PlannedTransposed if is_transposed(layer) else PlannedLinear
        if isinstance(layer, GroupedLinear):
            planned = PlannedGrouped
        if isinstance(layer, SplitLinear):
            planned = PlannedSplit
        if isinstance(layer, AdaptedLinear):
            planned = PlannedAdapted
        bases = (PlannedLinear,) if original is nn.Linear else (planned, original)
        _CLASSES[original] = type(f"Planned{original.__name__}", bases, {"__scrimp_original__": original})
    return _CLASSES[original]


def _to_class(layer: nn.Module, kind: type) -> None:
    layer.__class__ = kind
