"""What has to be in the environment before torch and triton are imported."""

from __future__ import annotations

import os

# Several test processes share the cores: threads that wait by spinning make each of them two to three times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("scrimp", deadline=None)
settings.load_profile("scrimp")

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter, which it looks for when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
