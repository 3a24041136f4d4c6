"""`scrimp score`: folders of finished studies to a table of who reached their targets first, and a page."""

from __future__ import annotations

from pathlib import Path

from scrimp.cli.score_seconds import predict
from scrimp.cli.show import plain_console
from scrimp.config.read_toml import expand_home
from scrimp.errors import ConfigError
from scrimp.study.score_page import (
    measured_table,
    predicted_table,
    score_table,
    steps_table,
    write_score_page,
)
from scrimp.study.workloads import standing


def score(studies: tuple[Path, ...], out: Path, card: str | None) -> int:
    """Score what lies in the folders.

    Args:
        card: hardware on which seconds are predicted.

    Raises:
        ConfigError: a folder is no workload, is not finished, or does not go with the others; no such card.
    """
    if not studies:
        raise ConfigError(
            "no study is named",
            expected="folders that `scrimp study` wrote",
            do="scrimp score studies/lm studies/copy",
        )
    found = standing([expand_home("the study", folder) for folder in studies])
    predicted = None if card is None else predict(found, card)
    console = plain_console()
    console.print(steps_table(found))
    if (measured := measured_table(found)) is not None:
        console.print(measured)
    if predicted is not None:
        console.print(predicted_table(found, predicted))
        for why in predicted.unknown:
            console.print(why, soft_wrap=True)
    console.print(score_table(found))
    path = write_score_page(found, expand_home("--out", out), predicted)
    console.print(f"report: {path}", soft_wrap=True)
    return 0
