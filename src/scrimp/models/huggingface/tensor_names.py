"""Which Hugging Face tensors make up which parameter of the model.

Problem  Scrimp fuses query, key and value into one matrix, and gate and up into another;
         Hugging Face folders keep them apart. Rotary halves, norms and biases agree.
Method   Every parameter of the model is a stack of Hugging Face tensors along its rows (dimension 0), so importing and
         exporting are one table read in two directions. It follows from the model's specification; for example::

             qkv.weight     (A + 2NK, D) = [ q_proj (A, D) ; k_proj (NK, D) ; v_proj (NK, D) ]
             gate_up.weight (2F, D)      = [ gate_proj (F, D) ; up_proj (F, D) ]

         and of routed experts the matrices of all, expert by expert. A row range of a contiguous
         matrix is contiguous, so neither direction copies more than the piece it moves.
Checked  tests/models/test_tensor_names.py (the pieces tile every parameter of the
         decoder, and are exactly the tensors of transformers' models).

Letters: A = H * K attention width, NK KV heads side by side, D width, F ffn width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scrimp.config.architecture import Architecture
from scrimp.models.kinds import spec_of
from scrimp.models.spec import EMBEDDING_WEIGHT, ModelSpec, VectorSpec, full_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor: rows start..stop of a parameter of the model."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fused:
    """A parameter of the model and the Hugging Face tensors it is stacked from."""

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


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def fused_parameters(architecture: Architecture) -> list[Fused]:
    """Every parameter of the model, in the order of its layers. A tied head has none of its own."""
    a, spec = architecture, spec_of(architecture)
    table = [_stack(EMBEDDING_WEIGHT, [(EMBEDDING, a.vocab_size)], a.width)]
    for index in range(spec.num_blocks):
        table += _block(spec, index)
    table.append(_stack("final_norm.weight", [("model.norm.weight", a.width)]))
    if not a.tied_embeddings:
        table.append(_stack("head.weight", [(HEAD, a.vocab_size)], a.width))
    return table


def _block(spec: ModelSpec, index: int) -> Iterator[Fused]:
    theirs = f"model.layers.{index}"
    for one in spec.block(index).layers:
        if isinstance(one, VectorSpec):
            parts = [(f"{theirs}.{name}", size) for name, size in one.stacked]
            yield _stack(full_name(index, one.name), parts)
        else:
            names = zip(spec.weight_names(one), one.stacked, strict=True)
            parts = [(f"{theirs}.{name}", rows) for name, rows in names]
            yield _stack(full_name(index, f"{one.name}.weight"), parts, one.inputs)


def split_parameter(fused: Fused, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter (or its gradient) as views under their Hugging Face names."""
    return {piece.name: tensor[piece.start : piece.stop] for piece in fused.pieces}
