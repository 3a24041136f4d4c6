"""Text that a distillation's teachers write before the student learns, and that it reads beside the corpus.

Problem  Teachers that have read a small text many times know it by heart: what they say of its tokens is little more
         than the text itself. What they have learnt beyond it shows in text of their own.
Method   `objective.written` is the share of a run's samples that the teachers write, out of nothing, each token drawn
         from softmax(mean of their logits) (`scrimp.models.generation.write_rows`); as many as all steps read, so that
         none is read twice, or fewer (`objective.written_tokens`), since writing takes its time. `Interleave` says
         whose turn a sample is. In training the teachers read both kinds, and say what they say of each token.
         The text is written once, into the cache, under a key of all that decides it (teachers, tokenizer, seed,
         sequence, samples); writing that was killed goes on with the next file. run.json has its digest: a run goes on
         with the text that it began with, though another machine would draw another one.
Memory   As many rows of a file are written at once as their keys and values have room.
Limits   One rank writes, the others wait. A run that is resumed for more steps reads written text again.
Source   Kim et al. 2025, arXiv 2509.14786: a student of an ensemble learns from text that this one writes
Checked  tests/training/test_written_text.py
"""

from __future__ import annotations

import hashlib
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Final

import torch

from scrimp.config.mixture import MOST_PARTS
from scrimp.data import Corpus, Mixture
from scrimp.data.interleave import Interleave
from scrimp.data.progress_line import Progress
from scrimp.data.written import CHUNK_ROWS, ID_BYTES, MANIFEST, Ids, WrittenText, write_rows_to
from scrimp.files import user_cache
from scrimp.gemm.problem import DTYPES
from scrimp.models.generation import cache_bytes, write_rows
from scrimp.models.model import Model
from scrimp.training.distillation import digests_of_teachers, frozen_model, teachers_in
from scrimp.training.memory.limits import device_limit
from scrimp.training.setup import Decisions

WRITTEN: Final = "objective.written"
_SHARE: Final = 0.5
"""Of the device's memory, in which nothing else lies yet."""
_VERSION: Final = 1


def read_beside(decisions: Decisions, corpus: Corpus | Mixture) -> str:
    """Have a run's teachers write, unless the text is in the cache, and the corpus read it beside its own; its digest,
    empty where they write nothing.

    Raises:
        DataError: what lies in the cache is damaged.
    """
    config = decisions.config
    share, sequence = config.objective.written, config.train.sequence
    if not share:
        return ""
    assert isinstance(corpus, Corpus), "a mixture is refused"
    exact = Fraction(str(share)).limit_denominator(MOST_PARTS)
    samples = math.ceil(config.train.steps * config.train.sequences_per_step * config.outer.copies * exact)
    if config.objective.written_tokens is not None:
        samples = min(samples, math.ceil(config.objective.written_tokens / sequence))
    key = [_VERSION, digests_of_teachers(config), corpus.tokenizer.digest, config.run.seed, sequence, samples]
    key += [config.train.parameters, config.data.mask_documents]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = (config.data.cache or user_cache()) / f"written-{name}"
    with decisions.world.writer_first("writing text"):
        if not (folder / MANIFEST).exists():
            _write(folder, samples, decisions, corpus)
        found = WrittenText(folder, corpus.tokenizer)
    decisions.world.agree(WRITTEN, found.digest, do="give all ranks the same cache")
    own = exact.denominator - exact.numerator
    corpus.train.beside = found, Interleave((own, exact.numerator))
    return found.digest


def _write(folder: Path, samples: int, decisions: Decisions, corpus: Corpus | Mixture) -> None:
    config, tokenizer = decisions.config, corpus.tokenizer
    device, tokens = decisions.device.torch_device, config.train.sequence + 1
    dtype = DTYPES[config.train.parameters]
    teachers = [frozen_model(one, device, dtype) for one in teachers_in(config.objective)]
    at_once = _rows_at_once(teachers, tokens, dtype.itemsize, decisions)
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count * ID_BYTES
        bar.update(done)

    def write(chunk: int, rows: int) -> Ids:
        seed = hashlib.sha256(f"{folder.name}/{chunk}".encode()).digest()[:7]
        generator = torch.Generator().manual_seed(int.from_bytes(seed))
        parts = [
            write_rows(
                teachers,
                min(at_once, rows - first),
                tokens,
                entries=tokenizer.vocab_size,
                delimiter_id=tokenizer.delimiter_id,
                closing_id=tokenizer.closing_id,
                cuts_documents=config.data.mask_documents,
                generator=generator,
                on_tokens=told,
            )
            for first in range(0, rows, at_once)
        ]
        return torch.cat(parts).numpy()

    with Progress("teachers are writing", samples * tokens * ID_BYTES) as bar:
        write_rows_to(folder, samples, config.train.sequence, write)


def _rows_at_once(teachers: list[Model], tokens: int, itemsize: int, decisions: Decisions) -> int:
    """As many rows of a file as have room beside the teachers."""
    weights = sum(one.numel() * one.element_size() for model in teachers for one in model.parameters())
    room = _SHARE * device_limit(decisions.config, decisions.device, 0) - weights
    each = sum(cache_bytes(model.architecture, tokens - 1, itemsize) for model in teachers)
    return max(1, min(CHUNK_ROWS, int(room / each)))
