"""Context parallelism: each rank holds a part of the tokens of every row, and attention alone needs the others.

Norms, products and the loss work token by token. So a model runs on a part of a row as on any tokens, but that
positions and attention are those of whole rows::

    model.context_parallel = ContextParallel("zigzag", group)
    division = model.context_parallel.division(length)
    part = batch.at(division.positions(rank))                    # its document starts stay those of whole rows
    loss = NEXT_TOKEN.loss(model, part)                          # a sum over this rank's targets

Losses and gradients are sums: those of the whole batch are the sums over ranks. `division` says who holds which tokens;
`ring` passes keys and values around, by `tiles` and `calls`; `ulysses` exchanges tokens for heads.

Choice  A ring (zigzag, striped) takes any heads, and hides what it sends behind what it computes. Ulysses sends less
        where heads are not grouped or ranks are many, hides nothing, and needs heads that divide; it runs the usual
        attention, in any type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, get_args

from scrimp.errors import DeviceError
from scrimp.models.context_parallel.division import Division
from scrimp.models.context_parallel.ring import Ring, ring_attention, ring_bytes
from scrimp.models.context_parallel.ulysses import Ulysses, heads_of_rank, ulysses_bytes
from scrimp.models.flash import flash_takes
from scrimp.models.spec import AttentionSpec

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Method = Literal["zigzag", "striped", "contiguous", "ulysses"]
"""A ring by its division, or Ulysses."""
METHODS: tuple[Method, ...] = get_args(Method)


class ContextParallel:
    """How the ranks of a group share the rows of a model. Keep it while forward or backward passes run.

    Args:
        method: see `Method`; all ranks alike.
        group: the ranks, in the order of their parts; None: the default group.
    """

    def __init__(self, method: Method, group: dist.ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        self.method: Method = method
        self.group = cast("dist.ProcessGroup", group or dist.group.WORLD)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._rings: dict[int | None, Ring] = {}
        self._ulysses: dict[tuple[AttentionSpec, torch.device], Ulysses] = {}

    def division(self, length: int) -> Division:
        """Who holds which of a row's tokens.

        Args:
            length: T, of whole rows.

        Raises:
            ConfigError: it does not divide.
        """
        return _division(self.method, length, self.size)

    def check(self, attends: AttentionSpec, length: int, *, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse what these ranks cannot share: see `check_shared_rows`."""
        check_shared_rows(self.method, self.size, attends, length, device=device, dtype=dtype)

    def ring(self, window: int | None) -> Ring:
        """The ring of blocks with such a window."""
        assert self.method != "ulysses"
        if window not in self._rings:
            self._rings[window] = Ring(self.group, self.method, window=window)
        return self._rings[window]

    def ulysses(self, attends: AttentionSpec, device: torch.device) -> Ulysses:
        """The exchange of blocks with such attention on a device.

        Raises:
            ConfigError: heads do not divide.
        """
        if (attends, device) not in self._ulysses:
            self._ulysses[attends, device] = Ulysses(self.group, attends, device)
        return self._ulysses[attends, device]


def check_shared_rows(
    method: Method,
    ranks: int,
    attends: AttentionSpec,
    length: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Refuse what so many ranks cannot share: before work starts.

    Args:
        attends: of the blocks of one kind.
        length: T, of whole rows.
        device: of this rank.
        dtype: what attention computes in.

    Raises:
        ConfigError: tokens or heads do not divide.
        DeviceError: the device's flash attention does not take these heads, or this type.
    """
    _division(method, length, ranks)
    if method == "ulysses":
        heads_of_rank(attends, ranks)
    elif device.type != "cpu" and not (
        device.type == "cuda" and flash_takes(device, dtype, attends.head_size)
    ):
        raise DeviceError(
            "context parallelism by a ring needs flash attention",
            got=f"heads of {attends.head_size} in {str(dtype).removeprefix('torch.')} on {device}",
            expected="a CPU; or CUDA from compute capability 8.0 on, bf16, heads of a multiple of 8 up to 256",
            do="use bf16, or Ulysses",
        )


def _division(method: Method, length: int, ranks: int) -> Division:
    return Division("contiguous" if method == "ulysses" else method, length, ranks)


__all__ = [
    "METHODS",
    "ContextParallel",
    "Division",
    "Method",
    "Ring",
    "Ulysses",
    "check_shared_rows",
    "heads_of_rank",
    "ring_attention",
    "ring_bytes",
    "ulysses_bytes",
]
