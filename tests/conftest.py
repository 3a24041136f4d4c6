"""What has to be in the environment before torch and triton are imported."""

from __future__ import annotations

import os

# Several test processes share the cores: threads that wait by spinning make each of them two to three times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from property_tests import register_profiles

register_profiles()

# One thread: what is trained here is tiny, and threads that wait for each other cost more than they do.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter, which it looks for when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
