"""GaLore and Fira: the blocks' weight matrices move by Adam in a low-rank subspace, everything else by AdamW.

Problem  Adam's two averages take twice the memory of fp32 weights: half of what plain training keeps.
Method   `scrimp.optim.low_rank` for each of the blocks' matrices, whose averages are those of a projection of rank
         `rank` on the gradient's own directions, found anew in every `refresh_every`-th update; Fira adds what the
         projection leaves out. AdamW (`scrimp.optim.adamw`) for embedding, head, norms and biases, at the same rate
         (the embedding at its own: `optimizer.embedding_lr_ratio`).
Bytes    Of a map of m x n, m <= n, with rank r < m, in fp32::

             4 (m r + 2 r n)      P, M and V; of Fira 4 more               in place of AdamW's 4 * 2 m n

         With r = m / 4 and m = n that is 3/8 of AdamW's. A map that is no larger than the rank takes 4 * 2 m n.
Maps     A matrix in which several maps of the same input are stacked (q, k and v; gate and up; experts) is cut into
         these, as Muon's are, each with a projector of its own.
Ranks    A map's gradient is put together on one of the ranks that share it, which keeps its states and hands the parts
         of its update back, both in fp32 (`scrimp.optim.shared_maps`). So numbers are those of one process, and states
         are shared out by maps.
State    ``<parameter>.projector``, ``.exp_avg``, ``.exp_avg_sq``, of Fira ``.rest_norm``: of all maps of a matrix, one
         after the other (`scrimp.optim.owned_states`). When P is made anew follows from the count of updates.
Limits   States stay on the device, and masters are needed beside bf16 parameters. The gradient itself is whole: what
         GaLore's authors save by updating each layer in its backward pass is not saved here.
         States of copies that train alone (`outer.every`) have no mean. A rule for the statistics keeps P as it is.
         On CUDA the account takes cuSOLVER to need as much as LAPACK beside its results.
Source   Zhao et al., arXiv 2403.03507 (GaLore); Chen et al., arXiv 2410.01623 (Fira)
Checked  tests/optim/test_galore.py: formulas in float64, bytes, resuming; tests/optim/test_galore_on_ranks.py: one
         process
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from scrimp.config import Architecture, OptimizerConfig
from scrimp.config.experts import has_experts
from scrimp.config.schema import decided
from scrimp.models import ModelSpec, spec_of
from scrimp.optim.adamw import AdamW
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.optim.low_rank import LowRankState, direction, state_shapes
from scrimp.optim.owned_states import OwnedStates, Shapes
from scrimp.optim.shared_maps import Map, SharedMaps, WholeMaps, maps_of, sharing_group, stacked_rows
from scrimp.optim.targets import Targets
from scrimp.optim.update import Step, clip, follow_move
from scrimp.optim.update_rules import LowRankRule
from scrimp.parts import TensorPart
from scrimp.profiler.memory_trace import GradientSums, Tracing
from scrimp.profiler.memory_trace.stand_ins import DeviceFunctions
from scrimp.runtime import Executable
from scrimp.statistics import UpdateRule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FIRA = "fira"
"""The name of GaLore with what its projectors leave out."""


def build(executable: Executable, settings: OptimizerConfig, *, seed: int) -> GaLore:
    """GaLore or Fira of a run: all of it on the device."""
    model, mesh = executable.model, executable.mesh
    # A map has one owner in each copy of the model, but among experts one of all copies.
    is_writer = mesh.is_trivial or mesh.copy == 0 or has_experts(model.spec.architecture)
    return GaLore(
        model.trained(),
        settings,
        model.spec,
        seed=seed,
        group=sharing_group(executable),
        is_writer=is_writer,
    )


def memory(
    architecture: Architecture, settings: OptimizerConfig, parameters: str, *, ranks: int = 1
) -> LowRankMemory:
    """What it takes for parameters in this format, fp32 or bf16."""
    rest = AdamWMemory(parameters, bool(settings.master_weights), settings.moments)
    return LowRankMemory(
        architecture,
        rest,
        decided(settings.rank),
        keeps_rest=settings.name == FIRA,
        is_shared=ranks > 1,
    )


class GaLore(AdamW):
    """Adam in the leading directions of gradients for the matrices of the blocks, AdamW for the rest.

    Args:
        parameters: float32, or bfloat16 with `master_weights`, by name.
        settings: as of `AdamW`, and `rank`, `refresh_every`, `low_rank_scale`; `name` says which of the two it is.
        spec: of the model that the parameters are of.
        seed: as of `AdamW`.
        group: ranks that have parts of the matrices, for which making it is a collective; None: they lie here whole.
        is_writer: whether checkpoints have the states of matrices from here.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerConfig,
        spec: ModelSpec,
        *,
        seed: int = 0,
        group: ProcessGroup | None = None,
        is_writer: bool = True,
    ) -> None:
        self.name = settings.name
        self._spec = spec
        self._rows: dict[str, tuple[int, ...]] = {}
        super().__init__(parameters, settings, seed=seed)
        parts = {name: self._tensor_parts[name] for name in self._rows}
        maps, fp32 = maps_of(self._rows, {name: part.shape[1] for name, part in parts.items()}), torch.float32
        self._maps = WholeMaps(maps, fp32) if group is None else SharedMaps(maps, parts, group, fp32)
        self._owned = self._states_of(maps, is_writer=is_writer)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        rows = stacked_rows(self._spec, name)
        if rows is None:
            super()._add(name, parameter)
            return
        Targets._add(self, name, parameter)
        self._rows[name] = rows

    def _states_of(self, maps: Sequence[Map], *, is_writer: bool) -> dict[str, OwnedStates]:
        shapes: dict[str, dict[Map, Shapes]] = {name: {} for name in self._rows}
        for one in maps:
            shapes[one.name][one] = state_shapes(
                one.rows, one.columns, decided(self._settings.rank), keeps_rest=self.name == FIRA
            )
        owned = set(self._maps.owned)
        return {
            name: OwnedStates(found, owned, self._targets[name].device, is_writer=is_writer)
            for name, found in shapes.items()
        }

    def _state(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield from Targets._state(self, name) if name in self._rows else super()._state(name)

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """Name and storage of every state tensor; loading a checkpoint writes into them."""
        yield from super().parts()
        for name, states in self._owned.items():
            for suffix, part in states.parts():
                yield f"{name}.{suffix}", part

    def rule(self, name: str) -> UpdateRule:
        """How a parameter is updated; learning rates relative to `optimizer.lr`."""
        if name not in self._rows:
            return super().rule(name)
        states = tuple(self._of(one) for one in self._maps.owned if one.name == name)
        scale, step = self._settings.low_rank_scale, self._numbers(1.0, decayed=True)
        return LowRankRule(1.0, scale, self._rows[name], states, step)

    def _of(self, one: Map) -> LowRankState:
        return LowRankState(**self._owned[one.name].of(one))

    @torch.no_grad()
    def _update_by(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        super()._update_by({n: g for n, g in gradients.items() if n not in self._rows}, lr)
        settings, step = self._settings, self._numbers(lr, decayed=True)
        clip([gradient for name, gradient in gradients.items() if name in self._rows], self._clip)
        refresh = self.num_updates % settings.refresh_every == 0

        def move(name: str, rows: slice) -> Tensor:
            gradient, target = gradients.get(name), self._targets[name]
            return torch.zeros_like(target[rows]) if gradient is None else gradient[rows]

        def make(one: Map) -> Callable[[Tensor], Tensor]:
            return partial(direction, self._of(one), step=step, refresh=refresh)

        def follow(one: Map, rows: slice, move: Tensor) -> None:
            rate = step.lr * settings.low_rank_scale
            follow_move(self._targets[one.name][rows], move, rate, step.lr * step.weight_decay)

        self._maps.update(gradients.keys(), move, make, follow)


@dataclass(frozen=True)
class LowRankMemory:
    """Bytes of GaLore or Fira (a `scrimp.profiler.memory_trace.OptimizerMemory`): its update is run on the trace's
    tensors."""

    architecture: Architecture
    rest: AdamWMemory
    """Bytes of what AdamW updates."""
    rank: int
    keeps_rest: bool = False
    """Whether it is Fira, which moves by what the projector leaves out too."""
    is_shared: bool = False
    """Whether ranks have parts of the matrices."""

    def sums(self, device: DeviceFunctions) -> GradientSums:
        """As AdamW's."""
        return self.rest.sums(device)

    def state_bytes(self, named: Mapping[str, Tensor]) -> int:
        """Projectors, averages and masters of matrices; what AdamW keeps of the rest."""
        matrices, others = self._split(named)
        numbers = sum(math.prod(shape) for one in matrices for shape in self._shapes(*one).values())
        masters = sum(rows * columns for rows, columns in matrices) * self.rest.master_weights
        return 4 * (numbers + masters) + self.rest.state_bytes(others)

    def update_peak(self, named: Mapping[str, Tensor], device: DeviceFunctions, tracing: Tracing) -> int:
        """That of the map that takes most when its projector is made anew, or of AdamW: one after the other."""
        matrices, others = self._split(named)
        found = [self.rest.update_peak(others, device, tracing)]
        for rows, columns in sorted(set(matrices)):
            target = torch.empty(rows, columns)
            shapes = self._shapes(rows, columns)
            state = LowRankState(**{name: torch.empty(shape) for name, shape in shapes.items()})
            with tracing() as tracker:
                follow_move(target, direction(state, target, _ANY, refresh=True), 1.0, 0.0)
            whole = 4 * rows * columns * self.is_shared  # put together
            found.append(max(tracker.peak + whole, 3 * whole))
        return max(found)

    def _shapes(self, rows: int, columns: int) -> Shapes:
        return state_shapes(rows, columns, self.rank, keeps_rest=self.keeps_rest)

    def _split(self, named: Mapping[str, Tensor]) -> tuple[list[tuple[int, int]], dict[str, Tensor]]:
        """Rows and columns of all maps, and the parameters that AdamW has."""
        spec = spec_of(self.architecture)
        found = {name: stacked_rows(spec, name) for name in named}
        maps = [(each, named[name].shape[1]) for name, rows in found.items() if rows for each in rows]
        return maps, {name: tensor for name, tensor in named.items() if found[name] is None}


_ANY = Step(number=1, lr=0.0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0)
"""A step of which only the bytes count."""
