"""Masks of attention: where a query may look at a key, as booleans and as what is added to scores."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed(
    rows: int, length: int, lengths: tuple[int, ...] | None, window: int | None, device: torch.device
) -> Tensor:
    """The boolean mask, (B or 1, 1, T, T): True where a query (third) may look at a key (fourth).

    Args:
        rows: B.
        length: T.
        lengths: tokens of each document over all rows; None: each row is one.
        window: the last so many tokens are seen, a token itself included; None: all.
        device: where the mask is made.
    """
    position_T = torch.arange(length, device=device)
    mask = position_T[:, None] >= position_T[None, :]
    if window is not None:
        mask &= position_T[:, None] < position_T[None, :] + window
    if lengths is None:
        return mask[None, None]
    numbers = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths), output_size=rows * length
    )
    document_BT = numbers.view(rows, length).to(device, non_blocking=True)
    return (mask & (document_BT[:, :, None] == document_BT[:, None, :]))[:, None]


def added(may_look: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores for a boolean mask, which is overwritten."""
    hidden = may_look.logical_not_()
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def band(queries: int, keys: int, *, causal: bool, left: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a block, (1, 1, queries, keys) on the CPU.

    With d = keys - queries, so that the diagonal ends in the lower right corner: query i sees key j where j <= i + d,
    if causal, and j >= i + d - left, if there is such a bound.
    """
    mask = torch.zeros(queries, keys, dtype=dtype)
    if left is not None:
        mask.fill_(float("-inf")).tril_(keys - queries - left - 1)
    if causal:
        mask += torch.full_like(mask, float("-inf")).triu_(keys - queries + 1)
    return mask[None, None]
