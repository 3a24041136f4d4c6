"""What quantization takes: by hand for tiles, and against the figures of predictions."""

from __future__ import annotations

import pytest

from scrimp.planner.layout.software import EMULATED, Made, Readings, software
from scrimp.precision import GEMMS
from scrimp.profiler.counted_formats import Quantized, count_formats

pytestmark = pytest.mark.slow  # imports Triton
FIGURES = software("scrimp").quantize


def test_tiles_are_read_once_and_written_as_codes_both_ways() -> None:
    """bf16 read, a byte written for each of two products, a scale of 4 bytes for 128 numbers; a weight in blocks is
    written along rows, and for dgrad along columns."""
    scale = 4 / 128
    found = count_formats("fp8", units=False)
    assert (
        found["fprop"].launches == 2
    )  # both operands: kept codes are written where a compiled block keeps them
    assert found["fprop"].inputs == pytest.approx(2 + 2 * (1 + scale), abs=0.01)
    assert found["fprop"].weights == pytest.approx(2 + 1, abs=0.01)
    assert found["dgrad"].outputs == pytest.approx(2 + 1 + scale, abs=0.01)
    assert found["dgrad"].weights == pytest.approx(2 + 1, abs=0.01)
    # The gradient's other copy comes from the same reading.
    other = found["wgrad"]
    assert other.launches == 0
    assert [other.inputs, other.outputs, other.weights] == pytest.approx([0, 1 + scale, 0], abs=0.01)


def test_rows_and_tensors_are_read_once_or_twice_and_written_once_for_each_product() -> None:
    """bf16; along a row one reading, along columns and of a whole tensor two, which serve both results."""
    scale = 4 / 256
    row, tensor = (count_formats(name, units=True) for name in ("fp8_row", "fp8_tensor"))
    both, along, across = 2 * (2 + 1), 2 + 1, 2 * 2 + 1
    assert row["fprop"].inputs == pytest.approx(both + 8 * scale, abs=0.1)
    assert [row["fprop"].weights, row["dgrad"].outputs] == pytest.approx([along] * 2, abs=0.1)
    assert row["dgrad"].weights == pytest.approx(across, abs=0.1)
    assert row["wgrad"].outputs == pytest.approx(both - along, abs=0.1)
    assert row["wgrad"].inputs == pytest.approx(0, abs=0.1)
    assert tensor["fprop"].inputs == pytest.approx(both, abs=0.01)
    assert [tensor["fprop"].weights, tensor["dgrad"].weights] == pytest.approx([across] * 2, abs=0.01)
    assert tensor["wgrad"].outputs == pytest.approx(1, abs=0.01)
    assert [tensor[gemm].launches for gemm in GEMMS] == [6, 6, 0]  # maxima, the largest of them, codes


@pytest.mark.parametrize(("name", "figures"), FIGURES)
def test_figures_of_predictions_are_counted(name: str, figures: Made) -> None:
    recipe = name.removesuffix(EMULATED)
    found = count_formats(recipe, units=name == recipe)
    for gemm, (launches, *expected) in zip(GEMMS, figures, strict=True):
        one = found[gemm]
        assert one.launches == launches
        assert [one.inputs, one.outputs, one.weights] == pytest.approx(expected, rel=0.005, abs=0.25)


@pytest.mark.parametrize(("name", "readings"), software("scrimp").readings)
def test_readings_of_predictions_are_counted(name: str, readings: Readings) -> None:
    """Two numbers for one behind a gate, three for two before it; once more where an input is made again."""
    recipe = name.removesuffix(EMULATED)
    kept, gated, again, both = (
        count_formats(recipe, units=name == recipe, keeps=keeps, gated=is_gated)
        for keeps in (True, False)
        for is_gated in (False, True)
    )

    def inputs(found: dict[str, Quantized]) -> float:
        return found["fprop"].inputs + found["wgrad"].inputs

    assert gated["fprop"].inputs - kept["fprop"].inputs == pytest.approx(2 * readings.inputs, abs=0.01)
    assert inputs(both) - inputs(again) == pytest.approx(2 * readings.again, abs=0.01)
    assert inputs(again) - inputs(kept) == pytest.approx(readings.again_bytes, abs=0.1)
    for gemm, number in (("dgrad", readings.dgrad), ("wgrad", readings.wgrad)):
        assert gated[gemm].outputs - kept[gemm].outputs == pytest.approx(number, abs=0.01)
        assert gated[gemm].weights == pytest.approx(kept[gemm].weights, abs=0.01)
    assert sum(one.launches for one in gated.values()) == sum(one.launches for one in kept.values())
