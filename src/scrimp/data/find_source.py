"""Which source a name or a path means; nothing is read but what says so.

The names stand in `scrimp.data.sources`.
Checked  tests/data/test_sources.py
"""

from __future__ import annotations

from pathlib import Path

from scrimp.data.columns import Column
from scrimp.data.hub import Hub, SavedDataset
from scrimp.data.label_maps import LabelMaps
from scrimp.data.sources import (
    CHATS,
    HUB,
    LABEL_MAPS,
    CopyTask,
    Files,
    Source,
    StandardLibrary,
    is_built_in,
    no_conversations,
    source_file,
    walk_files,
)
from scrimp.data.standard_chats import StandardChats
from scrimp.errors import DataError
from scrimp.files import storage


def open_source(source: str, column: str, *, conversations: bool = False) -> Source:
    """The source that a name or path means.

    Args:
        column: of the text; of conversations the column of their messages.
        conversations: read those, not text.
    """
    return _open_source(source, Column(column, conversations))


def _open_source(source: str, column: Column) -> Source:
    if is_built_in(source):
        return _built_in(source, column)
    if source.startswith(HUB):
        return Hub(source, column)
    path = Path(source).expanduser()
    with storage(path, "read"):
        exists, is_folder = path.exists(), path.is_dir()
    if not exists:
        raise DataError(
            f"there is no file or folder {source}",
            expected="stdlib, stdlib:PACKAGE, copy, label-maps:KIND, stdlib-docstrings, stdlib-signatures, a text, "
            "JSONL or Parquet file, a folder, or hf:OWNER/NAME for the Hugging Face hub",
            do=_hub_hint(source),
        )
    if is_folder:
        return _open_folder(path, column)
    file = source_file(path, path.name)
    if file is None:
        raise DataError(
            f"{path} is not a file", expected="a regular file", do="save its content to a file first"
        )
    if file.size == 0:
        raise DataError(f"{path} is empty", got="0 bytes", expected="text", do="give a file with text")
    return Files(str(path), [file], column, alone=True)


def _built_in(source: str, column: Column) -> Source:
    is_chat = source in CHATS
    if (is_chat or source == "copy") and Path(source).exists():
        raise DataError(
            f"{source} is {'a source of conversations' if is_chat else 'a task'}, and a file or folder here",
            got=str(Path(source).absolute()),
            expected="one of the two",
            do=f"write ./{source} for what lies here, or rename it",
        )
    if column.is_messages and not is_chat:
        raise no_conversations(source)
    if is_chat and not column.is_messages:
        raise DataError(
            f"{source} holds conversations, not text",
            expected="stdlib, stdlib:PACKAGE, copy, or a source of your own",
            do="set --objective.name sft (scrimp prepare, scrimp eval: --conversations) to learn from conversations",
        )
    if source in LABEL_MAPS:
        return LabelMaps(source)
    if is_chat:
        return StandardChats(source, column)
    return CopyTask() if source == "copy" else StandardLibrary(source)


def _hub_hint(source: str) -> str:
    looks_like_hub = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    return f"for the hub write {HUB}{source}" if looks_like_hub else "check the spelling of data.source"


def _open_folder(path: Path, column: Column) -> Source:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return SavedDataset(path, column)
    files = walk_files(path)
    if not files:
        raise DataError(
            f"the folder {path} holds no files", expected="text, JSONL or Parquet files", do="check the path"
        )
    if not any(file.size for file in files):
        raise DataError(
            f"all files in {path} are empty", got=f"{len(files)} files with 0 bytes", expected="text"
        )
    return Files(str(path), [file for file in files if file.size], column, alone=False)
