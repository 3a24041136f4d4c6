"""Llama 3, Qwen 2.5, Qwen 3 and Mistral: a norm before attention, and one before a gated MLP.

Each block adds two things to the residual stream x::

    x = x + out(attention(qkv(norm(x))))
    x = x + down(silu(gate(norm(x))) * up(norm(x)))

The families differ by switches of `Architecture` alone: RoPE scaling (Llama 3), QKV bias and tied embeddings
(Qwen 2.5), a norm over each query and key head and a free head size (Qwen 3), a sliding window (Mistral), fewer KV
heads than query heads (most).

Window   Qwen configs name a window and the layers that use it. The decoder has one window for all layers or none;
         anything mixed is refused.

Letters: D width, A attention width, N KV heads of size K, C = A + 2 N K, F ffn width.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError
from scrimp.models.huggingface.keys import JSON, Keys, common, written, written_rope
from scrimp.models.spec import (
    AttentionSpec,
    BlockSpec,
    Elsewhere,
    LinearSpec,
    ModelSpec,
    Rope,
    Traffic,
    VectorSpec,
)

if TYPE_CHECKING:
    from scrimp.models.blocks import Block, Place, RMSNorm

_QKV = ("q_proj", "k_proj", "v_proj")
# transformers' defaults for keys that a config.json may leave out.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_HEAD_SIZE = {"qwen3": 128}
_DEFAULT_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
_DEFAULT_MAX_WINDOW_LAYERS = 28

QKV, OUT, GATE_UP, DOWN = "attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"


class Llama(ModelSpec):
    """A decoder of the Llama family."""

    huggingface_classes: ClassVar[Mapping[str, str]] = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    names_elsewhere: ClassVar[Mapping[str, Elsewhere]] = {
        QKV: Elsewhere(tuple(f"self_attn.{part}" for part in _QKV), "self_attention.linear_qkv"),
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
        D, A, N, F, K = a.width, a.attention_width, a.kv_width, a.ffn_width, a.head_size
        C = A + 2 * N
        bias = tuple((f"self_attn.{part}.bias", size) for part, size in zip(_QKV, (A, N, N), strict=True))
        norms = [VectorSpec(f"attention.{x}_norm.weight", ((f"self_attn.{x}_norm.weight", K),)) for x in "qk"]
        return BlockSpec(
            layers=(
                VectorSpec("attention_norm.weight", (("input_layernorm.weight", D),)),
                LinearSpec(QKV, C, D, origin="made", again="qkv", rows=(A, N, N), cut="outputs"),
                *([VectorSpec("attention.qkv.bias", bias)] if a.qkv_bias else []),
                *(norms if a.qk_norm else []),
                LinearSpec(OUT, D, A, origin="kept", again="block", cut="inputs"),
                VectorSpec("mlp_norm.weight", (("post_attention_layernorm.weight", D),)),
                LinearSpec(
                    GATE_UP, 2 * F, D, origin="made", again="mlp", gate="before", rows=(F, F), cut="outputs"
                ),
                LinearSpec(DOWN, D, F, origin="made", gate="after", cut="inputs"),
            ),
            attention=AttentionSpec(
                a.num_heads, a.num_kv_heads, K, Rope(a.rope_theta, a.rope_scaling), a.sliding_window
            ),
            traffic=(
                Traffic(2 * D, 4 * D, "norms"),
                Traffic(2 * D, 4 * D, "norms"),
                Traffic(3 * F, 5 * F, "swiglu"),
                Traffic(2 * C, 2 * C, "qkv"),
                Traffic(3 * D, 3 * D, "block"),
                Traffic(3 * D, 3 * D),
            ),
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

    @classmethod
    def read_config(cls, keys: Keys, family: str) -> Architecture:
        """Read a config.json of one of the four families."""
        if keys.config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise keys.refuse("hidden_act", expected="silu")
        # transformers gives Qwen 2 a bias on q, k and v and on nothing else, whatever this key says
        if keys.config.get("attention_bias") and family != "qwen2":
            raise keys.refuse(
                "attention_bias", expected="false: of these families only qwen2 has biases, on q, k and v"
            )
        found = common(keys)
        width, heads = found["width"], found["num_heads"]
        default_head = _DEFAULT_HEAD_SIZE.get(family, width // heads)
        return Architecture(
            family=family,
            **found,
            num_kv_heads=keys.integer(
                "num_key_value_heads", _DEFAULT_KV_HEADS.get(family, heads), null=heads
            ),
            head_size=keys.integer("head_dim", default_head, null=width // heads),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            sliding_window=_sliding_window(keys, family, found["num_layers"]),
        )

    def write_config(self) -> JSON:
        """The keys of its own family."""
        a = self.architecture
        _check_family(a)
        config = {**written(a), **written_rope(a), "hidden_act": "silu"}
        if a.family not in ("llama", "qwen3"):
            del config["attention_bias"]
        if a.family == "llama":
            config["mlp_bias"] = False
        else:
            config["sliding_window"] = a.sliding_window
        if a.family in ("qwen2", "qwen3"):
            windowed = a.sliding_window is not None
            config["use_sliding_window"] = windowed
            config["max_window_layers"] = 0 if windowed else a.num_layers
            config["layer_types"] = ["sliding_attention" if windowed else "full_attention"] * a.num_layers
        return config


def _sliding_window(keys: Keys, family: str, num_layers: int) -> int | None:
    """The window of all layers, or None; refuses a mixture."""
    if family == "llama":
        if keys.config.get("sliding_window") is not None:
            raise keys.refuse(
                "sliding_window", expected="null: transformers gives llama none", do="use mistral"
            )
        return None
    window: int | None = None
    if keys.config.get("sliding_window", _DEFAULT_WINDOW[family]) is not None:
        window = keys.integer("sliding_window", _DEFAULT_WINDOW[family])
    if family != "mistral" and not keys.boolean("use_sliding_window", False):
        window = None
    kinds = _layer_kinds(keys, family, num_layers, window)
    if kinds == {"full_attention"}:
        return None
    if kinds == {"sliding_attention"} and window is not None:
        return window
    raise keys.refuse(
        "layer_types" if keys.config.get("layer_types") else "max_window_layers",
        got=f"layers of the kinds {', '.join(sorted(kinds))} with a window of {window}",
        expected="the same attention in all layers",
    )


def _layer_kinds(keys: Keys, family: str, num_layers: int, window: int | None) -> set[str]:
    listed = keys.config.get("layer_types")
    if listed:
        if not isinstance(listed, list) or len(listed) != num_layers:
            raise keys.refuse("layer_types", expected=f"a list of {num_layers} kinds")
        kinds = {str(kind) for kind in listed}
        if family == "mistral" and kinds != {"full_attention" if window is None else "sliding_attention"}:
            raise keys.refuse(
                "layer_types", got=", ".join(sorted(kinds)), expected="what sliding_window says"
            )
        return kinds
    if window is None:
        return {"full_attention"}
    if family == "mistral":
        return {"sliding_attention"}
    full = keys.config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
    if isinstance(full, bool) or not isinstance(full, int) or full < 0:
        raise keys.refuse("max_window_layers", expected="the number of layers without a window")
    # Not layer by layer: nothing holds their number against the weights yet.
    kinds = {"full_attention"} if full > 0 else set()
    return kinds | ({"sliding_attention"} if full < num_layers else set())


def _check_family(architecture: Architecture) -> None:
    """Refuse a combination of switches that transformers' class of the family does not have."""
    a = architecture
    expected = {
        "qkv_bias": (a.qkv_bias, a.family == "qwen2"),
        "qk_norm": (a.qk_norm, a.family == "qwen3"),
        "sliding_window": (
            a.sliding_window is not None,
            a.sliding_window is not None and a.family != "llama",
        ),
    }
    for name, (got, can) in expected.items():
        if got != can:
            raise ModelError(
                f"a {a.family} model cannot be exported with this {name}",
                got="on" if got else "off",
                expected="on" if can else "off",
                do="train with the family that has it: bias qwen2, QK norm qwen3, window mistral",
            )
    if a.family == "llama" and a.width % a.num_heads:
        raise ModelError(
            "transformers' llama needs a width that the heads divide",
            got=f"width {a.width}, {a.num_heads} heads",
            expected="a multiple",
        )
