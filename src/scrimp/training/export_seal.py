"""scrimp.json: the checksums of an exported model, and how it was trained, for `scrimp verify` and `eval`.

Other tools ignore the file. A folder that was changed on purpose after the export no longer
verifies; it still loads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from scrimp.errors import CheckpointError
from scrimp.files import write_whole
from scrimp.json_files import read_json
from scrimp.training.checkpoint_manifest import FileRecord, hash_files

SEAL: Final = "scrimp.json"
VERSION: Final = 1


@dataclass(frozen=True)
class Seal:
    """The content of scrimp.json."""

    scrimp_export: int
    step: int
    """Step of the checkpoint that was exported."""
    files: dict[str, FileRecord]
    mask_documents: bool | None = None
    """Whether attention kept documents apart in training; None in exports of earlier versions."""


def seal_export(folder: Path, step: int, *, mask_documents: bool) -> None:
    """Hash every file of an export, and write scrimp.json beside them. Raises OSError, StorageError."""
    seal = Seal(VERSION, step, hash_files(folder, apart_from=SEAL), mask_documents)
    write_whole(folder / SEAL, json.dumps(asdict(seal), indent=1) + "\n")


def read_seal(folder: Path) -> Seal | None:
    """The seal of an export; None of a folder of another tool or an earlier version."""
    path = folder / SEAL
    if not path.exists():
        return None
    seal = read_json(path, Seal, error=CheckpointError, do="export the run again", at_most=1 << 24)
    if any(Path(name).name != name for name in seal.files) or seal.scrimp_export != VERSION:
        raise CheckpointError(f"{path} is damaged or of another version", do="export the run again")
    return seal
