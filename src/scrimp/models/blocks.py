"""What blocks of decoders are made of: norms, attention, gated MLPs, and their sum with the residual stream.

A block adds two things to the residual stream x, attention and a gated MLP, each normed before, after, or both::

    x = x + after(out(attention(qkv(before(x)))))
    x = x + after(down(act(gate(before(x))) * up(before(x))))

Which norms there are, what attention looks like and what the gate's function is, a kind of decoder says
(`scrimp.models.kinds`).

Parameters  `qkv.weight` holds the rows of all query heads, then the key heads, then the value
            heads; `gate_up.weight` the rows of gate, then up: one GEMM each instead of three
            and two. New parameters are uninitialised memory.
Precision   A plan gives every linear layer's GEMMs their formats (`scrimp.gemm`). Norms and the gate are
            handed to the layer that reads their results, because a plan may make them again in backward.
Memory      A block keeps or makes again what its backward pass reads, by its `activations`
            (`scrimp.config.activations`); no number changes by it. What a part of a block makes again ends with its
            last product, so that this product is not multiplied again; a norm after it keeps its input.
Checked     tests/models/test_decoder.py: logits and gradients against a float64 reference.

Shapes: B rows, T tokens, D width, H query heads, N KV heads, K head size, F ffn width, C = (H + 2N) K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from scrimp.config.activations import Activations
from scrimp.gemm import (
    FactoredLinear,
    Gate,
    PlannedLinear,
    SparseLowRankLinear,
    SummedLinear,
    defers,
    gate_alone,
    gated_products,
    gates_run,
    last_products,
    of_made_again,
    recomputed,
    run_again,
    run_again_before,
)
from scrimp.models.attention import AttentionLayout, attend, attention_operators
from scrimp.models.functions import GATES, at_least_float32, rms_norm
from scrimp.models.spec import AttentionSpec, LinearSpec, full_name

KEEP, ENDS_REGION = Activations(), Activations(ends_region=True)


@dataclass(frozen=True)
class Place:
    """Where parameters live, and their type."""

    device: torch.device | str | None = None
    """`meta` gives shapes without memory."""
    dtype: torch.dtype = torch.float32


class Linear(SummedLinear):
    """A linear layer that leaves its memory uninitialised: every weight is set later by name."""

    def reset_parameters(self) -> None:
        """Nothing: drawing billions of numbers that are overwritten costs minutes."""


class Embedding(nn.Embedding):
    """An embedding that leaves its memory uninitialised, as `Linear` does."""

    def reset_parameters(self) -> None:
        """Nothing, see `Linear`."""


class RMSNorm(nn.Module):
    """x / root mean square of x, times (offset + weight) scale.

    Args:
        size: of the last dimension.
        offset: 1 where a weight of 0 changes nothing.
        scale: of all that comes out.
    """

    def __init__(
        self, size: int, eps: float, place: Place, *, offset: float = 0.0, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.eps, self.offset, self.scale = eps, offset, scale
        self.one_copy: Callable[[Tensor], Tensor] | None = None
        """What adds up the gradients of a weight that several ranks have, each for its own tokens or heads."""
        self.weight = nn.Parameter(torch.empty(size, device=place.device, dtype=place.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight = self.weight if self.one_copy is None else self.one_copy(self.weight)
        if self.offset == 0.0 and self.scale == 1.0:
            return rms_norm(x, weight, self.eps)
        # In float32: near 1, bfloat16 has steps of a hundredth, which weights near 0 have not.
        gain = at_least_float32(weight) + self.offset
        return rms_norm(x, gain if self.scale == 1.0 else gain * self.scale, self.eps)


Attend = Callable[[Tensor], Tensor]
"""From query, key and value heads side by side, qkv_BTGK, to what attention gives, out_BTHK."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Args:
        shape: heads.
        width: of the residual stream.
        place: where its parameters live.
        bias: on queries, keys and values.
        q_norm: of queries, each head on its own or, by its size, all heads of a token together; None: none.
        k_norm: of keys, likewise.
    """

    def __init__(
        self,
        shape: AttentionSpec,
        width: int,
        place: Place,
        *,
        bias: bool = False,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.head_size = shape.head_size
        outputs = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
        self.qkv = Linear(width, outputs, bias=bias, device=place.device, dtype=place.dtype)
        self.out = Linear(shape.width, width, bias=False, device=place.device, dtype=place.dtype)
        self.q_norm, self.k_norm = q_norm, k_norm

    def heads(self, x_BTD: Tensor, norm: RMSNorm | None, again: bool = False) -> Tensor:
        """qkv_BTGK: query, key and value heads side by side, normed where the kind does, not yet turned.

        Args:
            norm: of the residual stream, before the product.
            again: make the normed input again in backward.
        """
        qkv_BTC = _product(self.qkv, norm, x_BTD, again)
        if self.q_norm is None or self.k_norm is None:
            return cast(Tensor, qkv_BTC.unflatten(-1, (-1, self.head_size)))
        return self.normed_heads(qkv_BTC, self.q_norm, self.k_norm)

    def normed_heads(self, qkv_BTC: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
        """qkv_BTGK with queries and keys normed."""
        if len(q_norm.weight) != self.head_size:
            widths = len(q_norm.weight), len(k_norm.weight)
            q, k, v = qkv_BTC.split([*widths, widths[1]], dim=-1)
            return torch.cat([q_norm(q), k_norm(k), v], dim=-1).view(*qkv_BTC.shape[:-1], -1, self.head_size)
        qkv_BTGK = qkv_BTC.unflatten(-1, (-1, self.head_size))
        q, k, v = qkv_BTGK.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        return torch.cat([q_norm(q), k_norm(k), v], dim=2)

    def forward(
        self, x_BTD: Tensor, norm: RMSNorm | None, attend: Attend, activations: Activations = KEEP
    ) -> Tensor:
        """Attention of the residual stream."""

        def attended(x_BTD: Tensor, again: bool = False) -> Tensor:
            return attend(self.heads(x_BTD, norm, again)).flatten(2)

        if activations.recomputes("attention"):
            return run_again_before(self.out, attended, x_BTD)
        if activations.recomputes("qkv"):
            return run_again_before(self.out, attended, x_BTD, keeps=attention_operators())
        return cast(Tensor, self.out(attended(x_BTD, activations.recomputes("norms"))))


class Mlp(nn.Module):
    """A gated MLP: act(gate) * up, then down.

    Args:
        gate: which function of gate and up it has.
    """

    def __init__(self, width: int, inner: int, place: Place, *, gate: Gate = "silu") -> None:
        super().__init__()
        self.gate: Gate = gate
        self.defers_gate = False
        """Products make the gate's numbers where they quantize them (`scrimp.gemm.gated_products`)."""
        self.gate_up = Linear(width, 2 * inner, bias=False, device=place.device, dtype=place.dtype)
        self.down = Linear(inner, width, bias=False, device=place.device, dtype=place.dtype)

    def forward(self, x_BTD: Tensor, norm: RMSNorm | None, activations: Activations = KEEP) -> Tensor:
        """Token by token, of the residual stream."""
        gated = partial(gate_alone, gate=self.gate) if self.defers_gate else GATES[self.gate]
        is_again = activations.recomputes("mlp")
        norm_again = activations.recomputes("norms") and not is_again
        may_defer = self.defers_gate and (not norm_again or torch.compiler.is_compiling())
        if may_defer and defers(self.gate_up, self.down, x_BTD):
            keeps_gated = not (activations.recomputes("swiglu") or activations.ends_region)
            return self._as_one(x_BTD, norm, is_again, norm_again, keeps_gated)

        def gates(x_BTD: Tensor) -> Tensor:
            return gated(_product(self.gate_up, norm, x_BTD, norm_again))

        if is_again:
            return run_again_before(self.down, gates, x_BTD)
        if activations.ends_region:
            return of_made_again(self.down, gates(x_BTD))
        gate_up_BTF = _product(self.gate_up, norm, x_BTD, norm_again)
        return recomputed(self.down, gated, gate_up_BTF, always=activations.recomputes("swiglu"))

    def _as_one(
        self, x_BTD: Tensor, norm: RMSNorm | None, is_again: bool, norm_again: bool, keeps_gated: bool
    ) -> Tensor:
        """Both products as one function, all of which is made again but for the last one, or the norm before it."""

        def products(x_BTD: Tensor) -> Tensor:
            layers = cast(PlannedLinear, self.gate_up), cast(PlannedLinear, self.down)
            return gated_products(x_BTD, *layers, self.gate, keeps_gated=keeps_gated, made_again=norm_again)

        if norm is not None and norm_again:
            return products(run_again(norm, x_BTD, last=None))
        if is_again:
            keeps = last_products() if torch.compiler.is_compiling() else ()
            return run_again(lambda x: products(_normed(x, norm)), x_BTD, last=self.down, keeps=keeps)
        return products(_normed(x_BTD, norm))


def _product(linear: Linear, norm: RMSNorm | None, x_BTD: Tensor, again: bool) -> Tensor:
    """The product of the residual stream, normed before it or not."""
    return cast(Tensor, linear(x_BTD)) if norm is None else recomputed(linear, norm, x_BTD, always=again)


def _normed(added_BTD: Tensor, norm: RMSNorm | None) -> Tensor:
    return added_BTD if norm is None else cast(Tensor, norm(added_BTD))


def defer_gates(model: nn.Module, device: torch.device) -> None:
    """Let products make the numbers of the gates between them, on a device whose kernels do."""
    if device.type != "cuda" or not gates_run(device):
        return
    for module in model.modules():
        if isinstance(module, Mlp):
            module.defers_gate = True


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream.

    Args:
        attends: what its attention looks like: blocks of equal ones share a layout.
        attention_norm: before attention; mlp_norm: before the MLP; None: none.
        attention_output_norm: of what attention adds; mlp_output_norm: of what the MLP adds; None: none.
    """

    def __init__(
        self,
        attends: AttentionSpec,
        attention: Attention,
        mlp: Mlp,
        *,
        attention_norm: RMSNorm | None = None,
        attention_output_norm: RMSNorm | None = None,
        mlp_norm: RMSNorm | None = None,
        mlp_output_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.attends, self.is_compiled = attends, False
        self.activations = KEEP
        """What is made again in backward instead of kept; may change between two steps."""
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_output_norm = attention_output_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_output_norm = mlp_output_norm

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile in place, and remember it: the layout must then be one that compiles once."""
        super().compile(*args, **kwargs)
        self.is_compiled = True

    def add(self, x_BTD: Tensor, attend: Attend, activations: Activations = KEEP) -> Tensor:
        """The residual stream after this block, for attention of any kind."""
        added = self.attention(x_BTD, self.attention_norm, attend, activations)
        x_BTD = x_BTD + _normed(added, self.attention_output_norm)
        return x_BTD + _normed(self.mlp(x_BTD, self.mlp_norm, activations), self.mlp_output_norm)

    def forward(self, x_BTD: Tensor, layout: AttentionLayout) -> Tensor:
        """The residual stream after this block."""
        added = partial(self.add, attend=partial(attend, layout=layout))
        if self.activations.recomputes("block"):
            # A norm after the last product reads it: then it is multiplied again.
            is_last = self.mlp_output_norm is None
            ends = is_last and torch.compiler.is_compiling()
            added = partial(added, activations=ENDS_REGION if ends else KEEP)
            return run_again(added, x_BTD, last=self.mlp.down if is_last else None)
        return added(x_BTD, activations=self.activations)


def with_factors(block: Block, layers: Iterable[LinearSpec], rank: int, place: Place) -> Block:
    """A block whose linear layers are products of two factors of this rank."""
    make = partial(Linear, device=place.device, dtype=place.dtype)
    for one in layers:
        has_bias = block.get_submodule(one.name).bias is not None
        first, second = one.factors(rank)
        factors = (
            make(first.inputs, first.outputs, bias=False),
            make(second.inputs, second.outputs, bias=has_bias),
        )
        block.set_submodule(one.name, FactoredLinear(*factors))
    return block


def with_sparse(block: Block, number: int, layers: Iterable[LinearSpec], place: Place) -> Block:
    """A block whose linear layers' matrices are made of two factors and a sparse matrix.

    Args:
        number: of the block in the model.
    """
    make = partial(Linear, bias=False, device=place.device, dtype=place.dtype)
    for one in layers:
        assert one.made_of is not None
        rank, has_bias = one.made_of.rank, block.get_submodule(one.name).bias is not None
        factors = make(one.inputs, rank), make(rank, one.outputs)
        layer = SparseLowRankLinear(full_name(number, one.name), *factors, one.made_of.entries, bias=has_bias)
        block.set_submodule(one.name, layer)
    return block
