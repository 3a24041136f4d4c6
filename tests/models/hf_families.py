"""Small random transformers models of every family, for the Hugging Face tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from scrimp.models.huggingface.config_json import read_architecture
from scrimp.models.huggingface.load import load_weights
from scrimp.models.model import Model, build_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 97
LENGTH = 100  # beyond the original context of the scaled model, and beyond the window of the others

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _rope(theta: float = 10_000.0, **scaling: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_theta": theta, "rope_type": "llama3" if scaling else "default", **scaling}
    }


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_GEMMA3 = {
    "model_type": "gemma3_text",
    "pad_token_id": None,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
}

_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with as many KV heads": {"model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama with one KV head": {"model_type": "llama", "num_key_value_heads": 1, **_rope(500_000.0)},
    "llama with scaled RoPE": {"model_type": "llama", **_rope(500_000.0, **_LLAMA3)},
    "llama with scaled RoPE, tied": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        **_rope(10_000.0, **_LLAMA3),
    },
    "llama with a free head size": {"model_type": "llama", "head_dim": 8},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True, **_rope(1e6)},
    "qwen2 untied": {"model_type": "qwen2", **_rope(1e6)},
    "qwen2 with a window in all layers": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 0,
    },
    "qwen3 with a free head size": {"model_type": "qwen3", "head_dim": 32, **_rope(1e6)},
    "qwen3 tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, **_rope(1e6)},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 24},
    "olmo2": {"model_type": "olmo2", "pad_token_id": None},
    "olmo2 tied, with as many KV heads": {
        "model_type": "olmo2",
        "pad_token_id": None,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        **_rope(500_000.0),
    },
    "gemma3": {**_GEMMA3, "num_hidden_layers": 7},
    "gemma3 with every option": {
        **_GEMMA3,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500_000.0, "rope_type": "linear", "factor": 4.0},
            "sliding_attention": {"rope_theta": 5_000.0, "rope_type": "default"},
        },
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.02},
    "mixtral with a window, tied": {
        "model_type": "mixtral",
        "num_local_experts": 3,
        "sliding_window": 24,
        "tie_word_embeddings": True,
        **_rope(1e4),
    },
    "qwen3_moe": {**_QWEN3_MOE, "norm_topk_prob": True, **_rope(1e6)},
    "qwen3_moe in every second block": {**_QWEN3_MOE, "decoder_sparse_step": 2, "router_aux_loss_coef": 0.0},
    "mistral without a window": {"model_type": "mistral", "sliding_window": None, **_rope(1e6)},
}


def reference_model(name: str, *, seed: int = 0) -> Any:
    """A transformers model whose every parameter, norms and biases too, is random."""
    config = AutoConfig.for_model(**{**_SIZES, **FAMILIES[name]})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def reference_folder(name: str, folder: Path, **save: Any) -> tuple[Any, Path]:
    """The model and the folder that transformers saved it in."""
    model = reference_model(name)
    model.save_pretrained(folder, **save)
    return model, folder


def scrimp_model(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    """Scrimp's decoder with the weights of a Hugging Face folder."""
    model = build_model(read_architecture(folder), dtype=dtype)
    load_weights(model, folder)
    return model


def random_tokens(rows: int = 2, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def stored_pieces(reference: Any) -> dict[str, torch.Tensor]:
    """The parameters of a transformers model by their names in its files, where each expert has matrices of its own;
    views, through which gradients flow."""
    found = {}
    for name, parameter in reference.named_parameters():
        front, _, last = name.rpartition(".experts.")
        if last not in ("gate_up_proj", "down_proj"):
            name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if _is_mixtral(reference) else name
            found[name] = parameter
            continue
        front = front.replace(".mlp", ".block_sparse_moe") if _is_mixtral(reference) else front
        names = {"down_proj": ("down_proj",), "gate_up_proj": ("gate_proj", "up_proj")}[last]
        theirs = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for expert, matrix in enumerate(parameter):
            for one, piece in zip(names, matrix.chunk(len(names)), strict=True):
                key = theirs[one] if _is_mixtral(reference) else one
                found[f"{front}.experts.{expert}.{key}.weight"] = piece
    return found


def stored_gradients(reference: Any) -> dict[str, torch.Tensor]:
    """Their gradients."""
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return {name: piece.detach() for name, piece in stored_pieces(reference).items()}


def _is_mixtral(reference: Any) -> bool:
    return bool(reference.config.model_type == "mixtral")
