"""The decoder: one readable transformer for Llama 3, Qwen 2.5, Qwen 3 and Mistral.

Each block adds two things to the residual stream x, attention and a gated MLP::

    x = x + out(attention(qkv(norm(x))))
    x = x + down(silu(gate(norm(x))) * up(norm(x)))

The families differ by switches of `Architecture` alone: RoPE scaling (Llama 3), QKV bias and
tied embeddings (Qwen 2.5), a norm over each query and key head and a free head size (Qwen 3),
a sliding window (Mistral), fewer KV heads than query heads (most).

Parameters  `qkv.weight` holds the rows of all query heads, then the key heads, then the value
            heads; `gate_up.weight` the rows of gate, then up: one GEMM each instead of three
            and two. A new decoder's parameters are uninitialised memory: call
            `initialise` or `load_weights`.
Precision   A plan gives every linear layer's GEMMs their formats (`scrimp.gemm`). Norms and SwiGLU are
            handed to the layer that reads their results, because a plan may make them again in backward.
            The residual stream keeps the embedding's type: float32 under autocast, bfloat16 with
            bfloat16 parameters. Norms compute in float32 and hand the GEMMs their type.
Memory      A block keeps or makes again what its backward pass reads, by its `activations`
            (`scrimp.config.activations`); no number changes by it.
Documents   Rows may hold several documents; see attention.py.
Checked     tests/models/test_decoder.py: logits and gradients against a float64 reference.

Shapes: B rows, T tokens, D width, H query heads, N KV heads, K head size, F ffn width,
V vocabulary, C = (H + 2N) K.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrimp.config.activations import Activations
from scrimp.config.architecture import Architecture
from scrimp.gemm import PlannedLayer, compute_dtype, recomputed, run_again
from scrimp.models.attention import AttentionLayout, attend, attention_operators
from scrimp.models.functions import rms_norm, swiglu

KEEP = Activations()


class Linear(nn.Linear):
    """A linear layer that leaves its memory uninitialised: every weight is set later by name."""

    def reset_parameters(self) -> None:
        """Nothing: drawing billions of numbers that are overwritten costs minutes."""


class Embedding(nn.Embedding):
    """An embedding that leaves its memory uninitialised, as `Linear` does."""

    def reset_parameters(self) -> None:
        """Nothing, see `Linear`."""


class RMSNorm(nn.Module):
    """x / root mean square of x, times a weight."""

    def __init__(
        self, size: int, eps: float, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(
        self, architecture: Architecture, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        a = architecture
        self.num_heads, self.num_kv_heads, self.head_size = a.num_heads, a.num_kv_heads, a.head_size
        self.qkv = Linear(a.width, a.qkv_width, bias=a.qkv_bias, device=device, dtype=dtype)
        self.out = Linear(a.attention_width, a.width, bias=False, device=device, dtype=dtype)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if a.qk_norm:
            self.q_norm = RMSNorm(a.head_size, a.norm_eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(a.head_size, a.norm_eps, device=device, dtype=dtype)

    def heads(self, x_BTD: Tensor, norm: RMSNorm, again: bool = False) -> Tensor:
        """qkv_BTGK: query, key and value heads side by side, normed where the family does, not yet turned.

        Args:
            again: make the normed input again in backward.
        """
        qkv_BTGK: Tensor = recomputed(self.qkv, norm, x_BTD, always=again).unflatten(-1, (-1, self.head_size))
        if self.q_norm is None or self.k_norm is None:
            return qkv_BTGK
        q, k, v = qkv_BTGK.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=2)

    def forward(
        self, x_BTD: Tensor, norm: RMSNorm, layout: AttentionLayout, activations: Activations = KEEP
    ) -> Tensor:
        """Attend within the documents of each row, to the normed residual stream."""

        def attended(x_BTD: Tensor, again: bool = False) -> Tensor:
            return cast(Tensor, self.out(attend(self.heads(x_BTD, norm, again), layout).flatten(2)))

        if activations.recomputes("attention"):
            return run_again(attended, x_BTD, last=self.out)
        if activations.recomputes("qkv"):
            return run_again(attended, x_BTD, last=self.out, keeps=attention_operators())
        return attended(x_BTD, activations.recomputes("norms"))


class Mlp(nn.Module):
    """SwiGLU: silu(gate) * up, then down."""

    def __init__(
        self, architecture: Architecture, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        a = architecture
        self.gate_up = Linear(a.width, 2 * a.ffn_width, bias=False, device=device, dtype=dtype)
        self.down = Linear(a.ffn_width, a.width, bias=False, device=device, dtype=dtype)

    def forward(self, x_BTD: Tensor, norm: RMSNorm, activations: Activations = KEEP) -> Tensor:
        """Token by token, of the normed residual stream."""

        def multiplied(x_BTD: Tensor, norms: bool = False, product: bool = False) -> Tensor:
            gate_up_BTF = recomputed(self.gate_up, norm, x_BTD, always=norms)
            return recomputed(self.down, swiglu, gate_up_BTF, always=product)

        if activations.recomputes("mlp"):
            return run_again(multiplied, x_BTD, last=self.down)
        return multiplied(x_BTD, activations.recomputes("norms"), activations.recomputes("swiglu"))


class Block(nn.Module):
    """One layer: attention, then the MLP, each added to the residual stream."""

    def __init__(
        self, architecture: Architecture, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        a = architecture
        self.is_compiled = False
        self.activations = KEEP
        """What is made again in backward instead of kept; may change between two steps."""
        self.attention_norm = RMSNorm(a.width, a.norm_eps, device=device, dtype=dtype)
        self.attention = Attention(a, device=device, dtype=dtype)
        self.mlp_norm = RMSNorm(a.width, a.norm_eps, device=device, dtype=dtype)
        self.mlp = Mlp(a, device=device, dtype=dtype)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile in place, and remember it: the layout must then be one that compiles once."""
        super().compile(*args, **kwargs)
        self.is_compiled = True

    def forward(self, x_BTD: Tensor, layout: AttentionLayout) -> Tensor:
        """The residual stream after this block."""

        def added(x_BTD: Tensor, activations: Activations = KEEP) -> Tensor:
            x_BTD = x_BTD + self.attention(x_BTD, self.attention_norm, layout, activations)
            return x_BTD + cast(Tensor, self.mlp(x_BTD, self.mlp_norm, activations))

        if self.activations.recomputes("block"):
            return run_again(added, x_BTD, last=self.mlp.down)
        return added(x_BTD, self.activations)


class BlockRunner(Protocol):
    """Runs the blocks of a decoder instead of the decoder itself: whoever moves their memory."""

    def __call__(self, index: int, block: Block, x_BTD: Tensor, layout: AttentionLayout) -> Tensor:
        """The output of a block, given its number, its input and the layout."""

    def at_hand(self, index: int) -> contextlib.AbstractContextManager[object]:
        """Inside, a block's weights can be read."""


class Decoder(nn.Module):
    """Tokens in, hidden states or logits out.

    Args:
        architecture: sizes and switches.
        device: where the parameters live; `meta` gives shapes without memory.
        dtype: type of the parameters.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.embedding = Embedding(a.vocab_size, a.width, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(a, device=device, dtype=dtype) for _ in range(a.num_layers))
        self.final_norm = RMSNorm(a.width, a.norm_eps, device=device, dtype=dtype)
        self.head: Linear | None = None
        if not a.tied_embeddings:
            self.head = Linear(a.width, a.vocab_size, bias=False, device=device, dtype=dtype)
        self.run_block: BlockRunner | None = None
        """None: blocks are simply called."""
        self.planned_head: PlannedLayer | None = None
        """Formats of the head's GEMMs in the loss; None: the compute type."""

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix, shape (V, D): the embedding's own where the two are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens_BT: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """hidden_BTD after the final norm.

        Args:
            tokens_BT: token ids; T at most the architecture's context.
            document_starts: int32 on the CPU, the documents' first positions in the flattened
                B*T, rising from 0, ending with B*T, every row's start among them. None: each
                row is one document.
        """
        x_BTD = self.embedding(tokens_BT)
        compiled = torch.compiler.is_compiling() or any(block.is_compiled for block in self.blocks)
        layout = AttentionLayout.prepare(
            self.architecture, tokens_BT, document_starts, dtype=compute_dtype(x_BTD), compiled=compiled
        )
        for index, block in enumerate(self.blocks):
            if self.run_block is None:
                x_BTD = block(x_BTD, layout)
            else:
                x_BTD = self.run_block(index, cast(Block, block), x_BTD, layout)
        return cast(Tensor, self.final_norm(x_BTD))

    def block_at_hand(self, index: int) -> contextlib.AbstractContextManager[object]:
        """Around what reads a block's weights without running the block."""
        return contextlib.nullcontext() if self.run_block is None else self.run_block.at_hand(index)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary entry for hidden states of any leading shape."""
        return F.linear(hidden, self.head_weight)
