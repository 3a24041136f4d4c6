"""What autograd saves of a block and an offload would move, counted as `scrimp.runtime.memory` decides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scrimp.profiler.memory_trace.block_passes import Autocast

MIN_BYTES = 16 * 1024
"""Smaller storages stay on the device."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a block's forward pass saves, its input among them."""

    moved: int
    """Go to the host."""
    casts: int
    """Copies of parameters in the compute format: dropped, and made again."""


def saved_bytes(
    block: Callable[[Tensor], Tensor],
    stream: Tensor,
    module: nn.Module,
    autocast: Autocast,
    resident: Sequence[Tensor],
) -> SavedBytes:
    """Run a block forward and count.

    Args:
        block: the residual stream after it, of the stream before it.
        stream: shape, type and device of the residual stream.
        module: whose parameters stay.
        resident: tensors that stay, too.
    """
    stays = {_storage(tensor) for tensor in (*module.parameters(), *resident)}
    held: list[Tensor] = []  # so that no other storage takes an address
    moved: dict[int, int] = {}
    casts: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        num_bytes = tensor.untyped_storage().nbytes()
        held.append(tensor.detach())
        if _is_cast(tensor):
            casts[_storage(tensor)] = num_bytes
        elif _storage(tensor) not in stays and num_bytes >= MIN_BYTES:
            moved[_storage(tensor)] = num_bytes
        return held[-1]

    x = torch.empty_like(stream).requires_grad_()
    with autocast(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x * 1)
    return SavedBytes(sum(moved.values()), sum(casts.values()))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_cast(tensor: Tensor) -> bool:
    """A parameter in another type, or a view of it."""
    root = tensor if tensor._base is None else tensor._base
    if root.grad_fn is None or root.grad_fn.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(root.grad_fn.next_functions[0][0], "variable", None), nn.Parameter)
