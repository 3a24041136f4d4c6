"""Layouts on gloo: losses, norms, every gradient, copies and bytes, beside one process and formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from parity import check_parity
from parity.matrix import FURTHER, LAYOUTS, SAMPLE
from parity.table import PAGE, names_in


def test_layouts_train_as_one_process(tmp_path: Path) -> None:
    """What `make test` sees of the matrix below."""
    check_parity(2, SAMPLE, tmp_path)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slow
def test_a_layout_trains_as_one_process(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    ranks, case = LAYOUTS[name]
    measured = check_parity(ranks, {name: case}, tmp_path)[name]
    record_property("parity", {"name": name, **asdict(measured)})


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.slow
def test_another_way_trains_as_one_process(name: str, tmp_path: Path) -> None:
    ranks, case = FURTHER[name]
    check_parity(ranks, {name: case}, tmp_path)


def test_the_page_has_the_rows_of_the_matrix() -> None:
    assert names_in(PAGE.read_text(encoding="utf-8")) == list(LAYOUTS)
