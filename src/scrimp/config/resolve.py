"""Replace every open choice of a configuration by a value, and keep the reason.

A setting left at None (or "auto") is decided from the model, the device and the settings that the user
did give; given settings are never changed. The result has no open choice left, and resolving
it again changes nothing, so the saved configuration reproduces the run.

The decisions, and why:

===================  ==============================================================================
precision            bf16 on CUDA, whose matrix units run it many times faster; fp32 on a CPU: only
                     some (AMX) run bf16 faster, and on the others it is many times slower. Rules
                     without a base are given this one.
parameters           the compute format: fp32 where the precision's base is fp32, else bf16 (half the bytes
                     of weights and gradients), then with fp32 master weights, since a bf16 weight loses
                     updates smaller than 1/256 of itself.
moments              fp32 beside fp32 parameters or master weights; bf16 beside bf16 weights, whose own rounding
                     hides that of such moments: after 300 steps the weights are 3.1 % of their way off those of
                     fp32, with fp32 moments 3.0 %. With 8 bits 5.3 %, for half of the moments' bytes: left to
                     the user (`benchmarks/moment_formats.py`).
layout.*             see `scrimp.config.layout`.
sizes of batches     see `scrimp.config.batches`.
rank                 of GaLore and Fira: a quarter of the width, as in most of GaLore's published runs.
lr, every so often   see `scrimp.config.cadence`.
schedule             see `scrimp.config.schedule_free`.
snip.*               see `scrimp.config.snip`; decided only for precision = snip.
compile              on for CUDA; off on a CPU, where compiling costs more than a short run gains.
===================  ==============================================================================

Checked in tests/config/test_resolve.py: for any given settings the result is consistent, or the
contradiction is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scrimp.config import batches, cadence, pipeline, snip
from scrimp.config.activations import check_memory
from scrimp.config.adapter import check_adapter
from scrimp.config.architecture import Architecture
from scrimp.config.axis_backends import check_backends
from scrimp.config.experts import check_experts
from scrimp.config.fields import flatten, replace_values
from scrimp.config.gathered import check_gathered
from scrimp.config.layout import (
    check_beside_layout,
    check_layout,
    check_outer,
    check_rounds,
    check_tensor_ranks,
    decide_dp,
    decide_fsdp,
)
from scrimp.config.low_rank import check_low_rank
from scrimp.config.optimizers import check_optimizer, facts_of
from scrimp.config.own_average import check_own_average, learns_from_average
from scrimp.config.reference_losses import check_reference_losses
from scrimp.config.resolved import ResolvedConfig, closed
from scrimp.config.schedule_free import check_schedule_free, decide_schedule
from scrimp.config.schema import Config, Decide, Decision, decided
from scrimp.errors import ConfigError
from scrimp.precision import parse_rules


@dataclass(frozen=True)
class Resolution:
    """A configuration without open choices, and why each was decided as it was."""

    config: ResolvedConfig
    architecture: Architecture
    reasons: dict[str, str]
    """By dotted key (`optimizer.lr`), only for what Scrimp decided."""


def resolve(config: Config, architecture: Architecture, *, device_type: str, ranks: int = 1) -> Resolution:
    """Decide what the configuration leaves open. `config.device` is left to the caller.

    Args:
        architecture: of the model to train, its vocabulary and context final.
        device_type: cpu or cuda.
        ranks: processes that train it together.

    Raises:
        ConfigError: the given settings contradict each other, the model or the number of ranks.
    """
    reasons: dict[str, str] = {}

    def decide(current: Config, key: str, decision: Callable[[], Decision]) -> Config:
        if flatten(current)[key] not in (None, "auto"):
            return current
        value, reasons[key] = decision()
        return replace_values(current, {key: value})

    # In this order: each decision reads the ones before it.
    config = _with_layout(config, ranks, decide)
    check_backends(config.layout, device_type)
    if parse_rules(config.precision).base is None:
        value, reasons["precision"] = _precision(config.precision, device_type)
        config = replace_values(config, {"precision": value})
    config = _with_formats(config, decide)
    if facts_of(config.optimizer.name).low_rank:
        config = decide(config, "optimizer.rank", lambda: _rank(architecture))
    check_outer(config, device_type, ranks)
    check_low_rank(config, architecture)
    pipeline.check_stages(config, architecture.num_layers)
    check_gathered(config, architecture.num_layers)
    config = _with_homes(config, decide)
    config = _with_batches(config, architecture, device_type, ranks, decide)
    config = _with_cadence(config, architecture, decide)
    config = decide(
        config, "train.loss_chunk", lambda: batches.decide_loss_chunk(config.train, architecture, device_type)
    )
    cadence.check(config)
    check_memory(config.memory, architecture.num_layers)
    if config.is_planned:
        config = _with_plans(config, decide)
        if "snip.first" not in reasons:
            snip.check_first(config)
    return Resolution(config=closed(config), architecture=architecture, reasons=reasons)


def _with_layout(config: Config, ranks: int, decide: Decide) -> Config:
    check_layout(config.layout, ranks)
    together = config.layout.pp * config.layout.cp * config.layout.tp
    config = pipeline.decide_stages(config, decide)
    apart = config.outer.every > 0 and config.outer.copies == 1
    config = decide(config, "layout.dp", lambda: decide_dp(config.layout, ranks // together, apart=apart))
    return decide(config, "layout.fsdp", lambda: decide_fsdp(config.layout, ranks // together))


def _with_formats(config: Config, decide: Decide) -> Config:
    """Formats of matrix products, parameters and the optimizer's states; and what does not go with them."""
    if config.is_planned:
        config = decide(config, "snip.formats", snip.decide_formats)
        config = decide(config, "snip.start", lambda: snip.decide_start(config))
        if all(getattr(config.budget, name) is None for name in snip.BUDGETS):
            config = decide(config, "budget.fp4_flops", snip.decide_share)
        snip.check_candidates(config)
    config = decide(config, "train.parameters", lambda: _parameters(config))
    config = decide(config, "optimizer.master_weights", lambda: _master_weights(config))
    config = decide(config, "optimizer.moments", lambda: _moments(config))
    _check_formats(config)
    check_optimizer(config)
    check_beside_layout(config)
    check_adapter(config)
    check_own_average(config)
    check_reference_losses(config)
    return config


def _with_homes(config: Config, decide: Decide) -> Config:
    """Where states live, of an optimizer that can update on the device alone."""
    why = f"optimizer {config.optimizer.name} updates" if not facts_of(config.optimizer.name).on_host else ""
    why = "the outer optimizer updates" if config.outer.every else why
    why = "adapters are trained" if config.adapter.rank else why
    why = "the average of the weights is" if learns_from_average(config.objective) else why
    if why:
        on_device = "device", f"{why} on the device"
        for key in ("memory.weights", "memory.gradients", "memory.optimizer"):
            config = decide(config, key, lambda: on_device)
    return config


def _with_batches(
    config: Config, architecture: Architecture, device_type: str, ranks: int, decide: Decide
) -> Config:
    """Sequences, batches and micro-batches, which all ranks that read rows must be able to share."""
    readers = decided(config.layout.dp) * decided(config.layout.fsdp)
    config = decide(
        config, "train.sequence", lambda: batches.decide_sequence(config.train, architecture, readers)
    )
    check_tensor_ranks(config, architecture)
    config = decide(config, "train.compile", lambda: _compile(config, architecture, device_type))
    check_experts(config, architecture, ranks)
    shares = readers * pipeline.fewest(config.layout)
    config = decide(
        config, "train.batch_tokens", lambda: batches.decide_tokens(config.train, architecture, shares)
    )
    batches.check(config.train, architecture, readers)
    config = decide(
        config, "train.micro_batch", lambda: batches.decide_micro_batch(config, device_type, readers)
    )
    sequences = decided(config.train.batch_tokens) // decided(config.train.sequence) // readers
    pipeline.check_micro_batches(config.layout, sequences // decided(config.train.micro_batch))
    return config


def _with_cadence(config: Config, architecture: Architecture, decide: Decide) -> Config:
    """The learning rate, and what happens every so many steps."""
    config = decide(config, "schedule.name", lambda: decide_schedule(config))
    check_schedule_free(config)
    config = decide(config, "optimizer.lr", lambda: cadence.decide_lr(config, architecture))
    ratio = "optimizer.embedding_lr_ratio"
    config = decide(config, ratio, lambda: cadence.decide_embedding_lr_ratio(config, architecture))
    config = decide(config, "schedule.warmup_steps", lambda: cadence.decide_warmup_steps(config.train.steps))
    config = decide(config, "evaluation.every", lambda: cadence.decide_eval_every(config))
    config = decide(config, "evaluation.tokens", lambda: cadence.decide_eval_tokens(config))
    config = decide(config, "checkpoint.every", lambda: cadence.decide_checkpoint_every(config))
    check_rounds(config)
    return config


def _with_plans(config: Config, decide: Decide) -> Config:
    """When formats are planned."""
    config = decide(config, "snip.first", lambda: snip.decide_first(config))
    config = decide(config, "snip.every", lambda: snip.decide_every(config))
    config = decide(config, "snip.delay", lambda: snip.decide_delay(config))
    config = decide(config, "snip.probe_every", lambda: snip.decide_probe(config))
    snip.check_cadence(config)
    snip.check_chosen_steps(config)
    return config


def with_later_choices(saved: Config) -> Config:
    """A configuration that a run was saved with, its choices that Scrimp did not have then made as it did."""
    if saved.optimizer.embedding_lr_ratio is None:
        saved = replace_values(saved, {"optimizer.embedding_lr_ratio": 1.0})
    if saved.optimizer.moments == "auto" and saved.train.parameters != "auto":
        return replace_values(saved, {"optimizer.moments": _moments(saved)[0]})
    return saved


def _precision(given: str, device_type: str) -> Decision:
    base, reason = "fp32", "fast on every CPU; on one with AMX units --precision bf16 is faster still"
    if device_type == "cuda":
        base, reason = "bf16", "CUDA's matrix units run bf16 many times faster than fp32"
    rules = parse_rules(given)
    return str(rules.with_base(base)), f"{base} as base: {reason}" if rules.rules else reason


def _parameters(config: Config) -> Decision:
    rules = config.precision_rules
    if rules.base == rules.compute:
        return rules.compute, f"the format of the GEMMs, {rules.compute}"
    return rules.compute, f"the working format beside {rules.base}, {rules.compute}"


def _master_weights(config: Config) -> Decision:
    if config.adapter.rank:
        return False, "adapters are fp32 themselves"
    if config.train.parameters == "bf16":
        return True, "bf16 parameters lose updates smaller than 1/256 of their value"
    return False, "the parameters are fp32 themselves"


def _moments(config: Config) -> Decision:
    if config.trained_format == "bf16" and config.optimizer.master_weights is False:
        return "bf16", "as fine as the bf16 parameters that they move"
    return "fp32", "as fine as the fp32 weights that they move"


def _rank(architecture: Architecture) -> Decision:
    width = architecture.width
    return max(1, width // 4), f"a quarter of the width {width:,}, as in most of GaLore's published runs"


def _compile(config: Config, architecture: Architecture, device_type: str) -> Decision:
    layout = config.layout
    if layout.ep * layout.etp > 1:
        return "off", "how many tokens the experts of a rank get, the tokens decide"
    if config.adapter.base is not None:
        return "off", "the values of stored weights would be kept in compiled blocks"
    if architecture.sparse_share is not None:
        return "off", "the matrices of sparse plus low-rank layers would be kept in compiled blocks"
    if layout.schedule in pipeline.V_SHAPED:
        return (
            "off",
            f"compiled blocks make all gradients at once, and {layout.schedule} makes them apart",
        )
    if device_type == "cuda":
        return "on", "fuses the pointwise work of a block on CUDA"
    return "off", f"compiling costs more than it gains on {device_type}"


def _check_formats(config: Config) -> None:
    train = config.train
    if config.precision_rules.compute == "fp32" and train.parameters == "bf16":
        raise ConfigError(
            "train.parameters contradicts precision",
            got="bf16 parameters for activations in fp32",
            expected="fp32 parameters, or another base of precision than fp32",
            do="set precision = bf16, or leave train.parameters at auto",
        )
    if train.parameters == "fp32" and config.optimizer.master_weights:
        raise ConfigError(
            "optimizer.master_weights contradicts train.parameters",
            got="an fp32 copy of parameters that are fp32 themselves",
            expected="train.parameters bf16, or no master weights",
            do="leave optimizer.master_weights out, or set train.parameters = bf16 and precision = bf16",
        )
