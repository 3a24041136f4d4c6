"""What `benchmarks/fused_passes.py` concludes; its times are the machine's."""

from __future__ import annotations

from dataclasses import replace

import fused_passes
import pytest
import torch
from fused_passes import KERNEL, OPERATORS, Row
from stopwatch import Stopwatch

CPU = torch.device("cpu")


def test_every_kernel_has_its_pass_and_its_bytes_are_its_tensors() -> None:
    found = [make() for make in fused_passes.passes(1024, CPU)]
    names = ["sum", "product that adds", "loss", *["update"] * 6, *["gate"] * 4]
    assert [one.name.split(",")[0] for one in found] == names
    (product,) = (one for one in found if one.name == "product that adds")
    assert product.moved == 4 * (2 * 1024 + fused_passes.TOKENS * (1 + 1024))  # a sum of one row
    # Scales of 8 bits: two bytes for 128 numbers of either average.
    each = [6, 4, 14, 2 * (4 + 2 / 64) + 2, 22, 2 * 8 + 4, 2 * (6 + 2 / 64) + 4, 28]
    # Of 1,024 numbers of gate and up a result of half as many, or as many gradients; codes both ways.
    each += [2 + 1, 3 + 2, 4 + 1, 6 + 2]
    assert [one.moved for one in found if one is not product] == [1024 * bytes_ for bytes_ in each]


@pytest.mark.parametrize("make", [fused_passes.sum_pass, fused_passes.loss_pass])
def test_a_kernel_that_gives_other_numbers_is_not_right(make) -> None:
    made = make(300, CPU)
    assert made.is_right()
    kernel = made.run[KERNEL]

    def wrong(total, *others):
        given = kernel(total, *others)
        total[0, 7] += 1
        return given

    assert not replace(made, run=made.run | {KERNEL: wrong}).is_right()


def test_a_kernel_that_fails_is_shown_with_its_reason() -> None:
    made = fused_passes.sum_pass(300, CPU)

    def fails(*_):
        raise RuntimeError("no such card")

    broken = replace(made, run=made.run | {KERNEL: fails})
    row = fused_passes.measure(lambda: broken, Stopwatch(CPU), 1)
    assert (row.is_right, row.failure) == (False, "RuntimeError: no such card")
    text = fused_passes.page([row], 1e9, {"device": "here", "command": "python", "commit": "0"})
    assert "- sum, bf16: RuntimeError: no such card" in text


def test_rates_are_of_rounds_and_of_the_least_bytes() -> None:
    row = Row("sum", 1000, True, 6000, [0.004, 0.006, 0.009], [0.001, 0.002, 0.003])
    found = fused_passes.cells(row, 6e6)
    assert found == ("sum", "1,000", "yes", "6.000", "2.000", "3.00 (3.00 to 4.00)", "0", "50%")
    assert OPERATORS in fused_passes.sum_pass(300, CPU).works()
