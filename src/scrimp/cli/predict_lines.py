"""`scrimp plan --batch`: a setting a line, an answer a line."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from scrimp.errors import ConfigError
from scrimp.files import read_bounded
from scrimp.planner.layout.lines import answer_line

_MAX_BYTES = 2**26


def predict_lines(file: Path, given: Collection[str] = ()) -> int:
    """Print what is predicted of each line; returns 2 where one of them is wrong.

    Args:
        given: settings of a run that were given besides, which have no place here.

    Raises:
        ConfigError: the file cannot be read, or settings stand beside it.
    """
    if given:
        raise ConfigError(
            "--batch takes its settings from its file alone",
            got=", ".join(sorted(given)),
            do="write them into its lines, or leave --batch out",
        )
    content = read_bounded(
        file, error=ConfigError, do="name a file with a setting a line", at_most=_MAX_BYTES
    )
    is_wrong = False
    for number, line in enumerate(content.decode("utf-8-sig", "replace").split("\n"), start=1):
        if not line.strip():
            continue
        found = answer_line(line, where=f"{file}, line {number}")
        is_wrong |= "error" in found
        print(json.dumps(found))
    return 2 if is_wrong else 0
