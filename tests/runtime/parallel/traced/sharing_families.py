"""Tiny random models of transformers' families, and one step's call of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 65
"""No multiple of 2 or 4 ranks."""
ROWS, TOKENS = 3, 10
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2 | NO_DROPOUT),
    "llama": ("LlamaForCausalLM", LLAMA),
    "gptj": ("GPTJForCausalLM", GPT2 | NO_DROPOUT | {"rotary_dim": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
    ),
    "opt": (
        "OPTForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4}
        | {"max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    # A norm of each head, whose weight every rank has; one weight of queries, keys and values; heads of one fused each.
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", LLAMA | {"pad_token_id": 0, "resid_pdrop": 0.0}),
    "neox": (
        "GPTNeoXForCausalLM",
        {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {"hidden_dropout": 0.0},
    ),
}
FIVE = ("gpt2", "llama", "gptj", "t5", "opt")


def model_of(family: str, **settings: Any) -> nn.Module:
    """Random weights everywhere, biases and norms too, equal on every rank."""
    transformers = pytest.importorskip("transformers")
    name, known = FAMILIES[family]
    kind: Any = getattr(transformers, name)
    config = kind.config_class(vocab_size=VOCABULARY, **(known | settings))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = kind(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.train()


def example(number: int = 0) -> dict[str, Any]:
    """A batch."""
    tokens = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def loss_of(model: Callable[..., Any], number: int = 0) -> tuple[Tensor, Tensor]:
    """Loss and logits of a batch."""
    found = model(**example(number))
    return found.loss, found.logits
