"""Ways to compute on a CPU: by kernels, which must run, and by torch's operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from scrimp.cpu import has_numba, operators_alone

Way = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Inside, at least one kernel runs."""
    if not has_numba():
        pytest.skip("numba is an extra of its own")
    from scrimp.cpu import rows
    from scrimp.objectives import cpu_loss

    own, ran = rows.by_rows, []

    def counted(kernel: Any, *arguments: Any) -> None:
        ran.append(kernel)
        own(kernel, *arguments)

    with patch.object(rows, "by_rows", counted), patch.object(cpu_loss, "by_rows", counted):
        yield
    assert ran, "operators ran in the place of kernels"


BOTH: tuple[Way, Way] = (kernels, operators_alone)
