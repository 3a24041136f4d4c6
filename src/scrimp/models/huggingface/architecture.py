"""config.json to Architecture and back.

Problem  A config.json describes more than Scrimp's decoder can do, and whatever is passed
         over silently trains another model than the one that was published.
Method   Every key that changes the computation of the four families is read, and a value
         the decoder does not support is refused by the key's name. A missing key gets the
         default that transformers gives it. Keys that transformers itself ignores for these
         model types, or that only concern generation, are ignored here too.
RoPE     transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and
         `rope_scaling`. Both are read, and both are written, so that either version loads
         the folder; where a folder holds both they must agree.
Window   Qwen configs name a window and the layers that use it. The decoder has one window
         for all layers or none; anything mixed is refused.
Checked  tests/models/test_huggingface_config.py (table of refusals; round trips through
         transformers' config classes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from scrimp.config.architecture import Architecture, RopeScaling
from scrimp.errors import ConfigError, ModelError
from scrimp.json_files import read_json

JSON: TypeAlias = dict[str, Any]

MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type of each supported family, and the transformers class that loads it."""

_DO = "give the folder of a Hugging Face model (config.json and *.safetensors)"
_MAX_FILE_BYTES = 2**24
# transformers' defaults for keys that a config.json may leave out.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_HEAD_SIZE = {"qwen3": 128}
_DEFAULT_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_MAX_WINDOW_LAYERS = 28

_LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


def read_architecture(folder: Path) -> Architecture:
    """The architecture of a Hugging Face folder, from its config.json alone."""
    file = Path(folder) / "config.json"
    config = read_json(file, dict[str, Any], error=ModelError, do=_DO, at_most=_MAX_FILE_BYTES)
    return architecture_from_config(config, where=str(file))


def architecture_from_config(config: Mapping[str, Any], *, where: str = "config.json") -> Architecture:
    """Read the keys of a config.json; ModelError names the first that cannot be supported."""
    keys = _Keys(config, where)
    family = _family(keys)
    _refuse_unsupported(keys, family)
    num_layers = keys.integer("num_hidden_layers")
    width = keys.integer("hidden_size")
    num_heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", _DEFAULT_KV_HEADS.get(family, num_heads), null=num_heads)
    default_head = _DEFAULT_HEAD_SIZE.get(family, width // num_heads)
    theta, scaling = _rope(keys)
    try:
        return Architecture(
            family=family,
            vocab_size=keys.integer("vocab_size"),
            num_layers=num_layers,
            width=width,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_size=keys.integer("head_dim", default_head, null=width // num_heads),
            ffn_width=keys.integer("intermediate_size"),
            context=keys.integer("max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=keys.number("rms_norm_eps", _DEFAULT_NORM_EPS),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied_embeddings=keys.boolean("tie_word_embeddings", False),
            sliding_window=_sliding_window(keys, family, num_layers),
        )
    except ConfigError as error:
        raise ModelError(
            f"{where}: {error.what}", got=error.got, expected=error.expected, do=error.do
        ) from None


class _Keys:
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


def _family(keys: _Keys) -> str:
    family = keys.config.get("model_type")
    if not isinstance(family, str) or family not in MODEL_CLASSES:
        raise keys.refuse("model_type", expected=f"one of {', '.join(MODEL_CLASSES)}")
    classes = keys.config.get("architectures")
    if classes and (not isinstance(classes, list) or MODEL_CLASSES[family] not in classes):
        raise keys.refuse(
            "architectures", expected=MODEL_CLASSES[family], do="export a causal language model"
        )
    return family


def _refuse_unsupported(keys: _Keys, family: str) -> None:
    """Refuse every key that would make transformers compute something the decoder does not."""
    get = keys.config.get
    if get("hidden_act", "silu") not in ("silu", "swish"):
        raise keys.refuse("hidden_act", expected="silu")
    # transformers gives Qwen 2 a bias on q, k and v and on nothing else, whatever this key says
    if get("attention_bias") and family != "qwen2":
        raise keys.refuse(
            "attention_bias", expected="false: of these families only qwen2 has biases, on q, k and v"
        )
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


def _rope(keys: _Keys) -> tuple[float, RopeScaling | None]:
    """RoPE's base and scaling from the newer `rope_parameters` or the older pair of keys."""
    theta = keys.number("rope_theta", _DEFAULT_ROPE_THETA)
    older = _rope_values(keys, "rope_scaling", theta)
    newer = _rope_values(keys, "rope_parameters", theta)
    if newer is None:
        return older or (theta, None)
    if ("rope_theta" in keys.config and newer[0] != theta) or (older is not None and newer != older):
        raise keys.refuse("rope_parameters", expected="the same values as in rope_theta and rope_scaling")
    return newer


def _rope_values(keys: _Keys, key: str, theta: float) -> tuple[float, RopeScaling | None] | None:
    values = keys.config.get(key)
    if not values:
        return None
    if not isinstance(values, dict):
        raise keys.refuse(key, expected="an object")
    inner = _Keys(values, f"{keys.where}: {key}")
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


def _sliding_window(keys: _Keys, family: str, num_layers: int) -> int | None:
    """The window of all layers, or None; refuses a mixture."""
    if family == "llama":
        if keys.config.get("sliding_window") is not None:
            raise keys.refuse(
                "sliding_window", expected="null: transformers gives llama none", do="use mistral"
            )
        return None
    window: int | None = None
    if keys.config.get("sliding_window", _DEFAULT_WINDOW[family]) is not None:
        window = keys.integer("sliding_window", _DEFAULT_WINDOW[family])
    if family != "mistral" and not keys.boolean("use_sliding_window", False):
        window = None
    kinds = _layer_kinds(keys, family, num_layers, window)
    if kinds == {"full_attention"}:
        return None
    if kinds == {"sliding_attention"} and window is not None:
        return window
    raise keys.refuse(
        "layer_types" if keys.config.get("layer_types") else "max_window_layers",
        got=f"layers of the kinds {', '.join(sorted(kinds))} with a window of {window}",
        expected="the same attention in all layers",
    )


def _layer_kinds(keys: _Keys, family: str, num_layers: int, window: int | None) -> set[str]:
    listed = keys.config.get("layer_types")
    if listed:
        if not isinstance(listed, list) or len(listed) != num_layers:
            raise keys.refuse("layer_types", expected=f"a list of {num_layers} kinds")
        kinds = {str(kind) for kind in listed}
        if family == "mistral" and kinds != {"full_attention" if window is None else "sliding_attention"}:
            raise keys.refuse(
                "layer_types", got=", ".join(sorted(kinds)), expected="what sliding_window says"
            )
        return kinds
    if window is None:
        return {"full_attention"}
    if family == "mistral":
        return {"sliding_attention"}
    full = keys.config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
    if isinstance(full, bool) or not isinstance(full, int) or full < 0:
        raise keys.refuse("max_window_layers", expected="the number of layers without a window")
    # Not layer by layer: nothing holds their number against the weights yet.
    kinds = {"full_attention"} if full > 0 else set()
    return kinds | ({"sliding_attention"} if full < num_layers else set())


def config_from_architecture(
    architecture: Architecture, *, dtype: str, bos_id: int | None = None, eos_ids: Sequence[int] = ()
) -> JSON:
    """The config.json of an architecture; ModelError if its family cannot express it."""
    a = architecture
    _check_family(a)
    scaling = None
    if a.rope_scaling is not None:
        values = {theirs: getattr(a.rope_scaling, ours) for ours, theirs in _LLAMA3_KEYS.items()}
        scaling = {"rope_type": "llama3", **values}
    config: JSON = {
        "architectures": [MODEL_CLASSES[a.family]],
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "dtype": dtype,
        "eos_token_id": list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None),
        "head_dim": a.head_size,
        "hidden_act": "silu",
        "hidden_size": a.width,
        "initializer_range": 0.02,
        "intermediate_size": a.ffn_width,
        "max_position_embeddings": a.context,
        "model_type": a.family,
        "num_attention_heads": a.num_heads,
        "num_hidden_layers": a.num_layers,
        "num_key_value_heads": a.num_kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": a.norm_eps,
        "rope_parameters": {"rope_theta": a.rope_theta, **(scaling or {"rope_type": "default"})},
        "rope_scaling": scaling,
        "rope_theta": a.rope_theta,
        "tie_word_embeddings": a.tied_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": a.vocab_size,
    }
    if a.family in ("llama", "qwen3"):
        config["attention_bias"] = False
    if a.family == "llama":
        config["mlp_bias"] = False
    else:
        config["sliding_window"] = a.sliding_window
    if a.family in ("qwen2", "qwen3"):
        windowed = a.sliding_window is not None
        config["use_sliding_window"] = windowed
        config["max_window_layers"] = 0 if windowed else a.num_layers
        config["layer_types"] = ["sliding_attention" if windowed else "full_attention"] * a.num_layers
    return dict(sorted(config.items()))


def _check_family(architecture: Architecture) -> None:
    """Refuse a combination of switches that transformers' class of the family does not have."""
    a = architecture
    if a.family not in MODEL_CLASSES:
        raise ModelError(
            "family is unknown", got=repr(a.family), expected=f"one of {', '.join(MODEL_CLASSES)}"
        )
    expected = {
        "qkv_bias": (a.qkv_bias, a.family == "qwen2"),
        "qk_norm": (a.qk_norm, a.family == "qwen3"),
        "sliding_window": (
            a.sliding_window is not None,
            a.sliding_window is not None and a.family != "llama",
        ),
    }
    for name, (got, can) in expected.items():
        if got != can:
            raise ModelError(
                f"a {a.family} model cannot be exported with this {name}",
                got="on" if got else "off",
                expected="on" if can else "off",
                do="train with the family that has it: bias qwen2, QK norm qwen3, window mistral",
            )
    if a.family == "llama" and a.width % a.num_heads:
        raise ModelError(
            "transformers' llama needs a width that the heads divide",
            got=f"width {a.width}, {a.num_heads} heads",
            expected="a multiple",
        )
