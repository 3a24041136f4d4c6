"""config.json: what is read, what is refused by name, and round trips through transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hf_families import FAMILIES, reference_model
from hypothesis import assume, given
from hypothesis import strategies as st
from property_tests import examples
from transformers import AutoConfig

from scrimp.config import PRESETS, Architecture, RopeScaling
from scrimp.errors import ModelError
from scrimp.models.huggingface.config_json import (
    architecture_from_config,
    config_from_architecture,
    read_architecture,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": None, "num_key_value_heads": 2}
QWEN3 = {**QWEN2, "model_type": "qwen3"}
MISTRAL = {**QWEN2, "model_type": "mistral"}
OLMO2 = {**QWEN2, "model_type": "olmo2"}
MIXTRAL = {**QWEN2, "model_type": "mixtral"}
QWEN3_MOE = {**QWEN2, "model_type": "qwen3_moe"}
GEMMA3 = {**QWEN2, "model_type": "gemma3_text", "sliding_window": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

GEMMA3_OPTIONS = ("full_every", "local_rope_theta", "query_scalar", "rope_factor")
GEMMA3_KINDS = ("full_attention", "sliding_attention")

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"model_type": "phimoe"}, "model_type is not supported - got 'phimoe', expected one of llama"),
    (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act"),
    (MIXTRAL, {"router_aux_loss_coef": -1}, "router_aux_loss_coef"),
    (MIXTRAL, {"num_local_experts": 0}, "num_local_experts"),
    (QWEN3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers"),
    (QWEN3_MOE, {"attention_bias": True}, "attention_bias"),
    (LLAMA, {"model_type": None}, "model_type"),
    (LLAMA, {"model_type": ["llama"]}, "model_type"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    (LLAMA, {"architectures": ["LlamaModel"]}, "architectures"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA, {"attention_bias": True}, "attention_bias"),
    (QWEN3, {"attention_bias": True}, "attention_bias"),
    (MISTRAL, {"attention_bias": True}, "attention_bias"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias"),
    (LLAMA, {"attention_dropout": 0.1}, "attention_dropout"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (LLAMA, {"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map"),
    (LLAMA, {"is_causal": False}, "is_causal is not supported - got False, expected true"),
    (QWEN3, {"is_causal": None}, "is_causal is not supported"),
    (LLAMA, {"sliding_window": 128}, "sliding_window"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    (LLAMA, {"original_max_position_embeddings": 128}, "original_max_position_embeddings"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: rope_type .* got 'linear'"),
    (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling: rope_type .* got 'yarn'"),
    (LLAMA, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters: rope_type"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters: full_attention"),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
    (LLAMA, {"rope_parameters": {**LLAMA3_ROPE, "attention_factor": 2.0}}, "attention_factor"),
    (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    (LLAMA, {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor"),
    (LLAMA, {"rope_parameters": "llama3"}, "rope_parameters"),
    (LLAMA, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_parameters"),
    (LLAMA, {"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    (LLAMA, {"rope_theta": -1.0}, "rope_theta"),
    (LLAMA, {"rope_theta": "10000"}, "rope_theta"),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps"),
    (LLAMA, {"hidden_size": 64.0}, "hidden_size"),
    (LLAMA, {"hidden_size": True}, "hidden_size"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (LLAMA, {"num_key_value_heads": 3}, "num_kv_heads does not divide"),
    (LLAMA, {"head_dim": 15}, "head size is odd"),
    (QWEN2, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "max_window_layers"),
    (
        QWEN3,
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": "2"},
        "max_window_layers",
    ),
    (QWEN2, {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
    (QWEN2, {"layer_types": ["full_attention"] * 3}, "layer_types"),
    (QWEN2, {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    (QWEN2, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    (MISTRAL, {"layer_types": ["full_attention"] * 4, "sliding_window": 64}, "layer_types"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window"),
    (QWEN2, {"use_sliding_window": 1}, "use_sliding_window"),
    (LLAMA, {"model_type": "gemma2"}, "model_type .*'gemma2'.* caps scores and logits with tanh"),
    (LLAMA, {"model_type": "gemma3"}, "model_type .*'gemma3'.* whose model_type is gemma3_text"),
    (OLMO2, {"hidden_act": "gelu"}, "hidden_act"),
    (OLMO2, {"attention_bias": True}, "attention_bias"),
    (GEMMA3, {"attention_bias": True}, "attention_bias"),
    (GEMMA3, {"hidden_activation": "silu"}, "hidden_activation"),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported - got 50.0"),
    (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA3, {"sliding_window": 0}, "sliding_window"),
    (GEMMA3, {"layer_types": ["full_attention"] * 3}, "layer_types"),
    (GEMMA3, {"layer_types": ["full_attention", *["sliding_attention"] * 3]}, "layer_types"),
    (GEMMA3, {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    (GEMMA3, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
    (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    (
        GEMMA3,
        {"rope_theta": 1e4, "rope_parameters": {kind: {"rope_theta": 5e5} for kind in GEMMA3_KINDS}},
        "rope_parameters",
    ),
]


@pytest.mark.parametrize(("base", "change", "message"), REFUSED)
def test_what_the_decoder_does_not_support_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        architecture_from_config({**base, **change})


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"{key} is missing"):
        architecture_from_config({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize("base", [LLAMA, QWEN2, QWEN3, MISTRAL, OLMO2, GEMMA3])
def test_missing_keys_get_the_defaults_of_transformers(base: dict[str, Any]) -> None:
    explicit = AutoConfig.for_model(**base).to_dict()
    assert architecture_from_config(base) == architecture_from_config(explicit)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4}, None),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 4}, 64),
    ],
)
def test_qwen_window_is_read_when_it_is_the_same_in_all_layers(
    change: dict[str, Any], expected: int | None
) -> None:
    assert architecture_from_config({**QWEN2, **change}).sliding_window == expected


def test_older_and_newer_rope_keys_mean_the_same() -> None:
    older = {**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    newer = {**LLAMA, "rope_parameters": {"rope_theta": 5e5, **LLAMA3_ROPE}}
    read = architecture_from_config(older)
    assert read == architecture_from_config(newer) == architecture_from_config({**older, **newer})
    assert read.rope_theta == 5e5
    assert read.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=128
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_architecture_survives_a_round_trip_through_transformers(name: str) -> None:
    read = architecture_from_config(reference_model(name).config.to_dict())
    written = config_from_architecture(read, dtype="float32")
    assert architecture_from_config(AutoConfig.for_model(**written).to_dict()) == read


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_round_trip(name: str) -> None:
    written = json.loads(json.dumps(config_from_architecture(PRESETS[name], dtype="bfloat16")))
    assert architecture_from_config(written) == PRESETS[name]


def test_an_export_states_rope_for_older_and_newer_versions_of_transformers() -> None:
    written = config_from_architecture(PRESETS["llama-3.2-1b"], dtype="bfloat16")
    published = {**LLAMA3_ROPE, "factor": 32.0, "original_max_position_embeddings": 8192}
    assert written["rope_theta"] == 5e5
    assert written["rope_scaling"] == published
    assert written["rope_parameters"] == {**published, "rope_theta": 5e5}
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    plain = config_from_architecture(PRESETS["llama-3-8b"], dtype="bfloat16")
    assert plain["rope_scaling"] is None
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}


@examples(60)
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3", "mistral", "olmo2", "gemma3_text"]),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (8, 8)]),
    head_size=st.sampled_from([2, 16, 64]),
    layers=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 9000)),
    scaling=st.one_of(
        st.none(),
        st.builds(
            RopeScaling,
            factor=st.floats(1.0, 64.0),
            low_freq_factor=st.just(1.0),
            high_freq_factor=st.floats(2.0, 8.0),
            original_context=st.integers(1, 256),
        ),
    ),
    theta=st.floats(1e2, 1e7),
    tied=st.booleans(),
    options=st.fixed_dictionaries(
        {"full_every": st.sampled_from([1.0, 2.0, 7.0]), "query_scalar": st.sampled_from([3.0, 24.0])},
        optional={"local_rope_theta": st.just(5e3), "rope_factor": st.just(8.0)},
    ),
)
def test_any_architecture_is_read_back_as_it_was_written(
    family: str,
    heads: tuple[int, int],
    head_size: int,
    layers: int,
    window: int | None,
    scaling: RopeScaling | None,
    theta: float,
    tied: bool,
    options: dict[str, float],
) -> None:
    is_gemma = family == "gemma3_text"
    assume(not is_gemma or window is not None)
    architecture = Architecture(
        family=family,
        vocab_size=77,
        num_layers=layers,
        width=48 * heads[0],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        ffn_width=96,
        context=1024,
        rope_theta=theta,
        rope_scaling=None if is_gemma else scaling,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "olmo2", "gemma3_text"),
        tied_embeddings=tied,
        sliding_window=None if family in ("llama", "olmo2") else window,
        options=tuple((key, options[key]) for key in GEMMA3_OPTIONS if is_gemma and key in options),
    )
    written = json.loads(json.dumps(config_from_architecture(architecture, dtype="float32")))
    assert architecture_from_config(written) == architecture


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"sliding_window": 8}, "sliding_window"),
        ("llama", {"qkv_bias": True}, "qkv_bias"),
        ("qwen2", {}, "qkv_bias"),
        ("qwen3", {}, "qk_norm"),
        ("mistral", {"qk_norm": True}, "qk_norm"),
        ("llama", {"width": 63}, "heads divide"),
        ("gpt2", {}, "family is unknown"),
        ("olmo2", {}, "olmo2"),
        ("gemma3_text", {"qk_norm": True}, "gemma3_text"),
    ],
)
def test_switches_that_the_family_does_not_have_cannot_be_exported(
    family: str, change: dict[str, Any], message: str
) -> None:
    architecture = replace(architecture_from_config(LLAMA), family=family, **change)
    with pytest.raises(ModelError, match=message):
        config_from_architecture(architecture, dtype="float32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[1]", "has the wrong type"),
        (b"\xff\xfe{}", "is not JSON"),
    ],
)
def test_a_damaged_config_file_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=rf"config\.json.* {message}"):
        read_architecture(tmp_path)


def test_a_missing_folder_or_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_architecture(tmp_path)
    with pytest.raises(ModelError, match=r"nothing.config\.json is missing"):
        read_architecture(tmp_path / "nothing")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        read_architecture(tmp_path)
