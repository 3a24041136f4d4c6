"""OLMo 2: norms after attention and after the MLP, and none before them.

Each block adds two things to the residual stream x::

    x = x + norm(out(attention(qkv(x))))
    x = x + norm(down(silu(gate(x)) * up(x)))

Queries and keys are normed before RoPE, all heads of a token together.

Recompute  The level `norms` has nothing to do: no product reads a norm's result. A norm keeps the product that it
           reads, so that this is not multiplied again, but at the level `block`, which keeps nothing.
Gains      Its norms do not read the residual stream, so that `scrimp.statistics.structure` finds none: SNIP's gains are
           then measured exactly, with a pass for each layer.
Source     2 OLMo 2 Furious (arXiv 2501.00656), transformers' Olmo2ForCausalLM

Letters: D width, A attention width, N all key heads, C = A + 2 N, F ffn width.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from scrimp.config.activations import LEVELS
from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError
from scrimp.models.huggingface.keys import JSON, Keys, common, written, written_rope
from scrimp.models.kinds.llama import DOWN, GATE_UP, OUT, QKV, Llama
from scrimp.models.spec import AttentionSpec, BlockSpec, LinearSpec, Rope, Traffic, VectorSpec

if TYPE_CHECKING:
    from scrimp.models.blocks import Block, Place

_DEFAULT_NORM_EPS = 1e-5


class Olmo2(Llama):
    """Llama's layers, normed elsewhere."""

    huggingface_classes: ClassVar[Mapping[str, str]] = {"olmo2": "Olmo2ForCausalLM"}
    levels: ClassVar[tuple[str, ...]] = tuple(level for level in LEVELS if level != "norms")

    @cached_property
    def _block(self) -> BlockSpec:
        a = self.architecture
        D, A, N, F = a.width, a.attention_width, a.kv_width, a.ffn_width
        C = A + 2 * N
        return BlockSpec(
            layers=(
                LinearSpec(QKV, C, D, again="qkv", rows=(A, N, N), cut="outputs"),
                VectorSpec("attention.q_norm.weight", (("self_attn.q_norm.weight", A),)),
                VectorSpec("attention.k_norm.weight", (("self_attn.k_norm.weight", N),)),
                LinearSpec(OUT, D, A, origin="kept", again="block", cut="inputs"),
                VectorSpec("attention_output_norm.weight", (("post_attention_layernorm.weight", D),)),
                LinearSpec(GATE_UP, 2 * F, D, again="mlp", gate="before", rows=(F, F), cut="outputs"),
                LinearSpec(DOWN, D, F, origin="made", again="block", gate="after", cut="inputs"),
                VectorSpec("mlp_output_norm.weight", (("post_feedforward_layernorm.weight", D),)),
            ),
            attention=AttentionSpec(
                a.num_heads, a.num_kv_heads, a.head_size, Rope(a.rope_theta, a.rope_scaling)
            ),
            traffic=(
                Traffic(2 * (A + N), 4 * (A + N), "qkv"),
                Traffic(2 * C, 2 * C, "qkv"),
                Traffic(2 * D, 4 * D, "block"),
                Traffic(3 * D, 3 * D, "block"),
                Traffic(3 * F, 5 * F, "swiglu"),
                Traffic(2 * D, 4 * D, "block"),
                Traffic(3 * D, 3 * D),
            ),
        )

    def build_block(self, index: int, place: Place) -> Block:
        """A norm after each of the two."""
        from scrimp.models.blocks import Attention, Block, Mlp, RMSNorm

        a, attends = self.architecture, self._block.attention
        q_norm, k_norm = (RMSNorm(size, a.norm_eps, place) for size in (a.attention_width, a.kv_width))
        return Block(
            attends,
            Attention(attends, a.width, place, q_norm=q_norm, k_norm=k_norm),
            Mlp(a.width, a.ffn_width, place),
            attention_output_norm=self.build_norm(place),
            mlp_output_norm=self.build_norm(place),
        )

    @classmethod
    def read_config(cls, keys: Keys, family: str) -> Architecture:
        """Read a config.json of OLMo 2."""
        if keys.config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise keys.refuse("hidden_act", expected="silu")
        if keys.config.get("attention_bias"):
            raise keys.refuse("attention_bias", expected="false")
        found = common(keys)
        found["norm_eps"] = keys.number("rms_norm_eps", _DEFAULT_NORM_EPS)
        heads, size = found["num_heads"], found["width"] // found["num_heads"]
        return Architecture(
            family=family,
            **found,
            num_kv_heads=keys.integer("num_key_value_heads", heads, null=heads),
            head_size=keys.integer("head_dim", size, null=size),
            qk_norm=True,
        )

    def write_config(self) -> JSON:
        """The keys of OLMo 2."""
        a = self.architecture
        if a.qkv_bias or not a.qk_norm or a.sliding_window is not None:
            raise ModelError(
                "an olmo2 model cannot be exported with these switches",
                got=f"qkv_bias {a.qkv_bias}, qk_norm {a.qk_norm}, sliding_window {a.sliding_window}",
                expected="no bias, QK norm, no window",
            )
        return {**written(a), **written_rope(a), "hidden_act": "silu"}
