"""Qwen3-MoE: Qwen 3's attention and routed experts, in every block or in every so many-th.

Differs from Mixtral (`scrimp.models.kinds.mixtral`) by a norm of each query and key head, and by this:

Options   expert_width: that of one expert, `ffn_width` being that of blocks without experts; sparse_every: every so
          many-th block has experts, 1 is all; normalises: 1 where a token's weights add up to 1, else 0.
Limits    Blocks without experts are told by their order alone: `mlp_only_layers` must be empty.
Source    Qwen3 Technical Report (arXiv 2505.09388), transformers' Qwen3MoeForCausalLM
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError
from scrimp.models.huggingface.keys import JSON, Keys, common, written, written_rope
from scrimp.models.kinds.llama import DOWN, GATE_UP, Llama
from scrimp.models.kinds.mixtral import Mixtral, read_routing, refuse_other_blocks
from scrimp.models.spec import BlockSpec, Elsewhere, LinearSpec

if TYPE_CHECKING:
    from scrimp.models.blocks import Block, Place

_THETA, _NORM_EPS, _KV_HEADS, _EXPERTS, _CHOSEN, _EXPERT_WIDTH, _WINDOW = 1e4, 1e-6, 4, 128, 8, 768, 4096


class Qwen3Moe(Mixtral):
    """Qwen 3 with routed experts."""

    huggingface_classes: ClassVar[Mapping[str, str]] = {"qwen3_moe": "Qwen3MoeForCausalLM"}
    names_elsewhere: ClassVar[Mapping[str, Elsewhere]] = {
        **Mixtral.names_elsewhere,
        **{name: Llama.names_elsewhere[name] for name in (GATE_UP, DOWN)},
    }

    @property
    def normalises(self) -> bool:
        """As its options say."""
        return bool(self.architecture.option("normalises", 0.0))

    @property
    def expert_width(self) -> int:
        """F."""
        return int(self.architecture.option("expert_width", _EXPERT_WIDTH))

    def _has_experts(self, index: int) -> bool:
        return (index + 1) % int(self.architecture.option("sparse_every", 1.0)) == 0

    def block(self, index: int) -> BlockSpec:
        """With experts or without."""
        return self._routed if self._has_experts(index) else self._block

    def build_block(self, index: int, place: Place) -> Block:
        """With experts or without."""
        if self._has_experts(index):
            return super().build_block(index, place)
        return Llama.build_block(self, index, place)

    def weight_names(self, linear: LinearSpec) -> tuple[str, ...]:
        """As transformers' layers are called."""
        return Llama.weight_names(self, linear)

    @classmethod
    def read_config(cls, keys: Keys, family: str) -> Architecture:
        """Read a config.json of Qwen3-MoE."""
        refuse_other_blocks(keys)
        if keys.config.get("mlp_only_layers"):
            raise keys.refuse("mlp_only_layers", expected="none: decoder_sparse_step says which have experts")
        found = common(keys, theta=_THETA, norm_eps=_NORM_EPS)
        size = found["width"] // found["num_heads"]
        windowed = (
            keys.boolean("use_sliding_window", False) and keys.config.get("sliding_window", 0) is not None
        )
        every = keys.integer("decoder_sparse_step", 1)
        count = "num_local_experts" if "num_local_experts" in keys.config else "num_experts"
        return Architecture(
            family=family,
            **found,
            num_kv_heads=keys.integer("num_key_value_heads", _KV_HEADS, null=found["num_heads"]),
            head_size=keys.integer("head_dim", size, null=size),
            qk_norm=True,
            sliding_window=keys.integer("sliding_window", _WINDOW) if windowed else None,
            options=(
                ("experts", float(keys.integer(count, _EXPERTS))),
                *read_routing(keys, _CHOSEN),
                ("expert_width", float(keys.integer("moe_intermediate_size", _EXPERT_WIDTH))),
                ("normalises", float(keys.boolean("norm_topk_prob", False))),
                *([("sparse_every", float(every))] if every > 1 else []),
            ),
        )

    def write_config(self) -> JSON:
        """The keys of Qwen3-MoE."""
        a = self.architecture
        if a.qkv_bias or not a.qk_norm:
            raise ModelError(
                "a qwen3_moe model cannot be exported with these switches",
                got=f"qkv_bias {a.qkv_bias}, qk_norm {a.qk_norm}",
                expected="no bias, QK norm",
            )
        return {
            **written(a),
            **written_rope(a),
            **self._written_routing(),
            "decoder_sparse_step": int(a.option("sparse_every", 1.0)),
            "mlp_only_layers": [],
            "moe_intermediate_size": self.expert_width,
            "norm_topk_prob": self.normalises,
            "num_experts": self.routing.experts,
            "num_local_experts": self.routing.experts,
            "sliding_window": a.sliding_window,
            "use_sliding_window": a.sliding_window is not None,
        }
