"""The table of times: its layout, its file's text, and what is left of a step without its GEMMs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import PlanError
from scrimp.precision import GEMMS
from scrimp.profiler.gemm_table import GemmTimes

SHAPES = [(64, 32), (32, 64)]
FORMATS = ["bf16", "fp8", "fp4"]


def seconds_of(shape: tuple[int, int], gemm: str, recipe: str) -> float:
    """A number of its own for each."""
    return 1.0 + 100 * SHAPES.index(shape) + 10 * GEMMS.index(gemm) + FORMATS.index(recipe)


def times_of(seconds=seconds_of, **more) -> GemmTimes:
    def fill(value):
        return {
            shape: {gemm: {name: value(shape, gemm, name) for name in FORMATS} for gemm in GEMMS}
            for shape in SHAPES
        }

    return GemmTimes("a device", 128, fill(seconds), fill(lambda *_: 0.1), fill(lambda *_: "torch"), **more)


def test_a_table_has_layers_gemms_and_formats_in_the_order_asked_for() -> None:
    layers, formats = [(32, 64), (64, 32), (32, 64)], ["fp4", "bf16"]
    table = times_of().table(layers, formats, micro_batches=3)
    assert table.shape == (3, 3, 2)
    for row, shape in enumerate(layers):
        for column, gemm in enumerate(GEMMS):
            for depth, name in enumerate(formats):
                assert table[row, column, depth] == 3 * seconds_of(shape, gemm, name)
    assert times_of().table([], formats).shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("shapes", "formats", "micro_batches", "message"),
    [
        ([(64, 64)], FORMATS, 1, "layer shape were not timed"),
        (SHAPES, ["bf16", "nvfp4"], 1, "recipe was not timed"),
        (SHAPES, FORMATS, 0, "at least one micro-batch"),
    ],
)
def test_what_was_not_timed_is_refused(shapes, formats, micro_batches, message) -> None:
    with pytest.raises(PlanError, match=message):
        times_of().table(shapes, formats, micro_batches)


def test_an_emulated_recipe_is_a_candidate_where_it_is_faster_than_the_compute_format() -> None:
    def seconds(shape, gemm, recipe):
        return (
            0.5 if (shape, gemm, recipe) == (SHAPES[0], "dgrad", "fp4") else seconds_of(shape, gemm, recipe)
        )

    found = times_of(seconds, emulated=frozenset(["fp4"])).candidates(SHAPES, FORMATS)
    expected = np.ones((2, 3, 3), dtype=bool)
    expected[:, :, 2] = False
    expected[0, 1, 2] = True
    assert (found == expected).all()


def test_a_native_recipe_is_a_candidate_even_where_it_is_slow() -> None:
    assert times_of().candidates(SHAPES, FORMATS).all()


# -- merging and text --------------------------------------------------------------------------


def test_newer_times_take_the_place_of_older_ones_and_leave_the_rest() -> None:
    old = times_of(emulated=frozenset(["fp4"]))
    new = times_of(lambda *where: 1000 + seconds_of(*where)).select(SHAPES[1:], ["fp8"])
    merged = old.merged(new).table(SHAPES, FORMATS)
    expected = old.table(SHAPES, FORMATS)
    expected[1, :, 1] += 1000
    assert (merged == expected).all()
    assert old.merged(new).emulated == {"fp4"}
    grown = new.merged(old.select(SHAPES[:1], ["bf16"]))
    assert grown.measured(SHAPES[1], "fp8") == dict.fromkeys(GEMMS, "torch")
    assert grown.measured(SHAPES[0], "fp8") is None


sizes = st.tuples(st.integers(1, 10**6), st.integers(1, 10**6))
positive = st.floats(1e-9, 1e3)


@given(st.dictionaries(sizes, st.lists(positive, min_size=6, max_size=6), max_size=4), st.booleans())
def test_times_survive_their_text_bit_for_bit(rows, is_emulated) -> None:
    def fill(values):
        return {gemm: {"bf16": values[i], "fp8": values[3 + i]} for i, gemm in enumerate(GEMMS)}

    times = GemmTimes(
        "a device, 2 threads",
        64,
        {shape: fill(row) for shape, row in rows.items()},
        {shape: fill(row) for shape, row in rows.items()},
        {shape: fill(["torch", "triton", "reference"] * 2) for shape in rows},
        frozenset(["fp8"] if is_emulated else []),
        "fp32",
        "fp32",
    )
    assert GemmTimes.from_json(times.to_json()) == times


def remove_spread(data) -> None:
    del data["spread"]["64x32"]["wgrad"]["fp4"]


def set_seconds(value):
    def change(data) -> None:
        data["seconds"]["64x32"]["fprop"]["fp8"] = value

    return change


DAMAGES = {
    "another version": lambda data: data.update(format=0),
    "a time below zero": set_seconds(-1.0),
    "a time of zero": set_seconds(0),
    "no number": set_seconds("soon"),
    "NaN": set_seconds(float("nan")),
    "a list": set_seconds([1.0]),
    "too large": set_seconds(10**400),
    "no spread": remove_spread,
    "no such GEMM": lambda data: data["seconds"]["64x32"].pop("wgrad"),
    "a shape of one size": lambda data: data["seconds"].update({"64": {}}),
    "an unknown field": lambda data: data.update(more=1),
    "a missing field": lambda data: data.pop("tokens"),
    "a back end without name": lambda data: data["backends"]["64x32"]["fprop"].update(fp8=None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_text_is_refused(damage: str) -> None:
    data = json.loads(times_of().to_json())
    DAMAGES[damage](data)
    with pytest.raises(PlanError):
        GemmTimes.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"format": 1}'])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        GemmTimes.from_json(text)


def test_times_are_not_changed_by_reading_them() -> None:
    times = times_of()
    before = dataclasses.replace(times, seconds=json.loads(times.to_json())["seconds"])
    times.table(SHAPES, FORMATS)[:] = 0
    times.candidates(SHAPES, FORMATS)
    assert json.loads(times.to_json())["seconds"] == before.seconds
