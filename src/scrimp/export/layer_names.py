"""Names of a model's linear layers elsewhere: in Hugging Face's models, in Megatron-Core's GPT.

Each kind of model says what its layers are called there (`ModelSpec.names_elsewhere`); of Llama's, for example:

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
Checked  tests/export/test_layer_names.py: transformers' models have exactly these layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal, TypeVar, get_args

from scrimp.errors import PlanError
from scrimp.models import HEAD, Elsewhere, all_kinds, full_name, place

Names = Literal["scrimp", "huggingface", "megatron"]
Choice = TypeVar("Choice")

MEGATRON_HEAD = "output_layer"


def huggingface_names(layer: str) -> tuple[str, ...]:
    """The linear layers of a Hugging Face model that a layer of a Scrimp model stands for.

    Raises:
        PlanError: no layer of a Scrimp model.
    """
    if layer == HEAD:
        return ("lm_head",)
    block, names = _elsewhere(layer)
    return tuple(f"model.layers.{block}.{name}" for name in names.huggingface)


def megatron_names(layer: str) -> tuple[str, ...]:
    """The one layer of a Megatron-Core GPT, by its path in the model.

    Raises:
        PlanError: no layer of a Scrimp model.
    """
    if layer == HEAD:
        return (MEGATRON_HEAD,)
    block, names = _elsewhere(layer)
    return (f"decoder.layers.{block}.{names.megatron}",)


def rename(choices: Mapping[str, Choice], names: Names) -> dict[str, Choice]:
    """Choices by a Scrimp model's names under other names; "scrimp" leaves any names as they are.

    Raises:
        PlanError: a name that is no Scrimp model's, names that do not exist.
    """
    translators: dict[str, Callable[[str], tuple[str, ...]]] = {
        "scrimp": lambda layer: (layer,),
        "huggingface": huggingface_names,
        "megatron": megatron_names,
    }
    if names not in translators:
        raise PlanError("there are no such names", got=repr(names), expected=", ".join(get_args(Names)))
    return {name: choice for layer, choice in choices.items() for name in translators[names](layer)}


def is_routed(layer: str) -> bool:
    """Whether a layer of a Scrimp model is as many as there are experts."""
    names = _names().get(place(layer)[1])
    return names is not None and any("{expert}" in name for name in names.huggingface)


def is_own(layer: str) -> bool:
    """Whether a layer has the name of one of a Scrimp model's; else a plan is of somebody else's model."""
    block, name = place(layer)
    return layer == HEAD or (block is not None and name in _names())


def is_megatron(layer: str) -> bool:
    """Whether a layer is named as Megatron-Core names its own."""
    return layer == MEGATRON_HEAD or layer.startswith("decoder.layers.")


def of_stage(choices: Mapping[str, Choice], first: int, last: int) -> dict[str, Choice]:
    """The blocks first..last (both counted) and the head, blocks numbered from 0 as a pipeline stage numbers them.

    Raises:
        PlanError: a range without blocks, or with blocks that are not there.
    """
    blocks = {block for layer in choices if (block := place(layer)[0]) is not None}
    missing = sorted(set(range(first, last + 1)) - blocks)
    if missing or first > last:
        raise PlanError(
            "the plan does not have the blocks of this stage",
            got=f"blocks {first} to {last}",
            expected=f"blocks within 0 to {max(blocks, default=-1)}",
        )
    chosen = {}
    for layer, choice in choices.items():
        block, name = place(layer)
        if block is None:
            chosen[layer] = choice
        elif first <= block <= last:
            chosen[full_name(block - first, name)] = choice
    return chosen


def _elsewhere(layer: str) -> tuple[int, Elsewhere]:
    block, name = place(layer)
    if block is None or name not in _names():
        is_factor = name.endswith((".A", ".B")) and name[:-2] in _names()
        raise PlanError(
            "a factor of a low-rank layer has no name elsewhere"
            if is_factor
            else "this is no linear layer of a Scrimp model",
            got=repr(layer),
            expected=f"head, or blocks.N. and {', '.join(_names())}",
            do='keep the names that the plan has: --names scrimp, in Python names="scrimp"',
        )
    return block, _names()[name]


@cache
def _names() -> dict[str, Elsewhere]:
    """Name in a block to names elsewhere, of all kinds: one name means the same in each of them."""
    return {name: there for kind in all_kinds() for name, there in kind.names_elsewhere.items()}
