"""Exact gains (R1): noise at the very point where a layer's error would enter, one pass per point.

Backward noise enters at a layer's input, so that layers that read one tensor share a pass; forward noise at its output.
Costs one pass per distinct input and one per layer: an oracle for small models, and the way for models
without a residual stream that is recognised.

Limits   A layer that does not run, or whose result is zero everywhere, gets no noise: its gains are 0.
Checked  tests/statistics/test_exact.py: against gradients disturbed by hand.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scrimp.gemm.layer import Shard
from scrimp.statistics.gains import NOISES, Gains
from scrimp.statistics.ranks import ALONE, Ranks, shard_at
from scrimp.statistics.stream import generator_of, is_recomputing, noise_at, square
from scrimp.statistics.structure import is_grouped

Disturbed = Callable[[contextlib.AbstractContextManager[object]], NDArray[np.float64]]
"""Runs the batch inside a context; gives [2, K] norms of the changes of gradients and of relative updates."""


@dataclass
class Sites:
    """What the clean pass showed of each layer's surroundings."""

    inputs: dict[str, int] = field(default_factory=dict)
    """Layer to the number of the tensor that it reads, equal for layers that share one."""
    input_gradients: dict[str, float] = field(default_factory=dict)
    """Squared norm of the summed gradient at its input, over micro-batches."""


@contextlib.contextmanager
def watching_sites(
    model: nn.Module, layers: tuple[str, ...], sites: Sites, ranks: Ranks = ALONE
) -> Iterator[None]:
    """Fill `sites` from the passes inside.

    Args:
        layers: of all ranks.
    """
    modules, numbers = dict(model.named_modules()), dict[int, tuple[int, Tensor]]()
    sites.input_gradients = dict.fromkeys(layers, 0.0)

    def hook(layer: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            if not torch.is_grad_enabled():
                return
            if layer not in sites.inputs:
                # The tensor is kept beside its number: the id of one that is gone may be given again.
                sites.inputs[layer] = numbers.setdefault(id(x), (len(numbers), x))[0]
            if x.requires_grad:
                x.register_hook(lambda g: _add(sites.input_gradients, layer, _part(module, g, ranks)))

        return look

    with contextlib.ExitStack() as stack:
        for layer in modules.keys() & set(layers):
            # First of all hooks: wrappers give each layer an input of its own, where layers share one.
            stack.callback(modules[layer].register_forward_pre_hook(hook(layer), prepend=True).remove)
        yield
    total = ranks.sum([sites.input_gradients[layer] for layer in layers]) * ranks.share**2
    sites.input_gradients = dict(zip(layers, total.tolist(), strict=True))


def _add(sums: dict[str, float], layer: str, part: float) -> None:
    sums[layer] += part


def _part(module: nn.Module, gradient: Tensor, ranks: Ranks) -> float:
    """This rank's part of the squared norm of the gradient of a layer's input."""
    shard = shard_at(module, "outputs")
    if is_grouped(module) and shard is not None:  # each piece of an expert gives a partial sum
        return square(shard.sum(gradient)) / shard.ranks
    return square(gradient) / ranks.copies(shard_at(module, "inputs"))


class _NoisyGradient(torch.autograd.Function):
    """The identity, whose gradient has noise added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, disturb: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.disturb = disturb
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + ctx.disturb(gradient), None


class _Source:
    """Gaussian noise, a share of the local rms; sums what it gave.

    Args:
        shard: how the features of the tensor are cut; None: they are not.
    """

    def __init__(
        self, share: float, kind: str, *key: int, ranks: Ranks = ALONE, shard: Shard | None = None
    ) -> None:
        self._share, self._kind, self._key = share, kind, key
        self._ranks, self._shard = ranks, shard
        self.square = 0.0
        self._calls = 0

    def __call__(self, like: Tensor, *, again: bool = False) -> Tensor:
        """Noise for the next micro-batch; `again` the same as before, and uncounted."""
        call = self._calls - 1 if again else self._calls
        # One map for all micro-batches, as they share the weights; noise of tokens is new in each.
        number = 0 if self._kind == "weights" else self._ranks.draw(call)
        generator = generator_of(like.device, *self._key, number)
        z = noise_at(like, self._share, self._kind, generator, self._ranks, self._shard)
        if not again:
            self._calls += 1
            self.square += square(z) / self._ranks.copies(self._shard)
        return z

    @property
    def total(self) -> float:
        """|z|^2 over all ranks; a collective."""
        return float(self._ranks.sum([self.square])[0])


@contextlib.contextmanager
def backward_noise(module: nn.Module, source: _Source) -> Iterator[None]:
    """Noise in the gradient of a layer's input."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not inputs[0].requires_grad:
            return None
        noisy: Tensor = _NoisyGradient.apply(inputs[0], source)  # type: ignore[no-untyped-call]
        return (noisy, *inputs[1:])

    handle = module.register_forward_pre_hook(hook, prepend=True)  # where sites are watched
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def forward_noise(module: nn.Module, source: _Source, products: list[float]) -> Iterator[None]:
    """Noise in a layer's output; appends <z, G> of each micro-batch."""

    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        z = source(output.detach(), again=is_recomputing())
        noisy = output + z
        if noisy.requires_grad:
            noisy.register_hook(lambda g: products.append(float((z.float() * g.float()).sum())))
        return noisy

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def exact_gains(
    model: nn.Module,
    layers: tuple[str, ...],
    num_weights: int,
    sites: Sites,
    run: Disturbed,
    share: float,
    seed: int,
    ranks: Ranks = ALONE,
) -> Gains:
    """R1. The curvature is a central difference: noise z and -z."""
    modules = dict(model.named_modules())
    shape = (len(NOISES), 2, num_weights, len(layers))
    gains = Gains(np.zeros(shape), np.zeros(shape), np.zeros(len(layers)))
    shared: dict[tuple[int, str], NDArray[np.float64]] = {}
    for index, layer in enumerate(layers):
        if layer not in sites.inputs:
            continue
        module = modules[layer]
        into, out = (shard_at(module, side) for side in ("inputs", "outputs"))
        for row, kind in enumerate(NOISES):
            site = sites.inputs[layer], kind
            if site not in shared:
                source = _Source(share, kind, seed, 2 * index, ranks=ranks, shard=into)
                moved = run(backward_noise(module, source))
                shared[site] = _per_noise(moved, source.total * ranks.share**2)
            gains.backward[row, ..., index] = shared[site]
            source = _Source(share, kind, seed, 2 * index + 1, ranks=ranks, shard=out)
            products: list[float] = []
            moved = run(forward_noise(module, source, products))
            gains.forward[row, ..., index] = _per_noise(moved, injected := source.total)
            if kind == "tokens" and injected > 0:
                opposite = _Source(-share, kind, seed, 2 * index + 1, ranks=ranks, shard=out)
                run(forward_noise(module, opposite, products))
                # <z, G(Y+z)> + <-z, G(Y-z)> = 2 <z, H z>: the clean gradient cancels.
                (product,) = ranks.sum([sum(products) / ranks.copies(out)])
                gains.curvature[index] = float(product) * ranks.share / (2 * injected)
    return gains


def _per_noise(moved: NDArray[np.float64], square: float) -> NDArray[np.float64]:
    return moved / math.sqrt(square) if square > 0 else np.zeros_like(moved)
