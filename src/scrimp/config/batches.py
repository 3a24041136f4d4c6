"""How many tokens a sequence, a batch, a micro-batch and a piece of the loss have.

===================  ==============================================================================
sequence             256 below 8M, 512 below 50M, 1024 below 200M, else 2048, at most the context:
                     small models gain nothing from context that they cannot use, and run faster without.
batch_tokens         4Ki below 8M, 16Ki below 50M, 64Ki below 200M, 256Ki below 1B, else 512Ki: the
                     batch up to which a step gains from more tokens grows with the model.
micro_batch          the largest divisor of the sequences of a rank with at most 4Ki tokens on a CPU (where
                     caches are small), 16Ki on CUDA: large enough for full GEMMs, and no more activations.
loss_chunk           0 (all tokens at once) where the fp32 logits of a micro-batch fit into 64 MiB on a CPU
                     or 512 MiB on CUDA; else the largest power of two tokens that fits. A chunk of t
                     tokens does 6*t*D*V FLOPs, and moves about 12*D*V bytes (the bf16 head twice, its
                     fp32 gradient in and out): t/2 FLOPs per byte. An H100 balances at 295, so at
                     600 tokens, which at 128k words need 300 MiB; a CPU balances at far fewer.
===================  ==============================================================================

Sizes of models are in parameters. Checked in tests/config/test_resolve.py.
"""

from __future__ import annotations

import math

from scrimp.config import pipeline
from scrimp.config.architecture import Architecture
from scrimp.config.schema import Config, Decision, TrainConfig, decided
from scrimp.errors import ConfigError

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
_MOST_MICRO_BATCH_TOKENS = 2**31 - 1  # document starts inside a micro-batch are 32-bit


def decide_sequence(train: TrainConfig, architecture: Architecture, ranks: int) -> Decision:
    """Tokens of a sequence.

    Args:
        ranks: those that read rows of their own.

    Raises:
        ConfigError: the batch that was given cannot be cut into sequences.
    """
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
    sequence = largest_divisor(per_row, wanted)
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


def decide_tokens(train: TrainConfig, architecture: Architecture, ranks: int) -> Decision:
    """Tokens of a batch: of all sequences that all ranks of a step read."""
    size = _by_parameters(_BATCH_BY_PARAMETERS, architecture)
    unit = decided(train.sequence) * (train.micro_batch or 1) * ranks
    batch = max(1, (size + unit // 2) // unit) * unit
    reason = f"{size:,} for {_millions(architecture)}"
    if batch != size:
        what = "micro-batch" if train.micro_batch else "sequence"
        on_ranks = f" on {ranks:,} ranks" if ranks > 1 else ""
        reason += f", as a multiple of the {what}'s {unit:,}{on_ranks}"
    return batch, reason


def decide_micro_batch(config: Config, device_type: str, ranks: int) -> Decision:
    """Sequences that a rank computes at once."""
    train = config.train
    most = _MICRO_BATCH_TOKENS.get(device_type, _MICRO_BATCH_TOKENS["cpu"])
    sequence = decided(train.sequence)
    sequences = decided(train.batch_tokens) // sequence // ranks
    if config.layout.pp > 1:
        return pipeline.micro_batch_of(config.layout, sequences, max(1, most // sequence))
    size = largest_divisor(sequences, max(1, most // sequence))
    of_rank = " of a rank" if ranks > 1 else ""
    return size, f"the largest divisor of {sequences:,} sequences{of_rank} within {most:,} tokens, or one"


def decide_loss_chunk(train: TrainConfig, architecture: Architecture, device_type: str) -> Decision:
    """Tokens whose logits exist at once; 0 for all of a micro-batch."""
    most = _LOGIT_BYTES.get(device_type, _LOGIT_BYTES["cpu"])
    per_token = architecture.vocab_size * _FP32_BYTES
    tokens = decided(train.sequence) * decided(train.micro_batch)
    if tokens * per_token <= most:
        return 0, f"the logits of {tokens:,} tokens take {tokens * per_token / 2**20:.0f} MiB"
    chunk = 1 << max(0, (most // per_token).bit_length() - 1)
    return chunk, f"{tokens * per_token / 2**20:,.0f} MiB of logits in chunks of at most {most // 2**20} MiB"


def check(train: TrainConfig, architecture: Architecture, ranks: int) -> None:
    """Refuse sizes that do not divide one another.

    Raises:
        ConfigError: naming the two, and the nearest that divides.
    """
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
        near = largest_divisor(sequences, train.micro_batch)
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


def _by_parameters(table: tuple[tuple[float, int], ...], architecture: Architecture) -> int:
    return next(size for limit, size in table if architecture.matrix_parameters < limit)


def _millions(architecture: Architecture) -> str:
    return f"{architecture.matrix_parameters / 1e6:,.1f}M parameters"


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above `most`."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return max(divisor for one in small for divisor in (one, number // one) if divisor <= most)


def _near_multiples(number: int, unit: int) -> str:
    """The multiples of a unit below and above a number, in words."""
    below = number // unit * unit
    return f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
