"""What has to be in the environment before torch and triton are imported, which cases `make test` runs, and the page
that a whole matrix of layouts writes."""

from __future__ import annotations

import gc
import os
from collections import Counter
from typing import Any

# Several test processes share the cores: threads that wait by spinning make each of them two to three times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from property_tests import register_profiles

register_profiles()
pytest.register_assert_rewrite("parity")

# One thread: what is trained here is tiny, and threads that wait for each other cost more than they do.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter, which it looks for when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """What every run pays for and no test looks at, made cheap.

    As in every run on a CPU, products of bf16 are widened: without units for them, torch's own take minutes. A run's
    last sample is short: 48 tokens were a third of a tiny run. And no write waits for the disk: that tests were written
    need not survive a power failure; `os.fstat` still refuses a closed file.
    """
    from scrimp.gemm.cpu_products import widen_bf16_products  # Triton's interpreter is asked for above
    from scrimp.training import finish

    widen_bf16_products()
    finish.SAMPLE_TOKENS = 4
    os.fsync = os.fstat  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a test is marked `every(n)`, all of its cases but each n-th are slow."""
    numbers: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is None:
            continue
        test = item.nodeid.partition("[")[0]
        if numbers[test] % mark.args[0]:
            item.add_marker("slow")
        numbers[test] += 1


def pytest_collection_finish() -> None:
    """What thousands of tests consist of stays to the end: no collection of garbage need look at it again, and the
    others look less often at what libraries hold: that was a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Where all layouts have been measured and have passed, on whatever test processes, docs/parity.md is theirs."""
    passed = terminalreporter.stats.get("passed", [])
    found = [dict(one.user_properties).get("parity") for one in passed]
    rows = {row["name"]: row for row in found if row is not None}
    if not rows:
        return
    from parity.table import LAYOUTS, PAGE, page_of

    if rows.keys() == LAYOUTS.keys():
        PAGE.write_text(page_of(rows), encoding="utf-8")
        terminalreporter.write_line(f"layouts: {PAGE} is written")
