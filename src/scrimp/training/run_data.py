"""What a run learns from: its tokenizer, its vocabulary, its corpus.

Order    The tokenizer is decided first, and with it how many entries it has: those of one that exists; of one that is
         still to be trained, as many as it may get. The model gets its embedding rows by that number, then all settings
         are decided, and the run is planned before time is spent on a corpus. Where the trained tokenizer came out
         smaller, the run is decided once more, from what its user asked for
         (`scrimp.training.setup.Decisions.with_corpus`). A run that may fit with a smaller one is not refused before it
         is trained (`scrimp.training.start`).
Checked  tests/training/test_run_data.py, test_bad_input.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scrimp import objectives
from scrimp.config import OWN_PRESETS, Architecture, Config, DataConfig, ResolvedConfig
from scrimp.data import Corpus, CorpusSpec, Mixture, load_tokenizer, open_corpus, open_mixture, packed
from scrimp.data.corpus import check_wanted_tokenizer
from scrimp.data.corpus_manifest import read_manifest, shards_at
from scrimp.data.prepare import chat_tokenizer
from scrimp.errors import ConfigError, DataError, ModelError
from scrimp.training.distillation import TEACHERS, teachers_in
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
    elif config.data.tokens is not None:
        raise ConfigError(
            "data.tokens applies to text",
            got=f"{config.data.tokens:,} beside objective.name {config.objective.name}",
            do="leave it out, or give a file with fewer conversations",
        )
    elif not config.data.mask_documents:
        raise ConfigError(
            "data.mask_documents cannot be switched off for conversations",
            got="attention across the conversations of a sequence",
            do="leave it out: conversations are always kept apart",
        )


def decide_tokenizer(config: Config, architecture: Architecture) -> tuple[Config, dict[str, str]]:
    """Which tokenizer a run has, and how large one that is still to be trained may get; with reasons by dotted key.

    Raises:
        ConfigError, DataError, ModelError: settings that a ready tokenizer contradicts, or none where one is needed.
    """
    data, owner = config.data, _owner_of_tokenizer(config)
    reasons = {"data.source": "not read: data.mix stands in its place"} if data.mixed else {}
    shards = shards_of(data)
    if data.mixed and shards is not None:
        data, found = _tokenizer_of_mixed_shards(data)
        reasons |= found
    elif shards is not None:
        check_wanted_tokenizer(data.tokenizer, shards, read_manifest(shards))
        if data.tokenizer == "auto":
            reasons["data.tokenizer"] = "the one that the shards were made with"
    elif data.tokenizer == "auto" and owner is not None:
        key, weights = owner
        folder = tokenizer_of_weights(weights)
        if folder is None:
            raise ModelError(
                f"{weights} has no tokenizer that can be read",
                expected="a tokenizer.json: the weights mean nothing to another tokenizer's ids",
                do="save the model's tokenizer there with transformers, or name one with --data.tokenizer",
            )
        data, reasons["data.tokenizer"] = replace(data, tokenizer=str(folder)), f"the tokenizer of {key}"
    elif data.tokenizer == "auto":
        text = "the text of all sources" if data.mixed else "the corpus"
        data, reasons["data.tokenizer"] = replace(data, tokenizer="bpe"), f"trained on {text}"
    config = replace(config, data=data)
    if shards is not None or data.tokenizer != "bpe":
        return config, reasons | _checked_vocabulary_size(config)
    if reads_conversations(config):
        chat_tokenizer(corpus_spec(config, config.data.source), None)  # refuses
    if data.vocab_size is None:
        config = replace(config, data=replace(data, vocab_size=min(architecture.vocab_size, BPE_LIMIT)))
        reasons["data.vocab_size"] = f"the model's vocabulary, at most {BPE_LIMIT:,}"
    return config, reasons


def _owner_of_tokenizer(config: Config) -> tuple[str, Path] | None:
    """The folder whose tokenizer a run has unless its user names one, and the setting that names the folder."""
    if config.model.weights is not None:
        return "model.weights", config.model.weights
    teachers = teachers_in(config.objective)
    return (TEACHERS, teachers[0]) if teachers else None


def _tokenizer_of_mixed_shards(data: DataConfig) -> tuple[DataConfig, dict[str, str]]:
    """Which tokenizer a mixture has whose first shards bring theirs along, with the reason.

    Raises:
        ConfigError, DataError: sources of other tokenizers.
    """
    shards = [folder for folder in map(shards_at, data.sources) if folder is not None]
    chosen, reasons = data.tokenizer, {}
    if chosen == "bpe":
        raise ConfigError(
            "data.tokenizer bpe does not go with shards in data.mix",
            got=f"a tokenizer that would be trained, beside {shards[0]}, which has its own",
            do="leave data.tokenizer out: texts get the tokenizer of the shards",
        )
    if chosen == "auto":
        chosen = str(shards[0] / TOKENIZER)
        reasons["data.tokenizer"] = f"the one that the shards in {shards[0]} were made with"
    for folder in shards:
        check_wanted_tokenizer(chosen, folder, read_manifest(folder))
    return replace(data, tokenizer=chosen), reasons


def shards_of(data: DataConfig) -> Path | None:
    """The folder of ready shards, the first of a mixture, which bring their tokenizer along."""
    return next((folder for folder in map(shards_at, data.sources) if folder is not None), None)


def _checked_vocabulary_size(config: Config) -> dict[str, str]:
    """Refuse a size that the ready tokenizer does not keep; of another one, why it changes nothing.

    It is no contradiction: a recipe sets one for its first run, whose tokenizer the next one goes on with.
    """
    data, shards = config.data, shards_of(config.data)
    if data.vocab_size is None:
        return {}
    name = shards / TOKENIZER if shards is not None and data.tokenizer == "auto" else data.tokenizer
    entries = load_tokenizer(name).vocab_size
    if entries > data.vocab_size:
        raise ConfigError(
            "the tokenizer has more entries than data.vocab_size",
            got=f"{entries:,} in {name}",
            expected=f"at most {data.vocab_size:,}",
            do="leave data.vocab_size out, or set --data.tokenizer bpe to train one on a text",
        )
    return {"data.vocab_size": f"the tokenizer is there already, and has {entries:,} entries"}


def corpus_spec(config: Config, source: str) -> CorpusSpec:
    """What `scrimp.data` needs to know of a configuration to read one of its sources."""
    data = config.data
    return CorpusSpec(
        source=source,
        text_column=data.text_column,
        conversations=reads_conversations(config),
        chat_template=data.chat_template,
        tokenizer=data.tokenizer,
        bpe_vocab_size=data.vocab_size or BPE_LIMIT,
        held_out=data.held_out,
    )


def open_run_corpus(
    config: Config, world: World, *, progress: bool = True, digest: str | None = None
) -> Corpus | Mixture:
    """Open the corpus of a run, or those that it mixes; what is not prepared yet is.

    Args:
        digest: of the corpus that the run was begun with, if it was.
    """
    data = config.data
    specs = [corpus_spec(config, source) for source in data.sources]
    corpus: Corpus | Mixture
    with world.writer_first("opening the data"):  # which prepares them; the others find shards
        if data.mixed:
            shares = [source.share for source in data.mixed]
            corpus = open_mixture(specs, shares, cache=data.cache, progress=progress)
        else:
            corpus = open_corpus(specs[0], cache=data.cache, progress=progress, digest=digest)
        if data.tokens is not None:
            for part in corpus.parts:
                part.train = part.train.first(data.tokens + 1)  # the last one has a target
    world.agree("the data", corpus.digest, do="give all ranks the same source and the same cache")
    return corpus


def refuse_short(config: ResolvedConfig, corpus: Corpus | Mixture) -> None:
    """Raise DataError for a corpus, the run's or one that it mixes, that fills no sequence of the run, or has less than
    `data.tokens` to train on; of a mixture's sources without weight nothing is trained on."""
    for source, part in zip(config.data.sources, corpus.parts, strict=True):
        _refuse_short(source, config.train.sequence, part)
    wanted, mixed = config.data.tokens or 0, config.data.mixed
    shares = [one.share for one in mixed] if mixed else [1] * len(corpus.parts)
    for source, share, part in zip(config.data.sources, shares, corpus.parts, strict=True):
        if share and part.train.num_tokens < wanted:
            raise DataError(
                f"{source} has fewer training tokens than data.tokens",
                got=f"{part.train.num_tokens:,} tokens",
                expected=f"at least {wanted:,}",
                do="lower --data.tokens, or give a source with more text",
            )


def _refuse_short(source: str, sequence: int, corpus: Corpus) -> None:
    if corpus.holds_conversations:
        try:
            packed(corpus.train, sequence)  # refused here where nothing fits
            if corpus.held_out.num_tokens:
                packed(corpus.held_out, sequence, "held-out")
        except DataError as error:
            raise DataError(f"{source}: {error.what}", got=error.got, do=error.do) from None
    elif corpus.train.num_tokens < sequence + 1:
        raise DataError(
            f"what is trained on of {source} is shorter than one sequence",
            got=f"{corpus.train.num_tokens:,} tokens",
            expected=f"at least {sequence + 1:,} (train.sequence + 1)",
            do="give more text, raise --data.tokens, or lower --train.sequence",
        )


def refuse_other_tokenizer(config: Config, corpus: Corpus | Mixture) -> None:
    """Refuse to train weights on the ids of a tokenizer that is not theirs.

    Raises:
        ModelError: the corpus has another tokenizer than model.weights.
    """
    weights = config.model.weights
    folder = tokenizer_of_weights(weights) if weights and weights.is_dir() else None
    if folder is None or load_tokenizer(folder).digest == corpus.tokenizer.digest:
        return
    raise ModelError(
        f"the tokenizer of {', '.join(config.data.sources)} is not the one of {weights}",
        got=f"{corpus.tokenizer.name}, {corpus.tokenizer.vocab_size:,} entries",
        expected=f"the tokenizer in {folder}: to another one's ids the weights mean nothing",
        do=f"leave --data.tokenizer out; shards are made with `scrimp prepare ... --tokenizer {folder}`",
    )


def has_open_vocabulary(config: Config) -> bool:
    """Whether the embedding gets its rows by the tokenizer."""
    model = config.model
    return model.vocab_size is None and model.weights is None and model.preset in OWN_PRESETS


def trains_tokenizer(config: Config) -> bool:
    """Whether the tokenizer is still to be trained, and may come out smaller than it may get."""
    data = config.data
    is_bpe = data.tokenizer == "bpe" or (data.tokenizer == "auto" and _owner_of_tokenizer(config) is None)
    return is_bpe and shards_of(data) is None


def expected_vocabulary(config: Config, architecture: Architecture) -> int:
    """Entries of the tokenizer that a run will have, before its corpus is prepared: of one that is still to be trained,
    as many as it may get, and where the model's rows are fixed no more than these."""
    data = config.data
    shards = shards_of(data)
    if shards is not None:
        return load_tokenizer(shards / TOKENIZER).vocab_size
    if data.tokenizer != "bpe":
        return load_tokenizer(data.tokenizer).vocab_size
    most = data.vocab_size or BPE_LIMIT
    return most if has_open_vocabulary(config) else min(most, architecture.vocab_size)


def rows_for(entries: int) -> int:
    """Rows of an embedding that gets them by its tokenizer."""
    return -(-entries // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def fit_vocabulary(config: Config, architecture: Architecture, entries: int) -> tuple[Config, Architecture]:
    """Give the model as many embedding rows as its tokenizer has entries, where they are open.

    Raises:
        ConfigError: more entries than a model has rows whose number is fixed.
    """
    if has_open_vocabulary(config):
        rows = rows_for(entries)
        return replace(config, model=replace(config.model, vocab_size=rows)), replace(
            architecture, vocab_size=rows
        )
    if entries > architecture.vocab_size:
        raise ConfigError(
            "the tokenizer has more entries than the model has embedding rows",
            got=f"{entries:,} entries",
            expected=f"at most {architecture.vocab_size:,}",
            do="use the tokenizer that belongs to the model (--data.tokenizer FOLDER), or set --model.vocab-size",
        )
    return config, architecture
