"""What the config.json files of all kinds have in common, read and written.

Problem  A config.json describes more than Scrimp's models can do, and whatever is passed over silently trains another
         model than the one that was published.
Method   Values are taken out with their type checked (`Keys`), and one that is not supported is refused by its key. A
         missing key gets the default that transformers gives it.
RoPE     transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`. Both are
         read, and both are written, so that either version loads the folder; where a folder holds both they must
         agree.
Checked  tests/models/test_huggingface_config.py

Pure: importing it needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from scrimp.config.architecture import Architecture, RopeScaling
from scrimp.errors import ModelError

JSON: TypeAlias = dict[str, Any]

# transformers' defaults for keys that a config.json may leave out.
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_NORM_EPS = 1e-6

_LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


class Keys:
    """A config.json whose values are taken out with their type checked."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def refuse(
        self, key: str, *, expected: object, do: str | None = None, got: object | None = None
    ) -> ModelError:
        """The error for a key whose value the decoder does not support."""
        shown = repr(self.config.get(key)) if got is None else got
        return ModelError(f"{self.where}: {key} is not supported", got=shown, expected=expected, do=do)

    def _value(self, key: str, default: object, null: object) -> object:
        if key in self.config:
            value = self.config[key]
            return null if value is None else value
        if default is None:
            raise ModelError(
                f"{self.where}: {key} is missing", do="use the config.json that belongs to these weights"
            )
        return default

    def integer(self, key: str, default: int | None = None, *, null: int | None = None) -> int:
        value = self._value(key, default, null)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
            raise self.refuse(key, expected="a positive integer of 64 bits")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.refuse(key, expected="a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default, default)
        if not isinstance(value, bool):
            raise self.refuse(key, expected="true or false")
        return value


def sizes(keys: Keys) -> dict[str, Any]:
    """The fields of an `Architecture` that every config.json names alike."""
    return {
        "vocab_size": keys.integer("vocab_size"),
        "num_layers": keys.integer("num_hidden_layers"),
        "width": keys.integer("hidden_size"),
        "num_heads": keys.integer("num_attention_heads"),
        "ffn_width": keys.integer("intermediate_size"),
        "context": keys.integer("max_position_embeddings"),
    }


def common(
    keys: Keys, *, theta: float = _DEFAULT_ROPE_THETA, norm_eps: float = _DEFAULT_NORM_EPS
) -> dict[str, Any]:
    """`sizes`, RoPE, epsilon and tied embeddings.

    Args:
        theta: RoPE's base where the file does not say; norm_eps: the norms' epsilon.
    """
    theta, scaling = read_rope(keys, theta)
    return {
        **sizes(keys),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": keys.number("rms_norm_eps", norm_eps),
        "tied_embeddings": keys.boolean("tie_word_embeddings", False),
    }


def refuse_unsupported(keys: Keys) -> None:
    """Refuse every key that makes transformers compute something that no kind of decoder here does."""
    get = keys.config.get
    if get("partial_rotary_factor") not in (None, 1, 1.0):
        raise keys.refuse("partial_rotary_factor", expected="1.0: RoPE turns the whole head")
    if get("original_max_position_embeddings") is not None:
        raise keys.refuse(
            "original_max_position_embeddings", expected="it inside rope_parameters or rope_scaling"
        )
    for key, expected, do in (
        ("mlp_bias", "false", None),
        ("attention_dropout", "0.0", "set it to 0.0 to train without dropout"),
        ("auto_map", "no code of its own", "Scrimp runs no code from a model folder"),
    ):
        if get(key):
            raise keys.refuse(key, expected=expected, do=do)
    for key in ("quantization_config", "compression_config"):
        if get(key):
            raise keys.refuse(
                key,
                got="quantized weights",
                expected="plain float32, bfloat16 or float16 weights",
                do="use the model's unquantized weights",
            )
    if get("is_causal", True) is not True:
        raise keys.refuse("is_causal", expected="true: every token sees only those before it")


def read_rope(keys: Keys, default: float = _DEFAULT_ROPE_THETA) -> tuple[float, RopeScaling | None]:
    """RoPE's base and scaling from the newer `rope_parameters` or the older pair of keys."""
    theta = keys.number("rope_theta", default)
    older = rope_values(keys, "rope_scaling", theta)
    newer = rope_values(keys, "rope_parameters", theta)
    if newer is None:
        return older or (theta, None)
    if ("rope_theta" in keys.config and newer[0] != theta) or (older is not None and newer != older):
        raise keys.refuse("rope_parameters", expected="the same values as in rope_theta and rope_scaling")
    return newer


def rope_values(keys: Keys, key: str, theta: float) -> tuple[float, RopeScaling | None] | None:
    """Base and scaling in an object of RoPE's; None where there is none."""
    values = keys.config.get(key)
    if not values:
        return None
    if not isinstance(values, dict):
        raise keys.refuse(key, expected="an object")
    inner = Keys(values, f"{keys.where}: {key}")
    kind = values.get("rope_type", values.get("type", "default"))
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "llama3":
        known |= set(_LLAMA3_KEYS.values())
    elif kind != "default":
        raise inner.refuse("rope_type", got=repr(kind), expected="default or llama3")
    for unknown in sorted(values.keys() - known):
        raise inner.refuse(unknown, expected=f"only {', '.join(sorted(known))}")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise inner.refuse("partial_rotary_factor", expected="1.0: RoPE turns the whole head")
    scaling = None
    if kind == "llama3":
        # transformers takes the model's own context where the original one is not stated
        original = inner.integer("original_max_position_embeddings", keys.integer("max_position_embeddings"))
        scaling = RopeScaling(
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_context=original,
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise inner.refuse(
                "high_freq_factor", expected=f"more than low_freq_factor {scaling.low_freq_factor}"
            )
    return inner.number("rope_theta", theta), scaling


def written(architecture: Architecture) -> JSON:
    """The keys of a config.json that every kind writes alike."""
    a = architecture
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": a.head_size,
        "hidden_size": a.width,
        "initializer_range": 0.02,
        "intermediate_size": a.ffn_width,
        "max_position_embeddings": a.context,
        "num_attention_heads": a.num_heads,
        "num_hidden_layers": a.num_layers,
        "num_key_value_heads": a.num_kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": a.norm_eps,
        "tie_word_embeddings": a.tied_embeddings,
        "use_cache": True,
        "vocab_size": a.vocab_size,
    }


def written_rope(architecture: Architecture) -> JSON:
    """RoPE's keys, for newer versions of transformers and older ones."""
    a, scaling = architecture, None
    if a.rope_scaling is not None:
        values = {theirs: getattr(a.rope_scaling, ours) for ours, theirs in _LLAMA3_KEYS.items()}
        scaling = {"rope_type": "llama3", **values}
    return {
        "rope_parameters": {"rope_theta": a.rope_theta, **(scaling or {"rope_type": "default"})},
        "rope_scaling": scaling,
        "rope_theta": a.rope_theta,
    }
