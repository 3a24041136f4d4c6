"""The functions of torch.distributed through which ranks meet, and the one place where they are wrapped.

FSDP2, DTensor's Python code and Scrimp look them up in `torch.distributed` at each call, so that whoever wants to know
of collectives (`scrimp.health` always, `scrimp.profiler.collectives` while it counts) puts its own function there.

Limits   Collectives that torch calls from C++ or as operators (`torch.ops._c10d_functional`) pass by.
Checked  tests/profiler/test_collectives.py, tests/health/test_record.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

BESIDE = "scrimp-beside"
"""Beginning of the names of threads that exchange beside the training: nobody's step waits for them."""
FUNCTIONS = {
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",  # its name from torch 2.12 on
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "batch_isend_irecv": "send",
}
"""Function of torch.distributed to what it does."""


@contextlib.contextmanager
def wrapped(wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put other functions in the place of those above while the body runs.

    Args:
        wrap: makes one of what it does and of the function before.
    """
    import torch.distributed as dist

    before = {name: getattr(dist, name) for name in FUNCTIONS if hasattr(dist, name)}
    try:
        for name, call in before.items():
            setattr(dist, name, wrap(FUNCTIONS[name], call))
        yield
    finally:
        for name, call in before.items():
            setattr(dist, name, call)
