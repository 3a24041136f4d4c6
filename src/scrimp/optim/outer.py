"""Copies of a model that train alone for some steps, and then move together: for links too slow for every gradient.

Problem  Copies (`layout.dp`) that add up their gradients in every step send 2 (n - 1) / n times the model's bytes each
         time. Between machines that share a slow network the exchange takes longer than the step.
Method   Each copy takes `outer.every` steps by its own gradients. Their mean displacement from the common weights x is
         then taken for a gradient, and x moves by an optimizer of its own, with learning rate a and momentum b::

             d = mean over copies of (x - x_copy)                    what is exchanged
             m = b m + d,  x = x - a (d + b m)                       Nesterov's momentum, as DiLoCo

         a = 1 and b = 0 is the mean of the copies (local SGD). One exchange in `every` steps, of the same bytes.
         With `outer.overlap` the exchange runs beside the next round (CO2): each round is moved by the d of the round
         before, which is stale by one round, hence divided by a penalty, and the momentum is bounded::

             m = b m + d / max(1, g / g_first),  |m| <= clip * lr * every,  x = x - a m

         with g = mean |a m| of the last move, by which x has moved since d was taken; lr is the peak rate of the
         inner optimizer for that weight, which moves it by about as much a step. The exchange is hidden as long as

             every * seconds of a step >= seconds of the exchange

         `outer.exchange = fp8` sends d in bytes: e4m3 with a scale for each 128 numbers. Each copy gets one part from
         all, adds it up in float32, and sends the mean, rounded once more, to all: a quarter of the bytes.
Meeting  Evaluations and checkpoints want one model: before them the round ends early (`meet`), and before checkpoints
         the states of the inner optimizers become their mean too. So a checkpoint has one copy of everything, and
         a run goes on from it under any layout, also with one copy.
Limits   Every step still exchanges its few scalars (loss, whether it is finite, whether anybody has to stop), so that
         copies agree on them: latency counts, bytes do not. Each copy clips by its own norm; that of the first is
         recorded. Evaluations and checkpoints at other steps are rounds of other lengths, and so other numbers. Not
         with states on the host nor 8-bit moments, which have no mean; no overlap on CUDA.
Source   Local SGD, arXiv 1805.09767; DiLoCo, arXiv 2311.08105; CO2, arXiv 2401.16265. CO2's gap and clipping are
         written down there only in words: the forms above need no further exchange.
Checked  tests/optim/test_outer.py; benchmarks/slow_links.py: time gained beside loss lost
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from scrimp.collective_calls import BESIDE
from scrimp.config import OuterConfig
from scrimp.optim.base import Optimizer
from scrimp.optim.copies import Copies
from scrimp.parts import TensorPart
from scrimp.runtime.parallel.mesh import AXES, RankMesh
from scrimp.world import group_device

GROUP = 128
"""Numbers that share a scale in the exchange."""
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@dataclass(frozen=True)
class Round:
    """What one round took."""

    steps: int
    """Local steps."""
    seconds: float
    """Seconds of the local steps."""
    exchange: float | None
    """Seconds of the exchange that ended with it; None: there was none."""
    waited: float
    """Seconds of that exchange in which nothing else was done."""


class OuterOptimizer:
    """Moves what all copies begin a round with.

    Args:
        optimizer: of this copy.
        settings: with `every` above 0.
        group: the ranks that hold the same part of other copies, for nobody else's use; None: there is one copy.
        inner_lr: peak learning rate of the inner optimizer.
        copies: where copies are jobs of their own; then `group` is None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: OuterConfig,
        group: dist.ProcessGroup | None,
        inner_lr: float,
        copies: Copies | None = None,
    ) -> None:
        self.copies = copies
        self._optimizer, self._settings, self._group = optimizer, settings, group
        self._bound = settings.clip * inner_lr * settings.every
        self._start: dict[str, Tensor] = {}
        """Weights that the round began with; empty between rounds."""
        self._momentum = {
            name: torch.zeros_like(target, dtype=torch.float32)
            for name, target in optimizer.targets().items()
        }
        self._first_gap = torch.zeros(())
        self._gap = torch.zeros(())
        """By how much the last move, and the first one, have moved weights, in the mean; 0: there was none."""
        self._steps, self._began = 0, 0.0
        self._pending: Future[tuple[Tensor, float]] | None = None
        self._thread = ThreadPoolExecutor(1, BESIDE) if settings.overlap else None

    @property
    def in_round(self) -> bool:
        """Whether a round has begun and not ended."""
        return bool(self._start)

    def before_step(self) -> None:
        """A round begins with the first step after another."""
        self._begin()

    def after_step(self) -> Round | None:
        """Count a step; what the round took, if it was its last."""
        self._steps += 1
        return self._end() if self._steps == self._settings.every else None

    def meet(self, *, states: bool = False) -> None:
        """End the round early, so that all copies have the same weights.

        Args:
            states: the same states of the inner optimizer too: their mean.
        """
        own = self._displacement() if self._start else None  # before the weights move by what is on its way
        if self._pending is not None:
            self._begin()
            self._move(self._pending.result()[0], is_stale=True)
            self._pending = None
        if own is not None:
            self._move(self._mean(own), is_stale=False)
        self._start = {}
        if states and self._group is not None:
            for name, part in self._optimizer.parts():
                if not name.endswith(".master") and part.local.is_floating_point() and part.local.numel():
                    part.local.copy_(_exact_mean(part.local.float(), self._group))

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """Name and storage of its state, as checkpoints have it."""
        for name, momentum in self._momentum.items():
            yield f"{name}.momentum", self._optimizer.state_part(name, momentum)
        for name, number in (("first_gap", self._first_gap), ("gap", self._gap)):
            yield name, TensorPart(number, (), (), is_writer=not _is_on_ranks() or dist.get_rank() == 0)

    def close(self) -> None:
        """Leave nothing running."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        if not self._start:
            self._start = {name: one.detach().clone() for name, one in self._optimizer.targets().items()}
            self._steps, self._began = 0, time.perf_counter()

    def _end(self) -> Round:
        trained = time.perf_counter()
        own = self._displacement()
        exchanged = self._exchanged(own)
        took = Round(self._steps, trained - self._began, None, 0.0)
        if exchanged is None:
            self._write()
        else:
            found, seconds = exchanged
            took = replace(took, exchange=seconds, waited=time.perf_counter() - trained)
            self._move(found, is_stale=self._thread is not None)
        self._start = {}
        return took

    def _exchanged(self, own: Tensor) -> tuple[Tensor, float] | None:
        """The mean displacement that is known now, and the seconds of its exchange: with overlap that of the round
        before, and none after the first one."""
        if self._thread is None:
            return self._timed_mean(own)
        before = None if self._pending is None else self._pending.result()
        self._pending = self._thread.submit(self._timed_mean, own)
        return before

    @torch.no_grad()
    def _displacement(self) -> Tensor:
        """x - x_copy, one number after the other."""
        targets = self._optimizer.targets()
        return torch.cat([(self._start[name].float() - targets[name].float()).flatten() for name in targets])

    def _timed_mean(self, own: Tensor) -> tuple[Tensor, float]:
        if own.is_cuda:
            torch.cuda.synchronize(own.device)
        start = time.perf_counter()
        found = self._mean(own)
        if own.is_cuda:
            torch.cuda.synchronize(own.device)
        return found, time.perf_counter() - start

    def _mean(self, own: Tensor) -> Tensor:
        if self.copies is not None:
            return self.copies.mean(own)
        if self._group is None:
            return own
        mean = _fp8_mean if self._settings.exchange == "fp8" else _exact_mean
        return mean(own, self._group)

    @torch.no_grad()
    def _move(self, displacement: Tensor, *, is_stale: bool) -> None:
        """Let x follow the copies, and every copy begin there."""
        rate, keep = self._settings.lr, self._settings.momentum
        penalty = self._penalty() if self._settings.overlap and is_stale else 1.0
        moved, count, first = 0.0, 0, 0
        for name, start in self._start.items():
            momentum = self._momentum[name]
            mean = displacement[first : first + start.numel()].view_as(momentum).to(momentum.device)
            first += start.numel()
            momentum.mul_(keep).add_(mean, alpha=1 / penalty)
            if self._settings.overlap:
                bound = self._bound * self._optimizer.relative_rate(name)
                momentum.clamp_(-bound, bound)
            move = momentum if self._settings.overlap else mean + keep * momentum
            start.sub_(move.to(start.dtype), alpha=rate)
            moved, count = moved + float(move.abs().sum()), count + start.numel()
        self._note_gap(rate * moved, count)
        self._write()

    def _penalty(self) -> float:
        return max(1.0, float(self._gap / self._first_gap)) if float(self._first_gap) else 1.0

    def _note_gap(self, moved: float, count: int) -> None:
        """Remember how far x has moved: the mean over all ranks, so that all use the same penalty."""
        if not self._settings.overlap:
            return
        sums = torch.tensor([moved, count], dtype=torch.float64)
        if _is_on_ranks():
            sums = sums.to(group_device())
            dist.all_reduce(sums)
        self._gap.fill_(float(sums[0] / max(1.0, float(sums[1]))))
        if not float(self._first_gap):
            self._first_gap.copy_(self._gap)

    def _write(self) -> None:
        """The start of the round becomes this copy's weights."""
        targets = self._optimizer.targets()
        with torch.no_grad():
            for name, start in self._start.items():
                targets[name].copy_(start)
        self._optimizer.write_targets()


def build_outer(
    settings: OuterConfig,
    optimizer: Optimizer,
    mesh: RankMesh,
    inner_lr: float,
    copies: Copies | None = None,
) -> OuterOptimizer | None:
    """That of a run; None: copies add up their gradients in every step.

    Args:
        inner_lr: peak learning rate of `optimizer`.
        copies: where they are jobs of their own.
    """
    if settings.every == 0:
        return None
    group = _own_group(mesh) if mesh.layout.dp > 1 else None
    return OuterOptimizer(optimizer, settings, group, inner_lr, copies)


def _own_group(mesh: RankMesh) -> dist.ProcessGroup | None:
    """The ranks that hold this part in all copies, as a group that no other thread uses."""
    copies = mesh.devices.mesh.movedim(AXES.index("dp"), -1).reshape(-1, mesh.layout.dp)
    own: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(copies.tolist())[0]
    return own


def _is_on_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _exact_mean(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """In place."""
    dist.all_reduce(own, group=group)
    return own.div_(dist.get_world_size(group))


def _fp8_mean(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same on all ranks: each of them adds up one part, and tells it to the others."""
    ranks = dist.get_world_size(group)
    size = -(-own.numel() // (ranks * GROUP)) * GROUP
    padded = own.new_zeros(ranks * size)
    padded[: own.numel()] = own
    sent = _quantized(padded)
    received = [torch.empty_like(one) for one in sent]
    for here, there in zip(received, sent, strict=True):
        dist.all_to_all_single(here, there, group=group)
    mean = _dequantized(*received).view(ranks, size).mean(0)
    found = []
    for one in _quantized(mean):
        whole = one.new_empty(ranks * one.numel())
        dist.all_gather(list(whole.chunk(ranks)), one, group=group)
        found.append(whole)
    return _dequantized(*found)[: own.numel()]


def _quantized(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as bytes, and a scale per group."""
    groups = numbers.view(-1, GROUP)
    scales = groups.abs().amax(1) / FP8_MAX
    scales[scales == 0] = 1.0
    return (groups / scales[:, None]).to(FP8).view(torch.uint8).flatten(), scales


def _dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes.view(FP8).float().view(-1, GROUP) * scales[:, None]).flatten()
