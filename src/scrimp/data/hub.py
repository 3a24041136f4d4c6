"""Texts out of Hugging Face data sets, saved on this machine or streamed from the hub.

A saved data set with a validation split of its own is evaluated on that. Of one on the hub only the
train split is read.

`datasets` is imported only here, and only when such a source is asked for. It is told to run
no code of the data set, which its versions since 4.0 cannot do anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from scrimp.data.columns import Column, missing_column
from scrimp.data.sources import HUB, Source, fingerprint_files, walk_files
from scrimp.data.streams import Meter
from scrimp.errors import DataError, ScrimpError

VALIDATION_SPLITS = ("validation", "valid", "val", "dev")
"""Names under which data sets keep text for evaluation while training; `test` is for the end."""
_ROWS = 256
_HUB_SECONDS = 15.0


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class SavedDataset(Source):
    """A folder written by `datasets`' save_to_disk; of one with splits `split`, else its train split."""

    def __init__(self, path: Path, column: Column, split: str | None = None) -> None:
        super().__init__(str(path) if split is None else f"{path}, split {split}")
        self.path, self.column, self.split = path, column, split
        self._files = walk_files(path)
        self.num_bytes = sum(file.size for file in self._files)

    def validation(self) -> Source | None:
        import datasets

        loaded = self._open()
        if not isinstance(loaded, datasets.DatasetDict) or "train" not in loaded:
            return None
        split = next((name for name in VALIDATION_SPLITS if name in loaded), None)
        return None if split is None else SavedDataset(self.path, self.column, split)

    def texts(self, meter: Meter) -> Iterator[str]:
        self.skipped = {}
        table = self._load()
        name = self.column.name
        if name not in table.column_names:
            raise missing_column(self.name, name, table.column_names)
        rows, start = max(table.num_rows, 1), meter.bytes
        done = 0
        for batch in table.select_columns([name]).iter(batch_size=_ROWS):
            yield from self.column.texts(batch[name], self.name, done, self.skipped)
            done += len(batch[name])
            meter.bytes = start + (self.num_bytes or 0) * done // rows

    def _open(self) -> Any:
        import datasets

        try:
            return datasets.load_from_disk(str(self.path))
        except Exception as error:  # whatever a damaged folder makes of it
            raise DataError(
                f"{self.path} cannot be loaded as a saved data set",
                got=_first_line(error),
                expected="a folder written by save_to_disk",
                do="save the data set again",
            ) from error

    def _load(self) -> Any:
        import datasets

        loaded = self._open()
        if self.split is not None:
            return loaded[self.split]
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if "train" in loaded:
            return loaded["train"]
        if len(loaded) == 1:
            return next(iter(loaded.values()))
        raise DataError(
            f"{self.path} has no train split",
            got=f"the splits {', '.join(loaded)}",
            do="give the folder of one split",
        )

    def fingerprint(self) -> str:
        return fingerprint_files(self._files)


class Hub(Source):
    """The train split of a data set on the hub, streamed, at the revision it has now.

    The revision is asked for first: it pins the text, it is the fingerprint, and a hub that
    cannot be reached is noticed at once (`datasets` tries again for half a minute).
    """

    def __init__(self, name: str, column: Column) -> None:
        super().__init__(name)
        self.column = column
        self.repository, _, config = name.removeprefix(HUB).partition(":")
        self.config = config or None
        parts = self.repository.split("/")
        if len(parts) > 2 or not all(parts):
            raise DataError(
                f"{name} is not the name of a data set", expected=f"{HUB}OWNER/NAME or {HUB}OWNER/NAME:CONFIG"
            )

    def texts(self, meter: Meter) -> Iterator[str]:
        self.skipped = {}
        stream = self._open()
        for number in itertools.count(1):
            try:
                row = next(stream, None)
            except ScrimpError:
                raise
            except Exception as error:  # the network, or a data set that does not parse
                raise self._unreachable(error) from error
            if row is None:
                return
            if self.column.name not in row:
                raise missing_column(self.name, self.column.name, row)
            text = self.column.text(row[self.column.name], f"{self.name}, row {number:,}", self.skipped)
            if text is not None:
                meter.bytes += len(text)
                yield text

    def _open(self) -> Iterator[dict[str, Any]]:
        import datasets

        try:
            loaded = datasets.load_dataset(
                self.repository, self.config, split="train", streaming=True, revision=self.revision
            )
        except Exception as error:  # the network, a name that is not there, a split that is not there
            raise self._unreachable(error) from error
        return iter(loaded)

    @cached_property
    def revision(self) -> str:
        """The commit of the data set that is read."""
        import huggingface_hub

        try:
            info = huggingface_hub.HfApi().dataset_info(self.repository, timeout=_HUB_SECONDS)
        except Exception as error:  # the network, or a name that is not there
            raise self._unreachable(error) from error
        return str(info.sha)

    def _unreachable(self, error: Exception) -> DataError:
        return DataError(
            f"{self.name} cannot be read from the Hugging Face hub",
            got=f"{type(error).__name__}: {_first_line(error)}",
            expected="a data set with a train split, and a way to the hub",
            do="check the name and the network, or save the data set to a folder and give that",
        )

    def fingerprint(self) -> str:
        return f"{self.repository}:{self.config or ''}@{self.revision}"
