"""Which Hugging Face tensors make up which parameter of the decoder.

Problem  Scrimp fuses query, key and value into one matrix, and gate and up into another;
         Hugging Face folders keep them apart. Rotary halves, norms and biases agree.
Method   Every parameter of the decoder is a stack of Hugging Face tensors along its rows
         (dimension 0), so importing and exporting are one table read in two directions::

             qkv.weight     (A + 2NK, D) = [ q_proj (A, D) ; k_proj (NK, D) ; v_proj (NK, D) ]
             gate_up.weight (2F, D)      = [ gate_proj (F, D) ; up_proj (F, D) ]

         A row range of a contiguous matrix is contiguous, so neither direction copies
         more than the piece it moves.
Checked  tests/models/test_huggingface_names.py (the pieces tile every parameter of the
         decoder, and are exactly the tensors of transformers' models).

Letters: A = H * K attention width, NK KV heads side by side, D width, F ffn width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from scrimp.config.architecture import Architecture


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor: rows start..stop of a parameter of the decoder."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fused:
    """A parameter of the decoder and the Hugging Face tensors it is stacked from."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def _stack(name: str, parts: list[tuple[str, int]], *rest: int) -> Fused:
    """The parameter `name` stacked from (tensor name, rows), every row of shape `rest`."""
    pieces = []
    start = 0
    for part, rows in parts:
        pieces.append(Piece(name=part, start=start, stop=start + rows, shape=(rows, *rest)))
        start += rows
    return Fused(name=name, shape=(start, *rest), pieces=tuple(pieces))


def _block(architecture: Architecture, layer: int) -> Iterator[Fused]:
    a = architecture
    ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
    qkv = [("q_proj", a.attention_width), ("k_proj", a.kv_width), ("v_proj", a.kv_width)]
    yield _stack(f"{ours}.attention_norm.weight", [(f"{theirs}.input_layernorm.weight", a.width)])
    yield _stack(
        f"{ours}.attention.qkv.weight",
        [(f"{theirs}.self_attn.{part}.weight", rows) for part, rows in qkv],
        a.width,
    )
    if a.qkv_bias:
        yield _stack(
            f"{ours}.attention.qkv.bias", [(f"{theirs}.self_attn.{part}.bias", rows) for part, rows in qkv]
        )
    if a.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield _stack(
                f"{ours}.attention.{norm}.weight", [(f"{theirs}.self_attn.{norm}.weight", a.head_size)]
            )
    yield _stack(
        f"{ours}.attention.out.weight", [(f"{theirs}.self_attn.o_proj.weight", a.width)], a.attention_width
    )
    yield _stack(f"{ours}.mlp_norm.weight", [(f"{theirs}.post_attention_layernorm.weight", a.width)])
    yield _stack(
        f"{ours}.mlp.gate_up.weight",
        [(f"{theirs}.mlp.gate_proj.weight", a.ffn_width), (f"{theirs}.mlp.up_proj.weight", a.ffn_width)],
        a.width,
    )
    yield _stack(f"{ours}.mlp.down.weight", [(f"{theirs}.mlp.down_proj.weight", a.width)], a.ffn_width)


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def fused_parameters(architecture: Architecture) -> list[Fused]:
    """Every parameter of the decoder, in the order of its layers. A tied head has none of its own."""
    a = architecture
    table = [_stack("embedding.weight", [(EMBEDDING, a.vocab_size)], a.width)]
    for layer in range(a.num_layers):
        table += _block(a, layer)
    table.append(_stack("final_norm.weight", [("model.norm.weight", a.width)]))
    if not a.tied_embeddings:
        table.append(_stack("head.weight", [(HEAD, a.vocab_size)], a.width))
    return table


def split_parameter(fused: Fused, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter (or its gradient) as views under their Hugging Face names."""
    return {piece.name: tensor[piece.start : piece.stop] for piece in fused.pieces}
