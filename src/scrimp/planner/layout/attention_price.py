"""What it costs a step that its attention repeats itself, or keeps documents apart.

Problem  Runs are held to FlashAttention-2 by `train.deterministic`, and by `data.mask_documents`, since torch has no
         other kernel for rows of several documents. Where it has a faster one for whole rows, that has a price.
Method   The same step is predicted with both kernels (`kernels.CUDNN_ON`: on all other devices they are one)::

             price = seconds by FlashAttention-2 - seconds by the kernel that torch would choose

Limits   cuDNN is taken to reach what the hardware file has of the fastest kernel; an H100's was measured 8 % below
         (flash-attention PR 1893: 566 and 470 TFLOP/s). That FlashAttention-2's ordered sums are slower than its atomic
         ones is not predicted: there its ordered backward pass of 2 x 16 heads of 8,192 tokens ran at 166 TFLOP/s,
         where 305 is taken here. By its source that is least where rows and heads are many, which fill all
         multiprocessors without splitting the keys.
Checked  tests/planner/layout/test_attention_price.py
"""

from __future__ import annotations

import dataclasses

from scrimp.planner.layout.kernels import FLASH_2, TORCH
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import OWN

SETTINGS = "--train.no-deterministic --data.no-mask-documents"
"""What allows the other kernel."""
_LEAST = 1e-3
"""Share of a step below which both kernels are one to the reader."""


def price_of_order(setting: Setting, seconds: float) -> float:
    """Seconds of a step that FlashAttention-2 takes more than the kernel that torch would choose; below 0: that the
    setting, which has the other one, saves.

    Args:
        seconds: of the step, as predicted.
    """
    software = setting.software
    if software.name not in OWN or software.attention_kernel not in (FLASH_2, TORCH):
        return 0.0
    other = TORCH if software.attention_kernel == FLASH_2 else FLASH_2
    program = dataclasses.replace(software, attention_kernel=other)
    return seconds - predict(dataclasses.replace(setting, software=program)).step_seconds


def price_text(setting: Setting, seconds: float) -> str | None:
    """The same in words; None: nothing.

    Args:
        seconds: of the step, as predicted.
    """
    price = price_of_order(setting, seconds)
    if abs(price) < _LEAST * seconds:
        return None
    of_step = f"{price:+.2g} s of {seconds:.3g} s a step, {price / (seconds - price):+.1%}"
    if price > 0:
        return f"attention held to FlashAttention-2: {of_step}; without: {SETTINGS}"
    return f"attention by torch's choice, not FlashAttention-2: {of_step}"
