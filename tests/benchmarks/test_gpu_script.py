"""What `benchmarks/gpu.py` and `accumulator.py` conclude from what they see; the rest needs a GPU."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import accumulator
import gpu
import gpu_checks
import gpu_session
import memory
import pytest
import torch
from torch import Tensor

from scrimp.gemm.backends.operands import KernelCodes

CPU = torch.device("cpu")


def session(tmp_path: Path, budget_s: float = 100.0) -> gpu_session.Session:
    return gpu_session.Session(tmp_path, tmp_path, "checks", "today", budget_s)


def passes(_: gpu_session.Session) -> gpu_session.Outcome:
    return "fine", True, "1"


# -- the script --------------------------------------------------------------------------------


def test_a_failed_check_does_not_hide_the_next_and_all_are_written(tmp_path: Path) -> None:
    def broken(_: gpu_session.Session) -> gpu_session.Outcome:
        raise RuntimeError("an illegal address")

    expected = [("broken", False, "an illegal address"), ("fine", True, "1")]
    checks = gpu.limited(10, broken, passes)
    assert gpu.run_part("checks", checks, session(tmp_path), {"device": "here"}) == expected
    written = json.loads((tmp_path / "today-gpu-checks.json").read_text(encoding="utf-8"))
    assert written == {"device": "here", "checks": [list(outcome) for outcome in expected]}


def test_a_check_without_time_is_not_begun_and_not_held(tmp_path: Path) -> None:
    checks = gpu.limited(10, lambda _: pytest.fail("begun"))
    [(_, held, figure)] = gpu.run_part("checks", checks, session(tmp_path, budget_s=-1.0), {})
    assert (held, figure) == (False, "skipped: the time of the part was up")


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


STARTS_ANOTHER = """
import subprocess, sys, time
apart = sys.argv[1] == "apart"  # as a benchmark that this one starts would
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=apart)
print(child.pid)
time.sleep(0 if sys.argv[1] == "leave" else 600)
"""


@pytest.mark.parametrize(
    "how", ["leave", *(pytest.param(how, marks=pytest.mark.slow) for how in ("stay", "apart"))]
)
def test_all_that_a_command_started_is_dead_after_its_limit_or_its_end(tmp_path: Path, how: str) -> None:
    def starts(here: gpu_session.Session) -> gpu_session.Outcome:
        here.command(*gpu_session.python("-c", STARTS_ANOTHER, how))
        return "starts", True, "ended"

    here = session(tmp_path)
    [(name, held, figure), after] = gpu.run_part("checks", gpu.limited(5, starts, passes), here, {})
    assert (name, held) == ("starts", how == "leave")
    assert how == "leave" or figure.startswith("killed after 5 s; its log: 01-starts.err")
    assert after[1], "the next check has a limit of its own"
    child = int((here.logs / "01-starts.out").read_text())
    deadline = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


@pytest.mark.slow
def test_what_a_killed_command_said_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    here = session(tmp_path)
    here.begin("says", 2)
    with pytest.raises(gpu_session.OverLimitError):
        here.command(*gpu_session.python("-c", "import time; print('so far'); time.sleep(600)"))
    assert (here.logs / "01-says.out").read_text() == "so far\n"


def test_logs_are_kept_in_full(tmp_path: Path) -> None:
    here = session(tmp_path)
    here.begin("speaks a lot", 60)
    long = "import sys; print('x' * 100_000); print('trouble', file=sys.stderr); sys.exit(3)"
    done = here.command(*gpu_session.python("-c", long))
    assert (done.returncode, len(done.stdout), done.stderr) == (3, 100_001, "trouble\n")
    assert (here.logs / "01-speaks-a-lot.out").stat().st_size == 100_001
    assert (here.logs / "01-speaks-a-lot.err").read_text() == "trouble\n"


def test_what_builds_on_a_run_that_failed_is_skipped_and_says_why(tmp_path: Path) -> None:
    def fails(run_dir: Path) -> None:
        raise RuntimeError("scrimp train failed with 2")

    here = session(tmp_path)
    checks = gpu.limited(
        10,
        lambda s: ("first", True, str(s.run_of("first", fails))),
        gpu_checks.check_resume,
        gpu_checks.check_memory,
        gpu_checks.check_export,
        lambda s: ("again", True, str(s.run_of("first", fails))),
    )
    outcomes = gpu.run_part("checks", checks, here, {})
    assert [held for _, held, _ in outcomes] == [False] * 5
    assert outcomes[0][2] == "scrimp train failed with 2"
    assert [figure for _, _, figure in outcomes[1:]] == ["skipped: the first run failed"] * 4
    here.failed.clear()
    assert gpu.run_part("checks", checks[1:2], here, {})[0][2] == "skipped: the first run was not made"


@pytest.mark.parametrize("smoke_holds", [True, False])
def test_nothing_is_begun_after_a_smoke_test_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smoke_holds: bool
) -> None:
    monkeypatch.setattr(gpu, "SMOKE", gpu.limited(60, lambda _: ("smoke", smoke_holds, "")))
    monkeypatch.setitem(gpu.PARTS, "checks", gpu.limited(10, passes))
    arguments = argparse.Namespace(out=tmp_path, date="today", budget_s=100.0)
    rows = gpu.run_parts(["checks"], arguments, {})
    last = ("fine", True, "1") if smoke_holds else ("passes", False, "skipped: the smoke test failed")
    assert rows == [("smoke", "smoke", smoke_holds, ""), ("checks", *last)]


@pytest.mark.slow
def test_the_smoke_test_says_what_failed(tmp_path: Path) -> None:
    """Here torch has no CUDA: the product fails, and its last line is the figure."""
    if torch.cuda.is_available():
        pytest.skip("needs a torch without CUDA")
    here = session(tmp_path)
    here.begin("smoke", 60)
    _, held, figure = gpu_checks.check_smoke(here)
    assert not held
    assert "CUDA" in figure


def test_every_part_that_is_named_runs_and_fits_a_command(tmp_path: Path) -> None:
    named = re.findall(r"^(\w[\w-]*)  +\S", gpu.__doc__ or "", flags=re.MULTILINE)
    assert {name for name in named if name not in ("smoke", "Run")} <= set(gpu.PARTS)
    for part in memory.PARTS:
        assert (part == "peaks" and "memory" in gpu.PARTS) or {
            f"memory-{part}",
            part.replace("qwen7b", "llmq"),
        } & set(gpu.PARTS)
    for name, checks in gpu.PARTS.items():
        limits = [check.limit_s for check in checks if check.limit_s != gpu.WHOLE]
        assert sum(limits) <= gpu.PART_S, name
    assert sum(check.limit_s for check in gpu.SMOKE) + gpu.PART_S < 600


# -- conclusions -------------------------------------------------------------------------------


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
    assert gpu_checks.some_passed(summary) is expected


def test_the_doctor_figure_names_what_is_wrong() -> None:
    found = [
        {"recipe": "fp8", "gemm": "fprop", "backend": "torch", "status": status}
        for status in ("works", "works", "wrong")
    ]
    assert gpu_checks.doctor_figures(found) == "2 works, 1 wrong (fp8 fprop torch)"


@pytest.mark.parametrize(("last", "expected"), [(2.1, True), (2.4, False), (1.6, False)])
def test_a_recipe_must_end_near_bf16(tmp_path: Path, last: float, expected: bool) -> None:
    here = session(tmp_path)
    for recipe, end in (("bf16", 2.0), ("fp8", last)):
        here.runs[recipe] = tmp_path / recipe
        here.runs[recipe].mkdir()
        lines = [json.dumps({"step": step, "loss": 6.0 if step < 3 else end}) for step in range(1, 9)]
        (here.runs[recipe] / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert gpu_checks.check_losses("fp8", here)[1] is expected


@pytest.mark.parametrize(("share", "expected"), [(0.0, True), (0.01, False), (None, False)])
def test_fp4_is_exact_only_if_every_element_is(share: float | None, expected: bool) -> None:
    used = {"way": "triton, every 128"}
    rows = [used | {"inexact, share": 0.0}, used if share is None else used | {"inexact, share": share}]
    other = {"way": "torch, fast accumulation", "inexact, share": 0.5}
    for order in (rows, rows[::-1]):
        held, figure = gpu_checks.exact_figures({"exact": [*order, other]})
        assert held is expected
    assert "torch, fast accumulation: 50.0% inexact" in figure


# -- the accumulator ---------------------------------------------------------------------------


def exactly(a: KernelCodes, b: KernelCodes) -> Tensor:
    return (accumulator.dequantized(a) @ accumulator.dequantized(b).T).float()


def cut_after(bits: int, a: KernelCodes, b: KernelCodes) -> Tensor:
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
