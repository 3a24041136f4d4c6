"""Replace every open choice of a configuration by a value, and keep the reason.

A setting left at None (or "auto") is decided from the model, the device and the settings that the user
did give; given settings are never changed. The result has no open choice left, and resolving
it again changes nothing, so the saved configuration reproduces the run.

The decisions, and why (P is the number of parameters):

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
sequence             256 below 8M, 512 below 50M, 1024 below 200M, else 2048, at most the context:
                     small models gain nothing from context that they cannot use, and run faster without.
layout.*             see `scrimp.config.layout`.
batch_tokens         4Ki below 8M, 16Ki below 50M, 64Ki below 200M, 256Ki below 1B, else 512Ki: the
                     batch up to which a step gains from more tokens grows with the model.
micro_batch          the largest divisor of the sequences of a rank with at most 4Ki tokens on a CPU (where
                     caches are small), 16Ki on CUDA: large enough for full GEMMs, and no more activations.
lr                   min(3e-3, 0.8 / width): Adam's stable rate falls as one over the width. A
                     tenth of it when starting from trained weights, so that they are not unlearned. The same for
                     Muon, whose updates are scaled to the size of AdamW's (arXiv 2502.16982).
warmup_steps         a twentieth of the run, at most 2,000, at least 1.
eval_every           ten evaluations a run, the one at the end included; fewer where each would have less than
                     one step's tokens.
eval_tokens          as many as four steps train on, fewer where all evaluations together would take more than
                     3 % of the run's FLOPs (a forward pass is a third of a step); at least one sequence.
                     All are equal, the one at the end too: only equal texts give comparable losses.
checkpoint_every     a tenth of the run, at least 50; with keep_every, the largest divisor of it.
loss_chunk           0 (all tokens at once) where the fp32 logits of a micro-batch fit into 64 MiB on a CPU
                     or 512 MiB on CUDA; else the largest power of two tokens that fits. A chunk of t
                     tokens does 6*t*D*V FLOPs, and moves about 12*D*V bytes (the bf16 head twice, its
                     fp32 gradient in and out): t/2 FLOPs per byte. An H100 balances at 295, so at
                     600 tokens, which at 128k words need 300 MiB; a CPU balances at far fewer.
snip.*               see `scrimp.config.snip`; decided only for precision = snip.
compile              on for CUDA; off on a CPU, where compiling costs more than a short run gains.
===================  ==============================================================================

Checked in tests/config/test_resolve.py: for any given settings the result is consistent, or the
contradiction is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scrimp.config import pipeline, snip
from scrimp.config.activations import check_memory
from scrimp.config.architecture import Architecture
from scrimp.config.axis_backends import check_backends
from scrimp.config.experts import check_experts
from scrimp.config.fields import flatten, replace_values
from scrimp.config.layout import (
    check_beside_layout,
    check_layout,
    check_outer,
    check_rounds,
    check_tensor_ranks,
    decide_dp,
    decide_fsdp,
    decide_zero,
)
from scrimp.config.optimizers import check_optimizer, facts_of
from scrimp.config.resolved import ResolvedConfig, closed
from scrimp.config.schema import Config, TrainConfig, decided
from scrimp.errors import ConfigError
from scrimp.precision import parse_rules

_SEQUENCE_BY_PARAMETERS = ((8e6, 256), (50e6, 512), (200e6, 1024), (float("inf"), 2048))
_BATCH_BY_PARAMETERS = (
    (8e6, 4096),
    (50e6, 16_384),
    (200e6, 65_536),
    (1e9, 262_144),
    (float("inf"), 524_288),
)
_MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16_384}
_LOGIT_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
_FP32_BYTES = 4
_FORWARD_SHARE = 1 / 3
"""FLOPs of a token that is evaluated, of those of a token that is trained on."""
_EVALUATION_SHARE = 0.03
"""Most of a run's FLOPs that evaluations take, where the user leaves them to Scrimp."""
_EVALUATIONS, _EVALUATION_STEPS = 10, 4
"""Most evaluations of a run, and most tokens of one, in steps' tokens, where both are left to Scrimp."""
_MOST_MICRO_BATCH_TOKENS = 2**31 - 1  # document starts inside a micro-batch are 32-bit

_Decision = tuple[Any, str]
"""A value and the reason for it."""
_Decide = Callable[[Config, str, Callable[[], _Decision]], Config]
"""Gives a setting that is open a value."""


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

    def decide(current: Config, key: str, decision: Callable[[], _Decision]) -> Config:
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
    check_outer(config, device_type, ranks)
    pipeline.check_stages(config, architecture.num_layers)
    config = _with_homes(config, decide)
    config = _with_batches(config, architecture, device_type, ranks, decide)
    config = _with_cadence(config, architecture, decide)
    config = decide(config, "train.loss_chunk", lambda: _loss_chunk(config.train, architecture, device_type))
    _check_schedule(config)
    check_memory(config.memory, architecture.num_layers)
    if config.is_planned:
        config = _with_plans(config, decide)
        if "snip.first" not in reasons:
            snip.check_first(config)
    return Resolution(config=closed(config), architecture=architecture, reasons=reasons)


def _with_layout(config: Config, ranks: int, decide: _Decide) -> Config:
    check_layout(config.layout, ranks)
    together = config.layout.pp * config.layout.cp * config.layout.tp
    config = pipeline.decide_stages(config, decide)
    apart = config.outer.every > 0 and config.outer.copies == 1
    config = decide(config, "layout.dp", lambda: decide_dp(config.layout, ranks // together, apart=apart))
    config = decide(config, "layout.fsdp", lambda: decide_fsdp(config.layout, ranks // together))
    return decide(config, "layout.zero", lambda: decide_zero(config.layout))


def _with_formats(config: Config, decide: _Decide) -> Config:
    """Formats of matrix products, parameters and the optimizer's states; and what does not go with them."""
    if config.is_planned:
        config = decide(config, "snip.formats", snip.decide_formats)
        config = decide(config, "snip.start", lambda: snip.decide_start(config))
        if all(getattr(config.budget, name) is None for name in snip.BUDGETS):
            config = decide(config, "budget.fp4_flops", snip.decide_share)
        snip.check_candidates(config)
    config = decide(config, "train.parameters", lambda: _parameters(config))
    config = decide(config, "optimizer.master_weights", lambda: _master_weights(config.train.parameters))
    config = decide(config, "optimizer.moments", lambda: _moments(config))
    _check_formats(config)
    check_optimizer(config)
    check_beside_layout(config)
    return config


def _with_homes(config: Config, decide: _Decide) -> Config:
    """Where states live, of an optimizer that can update on the device alone."""
    stays = f"optimizer {config.optimizer.name}" if not facts_of(config.optimizer.name).on_host else ""
    stays = "the outer optimizer" if config.outer.every else stays
    if stays:
        on_device = "device", f"{stays} updates on the device"
        for key in ("memory.weights", "memory.gradients", "memory.optimizer"):
            config = decide(config, key, lambda: on_device)
    return config


def _with_batches(
    config: Config, architecture: Architecture, device_type: str, ranks: int, decide: _Decide
) -> Config:
    """Sequences, batches and micro-batches, which all ranks that read rows must be able to share."""
    readers = decided(config.layout.dp) * decided(config.layout.fsdp)
    config = decide(config, "train.sequence", lambda: _sequence(config.train, architecture, readers))
    check_tensor_ranks(config, architecture)
    config = decide(config, "train.compile", lambda: _compile(config, device_type))
    check_experts(config, architecture, ranks)
    shares = readers * pipeline.fewest(config.layout)
    config = decide(config, "train.batch_tokens", lambda: _batch_tokens(config.train, architecture, shares))
    _check_batch(config.train, architecture, readers)
    config = decide(config, "train.micro_batch", lambda: _micro_batch(config, device_type, readers))
    sequences = decided(config.train.batch_tokens) // decided(config.train.sequence) // readers
    pipeline.check_micro_batches(config.layout, sequences // decided(config.train.micro_batch))
    return config


def _with_cadence(config: Config, architecture: Architecture, decide: _Decide) -> Config:
    """The learning rate, and what happens every so many steps."""
    config = decide(config, "optimizer.lr", lambda: _lr(config, architecture))
    config = decide(config, "schedule.warmup_steps", lambda: _warmup_steps(config.train.steps))
    config = decide(config, "evaluation.every", lambda: _on_round(config, _eval_every(config)))
    config = decide(config, "evaluation.tokens", lambda: _eval_tokens(config))
    config = decide(config, "checkpoint.every", lambda: _on_round(config, _checkpoint_every(config)))
    check_rounds(config)
    return config


def _on_round(config: Config, found: _Decision) -> _Decision:
    """The next step at which copies that are jobs of their own meet."""
    every, reason = found
    if config.outer.copies == 1 or every % config.outer.every == 0:
        return found
    return -(-every // config.outer.every) * config.outer.every, f"{reason}, at the end of a round"


def _with_plans(config: Config, decide: _Decide) -> Config:
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
    if saved.optimizer.moments == "auto" and saved.train.parameters != "auto":
        return replace_values(saved, {"optimizer.moments": _moments(saved)[0]})
    return saved


def _precision(given: str, device_type: str) -> _Decision:
    base, reason = "fp32", "fast on every CPU; on one with AMX units --precision bf16 is faster still"
    if device_type == "cuda":
        base, reason = "bf16", "CUDA's matrix units run bf16 many times faster than fp32"
    rules = parse_rules(given)
    return str(rules.with_base(base)), f"{base} as base: {reason}" if rules.rules else reason


def _parameters(config: Config) -> _Decision:
    rules = config.precision_rules
    if rules.base == rules.compute:
        return rules.compute, f"the format of the GEMMs, {rules.compute}"
    return rules.compute, f"the working format beside {rules.base}, {rules.compute}"


def _master_weights(parameters: str) -> _Decision:
    if parameters == "bf16":
        return True, "bf16 parameters lose updates smaller than 1/256 of their value"
    return False, "the parameters are fp32 themselves"


def _moments(config: Config) -> _Decision:
    if config.train.parameters == "bf16" and config.optimizer.master_weights is False:
        return "bf16", "as fine as the bf16 parameters that they move"
    return "fp32", "as fine as the fp32 weights that they move"


def _sequence(train: TrainConfig, architecture: Architecture, ranks: int) -> _Decision:
    size = _by_parameters(_SEQUENCE_BY_PARAMETERS, architecture)
    wanted = min(architecture.context, size)
    reason = f"{size:,} for {_millions(architecture)}"
    if wanted < size:
        reason = f"the model's context, below {size:,}"
    if train.batch_tokens is None:
        return wanted, reason
    pieces = (train.micro_batch or 1) * ranks
    per_row = train.batch_tokens // pieces
    if train.batch_tokens % pieces:
        on_ranks = f" on each of {ranks:,} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"train.batch_tokens cannot be cut into train.micro_batch sequences{on_ranks}",
            got=f"{train.batch_tokens:,} tokens, {train.micro_batch or 1:,} sequences",
            expected=f"a multiple of {pieces:,}",
            do=f"set train.batch_tokens to {_near_multiples(train.batch_tokens, pieces)}",
        )
    sequence = _largest_divisor(per_row, wanted)
    # A batch of, say, 4,099 tokens (a prime) has only a sequence of one token: nobody means that.
    if sequence < wanted // 4 and sequence < per_row:
        unit = wanted * pieces
        raise ConfigError(
            "train.batch_tokens cannot be cut into sequences",
            got=f"{train.batch_tokens:,} tokens",
            expected=f"a multiple of {unit:,}, or train.sequence given too",
            do=f"set train.batch_tokens to {_near_multiples(train.batch_tokens, unit)}",
        )
    if sequence == wanted:
        return sequence, reason
    return sequence, f"the largest divisor of the batch up to {wanted:,}"


def _batch_tokens(train: TrainConfig, architecture: Architecture, ranks: int) -> _Decision:
    size = _by_parameters(_BATCH_BY_PARAMETERS, architecture)
    unit = decided(train.sequence) * (train.micro_batch or 1) * ranks
    batch = max(1, (size + unit // 2) // unit) * unit
    reason = f"{size:,} for {_millions(architecture)}"
    if batch != size:
        what = "micro-batch" if train.micro_batch else "sequence"
        on_ranks = f" on {ranks:,} ranks" if ranks > 1 else ""
        reason += f", as a multiple of the {what}'s {unit:,}{on_ranks}"
    return batch, reason


def _micro_batch(config: Config, device_type: str, ranks: int) -> _Decision:
    train = config.train
    most = _MICRO_BATCH_TOKENS.get(device_type, _MICRO_BATCH_TOKENS["cpu"])
    sequence = decided(train.sequence)
    sequences = decided(train.batch_tokens) // sequence // ranks
    if config.layout.pp > 1:
        return pipeline.micro_batch_of(config.layout, sequences, max(1, most // sequence))
    size = _largest_divisor(sequences, max(1, most // sequence))
    of_rank = " of a rank" if ranks > 1 else ""
    return size, f"the largest divisor of {sequences:,} sequences{of_rank} within {most:,} tokens, or one"


def _lr(config: Config, architecture: Architecture) -> _Decision:
    lr = min(3e-3, 0.8 / architecture.width)
    reason = f"min(3e-3, 0.8 / width {architecture.width:,})"
    if config.model.weights is not None:
        lr, reason = lr / 10, f"a tenth of {reason}, from trained weights"
    if config.optimizer.name == "muon":
        reason += ", as AdamW's, to whose size Muon's updates are scaled"
    return float(f"{lr:.3g}"), reason


def _warmup_steps(steps: int) -> _Decision:
    return min(2000, max(1, steps // 20)), f"a twentieth of {steps:,} steps, 1 to 2,000"


def _evaluated_tokens(train: TrainConfig) -> int:
    """Held-out tokens that all evaluations of the run may take together."""
    return int(train.steps * decided(train.batch_tokens) * _EVALUATION_SHARE / _FORWARD_SHARE)


def _eval_every(config: Config) -> _Decision:
    train = config.train
    each = config.evaluation.tokens or decided(train.batch_tokens)
    count = max(1, min(_EVALUATIONS, _evaluated_tokens(train) // each))
    every = -(-train.steps // count)
    if count == _EVALUATIONS:
        return every, f"a tenth of {train.steps:,} steps"
    why = f"{each:,} tokens each, within {_EVALUATION_SHARE:.0%} of the run's FLOPs"
    return every, f"{count} evaluation{'s' * (count > 1)} of at least {why}"


def _eval_tokens(config: Config) -> _Decision:
    train = config.train
    most = _EVALUATION_STEPS * decided(train.batch_tokens)
    every = decided(config.evaluation.every) or train.steps
    count = -(-train.steps // every)
    each = _evaluated_tokens(train) // count
    if each >= most:
        return most, "as many as four steps train on"
    sequence = decided(train.sequence)
    times = "one evaluation takes" if count == 1 else f"{count:,} evaluations take"
    if each < sequence:
        return sequence, "one sequence, the least"
    return each // sequence * sequence, f"{times} at most {_EVALUATION_SHARE:.0%} of the run's FLOPs"


def _checkpoint_every(config: Config) -> _Decision:
    steps, keep_every = config.train.steps, config.checkpoint.keep_every
    every = max(50, steps // 10)
    reason = f"a tenth of {steps:,} steps, at least 50"
    if keep_every and keep_every % every:
        every = _largest_divisor(keep_every, every)
        reason = f"the largest divisor of checkpoint.keep_every {keep_every:,} up to {reason}"
    return every, reason


def _loss_chunk(train: TrainConfig, architecture: Architecture, device_type: str) -> _Decision:
    most = _LOGIT_BYTES.get(device_type, _LOGIT_BYTES["cpu"])
    per_token = architecture.vocab_size * _FP32_BYTES
    tokens = decided(train.sequence) * decided(train.micro_batch)
    if tokens * per_token <= most:
        return 0, f"the logits of {tokens:,} tokens take {tokens * per_token / 2**20:.0f} MiB"
    chunk = 1 << max(0, (most // per_token).bit_length() - 1)
    return chunk, f"{tokens * per_token / 2**20:,.0f} MiB of logits in chunks of at most {most // 2**20} MiB"


def _compile(config: Config, device_type: str) -> _Decision:
    layout = config.layout
    if layout.ep * layout.etp > 1:
        return "off", "how many tokens the experts of a rank get, the tokens decide"
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


def _check_batch(train: TrainConfig, architecture: Architecture, ranks: int) -> None:
    sequence, batch_tokens = decided(train.sequence), decided(train.batch_tokens)
    if sequence > architecture.context:
        raise ConfigError(
            "train.sequence is longer than the model's context",
            got=f"{sequence:,} tokens",
            expected=f"at most model.context, {architecture.context:,}",
            do=f"set train.sequence to {architecture.context:,} or less, or raise model.context",
        )
    if batch_tokens % sequence:
        raise ConfigError(
            "train.batch_tokens is not a multiple of train.sequence",
            got=f"{batch_tokens:,} tokens in sequences of {sequence:,}",
            expected=f"a multiple of {sequence:,}",
            do=f"set train.batch_tokens to {_near_multiples(batch_tokens, sequence)}",
        )
    sequences, rest = divmod(batch_tokens // sequence, ranks)
    if rest:
        raise ConfigError(
            "the sequences of train.batch_tokens cannot be shared by the ranks",
            got=f"{batch_tokens // sequence:,} sequences of {sequence:,} tokens on {ranks:,} ranks",
            expected=f"a multiple of {ranks:,} sequences",
            do=f"set train.batch_tokens to {_near_multiples(batch_tokens, sequence * ranks)}",
        )
    if train.micro_batch is not None and sequences % train.micro_batch:
        near = _largest_divisor(sequences, train.micro_batch)
        of_rank = f" / {ranks:,} ranks" if ranks > 1 else ""
        raise ConfigError(
            "train.micro_batch does not divide the batch",
            got=f"{train.micro_batch:,} of {sequences:,} sequences",
            expected=f"a divisor of {sequences:,} (train.batch_tokens / train.sequence{of_rank})",
            do=f"set train.micro_batch to {near:,}, or leave it out",
        )
    if (train.micro_batch or 1) * sequence > _MOST_MICRO_BATCH_TOKENS:
        raise ConfigError(
            "train.micro_batch holds too many tokens",
            got=f"{train.micro_batch or 1:,} sequences of {sequence:,} tokens",
            expected=f"at most {_MOST_MICRO_BATCH_TOKENS:,} tokens",
            do="lower train.micro_batch or train.sequence",
        )


def _check_schedule(config: Config) -> None:
    warmup, steps = config.schedule.warmup_steps or 0, config.train.steps
    if warmup > steps:
        raise ConfigError(
            "schedule.warmup_steps is longer than the run",
            got=f"{warmup:,} of train.steps {steps:,}",
            expected=f"at most {steps:,}",
            do="lower schedule.warmup_steps, or leave it out",
        )
    every, keep_every = config.checkpoint.every or 0, config.checkpoint.keep_every
    if keep_every and (every == 0 or keep_every % every):
        raise ConfigError(
            "checkpoint.keep_every is not a multiple of checkpoint.every",
            got=f"to keep every {keep_every:,} of checkpoints written every {every:,} steps",
            expected=f"a multiple of {every:,}" if every else "checkpoint.every above 0",
            do="change checkpoint.keep_every, or leave checkpoint.every out",
        )


def _by_parameters(table: tuple[tuple[float, int], ...], architecture: Architecture) -> int:
    return next(size for limit, size in table if architecture.matrix_parameters < limit)


def _millions(architecture: Architecture) -> str:
    return f"{architecture.matrix_parameters / 1e6:,.1f}M parameters"


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above `most`."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return max(divisor for one in small for divisor in (one, number // one) if divisor <= most)


def _near_multiples(number: int, unit: int) -> str:
    """The multiples of a unit below and above a number, in words."""
    below = number // unit * unit
    return f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
