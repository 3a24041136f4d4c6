"""The few figures that say how a run went, and how it ended.

A run ended in one of four ways, read from its events since it was last started: it *finished*
(a finish event, and all steps), it was *interrupted* (a signal), it *stopped* early (a finish
or failure event before its last step), or it is *open* (no word: it runs, or was killed).
Rates are medians over the steps, so that compilation and evaluation pauses do not count; the
final loss is given as it was at the last step, and as the mean of the last few, which is less
noisy. Checked in tests/report/test_read_run.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scrimp.config import base_architecture, load_config
from scrimp.errors import ScrimpError
from scrimp.models import spec_of
from scrimp.planner import Flops, count_flops
from scrimp.report.read_run import RunRecord
from scrimp.report.units import format_integer, is_number

State = Literal["finished", "interrupted", "stopped", "open"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All measured, but what `parameters` and `planned_steps` say; None where unknown."""

    state: State
    ending: str
    """One sentence on how the run ended."""
    last_step: int
    planned_steps: int | None
    tokens: float | None
    parameters: float | None
    loss: float | None
    loss_mean: float | None
    loss_mean_steps: int
    eval_loss: float | None
    eval_step: int | None
    bits_per_byte: float | None
    tokens_per_s: float | None
    mfu_causal: float | None
    mfu_full: float | None
    sol: float | None
    tensor_peak_bytes: float | None
    process_growth_bytes: float | None
    seconds: float | None
    num_skipped: int


def summarise(run: RunRecord) -> Summary:
    """The summary of what was recorded."""
    losses = run.recorded("loss")[1]
    tail = max(1, min(len(losses), max(5, run.num_steps // 30)))
    eval_steps, eval_losses = run.evaluations("eval_loss", "loss")
    bits = run.evaluations("eval_bits_per_byte", "bits_per_byte")[1]
    planned = run.setting("train.steps")
    last_step = int(run.columns["step"][-1]) if run.num_steps else 0
    state, ending = _ending(run, last_step, planned if is_number(planned) else None)
    mfu = _median(run, "mfu_bf16")
    ratio = full_to_causal(run)
    mfu_full = _median(run, "mfu_bf16_full")
    if mfu_full is None and mfu is not None and ratio is not None:
        mfu_full = mfu * ratio
    return Summary(
        state=state,
        ending=ending,
        last_step=last_step,
        planned_steps=int(planned) if is_number(planned) else None,
        tokens=run.last("tokens"),
        parameters=model_size(run)[0],
        loss=run.last("loss"),
        loss_mean=float(losses[-tail:].mean()) if losses.size else None,
        loss_mean_steps=tail,
        eval_loss=float(eval_losses[-1]) if eval_losses.size else None,
        eval_step=int(eval_steps[-1]) if eval_steps.size else None,
        bits_per_byte=float(bits[-1]) if bits.size else None,
        tokens_per_s=_median(run, "tokens_per_s"),
        mfu_causal=mfu,
        mfu_full=mfu_full,
        sol=_median(run, "sol"),
        tensor_peak_bytes=_largest(run, "tensor_peak_bytes"),
        process_growth_bytes=_largest(run, "process_growth_bytes"),
        seconds=float(run.recorded("step_s")[1].sum()) if run.recorded("step_s")[1].size else None,
        num_skipped=int(np.nansum(run.columns["skipped"])),
    )


def model_size(run: RunRecord) -> tuple[float | None, Flops | None]:
    """Parameters and FLOPs per token: as the run noted them, else counted from its configuration."""
    parameters = _number(run.start_field("parameters"))
    try:
        config = load_config(run.folder / "config.toml")
        if config.model.weights is not None or config.train.sequence is None:
            return parameters, None
        architecture = base_architecture(config, None)
        return parameters or spec_of(architecture).parameters, count_flops(
            spec_of(architecture), config.train.sequence
        )
    except ScrimpError:  # an older or a damaged configuration: the page does without
        return parameters, None


def full_to_causal(run: RunRecord) -> float | None:
    """FLOPs per token in the full form over those in the causal form, where they are known."""
    full = _number(run.start_field("flops_per_token_full"))
    causal = _number(run.start_field("flops_per_token_causal"))
    if full and causal:
        return full / causal
    flops = model_size(run)[1]
    return flops.full / flops.causal if flops is not None else None


def _ending(run: RunRecord, last_step: int, planned: float | None) -> tuple[State, str]:
    last = format_integer(last_step)
    session = _last_session(run)
    kinds = {str(event.get("kind")): event for event in session}
    finish, signal = kinds.get("finish"), kinds.get("signal")
    complete = planned is None or last_step >= planned
    if finish is not None and complete:
        return "finished", _sentence("Finished", finish)
    if signal is not None:
        return "interrupted", _sentence(f"Interrupted after step {last}", signal)
    end = finish or next((kinds[kind] for kind in ("failed", "error", "stopped") if kind in kinds), None)
    if end is not None:
        return "stopped", _sentence(f"Stopped after step {last}", end)
    return "open", f"Not finished: the last record is of step {last}. The run goes on, or it was killed."


def _last_session(run: RunRecord) -> list[dict[str, Any]]:
    starts = [index for index, event in enumerate(run.events) if event.get("kind") in ("start", "resume")]
    return run.events[starts[-1] :] if starts else run.events


def _sentence(what: str, event: dict[str, Any]) -> str:
    reason = event.get("reason")
    return f"{what}: {reason}" if reason else f"{what}."


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _median(run: RunRecord, name: str) -> float | None:
    values = run.recorded(name)[1]
    return float(np.median(values)) if values.size else None


def _largest(run: RunRecord, name: str) -> float | None:
    values = run.recorded(name)[1]
    return float(values.max()) if values.size else None
