"""The table of names: pieces tile the decoder's parameters and are transformers' tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hf_families import FAMILIES, reference_model, stored_pieces

from scrimp.models import spec_of
from scrimp.models.huggingface.config_json import architecture_from_config
from scrimp.models.huggingface.tensor_names import fused_parameters, split_parameter
from scrimp.models.model import build_model


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_are_the_tensors_of_transformers_and_tile_the_parameters(name: str) -> None:
    reference = reference_model(name)
    architecture = architecture_from_config(reference.config.to_dict())
    table = fused_parameters(architecture)
    model = build_model(architecture, device="meta")
    assert {f.name: f.shape for f in table} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    for fused in table:
        edges = [0, *(piece.stop for piece in fused.pieces)]
        assert [(piece.start, piece.stop) for piece in fused.pieces] == list(pairwise(edges))
        assert edges[-1] == fused.shape[0]
    pieces = {piece.name: piece.shape for fused in table for piece in fused.pieces}
    assert pieces == {n: tuple(p.shape) for n, p in stored_pieces(reference).items()}
    assert sum(p.numel() for p in model.parameters()) == spec_of(architecture).parameters


def test_splitting_a_parameter_gives_views_in_the_order_of_its_rows() -> None:
    architecture = architecture_from_config(reference_model("llama").config.to_dict())
    qkv = next(f for f in fused_parameters(architecture) if f.name.endswith("qkv.weight"))
    tensor = torch.arange(qkv.shape[0]).float()[:, None].expand(qkv.shape).contiguous()
    parts = split_parameter(qkv, tensor)
    assert [name.split(".")[-2] for name in parts] == ["q_proj", "k_proj", "v_proj"]
    assert [int(part[0, 0]) for part in parts.values()] == [0, 64, 96]
    assert all(part.untyped_storage().data_ptr() == tensor.data_ptr() for part in parts.values())
