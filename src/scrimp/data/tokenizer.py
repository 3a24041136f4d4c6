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
Plain text     Text of a corpus that happens to contain the characters of a special token
               ("<|endoftext|>") is encoded as those characters, never as the special token.
               A prompt is encoded as `transformers` does it, special tokens included.
Limits         SentencePiece models without a tokenizer.json have to be converted first. Beside
               a config.json of model type qwen2, transformers 5 makes AutoTokenizer use Qwen's
               own rules whatever the folder says; PreTrainedTokenizerFast.from_pretrained
               loads a bytes or bpe tokenizer there as it is.
Checked        tests/data/test_tokenizer.py, against transformers.AutoTokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scrimp.errors import DataError
from scrimp.files import make_folder, storage, write_whole

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE = 257
"""The 256 bytes and the delimiter."""
_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
)
_LONGEST_COMPANION = 64 << 20

TokenArray = npt.NDArray[np.generic]


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
        self._plain.no_truncation()
        self._plain.no_padding()
        self._plain.encode_special_tokens = True
        self.vocab_size: int = max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        bos, eos = _special_ids(self._plain, companions, name)
        self.delimiter_id: int = eos if bos is None else bos
        self.closing_id: int | None = None if bos is None or bos == eos else eos
        """EOS at the end of a document, for tokenizers with both BOS and EOS."""
        self._eos_id = eos
        self.dtype: np.dtype[Any] = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self.is_bytes = _is_bytes(definition)

    @cached_property
    def digest(self) -> str:
        """Identifies what the tokenizer does: its definition and special tokens, not its path."""
        definition = {
            key: value
            for key, value in json.loads(self._definition).items()
            if key not in ("truncation", "padding")
        }
        content = json.dumps(
            [definition, self.delimiter_id, self.closing_id], sort_keys=True, ensure_ascii=False
        )
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a document when generating."""
        ends = {self._eos_id}
        if "generation_config.json" in self._companions:
            declared = _json_object(self._companions["generation_config.json"]).get("eos_token_id")
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
            return [self._document_form(np.frombuffer(text.encode(), dtype=np.uint8)) for text in texts]
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._document_form(encoding.ids) for encoding in encodings]

    def _document_form(self, ids: Sequence[int] | npt.NDArray[np.uint8]) -> TokenArray:
        closing = self.closing_id is not None
        form = np.empty(1 + len(ids) + closing, dtype=self.dtype)
        form[0] = self.delimiter_id
        form[1 : 1 + len(ids)] = ids
        if closing:
            form[-1] = self.closing_id
        return form

    def encode_prompt(self, text: str) -> list[int]:
        """The ids to generate from, as `transformers` encodes them; never empty, never ended."""
        ids: list[int] = list(self._prompting.encode(text).ids)
        if (
            len(ids) > 1
            and self.closing_id is not None
            and ids[-1] == self.closing_id
            and not text.endswith(self.closing_text)
        ):
            ids.pop()
        return ids or [self.delimiter_id]

    @cached_property
    def closing_text(self) -> str:
        """The characters of the closing token."""
        return "" if self.closing_id is None else str(self._plain.id_to_token(self.closing_id))

    @cached_property
    def _prompting(self) -> tokenizers.Tokenizer:
        prompting = _load_definition(self._definition, self.name)
        prompting.no_truncation()
        prompting.no_padding()
        return prompting

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, without special tokens; ids beyond the vocabulary give nothing."""
        known = [int(id_) for id_ in ids if 0 <= int(id_) < self.vocab_size]
        return str(self._plain.decode(known, skip_special_tokens=True))

    def files(self) -> dict[str, str]:
        """File name -> content of the folder that `transformers.AutoTokenizer` loads."""
        return {"tokenizer.json": self._definition, **self._companions}

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into `folder`, beside whatever is there."""
        make_folder(folder)
        for name, content in self.files().items():
            write_whole(folder / name, content.encode("utf-8", "surrogatepass"))


def _load_definition(definition: str, name: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises the bare class
        raise DataError(
            f"the tokenizer {name} cannot be read",
            got=str(error),
            expected="a tokenizer.json of the tokenizers library",
            do="save the tokenizer again",
        ) from error


def _json_object(content: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_bytes(definition: str) -> bool:
    """Whether ids are bytes, so that text needs no tokenizer at all."""
    ours: dict[str, Any] = json.loads(bytes_definition())
    theirs = _json_object(definition)
    return all(
        ours.get(key) == theirs.get(key) for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")
    )


def _special_ids(
    tokenizer: tokenizers.Tokenizer, companions: dict[str, str], name: str
) -> tuple[int | None, int]:
    """BOS (or None) and EOS, as the folder's files declare them."""
    declared: dict[str, int] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = _json_object(companions.get(file, ""))
        for key in ("bos_token", "eos_token"):
            token = config.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            id_ = tokenizer.token_to_id(token) if isinstance(token, str) else None
            if id_ is not None:
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
    with storage(file, "read"):
        content = file.read_bytes()
    if len(content) > _LONGEST_COMPANION:
        raise DataError(
            f"{file} is too large", got=f"{len(content):,} bytes", expected="a tokenizer's JSON file"
        )
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
