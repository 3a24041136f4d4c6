"""Text from a model: one token at a time, with the keys and values of the past kept.

Problem  Token t + 1 needs the keys and values of all t tokens before it, in every block.
         Computed anew they make a text of n tokens cost n^2 forward passes of one token.
Method   The prompt runs through the blocks once; each block's rotated keys and its values stay
         in a cache, and every further token attends to it. The cache is allocated in pieces
         of 256 tokens, so that a short text does not pay for the longest context.
Choice   temperature 0: the most probable token. Otherwise softmax(logits / temperature),
         cut to the top_k most probable tokens and then to the smallest set of them that
         holds top_p of the probability, drawn by a generator of its own on the CPU: the same
         seed gives the same text whatever else draws random numbers.
Limits   One sequence. With a sliding window the whole past is kept; attention reads its end.
Checked  tests/models/test_generation.py: against full recomputation, token by token.

Shapes: T new tokens, P past tokens, D width, H query heads, N KV heads, G = H + 2 N,
K head size, V vocabulary; 1 is the single row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.config.architecture import Architecture
from scrimp.config.sampling import GREEDY, Sampling
from scrimp.errors import ConfigError, ModelError
from scrimp.models.masks import allowed
from scrimp.models.model import Model
from scrimp.models.rope import rope_tables, rotate
from scrimp.models.spec import AttentionSpec

CACHE_TOKENS = 256
"""Tokens by which a cache grows."""


def generate(
    model: Model,
    prompt_ids: list[int],
    *,
    max_tokens: int,
    sampling: Sampling = GREEDY,
    end_ids: frozenset[int] = frozenset(),
    agreed: Callable[[int], int] = int,
) -> Iterator[int]:
    """Continue a prompt, yielding each token id as it is chosen.

    Args:
        model: on any device.
        prompt_ids: at least one token.
        max_tokens: most tokens to produce.
        sampling: how each is drawn.
        end_ids: tokens that end the text; they are not yielded.
        agreed: of the token that this process has chosen the one that all have, where several compute together: their
            logits may differ in the last bits.

    Raises:
        ModelError: the prompt is empty, has unknown ids, or does not fit the context.
        ConfigError: a sampling setting is out of range.
    """
    _check_prompt(model.architecture, prompt_ids, max_tokens)
    sampling.check()
    generator = torch.Generator().manual_seed(sampling.seed)

    def tokens() -> Iterator[int]:
        caches = [_Cache() for _ in model.blocks]
        new = list(prompt_ids)
        for _ in range(max_tokens):
            token = agreed(choose(_next_logits(model, new, caches), sampling, generator))
            if token in end_ids:
                return
            yield token
            new = [token]

    return tokens()


def _check_prompt(architecture: Architecture, prompt_ids: list[int], max_tokens: int) -> None:
    if not prompt_ids:
        raise ModelError("the prompt has no tokens", expected="at least one", do="give a prompt")
    unknown = next((i for i in prompt_ids if not 0 <= i < architecture.vocab_size), None)
    if unknown is not None:
        raise ModelError(
            "the prompt holds a token that the model does not know",
            got=f"id {unknown}",
            expected=f"0 to {architecture.vocab_size - 1}",
            do="use the tokenizer that the model was trained with",
        )
    if max_tokens < 0:
        raise ConfigError("number of tokens to generate is negative", got=max_tokens, expected="0 or more")
    room = architecture.context - len(prompt_ids)
    if max_tokens > room:
        raise ModelError(
            "prompt and new tokens do not fit the model's context",
            got=f"{len(prompt_ids)} + {max_tokens} tokens",
            expected=f"at most {architecture.context}",
            do=_what_fits(architecture.context, room, architecture.context - max_tokens),
        )


def _what_fits(context: int, room: int, prompt_room: int) -> str:
    """Advice: what of the two may stay as it is."""
    ways = [f"ask for {room:,} or fewer new tokens"] if room > 0 else []
    ways += [f"shorten the prompt to {prompt_room:,} or fewer tokens"] if prompt_room > 0 else []
    return (
        ", or ".join(ways)
        or f"shorten the prompt to fewer than {context:,} tokens, and ask for fewer new ones"
    )


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from the logits of a position."""
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    p_V = torch.softmax(logits_V.double().cpu() / sampling.temperature, dim=-1)
    p_V, order_V = p_V.sort(descending=True, stable=True)
    if sampling.top_k:
        p_V = p_V[: sampling.top_k] / p_V[: sampling.top_k].sum()
    # A token stays if those before it do not yet hold top_p: never fewer than one.
    p_V = p_V[p_V.cumsum(0) - p_V < sampling.top_p]
    return int(order_V[torch.multinomial(p_V, 1, generator=generator)])


class _Cache:
    """Keys and values of one block, (1, N, capacity, K), of which the first `length` are filled."""

    def __init__(self) -> None:
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k_1NTK: Tensor, v_1NTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens; all keys and values so far."""
        stop = self.length + k_1NTK.shape[2]
        self.keys = self._written(self.keys, k_1NTK, stop)
        self.values = self._written(self.values, v_1NTK, stop)
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def _written(self, store: Tensor | None, new_1NTK: Tensor, stop: int) -> Tensor:
        if store is None or stop > store.shape[2]:
            capacity = -(-stop // CACHE_TOKENS) * CACHE_TOKENS
            grown = new_1NTK.new_empty((*new_1NTK.shape[:2], capacity, new_1NTK.shape[3]))
            if store is not None:
                grown[:, :, : self.length] = store[:, :, : self.length]
            store = grown
        store[:, :, self.length : stop] = new_1NTK
        return store


@torch.no_grad()
def _next_logits(model: Model, new_ids: list[int], caches: list[_Cache]) -> Tensor:
    """Logits after the new tokens, logits_V; their keys and values join the caches."""
    with model.ends_at_hand(), model.whole_rows():
        return _logits_at_hand(model, new_ids, caches)


def _logits_at_hand(model: Model, new_ids: list[int], caches: list[_Cache]) -> Tensor:
    start = caches[0].length
    x_1TD = model.embed(torch.tensor([new_ids], device=model.head_weight.device))
    tables = {
        attends: rope_tables(
            attends.rope, attends.head_size, start, start + len(new_ids), device=x_1TD.device
        )
        for attends in dict.fromkeys(block.attends for block in model.each_block())
    }
    for index, (block, cache) in enumerate(zip(model.each_block(), caches, strict=True)):
        attend = partial(_attend, attends=block.attends, tables=tables[block.attends], cache=cache)
        with model.block_at_hand(index):
            x_1TD = block.add(x_1TD, attend)
    return model.logits(model.finish(x_1TD[0, -1]))


def _attend(qkv_1TGK: Tensor, attends: AttentionSpec, tables: tuple[Tensor, Tensor], cache: _Cache) -> Tensor:
    H, N, window = attends.num_heads, attends.num_kv_heads, attends.window
    T = qkv_1TGK.shape[1]
    qk, v = qkv_1TGK.split([H + N, N], dim=2)
    q, k = rotate(qk, *tables).split([H, N], dim=2)
    assert T == 1 or cache.length == 0, "only the prompt comes in more than one token"
    k_1NPK, v_1NPK = cache.append(k.transpose(1, 2), v.transpose(1, 2))
    mask = None
    if window is not None and window < T:
        mask = allowed(1, T, None, window, q.device)
    elif window is not None and T == 1:
        k_1NPK, v_1NPK = k_1NPK[:, :, -window:], v_1NPK[:, :, -window:]
    out_1HTK = F.scaled_dot_product_attention(
        q.transpose(1, 2), k_1NPK, v_1NPK, attn_mask=mask, is_causal=T > 1 and mask is None, enable_gqa=H != N
    )
    return out_1HTK.transpose(1, 2)
