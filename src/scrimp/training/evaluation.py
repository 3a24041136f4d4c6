"""Loss, perplexity and bits per byte of a model on a token stream.

    loss           mean cross-entropy per target token, in nats
    perplexity     exp(loss); comparable only between equal tokenizers
    bits per byte  total nats / (ln 2 * bytes of UTF-8 text); comparable between all tokenizers

A document that the limit of tokens cuts counts by its share of bytes. Several ranks share the micro-batches, and all
know the sums. Evaluation draws no random
numbers and changes no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from scrimp.data import TokenStream, evaluation_batches, evaluation_text_bytes
from scrimp.errors import DataError
from scrimp.runtime import Executable


@dataclass(frozen=True)
class Evaluation:
    """Figures of one evaluation, all measured."""

    loss: float
    bits_per_byte: float
    num_targets: int

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
    return Evaluation(loss=loss, bits_per_byte=bits_per_byte, num_targets=num_targets)
