"""A small decoder whose blocks' activations leave, and a count of what stays on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from losses import next_token_loss
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.config import Architecture
from scrimp.config.activations import Activations
from scrimp.gemm import PlannedModel, reference_only, swap_in
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.runtime.memory import ActivationOffload, HostArena, HostLink, Link

CPU = torch.device("cpu")
ROWS, LENGTH = 2, 64
ARCHITECTURE = Architecture(
    family="qwen3",
    vocab_size=64,
    num_layers=4,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_width=96,
    context=256,
    qk_norm=True,
    tied_embeddings=False,
)
PRECISIONS = ["fp32", "bf16 autocast", "bf16", "fp8", "nvfp4"]
ARENA_BYTES = 4 * 2**20


@dataclass
class Run:
    """A model in training, by hand: SGD, so that a wrong gradient shows in the next loss."""

    precision: str
    level: str = "keep"
    offload: ActivationOffload | None = None
    leaving: frozenset[int] = frozenset(range(99))
    num_blocks: int = 4
    model: Model = field(init=False)
    planned: PlannedModel | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        self.model = build_model(replace(ARCHITECTURE, num_layers=self.num_blocks), dtype=dtype)
        initialise(self.model, 0)
        if self.precision in ("fp8", "nvfp4"):
            self.planned = swap_in(self.model.blocks, self.precision, choose=reference_only)
        for block in self.model.blocks:
            block.activations = Activations.parse(self.level)
        if self.offload is not None:
            self.model.run_block = self.run_block

    def run_block(self, index: int, block: Any, x: Tensor, layout: Any) -> Tensor:
        assert self.offload is not None
        with self.offload.block(index, block, exclude=layout.rope, leaves=index in self.leaving):
            return block(x, layout)

    def loss(self, seed: int = 0, starts: Tensor | None = None) -> Tensor:
        stream = torch.randint(64, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        uses_autocast = self.precision in ("bf16 autocast", "fp8", "nvfp4")
        with torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast):
            return (
                next_token_loss(self.model, stream[:, :-1], stream[:, 1:], starts).total
                / stream[:, 1:].numel()
            )

    def step(self, number: int, micro_batches: int = 2) -> list[Tensor]:
        """Losses and gradients of one step, and the weights move."""
        self.model.zero_grad()
        losses = []
        for i in range(micro_batches):
            if self.planned is not None:
                self.planned.clock.begin(number, i * ROWS * LENGTH)
            loss = self.loss(100 * number + i)
            loss.backward()
            losses.append(loss.detach())
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        assert len(gradients) == len(list(self.model.parameters()))
        found = [*losses, *(g.clone() for g in gradients)]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.5 * parameter.grad
        return found

    def steps(self, count: int = 3) -> list[Tensor]:
        return [tensor for number in range(count) for tensor in self.step(number)]


def make_offload(
    kind: Callable[[torch.device], Link] = HostLink, nbytes: int = ARENA_BYTES, **options: Any
) -> ActivationOffload:
    arena = HostArena(nbytes, CPU, poisons=True)
    options = {"num_blocks": 4, "min_bytes": 1024} | options
    return ActivationOffload(arena, kind(CPU), **options)


def same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class DeviceBytes(TorchDispatchMode):
    """Storages that operations have made since, outside an arena: what a device would hold beside the model."""

    def __init__(self, model: nn.Module, arena: HostArena | None = None) -> None:
        super().__init__()
        self._arena = arena
        known = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        self._model = {t.untyped_storage()._cdata for t in known}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and not (self._arena is not None and self._arena.owns(tensor)):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages and storage._cdata not in self._model:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self) -> int:
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())


@contextlib.contextmanager
def saved_storages(ours: Callable[[Tensor], bool]) -> Iterator[dict[int, int]]:
    """Size of every storage that autograd saves inside, by identity."""
    found: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if ours(tensor):
            found[storage._cdata] = storage.nbytes()
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
