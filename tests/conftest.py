"""Without a GPU triton's kernels run in its interpreter; it is chosen by the environment, before triton is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
