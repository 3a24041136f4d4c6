"""Gemma 3's text models: norms before and after, blocks with a window and blocks without, two RoPE bases.

Each block adds two things to the residual stream x, which begins as the embedding times sqrt(D)::

    x = x + norm(out(attention(qkv(norm(x)))))
    x = x + norm(down(gelu(gate(norm(x))) * up(norm(x))))

Norms     Their weight is 1 + w. Queries and keys are normed before RoPE, each head on its own; scores are divided by
          sqrt(query_scalar) where others divide by sqrt(K): the queries' norm is scaled by what is between the two.
Windows   Every `full_every`-th block sees the whole past; its RoPE has the base `rope_theta`, and all of its
          frequencies are divided by `rope_factor`. The others see `sliding_window` tokens; the base of theirs is
          `local_rope_theta`.
Options   full_every 6, local_rope_theta 10,000, query_scalar K, rope_factor 1: numbers of `Architecture.options`.
Gains     What is added to the residual stream is not what a linear layer gave but its norm, so that
          `scrimp.statistics.structure` finds none: SNIP's gains are then measured exactly, with a pass for each layer.
Limits    On CUDA, norms of bfloat16 streams read a float32 copy: torch's fused norm takes one type, and 1 + w is not
          rounded to bfloat16. Text alone: the folders of the multimodal models are refused. No soft caps, which
          Gemma 2 has: it is refused.
Source    Gemma 3 Technical Report (arXiv 2503.19786), transformers' Gemma3ForCausalLM

Letters: D width, A attention width, N all key heads of size K, C = A + 2 N, F ffn width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError
from scrimp.models.huggingface.keys import JSON, Keys, sizes, written
from scrimp.models.kinds.llama import DOWN, GATE_UP, OUT, QKV, Llama
from scrimp.models.spec import AttentionSpec, BlockSpec, LinearSpec, Rope, Traffic, VectorSpec

if TYPE_CHECKING:
    from scrimp.models.blocks import Block, Place, RMSNorm

_FULL_EVERY = 6
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_FULL, _LOCAL = "full_attention", "sliding_attention"
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


class Gemma3(Llama):
    """Llama's layers, normed before and after."""

    huggingface_classes: ClassVar[Mapping[str, str]] = {"gemma3_text": "Gemma3ForCausalLM"}

    @property
    def embedding_scale(self) -> float:
        """sqrt(D)."""
        return math.sqrt(self.architecture.width)

    def _is_full(self, index: int) -> bool:
        return (index + 1) % int(self.architecture.option("full_every", _FULL_EVERY)) == 0

    def block(self, index: int) -> BlockSpec:
        """With a window or without."""
        return self._full if self._is_full(index) else self._local

    @cached_property
    def _full(self) -> BlockSpec:
        a = self.architecture
        return self._spec(Rope(a.rope_theta, factor=a.option("rope_factor", 1.0)), None)

    @cached_property
    def _local(self) -> BlockSpec:
        a = self.architecture
        return self._spec(Rope(a.option("local_rope_theta", _LOCAL_THETA)), a.sliding_window)

    def _spec(self, rope: Rope, window: int | None) -> BlockSpec:
        a = self.architecture
        D, A, N, F, K = a.width, a.attention_width, a.kv_width, a.ffn_width, a.head_size
        C = A + 2 * N
        return BlockSpec(
            layers=(
                *(
                    VectorSpec(f"{ours}.weight", ((f"{theirs}.weight", D),))
                    for ours, theirs in _NORMS.items()
                ),
                LinearSpec(QKV, C, D, origin="made", again="qkv", rows=(A, N, N), cut="outputs"),
                VectorSpec("attention.q_norm.weight", (("self_attn.q_norm.weight", K),)),
                VectorSpec("attention.k_norm.weight", (("self_attn.k_norm.weight", K),)),
                LinearSpec(OUT, D, A, origin="kept", again="block", cut="inputs"),
                LinearSpec(
                    GATE_UP, 2 * F, D, origin="made", again="mlp", gate="before", rows=(F, F), cut="outputs"
                ),
                LinearSpec(DOWN, D, F, origin="made", again="block", gate="after", cut="inputs"),
            ),
            attention=AttentionSpec(a.num_heads, a.num_kv_heads, K, rope, window),
            traffic=(
                Traffic(2 * D, 4 * D, "norms"),
                Traffic(2 * D, 4 * D, "norms"),
                Traffic(2 * D, 4 * D, "block"),
                Traffic(2 * D, 4 * D, "block"),
                Traffic(2 * (A + N), 4 * (A + N), "qkv"),
                Traffic(2 * C, 2 * C, "qkv"),
                Traffic(3 * F, 5 * F, "swiglu"),
                Traffic(3 * D, 3 * D, "block"),
                Traffic(3 * D, 3 * D),
            ),
        )

    def build_norm(self, place: Place) -> RMSNorm:
        """With a weight of 1 + w."""
        from scrimp.models.blocks import RMSNorm

        return RMSNorm(self.architecture.width, self.architecture.norm_eps, place, offset=1.0)

    def build_block(self, index: int, place: Place) -> Block:
        """Norms before and after each of the two."""
        from scrimp.models.blocks import Attention, Block, Mlp, RMSNorm

        a, attends = self.architecture, self.block(index).attention
        scale = math.sqrt(a.head_size / a.option("query_scalar", a.head_size))
        q_norm, k_norm = (
            RMSNorm(a.head_size, a.norm_eps, place, offset=1.0, scale=one) for one in (scale, 1.0)
        )
        return Block(
            attends,
            Attention(attends, a.width, place, q_norm=q_norm, k_norm=k_norm),
            Mlp(a.width, a.ffn_width, place, gate="gelu"),
            **{name: self.build_norm(place) for name in _NORMS},
        )

    @classmethod
    def read_config(cls, keys: Keys, family: str) -> Architecture:
        """Read a config.json of Gemma 3's text models."""
        if keys.config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise keys.refuse("hidden_activation", expected="gelu_pytorch_tanh")
        for key, expected in (
            ("attention_bias", "false"),
            ("attn_logit_softcapping", "null: no kernel of attention here caps scores"),
            ("final_logit_softcapping", "null: the loss here caps no logits"),
            ("use_bidirectional_attention", "false"),
        ):
            if keys.config.get(key):
                raise keys.refuse(key, expected=expected)
        found = sizes(keys)
        size = keys.integer("head_dim", 256)
        theta, local, factor = _rope(keys)
        options = {
            "full_every": float(_full_every(keys, found["num_layers"])),
            "local_rope_theta": local,
            "query_scalar": keys.number("query_pre_attn_scalar", 256),
            "rope_factor": factor,
        }
        usual = {
            "full_every": _FULL_EVERY,
            "local_rope_theta": _LOCAL_THETA,
            "query_scalar": size,
            "rope_factor": 1.0,
        }
        return Architecture(
            family=family,
            **found,
            num_kv_heads=keys.integer("num_key_value_heads", 4, null=found["num_heads"]),
            head_size=size,
            rope_theta=theta,
            norm_eps=keys.number("rms_norm_eps", 1e-6),
            qk_norm=True,
            tied_embeddings=keys.boolean("tie_word_embeddings", True),
            sliding_window=keys.integer("sliding_window", 4096),
            options=tuple((name, value) for name, value in options.items() if value != usual[name]),
        )

    def write_config(self) -> JSON:
        """The keys of Gemma 3's text models."""
        a = self.architecture
        if a.qkv_bias or not a.qk_norm or a.sliding_window is None or a.width % a.num_heads:
            raise ModelError(
                "a gemma3_text model cannot be exported with these switches",
                got=f"qkv_bias {a.qkv_bias}, qk_norm {a.qk_norm}, sliding_window {a.sliding_window}, "
                f"width {a.width} over {a.num_heads} heads",
                expected="no bias, QK norm, a window, and a width that the heads divide",
            )
        every, factor = int(a.option("full_every", _FULL_EVERY)), a.option("rope_factor", 1.0)
        local = a.option("local_rope_theta", _LOCAL_THETA)
        scaling = {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        scalar = a.option("query_scalar", a.head_size)
        return {
            **written(a),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [_FULL if self._is_full(index) else _LOCAL for index in range(a.num_layers)],
            "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
            "rope_local_base_freq": local,
            "rope_parameters": {
                _FULL: {"rope_theta": a.rope_theta, **scaling},
                _LOCAL: {"rope_theta": local, "rope_type": "default"},
            },
            "rope_scaling": None if factor == 1.0 else scaling,
            "rope_theta": a.rope_theta,
            "sliding_window": a.sliding_window,
            "sliding_window_pattern": every,
            "use_bidirectional_attention": False,
        }


def _full_every(keys: Keys, num_layers: int) -> int:
    """Which blocks see the whole past: every so many-th. Refuses any other order."""
    every = keys.integer("sliding_window_pattern", _FULL_EVERY)
    kinds = keys.config.get("layer_types")
    if not kinds:
        return every
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {_FULL, _LOCAL}:
        raise keys.refuse("layer_types", expected=f"a list of {num_layers} {_LOCAL} or {_FULL}")
    if _FULL not in kinds:
        return every if every > num_layers else num_layers + 1
    every = kinds.index(_FULL) + 1
    if kinds != [_LOCAL if (index + 1) % every else _FULL for index in range(num_layers)]:
        raise keys.refuse("layer_types", got="another order", expected=f"every so many-th {_FULL}")
    return every


def _rope(keys: Keys) -> tuple[float, float, float]:
    """Base of the full blocks, base of those with a window, and the factor of the full blocks."""
    theta, local = keys.number("rope_theta", _THETA), keys.number("rope_local_base_freq", _LOCAL_THETA)
    factor = _factor(keys, "rope_scaling", keys.config.get("rope_scaling"))
    newer = keys.config.get("rope_parameters")
    if not newer:
        return theta, local, factor
    if not isinstance(newer, dict) or not all(isinstance(newer.get(kind), dict) for kind in (_FULL, _LOCAL)):
        raise keys.refuse("rope_parameters", expected=f"objects {_FULL} and {_LOCAL}")
    full, near = (Keys(newer[kind], f"{keys.where}: rope_parameters.{kind}") for kind in (_FULL, _LOCAL))
    if _factor(near, "rope_type", newer[_LOCAL]) != 1.0:
        raise near.refuse("rope_type", expected="default")
    found = (
        full.number("rope_theta", theta),
        near.number("rope_theta", local),
        _factor(full, "rope_type", newer[_FULL]),
    )
    for key, newer_value, older in (
        ("rope_theta", found[0], theta),
        ("rope_local_base_freq", found[1], local),
        ("rope_scaling", found[2], factor),
    ):
        if keys.config.get(key) is not None and newer_value != older:
            raise keys.refuse("rope_parameters", expected=f"the same values as in {key}")
    return found


def _factor(keys: Keys, key: str, values: Any) -> float:
    """What all frequencies are divided by."""
    if not values:
        return 1.0
    kind = values.get("rope_type", values.get("type", "default")) if isinstance(values, dict) else None
    if kind == "linear":
        return Keys(values, keys.where).number("factor")
    if kind != "default":
        raise keys.refuse(key, got=repr(kind), expected="default or linear")
    return 1.0
