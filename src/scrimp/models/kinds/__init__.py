"""The kinds of decoders, by the family that an architecture names: a new kind is one file here, and one line."""

from __future__ import annotations

import importlib
from functools import cache

from scrimp import user_code
from scrimp.config.architecture import Architecture
from scrimp.errors import ConfigError, ModelError
from scrimp.models.spec import ModelSpec

FAMILIES = {
    "llama": "scrimp.models.kinds.llama:Llama",
    "mistral": "scrimp.models.kinds.llama:Llama",
    "qwen2": "scrimp.models.kinds.llama:Llama",
    "qwen3": "scrimp.models.kinds.llama:Llama",
    "olmo2": "scrimp.models.kinds.olmo2:Olmo2",
    "mixtral": "scrimp.models.kinds.mixtral:Mixtral",
    "qwen3_moe": "scrimp.models.kinds.qwen3_moe:Qwen3Moe",
    "gemma3_text": "scrimp.models.kinds.gemma3:Gemma3",
}
"""Family (transformers' `model_type`) to the class of its specification."""

UNSUPPORTED = {
    "gemma2": "Gemma 2 caps scores and logits with tanh, which the kernels of attention and the loss do not do: "
    "use Gemma 3",
    "gemma3": "this folder holds images' layers too: use a text model, whose model_type is gemma3_text",
}
"""Families that one could take for one of these, and why they are none."""


def kind_of(family: str) -> type[ModelSpec]:
    """The class of a family's specification.

    Raises:
        ModelError: there is no such family.
    """
    if user_code.is_code(family):
        return _own_kind(family)
    if family not in FAMILIES:
        raise ModelError("family is unknown", got=repr(family), expected=f"one of {', '.join(FAMILIES)}")
    module, _, name = FAMILIES[family].partition(":")
    kind: type[ModelSpec] = getattr(importlib.import_module(module), name)
    return kind


def _own_kind(name: str) -> type[ModelSpec]:
    """The class that `model.kind` names, FILE.py:NAME.

    Raises:
        ConfigError: it is not trusted, cannot be read, or is not a specification.
    """
    found = user_code.load("model.kind", name)
    if isinstance(found, type) and issubclass(found, ModelSpec) and not found.__abstractmethods__:
        return found
    raise ConfigError(
        f"model.kind: {name} is not the specification of a model",
        got=repr(found)[:80],
        expected="a class derived from scrimp.models.ModelSpec, with all of its abstract methods",
        do="derive it from a kind in scrimp.models.kinds, and write what differs",
    )


def all_kinds() -> list[type[ModelSpec]]:
    """Every kind once."""
    return list(dict.fromkeys(map(kind_of, FAMILIES)))


@cache
def spec_of(architecture: Architecture) -> ModelSpec:
    """What a model of this architecture is.

    Raises:
        ModelError: its family is unknown.
    """
    return kind_of(architecture.family)(architecture)
