"""The decoder once more, written for the tests alone: float64, one document at a time, no fusion.

It shares no code with scrimp.models. Every matrix is cut out of the fused ones by hand, every
softmax is spelled out, and every document of a packed row runs by itself.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from scrimp.config.architecture import Architecture, RopeScaling
from scrimp.models.model import Model, build_model

LLAMA = Architecture(
    family="llama",
    vocab_size=61,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_width=48,
    context=64,
)
FAMILIES = {
    "llama": LLAMA,
    "llama3": replace(
        LLAMA,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16),
    ),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True, norm_eps=1e-6),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_size=12, norm_eps=1e-6),
    "mistral": replace(LLAMA, family="mistral", sliding_window=7),
}


def filled(architecture: Architecture, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> Model:
    """A decoder whose weights are all random, the norms' and biases' too, and large enough to matter."""
    model = build_model(architecture, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.2 * noise)
    return model


def weights_of(model: Model) -> dict[str, Tensor]:
    """Float64 copies that can be differentiated."""
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _frequencies(a: Architecture) -> Tensor:
    values = []
    for j in range(a.head_size // 2):
        f = a.rope_theta ** (-2 * j / a.head_size)
        s = a.rope_scaling
        if s is not None:
            ratio = s.original_context * f / (2 * math.pi)
            keep = min(1.0, max(0.0, (ratio - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)))
            f = keep * f + (1 - keep) * f / s.factor
        values.append(f)
    return torch.tensor(values, dtype=torch.float64)


def _turn(x: Tensor, a: Architecture, position: Tensor) -> Tensor:
    point = torch.complex(x[..., : a.head_size // 2].contiguous(), x[..., a.head_size // 2 :].contiguous())
    turned = point * torch.exp(1j * position[:, None] * _frequencies(a))
    return torch.cat([turned.real, turned.imag], dim=-1)


def document_logits(a: Architecture, w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits of one document alone, positions from 0."""
    T, A, K = len(tokens), a.num_heads * a.head_size, a.head_size
    position = torch.arange(T, dtype=torch.float64)
    distance = position[:, None] - position[None, :]
    hidden = (distance < 0) | (distance >= (a.sliding_window or T))
    x = w["embedding.weight"][tokens]
    for i in range(a.num_layers):
        p = {name.removeprefix(f"blocks.{i}."): t for name, t in w.items() if name.startswith(f"blocks.{i}.")}
        qkv = _norm(x, p["attention_norm.weight"], a.norm_eps) @ p["attention.qkv.weight"].T
        qkv = qkv + p.get("attention.qkv.bias", torch.zeros((), dtype=torch.float64))
        heads = []
        for h in range(a.num_heads):
            n = h // (a.num_heads // a.num_kv_heads)
            q = qkv[:, h * K : (h + 1) * K]
            k = qkv[:, A + n * K : A + (n + 1) * K]
            v = qkv[:, A + a.num_kv_heads * K + n * K : A + a.num_kv_heads * K + (n + 1) * K]
            if a.qk_norm:
                q = _norm(q, p["attention.q_norm.weight"], a.norm_eps)
                k = _norm(k, p["attention.k_norm.weight"], a.norm_eps)
            q, k = _turn(q, a, position), _turn(k, a, position)
            scores = (q @ k.T / math.sqrt(K)).masked_fill(hidden, -math.inf)
            heads.append(torch.softmax(scores, dim=-1) @ v)
        x = x + torch.cat(heads, dim=-1) @ p["attention.out.weight"].T
        normed = _norm(x, p["mlp_norm.weight"], a.norm_eps)
        gate, up = (
            normed @ p["mlp.gate_up.weight"].T.chunk(2, dim=1)[0],
            normed @ p["mlp.gate_up.weight"].T.chunk(2, dim=1)[1],
        )
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ p["mlp.down.weight"].T
    head = w["embedding.weight"] if a.tied_embeddings else w["head.weight"]
    return _norm(x, w["final_norm.weight"], a.norm_eps) @ head.T


def packed_logits(a: Architecture, w: dict[str, Tensor], tokens_BT: Tensor, starts: list[int]) -> Tensor:
    """Logits of packed rows, each document by itself, shape (B * T, V)."""
    flat = tokens_BT.flatten()
    pieces = [document_logits(a, w, flat[i:j]) for i, j in itertools.pairwise(starts)]
    return torch.cat(pieces)


def summed_loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Cross-entropy and z-loss, spelled out, over targets that are not -100."""
    ce, z = torch.zeros((), dtype=logits.dtype), torch.zeros((), dtype=logits.dtype)
    for row, target in zip(logits, targets.tolist(), strict=True):
        if target == -100:
            continue
        lse = torch.log(torch.exp(row - row.max()).sum()) + row.max()
        ce, z = ce + lse - row[target], z + z_loss * lse**2
    return ce, z
