"""Names of the decoder's linear layers elsewhere: Hugging Face's Llama family, Megatron-Core's GPT.

=====================  ===========================================  =======================================
Scrimp                 Hugging Face                                 Megatron-Core
=====================  ===========================================  =======================================
blocks.3.attention.qkv model.layers.3.self_attn.{q,k,v}_proj        decoder.layers.3.self_attention.linear_qkv
blocks.3.attention.out model.layers.3.self_attn.o_proj              decoder.layers.3.self_attention.linear_proj
blocks.3.mlp.gate_up   model.layers.3.mlp.{gate,up}_proj            decoder.layers.3.mlp.linear_fc1
blocks.3.mlp.down      model.layers.3.mlp.down_proj                 decoder.layers.3.mlp.linear_fc2
head                   lm_head                                      output_layer
=====================  ===========================================  =======================================

Fused    Where Scrimp has one layer and Hugging Face three, each of the three gets the precision of the one. They
         then have scales of their own where a scale spans outputs: per tensor, and per row in dgrad.
Stages   Megatron counts layers from 0 in every stage of a pipeline (and every virtual chunk): `of_stage`.
Source   Megatron-LM, megatron/core/transformer/transformer_block.py: a ModuleList of the stage's own layers.
Checked  tests/export/test_names.py: transformers' models have exactly these layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, get_args

from scrimp.errors import PlanError

Names = Literal["scrimp", "huggingface", "megatron"]
Choice = TypeVar("Choice")

_LAYER = re.compile(r"blocks\.(\d+)\.(.+)")
_HEAD = "head"
_HUGGINGFACE = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_MEGATRON = {
    "attention.qkv": ("self_attention.linear_qkv",),
    "attention.out": ("self_attention.linear_proj",),
    "mlp.gate_up": ("mlp.linear_fc1",),
    "mlp.down": ("mlp.linear_fc2",),
}
MEGATRON_HEAD = "output_layer"


def huggingface_names(layer: str) -> tuple[str, ...]:
    """The linear layers of a Hugging Face Llama, Qwen or Mistral that a layer of the decoder stands for.

    Raises:
        PlanError: no layer of the decoder.
    """
    return _translate(layer, _HUGGINGFACE, "model.layers", "lm_head")


def megatron_names(layer: str) -> tuple[str, ...]:
    """The one layer of a Megatron-Core GPT, by its path in the model.

    Raises:
        PlanError: no layer of the decoder.
    """
    return _translate(layer, _MEGATRON, "decoder.layers", MEGATRON_HEAD)


def rename(choices: Mapping[str, Choice], names: Names) -> dict[str, Choice]:
    """Choices by the decoder's names under other names; "scrimp" leaves any names as they are.

    Raises:
        PlanError: a name that is not the decoder's, names that do not exist.
    """
    translators: dict[str, Callable[[str], tuple[str, ...]]] = {
        "scrimp": lambda layer: (layer,),
        "huggingface": huggingface_names,
        "megatron": megatron_names,
    }
    if names not in translators:
        raise PlanError("there are no such names", got=repr(names), expected=", ".join(get_args(Names)))
    return {name: choice for layer, choice in choices.items() for name in translators[names](layer)}


def is_own(layer: str) -> bool:
    """Whether a layer has the name of one of the decoder's; else a plan is of somebody else's model."""
    found = _LAYER.fullmatch(layer)
    return layer == _HEAD or (found is not None and found[2] in _HUGGINGFACE)


def is_megatron(layer: str) -> bool:
    """Whether a layer is named as Megatron-Core names its own."""
    return layer == MEGATRON_HEAD or layer.startswith("decoder.layers.")


def of_stage(choices: Mapping[str, Choice], first: int, last: int) -> dict[str, Choice]:
    """The blocks first..last (both counted) and the head, blocks numbered from 0 as a pipeline stage numbers them.

    Raises:
        PlanError: a range without blocks, or with blocks that are not there.
    """
    blocks = {int(found[1]) for layer in choices if (found := _LAYER.fullmatch(layer))}
    missing = sorted(set(range(first, last + 1)) - blocks)
    if missing or first > last:
        raise PlanError(
            "the plan does not have the blocks of this stage",
            got=f"blocks {first} to {last}",
            expected=f"blocks within 0 to {max(blocks, default=-1)}",
        )
    chosen = {}
    for layer, choice in choices.items():
        found = _LAYER.fullmatch(layer)
        if found is None:
            chosen[layer] = choice
        elif first <= int(found[1]) <= last:
            chosen[f"blocks.{int(found[1]) - first}.{found[2]}"] = choice
    return chosen


def _translate(layer: str, table: Mapping[str, tuple[str, ...]], blocks: str, head: str) -> tuple[str, ...]:
    found = _LAYER.fullmatch(layer)
    if layer == _HEAD:
        return (head,)
    if found is None or found[2] not in table:
        raise PlanError(
            "this is no linear layer of the decoder",
            got=repr(layer),
            expected=f"head, or blocks.N. and {', '.join(table)}",
            do='keep the names that the plan has: --names scrimp, in Python names="scrimp"',
        )
    return tuple(f"{blocks}.{int(found[1])}.{name}" for name in table[found[2]])
