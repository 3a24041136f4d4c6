"""Answers say how long a step takes as quantization runs today, and only where that is longer."""

import json

import pytest

import scrimp
from scrimp.planner.layout.lines import answer_line

LINE = {
    "model": "llama-3.1-8b",
    "hardware": "8xh100",
    "sequence": 8192,
    "global_batch": 128,
    "micro_batch": 1,
    "layout": {"fsdp": 8},
    "recompute": "selective",
}


def answered(**changes):
    found = answer_line(json.dumps(LINE | changes), where="a line")
    assert "error" not in found
    return found


@pytest.mark.parametrize("precision", ["mxfp8", "mxfp4", "nvfp4"])
def test_formats_whose_kept_codes_are_read_operator_by_operator_say_both(precision):
    both = answered(precision=precision)
    alone = answered(precision=precision, software="scrimp-today")
    assert both["step_seconds_today"] == alone["step_seconds"] > 1.1 * both["step_seconds"]
    assert "step_seconds_today" not in alone


@pytest.mark.parametrize(
    "same",
    [
        *({"precision": name} for name in ("bf16", "fp8", "fp8_tensor", "fp8_row")),
        {"precision": "mxfp8", "software": "megatron"},
    ],
)
def test_nothing_is_said_where_nothing_differs(same):
    assert "step_seconds_today" not in answered(**same)


def test_formats_of_single_products_count():
    block = {"recompute": "selective", "formats": [["mlp.down.fprop", "mxfp8"]]}
    low, high = answered(blocks=[block] * 32), answered(blocks=[{"recompute": "selective"}] * 32)
    assert low["step_seconds_today"] > high["step_seconds"]


def test_python_says_the_same():
    low, high = (scrimp.predict(**LINE | {"precision": name}) for name in ("mxfp8", "bf16"))
    assert low.step_seconds_today == answered(precision="mxfp8")["step_seconds_today"]
    assert high.step_seconds_today == high.step_seconds
