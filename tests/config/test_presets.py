"""Presets against transformers' models of the same configuration and the published counts."""

from __future__ import annotations

import os

import pytest
import torch

from scrimp.config.presets import OWN_PRESETS, PRESETS, preset
from scrimp.errors import ConfigError
from scrimp.models import spec_of
from scrimp.models.huggingface.config_json import config_from_architecture

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# name: parameters of the published weights; context, RoPE base, norm epsilon, vocabulary of config.json
PUBLISHED = {
    "llama-3.2-1b": (1_235_814_400, 131_072, 5e5, 1e-5, 128_256),
    "llama-3.2-3b": (3_212_749_824, 131_072, 5e5, 1e-5, 128_256),
    "llama-3-8b": (8_030_261_248, 8_192, 5e5, 1e-5, 128_256),
    "llama-3.1-8b": (8_030_261_248, 131_072, 5e5, 1e-5, 128_256),
    "llama-3-70b": (70_553_706_496, 8_192, 5e5, 1e-5, 128_256),
    "llama-3.1-70b": (70_553_706_496, 131_072, 5e5, 1e-5, 128_256),
    "qwen2.5-0.5b": (494_032_768, 32_768, 1e6, 1e-6, 151_936),
    "qwen2.5-1.5b": (1_543_714_304, 131_072, 1e6, 1e-6, 151_936),
    "qwen2.5-3b": (3_085_938_688, 32_768, 1e6, 1e-6, 151_936),
    "qwen2.5-7b": (7_615_616_512, 131_072, 1e6, 1e-6, 152_064),
    "qwen2.5-14b": (14_770_033_664, 131_072, 1e6, 1e-5, 152_064),
    "qwen2.5-32b": (32_763_876_352, 131_072, 1e6, 1e-5, 152_064),
    "qwen2.5-72b": (72_706_203_648, 131_072, 1e6, 1e-5, 152_064),
    "qwen3-0.6b": (596_049_920, 40_960, 1e6, 1e-6, 151_936),
    "qwen3-1.7b": (1_720_574_976, 40_960, 1e6, 1e-6, 151_936),
    "qwen3-4b": (4_022_468_096, 40_960, 1e6, 1e-6, 151_936),
    "qwen3-8b": (8_190_735_360, 40_960, 1e6, 1e-6, 151_936),
    "qwen3-14b": (14_768_307_200, 40_960, 1e6, 1e-6, 151_936),
    "qwen3-32b": (32_762_123_264, 40_960, 1e6, 1e-6, 151_936),
    "olmo2-1b": (1_484_916_736, 4_096, 5e5, 1e-6, 100_352),
    "gemma3-270m": (268_098_176, 32_768, 1e6, 1e-6, 262_144),
    "gemma3-1b": (999_885_952, 32_768, 1e6, 1e-6, 262_144),
    "mixtral-8x7b": (46_702_792_704, 32_768, 1e6, 1e-5, 32_000),
    "qwen3-30b-a3b": (30_532_122_624, 40_960, 1e6, 1e-6, 151_936),
    "mistral-7b": (7_241_732_096, 32_768, 1e4, 1e-5, 32_000),
    "mistral-7b-v0.3": (7_248_023_552, 32_768, 1e6, 1e-5, 32_768),
}


def test_every_preset_is_scrimps_own_or_in_the_published_table() -> None:
    assert set(PRESETS) == OWN_PRESETS | set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_preset_has_the_values_of_its_config_file(name: str) -> None:
    parameters, context, theta, eps, vocabulary = PUBLISHED[name]
    a = preset(name)
    assert spec_of(a).parameters == parameters
    assert (a.context, a.rope_theta, a.norm_eps, a.vocab_size) == (context, theta, eps, vocabulary)
    stretched = {"llama-3.2-1b": 32.0, "llama-3.2-3b": 32.0, "llama-3.1-8b": 8.0, "llama-3.1-70b": 8.0}
    if name in stretched:
        assert a.rope_scaling is not None
        assert (a.rope_scaling.factor, a.rope_scaling.original_context) == (stretched[name], 8192)
        assert (a.rope_scaling.low_freq_factor, a.rope_scaling.high_freq_factor) == (1.0, 4.0)
    else:
        assert a.rope_scaling is None
    windows = {"mistral-7b": 4096, "gemma3-270m": 512, "gemma3-1b": 512}
    assert a.sliding_window == windows.get(name)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.every(4)
def test_transformers_model_of_the_same_configuration_has_as_many_parameters(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_from_architecture(preset(name), dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(p.numel() for p in model.parameters()) == spec_of(preset(name)).parameters


@pytest.mark.parametrize("name", sorted(OWN_PRESETS))
def test_own_preset_is_as_large_as_its_name_says_and_shaped_for_gemm_tiles(name: str) -> None:
    a = preset(name)
    number = name.rpartition("-")[2]
    stated = float(number[:-1]) * {"m": 1e6, "b": 1e9}[number[-1]]
    assert abs(spec_of(a).parameters / stated - 1) < 0.1
    assert a.width % 64 == a.ffn_width % 64 == a.vocab_size % 64 == 0
    # Of experts the width of all that a token meets.
    inner = a.option("experts_per_token", 1) * a.option("expert_width", a.ffn_width)
    assert inner % 64 == 0
    assert abs(inner - a.width * 8 / 3) < 64
    assert a.head_size in (32, 64, 128)
    assert a.attention_width == a.width


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"llama-300x.*did you mean llama-300m"):
        preset("llama-300x")
    with pytest.raises(ConfigError, match="one of llama-3m"):
        preset("something else")
