"""The figures of every step: measured, then written to metrics.jsonl, TensorBoard and the terminal."""

from __future__ import annotations

from scrimp.models import spec_of
from scrimp.planner import Plan, count_flops, ideal_seconds_per_token, mfu
from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.run import Run
from scrimp.training.step import StepResult


class MeasureStep(Callback):
    """Puts what a step measured into its record."""

    def __init__(self, run: Run) -> None:
        self._run = run
        sequence = run.train.sequence
        self._flops_per_token = count_flops(spec_of(run.decisions.architecture), sequence).causal
        self._ideal: tuple[Plan, float] | None = None

    def after_step(self, result: StepResult, record: Record) -> None:
        """Add the figures."""
        run, meter, ranks = self._run, self._run.meter, self._run.config.layout.ranks
        rate = run.batch_tokens / result.seconds
        run.rates.append(rate)
        record |= {
            **result.metrics,
            "step": run.step,
            "tokens": run.step * run.batch_tokens,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens_per_s": rate,
            "mfu_bf16": mfu(self._flops_per_token, rate / ranks, run.peaks),
            "sol": self._ideal_seconds() * rate / ranks,
            "tensor_peak_bytes": meter.peak_device_bytes(),
            "process_peak_bytes": meter.process_peak_bytes(),
            "process_growth_bytes": meter.process_growth_bytes(),
            "data_wait_s": result.data_wait_seconds,
            "step_s": result.seconds,
            "skipped": result.skipped,
        }

    def _ideal_seconds(self) -> float:
        """Per token, at the speed of light, by the plan in force."""
        run = self._run
        if self._ideal is None or self._ideal[0] is not run.plans.plan:
            seconds = ideal_seconds_per_token(
                spec_of(run.decisions.architecture),
                run.train.sequence,
                run.plans.plan.gemms,
                run.peaks,
                run.config.precision_rules.compute,
            )
            self._ideal = (run.plans.plan, seconds)
        return self._ideal[1]


class WriteRecord(Callback):
    """Writes the record of a step, to which other callbacks have added."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._has_trouble = False

    def after_step(self, result: StepResult, record: Record) -> None:
        """Write and show it; a full disk is told once."""
        run = self._run
        run.log.step(record)
        run.line.update(record)
        if run.log.trouble and not self._has_trouble:
            run.line.message(f"metrics are waiting in memory: {run.log.trouble}")
        self._has_trouble = run.log.trouble is not None
