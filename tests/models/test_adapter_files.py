"""Folders for peft: their numbers by the formula in transformers' own model, and by peft."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import random_tokens, reference_folder
from safetensors.torch import load_file

from scrimp.config import Adapter
from scrimp.errors import ModelError
from scrimp.models.huggingface.adapter_files import CONFIG_FILE, WEIGHTS_FILE, export_adapter
from scrimp.models.huggingface.config_json import read_architecture
from scrimp.models.huggingface.load import load_weights
from scrimp.models.model import Model, build_model

NAMES = ("llama", "qwen2 tied", "gemma3")


def saved(name: str, folder: Path, targets: str) -> tuple[Any, Model, Path]:
    """transformers' model, ours with adapters on its weights, and their folder."""
    reference, base = reference_folder(name, folder / "base")
    adapter = Adapter(3, 7.0, targets)
    model = build_model(dataclasses.replace(read_architecture(base), adapter=adapter))
    load_weights(model, base)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.trained().values():
            parameter.normal_(0.0, 0.2, generator=generator)
    out = folder / "adapter"
    export_adapter(model.trained(), model.architecture, out, base=base, save_tokenizer=lambda path: None)
    return reference, model, out


@pytest.mark.parametrize("targets", ["all", "attention.qkv,mlp.down"])
@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_adapters_of_transformers_layers(name: str, targets: str, tmp_path: Path) -> None:
    reference, model, out = saved(name, tmp_path, targets)
    config, numbers = json.loads((out / CONFIG_FILE).read_text()), load_file(out / WEIGHTS_FILE)
    layers = dict(reference.named_modules())
    wanted = {layer for layer in layers if any(layer.endswith(f".{end}") for end in config["target_modules"])}
    assert len(wanted) == model.spec.num_blocks * (7 if targets == "all" else 4)
    with torch.no_grad():
        for layer in wanted:
            a, b = (numbers.pop(f"base_model.model.{layer}.lora_{end}.weight") for end in "AB")
            assert a.shape[0] == b.shape[1] == config["r"] == 3
            layers[layer].weight += config["lora_alpha"] / config["r"] * b @ a
        assert not numbers
        tokens = random_tokens()
        expected = reference(tokens).logits
        found = model.logits(model(tokens))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("targets", ["all", "attention.qkv,mlp.down"])
@pytest.mark.parametrize("name", NAMES)
def test_peft_gives_the_same_logits(name: str, targets: str, tmp_path: Path) -> None:
    from peft import PeftModel  # two seconds, which other tests need not wait for

    reference, model, out = saved(name, tmp_path, targets)
    with torch.no_grad():
        tokens = random_tokens()
        before = reference(tokens).logits
        theirs = PeftModel.from_pretrained(reference, out)(tokens).logits
        found = model.logits(model(tokens))
    assert (theirs - before).abs().max() > 0.1
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    _, base = reference_folder("llama", tmp_path)
    with pytest.raises(ModelError, match="no adapters"):
        export_adapter(
            {}, read_architecture(base), tmp_path / "out", base=None, save_tokenizer=lambda path: None
        )
