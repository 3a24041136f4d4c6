"""Rows survive torn writes, and belong to their settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scrimp.errors import CheckpointError, ConfigError
from scrimp.study.rows import ROWS, Curve, Row, append_row, digest_of, read_rows, rows_of_study


def row(variant: str = "fp8", seed: int = 0, **more: object) -> Row:
    return Row(variant=variant, seed=seed, steps=8, digest="d", **more)  # type: ignore[arg-type]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    first = row(
        figures={"held_out_loss": 2.5, "training_loss": None},
        training=Curve(steps=[1, 2], values=[3.0, None]),
    )
    append_row(tmp_path, first)
    append_row(tmp_path, row(seed=1, error="it broke", environment={"torch": "2"}))
    found = read_rows(tmp_path)
    assert list(found) == [("fp8", 0, 8), ("fp8", 1, 8)]
    assert found["fp8", 0, 8] == first
    assert found["fp8", 1, 8].error == "it broke"


def test_a_later_row_replaces_one_of_the_same_run(tmp_path: Path) -> None:
    append_row(tmp_path, row(error="it broke"))
    append_row(tmp_path, row(figures={"held_out_loss": 2.0}))
    assert [one.error for one in read_rows(tmp_path).values()] == [None]


@pytest.mark.parametrize("kept", [1, 30, -1])
def test_a_torn_last_line_is_ignored_and_written_over(tmp_path: Path, kept: int) -> None:
    append_row(tmp_path, row())
    whole = (tmp_path / ROWS).read_bytes()
    (tmp_path / ROWS).write_bytes(whole + whole[:kept])
    assert list(read_rows(tmp_path)) == [("fp8", 0, 8)]
    append_row(tmp_path, row(seed=1))
    assert [line["seed"] for line in map(json.loads, (tmp_path / ROWS).read_text().splitlines())] == [0, 1]


def test_a_file_of_a_torn_line_alone_begins_anew(tmp_path: Path) -> None:
    (tmp_path / ROWS).write_bytes(b"x" * 200_000)
    assert read_rows(tmp_path) == {}
    append_row(tmp_path, row())
    assert len(read_rows(tmp_path)) == 1


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"scrimp_study_row": 2}'])
def test_a_damaged_line_is_refused_by_number(tmp_path: Path, line: str) -> None:
    append_row(tmp_path, row())
    with (tmp_path / ROWS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CheckpointError, match="line 2"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("damaged", "what"),
    [
        ({"training": Curve(steps=[1, 2], values=[3.0])}, "other steps than values"),
        ({"figures": {"x": -1e300}}, "range"),
    ],
)
def test_rows_that_no_report_could_reckon_with_are_refused(tmp_path: Path, damaged: dict, what: str) -> None:
    append_row(tmp_path, row(**damaged))
    with pytest.raises(CheckpointError, match=what):
        read_rows(tmp_path)


def test_rows_of_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    rows = {one.key: one for one in [row(), row(seed=1), row("nvfp4")]}
    kept = rows_of_study(rows, lambda name, seed: "d" if name == "fp8" else None, tmp_path)
    assert list(kept) == [("fp8", 0, 8), ("fp8", 1, 8)]  # nvfp4 is no longer part of it
    with pytest.raises(ConfigError) as refusal:
        rows_of_study(rows, lambda name, seed: "other" if seed else "d", tmp_path)
    assert "fp8 seed 1" in str(refusal.value.got)
    assert "--out" in str(refusal.value.do)


def test_a_digest_is_that_of_values_whatever_their_order() -> None:
    assert digest_of({"a": 1, "b": "x"}) == digest_of({"b": "x", "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
