"""From `[model]` to an `Architecture`: a preset or given weights, with the sizes that were overridden."""

from __future__ import annotations

from dataclasses import replace

from scrimp.config.adapter import adapter_of
from scrimp.config.architecture import Architecture
from scrimp.config.experts import with_capacity
from scrimp.config.presets import preset
from scrimp.config.schema import Config, ModelConfig
from scrimp.errors import ConfigError
from scrimp.user_code import is_code

_SIZES = (
    "vocab_size",
    "context",
    "num_layers",
    "width",
    "num_heads",
    "num_kv_heads",
    "ffn_width",
    "rank",
    "sparse_share",
)


def base_architecture(config: Config, weights: Architecture | None) -> Architecture:
    """The decoder that `[model]` describes.

    Args:
        weights: architecture of `model.weights`, read by the caller; None trains from scratch.

    Raises:
        ConfigError: an unknown preset, heads that do not divide the width, or another size than that of
            the weights (a smaller context is allowed: positions are computed, not stored).
    """
    given = {name: getattr(config.model, name) for name in _SIZES}
    sizes = {name: size for name, size in given.items() if size is not None}
    if weights is not None:
        _check_against_weights(sizes, weights, config.model)
        weights = replace(_with_kind(weights, config.model), adapter=adapter_of(config))
        return with_capacity(replace(weights, **sizes), config.model.capacity_factor)
    base = preset(config.model.preset)
    if config.model.kind is not None:
        base = replace(base, family=config.model.kind)
    if "width" in sizes or "num_heads" in sizes:
        width, num_heads = sizes.get("width", base.width), sizes.get("num_heads", base.num_heads)
        if width % num_heads:
            raise ConfigError(
                "model.num_heads does not divide model.width",
                got=f"{num_heads:,} heads over a width of {width:,}",
                expected=f"a divisor of {width:,}",
                do=f"change model.num_heads or model.width (preset {config.model.preset}: "
                f"{base.num_heads:,} heads, width {base.width:,})",
            )
        sizes["head_size"] = width // num_heads
    return with_capacity(replace(base, **sizes), config.model.capacity_factor)


def _with_kind(weights: Architecture, model: ModelConfig) -> Architecture:
    """The weights' architecture; where its kind is code, by the file that the user names."""
    if is_code(weights.family) and model.kind is None:
        raise ConfigError(
            f"the kind of model of {model.weights} is code, which nobody has named",
            got=weights.family,
            expected="model.kind: code runs by the user's word, not by a folder's",
            do=f"read the file, and add --model.kind {weights.family} --trust-code",
        )
    if not is_code(weights.family) and model.kind is not None:
        raise ConfigError(
            "model.kind differs from that of the weights",
            got=model.kind,
            expected=weights.family,
            do="leave model.kind out: weights bring their kind along",
        )
    return weights if model.kind is None else replace(weights, family=model.kind)


def _check_against_weights(sizes: dict[str, float], weights: Architecture, model: ModelConfig) -> None:
    for name, size in sizes.items():
        theirs = getattr(weights, name)
        if size == theirs or (name == "context" and size < theirs):
            continue
        raise ConfigError(
            f"model.{name} differs from that of the weights",
            got=f"{size:,}",
            expected=f"{'at most ' if name == 'context' else ''}{_shown(theirs)}, as in {model.weights}",
            do=f"leave model.{name} out, or leave model.weights out to train from scratch",
        )


def _shown(size: float | None) -> str:
    return "none" if size is None else f"{size:,}"
