"""What `benchmarks/gemm.py` counts, compares and promises; its times are the machine's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gemm
import gemm_page
import pytest
import torch
from quantizer_bytes import bytes_moved, groups_moved
from stopwatch import Race, Stopwatch, rotated

from scrimp.formats import Noise, quantize
from scrimp.gemm.backends import BACKENDS
from scrimp.gemm.kernels.hashes import address_hashes
from scrimp.gemm.kernels.launch import GroupsOf, empty_tiles
from scrimp.gemm.problem import AXES, Shape, Use, operands_of
from scrimp.precision import GEMMS, RECIPES, Operand

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = Shape(256, 384, 512)


def test_a_quantizers_floor_is_the_size_of_everything_read_and_written() -> None:
    x = torch.empty(130, 200, dtype=torch.bfloat16)
    row, column = empty_tiles(130, 200, "e4m3", CPU), empty_tiles(200, 130, "e4m3", CPU)
    tiles = sum(tensor.nbytes for tensor in (x, *row, *column))
    assert bytes_moved("quantize_tiles", 130, 200, 2) == tiles
    hashes = [*address_hashes(Noise(1), Noise(2), 130, 200, x)]
    both = bytes_moved("quantize_tiles", 130, 200, 2, stochastic=True, stochastic_column=True)
    assert both == tiles + sum(tensor.nbytes for tensor in hashes)
    codes = row[0].nbytes
    assert bytes_moved("quantize_rows", 130, 200, 2, by_column=False) == x.nbytes + codes + 4 * 130
    assert bytes_moved("quantize_rows", 130, 200, 2, by_row=False) == 2 * x.nbytes + codes + 4 * 200
    assert bytes_moved("quantize_rows", 130, 200, 2) == 2 * (x.nbytes + codes) + 4 * (130 + 200)
    assert bytes_moved("quantize_tensor", 130, 200, 2) == 2 * (x.nbytes + codes) + 4
    assert bytes_moved("quantize_tensor", 130, 200, 2, by_row=False) == 2 * x.nbytes + codes + 4
    noisy = bytes_moved("quantize_rows", 130, 200, 2, by_column=False, stochastic=True)
    assert noisy == x.nbytes + codes + 4 * 130 + 4 * (130 + 200)
    assert bytes_moved("quantize_blocks", 130, 200, 2) == x.nbytes + codes + 4 * 2 * 2
    assert bytes_moved("tensor_amax", 130, 200, 2) == x.nbytes


def test_groups_are_read_once_and_an_nvfp4_tensor_twice() -> None:
    x, mx, nvfp4 = torch.randn(130, 200).bfloat16(), Operand("e4m3", "mx"), Operand("e2m1", "nvfp4")
    codes = {one: quantize(x, one.element, one.scaling, -1).nbytes for one in (mx, nvfp4)}
    along = quantize(x, "e4m3", "mx", -2).nbytes
    assert groups_moved(130, 200, 2, GroupsOf(mx), GroupsOf(mx)) == x.nbytes + codes[mx] + along
    assert groups_moved(130, 200, 2, GroupsOf(mx, "values"), None) == 2 * x.nbytes
    assert groups_moved(130, 200, 2, GroupsOf(nvfp4), None) == 2 * x.nbytes + codes[nvfp4]
    known = GroupsOf(Operand("e2m1", "nvfp4", "stochastic"), amax=torch.ones(()))
    assert groups_moved(130, 200, 2, known, None) == x.nbytes + codes[nvfp4] + 4 * (130 + 200)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("fp32",)])
@pytest.mark.parametrize("gemm_name", GEMMS)
def test_operand_bytes_are_those_of_stored_operands(recipe: str, gemm_name: str) -> None:
    stored = 0
    for operand, rows, axis in zip(
        operands_of(gemm_name, recipe), (SHAPE.m, SHAPE.n), AXES[gemm_name], strict=True
    ):
        matrix = torch.randn((rows, SHAPE.k) if axis == -1 else (SHAPE.k, rows), dtype=torch.bfloat16)
        if operand is None:
            stored += matrix.nbytes
        else:
            codes = BACKENDS["reference"].store(matrix, Use(operand, axis, Noise()))
            assert codes.rest is None or not codes.rest.scales.any()
            stored += codes.nbytes - (0 if codes.rest is None else codes.rest.nbytes)
    assert gemm.operand_bytes(recipe, gemm_name, SHAPE) == stored


@pytest.mark.parametrize(
    ("recipe", "gemm_name", "runner", "expected"),
    [
        # X: two bytes read, a code written, a scale per 128; W: the same with a scale per block.
        ("fp8", "fprop", "triton", 3 * 256 * 512 + 4 * 256 * 4 + 3 * 384 * 512 + 4 * 3 * 4),
        ("fp8", "fprop", "torch", 3 * 256 * 512 + 4 * 256 * 4 + 3 * 384 * 512 + 4 * 3 * 4),
        ("fp8", "dgrad", "triton", 3 * 256 * 512 + 4 * 256 * 4 + 3 * 384 * 512 + 4 * 3 * 4),
        # G with noise: a hash per row and column.
        (
            "fp4",
            "wgrad",
            "triton",
            3 * 256 * 512 + 4 * 256 * 4 + 4 * (512 + 256) + 3 * 384 * 512 + 4 * 384 * 4,
        ),
        ("mxfp8", "fprop", "triton", 4 * 256 * 512 + 4 * 384 * 512),
        ("mxfp8", "fprop", "torch", 3 * 256 * 512 + 256 * 16 + 3 * 384 * 512 + 384 * 16),
        # The maximum of the tensor first.
        ("fp8_tensor", "fprop", "torch", 5 * 256 * 512 + 4 + 5 * 384 * 512 + 4),
        ("fp8_row", "fprop", "torch", 3 * 256 * 512 + 4 * 256 + 3 * 384 * 512 + 4 * 384),
        # W's columns are read twice.
        ("fp8_row", "dgrad", "torch", 3 * 256 * 512 + 4 * 256 + 5 * 384 * 512 + 4 * 384),
        ("bf16", "fprop", "torch", 0),
    ],
)
def test_quantizing_moves_what_its_kernels_move(
    recipe: str, gemm_name: str, runner: str, expected: int
) -> None:
    assert gemm.quantize_bytes(recipe, gemm_name, SHAPE, runner, CUDA) == expected


def test_only_products_in_the_format_itself_count_as_not_emulated() -> None:
    native = {
        (recipe, runner)
        for recipe in RECIPES
        for runner in BACKENDS
        if not gemm.is_emulated(recipe, "fprop", runner) and operands_of("fprop", recipe)[0] is not None
    }
    of_integers = {recipe for recipe in RECIPES if recipe.startswith("int8")}
    assert {recipe for recipe, runner in native if runner == "triton"} == {"fp8", *of_integers}
    assert "reference" not in {runner for _, runner in native}
    assert ("fp8_row", "torch") in native


def test_the_cases_are_the_layers_of_the_models() -> None:
    options = type("Options", (), {"models": ["qwen2.5-7b"], "layers": None, "tokens": 8})()
    assert {case.layer: (case.sizes.inputs, case.sizes.outputs) for case in gemm.cases(options)} == {
        "attention.qkv": (3584, 4608),
        "attention.out": (3584, 3584),
        "mlp.gate_up": (3584, 37888),
        "mlp.down": (18944, 3584),
    }


def test_an_unknown_model_is_refused_without_a_traceback() -> None:
    options = type("Options", (), {"models": ["qwen3-1t"], "layers": None, "tokens": 8})()
    with pytest.raises(SystemExit, match="qwen3-1t"):
        gemm.cases(options)


def test_a_step_gives_both_gradients() -> None:
    x, w, g = torch.randn(6, 4), torch.randn(3, 4), torch.randn(6, 3)
    grad_x, grad_w = gemm.step(gemm.plain_linear(w), x.requires_grad_(), g)  # type: ignore[misc]
    torch.testing.assert_close(grad_x, g @ w)
    torch.testing.assert_close(grad_w, g.T @ x.detach())


def test_a_race_that_breaks_off_does_not_hide_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gemm, "measure_gemm", fail)
    monkeypatch.setattr(gemm, "measure_linear", lambda *_: ([], {"linear": "was reached"}))
    record: dict[str, Any] = {"rows": [], "refused": {}, "failed": [], "copy_bytes_per_s": 1.0}
    options = type("Options", (), {"parts": ["gemms", "linear"]})()
    gemm.measure(gemm.Case("m", "mlp.down", gemm.Sizes(8, 8, 8)), Stopwatch(CPU), options, record)
    assert record["failed"] == ["m mlp.down: RuntimeError: out of memory"] * 3
    assert record["refused"] == {"linear": "was reached"}


# -- the stopwatch -----------------------------------------------------------------------------


def test_a_ratio_compares_calls_of_one_round() -> None:
    race = Race({"bf16": [1.0, 4.0], "other": [2.0, 2.0]}, {}, {})
    assert race.ratios("other") == [0.5, 2.0]


def test_every_contender_begins_a_round_in_its_turn() -> None:
    assert [rotated(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]


def test_one_that_fails_leaves_the_race_with_its_reason() -> None:
    calls: list[str] = []

    def fail() -> None:
        raise ValueError("no kernel\nat all")

    race = Stopwatch(CPU).race(
        {"bf16": lambda: calls.append("bf16"), "broken": fail, "other": lambda: calls.append("other")}, 2, 3
    )
    assert race.failures == {"broken": "ValueError: no kernel"}
    assert {name: len(seconds) for name, seconds in race.seconds.items()} == {"bf16": 3, "other": 3}
    assert calls.count("bf16") == calls.count("other") == 5


def test_a_control_that_fails_is_no_race() -> None:
    def fail() -> None:
        raise ValueError("no bf16")

    with pytest.raises(ValueError, match="no bf16"):
        Stopwatch(CPU).race({"bf16": fail}, 1, 1)


# -- the page ----------------------------------------------------------------------------------


def row(what: str, recipe: str, ratio: float, **changes: Any) -> dict[str, Any]:
    """A row as gemm.py writes it."""
    values = {
        "model": "qwen2.5-7b",
        "layer": "mlp.down",
        "sizes": "8 tokens",
        "what": what,
        "recipe": recipe,
        "runner": "triton",
        "emulated": False,
        "tflops_per_s": 1.0,
        "seconds": [1.0],
        "host_s": 0.0,
        "ratios": [ratio],
        "operand_bytes": None,
        "quantize_bytes": None,
    }
    return values | changes


def test_targets_that_are_met_are_kept() -> None:
    rows = [row("blocks", "floor", 1 / 1.2), row("linear", "fp8", 1.5), row("linear", "peer", 1.45)]
    assert [held for _, held, _ in gemm_page.targets(rows)] == [True, True, True]


@pytest.mark.parametrize(
    ("rows", "figure"),
    [
        ([row("blocks", "floor", 1 / 1.2), row("tiles", "floor", 0.5)], "2.00: tiles"),
        ([row("linear", "fp8", 1.5), row("linear", "fp8", 1.3, layer="attention.out")], "1.30 times bf16"),
        ([row("linear", "fp8", 1.5), row("linear", "peer", 1.6)], "0 of 1; worst 0.94"),
    ],
)
def test_one_miss_breaks_a_target(rows: list[dict[str, Any]], figure: str) -> None:
    _, held, found = gemm_page.targets(rows)[-1]
    assert not held
    assert found.startswith(figure)


def test_emulated_rows_and_other_models_decide_no_target() -> None:
    rows = [row("linear", "fp4", 1.6), row("linear", "fp8", 1.6, model="qwen2.5-0.5b")]
    assert gemm_page.targets(rows) == []


def test_layers_of_a_model_are_added_up_by_time_and_not_by_ratio() -> None:
    rows = [
        row("fprop", "bf16", 1.0, seconds=[1.0], tflops_per_s=10.0),
        row("fprop", "bf16", 1.0, seconds=[9.0], tflops_per_s=10.0, layer="mlp.gate_up"),
        row("fprop", "fp8", 0.5, seconds=[2.0], tflops_per_s=5.0),
        row("fprop", "fp8", 3.0, seconds=[3.0], tflops_per_s=30.0, layer="mlp.gate_up"),
    ]
    fp8 = next(line for line in gemm_page.gemm_summary(rows) if line[1] == "fp8")
    assert fp8[3:6] == ["20 (2.00)", "-", "-"]


@pytest.mark.slow
def test_a_small_run_names_what_is_emulated_and_what_did_not_run(tmp_path: Path) -> None:
    words = ("--tokens=16", "--repeats=1", "--layers", "attention.out", "--recipes", "fp8", "--threads=1")
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "benchmarks/gemm.py", *words),
            *("--warm-up=1", "--date=today", "--out", str(tmp_path)),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "today-gemm-cpu.json").read_text(encoding="utf-8"))
    found = {(r["what"], r["recipe"]): r["emulated"] for r in record["rows"]}
    assert found == {
        (what, recipe): recipe == "fp8" for what in (*GEMMS, "linear") for recipe in ("bf16", "fp8")
    }
    assert any(name.startswith("TE") for name in record["refused"])
    assert "Targets" not in (tmp_path / "today-gemm-cpu.md").read_text(encoding="utf-8")
