"""The kinds of decoders, by the family that an architecture names: a new kind is one file here, and one line."""

from __future__ import annotations

import importlib
from functools import cache

from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError
from scrimp.models.spec import ModelSpec

FAMILIES = {
    "llama": "scrimp.models.kinds.llama:Llama",
    "mistral": "scrimp.models.kinds.llama:Llama",
    "qwen2": "scrimp.models.kinds.llama:Llama",
    "qwen3": "scrimp.models.kinds.llama:Llama",
}
"""Family (transformers' `model_type`) to the class of its specification."""

UNSUPPORTED: dict[str, str] = {}
"""Families that one could take for one of these, and why they are none."""


def kind_of(family: str) -> type[ModelSpec]:
    """The class of a family's specification.

    Raises:
        ModelError: there is no such family.
    """
    if family not in FAMILIES:
        raise ModelError("family is unknown", got=repr(family), expected=f"one of {', '.join(FAMILIES)}")
    module, _, name = FAMILIES[family].partition(":")
    kind: type[ModelSpec] = getattr(importlib.import_module(module), name)
    return kind


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
