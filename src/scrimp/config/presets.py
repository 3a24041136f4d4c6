"""Architectures by name: Scrimp's own small models, and published ones.

Scrimp's own (`OWN_PRESETS`) are shaped like Llama, OLMo 2 or Gemma 3, for training from scratch. The name is the
number of parameters including embeddings, within a tenth, at the vocabulary given here; the
vocabulary itself follows the tokenizer of the run. Choices made once for all of them: the
ffn width is the multiple of 64 next to 8/3 of the width, so that SwiGLU's three matrices
weigh as much as the two of a plain MLP of four times the width; sizes are multiples of 64,
which every blocked number format and GEMM tile divides; embeddings are tied where they
would otherwise be a large share of the model; KV heads are shared from 130M upwards, where
the KV cache begins to matter.

Published ones hold the values of the model's own `config.json` on the Hugging Face hub (base
model where there are several), so that its weights load into them. qwen3-* are the
post-trained models, whose context is 40,960; mistral-7b is v0.1, the one with a sliding window.

Checked in tests/config/test_presets.py: counts against transformers' models of the same
configuration and against the published numbers of parameters.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from scrimp.config.architecture import Architecture, RopeScaling
from scrimp.errors import ConfigError


def _own(
    vocab_size: int,
    num_layers: int,
    width: int,
    ffn_width: int,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    context: int,
    rope_theta: float = 10_000.0,
    tied: bool = True,
    family: str = "llama",
    qk_norm: bool = False,
    sliding_window: int | None = None,
    options: tuple[tuple[str, float], ...] = (),
) -> Architecture:
    return Architecture(
        family=family,
        vocab_size=vocab_size,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_size=width // num_heads,
        ffn_width=ffn_width,
        context=context,
        rope_theta=rope_theta,
        tied_embeddings=tied,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        options=options,
    )


def _experts(count: int, per_token: int) -> tuple[tuple[str, float], ...]:
    """Options of routed experts."""
    return ("experts", count), ("experts_per_token", per_token), ("router_aux_loss_coef", 0.001)


_OWN = {
    "llama-3m": _own(4096, 5, 192, 512, num_heads=6, context=1024),
    "llama-8m": _own(4096, 9, 256, 704, num_heads=8, context=1024),
    "llama-20m": _own(8192, 10, 384, 1024, num_heads=6, context=2048),
    "llama-60m": _own(16384, 10, 640, 1728, num_heads=10, context=2048),
    "llama-130m": _own(32768, 16, 768, 2048, num_heads=12, num_kv_heads=4, context=4096),
    "llama-300m": _own(32768, 24, 1024, 2752, num_heads=16, num_kv_heads=4, context=4096),
    "llama-1b": _own(
        32768, 20, 2048, 5440, num_heads=16, num_kv_heads=4, context=8192, rope_theta=500_000.0, tied=False
    ),
    "olmo2-8m": _own(4096, 9, 256, 704, num_heads=8, context=1024, family="olmo2", qk_norm=True),
    "mixtral-8m": _own(
        4096, 5, 192, 256, num_heads=6, context=1024, family="mixtral", options=_experts(8, 2)
    ),
    "qwen3-moe-8m": _own(
        4096,
        5,
        192,
        512,
        num_heads=6,
        context=1024,
        family="qwen3_moe",
        qk_norm=True,
        options=(*_experts(16, 4), ("expert_width", 128), ("normalises", 1)),
    ),
    "gemma3-8m": _own(
        4096,
        9,
        256,
        704,
        num_heads=4,
        num_kv_heads=2,
        context=1024,
        rope_theta=1_000_000.0,
        family="gemma3_text",
        qk_norm=True,
        sliding_window=256,
    ),
}


def _llama(
    num_layers: int, width: int, num_heads: int, head_size: int, ffn_width: int, *, tied: bool = False
) -> Architecture:
    """Llama 3 as first released: 8,192 tokens of context, plain RoPE."""
    return Architecture(
        family="llama",
        vocab_size=128_256,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=8,
        head_size=head_size,
        ffn_width=ffn_width,
        context=8192,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        tied_embeddings=tied,
    )


def _stretched(architecture: Architecture, factor: float) -> Architecture:
    """The same with Llama 3.1's RoPE scaling to 131,072 tokens."""
    scaling = RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    return replace(architecture, context=131_072, rope_scaling=scaling)


def _qwen2(
    num_layers: int,
    width: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_width: int,
    *,
    context: int = 131_072,
    norm_eps: float = 1e-6,
    tied: bool = False,
) -> Architecture:
    return Architecture(
        family="qwen2",
        vocab_size=151_936 if tied else 152_064,  # the larger models pad the same tokenizer further
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=width // num_heads,
        ffn_width=ffn_width,
        context=context,
        rope_theta=1_000_000.0,
        norm_eps=norm_eps,
        qkv_bias=True,
        tied_embeddings=tied,
    )


def _qwen3(
    num_layers: int, width: int, num_heads: int, ffn_width: int, *, tied: bool = False
) -> Architecture:
    return Architecture(
        family="qwen3",
        vocab_size=151_936,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=8,
        head_size=128,
        ffn_width=ffn_width,
        context=40_960,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qk_norm=True,
        tied_embeddings=tied,
    )


def _gemma3(num_layers: int, width: int, ffn_width: int) -> Architecture:
    return Architecture(
        family="gemma3_text",
        vocab_size=262_144,
        num_layers=num_layers,
        width=width,
        num_heads=4,
        num_kv_heads=1,
        head_size=256,
        ffn_width=ffn_width,
        context=32_768,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qk_norm=True,
        tied_embeddings=True,
        sliding_window=512,
    )


_OLMO2_1B = Architecture(
    family="olmo2",
    vocab_size=100_352,
    num_layers=16,
    width=2048,
    num_heads=16,
    num_kv_heads=16,
    head_size=128,
    ffn_width=8192,
    context=4096,
    rope_theta=500_000.0,
    norm_eps=1e-6,
    qk_norm=True,
)

_MISTRAL_7B = Architecture(
    family="mistral",
    vocab_size=32_000,
    num_layers=32,
    width=4096,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    ffn_width=14_336,
    context=32_768,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    sliding_window=4096,
)

_MIXTRAL_8X7B = replace(
    _MISTRAL_7B,
    family="mixtral",
    rope_theta=1_000_000.0,
    sliding_window=None,
    options=(("experts", 8), ("experts_per_token", 2), ("router_aux_loss_coef", 0.02)),
)

_QWEN3_30B_A3B = Architecture(
    family="qwen3_moe",
    vocab_size=151_936,
    num_layers=48,
    width=2048,
    num_heads=32,
    num_kv_heads=4,
    head_size=128,
    ffn_width=6144,
    context=40_960,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    qk_norm=True,
    options=(*_experts(128, 8), ("expert_width", 768), ("normalises", 1)),
)

_LLAMA_8B = _llama(32, 4096, 32, 128, 14_336)
_LLAMA_70B = _llama(80, 8192, 64, 128, 28_672)

_PUBLISHED = {
    "llama-3.2-1b": _stretched(_llama(16, 2048, 32, 64, 8192, tied=True), 32.0),
    "llama-3.2-3b": _stretched(_llama(28, 3072, 24, 128, 8192, tied=True), 32.0),
    "llama-3-8b": _LLAMA_8B,
    "llama-3.1-8b": _stretched(_LLAMA_8B, 8.0),
    "llama-3-70b": _LLAMA_70B,
    "llama-3.1-70b": _stretched(_LLAMA_70B, 8.0),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, context=32_768, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11_008, context=32_768, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18_944),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13_824, norm_eps=1e-5),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27_648, norm_eps=1e-5),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29_568, norm_eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "olmo2-1b": _OLMO2_1B,
    "gemma3-270m": _gemma3(18, 640, 2048),
    "gemma3-1b": _gemma3(26, 1152, 6912),
    "mistral-7b": _MISTRAL_7B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "mistral-7b-v0.3": replace(_MISTRAL_7B, vocab_size=32_768, rope_theta=1_000_000.0, sliding_window=None),
}

PRESETS: dict[str, Architecture] = {**_OWN, **_PUBLISHED}
"""Every named architecture."""

OWN_PRESETS: frozenset[str] = frozenset(_OWN)
"""Scrimp's own, whose vocabulary follows the tokenizer of the run."""


def preset(name: str) -> Architecture:
    """The architecture of that name; ConfigError with the nearest names if there is none."""
    if name in PRESETS:
        return PRESETS[name]
    close = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.6)
    do = f"did you mean {' or '.join(close)}?" if close else None
    raise ConfigError(
        "model.preset is unknown", got=repr(name), expected=f"one of {', '.join(PRESETS)}", do=do
    )
