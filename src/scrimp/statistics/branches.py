"""Noise inside a branch of the residual stream: how errors move the weights of their own sub-layer.

Problem  Between two nodes an error meets what the branch does: softmax averages it, a gate multiplies it. Ratios
         taken on the stream know nothing of that, and formulas are off by a factor of two.
Method   More passes for each kind of noise, in which every sub-layer is on its own: noise enters at the output of one
         entry of each (a pass for the first entries, one for the second, ...), but each exit gives its clean result
         to the stream, and takes its clean gradient from it. So no noise travels, the change of a planned weight is
         due to its own branch, and what arrives at the exit is what the stream would get::

             F[k<-l] = |change of gW_k| / |noise in Y_l|                    k, l in one sub-layer
             c_l     = |change of Y_exit| / |noise in Y_l|                  how far the branch passes it on

         For backward noise no pass is needed: what reaches the gradient of an exit's input reaches the
         entries only through it, wherever it came from::

             B[k<-exit] = |change of gW_k| / |change of gX_exit|            k an entry, in the backward runs

Limits   The gradient that branches give back to the stream is noisy, and nothing cuts it off from what lies before
         the first exit: the embedding, and the norms. Their changes in this pass are not read.
Memory   On the host: result and gradient of every exit, and the gradient of its input.
Checked  tests/statistics/test_branches.py
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from scrimp.statistics.ranks import ALONE, Ranks, local, shard_at
from scrimp.statistics.stream import generator_of, is_recomputing, noise_at, square
from scrimp.statistics.structure import Structure, is_grouped


@dataclass
class Isolated:
    """What a pass of isolated sub-layers shows, squares by sub-layer, summed over micro-batches."""

    injected: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """|z|^2."""
    arrived: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """|change of Y_exit|^2, before it is made clean."""


class BranchTape:
    """Hooks at the exits and entries of every sub-layer."""

    def __init__(self, model: nn.Module, structure: Structure, ranks: Ranks = ALONE) -> None:
        modules = dict(model.named_modules())
        self._ranks = ranks
        self._all = structure.sublayers
        here = {number: sub for number, sub in enumerate(self._all) if sub.exit in modules}
        self._exits = {number: modules[sub.exit] for number, sub in here.items()}
        self._entries = {number: [modules[name] for name in sub.entries] for number, sub in here.items()}
        self._branches = {number: modules[sub.branch or sub.exit] for number, sub in here.items()}
        self._kept: dict[tuple[str, int, int], Tensor] = {}
        self.micro_batch = 0
        self.added_squares: dict[int, float] = defaultdict(float)
        """Clean pass: |what is added to the stream|^2 by sub-layer, where that is not what its exit gives."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what exits give and get: the clean run."""
        self._kept.clear()
        self.added_squares.clear()
        with self._hooks(self._exits, self._record), self._hooks(self._branches, self._add):
            yield
        own = [number for number, sub in enumerate(self._all) if sub.branch]
        self._ranks.join(self.added_squares, dict.fromkeys(own, 1.0 / self._ranks.copies()))

    def _add(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if module is not self._exits[number] and torch.is_grad_enabled() and not is_recomputing():
                result = output[0] if isinstance(output, tuple) else output
                self.added_squares[number] += square(result)

        return hook

    @contextlib.contextmanager
    def comparing(self, changes: dict[int, float]) -> Iterator[None]:
        """Sum |change of gX_exit|^2 by sub-layer."""

        def compare(number: int) -> Callable[[nn.Module, Any, Tensor], None]:
            def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
                micro_batch, x = self.micro_batch, inputs[0]
                if is_recomputing():
                    return

                def on_gradient(g: Tensor) -> None:
                    clean = self._kept["gx", number, micro_batch].to(g.device)
                    copies = self._ranks.copies(shard_at(module, "inputs"))
                    changes[number] += square(local(g).float() - clean.float()) / copies

                if x.requires_grad:
                    x.register_hook(on_gradient)

            return hook

        with self._hooks(self._exits, compare):
            yield
        self._ranks.join(changes, dict.fromkeys(range(len(self._all)), self._ranks.share**2))

    @contextlib.contextmanager
    def isolated(self, kind: str, share: float, seed: int, turn: int) -> Iterator[Isolated]:
        """Every sub-layer on its own, noise at the output of one of its entries.

        Args:
            turn: number of the entry; sub-layers that have no such one stay clean.
        """
        found = Isolated()

        def cut(number: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
            def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                if not torch.is_grad_enabled():
                    return output
                y, g = (self._kept[name, number, self.micro_batch].to(output.device) for name in ("y", "g"))
                if not is_recomputing():
                    found.arrived[number] += self._exit_square(module, local(output).float() - y.float())
                clean: Tensor = _Clean.apply(output, y, g)  # type: ignore[no-untyped-call]
                return clean

            return hook

        def disturb(number: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
            def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                if not torch.is_grad_enabled():
                    return output
                z = self._noise(module, output.detach(), share, kind, seed, number, turn)
                if not is_recomputing():
                    found.injected[number] += square(z) / self._ranks.copies(shard_at(module, "outputs"))
                return output + z

            return hook

        entries = {number: group[turn] for number, group in self._entries.items() if turn < len(group)}
        with self._hooks(self._exits, cut), self._hooks(entries, disturb):
            yield found
        for squares in (found.injected, found.arrived):
            self._ranks.join(squares, dict.fromkeys(range(len(self._all)), 1.0))

    def _exit_square(self, module: nn.Module, change: Tensor) -> float:
        """This rank's part of the squared norm of a change of what an exit gives."""
        shard = shard_at(module, "inputs")
        if shard is not None and is_grouped(
            module
        ):  # partial sums; other layers' are added up before hooks see them
            return square(shard.sum(change)) / shard.ranks
        return square(change) / self._ranks.copies()

    def _noise(self, module: nn.Module, output: Tensor, share: float, kind: str, *key: int) -> Tensor:
        """What enters at an entry's output."""
        shard, ranks = shard_at(module, "outputs"), self._ranks
        draw = ranks.draw(self.micro_batch)
        if is_grouped(module):  # its tokens are of any rows
            sharing = 1 if shard is None else shard.ranks
            draw, ranks = ranks.draw_of_experts(self.micro_batch, sharing), ALONE
        generator = generator_of(output.device, *key, 0 if kind == "weights" else draw)
        return noise_at(output, share, kind, generator, ranks, shard)

    def _record(self, number: int) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            key, x = (number, self.micro_batch), inputs[0]
            if not output.requires_grad or is_recomputing():
                return None
            self._keep(("y", *key), output)
            if x.requires_grad:
                x.register_hook(lambda g: self._keep(("gx", *key), g))
            # A copy, because hooks of a view are lost when the model adds to it in place.
            result = output.clone()
            result.register_hook(lambda g: self._keep(("g", *key), g))
            return result

        return hook

    def _keep(self, key: tuple[str, int, int], value: Tensor) -> None:
        self._kept[key] = local(value).to("cpu", copy=True)

    @contextlib.contextmanager
    def _hooks(self, modules: dict[int, nn.Module], make: Callable[[int], Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for number, module in modules.items():
                stack.callback(module.register_forward_hook(make(number)).remove)
            yield


class _Clean(torch.autograd.Function):
    """Gives a kept value for a result, and a kept gradient for whatever gradient comes."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return value.clone()  # which the model may change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient, None, None
