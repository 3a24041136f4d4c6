"""Text in, batches out: sources, tokenizers, token shards, the sample index and the loader.

source -> documents -> tokens -> shards      `prepare`, once, streaming and resumable
shards -> windows -> batches                 `open_corpus` and `Loader`, in a global shuffled order
several sources, by shares of samples       `open_mixture`, and the same `Loader`
conversations -> rows, packed whole          the same two, with a loss on the answers (`ChatTemplate`, `Packed`)
"""

from scrimp.data.batch import IGNORED, Batch
from scrimp.data.chat_template import ChatTemplate
from scrimp.data.corpus import Corpus, TokenStream, open_corpus
from scrimp.data.corpus_manifest import is_corpus
from scrimp.data.corpus_text import CorpusSpec
from scrimp.data.index import SampleIndex
from scrimp.data.loader import (
    Loader,
    evaluation_batches,
    evaluation_text_bytes,
    held_bytes,
    passes_over,
)
from scrimp.data.mixture import Mixture, open_mixture
from scrimp.data.packing import packed
from scrimp.data.prepare import chat_tokenizer, prepare
from scrimp.data.progress_line import Progress
from scrimp.data.tokenizer import Tokenizer, load_tokenizer
from scrimp.data.verification import VerifyReport, verify

__all__ = [
    "IGNORED",
    "Batch",
    "ChatTemplate",
    "Corpus",
    "CorpusSpec",
    "Loader",
    "Mixture",
    "Progress",
    "SampleIndex",
    "TokenStream",
    "Tokenizer",
    "VerifyReport",
    "chat_tokenizer",
    "evaluation_batches",
    "evaluation_text_bytes",
    "held_bytes",
    "is_corpus",
    "load_tokenizer",
    "open_corpus",
    "open_mixture",
    "packed",
    "passes_over",
    "prepare",
    "verify",
]
