"""Watch and disturb the residual stream: activations and gradients at its nodes, clean and under noise.

A `StreamTape` hooks the norms that stand at the nodes. In the clean pass it keeps what it sees; in a noisy pass it
compares, and sums over micro-batches::

    |dx_j|^2   change of the activation at node j        |dR_j|^2   change of its gradient
    <dx_j, dR_j>                                          |z|^2      what was injected, and where

Noise is Gaussian, its deviation a share of each token's rms, from a generator of its own, so that the
run's random state is untouched. It is of one of two kinds, as errors are: independent between tokens, or one
linear map of all of them, and then the same map in every micro-batch.

Recompute  Under activation checkpointing a block runs again inside the backward pass. Its noise must be the same
           then, and is counted once. Re-entrant checkpointing, whose first run has no graph, is refused.
Checked    tests/statistics/test_stream.py
Memory   Kept on the host: two tensors per node, of at most `ROWS` evenly spaced tokens of each micro-batch. Norms of
         changes over these rows, scaled by the share of rows, estimate those over all.
Shapes: S tokens of a micro-batch, D width of the stream.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from scrimp.errors import ModelError
from scrimp.gemm.layer import Shard
from scrimp.statistics.ranks import ALONE, Ranks, SharedRows, local
from scrimp.statistics.structure import Structure

Seen = Callable[[str, int, Tensor], None]
"""Takes "x" or "r" (activation, gradient), the node's number, and the tensor."""
ROWS = 4096
"""Tokens of a micro-batch that are kept of each node."""


@dataclass(frozen=True)
class Injection:
    """Where noise enters: one node, forward into the activation or backward into the gradient."""

    node: int
    direction: str
    kind: str
    """tokens or weights: what the noise is like, see `gaussian`."""
    share: float
    """Deviation as a share of each token's rms."""
    seed: int


class StreamTape:
    """Hooks at the nodes of a stream."""

    def __init__(self, model: nn.Module, structure: Structure, ranks: Ranks = ALONE) -> None:
        modules = dict(model.named_modules())
        self._model, self._num_nodes = model, len(structure.nodes)
        self._modules = {n: modules[name] for n, name in enumerate(structure.nodes) if name in modules}
        self.passed = -1
        """The last node that a forward pass has reached."""
        self.ranks = ranks
        self._clean: dict[tuple[str, int, int], Tensor] = {}
        self.micro_batch = 0
        self.gradient_squares: dict[int, float] = defaultdict(float)
        """Clean pass: |R_j|^2 by node."""
        self.branch_squares: dict[int, float] = defaultdict(float)
        """Clean pass: |R_j - R_(j+1)|^2, what the sub-layer's branch adds to the gradient at node j."""

    @property
    def first(self) -> int:
        """The first node whose activation has a gradient: 0, unless nothing before the stream is trained."""
        return min((node for node, square in self.gradient_squares.items() if square > 0), default=0)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what passes inside: the clean run."""
        self._clean.clear()
        self.gradient_squares.clear()
        self.branch_squares.clear()
        later: dict[int, tuple[int, Tensor]] = {}

        def seen(kind: str, node: int, value: Tensor) -> None:
            self._clean[kind, node, self.micro_batch] = _rows(value).to("cpu")
            if kind == "x":
                return
            self.gradient_squares[node] += square(value)
            after = later.get(node + 1)
            if after is not None and after[0] == self.micro_batch:
                self.branch_squares[node] += square(value.float() - after[1].float())
            later.clear()
            later[node] = (self.micro_batch, value)

        def at_end(module: nn.Module, inputs: object, output: Any) -> None:
            """In a stage of a pipeline: the gradient that the next one's first node gives back."""
            after = self.passed + 1
            if after == self._num_nodes or after in self._modules or not torch.is_grad_enabled():
                return

            def keep(gradient: Tensor) -> None:
                later.clear()
                later[after] = (self.micro_batch, gradient)

            output.register_hook(keep)

        with self._hooked(seen, None, {}), contextlib.ExitStack() as stack:
            stack.callback(self._model.register_forward_hook(at_end).remove)
            yield
        for squares in (self.gradient_squares, self.branch_squares):
            self._join(squares, self.ranks.share**2)

    @contextlib.contextmanager
    def comparing(self, injection: Injection) -> Iterator[Changes]:
        """Disturb the run inside, and sum how it differs from the clean one."""
        changes = Changes()
        kept: dict[int, Tensor] = {}

        def seen(kind: str, node: int, value: Tensor) -> None:
            clean = self._clean[kind, node, self.micro_batch].to(value.device)
            change = _rows(value).float() - clean.float()
            scale = value.numel() / max(1, change.numel())
            if kind == "x":
                changes.activation[node] += square(change) * scale
                kept[node] = change
                return
            changes.gradient[node] += square(change) * scale
            changes.product[node] += float(torch.dot(kept.pop(node).flatten(), change.flatten())) * scale

        with self._hooked(seen, injection, changes.injected):
            yield changes
        share = self.ranks.share
        self._join(changes.activation, 1.0)
        self._join(changes.gradient, share**2)
        self._join(changes.product, share)
        self._join(changes.injected, share**2 if injection.direction == "backward" else 1.0)

    def _join(self, sums: dict[int, float], factor: float) -> None:
        """Over all ranks: every tensor-parallel one holds a copy of the stream, or has tokens of its own."""
        factor /= self.ranks.copies()
        self.ranks.join(sums, dict.fromkeys(range(self._num_nodes), factor))

    def is_clean(self, node: int, x: Tensor, share: float) -> bool:
        """Whether an activation is that of the clean run, without noise of this share of each token's rms.

        Not bit for bit: what is made again by kernels that are not deterministic (`train.deterministic` false) is the
        same up to rounding. Noise moves it by its share of its norm, rounding by far less than half of that.
        """
        clean = self._clean["x", node, self.micro_batch].to(x.device).float()
        return square(_rows(x).float() - clean) <= (share / 2) ** 2 * square(clean)

    @contextlib.contextmanager
    def _hooked(self, seen: Seen, injection: Injection | None, injected: dict[int, float]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for node, module in self._modules.items():
                hook = _NodeHook(self, node, seen, injection, injected)
                stack.callback(module.register_forward_pre_hook(hook).remove)
            yield


class Changes:
    """How a disturbed run differs from the clean one, squares by node, summed over micro-batches."""

    def __init__(self) -> None:
        self.activation: dict[int, float] = defaultdict(float)
        self.gradient: dict[int, float] = defaultdict(float)
        self.product: dict[int, float] = defaultdict(float)
        """<dx_j, dR_j>."""
        self.injected: dict[int, float] = defaultdict(float)
        """|z|^2."""
        self.exits: dict[int, float] = defaultdict(float)
        """|change of gX|^2 at the exit of each sub-layer."""


class _NodeHook:
    """Before a norm: look at the stream, and add the noise that enters here."""

    def __init__(
        self,
        tape: StreamTape,
        node: int,
        seen: Seen,
        injection: Injection | None,
        injected: dict[int, float],
    ) -> None:
        self._tape, self._node, self._seen, self._injected = tape, node, seen, injected
        self._injection = injection if injection is not None and injection.node == node else None
        self._last = -1

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x, number = inputs[0], self._tape.micro_batch
        if hasattr(x, "device_mesh"):
            raise ModelError(
                "the residual stream is a DTensor, whose noise is not known",
                got=f"{cast(Any, x).placements} before a norm",
                expected="a stream that every tensor-parallel rank holds whole: no sequence parallel",
            )
        if is_recomputing():
            self._recompute(x, number)
            return
        self._tape.passed = self._node
        if not torch.is_grad_enabled() or not x.requires_grad or self._last == number:
            return
        self._last = number
        injection = self._injection
        if injection is not None and injection.direction == "forward":
            z = self._noise(x, number)
            self._injected[self._node] += square(z)
            x.data.add_(
                z
            )  # in place: the branch and the skip path, and a checkpoint's copy, are the same stream
        self._look("x", x.detach())
        x.register_hook(self._on_gradient)

    def _recompute(self, x: Tensor, number: int) -> None:
        """The same noise again, where x was made again: what a checkpoint kept has it already."""
        if x.requires_grad and self._last != number:
            raise ModelError(
                "activations are checkpointed in the re-entrant way, whose first pass shows no gradients",
                do="checkpoint with use_reentrant=False",
            )
        injection = self._injection
        if injection is None or injection.direction != "forward":
            return
        if not self._tape.is_clean(self._node, x, injection.share):
            return  # its block's input, which a checkpoint kept with the noise
        x.data.add_(self._noise(x, number))

    def _on_gradient(self, gradient: Tensor) -> Tensor | None:
        injection = self._injection
        if injection is None or injection.direction != "backward":
            self._look("r", gradient)
            return None
        z = self._noise(gradient, self._tape.micro_batch)
        self._injected[self._node] += square(z)
        disturbed = gradient + z
        self._look("r", disturbed)
        return disturbed

    def _look(self, kind: str, value: Tensor) -> None:
        self._seen(kind, self._node, value)

    def _noise(self, like: Tensor, number: int) -> Tensor:
        assert self._injection is not None
        kind, share = self._injection.kind, self._injection.share
        key = 0 if kind == "weights" else self._tape.ranks.draw(number)  # micro-batches share the weights
        generator = generator_of(like.device, self._injection.seed, self._node, key)
        return noise_at(like.detach(), share, kind, generator, self._tape.ranks)


def is_recomputing() -> bool:
    """Whether this is a forward pass inside a backward pass: activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def generator_of(device: torch.device, *key: int) -> torch.Generator:
    """A generator that no one else uses: a function of the key."""
    seed = 0
    for part in key:
        seed = (seed * 6364136223846793005 + part + 1442695040888963407) % 2**63
    return torch.Generator(device).manual_seed(seed)


def noise_at(
    like: Tensor,
    share: float,
    kind: str,
    generator: torch.Generator,
    ranks: Ranks = ALONE,
    shard: Shard | None = None,
) -> Tensor:
    """Noise for what lies here of a tensor between layers: the part of what one process draws for all of it.

    Args:
        shard: how its features are cut; None: they are not.
    """
    if shard is None:
        return gaussian(like, share, kind, generator, ranks.between)
    return shard.own(gaussian(shard.whole(like), share, kind, generator, ranks.rows))


def gaussian(
    like: Tensor, share: float, kind: str, generator: torch.Generator, rows: SharedRows | None = None
) -> Tensor:
    """Noise of a share of the size of each token, as errors of scaled formats have it.

    Args:
        like: [..., D].
        kind: tokens, independent between tokens, like errors of X and G; or weights, the same linear map of every
            token, like errors of W.
        rows: how ranks share its tokens; None: all lie here.
    """
    width = like.shape[-1]
    if kind == "weights":
        mixing = torch.randn(width, width, generator=generator, device=like.device)
        return (like.float() @ mixing.mul_(share / math.sqrt(width))).to(like.dtype)
    size = torch.linalg.vector_norm(like, dim=-1, keepdim=True, dtype=torch.float32)
    if rows is None:
        z = torch.randn(like.shape, generator=generator, device=like.device)
    else:
        z = rows.normal(like, generator)
    return z.mul_(size * (share / math.sqrt(max(1, width)))).to(like.dtype)


def _rows(value: Tensor) -> Tensor:
    """At most ROWS evenly spaced tokens, [rows, D]."""
    rows_SD = value.detach().flatten(0, -2)
    return rows_SD[:: max(1, -(-len(rows_SD) // ROWS))].contiguous()


def square(value: Tensor) -> float:
    """|value|^2, the norm taken in float32; of a sharded tensor what lies here."""
    return float(torch.linalg.vector_norm(local(value), dtype=torch.float32)) ** 2
