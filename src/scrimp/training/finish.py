"""The end of a run: last evaluation and checkpoint, a sample, measured figures, the report.

A checkpoint that cannot be written does not cost the rest: the sample and the report follow, and the
error is raised last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path

from scrimp.config import Sampling
from scrimp.data import ChatTemplate
from scrimp.errors import ScrimpError, StorageError, TrainingError, typed
from scrimp.files import write_whole
from scrimp.launchers import ELSEWHERE
from scrimp.models.generation import generate
from scrimp.models.model import Model
from scrimp.planner import Figures
from scrimp.profiler import remember_throughput
from scrimp.report import write_report
from scrimp.report.units import format_bytes, format_rate, printable
from scrimp.training.guards import StopSignals
from scrimp.training.loop import Trainer
from scrimp.training.memory.between_phases import GENERATION
from scrimp.training.run import Run
from scrimp.training.run_folder import PLAN
from scrimp.training.step_passes import record_passes

SAMPLE_TOKENS = 96
WARM_UP_STEPS = 5
"""First steps, which are left out of the measured rate."""


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    run_dir: Path
    exit_code: int
    """0 done, 75 stopped to go on in another layout, else 128 and the number of the signal that ended the run."""
    step: int
    eval_loss: float | None
    report: Path


def finish(run_dir: Path, trainer: Trainer, signals: StopSignals) -> RunSummary:
    """Leave a complete run folder, and say how to go on.

    Raises:
        StorageError: the last checkpoint could not be written.
        TrainingError: all steps are done, and the weights are not finite.
    """
    step, line = trainer.run.step, trainer.run.line
    is_done = step >= trainer.run.train.steps
    failure = save_last(trainer)  # first: nothing that follows may cost the weights
    copies = None if trainer.run.outer is None else trainer.run.outer.copies
    if is_done and copies is not None and failure is None:
        copies.finish()  # from here on nobody need be started again
    if is_done:
        _refuse_not_finite(trainer)
    evaluation = trainer.evaluations.evaluate() if is_done else None
    if is_done:
        _sample(trainer.run)
        trainer.run.event("finish", "all steps done")
    elif signals.received is not None:
        trainer.run.event("signal", f"{signals.received.name}: the run can be resumed")
    if failure is None:
        _write_measured_plan(run_dir, trainer.run)
    world = trainer.run.decisions.world
    report = world.once("writing the report", lambda: write_report(run_dir), write=str, read=Path)
    if signals.received is not None and not is_done:
        words = ["train", "--run.dir", run_dir, "--resume"]
        if copies is not None:  # one of several jobs, in a folder of the run's
            words = [
                "launch",
                "--copies",
                copies.place.copies,
                "train",
                "--run.dir",
                run_dir.parent,
                "--resume",
            ]
        line.message(f"stopped after step {step:,}; go on with {typed(*map(str, words))}")
    if trainer.run.go_on_with and not is_done:
        line.message(f"stopped after step {step:,} for another layout; go on with {trainer.run.go_on_with}")
    line.message(f"report: {report}")
    if failure is not None:
        raise failure
    code = 0 if is_done else signals.exit_code or ELSEWHERE * bool(trainer.run.go_on_with)
    return RunSummary(run_dir, code, step, evaluation.loss if evaluation else None, report)


def _refuse_not_finite(trainer: Trainer) -> None:
    """End a run in an error where its last weights hold a NaN or an infinity: nobody can use them."""
    step = trainer.run.step
    names = [name for name in trainer.run.store.not_finite.get(step, ()) if name.startswith("model.")]
    if names:
        raise TrainingError(
            f"the weights are not finite after the last step, {step:,}",
            got=f"NaN or infinity in {', '.join(names[:3])}" + (" ..." if len(names) > 3 else ""),
            expected="finite numbers",
            do="lower --optimizer.lr or raise --optimizer.eps in a new run; `--model.weights` takes an "
            "older checkpoint",
        )


def save_last(trainer: Trainer) -> StorageError | None:
    """Write a checkpoint of this step and wait for it; the error if that fails."""
    trainer.run.line.phase("writing the checkpoint")
    trainer.checkpoints.wait()  # an earlier one that failed must not keep this one from being tried
    try:
        trainer.checkpoints.save(wait=True)
    except StorageError as error:
        trainer.checkpoints.failed(error)
        return error
    trainer.checkpoints.report()
    return None


def finish_failed(run_dir: Path, trainer: Trainer, error: TrainingError) -> None:
    """Record why a run stopped, keep what it learned, and write its report.

    Skipped steps have not moved the weights: they are the last ones that came from finite gradients, worth a
    checkpoint where the run has none. Older checkpoints are never pushed out by it.
    """
    world = trainer.run.decisions.world
    trainer.checkpoints.wait()
    has_any = world.once("looking for checkpoints", lambda: bool(trainer.run.store.complete()))
    outer = trainer.run.outer
    in_round = outer is not None and outer.copies is not None and outer.in_round  # nobody comes to end it
    if not has_any and not in_round and not world.any(trainer.stepper.is_updating):
        save_last(trainer)
    trainer.run.event("finish", str(error))
    if not world.is_writer:
        return
    sound, _ = trainer.run.store.latest(finite=True)
    if sound is not None and sound.step < trainer.run.step:
        trainer.run.line.message(f"the newest checkpoint with finite numbers: {sound.folder}")
    with contextlib.suppress(ScrimpError, MemoryError):  # the run's own error is the one to show
        trainer.run.line.message(f"report: {write_report(run_dir)}")


def _sample(run: Run) -> None:
    """Continue the beginning of a document, held out where there is one, as a reader would judge."""
    if run.executable.stages is not None:
        folder = run.store.folder.parent
        run.line.message(f"no sample in a pipeline: {typed('generate', folder)} reads its checkpoint")
        return
    run.line.phase("generating a sample")
    run.phases.switch(GENERATION)
    corpus = run.corpus.parts[0]
    tokenizer, stream = corpus.tokenizer, corpus.held_out if corpus.held_out.num_tokens else corpus.train
    context = run.decisions.architecture.context
    begins = min(16, stream.num_tokens)
    end_ids = tokenizer.end_ids
    if stream.has_answers:  # all that the first conversation holds before its first answer
        begins = int(stream.mask(0, min(context, stream.num_tokens)).argmax())
        end_ids = ChatTemplate(tokenizer).end_ids
    prompt_ids = [int(i) for i in stream.read(0, max(1, min(begins, context - 1)))]
    model: Model = run.executable.model
    model.eval()
    with run.evaluating(), run.executable.autocast():
        ids = list(
            generate(
                model,
                prompt_ids,
                max_tokens=min(SAMPLE_TOKENS, context - len(prompt_ids)),
                sampling=Sampling(top_p=0.95, seed=run.config.run.seed),
                end_ids=end_ids,
                agreed=run.decisions.world.told,
            )
        )
    model.train()
    prompt = tokenizer.decode(prompt_ids)
    text = tokenizer.decode(prompt_ids + ids).removeprefix(prompt)
    reason = "beginning of a document or a conversation, temperature 0.8"
    run.event("sample", reason, prompt=prompt, text=text)
    run.line.message(f"sample (prompt | continuation):\n{printable(prompt)} | {printable(text)}")


def _write_measured_plan(run_dir: Path, run: Run) -> None:
    """Put what was measured beside the plan's predictions, and remember the rate."""
    rates, meter = run.rates[WARM_UP_STEPS:], run.meter
    rate = statistics.median(rates) if rates else None
    measured = Figures(
        peak_device_bytes=meter.peak_device_bytes(),
        step_seconds=None if rate is None else run.batch_tokens / rate,
        counted_in_step=meter.counted_in_step,
        process_peak_bytes=meter.process_peak_bytes(),
        process_growth_bytes=meter.process_growth_bytes(),
    )
    if not run.decisions.world.is_writer:
        return
    plan = dataclasses.replace(run.plans.plan, measured=measured)
    write_whole(run_dir / PLAN, plan.to_json())
    words = _memory_words(measured)
    record_passes(run, measured.step_seconds)
    if rate is not None:
        remember_throughput(plan, run.config, rate)
        words = f"{format_rate(rate)} (median), {words}"
    run.line.message(f"measured: {words}")


def _memory_words(measured: Figures) -> str:
    """Tensors and process apart."""
    peak, step = measured.peak_device_bytes, measured.counted_in_step
    where = "" if step is None else f" (counted in step {step:,})"
    tensors = "" if peak is None else f"tensors at most {format_bytes(peak)}{where}, "
    return f"{tensors}process grown by {format_bytes(measured.process_growth_bytes)}"
