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
Memory   As many rows of a file are written at once as keys and values fit into `CACHE_BYTES`, whatever is free: the
         text must not depend on that. Where they do not fit beside the teachers, the run is refused.
Limits   One rank writes, the others wait.
Source   Kim et al. 2025, arXiv 2509.14786: a student of an ensemble learns from text that this one writes
Checked  tests/training/test_written_text.py
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Final

import torch

from scrimp.data import Corpus, Mixture
from scrimp.data.interleave import Interleave
from scrimp.data.progress_line import Progress, note
from scrimp.data.written import CHUNK_ROWS, MANIFEST, Ids, WrittenText, write_rows_to
from scrimp.errors import PlanError
from scrimp.files import folder_lock, make_folder, user_cache
from scrimp.gemm.problem import DTYPES
from scrimp.models.generation import cache_bytes, write_rows
from scrimp.models.model import Model
from scrimp.report.units import format_bytes
from scrimp.training.distillation import digests_of_teachers, frozen_model, share_of, teachers_in
from scrimp.training.memory.limits import device_limit
from scrimp.training.setup import Decisions

WRITTEN: Final = "objective.written"
CACHE_BYTES: Final = {"cpu": 1 << 30, "cuda": 4 << 30}
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
    exact, compute = share_of(share), config.precision_rules.compute
    samples = math.ceil(config.train.steps * config.train.sequences_per_step * config.outer.copies * exact)
    if config.objective.written_tokens is not None:
        samples = min(samples, math.ceil(config.objective.written_tokens / sequence))
    key = [_VERSION, digests_of_teachers(config), corpus.tokenizer.digest, config.run.seed, sequence, samples]
    key += [config.train.parameters, compute, config.data.mask_documents, decisions.device.torch_device.type]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = (config.data.cache or user_cache()) / f"written-{name}"
    with decisions.world.writer_first("writing text"):
        make_folder(folder)
        with folder_lock(folder, lambda: note(f"waiting for another process that writes {folder}")):
            if not (folder / MANIFEST).exists():
                _write(folder, samples, decisions, corpus)
            found = WrittenText(folder, corpus.tokenizer)
    decisions.world.agree(WRITTEN, found.digest, do="give all ranks the same cache")
    own = exact.denominator - exact.numerator
    corpus.train.beside = found, Interleave((own, exact.numerator))
    return found.digest


def _write(folder: Path, samples: int, decisions: Decisions, corpus: Corpus) -> None:
    config, tokenizer = decisions.config, corpus.tokenizer
    device, tokens = decisions.device.torch_device, config.train.sequence + 1
    parameters, compute = DTYPES[config.train.parameters], DTYPES[config.precision_rules.compute]
    teachers = [frozen_model(one, device, parameters) for one in teachers_in(config.objective)]
    at_once = _rows_at_once(teachers, tokens, compute.itemsize, decisions)
    each, done = corpus.train.text_bytes / corpus.train.num_tokens, 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        bar.update(int(done * each))

    def write(chunk: int, rows: int) -> Ids:
        seed = hashlib.sha256(f"{folder.name}/{chunk}".encode()).digest()[:7]
        generator = torch.Generator().manual_seed(int.from_bytes(seed))
        with torch.autocast(device.type, compute, enabled=compute != torch.float32):
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

    with Progress("teachers are writing", int(samples * tokens * each)) as bar:
        write_rows_to(folder, samples, write)


def _rows_at_once(teachers: list[Model], tokens: int, itemsize: int, decisions: Decisions) -> int:
    """Rows of a file whose keys and values fit into the cache; PlanError where these do not fit beside the teachers."""
    weights = sum(one.numel() * one.element_size() for model in teachers for one in model.parameters())
    each = sum(cache_bytes(model.architecture, tokens - 1, itemsize) for model in teachers)
    rows = max(1, min(CHUNK_ROWS, CACHE_BYTES[decisions.device.torch_device.type] // each))
    need, limit = weights + rows * each, device_limit(decisions.config, decisions.device, 0)
    if need > limit:
        raise PlanError(
            "the teachers have no room to write",
            got=f"{format_bytes(weights)} of weights, {format_bytes(rows * each)} of keys and values",
            expected=f"at most {format_bytes(limit)}",
            do="take smaller or fewer teachers, or leave objective.written out",
        )
    return rows
