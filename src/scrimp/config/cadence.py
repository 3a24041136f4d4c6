"""The learning rate, and what happens every so many steps.

===================  ==============================================================================
lr                   min(3e-3, 0.8 / width): Adam's stable rate falls as one over the width. A
                     tenth of it when starting from trained weights, so that they are not unlearned, but for adapters,
                     whose best rate is about ten times that of all weights (Biderman et al. 2024, arXiv
                     2405.09673). The same for
                     Muon, whose updates are scaled to the size of AdamW's (arXiv 2502.16982). Divided by
                     low_rank_scale for GaLore and Fira, whose matrices move by that factor of it.
embedding_lr_ratio   4 from random weights where the embedding is the head too, or with Muon; else 1, as for
                     GaLore and Fira, whose lr is the embedding's already. With a run's optimizer's states that
                     run's. Measured in short runs of small models (docs/optimizers.md). The rate of embeddings
                     should not fall with the width, that of matrices should (Yang et al., arXiv 2203.03466).
warmup_steps         a twentieth of the run, at most 2,000, at least 1.
eval_every           ten evaluations a run, the one at the end included; fewer where each would have less than
                     one step's tokens.
eval_tokens          as many as four steps train on, fewer where all evaluations together would take more than
                     3 % of the run's FLOPs (a forward pass is a third of a step); at least one sequence.
                     All are equal, the one at the end too: only equal texts give comparable losses.
checkpoint_every     a tenth of the run, at least 50; with keep_every, the largest divisor of it.
===================  ==============================================================================

Checked in tests/config/test_resolve.py.
"""

from __future__ import annotations

from scrimp.config.architecture import Architecture
from scrimp.config.batches import largest_divisor
from scrimp.config.optimizers import facts_of
from scrimp.config.schema import Config, Decision, TrainConfig, decided
from scrimp.errors import ConfigError
from scrimp.user_code import is_code

_FORWARD_SHARE = 1 / 3
"""FLOPs of a token that is evaluated, of those of a token that is trained on."""
_EVALUATION_SHARE = 0.03
"""Most of a run's FLOPs that evaluations take, where the user leaves them to Scrimp."""
EMBEDDING_LR_RATIO = 4.0
"""What the embedding's learning rate is of the others', where it is another."""
_EVALUATIONS, _EVALUATION_STEPS = 10, 4
"""Most evaluations of a run, and most tokens of one, in steps' tokens, where both are left to Scrimp."""


def decide_lr(config: Config, architecture: Architecture) -> Decision:
    """The highest learning rate of the run."""
    lr = min(3e-3, 0.8 / architecture.width)
    reason = f"min(3e-3, 0.8 / width {architecture.width:,})"
    if config.adapter.rank:
        reason += ", ten times that of all weights: adapters begin with nothing added"
    elif config.model.weights is not None and not config.optimizer.from_weights:
        lr, reason = lr / 10, f"a tenth of {reason}, from trained weights"
    if config.optimizer.name == "muon":
        reason += ", as AdamW's, to whose size Muon's updates are scaled"
    if facts_of(config.optimizer.name).low_rank:
        lr, reason = lr / config.optimizer.low_rank_scale, f"{reason}, by optimizer.low_rank_scale"
    return float(f"{min(lr, 1.0):.3g}"), reason


def decide_embedding_lr_ratio(config: Config, architecture: Architecture) -> Decision:
    """The embedding's learning rate as a multiple of the others'."""
    name, settings = config.optimizer.name, config.optimizer
    if config.adapter.rank:
        return 1.0, "the embedding is not trained"
    if config.model.weights is not None:
        return 1.0, "all parameters have one rate from trained weights"
    if is_code(name):
        return 1.0, "an optimizer of your own has one rate unless another is set"
    if facts_of(name).low_rank:
        return 1.0, "optimizer.lr is the embedding's own rate"
    if name != "muon" and not architecture.tied_embeddings:
        return 1.0, "the embedding is not the head too"
    if (settings.lr or 0.0) * EMBEDDING_LR_RATIO * settings.weight_decay >= 1:
        return 1.0, f"{EMBEDDING_LR_RATIO:g} times optimizer.lr would decay all of it in a step"
    why = "with Muon" if name == "muon" else "where the embedding is the head too"
    return EMBEDDING_LR_RATIO, f"better than 1 in short runs of small models {why}"


def decide_warmup_steps(steps: int) -> Decision:
    """Steps until it is reached."""
    return min(2000, max(1, steps // 20)), f"a twentieth of {steps:,} steps, 1 to 2,000"


def decide_eval_every(config: Config) -> Decision:
    """Steps from one evaluation to the next."""
    train = config.train
    each = config.evaluation.tokens or decided(train.batch_tokens)
    count = max(1, min(_EVALUATIONS, _evaluated_tokens(train) // each))
    every = -(-train.steps // count)
    if count == _EVALUATIONS:
        return _on_round(config, every, f"a tenth of {train.steps:,} steps")
    why = f"{each:,} tokens each, within {_EVALUATION_SHARE:.0%} of the run's FLOPs"
    return _on_round(config, every, f"{count} evaluation{'s' * (count > 1)} of at least {why}")


def decide_eval_tokens(config: Config) -> Decision:
    """Held-out tokens of one evaluation."""
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


def decide_checkpoint_every(config: Config) -> Decision:
    """Steps from one checkpoint to the next."""
    steps, keep_every = config.train.steps, config.checkpoint.keep_every
    every = max(50, steps // 10)
    reason = f"a tenth of {steps:,} steps, at least 50"
    if keep_every and keep_every % every:
        every = largest_divisor(keep_every, every)
        reason = f"the largest divisor of checkpoint.keep_every {keep_every:,} up to {reason}"
    return _on_round(config, every, reason)


def check(config: Config) -> None:
    """Refuse a warmup longer than the run, a decay of all of the weights in a step, and checkpoints to keep that are
    never written.

    Raises:
        ConfigError: naming the setting.
    """
    warmup, steps = config.schedule.warmup_steps or 0, config.train.steps
    if warmup > steps:
        raise ConfigError(
            "schedule.warmup_steps is longer than the run",
            got=f"{warmup:,} of train.steps {steps:,}",
            expected=f"at most {steps:,}",
            do="lower schedule.warmup_steps, or leave it out",
        )
    check_decay(config)
    every, keep_every = config.checkpoint.every or 0, config.checkpoint.keep_every
    if keep_every and (every == 0 or keep_every % every):
        raise ConfigError(
            "checkpoint.keep_every is not a multiple of checkpoint.every",
            got=f"to keep every {keep_every:,} of checkpoints written every {every:,} steps",
            expected=f"a multiple of {every:,}" if every else "checkpoint.every above 0",
            do="change checkpoint.keep_every, or leave checkpoint.every out",
        )


def check_decay(config: Config) -> None:
    """Refuse a decay of all of the weights in a step.

    Raises:
        ConfigError: naming the settings.
    """
    lr, decay = config.optimizer.lr or 0.0, config.optimizer.weight_decay
    ratio = max(1.0, config.optimizer.embedding_lr_ratio or 1.0)
    if lr * ratio * decay >= 1:
        of_embedding = f" x optimizer.embedding_lr_ratio {ratio:g}" if ratio > 1 else ""
        raise ConfigError(
            "a step decays all of the weights",
            got=f"optimizer.lr {lr:g}{of_embedding} x optimizer.weight_decay {decay:g}",
            expected="a product below 1: weights shrink by it in each step",
            do="lower one of them",
        )


def _evaluated_tokens(train: TrainConfig) -> int:
    """Held-out tokens that all evaluations of the run may take together."""
    return int(train.steps * decided(train.batch_tokens) * _EVALUATION_SHARE / _FORWARD_SHARE)


def _on_round(config: Config, every: int, reason: str) -> Decision:
    """That many steps, or more, up to where copies that are jobs of their own meet."""
    if config.outer.copies == 1 or every % config.outer.every == 0:
        return every, reason
    return -(-every // config.outer.every) * config.outer.every, f"{reason}, at the end of a round"
