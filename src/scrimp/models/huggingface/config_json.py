"""config.json to Architecture and back.

Each kind of decoder reads and writes its own (`ModelSpec.read_config`, `write_config`), with what all have in common
from `keys`. Keys that transformers itself ignores for a model type, or that only concern generation, are ignored here
too.

Checked  tests/models/test_huggingface_config.py (table of refusals; round trips through transformers' config classes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scrimp.config.architecture import Architecture
from scrimp.errors import ConfigError, ModelError
from scrimp.json_files import read_json
from scrimp.models.huggingface.keys import JSON, Keys, refuse_unsupported
from scrimp.models.kinds import FAMILIES, UNSUPPORTED, kind_of, spec_of
from scrimp.models.spec import ModelSpec

_DO = "give the folder of a Hugging Face model (config.json and *.safetensors)"
_MAX_FILE_BYTES = 2**24


def read_architecture(folder: Path) -> Architecture:
    """The architecture of a Hugging Face folder, from its config.json alone."""
    file = Path(folder) / "config.json"
    config = read_json(file, dict[str, Any], error=ModelError, do=_DO, at_most=_MAX_FILE_BYTES)
    return architecture_from_config(config, where=str(file))


def architecture_from_config(config: Mapping[str, Any], *, where: str = "config.json") -> Architecture:
    """Read the keys of a config.json; ModelError names the first that cannot be supported."""
    keys = Keys(config, where)
    family = _family(keys)
    refuse_unsupported(keys)
    try:
        return kind_of(family).read_config(keys, family)
    except ConfigError as error:
        raise ModelError(
            f"{where}: {error.what}", got=error.got, expected=error.expected, do=error.do
        ) from None


def _family(keys: Keys) -> str:
    family = keys.config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        why = UNSUPPORTED.get(str(family))
        raise keys.refuse("model_type", expected=f"one of {', '.join(FAMILIES)}", do=why)
    classes, own = keys.config.get("architectures"), kind_of(family).huggingface_classes[family]
    if classes and (not isinstance(classes, list) or own not in classes):
        raise keys.refuse("architectures", expected=own, do="export a causal language model")
    return family


def _class_of(spec: ModelSpec) -> str:
    """The class of transformers that loads a model."""
    family = spec.architecture.family
    if family not in spec.huggingface_classes:
        raise ModelError(
            "transformers has no class for this kind of model",
            got=family,
            expected=f"one of {', '.join(FAMILIES)}",
            do="read the run's own checkpoints: safetensors, by the names of scrimp's parameters",
        )
    return spec.huggingface_classes[family]


def config_from_architecture(
    architecture: Architecture, *, dtype: str, bos_id: int | None = None, eos_ids: Sequence[int] = ()
) -> JSON:
    """The config.json of an architecture; ModelError if its family cannot express it."""
    spec = spec_of(architecture)
    config: JSON = {
        **spec.write_config(),
        "architectures": [_class_of(spec)],
        "bos_token_id": bos_id,
        "dtype": dtype,
        "eos_token_id": list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None),
        "model_type": architecture.family,
        "torch_dtype": dtype,
    }
    return dict(sorted(config.items()))
