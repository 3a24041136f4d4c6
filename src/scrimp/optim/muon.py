"""Muon: the blocks' weight matrices move by orthogonalised momentum, everything else by AdamW.

Problem  The gradients of a weight matrix lie mostly in a few directions; AdamW follows these, whatever it divides by.
Method   That of torch.optim.Muon for the blocks' matrices, g the gradient, B its average, mu `momentum`::

             B = mu B + (1 - mu) g             U = (1 - mu) g + mu B                  (Nesterov)
             O = five quintic Newton-Schulz steps of U / |U|, in bf16: all singular values come near 1
             W = (1 - lr wd) W - lr * 0.2 sqrt(max(rows, columns)) * O

         AdamW (`scrimp.optim.adamw`) for embedding, head, norms and biases: the first two are tables whose rows move
         alone, the others no matrices.
Rate     One `optimizer.lr` for both, `optimizer.embedding_lr_ratio` times it for the embedding. O has a root mean
         square of 1 / sqrt(max(rows, columns)), AdamW's updates have one of 0.2 to 0.4: with the factor above
         ("match_rms_adamw") a learning rate and a weight decay that suit AdamW suit Muon.
Parts    A matrix in which several maps of the same input are stacked (q, k and v; gate and up) is cut into these, each
         orthogonalised and scaled alone. Together, the maps with the large gradients would decide how far the others
         move; Jordan reports that Q, K and V apart train better, and the models that Muon was tuned on keep gate and
         up apart, too.
Ranks    Momentum lies as its parameter does. Maps of which ranks have parts are orthogonalised whole, each on one of
         them (`scrimp.optim.shared_maps`).
State    ``<parameter>.momentum_buffer`` of a matrix, beside AdamW's states of the rest; all from the start.
Limits   States stay on the device, and masters are needed beside bf16 parameters, whose updates would be rounded
         to nearest.
         The account's peak of an update is a bound where several threads of a CPU multiply in bf16
         (`scrimp.profiler.memory_trace.products`): on two of them up to 18 % too high, on one within 2 %.
Source   Jordan, https://kellerjordan.github.io/posts/muon/; rate and decay: Liu et al., arXiv 2502.16982 (Moonlight)
Checked  tests/optim/test_muon.py: torch's optimizers on the parts, bit for bit; the account against torch's allocator;
         tests/optim/test_muon_on_ranks.py: one process
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from scrimp.config import Architecture, OptimizerConfig
from scrimp.models import ModelSpec, spec_of
from scrimp.optim.adamw import AdamW
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.optim.newton_schulz import matched_rate, orthogonalised
from scrimp.optim.shared_maps import Map, SharedMaps, WholeMaps, maps_of, sharing_group, stacked_rows
from scrimp.optim.targets import Targets
from scrimp.optim.update import clip, follow_move
from scrimp.optim.update_rules import MuonRule
from scrimp.profiler.memory_trace import GradientSums, Tracing
from scrimp.profiler.memory_trace.stand_ins import DeviceFunctions
from scrimp.runtime import Executable
from scrimp.statistics import UpdateRule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RATE = "match_rms_adamw"
"""torch's name for `matched_rate`."""


def build(executable: Executable, settings: OptimizerConfig, *, seed: int) -> Muon:
    """Muon of a run: all of it on the device."""
    model = executable.model
    parameters = model.trained()
    return Muon(parameters, settings, model.spec, seed=seed, group=sharing_group(executable))


def memory(
    architecture: Architecture, settings: OptimizerConfig, parameters: str, *, ranks: int = 1
) -> MuonMemory:
    """What it takes for parameters in this format, fp32 or bf16."""
    rest = AdamWMemory(parameters, bool(settings.master_weights), settings.moments)
    return MuonMemory(architecture, rest, is_shared=ranks > 1)


class Muon(AdamW):
    """Orthogonalised momentum for the matrices of the blocks, AdamW for the rest.

    Args:
        parameters: float32, or bfloat16 with `master_weights`, by name.
        settings: as of `AdamW`, and `momentum`.
        spec: of the model that the parameters are of.
        seed: of AdamW's rounding noise, where its averages are rounded.
        group: ranks that have parts of the matrices, for which making it is a collective; None: they lie here whole.
    """

    name = "muon"

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerConfig,
        spec: ModelSpec,
        *,
        seed: int = 0,
        group: ProcessGroup | None = None,
    ) -> None:
        self._spec = spec
        self._rows: dict[str, tuple[int, ...]] = {}
        self._buffers: dict[str, Tensor] = {}
        """Averages of what lies here of matrices."""
        super().__init__(parameters, settings, seed=seed)
        parts = {name: self._tensor_parts[name] for name in self._rows}
        maps = maps_of(self._rows, {name: part.shape[1] for name, part in parts.items()})
        bf16 = torch.bfloat16
        self._maps = WholeMaps(maps, bf16) if group is None else SharedMaps(maps, parts, group, bf16)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        rows = stacked_rows(self._spec, name)
        if rows is None:
            super()._add(name, parameter)
            return
        Targets._add(self, name, parameter)
        self._rows[name] = rows
        self._buffers[name] = torch.zeros_like(self._targets[name].detach())

    def _state(self, name: str) -> Iterator[tuple[str, Tensor]]:
        if name not in self._buffers:
            yield from super()._state(name)
            return
        yield "momentum_buffer", self._buffers[name]
        yield from Targets._state(self, name)

    def rule(self, name: str) -> UpdateRule:
        """How a parameter is updated; learning rates relative to `optimizer.lr`."""
        if name not in self._buffers:
            return super().rule(name)
        rows, momentum = self._rows[name], self._settings.momentum
        return MuonRule(1.0, self._buffers[name], momentum, rows=rows, rate=RATE)

    @torch.no_grad()
    def _update_by(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        super()._update_by({n: g for n, g in gradients.items() if n not in self._buffers}, lr)
        settings = self._settings
        clip([gradient for name, gradient in gradients.items() if name in self._buffers], self._clip)

        def move(name: str, rows: slice) -> Tensor:
            average, gradient = self._buffers[name][rows], gradients.get(name)
            gradient = torch.zeros_like(average) if gradient is None else gradient[rows]
            return moved(gradient, average, settings.momentum)

        def follow(one: Map, rows: slice, move: Tensor) -> None:
            rate = lr * matched_rate(one.rows, one.columns)
            follow_move(self._targets[one.name][rows], move, rate, lr * settings.weight_decay)

        self._maps.update(gradients.keys(), move, lambda one: orthogonalised, follow)


def moved(gradient: Tensor, average: Tensor, momentum: float) -> Tensor:
    """What is orthogonalised: the gradient beside its average, which takes it in."""
    average.lerp_(gradient, 1 - momentum)
    return gradient.lerp(average, momentum)


@dataclass(frozen=True)
class MuonMemory:
    """Bytes of Muon (a `scrimp.profiler.memory_trace.OptimizerMemory`): its update is run on the trace's tensors."""

    architecture: Architecture
    rest: AdamWMemory
    """Bytes of what AdamW updates."""
    is_shared: bool = False
    """Whether ranks have parts of the matrices."""

    def sums(self, device: DeviceFunctions) -> GradientSums:
        """As AdamW's."""
        return self.rest.sums(device)

    def state_bytes(self, named: Mapping[str, Tensor]) -> int:
        """One average and a master of each matrix; what AdamW keeps of the rest."""
        matrices, others = self._split(named)
        each = 4 + 4 * self.rest.master_weights
        numbers = sum(named[name].numel() for name in matrices)
        return each * numbers + self.rest.state_bytes(others)

    def update_peak(self, named: Mapping[str, Tensor], device: DeviceFunctions, tracing: Tracing) -> int:
        """That of the matrix that takes most, or of AdamW: one after the other."""
        matrices, others = self._split(named)
        shapes = {(rows, named[name].shape[1]) for name, parts in matrices.items() for rows in parts}
        maps = [torch.empty(shape) for shape in sorted(shapes)]
        if not maps:
            return self.rest.update_peak(others, device, tracing)
        with tracing() as tracker:
            for one in maps:
                follow_move(one, orthogonalised(moved(one, one, 0.9).bfloat16()), 1.0, 0.0)
        exchanged = 3 * 2 * max(one.numel() for one in maps) if self.is_shared else 0
        return max(tracker.peak, exchanged, self.rest.update_peak(others, device, tracing))

    def _split(self, named: Mapping[str, Tensor]) -> tuple[dict[str, tuple[int, ...]], dict[str, Tensor]]:
        """Rows of the maps in Muon's matrices, and the parameters that AdamW has."""
        spec = spec_of(self.architecture)
        found = {name: stacked_rows(spec, name) for name in named}
        matrices = {name: rows for name, rows in found.items() if rows is not None}
        return matrices, {name: tensor for name, tensor in named.items() if name not in matrices}
