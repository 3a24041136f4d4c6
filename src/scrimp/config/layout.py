"""The degrees of a layout: given, checked against the number of ranks, and decided where they are open.

    ranks = pp x dp x fsdp x cp x tp

Degrees that are left out are filled up: `fsdp` takes all that the others leave, and `dp` all that a given `fsdp`
leaves.
Of all layouts fsdp over all ranks takes the least memory of each, and asks nothing of the model's sizes: it is what
a run gets that says nothing, unless a search on its ranks finds a faster one (`scrimp.training.chosen_layout`).
`tp` is 1 unless it is given, since it asks a lot of them (`check_tensor_ranks`).

Checked  tests/config/test_layout.py
"""

from __future__ import annotations

import math
from collections.abc import Collection

from scrimp.config.architecture import Architecture
from scrimp.config.axis_backends import axis_backends
from scrimp.config.experts import has_experts
from scrimp.config.fields import replace_values
from scrimp.config.optimizers import facts_of
from scrimp.config.pipeline import fits
from scrimp.config.schema import Config, LayoutConfig, MemoryConfig, decided
from scrimp.errors import ConfigError

OPEN_AXES = ("dp", "fsdp")
"""Those that may be left out."""
AXES = ("pp", *OPEN_AXES, "cp", "tp")
"""Their product is the number of ranks."""
_ON_DEVICE = ("auto", "device", "0")
"""Values of `memory.weights`, `.gradients`, `.optimizer` and `.update` that leave all on the device."""


def ranks_of(layout: LayoutConfig) -> int:
    """Ranks that a layout asks for by the degrees that are given: what is planned for where nobody has started any."""
    return math.prod(_given(layout).values())


def degrees_in_model(layout: LayoutConfig) -> list[tuple[str, str]]:
    """Dotted keys and values of the degrees by which ranks share layers, experts or rows."""
    found = {key: getattr(layout, key) for key in ("pp", "cp", "tp", "ep", "etp")}
    return [(f"layout.{key}", f"{value:,}") for key, value in found.items() if value > 1]


def off_device(memory: MemoryConfig) -> list[tuple[str, str]]:
    """Dotted keys and values of the settings that take weights, gradients, states or the update off the device."""
    found = {key: getattr(memory, key) for key in ("weights", "gradients", "optimizer", "update")}
    return [(f"memory.{key}", value) for key, value in found.items() if value not in _ON_DEVICE]


def for_ranks(config: Config, ranks: int, given: Collection[str]) -> Config:
    """A saved configuration on these ranks.

    On another number of them its degrees, back ends and gathered blocks are open again, and wherever the saved
    micro-batch no longer divides a rank's rows, so is that, with the chunks of the loss that follow from it; but for
    what the user gave.
    """
    if ranks_of(config.layout) != ranks:
        keys = (*AXES, "ep", "etp", "backends", "gathered")
        before = {key: getattr(LayoutConfig(), key) for key in keys if f"layout.{key}" not in given}
        config = replace_values(config, {f"layout.{key}": value for key, value in before.items()})
    moves = any(key == "device" or key.startswith("layout.") for key in given)
    if moves and "layout.backends" not in given:  # of other axes, or of another device
        config = replace_values(config, {"layout.backends": None})
    config = _without_stages(config, given)
    train = config.train
    readers = max(1, ranks // (config.layout.pp * config.layout.cp * config.layout.tp))
    if train.batch_tokens is None or train.sequence is None or train.micro_batch is None:
        return config
    micro_batches, rest = divmod(train.batch_tokens // train.sequence // readers, train.micro_batch)
    if rest == 0 and fits(config.layout, micro_batches):
        return config
    open_again = {key: None for key in ("train.micro_batch", "train.loss_chunk") if key not in given}
    return replace_values(config, open_again)


def _without_stages(config: Config, given: Collection[str]) -> Config:
    """With all that is said of a pipeline's stages open again, where there is none, or another one is given."""
    keys = ["virtual", "schedule", "stages"]
    if config.layout.pp > 1 and not any(f"layout.{key}" in given for key in ("pp", *keys)):
        return config
    before = {f"layout.{key}": getattr(LayoutConfig(), key) for key in keys}
    return replace_values(config, {key: value for key, value in before.items() if key not in given})


def check_layout(layout: LayoutConfig, ranks: int) -> None:
    """Refuse degrees of which the product cannot be the number of ranks.

    Raises:
        ConfigError: with the nearest number of ranks that there are degrees for.
    """
    given = _given(layout)
    product, is_open = math.prod(given.values()), any(axis not in given for axis in OPEN_AXES)
    if product == ranks or (is_open and ranks % product == 0):
        return
    nearest = max(1, round(ranks / product)) * product if is_open else product
    raise ConfigError(
        "the layout does not fit the number of ranks",
        got=f"{' x '.join(f'layout.{axis} {degree:,}' for axis, degree in given.items())} "
        f"on {ranks:,} rank{'s' * (ranks > 1)}",
        expected=f"{'a multiple of ' * is_open}{product:,} ranks",
        do=f"start {nearest:,} ranks (`scrimp launch --ranks {nearest} train ...`), or leave the degrees out",
    )


def check_beside_layout(config: Config) -> None:
    """Refuse what is not carried out on several ranks yet, by name.

    Args:
        config: with the layout decided.

    Raises:
        ConfigError: with the setting to change.
    """
    ranks, memory, name = ranks_of(config.layout), config.memory, config.optimizer.name
    if ranks == 1:
        return
    # FSDP2 has them where it gathers and reduces.
    refused = [one for one in off_device(memory) if one[0] != "memory.optimizer"]
    if config.is_planned and not facts_of(name).planned_on_ranks:
        refused.append(("precision", f"{config.precision} beside optimizer.name {name}"))
    for key, value in refused:
        raise ConfigError(
            f"{key} {value} is not carried out on several ranks yet",
            got=f"{ranks:,} ranks",
            do=f"change {key}, or train in one process",
        )


def check_outer(config: Config, device_type: str, ranks: int) -> None:
    """Refuse what copies that train alone for some steps cannot do, by name.

    Args:
        config: with layout, parameters, master weights and moments decided.
        device_type: cpu or cuda.
        ranks: of the run.

    Raises:
        ConfigError: with the setting to change.
    """
    memory, optimizer, copies = config.memory, config.optimizer, config.outer.copies
    if config.outer.every == 0:
        if copies > 1:
            raise ConfigError(
                "copies that are jobs of their own exchange at the end of rounds, and there are none",
                got=f"{copies} copies with outer.every 0",
                do="set outer.every: local steps between exchanges",
            )
        return
    if config.layout.dp == 1 and ranks > 1 and copies == 1:
        raise ConfigError(
            "outer.every is of copies that train alone for some steps, and there is one copy",
            got=f"layout.dp 1 on {ranks:,} ranks",
            expected="layout.dp of at least 2",
            do="set layout.dp, or leave outer.every out",
        )
    refused = [("precision", config.precision)] * config.is_planned
    # Subspaces of several copies have no mean.
    refused += [("optimizer.name", optimizer.name)] * facts_of(optimizer.name).low_rank
    # The exchange has a group of its own.
    refused += [("layout.backends", config.layout.backends or "")] * (
        "dp" in axis_backends(config.layout.backends)
    )
    # Of one CUDA stream the exchange would be a part of the next round, not beside it.
    refused += [("outer.overlap", "on CUDA")] * (config.outer.overlap and device_type == "cuda")
    if copies > 1:
        # Within a copy gradients are added up in every step, and the group of copies is made anew for each exchange.
        refused += [("layout.dp", str(config.layout.dp))] * ((config.layout.dp or 1) > 1)
        refused += [("outer.overlap", "beside --copies")] * config.outer.overlap
        refused += [("outer.exchange", "fp8 beside --copies")] * (config.outer.exchange != "fp32")
    refused += [("optimizer.moments", optimizer.moments)] * (optimizer.moments == "8bit")
    refused += [("optimizer.master_weights", "false")] * _rounds(config)
    refused += off_device(memory)
    for key, value in refused:
        raise ConfigError(
            f"{key} {value} is not carried out beside outer.every",
            got=f"outer.every {config.outer.every:,}",
            do=f"change {key}, or leave outer.every out",
        )


def check_rounds(config: Config) -> None:
    """Refuse evaluations and checkpoints within a round of copies that are jobs of their own: they have no common
    weights there.

    Raises:
        ConfigError: with the setting to change.
    """
    if config.outer.copies == 1:
        return
    for key, every in (("evaluation", config.evaluation.every), ("checkpoint", config.checkpoint.every)):
        if (every or 0) % config.outer.every:
            raise ConfigError(
                f"{key}.every is not a multiple of outer.every",
                got=f"{every:,} beside outer.every {config.outer.every:,}",
                expected="steps at which copies that are jobs of their own have met",
                do=f"change {key}.every, or leave it out",
            )


def decide_dp(layout: LayoutConfig, ranks: int, *, apart: bool = False) -> tuple[int, str]:
    """Copies of the model, and why.

    Args:
        ranks: that pp, cp and tp leave.
        apart: copies take steps of their own (`outer.every`).
    """
    if layout.fsdp is None and apart:
        return (
            ranks,
            f"a copy on each of {ranks:,} ranks, which outer.every is of" if ranks > 1 else "one rank",
        )
    if layout.fsdp is None:
        return 1, "one copy of the model, sharded over all ranks" if ranks > 1 else "one rank"
    return ranks // layout.fsdp, f"{ranks:,} ranks / layout.fsdp {layout.fsdp:,}"


def decide_fsdp(layout: LayoutConfig, ranks: int) -> tuple[int, str]:
    """Ranks of a copy, and why; after `decide_dp`.

    Args:
        ranks: that pp, cp and tp leave.
    """
    copies = decided(layout.dp)
    return ranks // copies, f"{ranks:,} ranks / layout.dp {copies:,}" if ranks > 1 else "one rank"


def check_tensor_ranks(config: Config, architecture: Architecture) -> None:
    """Refuse what ranks that compute layers together cannot share, and what is not carried out beside them yet.

    Args:
        config: with the layout and the sequence decided.

    Raises:
        ConfigError: with the setting to change.
    """
    ranks, a = config.layout.tp, architecture
    if ranks == 1:
        return
    for what, count in (
        ("attention heads", a.num_heads),
        ("key heads", a.num_kv_heads),
        *([] if has_experts(a) else [("the MLP's width", a.ffn_width)]),
        ("tokens of a sequence", decided(config.train.sequence)),
    ):
        if count % ranks:
            raise ConfigError(
                f"layout.tp does not divide {what}",
                got=f"{count:,} on {ranks:,} ranks",
                expected="a number of ranks that divides them",
                do="choose another layout.tp, or leave it out: layout.fsdp asks nothing of the model",
            )
    refused = [("layout.cp", str(config.layout.cp))] * (config.layout.cp > 1)
    refused += [("optimizer.moments", config.optimizer.moments)] * (config.optimizer.moments != "fp32")
    refused += [("optimizer.master_weights", "false")] * _rounds(config)
    refused += [
        (f"budget.{key}", getattr(config.budget, key))
        for key in ("device_memory", "host_memory")
        if getattr(config.budget, key) not in (None, "auto")
    ]
    refused += [
        (f"budget.{key}", f"{getattr(config.budget, key):g}")
        # Nobody has timed pieces of GEMMs, and ranks keep whole inputs of some layers and pieces of others.
        for key in ("step_seconds", "speedup", "divergence", "saved_bytes")
        if getattr(config.budget, key) is not None
    ]
    for key, value in refused:
        raise ConfigError(
            f"{key} {value} is not carried out beside layout.tp yet",
            got=f"layout.tp {ranks:,}",
            do=f"change {key}, or use layout.fsdp instead",
        )


def _rounds(config: Config) -> bool:
    """Whether weights are updated in bf16."""
    return config.train.parameters == "bf16" and not config.optimizer.master_weights


def _given(layout: LayoutConfig) -> dict[str, int]:
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    is_open = {axis: degrees[axis] == getattr(LayoutConfig(), axis) for axis in AXES}
    return {axis: degree for axis, degree in degrees.items() if not is_open[axis]}
