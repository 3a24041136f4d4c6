"""LoRA: low-rank adapters beside frozen weights, as settings and as a part of an architecture.

    y = x W^T + (alpha / r) (x A^T) B^T

W, of (out, in), is the base's (`model.weights`) and stays as it is; A, of (r, in), and B, of (out, r), are trained.
The weights W of the blocks may be kept as the codes of recipes (`adapter.base`), by rules of the form of `precision`.

alpha is 2 r where nobody says it: a factor of 2 whatever the rank.

What is not carried out beside adapters is refused here, by name.

Source   Hu et al. 2021, arXiv 2106.09685
Checked  tests/config/test_adapter.py
"""

from __future__ import annotations

import dataclasses

from scrimp.config.architecture import Adapter
from scrimp.config.layout import degrees_in_model, off_device
from scrimp.config.optimizers import facts_of
from scrimp.config.schema import AdapterConfig, Config
from scrimp.errors import ConfigError
from scrimp.precision.stored import AS_IT_IS, parse_stored


def adapter_of(config: Config) -> Adapter | None:
    """What `[adapter]` describes; None: every weight is trained."""
    settings = config.adapter
    if settings.rank == 0:
        return None
    base = settings.base or ""
    return Adapter(settings.rank, settings.alpha or 2.0 * settings.rank, settings.targets, base)


def check_adapter(config: Config) -> None:
    """Refuse adapters without a base, settings of adapters without them, and what is not carried out beside them.

    Args:
        config: with formats, layout and the optimizer's decided.

    Raises:
        ConfigError: with the setting to change.
    """
    settings = config.adapter
    if settings.rank == 0:
        if settings != AdapterConfig():
            fields = (
                (one.name, getattr(settings, one.name), one.default) for one in dataclasses.fields(settings)
            )
            given = [f"adapter.{name} {value}" for name, value, default in fields if value != default]
            raise ConfigError(
                "adapter.alpha, adapter.targets and adapter.base are of adapters, and there are none",
                got=", ".join([*given, "adapter.rank 0"]),
                do="set adapter.rank, or leave them out",
            )
        return
    if config.model.weights is None:
        raise ConfigError(
            "adapters need a base model, whose weights stay as they are",
            got=f"adapter.rank {settings.rank} without model.weights",
            do="name a Hugging Face folder or a run with --model.weights, or leave adapter.rank out",
        )
    _check_base(config)
    for key, value in _beside(config):
        raise ConfigError(
            f"{key} {value} is not carried out beside adapters yet",
            got=f"adapter.rank {settings.rank}",
            do=f"change {key}, or leave adapter.rank out",
        )


def _check_base(config: Config) -> None:
    """Refuse what stored weights do not go with."""
    if config.adapter.base is None:
        return
    if all(rule.formats == AS_IT_IS for rule in parse_stored(config.adapter.base)):
        raise ConfigError("adapter.base stores nothing", got=config.adapter.base, do="leave adapter.base out")
    fsdp = config.layout.fsdp or 1
    if fsdp > 1:
        raise ConfigError(
            "weights that adapter.base stores are not shared among ranks yet",
            got=f"layout.fsdp {fsdp}",
            do=f"set --layout.dp {fsdp} --layout.fsdp 1, copies of them, or leave adapter.base out",
        )
    if config.train.compile == "on":
        raise ConfigError(
            "weights that adapter.base stores are not compiled yet",
            got="train.compile on",
            do="leave train.compile out, or adapter.base",
        )


def _beside(config: Config) -> list[tuple[str, str]]:
    """Settings that adapters do not go with."""
    optimizer = config.optimizer
    refused = [("precision", config.precision)] * config.is_planned
    refused += degrees_in_model(config.layout)
    refused += [("outer.every", str(config.outer.every))] * (config.outer.every > 0)
    # These look at a whole matrix, which A and B are not: it is their product that moves.
    whole = optimizer.name == "muon" or facts_of(optimizer.name).low_rank
    refused += [("optimizer.name", optimizer.name)] * whole
    refused += [("optimizer.from_weights", "true")] * optimizer.from_weights
    ratio = optimizer.embedding_lr_ratio  # of what is not trained
    refused += [("optimizer.embedding_lr_ratio", str(ratio))] * (ratio not in (None, 1))
    refused += [("optimizer.master_weights", "true")] * bool(optimizer.master_weights)
    refused += off_device(config.memory)
    return refused
