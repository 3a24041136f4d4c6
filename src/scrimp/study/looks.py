"""Looks at a verdict, and what error is left for the next one.

Problem  Whoever looks, adds the seeds that would probably tell, and looks again, tests twice: at 5 % each time, of
         variants that do nothing one in ten gets a verdict in the end.
Method   A study's folder remembers each look at a comparison: the step and the seeds of its pairs when a verdict was
         shown, the figure and the control. The first look has the error that the file says, each later one with other
         pairs a fifth of the one before, so that however often one looks all together err with at most 5/4 of it (the
         sum of the series). The same pairs again, in the same figure beside the same control, are the same look. Seeds
         that a study has from the beginning cost nothing.
Limits   A verdict may be taken back by a later look, whose interval is wider unless its pairs make it narrower.
         Verdicts that were reckoned by other means, or in a copy of the folder, are not counted. A third look has a
         twenty-fifth of the error, and takes many pairs: it is cheaper to begin with enough of them.
Checked  tests/study/test_looks.py: simulated studies that follow the advice
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from scrimp.errors import CheckpointError
from scrimp.files import write_whole
from scrimp.json_files import read_json

LOOKS: Final = "looks.json"
SHARE_OF_NEXT_LOOK: Final = 0.2
SHARE_OF_ALL_LOOKS: Final = 1 / (1 - SHARE_OF_NEXT_LOOK)
"""Error of any number of looks, as a multiple of that of the first."""
_LEAST_ERROR: Final = 1e-12
"""Less is nothing, and no quantile can be told from infinity."""
_MOST_BYTES: Final = 2**26


@dataclass(frozen=True, kw_only=True)
class Look:
    """The pairs of a comparison whose verdict was shown."""

    steps: int
    seeds: list[int]
    figure: str = ""
    """What was compared; of older files unknown."""
    control: str = ""
    """With which variant; the same."""

    def is_of(self, other: Look) -> bool:
        """Whether the same pairs were compared in the same figure, as far as this one says."""
        pairs = (self.steps, self.seeds) == (other.steps, other.seeds)
        return pairs and self.figure in ("", other.figure) and self.control in ("", other.control)


Looks = Mapping[str, Sequence[Look]]
"""Looks by variant, in the order in which they were taken."""


def read_looks(folder: Path) -> dict[str, list[Look]]:
    """The looks at a study so far; none where there is no file.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / LOOKS
    if not path.exists():
        return {}
    return read_json(
        path,
        dict[str, list[Look]],
        error=CheckpointError,
        do=f"remove {path.name}, if no verdict of this study was looked at before",
        at_most=_MOST_BYTES,
    )


def record_looks(folder: Path, before: Looks, now: Mapping[str, Look]) -> None:
    """Add to the file what is looked at now.

    Raises:
        StorageError: it cannot be written.
    """
    found = {name: list(looks) for name, looks in before.items()}
    for name, look in now.items():
        if not any(one.is_of(look) for one in found.setdefault(name, [])):
            found[name].append(look)
    if found != before:
        text = {name: [asdict(one) for one in looks] for name, looks in found.items()}
        write_whole(folder / LOOKS, json.dumps(text, indent=1) + "\n")


def number_of(look: Look, before: Sequence[Look]) -> int:
    """How many other looks there were before this one."""
    return next((at for at, one in enumerate(before) if one.is_of(look)), len(before))


def confidence_of(confidence: float, number: int) -> float:
    """Confidence of the interval of a look, by how many there were before."""
    alpha = 1 - confidence
    return 1 - max(alpha * SHARE_OF_NEXT_LOOK**number, min(alpha, _LEAST_ERROR))
