"""Adapters as a folder that peft loads beside the base model.

Problem  Scrimp keeps the adapters of layers that are stacked in one matrix side by side; peft has one pair of matrices
         for each of transformers' layers.
Method   The rows of A belong to the stacked layers, r to each, and those of B as the weight's do: both are cut along
         their rows and written under transformers' names::

             base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     (r, in)
             base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight     (out, r)

         adapter_config.json names rank, alpha and the layers; the numbers are the same.
Checked  tests/models/test_adapter_files.py: by the formula in transformers' model, and by peft where it is installed
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from scrimp.config.architecture import Adapter, Architecture
from scrimp.errors import ModelError
from scrimp.files import whole_folder
from scrimp.models.kinds import spec_of
from scrimp.models.spec import LinearSpec, ModelSpec, full_name

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(
    adapters: Mapping[str, Tensor],
    architecture: Architecture,
    out: Path,
    *,
    base: Path | None,
    save_tokenizer: Callable[[Path], object],
) -> None:
    """Write a folder for peft, and the tokenizer through `save_tokenizer(folder)`.

    Args:
        adapters: the matrices by their names in the model.
        base: Hugging Face folder of the base, which peft loads where nobody names another; None: there is none.

    The folder `out` must not exist or be empty. It appears complete or not at all.
    """
    adapter, spec = architecture.adapter, spec_of(architecture)
    if adapter is None:
        raise ModelError(
            "there are no adapters to export", do="leave --adapter out: the whole model is exported"
        )
    found = {
        name: tensor.contiguous()
        for index, block in enumerate(spec.blocks)
        for linear in block.linears
        if linear.rank
        for name, tensor in _pieces(adapters, spec, index, linear)
    }
    with whole_folder(out) as folder:
        save_file(found, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(_config(adapter, spec, base), indent=2) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        save_tokenizer(folder)


def _pieces(
    adapters: Mapping[str, Tensor], spec: ModelSpec, index: int, linear: LinearSpec
) -> Iterator[tuple[str, Tensor]]:
    """Both matrices of each layer that is stacked in one, by peft's names."""
    own = full_name(index, linear.name)
    a, b = adapters[f"{own}.lora_a"], adapters[f"{own}.lora_b"]
    names = spec.names_elsewhere[linear.name].huggingface
    for name, low, high in zip(names, a.split(linear.rank), b.split(linear.stacked), strict=True):
        theirs = f"base_model.model.model.layers.{index}.{name}"
        yield f"{theirs}.lora_A.weight", low
        yield f"{theirs}.lora_B.weight", high


def _config(adapter: Adapter, spec: ModelSpec, base: Path | None) -> dict[str, object]:
    names = [
        name
        for linear in spec.shapes.values()
        if linear.rank
        for name in spec.names_elsewhere[linear.name].huggingface
    ]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": names,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
