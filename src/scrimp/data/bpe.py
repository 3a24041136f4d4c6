"""A byte-level BPE trained on the corpus, from a sample that bounds its memory.

Method   Byte pair encoding (Sennrich et al., 2016) over GPT-2's byte alphabet: every byte is
         a symbol, so any text can be encoded. Training counts the words of a sample and
         merges the most frequent pair until the vocabulary is full.
Sample   The training documents with the lowest hashes, as many as fit 32 MiB, out of the
         first 8 GiB of the source: the same sample from the same text, in bounded memory
         and time. Held-out documents are never in it.
Limits   At most 32 MiB of text are seen; rare words of a large corpus stay in pieces.
Checked  tests/data/test_tokenizer.py: trained twice, the same; transformers agrees.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable

from scrimp.data.documents import Document

SAMPLE_BYTES = 32 << 20
SCANNED_BYTES = 8 << 30


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes, in the order of the bytes.

    Printable Latin-1 characters stand for themselves; the others are moved to U+0100 and up.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    symbols, moved = [], 0
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + moved))
            moved += 1
    return symbols


def byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]], delimiter: str) -> str:
    """tokenizer.json of a byte-level BPE whose prompts begin with the delimiter."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(delimiter, special=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[delimiter, "$A"],
        pair=[delimiter, "$A", "$B"],
        special_tokens=[(delimiter, tokenizer.token_to_id(delimiter))],
    )
    return str(tokenizer.to_str(pretty=True)) + "\n"


def sample(corpus: Iterable[Document]) -> list[str]:
    """The training documents with the lowest hashes within SAMPLE_BYTES, in the order of the corpus."""
    heap: list[tuple[int, int, Document]] = []  # (-hash, -position, document): the largest hash on top
    kept = scanned = 0
    for position, document in enumerate(corpus):
        scanned += document.num_bytes
        if scanned > SCANNED_BYTES:
            break
        if document.held_out:
            continue
        heapq.heappush(heap, (-document.hash, -position, document))
        kept += document.num_bytes
        while kept > SAMPLE_BYTES and len(heap) > 1:
            kept -= heapq.heappop(heap)[2].num_bytes
    return [document.text for _, _, document in sorted(heap, key=lambda entry: -entry[1])]


def train_bpe(texts: list[str], vocab_size: int, delimiter: str) -> str:
    """tokenizer.json of a BPE trained on the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[delimiter],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    return byte_level(model["vocab"], [(left, right) for left, right in model["merges"]], delimiter)
