"""Llama 3, Qwen 2.5, Qwen 3 and Mistral: a norm before attention, and one before a gated MLP.

Each block adds two things to the residual stream x::

    x = x + out(attention(qkv(norm(x))))
    x = x + down(silu(gate(norm(x))) * up(norm(x)))

The families differ by switches of `Architecture` alone: RoPE scaling (Llama 3), QKV bias and tied embeddings
(Qwen 2.5), a norm over each query and key head and a free head size (Qwen 3), a sliding window (Mistral), fewer KV
heads than query heads (most).

Letters: D width, A attention width, N KV heads of size K, C = A + 2 N K, F ffn width.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from scrimp.models.spec import AttentionSpec, BlockSpec, Elsewhere, LinearSpec, ModelSpec, Rope, Traffic

if TYPE_CHECKING:
    from scrimp.models.blocks import Block, Place, RMSNorm

QKV, OUT, GATE_UP, DOWN = "attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"


class Llama(ModelSpec):
    """A decoder of the Llama family."""

    names_elsewhere: ClassVar[Mapping[str, Elsewhere]] = {
        QKV: Elsewhere(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attention.linear_qkv"
        ),
        OUT: Elsewhere(("self_attn.o_proj",), "self_attention.linear_proj"),
        GATE_UP: Elsewhere(("mlp.gate_proj", "mlp.up_proj"), "mlp.linear_fc1"),
        DOWN: Elsewhere(("mlp.down_proj",), "mlp.linear_fc2"),
    }

    def block(self, index: int) -> BlockSpec:
        """All are equal."""
        return self._block

    @cached_property
    def _block(self) -> BlockSpec:
        a = self.architecture
        D, A, C, F = a.width, a.attention_width, a.qkv_width, a.ffn_width
        norm, residual = Traffic(2 * D, 4 * D, "norms"), Traffic(3 * D, 3 * D)
        return BlockSpec(
            linears=(
                LinearSpec(QKV, C, D, origin="made", again="qkv"),
                LinearSpec(OUT, D, A, origin="kept", again="block"),
                LinearSpec(GATE_UP, 2 * F, D, origin="made", again="mlp"),
                LinearSpec(DOWN, D, F, origin="made"),
            ),
            attention=AttentionSpec(
                a.num_heads,
                a.num_kv_heads,
                a.head_size,
                Rope(a.rope_theta, a.rope_scaling),
                a.sliding_window,
            ),
            traffic=(
                norm,
                norm,
                Traffic(3 * F, 5 * F, "swiglu"),
                Traffic(2 * C, 2 * C, "qkv"),
                Traffic(3 * D, 3 * D, "block"),
                residual,
            ),
            vectors=2 * D + (C if a.qkv_bias else 0) + (2 * a.head_size if a.qk_norm else 0),
        )

    def build_block(self, index: int, place: Place) -> Block:
        """A norm before each of the two."""
        from scrimp.models.blocks import Attention, Block, Mlp, RMSNorm

        a, attends = self.architecture, self._block.attention
        norms = [RMSNorm(a.head_size, a.norm_eps, place) if a.qk_norm else None for _ in range(2)]
        return Block(
            attends,
            Attention(attends, a.width, place, bias=a.qkv_bias, q_norm=norms[0], k_norm=norms[1]),
            Mlp(a.width, a.ffn_width, place),
            attention_norm=self.build_norm(place),
            mlp_norm=self.build_norm(place),
        )

    def build_norm(self, place: Place) -> RMSNorm:
        """With a plain weight."""
        from scrimp.models.blocks import RMSNorm

        return RMSNorm(self.architecture.width, self.architecture.norm_eps, place)
