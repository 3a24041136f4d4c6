"""Tokenizers agree with transformers on ids and text; documents have the promised form."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples
from tokenizers import models, pre_tokenizers, processors, trainers

from scrimp.data import Tokenizer, load_tokenizer
from scrimp.data.bpe import sample, train_bpe
from scrimp.data.documents import documents
from scrimp.data.split import Split
from scrimp.data.tokenizer import END_OF_TEXT, own_tokenizer
from scrimp.errors import DataError

SAMPLES = [
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\n",
    "  indented\n\tdef f(x):\n        return x ** 2  # 12345\n",
    "naïve Straße 數學 🙂🙂 e\u0301 \u00e9 don't I'LL we've",
    " leading and trailing  \r\n",
    "a",
    "\x00\x7f\u2028",
    f"text with {END_OF_TEXT} in it",
]
BARE = tokenizers.Tokenizer(models.BPE()).to_str().encode()
WORDS = "the river of stone runs and falls, naïve 12345 while the stone stays in the river. " * 40


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return own_tokenizer(train_bpe([WORDS, *SAMPLES], 400, END_OF_TEXT), "bpe")


def auto_tokenizer(folder: Path, model_type: str = "llama") -> object:
    """The folder as transformers loads it, beside a model's configuration."""
    import transformers

    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if model_type == "qwen2":  # there AutoTokenizer overrides the folder with Qwen's own rules
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_transformers_gives_the_same_ids_and_text(
    tmp_path: Path, bpe: Tokenizer, kind: str, model_type: str
) -> None:
    ours = bpe if kind == "bpe" else load_tokenizer("bytes")
    ours.save(tmp_path)
    theirs = auto_tokenizer(tmp_path, model_type)
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id == theirs.bos_token_id == ours.delimiter_id
    for text in SAMPLES:
        plain = theirs(text, split_special_tokens=True).input_ids
        assert ours.encode(text).tolist() == plain
        assert ours.encode_prompt(text) == theirs(text).input_ids
        assert ours.decode(plain) == text
        assert theirs.decode(plain, skip_special_tokens=True) == text
    assert ours.encode_prompt("") == [ours.delimiter_id]


@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_comes_back_from_its_ids(bpe: Tokenizer, text: str) -> None:
    for tokenizer in (bpe, load_tokenizer("bytes")):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids[0] == tokenizer.delimiter_id
        assert tokenizer.delimiter_id not in ids[1:]
        assert ids.dtype.itemsize == 2


def test_bytes_are_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("hé").tolist() == [256, *"hé".encode()]
    assert tokenizer.is_bytes
    assert tokenizer.end_ids == {256}
    assert tokenizer.decode([104, 9999, 105]) == "hi"


def test_training_a_bpe_twice_gives_the_same_tokenizer() -> None:
    texts = [WORDS[start:] for start in range(50)]
    assert train_bpe(texts, 500, END_OF_TEXT) == train_bpe(texts, 500, END_OF_TEXT)


def test_the_sample_is_bounded_and_leaves_out_held_out_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = list(documents(f"document number {number:05d}" for number in range(2000)))
    monkeypatch.setattr("scrimp.data.bpe.SAMPLE_BYTES", 10_000)
    corpus = list(Split(1 << 62).parts(corpus))
    texts = sample(iter(corpus))
    assert 9_900 < sum(map(len, texts)) <= 10_000
    assert texts == sorted(texts)  # the order of the corpus
    by_text = {document.text: document for document in corpus}
    assert not any(by_text[text].held_out for text in texts)
    trained = sorted(document.hash for document in corpus if not document.held_out)
    assert sorted(by_text[text].hash for text in texts) == trained[: len(texts)]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_saved_and_loaded_is_the_same_tokenizer(tmp_path: Path, bpe: Tokenizer, kind: str) -> None:
    ours = bpe if kind == "bpe" else load_tokenizer("bytes")
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.digest == ours.digest
    assert again.is_bytes == ours.is_bytes
    assert again.files() == ours.files()
    assert load_tokenizer(str(tmp_path / "saved" / "tokenizer.json")).digest == ours.digest
    assert bpe.digest != load_tokenizer("bytes").digest


def test_a_replaced_tokenizer_leaves_nothing_that_is_read_with_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "the"}))
    (tmp_path / "notes.txt").write_text("mine")
    ours = load_tokenizer("bytes")
    ours.replace(tmp_path)
    assert load_tokenizer(tmp_path).files() == ours.files()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def save_foreign(
    folder: Path, *, bos: str | None, eos: str | None, vocab_size: int = 500, **config: object
) -> Path:
    """A small Hugging Face folder whose post-processor adds BOS and EOS, as some models' do."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = [token for token in (bos, eos, "<pad>") if token]
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=False))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trained.train_from_iterator(
        [WORDS],
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )  # fmt: skip
    if bos or eos:
        ends = [token for token in (bos, "$A", eos) if token]
        ids = [(token, trained.token_to_id(token)) for token in {bos, eos} if token]
        trained.post_processor = processors.TemplateProcessing(single=ends, special_tokens=ids)
    trained.enable_truncation(16)
    trained.enable_padding(length=16)
    trained.save(str(folder / "tokenizer.json"))
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    return folder


def test_a_folder_with_bos_and_eos_frames_documents_with_both(tmp_path: Path) -> None:
    folder = save_foreign(tmp_path / "hf", bos="<s>", eos="</s>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    ours, theirs = load_tokenizer(folder), auto_tokenizer(folder)
    assert (ours.delimiter_id, ours.closing_id) == (theirs.bos_token_id, theirs.eos_token_id) == (0, 1)
    assert ours.end_ids == {1, 7}
    text = WORDS[:300]
    ids = ours.encode(text).tolist()
    assert ids == theirs(text, truncation=False, padding=False).input_ids
    assert len(ids) > 16  # the file's truncation to 16 is not used
    assert ours.encode_prompt(text) == ids[:-1]
    assert ours.decode(ids) == text
    ours.save(tmp_path / "saved")
    saved = auto_tokenizer(tmp_path / "saved")
    assert saved(text, truncation=False, padding=False).input_ids == ids
    assert load_tokenizer(tmp_path / "saved").digest == ours.digest


def test_a_folder_with_eos_only_puts_it_in_front(tmp_path: Path) -> None:
    folder = save_foreign(tmp_path, bos=None, eos="<|im_end|>")
    ours = load_tokenizer(folder)
    end = ours.delimiter_id
    assert ours.closing_id is None
    assert ours.encode("the river")[0] == end
    assert end not in ours.encode("the river")[1:]
    assert ours.end_ids == {end}


T5_PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "abs/<>punkd")]


def save_control(folder: Path, model: models.Model, specials: list[str], **config: str) -> Path:
    """A Hugging Face folder whose model holds its control tokens in its own vocabulary, as T5's and BERT's do."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(specials)
    if isinstance(model, models.Unigram):
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = tokenizers.decoders.Metaspace()
        single = "$A </s>"
    else:
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        single = "[CLS] $A [SEP]"
    ids = [(token, made.token_to_id(token)) for token in single.split() if token != "$A"]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    return folder


def t5(folder: Path, specials: list[str]) -> Tokenizer:
    model = models.Unigram(T5_PIECES, unk_id=2, byte_fallback=False)
    tokens = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return load_tokenizer(save_control(folder, model, specials, **tokens))


def bert(folder: Path, specials: list[str], kind: str = "WordLevel") -> Tokenizer:
    vocabulary = {token: id_ for id_, token in enumerate(["[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    model = getattr(models, kind)(vocabulary, unk_token="[UNK]")
    tokens = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return load_tokenizer(save_control(folder, model, specials, **tokens))


@pytest.mark.parametrize("declared", [True, False])
def test_text_that_spells_a_control_token_stays_text(tmp_path: Path, declared: bool) -> None:
    """Whether tokenizer.json marks the token as special, or only its configuration names it."""
    unigram = t5(tmp_path / "t5", ["<pad>", "</s>", "<unk>"] if declared else [])
    ids = unigram.encode("a</s>b<pad>").tolist()
    assert ids[0] == unigram.delimiter_id == 1
    assert not {0, 1, 2} & set(ids[1:])
    assert unigram.decode(ids[1:]) == "a</s>b<pad>"
    for kind in ("WordLevel", "WordPiece"):
        words = bert(tmp_path / kind, ["[UNK]", "[CLS]", "[SEP]"] if declared else [], kind)
        assert words.encode("a [SEP] b [CLS] unknown").tolist() == [2, 3, 0, 4, 0, 0]
    assert unigram.digest == load_tokenizer(tmp_path / "t5").digest


def test_a_prompt_is_not_ended_by_the_template(tmp_path: Path) -> None:
    unigram, words = t5(tmp_path / "t5", ["<pad>", "</s>"]), bert(tmp_path / "bert", ["[CLS]", "[SEP]"])
    assert unigram.encode_prompt("ab") == unigram.encode("ab").tolist()[1:]
    assert words.encode_prompt("a b") == [1, 3, 4]
    # an end that the user wrote stays
    assert unigram.encode_prompt("ab</s>")[-1] == 1
    assert words.encode_prompt("a b [SEP]") == [1, 3, 4, 2]
    assert unigram.encode_prompt("") == [1]
    assert words.encode_prompt("") == [words.delimiter_id] == [2]


def test_special_tokens_may_be_declared_as_objects_or_in_the_map(tmp_path: Path) -> None:
    folder = save_foreign(tmp_path / "object", bos="<s>", eos="</s>")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None})
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.delimiter_id, tokenizer.closing_id) == (0, 1)


def test_a_bare_tokenizer_json_gets_a_configuration(tmp_path: Path) -> None:
    folder = save_foreign(tmp_path / "bare", bos=None, eos="</s>")
    (folder / "tokenizer_config.json").unlink()
    load_tokenizer(folder).save(tmp_path / "saved")
    assert auto_tokenizer(tmp_path / "saved").eos_token == "</s>"


@pytest.mark.slow
def test_a_large_vocabulary_needs_four_bytes(tmp_path: Path) -> None:
    folder = save_foreign(tmp_path, bos=None, eos="</s>")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"].update({f"token{number}": 1000 + number for number in range(65_000)})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 66_000
    assert tokenizer.encode("river").dtype.itemsize == 4


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "a folder without a tokenizer.json"),
        ({"tokenizer.model": b"sentencepiece"}, "AutoTokenizer"),
        ({"tokenizer.json": b"{}"}, "cannot be read"),
        ({"tokenizer.json": b"\xff"}, "not UTF-8"),
        ({"tokenizer.json": BARE}, "separates documents"),
        ({"tokenizer.json": BARE, "tokenizer_config.json": b"{"}, "tokenizer_config.json is not JSON"),
        ({"tokenizer.json": BARE, "special_tokens_map.json": b"[" * 10**5}, "special_tokens_map.json"),
        ({"tokenizer.json": BARE[:-1] + b',"x":' + b"9" * 5000 + b"}"}, "separates|cannot be read|64 bits"),
    ],
)
def test_folders_without_a_usable_tokenizer_are_refused(
    tmp_path: Path, files: dict[str, bytes], match: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=match):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
