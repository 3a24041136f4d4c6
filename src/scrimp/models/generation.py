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
Rows     `generate` continues one prompt. `write_rows` writes many texts at once from nothing, each token by the mean
         logits of one or several models, as an ensemble would: every row has as many tokens.
Limits   With a sliding window the whole past is kept; attention reads its end.
Checked  tests/models/test_generation.py: against full recomputation, token by token.

Shapes: R rows, T new tokens, P past tokens, D width, H query heads, N KV heads, G = H + 2 N,
K head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.config.architecture import Architecture
from scrimp.config.sampling import GREEDY, Sampling
from scrimp.errors import ConfigError, ModelError
from scrimp.models.kinds import spec_of
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
            (logits_V,) = _next_logits(model, torch.tensor([new]), caches)
            token = agreed(choose(logits_V, sampling, generator))
            if token in end_ids:
                return
            yield token
            new = [token]

    return tokens()


def write_rows(
    models: Sequence[Model],
    rows: int,
    tokens: int,
    *,
    entries: int,
    delimiter_id: int,
    closing_id: int | None,
    cuts_documents: bool,
    generator: torch.Generator,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Documents out of nothing, one after the other until a row is full: int64 on the CPU, shape (rows, tokens).

    Every token is drawn from softmax(mean over models of their logits).

    Args:
        models: with one vocabulary, each on any device.
        tokens: of a row, at most one more than any model's context: the last one is never read.
        entries: of the tokenizer; models may have more rows, which mean nothing.
        delimiter_id: begins a document.
        closing_id: ends one; None: the next one's delimiter does.
        cuts_documents: a document sees nothing of those before it.
        generator: on the CPU; decides the draws.
        on_tokens: is told of tokens as they are written.
    """
    ids_RT = torch.full((rows, tokens), delimiter_id)
    starts_R = torch.zeros(rows, dtype=torch.int64)
    caches = [[_Cache() for _ in model.blocks] for model in models]
    for at in range(1, tokens):
        last_R = ids_RT[:, at - 1]
        starts_R[last_R == delimiter_id] = at - 1
        seen = starts_R if cuts_documents else None
        of_each = [
            _next_logits(model, last_R[:, None], own, seen)[:, :entries].double().cpu()
            for model, own in zip(models, caches, strict=True)
        ]
        p_RV = torch.softmax(torch.stack(of_each).mean(0), dim=-1)
        ids_RT[:, at] = torch.multinomial(p_RV, 1, generator=generator)[:, 0]
        if closing_id is not None:
            ids_RT[last_R == closing_id, at] = delimiter_id
        on_tokens(rows)
    return ids_RT


def cache_bytes(architecture: Architecture, tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of one row of so many tokens."""
    each = (block.attention for block in spec_of(architecture).blocks)
    numbers = sum(one.num_kv_heads * (one.head_size + (one.value_size or one.head_size)) for one in each)
    return -(-tokens // CACHE_TOKENS) * CACHE_TOKENS * numbers * itemsize


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
    """Keys and values of one block, (R, N, capacity, K), of which the first `length` are filled."""

    def __init__(self) -> None:
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k_RNTK: Tensor, v_RNTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens; all keys and values so far."""
        stop = self.length + k_RNTK.shape[2]
        self.keys = self._written(self.keys, k_RNTK, stop)
        self.values = self._written(self.values, v_RNTK, stop)
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def _written(self, store: Tensor | None, new_RNTK: Tensor, stop: int) -> Tensor:
        if store is None or stop > store.shape[2]:
            capacity = -(-stop // CACHE_TOKENS) * CACHE_TOKENS
            grown = new_RNTK.new_empty((*new_RNTK.shape[:2], capacity, new_RNTK.shape[3]))
            if store is not None:
                grown[:, :, : self.length] = store[:, :, : self.length]
            store = grown
        store[:, :, self.length : stop] = new_RNTK
        return store


@torch.no_grad()
def _next_logits(
    model: Model, new_RT: Tensor, caches: list[_Cache], starts_R: Tensor | None = None
) -> Tensor:
    """Logits after the new tokens, shape (R, V); their keys and values join the caches.

    Args:
        starts_R: the first position that each row sees; None: all see all.
    """
    with model.ends_at_hand(), model.whole_rows():
        return _logits_at_hand(model, new_RT, caches, starts_R)


def _logits_at_hand(model: Model, new_RT: Tensor, caches: list[_Cache], starts_R: Tensor | None) -> Tensor:
    start = caches[0].length
    seen_R1P = None
    if starts_R is not None:
        seen_R1P = (torch.arange(start + new_RT.shape[1]) >= starts_R[:, None, None]).to(
            model.head_weight.device
        )
    x_RTD = model.embed(new_RT.to(model.head_weight.device))
    tables = {
        attends: rope_tables(
            attends.rope, attends.head_size, start, start + new_RT.shape[1], device=x_RTD.device
        )
        for attends in dict.fromkeys(block.attends for block in model.each_block())
    }
    for index, (block, cache) in enumerate(zip(model.each_block(), caches, strict=True)):
        attend = partial(
            _attend, attends=block.attends, tables=tables[block.attends], cache=cache, seen_R1P=seen_R1P
        )
        with model.block_at_hand(index):
            x_RTD = block.add(x_RTD, attend)
    return model.logits(model.finish(x_RTD[:, -1]))


def _attend(
    qkv_RTGK: Tensor,
    attends: AttentionSpec,
    tables: tuple[Tensor, Tensor],
    cache: _Cache,
    seen_R1P: Tensor | None,
) -> Tensor:
    H, N, window = attends.num_heads, attends.num_kv_heads, attends.window
    T = qkv_RTGK.shape[1]
    qk, v = qkv_RTGK.split([H + N, N], dim=2)
    q, k = rotate(qk, *tables).split([H, N], dim=2)
    assert T == 1 or cache.length == 0, "only the prompt comes in more than one token"
    k_RNPK, v_RNPK = cache.append(k.transpose(1, 2), v.transpose(1, 2))
    mask = None if seen_R1P is None else seen_R1P[:, None]
    if window is not None and window < T:
        mask = allowed(1, T, None, window, q.device)
    elif window is not None and T == 1:
        k_RNPK, v_RNPK = k_RNPK[:, :, -window:], v_RNPK[:, :, -window:]
        mask = None if mask is None else mask[..., -window:]
    out_RHTK = F.scaled_dot_product_attention(
        q.transpose(1, 2), k_RNPK, v_RNPK, attn_mask=mask, is_causal=T > 1 and mask is None, enable_gqa=H != N
    )
    return out_RHTK.transpose(1, 2)
