"""A decoder as a careful engineer writes it in plain PyTorch: the peer of `step.py` that owes nothing to a library.

Joined q, k, v and joined gate and up, `F.rms_norm`, `F.scaled_dot_product_attention`, tables of cosines made once,
cross-entropy over float32 logits. Llama and Qwen 2 without sliding windows; the weights are those of Scrimp's model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrimp.config.architecture import Architecture


class Block(nn.Module):
    """Attention and MLP before their norms."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.num_heads, shape.num_kv_heads, shape.head_size
        width, eps = shape.width, shape.norm_eps
        outputs = (self.heads + 2 * self.kv_heads) * self.size
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.qkv = nn.Linear(width, outputs, bias=shape.qkv_bias)
        self.out = nn.Linear(self.heads * self.size, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * shape.ffn_width, bias=False)
        self.down = nn.Linear(shape.ffn_width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        kept = [n * self.size for n in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.qkv(self.attention_norm(x)).split(kept, dim=-1)
        q, k, v = (part.view(rows, tokens, -1, self.size).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainDecoder(nn.Module):
    """Tokens to logits."""

    def __init__(self, shape: Architecture, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.final_norm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        if shape.tied_embeddings:
            self.head.weight = self.embedding.weight
        rates = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2) / shape.head_size)
        angles = torch.outer(torch.arange(context), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.embedding(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        logits: Tensor = self.head(self.final_norm(x))
        return logits


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: pairs are a half of the head apart."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def plain_decoder(shape: Architecture, weights: dict[str, Tensor], context: int) -> PlainDecoder:
    """With the weights of Scrimp's decoder, by its names."""
    found = PlainDecoder(shape, context)
    own = dict(found.named_parameters())
    theirs = {name.replace("attention.", "").replace("mlp.", ""): weight for name, weight in weights.items()}
    assert own.keys() == theirs.keys(), own.keys() ^ theirs.keys()
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(theirs[name])
    return found
