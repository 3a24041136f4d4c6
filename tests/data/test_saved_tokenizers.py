"""Folders that transformers saves: they load, and plain text has the ids that the original gives it."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from property_tests import examples
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from scrimp.data import CorpusSpec, Tokenizer, load_tokenizer, prepare
from scrimp.data.corpus_manifest import read_manifest
from scrimp.errors import DataError

KINDS = ["WordLevel", "WordPiece", "Unigram", "byte-level BPE", "SentencePiece BPE"]
ALPHABET = "abcdehilnorstuvwy <>/|_![]#.,0123456789é"
WORDS = ["hello", "you", "think", "the", "river", "of", "stone", "runs!", "!", "<|a|>", "[b]", "x/y", "12.5"]
TEXTS = [" ".join(WORDS[start:] + WORDS[:start]) for start in range(len(WORDS))] * 4
CONTROL = ["<pad>", "<s>", "</s>", "<unk>"]


def trained(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer whose vocabulary begins with the control tokens."""
    options: dict[str, Any] = {"special_tokens": CONTROL, "show_progress": False}
    if kind == "WordLevel":
        made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(**options)
    elif kind == "WordPiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.Lowercase()
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, initial_alphabet=list(ALPHABET), **options)
    elif kind == "Unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=120, unk_token="<unk>", initial_alphabet=list(ALPHABET), **options
        )
    else:
        is_bytes = kind == "byte-level BPE"
        made = tokenizers.Tokenizer(models.BPE() if is_bytes else models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = (
            pre_tokenizers.ByteLevel(add_prefix_space=False)
            if is_bytes
            else pre_tokenizers.Split(Regex("(?<=.)(?= )"), "isolated")
        )
        if is_bytes:
            made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet() if is_bytes else list(ALPHABET)
        trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, **options)
    made.train_from_iterator(TEXTS, trainer)
    return made


def saved(folder: Path, made: tokenizers.Tokenizer, **config: Any) -> Tokenizer:
    """What Scrimp makes of the folder that transformers writes for a tokenizer."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"} | config
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **tokens).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_transformers_saves_loads(tmp_path: Path, kind: str) -> None:
    made = trained(kind)
    ours = saved(tmp_path, made)
    assert str(int(1e30)) in (tmp_path / "tokenizer_config.json").read_text()  # no limit of length
    for text in TEXTS:
        assert ours.encode(text).tolist() == [1, *made.encode(text, add_special_tokens=False).ids, 2]


ORDINARY = ["<tool>", "<think>"]
SPECIAL = ["<|im_start|>", "<|im_end|>"]
pieces = st.sampled_from([*WORDS, *ORDINARY, " ", "!!", "s!", "</", "s>", "<", "|>", "PAD"]) | st.text(
    max_size=5
)
texts = st.lists(pieces, max_size=12).map(" ".join) | st.lists(pieces, max_size=12).map("".join)


@functools.cache
def chat(kind: str, pad: str, is_added: bool = True) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """A saved chat model's tokenizer, and its original: control tokens, then ordinary tokens, are added.

    Args:
        pad: the padding token, which may be an ordinary symbol.
        is_added: whether tokenizer.json lists the padding token, or only the configuration names it.
    """
    made = trained(kind)
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(token, normalized=False) for token in ORDINARY])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved(folder, made, pad_token=pad, additional_special_tokens=SPECIAL)
        file = folder / "tokenizer.json"
        if not is_added:
            content = json.loads(file.read_text())
            content["added_tokens"] = [row for row in content["added_tokens"] if row["content"] != pad]
            file.write_text(json.dumps(content))
        original = tokenizers.Tokenizer.from_file(str(file))
        original.encode_special_tokens = True
        return load_tokenizer(folder), original


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_keep_their_ids(kind: str) -> None:
    ours, original = chat(kind, "<pad>")
    ids = ours.encode("hello <tool> you <think>").tolist()
    assert ids[1:-1] == original.encode("hello <tool> you <think>", add_special_tokens=False).ids
    assert [id_ for id_ in ids if id_ >= ours.vocab_size - 2] == [
        original.token_to_id(token) for token in ORDINARY
    ]


@pytest.mark.parametrize("is_added", [True, False])
@pytest.mark.parametrize("pad", ["<pad>", "!"])
@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(text=texts)
def test_plain_text_has_the_original_ids(kind: str, pad: str, is_added: bool, text: str) -> None:
    ours, original = chat(kind, pad, is_added)
    assume(not any(token in text for token in [*CONTROL, *SPECIAL]))
    ids = ours.encode(text).tolist()
    assert ids[1:-1] == original.encode(text, add_special_tokens=False).ids
    if kind == "byte-level BPE":
        assert ours.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(parts=st.lists(st.sampled_from([*CONTROL, *SPECIAL, *ORDINARY]) | texts, max_size=6))
def test_no_text_becomes_a_control_token(kind: str, parts: list[str]) -> None:
    ours, original = chat(kind, "<pad>")
    control = {original.token_to_id(token) for token in [*CONTROL, *SPECIAL] if token != "<unk>"}
    for text in ("".join(parts), " ".join(parts)):
        ids = ours.encode(text).tolist()
        assert not control & set(ids[1:-1])
        if kind == "byte-level BPE":
            assert ours.decode(ids) == text


def test_declared_tokens_are_control_tokens_wherever_they_stand(tmp_path: Path) -> None:
    """Named by the configuration alone, in the vocabulary (as a word) or among the ordinary added tokens."""
    made = trained("WordLevel")
    made.add_tokens(["<a>", "<b>", "<c>"])
    saved(tmp_path, made)
    path = tmp_path / "tokenizer_config.json"
    lists = {"additional_special_tokens": ["<a>", {"content": "river"}], "extra_special_tokens": {"b": "<b>"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | lists))
    ours = load_tokenizer(tmp_path)
    unknown, stone, third = (made.token_to_id(token) for token in ("<unk>", "stone", "<c>"))
    assert ours.encode("<a> stone river <b> <c>").tolist()[1:-1] == [unknown, stone, unknown, unknown, third]


def test_merges_that_spell_a_control_token_never_make_it(tmp_path: Path) -> None:
    """As in Llama's tokenizer.json, which was made from a SentencePiece model."""
    symbols = ["<s>", "</s>", "<", "/", "s", ">", "!", "</", "s>", "s!", "<s"]
    merges = [("<", "/"), ("s", ">"), ("s", "!"), ("</", "s>"), ("<", "s"), ("<s", ">"), ("<", "s>")]
    made = tokenizers.Tokenizer(models.BPE({token: id_ for id_, token in enumerate(symbols)}, merges))
    ours = saved(tmp_path, made, pad_token="!", unk_token=None)
    spelled = [[symbols[id_] for id_ in ours.encode(text)[1:-1]] for text in ("</s>", "<s>", "s!!")]
    assert spelled == [["</", "s>"], ["<", "s>"], ["s!", "!"]]
    assert ours.decode(ours.encode("s!!")).replace(" ", "") == "s!!"


def test_nothing_is_added_to_shards_that_may_hold_wrong_ids(tmp_path: Path, text_file: Path) -> None:
    saved(tmp_path / "saved", trained("WordLevel"))
    for tokenizer in ("bytes", str(tmp_path / "saved")):
        out = tmp_path / f"shards {len(tokenizer)}"
        spec = CorpusSpec(source=str(text_file), tokenizer=tokenizer)
        prepare(spec, out, progress=False)
        manifest = read_manifest(out)
        replace(manifest, settings=manifest.settings | {"rules": 2}).write(out)
        if tokenizer == "bytes":
            prepare(spec, out, progress=False)
            continue
        with pytest.raises(DataError, match="added tokens may have wrong ids"):
            prepare(spec, out, progress=False)
