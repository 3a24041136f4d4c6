"""Cuts the layers of a model over ranks that compute them together (tensor parallelism).

Method   On the meta device, before FSDP2, so that no rank ever has a whole layer::

             attention.qkv, its bias       rows of this rank's queries, of its keys, of its values: one fused weight
             mlp.gate_up                   rows of its gates, then of their ups
             attention.out, mlp.down       columns: the inputs that its heads and gates make
             embedding, head               rows of its words
             routers and experts           whole: see `scrimp.models.expert_ranks`
             norms                         a copy on every rank, gradients added up; a norm over all heads of a
                                           token together is cut like the heads

         Tokens are gathered by hooks before the layers that are cut by outputs and after the final norm, and scattered
         by hooks after those that are cut by inputs (`scrimp.models.tensor_ranks`): whatever class a plan gives the
         layers later. A block then has fewer heads and knows nothing else of it.
Limits   Ranks must divide query heads, key heads and gates (`scrimp.config.layout` refuses others by name).
Checked  tests/parity/
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scrimp.models.blocks import Attention, Block, Mlp, RMSNorm
from scrimp.models.experts import RoutedBlock
from scrimp.models.model import Model
from scrimp.models.spec import EMBEDDING_WEIGHT
from scrimp.models.tensor_ranks import AllHeadsNorm, CutEmbedding, TensorRanks
from scrimp.parts import Cut


def cut_layers(model: Model, ranks: TensorRanks) -> dict[str, Cut]:
    """Leave this rank its pieces of every layer.

    Args:
        model: on the meta device.

    Returns:
        by name what this rank has of each parameter.
    """
    whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    model.tensor_ranks = ranks
    words = ranks.share(model.architecture.vocab_size)
    cuts: dict[str, Cut] = {}
    if EMBEDDING_WEIGHT in whole:
        cuts[EMBEDDING_WEIGHT] = Cut(whole[EMBEDDING_WEIGHT], (words,))
        model.embedding = CutEmbedding(model.embedding, ranks)
    if model.head is not None:
        cuts["head.weight"] = Cut(whole["head.weight"], (words,))
        _leave(model.head, cuts["head.weight"])
    for number, block in zip(model.part.blocks, model.each_block(), strict=True):
        found = _cut_block(block, ranks)
        cuts |= {f"blocks.{number}.{name}": cut for name, cut in found.items()}
    if model.part.is_last:
        model.final_norm.register_forward_hook(lambda module, inputs, x_BtD: ranks.gather(x_BtD))
    for module in model.modules():
        if isinstance(module, RMSNorm) and not isinstance(module, AllHeadsNorm):
            module.one_copy = ranks.one_copy
    for name, shape in whole.items():
        if name not in cuts:
            cuts[name] = Cut(shape, (range(shape[0]),), is_writer=ranks.rank == 0)
    return cuts


def _cut_block(block: Block, ranks: TensorRanks) -> dict[str, Cut]:
    heads, kv_heads = block.attends.num_heads, block.attends.num_kv_heads
    block.attends = dataclasses.replace(
        block.attends, num_heads=len(ranks.share(heads)), num_kv_heads=len(ranks.share(kv_heads))
    )
    found = {f"attention.{name}": cut for name, cut in _cut_attention(block.attention, ranks).items()}
    products = [(block.attention.qkv, block.attention.out)]
    if isinstance(block, RoutedBlock):  # its tokens find their experts wherever they are
        block.mlp.one_copy = ranks.one_copy
    else:
        found |= {f"mlp.{name}": cut for name, cut in _cut_mlp(block.mlp, ranks).items()}
        products.append((block.mlp.gate_up, block.mlp.down))
    for first, last in products:
        first.register_forward_pre_hook(lambda module, inputs: (ranks.gather(inputs[0]),))
        last.register_forward_hook(lambda module, inputs, partial_BTD: ranks.scatter(partial_BTD))
    return found


def _cut_attention(attention: Attention, ranks: TensorRanks) -> dict[str, Cut]:
    size = attention.head_size
    queries, keys = attention.num_heads * size, attention.num_kv_heads * size
    own_queries, own_keys = _own(attention.num_heads, size, ranks), _own(attention.num_kv_heads, size, ranks)
    rows = (own_queries, _after(queries, own_keys), _after(queries + keys, own_keys))
    cuts = {
        "qkv.weight": Cut(tuple(attention.qkv.weight.shape), rows),
        "out.weight": Cut(tuple(attention.out.weight.shape), (own_queries,), dimension=1),
    }
    if attention.qkv.bias is not None:
        cuts["qkv.bias"] = Cut(tuple(attention.qkv.bias.shape), rows)
    for name, norm, own in (
        ("q_norm", attention.q_norm, own_queries),
        ("k_norm", attention.k_norm, own_keys),
    ):
        if norm is not None and len(norm.weight) != size:
            cuts[f"{name}.weight"] = Cut(tuple(norm.weight.shape), (own,))
            setattr(attention, name, AllHeadsNorm(norm, own, ranks))
    _leave(attention.qkv, cuts["qkv.weight"])
    _leave(attention.out, cuts["out.weight"])
    attention.num_heads, attention.num_kv_heads = len(own_queries) // size, len(own_keys) // size
    return cuts


def _cut_mlp(mlp: Mlp, ranks: TensorRanks) -> dict[str, Cut]:
    inner = mlp.down.in_features
    own = ranks.share(inner)
    cuts = {
        "gate_up.weight": Cut(tuple(mlp.gate_up.weight.shape), (own, _after(inner, own))),
        "down.weight": Cut(tuple(mlp.down.weight.shape), (own,), dimension=1),
    }
    _leave(mlp.gate_up, cuts["gate_up.weight"])
    _leave(mlp.down, cuts["down.weight"])
    return cuts


def _own(heads: int, size: int, ranks: TensorRanks) -> range:
    """The numbers of this rank's heads of such a size."""
    own = ranks.share(heads)
    return range(own.start * size, own.stop * size)


def _after(first: int, own: range) -> range:
    return range(first + own.start, first + own.stop)


def _leave(linear: nn.Linear, cut: Cut) -> None:
    """A layer with a piece of its weight."""
    linear.weight = _like(linear.weight, cut.local_shape)
    linear.out_features, linear.in_features = cut.local_shape
    if linear.bias is not None:
        linear.bias = _like(linear.bias, cut.local_shape[:1])


def _like(whole: Tensor, shape: Sequence[int]) -> nn.Parameter:
    empty: Any = torch.empty(tuple(shape), device="meta", dtype=whole.dtype)
    return nn.Parameter(empty)
