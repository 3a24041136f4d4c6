"""Studies beside the shipped ones: what a page or a guide tells readers to run can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrimp.study.definition import load_study

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STUDIES = sorted(
    one
    for folder in (BENCHMARKS, BENCHMARKS / "results")
    for one in folder.glob("*.toml")
    if "[settings]" in one.read_text()
)


def test_there_are_some() -> None:
    assert len(STUDIES) > 9


@pytest.mark.parametrize("file", STUDIES, ids=lambda one: one.stem)
def test_a_study_can_be_read(file: Path) -> None:
    study = load_study(str(file))
    assert study.about
    assert len(study.variants) > 1
