"""Embeddings of texts by a language model: the mean of its last hidden states.

Method   With h_1 … h_T what the final norm gives for the T tokens of a text, its embedding is the mean of h_t, divided
         by that vector's length, so that products of embeddings are cosines. Texts of equally many tokens are computed
         together: nothing is filled up, and no text sees another one.
Limits   A text that is longer than the model's context is embedded by its beginning. The model was trained to predict
         tokens, not to compare texts: whether its cosines are better than words (BM25) has to be tried.
Checked  tests/tasks/test_embedding.py, against a pass for each text

Shapes: B texts, T tokens, D width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from scrimp.data import Tokenizer
from scrimp.models.functions import at_least_float32
from scrimp.runtime import Executable

_BATCH_TOKENS = 4096


@torch.no_grad()
def embeddings(
    executable: Executable,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    on_characters: Callable[[int], None] = lambda count: None,
) -> npt.NDArray[np.float64]:
    """A row of length 1 for each text.

    Args:
        on_characters: is told how many more of the texts are done.
    """
    model = executable.model
    room = model.architecture.context
    by_length: dict[int, list[int]] = defaultdict(list)
    encoded = [tokenizer.encode_prompt(text)[:room] for text in texts]
    for number, tokens in enumerate(encoded):
        by_length[len(tokens)].append(number)
    found = np.empty((len(texts), model.architecture.width))
    for length, numbers in by_length.items():
        size = max(1, _BATCH_TOKENS // length)
        for first in range(0, len(numbers), size):
            batch = numbers[first : first + size]
            tokens_BT = torch.tensor([encoded[number] for number in batch], device=executable.device)
            with executable.autocast():
                mean_BD = at_least_float32(model(tokens_BT)).mean(1)
            found[batch] = torch.nn.functional.normalize(mean_BD.double(), dim=-1).cpu().numpy()
            on_characters(sum(len(texts[number]) for number in batch))
    return found
