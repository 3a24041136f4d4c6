"""Settings of models with routed experts, and what is not carried out beside them yet.

--model.capacity-factor    most tokens of an expert in training
--layout.ep, --layout.etp  ranks that share the experts of a block, and those that share each of them
"""

from __future__ import annotations

from dataclasses import replace

from scrimp.config.architecture import Architecture
from scrimp.config.schema import Config
from scrimp.errors import ConfigError

CAPACITY = "capacity_factor"


def has_experts(architecture: Architecture) -> bool:
    """Whether tokens choose among experts."""
    return architecture.option("experts", 0) > 0


def with_capacity(architecture: Architecture, factor: float | None) -> Architecture:
    """An architecture whose experts take at most so many tokens in training, by their mean; None: as it is.

    Raises:
        ConfigError: it has no experts.
    """
    if factor is None:
        return architecture
    if not has_experts(architecture):
        raise ConfigError(
            "model.capacity_factor is of models with routed experts",
            got=f"{factor:g} beside a {architecture.family} model",
            do="leave model.capacity_factor out, or take a preset with experts, such as mixtral-8m",
        )
    others = tuple(option for option in architecture.options if option[0] != CAPACITY)
    return replace(architecture, options=(*others, (CAPACITY, factor)))


def check_experts(config: Config, architecture: Architecture, ranks: int) -> None:
    """Refuse what experts cannot share, and what is not carried out beside them yet.

    Args:
        config: with layout and precision decided.
        ranks: of the run, as many for each stage of a pipeline.

    Raises:
        ConfigError: with the setting to change.
    """
    ep, etp = config.layout.ep, config.layout.etp
    if not has_experts(architecture):
        if ep * etp > 1:
            key = "layout.ep" if ep > 1 else "layout.etp"
            raise ConfigError(
                f"{key} shares experts, and this model has none",
                got=f"{max(ep, etp):,} beside a {architecture.family} model",
                do=f"leave {key} out",
            )
        return
    in_seconds = ("step_seconds", "speedup", "divergence")  # the fastest plan within a harm, on CUDA
    for key in in_seconds if config.is_planned else ():
        if getattr(config.budget, key) is not None:
            raise ConfigError(
                f"budget.{key} is not carried out for models with routed experts yet",
                got=f"a {architecture.family} model, whose grouped products nothing has timed",
                do="give budget.fp4_flops instead",
            )
    _check_degrees(architecture, ep, etp, ranks // config.layout.pp)
    if ranks > 1:
        _check_beside_ranks(config)


def _check_degrees(architecture: Architecture, ep: int, etp: int, ranks: int) -> None:
    experts = int(architecture.option("experts", 0))
    width = int(architecture.option("expert_width", architecture.ffn_width))
    for key, what, count, degree in (
        ("layout.ep x layout.etp", "the ranks of a stage", ranks, ep * etp),
        ("layout.ep", "the experts of a block", experts, ep),
        ("layout.etp", "the width of an expert", width, etp),
    ):
        if count % degree:
            raise ConfigError(
                f"{key} does not divide {what}",
                got=f"{count:,} over {degree:,}",
                expected=f"a divisor of {count:,}",
                do="choose other degrees, or leave them out: the experts are then sharded over all ranks",
            )


def _check_beside_ranks(config: Config) -> None:
    layout = config.layout
    if config.outer.every:
        raise ConfigError(
            "outer.every is not carried out for models with routed experts yet",
            got=f"outer.every {config.outer.every:,}",
            do="leave outer.every out",
        )
    shares = layout.ep * layout.etp > 1
    if config.is_planned and config.snip.gains == "exact" and (shares or layout.tp * layout.cp > 1):
        raise ConfigError(
            "snip.gains exact is not carried out for routed experts beside layout.ep, etp, tp and cp",
            got=f"layout.ep {layout.ep:,}, etp {layout.etp:,}, tp {layout.tp:,}, cp {layout.cp:,}",
            do="leave snip.gains out, or use layout.dp and layout.fsdp alone",
        )
    rounds = config.train.parameters == "bf16" and not config.optimizer.master_weights
    moments = config.optimizer.moments
    kept = config.budget.saved_bytes
    if kept is not None and layout.etp > 1:
        raise ConfigError(
            "budget.saved_bytes is not carried out beside layout.etp yet",
            got=f"{kept:g} with layout.etp {layout.etp:,}, whose ranks keep pieces of some inputs and all of others",
            do="give budget.fp4_flops instead, or leave layout.etp out",
        )
    refused: list[tuple[str, str]] = [("optimizer.moments", moments)] * (moments != "fp32")
    refused += [("optimizer.master_weights", "false")] * rounds
    refused += [("train.compile", config.train.compile)] * (config.train.compile == "on")
    for key, value in refused if shares else []:
        raise ConfigError(
            f"{key} {value} is not carried out beside layout.ep and layout.etp yet",
            got=f"layout.ep {layout.ep:,}, layout.etp {layout.etp:,}",
            do=f"change {key}, or leave them out: the experts are then sharded over all ranks",
        )
