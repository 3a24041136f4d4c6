"""What `benchmarks/gpu.py` and `accumulator.py` conclude from what they see; the rest needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import accumulator
import gpu
import pytest
import torch
from torch import Tensor

from scrimp.gemm.backends.operands import TileCodes

CPU = torch.device("cpu")


def session(tmp_path: Path, budget_s: float = 100.0) -> gpu.Session:
    return gpu.Session(tmp_path, tmp_path, "today", budget_s)


# -- the script --------------------------------------------------------------------------------


def test_a_failed_check_does_not_hide_the_next_and_all_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: gpu.Session) -> gpu.Outcome:
        raise RuntimeError("an illegal address")

    monkeypatch.setitem(gpu.PARTS, "checks", (broken, lambda _: ("fine", True, "1")))
    expected = [("broken", False, "an illegal address"), ("fine", True, "1")]
    assert gpu.run_part("checks", session(tmp_path), {"device": "here"}) == expected
    written = json.loads((tmp_path / "today-gpu-checks.json").read_text(encoding="utf-8"))
    assert written == {"device": "here", "checks": [list(outcome) for outcome in expected]}


def test_a_check_without_time_is_not_begun_and_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.PARTS, "checks", (lambda _: pytest.fail("begun"),))
    [(_, held, figure)] = gpu.run_part("checks", session(tmp_path, budget_s=-1.0), {})
    assert (held, figure) == (False, "the time was up")


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("12 passed, 3 skipped in 4.5s", True),
        ("3 skipped in 4.5s", False),
        ("12 passed, 1 failed in 4.5s", False),
        ("12 passed, 2 errors in 4.5s", False),
        ("no tests ran in 0.1s", False),
    ],
)
def test_tests_count_only_if_some_passed_and_none_failed(summary: str, expected: bool) -> None:
    assert gpu.some_passed(summary) is expected


def test_the_doctor_figure_names_what_is_wrong() -> None:
    found = [
        {"recipe": "fp8", "gemm": "fprop", "backend": "torch", "status": status}
        for status in ("works", "works", "wrong")
    ]
    assert gpu.doctor_figures(found) == "2 works, 1 wrong (fp8 fprop torch)"


@pytest.mark.parametrize(("last", "expected"), [(2.1, True), (2.4, False), (1.6, False)])
def test_a_recipe_must_end_near_bf16(tmp_path: Path, last: float, expected: bool) -> None:
    here = session(tmp_path)
    for recipe, end in (("bf16", 2.0), ("fp8", last)):
        here.runs[recipe] = tmp_path / recipe
        here.runs[recipe].mkdir()
        lines = [json.dumps({"step": step, "loss": 6.0 if step < 3 else end}) for step in range(1, 9)]
        (here.runs[recipe] / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert gpu.check_losses("fp8", here)[1] is expected


@pytest.mark.parametrize(("share", "expected"), [(0.0, True), (0.01, False), (None, False)])
def test_fp4_is_exact_only_if_every_element_is(share: float | None, expected: bool) -> None:
    used = {"way": "triton, every 128"}
    rows = [used | {"inexact, share": 0.0}, used if share is None else used | {"inexact, share": share}]
    other = {"way": "torch, fast accumulation", "inexact, share": 0.5}
    for order in (rows, rows[::-1]):
        held, figure = gpu.exact_figures({"exact": [*order, other]})
        assert held is expected
    assert "torch, fast accumulation: 50.0% inexact" in figure


# -- the accumulator ---------------------------------------------------------------------------


def exactly(a: TileCodes, b: TileCodes) -> Tensor:
    return (accumulator.dequantized(a) @ accumulator.dequantized(b).T).float()


def cut_after(bits: int, a: TileCodes, b: TileCodes) -> Tensor:
    """Sums over all of K that drop what lies more than `bits` below their largest product."""
    products = accumulator.dequantized(a)[:, None] * accumulator.dequantized(b)
    largest = products.abs().amax(-1, keepdim=True)
    step = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-30))) - bits)
    return ((products / step).trunc() * step).sum(-1).float()


@pytest.mark.parametrize("bits", [9, 13])
def test_the_bits_of_an_accumulator_are_found(bits: int) -> None:
    found = accumulator.bits_kept(lambda a, b: cut_after(bits, a, b), CPU)
    assert found == {"bits in one instruction": bits, "bits 128 apart": bits}


def test_fp32_keeps_23_bits() -> None:
    assert set(accumulator.bits_kept(exactly, CPU).values()) == {23}


def test_a_cut_sum_of_fp4_products_is_found_and_an_exact_one_is_not() -> None:
    assert accumulator.exactness(exactly, 16, 256, CPU) == {"inexact, share": 0.0, "largest, in 1/4": 0.0}
    found = accumulator.exactness(lambda a, b: cut_after(4, a, b), 16, 256, CPU)
    assert found["inexact, share"] > 0.5


def test_a_way_that_fails_is_listed_with_its_reason() -> None:
    def fail() -> dict[str, float]:
        raise RuntimeError("no kernel")

    assert accumulator.attempt("torch", fail) == {"way": "torch", "failure": "RuntimeError: no kernel"}
