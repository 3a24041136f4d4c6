"""Loss, perplexity and bits per byte of a model on a token stream.

    loss           mean cross-entropy per target token, in nats
    perplexity     exp(loss); comparable only between equal tokenizers
    bits per byte  total nats / (ln 2 * bytes of UTF-8 text); comparable between all tokenizers

Of a mixture each source is evaluated alone, on an equal part of the tokens, so that each can be read. What stands for
the mixture is their mean by the sources' shares w_s of training samples:

    loss           sum of w_s loss_s
    bits per byte  sum of w_s loss_s / (ln 2 * sum of w_s bytes per target token of s)

A document that the limit of tokens cuts counts by its share of bytes. Several ranks share the micro-batches, and all
know the sums. Evaluation draws no random
numbers and changes no state.
Checked  tests/training/test_mixed_runs.py, of mixtures
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from scrimp.config import Config
from scrimp.config.schema import decided
from scrimp.data import Corpus, Mixture, TokenStream, evaluation_batches, evaluation_text_bytes
from scrimp.errors import DataError
from scrimp.runtime import Executable


@dataclass(frozen=True)
class Evaluation:
    """Figures of one evaluation, all measured."""

    loss: float
    bits_per_byte: float
    num_targets: int
    text_bytes: float
    """UTF-8 bytes of the text that was evaluated."""
    sources: Mapping[str, Evaluation] = field(default_factory=dict)
    """The sources of a mixture by their labels."""

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    executable: Executable,
    stream: TokenStream,
    *,
    sequence: int,
    micro_batch: int,
    max_tokens: int | None,
    mask_documents: bool,
    on_tokens: Callable[[int], None] = lambda num_targets: None,
) -> Evaluation:
    """Evaluate on the first `max_tokens` tokens of `stream` (None: on all of them).

    Args:
        on_tokens: told after each batch how many target tokens this rank has evaluated.
    """
    total = torch.zeros((), dtype=torch.float64)
    num_targets, mesh = 0, executable.mesh
    was_training = executable.model.training
    executable.model.eval()
    with torch.no_grad():
        for batch in evaluation_batches(
            stream,
            sequence=sequence,
            micro_batch=micro_batch,
            max_tokens=max_tokens,
            mask_documents=mask_documents,
            rank=mesh.data_rank,
            world_size=mesh.data_ranks,
        ):
            sums = executable.loss(batch)
            total += sums.loss.double().cpu()
            num_targets += executable.objective.count(batch)
            on_tokens(num_targets)
    executable.model.train(was_training)
    executable.settle()
    found = mesh.gathered([float(total), num_targets])
    # Ranks that share rows have counted the same targets.
    loss_sum, num_targets = sum(one[0] for one in found), sum(int(one[1]) for one in found[:: mesh.layout.cp])
    if num_targets == 0:
        raise DataError("nothing to evaluate", got="no target token", do="give a longer text")
    loss = loss_sum / num_targets
    text_bytes = evaluation_text_bytes(stream, sequence, max_tokens)
    bits_per_byte = loss_sum / math.log(2) / text_bytes if text_bytes else math.nan
    return Evaluation(loss, bits_per_byte, num_targets, text_bytes)


def of_mixture(sources: Mapping[str, Evaluation], shares: Sequence[int]) -> Evaluation:
    """What evaluations of all sources say of their mixture.

    Args:
        sources: by label, in the order of the shares.
        shares: of the sources in training samples.
    """
    found, total = list(sources.values()), sum(shares)
    weights = [share / total for share in shares]
    loss = sum(weight * one.loss for weight, one in zip(weights, found, strict=True))
    rates = (weight * one.text_bytes / one.num_targets for weight, one in zip(weights, found, strict=True))
    bytes_per_target = sum(rates)
    return Evaluation(
        loss,
        loss / math.log(2) / bytes_per_target if bytes_per_target else math.nan,
        sum(one.num_targets for one in found),
        sum(one.text_bytes for one in found),
        sources,
    )


def evaluate_held_out(executable: Executable, corpus: Corpus | Mixture, config: Config) -> Evaluation:
    """The evaluation of a run on what it holds out; of a mixture on an equal part of each source.

    Args:
        config: of the run, with nothing open.
    """

    def on(stream: TokenStream, tokens: int) -> Evaluation:
        return evaluate(
            executable,
            stream,
            sequence=decided(config.train.sequence),
            micro_batch=decided(config.train.micro_batch),
            max_tokens=tokens,
            mask_documents=config.data.mask_documents,
        )

    tokens = decided(config.evaluation.tokens)
    if not isinstance(corpus, Mixture):
        return on(corpus.held_out, tokens)
    each = zip(corpus.labels, corpus.parts, strict=True)
    found = {label: on(part.held_out, tokens // len(corpus.parts)) for label, part in each}
    return of_mixture(found, corpus.shares)
