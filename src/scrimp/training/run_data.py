"""What a run learns from: its tokenizer, its vocabulary, its corpus.

Order    The tokenizer is decided with the settings, and with it how many entries it has: those of one that exists; of
         one that is still to be trained, as many as it may get. The model gets its embedding rows by that number; the
         run is planned, and refused where it must be, before time is spent on a corpus. Only where the trained
         tokenizer came out smaller is the plan made again (`scrimp.training.setup.Decisions.with_corpus`).
Checked  tests/training/test_run_data.py, test_bad_input.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from scrimp import objectives
from scrimp.config import OWN_PRESETS, Architecture, Config, ResolvedConfig
from scrimp.data import Corpus, CorpusSpec, is_corpus, load_tokenizer, open_corpus, packed
from scrimp.errors import ConfigError, DataError, ModelError
from scrimp.training.run_folder import TOKENIZER
from scrimp.training.trained_weights import tokenizer_of_weights
from scrimp.world import World

BPE_LIMIT = 32_768
VOCAB_MULTIPLE = 64


def reads_conversations(config: Config) -> bool:
    """Whether the objective learns from conversations, not from text."""
    return objectives.build(config.objective).reads == "conversations"


def refuse_unread_settings(config: Config) -> None:
    """Refuse settings of the data that the objective contradicts, or has no use for."""
    if not reads_conversations(config):
        if config.data.chat_template is not None:
            raise ConfigError(
                "data.chat_template is for conversations",
                got=f"{config.data.chat_template} beside objective.name {config.objective.name}",
                do="set --objective.name sft, or leave it out",
            )
    elif not config.data.mask_documents:
        raise ConfigError(
            "data.mask_documents cannot be switched off for conversations",
            got="attention across the conversations of a sequence",
            do="leave it out: conversations are always kept apart",
        )


def decide_tokenizer(
    config: ResolvedConfig, architecture: Architecture, reasons: dict[str, str]
) -> ResolvedConfig:
    data = config.data
    if data.tokenizer == "auto":
        has_own = is_corpus(Path(data.source))  # shards bring their tokenizer along
        folder = tokenizer_of_weights(config.model.weights) if config.model.weights and not has_own else None
        if config.model.weights and not has_own and folder is None:
            raise ModelError(
                f"{config.model.weights} has no tokenizer that can be read",
                expected="a tokenizer.json: the weights mean nothing to another tokenizer's ids",
                do="save the model's tokenizer there with transformers, or name one with --data.tokenizer",
            )
        choice = str(folder) if folder else "auto"
        if folder:
            reasons["data.tokenizer"] = "the tokenizer of model.weights"
        data = dataclasses.replace(data, tokenizer=choice)
    if data.tokenizer not in ("auto", "bpe"):
        if data.vocab_size is not None:
            raise ConfigError(
                "data.vocab_size has no effect on a ready tokenizer",
                got=f"{data.vocab_size} beside the tokenizer {data.tokenizer}",
                do="leave it out, or set --data.tokenizer bpe to train one",
            )
    elif data.vocab_size is None:
        size = min(architecture.vocab_size, BPE_LIMIT)
        data = dataclasses.replace(data, vocab_size=size)
        reasons["data.vocab_size"] = f"the model's vocabulary, at most {BPE_LIMIT:,}"
    return dataclasses.replace(config, data=data)


def corpus_spec(config: Config) -> CorpusSpec:
    """What `scrimp.data` needs to know of a configuration."""
    data = config.data
    return CorpusSpec(
        source=data.source,
        text_column=data.text_column,
        conversations=reads_conversations(config),
        chat_template=data.chat_template,
        tokenizer=data.tokenizer,
        bpe_vocab_size=data.vocab_size or BPE_LIMIT,
        held_out=data.held_out,
    )


def open_run_corpus(
    config: ResolvedConfig, world: World, *, progress: bool = True, digest: str | None = None
) -> Corpus:
    """Open or prepare the corpus of a run and check that it suits the model.

    Args:
        digest: of the corpus that the run was begun with, if it was.
    """
    with world.writer_first("opening the data"):  # which prepares them; the others find shards
        corpus = open_corpus(corpus_spec(config), cache=config.data.cache, progress=progress, digest=digest)
    world.agree("the data", corpus.digest, do="give all ranks the same source and the same cache")
    sequence = config.train.sequence
    if corpus.manifest.holds_conversations:
        packed(corpus.train, sequence)  # refused here where nothing fits
        if corpus.held_out.num_tokens:
            packed(corpus.held_out, sequence, "held-out")
    elif corpus.train.num_tokens < sequence + 1:
        raise DataError(
            f"the training split of {config.data.source} is shorter than one sequence",
            got=f"{corpus.train.num_tokens:,} tokens",
            expected=f"at least {sequence + 1:,} (train.sequence + 1)",
            do="give more text, or lower --train.sequence",
        )
    return corpus


def refuse_other_tokenizer(config: Config, corpus: Corpus) -> None:
    """Refuse to train weights on the ids of a tokenizer that is not theirs.

    Raises:
        ModelError: the corpus has another tokenizer than model.weights.
    """
    weights = config.model.weights
    folder = tokenizer_of_weights(weights) if weights and weights.is_dir() else None
    if folder is None or load_tokenizer(folder).digest == corpus.tokenizer.digest:
        return
    raise ModelError(
        f"the tokenizer of {config.data.source} is not the one of {weights}",
        got=f"{corpus.tokenizer.name}, {corpus.tokenizer.vocab_size:,} entries",
        expected=f"the tokenizer in {folder}: to another one's ids the weights mean nothing",
        do=f"leave --data.tokenizer out; shards are made with `scrimp prepare ... --tokenizer {folder}`",
    )


def name_tokenizer(config: ResolvedConfig, corpus: Corpus, reasons: dict[str, str]) -> ResolvedConfig:
    """Say which tokenizer `auto` came to be; its reason is put into `reasons`."""
    data = config.data
    if data.tokenizer != "auto":
        return config
    if corpus.folder == Path(data.source):
        # No tokenizer is trained: the size that one would have had is not part of this run.
        data, reason = dataclasses.replace(data, vocab_size=None), "the one that the shards were made with"
        reasons.pop("data.vocab_size", None)
    else:
        data, reason = dataclasses.replace(data, tokenizer="bpe"), "trained on the corpus"
    reasons["data.tokenizer"] = reason
    return dataclasses.replace(config, data=data)


def expected_vocabulary(config: Config, architecture: Architecture) -> int:
    """Entries of the tokenizer that a run will have, before its corpus is prepared: of one that
    is still to be trained, as many as it may get."""
    data = config.data
    if data.source != "stdlib" and is_corpus(Path(data.source)):
        return load_tokenizer(Path(data.source) / TOKENIZER).vocab_size
    if data.tokenizer in ("auto", "bpe"):
        # At most that many, and at most what a model of fixed size has rows for.
        return min(data.vocab_size or BPE_LIMIT, architecture.vocab_size)
    return load_tokenizer(data.tokenizer).vocab_size


def fit_vocabulary(
    config: ResolvedConfig, architecture: Architecture, entries: int, reasons: dict[str, str]
) -> tuple[ResolvedConfig, Architecture]:
    """Give the model as many embedding rows as its tokenizer has entries, or refuse a tokenizer that has more of them
    than the model has rows. The reason is put into `reasons`."""
    model = config.model
    is_open = model.vocab_size is None and model.weights is None and model.preset in OWN_PRESETS
    if is_open or "model.vocab_size" in reasons:
        rows = -(-entries // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        reasons["model.vocab_size"] = (
            f"the tokenizer's {entries:,} entries, rounded up to a multiple of {VOCAB_MULTIPLE}"
        )
        changed = dataclasses.replace(config, model=dataclasses.replace(model, vocab_size=rows))
        return changed, dataclasses.replace(architecture, vocab_size=rows)
    if entries > architecture.vocab_size:
        raise ConfigError(
            "the tokenizer has more entries than the model has embedding rows",
            got=f"{entries:,} entries",
            expected=f"at most {architecture.vocab_size:,}",
            do="use the tokenizer that belongs to the model (--data.tokenizer FOLDER), or set --model.vocab-size",
        )
    return config, architecture
