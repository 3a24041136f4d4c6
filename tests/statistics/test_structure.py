"""The residual stream is found where there is one, whatever modules are called, and nowhere else."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from models import MlpModel, batch, bench, decoder, linear_names, losses
from torch import Tensor, nn

from scrimp.statistics import Structure, find_structure

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def found(model: nn.Module, *, autocast: bool = False, layers: list[str] | None = None) -> Structure | None:
    names = linear_names(model) if layers is None else layers
    dtype = torch.bfloat16 if autocast else None
    return find_structure(model, names, lambda: list(losses(model, batch(0), dtype)))


def hugging_face(model_type: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if model_type == "gpt_neox":
        del sizes["num_key_value_heads"]
    config = transformers.AutoConfig.for_model(model_type, **sizes | settings)
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("switches", [{}, {"qkv_bias": True, "tied_embeddings": True}, {"qk_norm": True}])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_the_decoder_has_two_sublayers_a_block(switches: dict[str, Any], precision: str) -> None:
    model = decoder(**switches).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    structure = found(model, autocast=precision == "autocast")
    assert structure is not None
    assert structure.nodes == (
        *(f"blocks.{n}.{name}" for n in range(2) for name in ("attention_norm", "mlp_norm")),
        "final_norm",
    )
    assert [(sub.entries, sub.exit) for sub in structure.sublayers] == [
        pair
        for n in range(2)
        for pair in (
            ((f"blocks.{n}.attention.qkv",), f"blocks.{n}.attention.out"),
            ((f"blocks.{n}.mlp.gate_up",), f"blocks.{n}.mlp.down"),
        )
    ]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_models_of_the_llama_family_are_understood(model_type: str, dtype: torch.dtype) -> None:
    structure = found(hugging_face(model_type).to(dtype))
    assert structure is not None
    assert structure.nodes[-1] == "model.norm"
    assert structure.sublayers[2].entries == tuple(f"model.layers.1.self_attn.{n}_proj" for n in "qkv")
    assert structure.sublayers[2].exit == "model.layers.1.self_attn.o_proj"
    assert structure.sublayers[3].entries == ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    assert structure.place("model.layers.1.mlp.up_proj") == 3
    assert structure.sublayers[3].exit == "model.layers.1.mlp.down_proj"
    assert structure.place("lm_head") is None


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("gpt_neox", {"use_parallel_residual": True}), ("olmo2", {}), ("gemma2", {"head_dim": 8})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parallel_blocks_and_norms_behind_the_layers_are_not_taken_for_a_stream(
    model_type: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    assert found(hugging_face(model_type, **settings).to(dtype)) is None


@pytest.mark.parametrize("family", ["olmo2", "gemma3_text"])
@pytest.mark.every(2)
@pytest.mark.slow
def test_norms_of_what_blocks_add_leave_no_structure_and_gains_are_exact(family: str) -> None:
    model = decoder(family=family, qk_norm=True, sliding_window=8 if family == "gemma3_text" else None)
    assert found(model) is None
    assert found(model, autocast=True) is None
    made = bench(model, steps=2)
    automatic, exact = (made.collect(formats=("bf16", "fp8"), gains=gains) for gains in ("auto", "exact"))
    for one, other in zip(automatic.batches, exact.batches, strict=True):
        assert np.array_equal(one.forward, other.forward)
        assert np.array_equal(one.backward, other.backward)
        assert one.forward.any()


def test_a_sequential_neox_is_understood() -> None:
    structure = found(hugging_face("gpt_neox", use_parallel_residual=False))
    assert structure is not None
    assert structure.sublayers[0].exit == "gpt_neox.layers.0.attention.dense"


class Plain(nn.Module):
    """Layers one behind the other, with or without norms."""

    def __init__(self, norms: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) if norms else nn.Identity() for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x)).relu()
        return self.head(x)


@pytest.mark.parametrize("norms", [False, True])
def test_a_plain_mlp_has_no_stream(norms: bool) -> None:
    assert found(Plain(norms)) is None


def test_a_layer_off_the_stream_leaves_no_structure() -> None:
    model = decoder()
    model.forward_head = nn.Linear(4, 4)  # type: ignore[assignment]
    assert found(model, layers=[*linear_names(decoder()), "forward_head"]) is None
    mlps = MlpModel()
    assert found(mlps, layers=[*linear_names(mlps), "head"]) is None


def test_dropout_on_branches_hides_the_stream_but_one_that_is_off_does_not() -> None:
    assert found(MlpModel(dropout=0.2).train()) is None
    assert found(MlpModel(dropout=0.2).eval()) is not None


def test_batch_norms_inside_branches_are_no_nodes() -> None:
    structure = found(MlpModel(batch_norm=True))
    assert structure is not None
    assert structure.nodes == ("blocks.0.norm", "blocks.1.norm", "final_norm")


def test_a_branch_that_gives_zero_still_belongs_to_the_stream() -> None:
    model = decoder()
    for name, parameter in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            nn.init.zeros_(parameter)
    assert found(model) == found(decoder())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_does_not_confuse_it(reentrant: bool) -> None:
    assert found(MlpModel(checkpointed=True, reentrant=reentrant)) == found(MlpModel())
    llama = hugging_face("llama").train()
    expected = found(llama)
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    assert expected is not None
    assert found(llama) == expected


def test_a_planned_model_under_observation_looks_the_same() -> None:
    assert found(bench(decoder()).model) == found(decoder())


def test_no_hook_stays_and_nothing_is_remembered_for_backward() -> None:
    model = decoder()
    found(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
