"""`scrimp score`: folders of finished studies to a table of who reached their targets first, and a page."""

from __future__ import annotations

from pathlib import Path

from scrimp.cli.show import plain_console
from scrimp.config.read_toml import expand_home
from scrimp.errors import ConfigError
from scrimp.study.score_page import score_table, steps_table, write_score_page
from scrimp.study.workloads import standing


def score(studies: tuple[Path, ...], out: Path) -> int:
    """Score what lies in the folders.

    Raises:
        ConfigError: a folder is no workload, is not finished, or does not go with the others.
    """
    if not studies:
        raise ConfigError(
            "no study is named",
            expected="folders that `scrimp study` wrote",
            do="scrimp score studies/lm studies/copy",
        )
    found = standing([expand_home("the study", folder) for folder in studies])
    console = plain_console()
    console.print(steps_table(found))
    console.print(score_table(found))
    console.print(f"report: {write_score_page(found, expand_home('--out', out))}", soft_wrap=True)
    return 0
