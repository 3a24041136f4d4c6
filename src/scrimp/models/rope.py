"""Rotary position embedding: each pair of a head's numbers is a point, turned by its position.

Problem  Attention compares tokens; it must know how far apart they are, and only that.
Method   Number j of a head's first half and number j of its second half form a point.
         At position t it is turned by the angle t * f_j, with f_j = theta^(-2j / K):

             first'  = first * cos - second * sin
             second' = second * cos + first * sin

         The product of a query turned by t and a key turned by s depends on t - s alone.
         That is why positions simply run on inside a packed row: a document that starts in
         the middle of a row sees the same differences as one at its start.
Llama 3  Wavelengths longer than original_context / low_freq_factor are stretched by factor,
         those shorter than original_context / high_freq_factor are left alone, and in
         between the two are mixed linearly in original_context / wavelength.
Linear   All frequencies are divided by one factor (Gemma 3's blocks without a window).
Limits   Angles are computed in float32, step by step as transformers does it: at position
         100,000 float32 angles are off by several thousandths, and published weights were
         trained with exactly that error.
Checked  tests/models/test_rope.py against float64; test_decoder.py against transformers.

Shapes: T tokens, K head size, J = K / 2 pairs; 1 is broadcast over the heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scrimp.config.architecture import RopeScaling
from scrimp.models import cpu_passes
from scrimp.models.spec import Rope


def frequencies(rope: Rope, head_size: int, *, device: torch.device | str | None = None) -> Tensor:
    """Angle per position of each pair, freq_J in float32."""
    exponent_J = torch.arange(0, head_size, 2, dtype=torch.int64, device=device).float()
    freq_J = 1.0 / (rope.theta ** (exponent_J / head_size))
    if rope.factor != 1.0:
        freq_J = freq_J / rope.factor
    return freq_J if rope.scaling is None else stretch(freq_J, rope.scaling)


def stretch(freq_J: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's scaling of the frequencies to a longer context."""
    wavelength_J = 2 * math.pi / freq_J
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 where the wavelength is long (stretched fully), 1 where it is short (left alone).
    share_J = ((scaling.original_context / wavelength_J - low) / (high - low)).clamp(0.0, 1.0)
    mixed_J = (1 - share_J) * freq_J / scaling.factor + share_J * freq_J
    return torch.where(share_J <= 0, freq_J / scaling.factor, torch.where(share_J >= 1, freq_J, mixed_J))


def rope_tables(
    rope: Rope, head_size: int, start: int, stop: int, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos_T1K and sin_T1K in float32 for positions start to stop, ready for any number of heads.

    Both halves of a head have the same angles; the sine's first half carries the minus sign.
    """
    return rope_tables_at(rope, head_size, torch.arange(start, stop, device=device))


def rope_tables_at(rope: Rope, head_size: int, position_T: Tensor) -> tuple[Tensor, Tensor]:
    """The same for any positions, on their device."""
    angle_TJ = position_T.float()[:, None] * frequencies(rope, head_size, device=position_T.device)[None, :]
    cos_TJ, sin_TJ = angle_TJ.cos(), angle_TJ.sin()
    cos_TK, sin_TK = torch.cat([cos_TJ, cos_TJ], dim=-1), torch.cat([-sin_TJ, sin_TJ], dim=-1)
    return cos_TK[:, None], sin_TK[:, None]


def rotate(x: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    """Turn every head of x, shape (..., T, heads, K), by its token's position; x keeps its type."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos_T1K + torch.cat([second, first], dim=-1) * sin_T1K).to(x.dtype)


def rotate_into(out: Tensor, x: Tensor, cos_T1K: Tensor, sin_T1K: Tensor, *, back: bool = False) -> None:
    """Write `rotate(x)` to out, which must not share memory with x; one pass, or one and two half passes.

    Args:
        back: turn the other way, which is the gradient of a turn.
    """
    if cpu_passes.can_rotate(out, x, cos_T1K, sin_T1K):
        cpu_passes.rotate_into(out, x, cos_T1K, sin_T1K, back=back)
        return
    # Reduced types are turned in the tables' float32 and rounded once.
    wide = x if x.dtype == cos_T1K.dtype else x.to(cos_T1K.dtype)
    target = out if out.dtype == wide.dtype else torch.empty_like(wide)
    torch.mul(wide, cos_T1K, out=target)
    half = x.shape[-1] // 2
    sign = -1 if back else 1
    target[..., :half].addcmul_(wide[..., half:], sin_T1K[..., :half], value=sign)
    target[..., half:].addcmul_(wide[..., :half], sin_T1K[..., half:], value=sign)
    if target is not out:
        out.copy_(target)
