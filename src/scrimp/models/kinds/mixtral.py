"""Mixtral: Llama's blocks, their MLPs replaced by routed experts.

Each block adds two things to the residual stream x::

    x = x + out(attention(qkv(norm(x))))
    x = x + sum over the k experts e of the token of w_e * down_e(silu(gate_e(norm(x))) * up_e(norm(x)))

The weights w of a token's experts add up to 1 (`scrimp.models.experts`).

Options   experts, experts_per_token, router_aux_loss_coef, capacity_factor: numbers of `Architecture.options`;
          `ffn_width` is that of one expert.
Names     transformers keeps the experts of a block as one tensor; its files hold each on its own, w1 the gate, w3 up
          and w2 down.
Precision The router stays in the compute type, as the head does, unless a rule names it: its products are small, and a
          changed choice is a jump that no scale bounds.
Source    Mixtral of Experts (arXiv 2401.04088), transformers' MixtralForCausalLM

Letters: D width, A attention width, N all key heads, C = A + 2 N, F width of an expert, E experts, k for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError
from scrimp.models.huggingface.keys import JSON, Keys, common, written, written_rope
from scrimp.models.kinds.llama import DOWN, GATE_UP, Llama
from scrimp.models.spec import BlockSpec, Elsewhere, LinearSpec, RoutingSpec, Traffic

if TYPE_CHECKING:
    from scrimp.models.blocks import Block, Place

ROUTER, EXPERTS_GATE_UP, EXPERTS_DOWN = "mlp.router", "mlp.experts.gate_up", "mlp.experts.down"
ROUTER_AUX_LOSS = 0.001
_THETA, _NORM_EPS, _KV_HEADS, _EXPERTS, _CHOSEN = 1e6, 1e-5, 8, 8, 2
_IN_FILES = (("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


class Mixtral(Llama):
    """Llama's attention, and routed experts."""

    huggingface_classes: ClassVar[Mapping[str, str]] = {"mixtral": "MixtralForCausalLM"}
    names_elsewhere: ClassVar[Mapping[str, Elsewhere]] = {
        **{name: there for name, there in Llama.names_elsewhere.items() if name not in (GATE_UP, DOWN)},
        ROUTER: Elsewhere(("mlp.gate",), "mlp.router"),
        EXPERTS_GATE_UP: Elsewhere(
            ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"), "mlp.experts.linear_fc1"
        ),
        EXPERTS_DOWN: Elsewhere(("mlp.experts.{expert}.down_proj",), "mlp.experts.linear_fc2"),
    }

    @cached_property
    def routing(self) -> RoutingSpec:
        """As its options say."""
        a = self.architecture
        return RoutingSpec(
            int(a.option("experts", _EXPERTS)),
            int(a.option("experts_per_token", _CHOSEN)),
            self.normalises,
            a.option("router_aux_loss_coef", ROUTER_AUX_LOSS),
            a.option("capacity_factor", 0.0),
        )

    @property
    def normalises(self) -> bool:
        """Whether the weights of a token's experts add up to 1."""
        return True

    @property
    def expert_width(self) -> int:
        """F."""
        return self.architecture.ffn_width

    @cached_property
    def _routed(self) -> BlockSpec:
        dense, a = self._block, self.architecture
        D, F, E, k = a.width, self.expert_width, self.routing.experts, self.routing.chosen
        kept = tuple(one for one in dense.layers if one.name not in (GATE_UP, DOWN))
        again = [replace(one, again="mlp") if one.again == "norms" else one for one in dense.traffic[:2]]
        return BlockSpec(
            layers=(
                *kept,
                LinearSpec(ROUTER, E, D, origin="made", again="mlp"),
                LinearSpec(
                    EXPERTS_GATE_UP,
                    2 * F,
                    D,
                    origin="made",
                    again="mlp",
                    rows=(F, F),
                    experts=E,
                    chosen=k,
                    cut="outputs",
                    gate="before",
                ),
                LinearSpec(
                    EXPERTS_DOWN,
                    D,
                    F,
                    origin="made",
                    again="mlp",
                    experts=E,
                    chosen=k,
                    cut="inputs",
                    gate="after",
                ),
            ),
            attention=dense.attention,
            traffic=(
                dense.traffic[0],
                again[1],
                *dense.traffic[3:],
                Traffic(3 * k * F, 5 * k * F, "swiglu"),
                # Copies for the experts, which backward makes again, and the sum of what they give.
                Traffic(2 * k * D, 4 * k * D, "mlp"),
                Traffic((k + 1) * D, (3 * k + 1) * D, "mlp"),
                Traffic(4 * E, 4 * E, "mlp"),
            ),
        )

    def block(self, index: int) -> BlockSpec:
        """All are equal."""
        return self._routed

    def weight_names(self, linear: LinearSpec) -> tuple[str, ...]:
        """w1, w2 and w3."""
        names = super().weight_names(linear)
        for ours, theirs in _IN_FILES if linear.name.startswith("mlp.") else ():
            names = tuple(name.replace(ours, theirs) for name in names)
        return names

    def build_block(self, index: int, place: Place) -> Block:
        """Attention as Llama's, then the experts."""
        from scrimp.models.blocks import Attention, RMSNorm
        from scrimp.models.experts import RoutedBlock, RoutedMlp

        a, attends = self.architecture, self._block.attention
        norms = [RMSNorm(a.head_size, a.norm_eps, place) if a.qk_norm else None for _ in range(2)]
        return RoutedBlock(
            attends,
            Attention(attends, a.width, place, q_norm=norms[0], k_norm=norms[1]),
            RoutedMlp(self.routing, a.width, self.expert_width, place),  # type: ignore[arg-type]
            attention_norm=self.build_norm(place),
            mlp_norm=self.build_norm(place),
        )

    @classmethod
    def read_config(cls, keys: Keys, family: str) -> Architecture:
        """Read a config.json of Mixtral."""
        refuse_other_blocks(keys)
        if keys.config.get("router_jitter_noise"):
            raise keys.refuse("router_jitter_noise", expected="0.0: routers here see no noise")
        found = common(keys, theta=_THETA, norm_eps=_NORM_EPS)
        size = found["width"] // found["num_heads"]
        window = keys.config.get("sliding_window")
        return Architecture(
            family=family,
            **found,
            num_kv_heads=keys.integer("num_key_value_heads", _KV_HEADS, null=found["num_heads"]),
            head_size=keys.integer("head_dim", size, null=size),
            sliding_window=None if window is None else keys.integer("sliding_window"),
            options=(
                ("experts", float(keys.integer("num_local_experts", _EXPERTS))),
                *read_routing(keys, _CHOSEN),
            ),
        )

    def write_config(self) -> JSON:
        """The keys of Mixtral."""
        a = self.architecture
        if a.qkv_bias or a.qk_norm:
            raise ModelError(
                "a mixtral model cannot be exported with these switches",
                got=f"qkv_bias {a.qkv_bias}, qk_norm {a.qk_norm}",
                expected="neither",
            )
        config = {**written(a), **written_rope(a), **self._written_routing()}
        del config["attention_bias"]
        return {
            **config,
            "num_local_experts": self.routing.experts,
            "router_jitter_noise": 0.0,
            "sliding_window": a.sliding_window,
        }

    def _written_routing(self) -> JSON:
        return {
            "hidden_act": "silu",
            "num_experts_per_tok": self.routing.chosen,
            "output_router_logits": False,
            "router_aux_loss_coef": self.routing.balance,
        }


def refuse_other_blocks(keys: Keys) -> None:
    """Refuse another gate than SiLU's, and biases."""
    if keys.config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise keys.refuse("hidden_act", expected="silu")
    if keys.config.get("attention_bias"):
        raise keys.refuse("attention_bias", expected="false")


def read_routing(keys: Keys, chosen: int) -> tuple[tuple[str, float], ...]:
    """Options that all families with routed experts have.

    Args:
        chosen: experts of a token where the file does not say.
    """
    balance = keys.config.get("router_aux_loss_coef", ROUTER_AUX_LOSS)
    if isinstance(balance, bool) or not isinstance(balance, int | float) or not 0 <= balance < float("inf"):
        raise keys.refuse("router_aux_loss_coef", expected="a number, 0 or more")
    return (
        ("experts_per_token", float(keys.integer("num_experts_per_tok", chosen))),
        ("router_aux_loss_coef", float(balance)),
    )
