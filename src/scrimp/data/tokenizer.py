"""Text to token ids and back, in the forms that training and generation need.

Three kinds, all of them a Hugging Face `tokenizer.json` once saved:

    bytes   ids 0..255 are the bytes of UTF-8, 256 is <|endoftext|>
    bpe     byte-level BPE trained on the corpus; <|endoftext|> is id 0
    folder  any folder with a tokenizer.json (`transformers`' fast tokenizers)

Document form  What a document is in the token stream: [delimiter] + text. The delimiter is
               the tokenizer's BOS if it has one, else its EOS. With one delimiter the last
               token of a document has the next document's delimiter for its target, which
               teaches the model to end. A tokenizer with different BOS and EOS tokens gives
               [BOS] + text + [EOS]; the EOS then has no meaningful target.
Plain text     Text of a corpus that happens to contain the characters of a control token
               ("<|endoftext|>", "</s>") is encoded as those characters, never as the token, also
               where the model's own vocabulary holds it (Unigram, WordLevel). A token that text
               cannot do without, such as "!", stays text even if the folder declares it for padding.
               A prompt is encoded as `transformers` does it, special tokens included, but without
               those that the template puts behind the text (T5, BERT).
Limits         SentencePiece models without a tokenizer.json have to be converted first. Beside
               a config.json of model type qwen2, transformers 5 makes AutoTokenizer use Qwen's
               own rules whatever the folder says; PreTrainedTokenizerFast.from_pretrained
               loads a bytes or bpe tokenizer there as it is.
Checked        tests/data/test_tokenizer.py, against transformers.AutoTokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scrimp.data.corpus_manifest import TokenizerFigures
from scrimp.errors import DataError
from scrimp.files import make_folder, read_bounded, storage, write_whole
from scrimp.json_files import decode_json

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE = 257
"""The 256 bytes and the delimiter."""
CHAT_TEMPLATE = "chat_template.jinja"
_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    CHAT_TEMPLATE,
)
"""Files beside tokenizer.json that are read along with it."""
_LONGEST_COMPANION = 64 << 20

TokenArray = npt.NDArray[np.generic]


@contextmanager
def _panics_refused(name: str) -> Iterator[None]:
    """The tokenizers library panics, with an exception of its own, where a definition contradicts itself."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        what = f"the tokenizer {name} cannot encode: its tokenizer.json contradicts itself"
        raise DataError(what, got=error, do="copy the model's own tokenizer.json into the folder") from None


class Tokenizer:
    """A tokenizer and its special tokens.

    Args:
        definition: the content of tokenizer.json.
        companions: file name -> content of the other files of its folder.
        name: what errors call it.
    """

    def __init__(self, definition: str, companions: dict[str, str], *, name: str) -> None:
        self.name, self._definition, self._companions = name, definition, companions
        self._plain = _load_definition(definition, name)
        self.vocab_size: int = max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        bos, eos = _special_ids(self._plain, companions, name)
        self.delimiter_id: int = eos if bos is None else bos
        self.closing_id: int | None = None if bos is None or bos == eos else eos
        """EOS at the end of a document, for tokenizers with both BOS and EOS."""
        self._eos_id = eos
        self.dtype: np.dtype[Any] = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self.is_bytes = _is_bytes(definition)
        if not self.is_bytes:  # bytes are encoded without it
            _ = self._hidden

    @cached_property
    def digest(self) -> str:
        """Identifies what the tokenizer does: its definition and special tokens, not its path."""
        definition = {
            key: value
            for key, value in _json_object(self._definition, self.name).items()
            if key not in ("truncation", "padding")
        }
        content = json.dumps(
            [definition, self.delimiter_id, self.closing_id], sort_keys=True, ensure_ascii=False
        )
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def _hidden(self) -> tuple[tokenizers.Tokenizer, frozenset[int]]:
        """The tokenizer for plain text, and the ids that decoded text leaves out."""
        return _without_control_tokens(self._plain, self._definition, self._companions, self.name)

    def figures(self) -> TokenizerFigures:
        """What a corpus's manifest says of this tokenizer."""
        return TokenizerFigures(self.digest, self.vocab_size, self.delimiter_id, self.closing_id)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a document when generating."""
        ends = {self._eos_id}
        if "generation_config.json" in self._companions:
            declared = _json_object(self._companions["generation_config.json"], self.name).get("eos_token_id")
            ends.update(
                id_
                for id_ in (declared if isinstance(declared, list) else [declared])
                if isinstance(id_, int)
            )
        if self.closing_id is None:
            ends.add(self.delimiter_id)
        return frozenset(ends)

    def encode(self, text: str) -> TokenArray:
        """The ids of one document, in document form."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Documents in document form; encoded on all cores at once."""
        if self.is_bytes:
            return [self.encode_raw(text.encode()) for text in texts]
        with _panics_refused(self.name):
            encodings = self._hidden[0].encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._document_form(encoding.ids) for encoding in encodings]

    def encode_raw(self, raw: bytes) -> TokenArray:
        """The ids of one document in UTF-8, of a tokenizer whose ids are bytes."""
        return self._document_form(np.frombuffer(raw, dtype=np.uint8))

    def _document_form(self, ids: Sequence[int] | npt.NDArray[np.uint8]) -> TokenArray:
        closing = self.closing_id is not None
        form = np.empty(1 + len(ids) + closing, dtype=self.dtype)
        form[0] = self.delimiter_id
        form[1 : 1 + len(ids)] = ids
        if closing:
            form[-1] = self.closing_id
        return form

    def encode_prompt(self, text: str) -> list[int]:
        """The ids to generate from, as `transformers` encodes them; never empty, never ended by its template."""
        with _panics_refused(self.name):
            encoding = self._prompting.encode(text)
        ids, added = list(encoding.ids), list(encoding.special_tokens_mask)
        # What the template puts in front begins a document. What it puts behind ends one, and stays out.
        while ids and added[-1]:
            ids.pop()
            added.pop()
        return ids or [self.delimiter_id]

    @cached_property
    def _prompting(self) -> tokenizers.Tokenizer:
        return _load_definition(self._definition, self.name)

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja text of the folder's chat template (see chat_template.py); None where it has none."""
        if CHAT_TEMPLATE in self._companions:
            return self._companions[CHAT_TEMPLATE]
        found = _json_object(self._companions.get("tokenizer_config.json", "{}"), self.name).get(
            "chat_template"
        )
        if isinstance(found, list):  # several by name, as older folders have them
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same tokenizer with another chat template."""
        return Tokenizer(self._definition, self._companions | {CHAT_TEMPLATE: template}, name=self.name)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and the like, as templates know them, to their texts."""
        found: dict[str, str] = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            for key, token in _json_object(self._companions.get(file, "{}"), self.name).items():
                if key.endswith("_token") and (text := _text_of(token)) is not None:
                    found[key] = text
        return found

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of added tokens, control tokens among them."""
        return frozenset(self._plain.get_added_tokens_decoder())

    @cached_property
    def added_texts(self) -> tuple[str, ...]:
        """The texts of added tokens."""
        return tuple(token.content for token in self._plain.get_added_tokens_decoder().values())

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of text that spells its control tokens, none added, and of each the characters that it stands for."""
        with _panics_refused(self.name):
            encoding = self._prompting.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, without special tokens; ids beyond the vocabulary give nothing."""
        _, silent = self._hidden
        known = [id_ for id_ in map(int, ids) if 0 <= id_ < self.vocab_size and id_ not in silent]
        return str(self._plain.decode(known, skip_special_tokens=False))

    def files(self) -> dict[str, str]:
        """File name -> content of the folder that `transformers.AutoTokenizer` loads."""
        return {"tokenizer.json": self._definition, **self._companions}

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into `folder`, beside whatever is there."""
        make_folder(folder)
        for name, content in self.files().items():
            write_whole(folder / name, content.encode("utf-8", "surrogatepass"))

    def replace(self, folder: Path) -> None:
        """Write the tokenizer's files into `folder`, and remove what another one left that would be read with them."""
        for name in _COMPANIONS:
            if name not in self.files():
                with storage(folder / name, "remove"):
                    (folder / name).unlink(missing_ok=True)
        self.save(folder)


def _load_definition(definition: str, name: str) -> tokenizers.Tokenizer:
    """A tokenizer that neither cuts nor pads, whatever its file says."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises the bare class
        raise DataError(
            f"the tokenizer {name} cannot be read",
            got=str(error),
            expected="a tokenizer.json of the tokenizers library",
            do="save the tokenizer again",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_control_tokens(
    tokenizer: tokenizers.Tokenizer, definition: str, companions: dict[str, str], name: str
) -> tuple[tokenizers.Tokenizer, frozenset[int]]:
    """The tokenizer for plain text, and the ids of special tokens, which decoded text leaves out.

    No text becomes a control token: these get names that no text spells, in the model's vocabulary and
    among the added tokens alike, so that every token keeps its id.
    """
    content = _json_object(definition, name)
    model, added = content["model"], content.get("added_tokens") or []
    special = {token["content"] for token in added if token.get("special")}
    control = special | _declared_tokens(companions, name)
    delimiters = [id_ for id_ in _special_ids(tokenizer, companions, name) if id_ is not None]
    control |= {str(tokenizer.id_to_token(id_)) for id_ in delimiters}
    control -= {"", *filter(_text_symbols(model), control)}
    salt = hashlib.sha256(definition.encode("utf-8", "surrogatepass")).hexdigest()
    hidden = {token: f"\U0010ffff{salt} {number}" for number, token in enumerate(sorted(control))}
    _rename(model, hidden)
    for token in added:
        token["content"] = hidden.get(token["content"], token["content"])
    content["post_processor"] = None  # it names control tokens, and documents have their own
    encoder = _load_definition(json.dumps(content), name)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    assert encoder.get_vocab(with_added_tokens=True) == {
        hidden.get(token, token): id_ for token, id_ in ids.items()
    }
    encoder.encode_special_tokens = True
    return encoder, frozenset(ids[token] for token in special & control & ids.keys())


def _text_symbols(model: dict[str, Any]) -> Callable[[str], bool]:
    """Whether text needs a token of the model's vocabulary: a single character or byte, or a part of others.

    Some folders declare such a token as a control token, too ("!" for padding); it stays text.
    """
    vocabulary = model.get("vocab") or {}
    known = {piece for piece, _ in vocabulary} if isinstance(vocabulary, list) else vocabulary
    parts = {part for merge in model.get("merges") or () for part in _merge(merge)}
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""

    def is_symbol(token: str) -> bool:
        symbol = token.removeprefix(prefix).removesuffix(suffix)
        is_byte = model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token)
        return token in known and (len(symbol) == 1 or token in parts or bool(is_byte))

    return is_symbol


def _rename(model: dict[str, Any], hidden: dict[str, str]) -> None:
    """Give tokens of a model's vocabulary other names; merges that make them are dropped."""
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pairs of a piece and its score
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {hidden.get(token, token): id_ for token, id_ in vocabulary.items()}
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            merge
            for merge in model["merges"]
            if (pair := _merge(merge))[0] + pair[1].removeprefix(prefix) not in hidden
        ]


def _merge(merge: str | list[str]) -> tuple[str, str]:
    """The two parts of a merge, which older files write as one text."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _declared_tokens(companions: dict[str, str], name: str) -> set[str]:
    """The control tokens that a folder's configuration names."""
    found: set[str] = set()
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, declared in _json_object(companions.get(file, "{}"), f"{name}, {file}").items():
            several: list[Any] = [declared] if key.endswith("_token") else []
            if key in ("additional_special_tokens", "extra_special_tokens"):
                several = [*declared.values()] if isinstance(declared, dict) else declared or []
            for token in several if isinstance(several, list) else []:
                if (text := _text_of(token)) is not None:
                    found.add(text)
    return found


def _text_of(token: object) -> str | None:
    """The text of a token that a folder declares, as a string or as an object; None where it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json_object(content: str, name: str) -> dict[str, Any]:
    """The object in a tokenizer's file."""
    return decode_json(
        content,
        dict[str, Any],
        origin=f"the tokenizer {name}",
        error=DataError,
        do="save the tokenizer again",
        closed=False,
    )


def _is_bytes(definition: str) -> bool:
    """Whether ids are bytes, so that text needs no tokenizer at all."""
    bytes_ = bytes_definition()
    if definition == bytes_:
        return True
    ours: dict[str, Any] = json.loads(bytes_)
    theirs = _json_object(definition, "bytes")
    return all(
        ours.get(key) == theirs.get(key) for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")
    )


def _special_ids(
    tokenizer: tokenizers.Tokenizer, companions: dict[str, str], name: str
) -> tuple[int | None, int]:
    """BOS (or None) and EOS, as the folder's files declare them."""
    declared: dict[str, int] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = _json_object(companions.get(file, "{}"), f"{name}, {file}")
        for key in ("bos_token", "eos_token"):
            token = _text_of(config.get(key))
            if token is not None and (id_ := tokenizer.token_to_id(token)) is not None:
                declared.setdefault(key, id_)
    if not declared:
        for token in (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]"):
            if (id_ := tokenizer.token_to_id(token)) is not None:
                declared["eos_token"] = id_
                break
    if not declared:
        raise DataError(
            f"the tokenizer {name} has no token that separates documents",
            expected="a bos_token or eos_token in its tokenizer_config.json",
            do="set tokenizer.eos_token in transformers and save the tokenizer again",
        )
    bos = declared.get("bos_token")
    return bos, declared.get("eos_token", bos if bos is not None else -1)


def bytes_definition() -> str:
    """tokenizer.json of the bytes tokenizer: a byte-level BPE without merges."""
    from scrimp.data.bpe import byte_level, byte_symbols

    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    return byte_level(vocabulary, [], END_OF_TEXT)


def own_tokenizer(definition: str, name: str) -> Tokenizer:
    """A tokenizer made by Scrimp, with the configuration that transformers wants beside it."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return Tokenizer(definition, {"tokenizer_config.json": json.dumps(config, indent=2) + "\n"}, name=name)


def load_tokenizer(name_or_folder: str | Path) -> Tokenizer:
    """The tokenizer `bytes`, or the one of a folder (or of a tokenizer.json)."""
    if name_or_folder == "bytes":
        return own_tokenizer(bytes_definition(), "bytes")
    path = Path(name_or_folder).expanduser()
    folder = path.parent if path.name == "tokenizer.json" else path
    file = folder / "tokenizer.json"
    with storage(file, "read"):
        if not file.is_file():
            raise DataError(
                f"there is no tokenizer {name_or_folder}",
                got=_what_is_there(folder),
                expected="bytes, bpe (trained on the corpus), or a folder with a tokenizer.json",
                do="for another format, load it with transformers.AutoTokenizer and save_pretrained it to a folder",
            )
        definition = _read(file)
        companions = {name: _read(folder / name) for name in _COMPANIONS if (folder / name).is_file()}
    if "tokenizer_config.json" not in companions:
        bare = Tokenizer(definition, companions, name=str(name_or_folder))
        companions["tokenizer_config.json"] = _minimal_config(bare)
    return Tokenizer(definition, companions, name=str(name_or_folder))


def _what_is_there(folder: Path) -> str:
    if not folder.exists():
        return "no such folder"
    return "a file" if folder.is_file() else "a folder without a tokenizer.json"


def _read(file: Path) -> str:
    content = read_bounded(file, error=DataError, do="save the tokenizer again", at_most=_LONGEST_COMPANION)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text",
            got=f"an invalid byte at offset {error.start:,}",
            do="save the tokenizer again",
        ) from error


def _minimal_config(tokenizer: Tokenizer) -> str:
    eos = tokenizer._plain.id_to_token(tokenizer._eos_id)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(config, indent=2) + "\n"
