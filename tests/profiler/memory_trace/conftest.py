"""Two threads for every test here: a CPU's kernels take memory per thread, and its bounds grow with them."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
