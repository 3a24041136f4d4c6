"""Larger and smaller models of the same shape: what `largest-model` chooses from.

Method   Depth grows with width, as in families that were published (Llama 3: 32 layers of 4,096, 80 of 8,192, 126 of
         16,384). Member n has::

             heads    n g     g = key heads, or gcd(heads, 8) where each head has its own
             width    width heads' / heads;  layers likewise, rounded; ffn and experts' width to multiples of 64

         Size of a head, key heads (where several heads share one), vocabulary, number of experts and ranks of latent
         attention stay.
Checked  tests/planner/layout/test_scaled_models.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from scrimp.config.architecture import Architecture
from scrimp.models import spec_of
from scrimp.models.shapes import ModelShape, ModelSizes, sizes_of

_WIDE = 64


@dataclass(frozen=True)
class Member:
    """One model of a family."""

    text: str
    model: ModelSizes


@dataclass(frozen=True)
class ModelFamily:
    """Models of one shape."""

    member: Callable[[int], Member]
    given: int
    """Number of the one that it was made from."""


def family_of(base: ModelShape | Architecture) -> ModelFamily:
    """The family of a model."""
    if isinstance(base, ModelShape):
        heads, key_heads = base.heads, base.key_heads
    else:
        heads, key_heads = base.num_heads, base.num_kv_heads
    step = key_heads if key_heads < heads else math.gcd(heads, 8)

    def member(number: int) -> Member:
        if isinstance(base, ModelShape):
            return _shape(base, number * step, heads)
        return _architecture(base, number * step, heads)

    return ModelFamily(member, heads // step)


def _shape(base: ModelShape, heads: int, of: int) -> Member:
    experts = base.experts
    if experts is not None:
        experts = dataclasses.replace(
            experts,
            width=_wide(experts.width, heads, of),
            shared_width=_wide(experts.shared_width, heads, of),
        )
    one = dataclasses.replace(
        base,
        layers=_layers(base.layers, heads, of),
        width=base.width * heads // of,
        heads=heads,
        kv_heads=base.key_heads if base.key_heads < of else heads,
        ffn_width=_wide(base.ffn_width, heads, of),
        experts=experts,
    )
    return Member(_text(one.layers, one.width, heads), one.sizes)


def _architecture(base: Architecture, heads: int, of: int) -> Member:
    one = dataclasses.replace(
        base,
        num_layers=_layers(base.num_layers, heads, of),
        width=base.width * heads // of,
        num_heads=heads,
        num_kv_heads=base.num_kv_heads if base.num_kv_heads < of else heads,
        ffn_width=_wide(base.ffn_width, heads, of),
        options=tuple(
            (name, _wide(int(value), heads, of) if name == "expert_width" else value)
            for name, value in base.options
        ),
    )
    return Member(_text(one.num_layers, one.width, heads), sizes_of(spec_of(one)))


def _layers(number: int, heads: int, of: int) -> int:
    return max(1, round(number * heads / of))


def _wide(size: int, heads: int, of: int) -> int:
    return size if heads == of or not size else max(1, round(size * heads / of / _WIDE)) * _WIDE


def _text(layers: int, width: int, heads: int) -> str:
    return f"{layers} layers, width {width:,}, {heads} heads"
