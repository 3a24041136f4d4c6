"""After the first steps: measured memory and time beside the predicted, and other blocks where they differ."""

from __future__ import annotations

import dataclasses

import torch

from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.memory.check import MemoryCheck
from scrimp.training.memory.replan import most_on_host
from scrimp.training.run import Run
from scrimp.training.step import StepResult


class CheckMemory(Callback):
    """Compares once per start."""

    def __init__(self, run: Run) -> None:
        self._run = run
        decisions, on_host = run.decisions, most_on_host(run.executable, run.config)
        self._check = MemoryCheck(decisions.memory, on_host, decisions.world)

    def after_step(self, result: StepResult, record: Record) -> None:
        """Compare as soon as enough steps were made."""
        run, device = self._run, self._run.executable.device
        # On CUDA since training was last entered (`phases`): building and evaluation have peaks of their own.
        is_cuda = device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if is_cuda else run.meter.peak_device_bytes()
        seconds = [run.batch_tokens / rate for rate in run.rates]
        if not run.keeps_operands:
            self._check.forget_operands()
        found = self._check.after_step(run.plans.plan, run.step, seconds, peak)
        if found is None:
            return
        run.tell("memory-check", found.sentence, **dataclasses.asdict(found.measured))
        if found.plan is not None:
            run.change_blocks(found.plan, run.step)
