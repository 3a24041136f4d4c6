"""One call of `scrimp train`: from a configuration to a run folder with a trained model.

`train` is read top to bottom in the order of events: decide, open the data, lock the folder,
realise the plan, restore if asked, run, finish. Whatever ends the run, the files that it leaves
are complete, and the last lines say how to go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from scrimp import __version__
from scrimp.config import Config, decided, to_toml
from scrimp.data import Corpus
from scrimp.errors import CheckpointError, TrainingError
from scrimp.measure import MemoryMeter, device_peaks, remember_throughput
from scrimp.model import Decoder, generate, initialise
from scrimp.plan import Figures, Plan, count_flops
from scrimp.report import write_report
from scrimp.report.units import format_bytes, format_count, format_rate
from scrimp.runtime import compile_blocks, prove, realise
from scrimp.train.checkpoint import Checkpoint, CheckpointStore
from scrimp.train.guards import StopSignals
from scrimp.train.loop import Trainer
from scrimp.train.metrics import MetricsLog
from scrimp.train.progress import StepLine
from scrimp.train.run_folder import (
    CONFIG,
    PLAN,
    TOKENIZER,
    RunLock,
    choose_run_dir,
    config_to_resume,
    refuse_used_folder,
    saved_config,
    write_text,
)
from scrimp.train.setup import Decisions, absolute, decide, fit_vocabulary, name_tokenizer, open_run_corpus
from scrimp.train.weights import architecture_of_checkpoint, fill_from_weights

SAMPLE_TOKENS = 96
MEASURED_AFTER = 5
"""Steps after which the plan's predictions get their measurements; the first ones warm up."""


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    run_dir: Path
    exit_code: int
    """0 done, 130 after SIGINT, 143 after SIGTERM."""
    step: int
    eval_loss: float | None
    report: Path | None


def train(config: Config, *, resume: bool = False, given: Collection[str] = frozenset()) -> RunSummary:
    """Train by a configuration.

    Args:
        resume: go on from the newest good checkpoint of `config.run.dir`.
        given: dotted keys that the user wrote; a resumed run takes all others from its folder.

    Raises:
        ScrimpError: bad input (nothing was started), or a run that failed.
    """
    checkpoint, notes = None, []
    if resume:
        if config.run.dir is None:
            raise CheckpointError("--resume needs a run", do="name it with --run.dir")
        run_dir = config.run.dir
        config = config_to_resume(saved_config(run_dir), config, given)
        checkpoint, errors = CheckpointStore(run_dir, keep_last=1, keep_every=0).latest()
        notes = [f"passed over: {error}" for error in errors]
        if checkpoint is None and errors:
            raise CheckpointError(
                f"no checkpoint of {run_dir} can be used",
                got="; ".join(str(error) for error in errors),
                do="restore one from a copy, or start a new run; nothing was changed",
            )
    else:
        run_dir = choose_run_dir(config)
        refuse_used_folder(run_dir)
    config = _anchored(config, run_dir)
    architecture = architecture_of_checkpoint(checkpoint) if checkpoint else None
    decisions = decide(config, architecture=architecture)
    corpus = open_run_corpus(decisions)
    decisions = fit_vocabulary(name_tokenizer(decisions, corpus), corpus)
    _refuse_other_data(checkpoint, corpus)
    with RunLock(run_dir):
        return _train_in(run_dir, decisions, corpus, checkpoint, notes)


def _anchored(config: Config, run_dir: Path) -> Config:
    """Paths from the root, so that the saved configuration works from any folder."""
    data = dataclasses.replace(config.data, cache=absolute(config.data.cache))
    source, tokenizer = Path(data.source).expanduser(), Path(data.tokenizer).expanduser()
    if source.exists():
        data = dataclasses.replace(data, source=str(source.absolute()))
    if tokenizer.is_dir():
        data = dataclasses.replace(data, tokenizer=str(tokenizer.absolute()))
    model = dataclasses.replace(config.model, weights=absolute(config.model.weights))
    return dataclasses.replace(
        config, run=dataclasses.replace(config.run, dir=run_dir), data=data, model=model
    )


def _refuse_other_data(checkpoint: Checkpoint | None, corpus: Corpus) -> None:
    if checkpoint is not None and checkpoint.state["data_digest"] != corpus.digest:
        raise CheckpointError(
            "the data are not those that the run was trained on",
            got=f"shards with digest {corpus.digest[:12]}",
            expected=str(checkpoint.state["data_digest"])[:12],
            do="restore the source and the tokenizer, or start a new run with --model.weights",
        )


def _train_in(
    run_dir: Path, decisions: Decisions, corpus: Corpus, checkpoint: Checkpoint | None, notes: list[str]
) -> RunSummary:
    config = decisions.config
    plan, files = _write_decisions(run_dir, decisions, corpus, is_resume=checkpoint is not None)
    decisions = dataclasses.replace(decisions, plan=plan)
    store = CheckpointStore(run_dir, keep_last=config.train.keep_last, keep_every=config.train.keep_every)
    store.prepare()
    resume_step = checkpoint.step if checkpoint else None
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(contextlib.closing(MetricsLog(run_dir, resume_step=resume_step)))
        line = stack.enter_context(StepLine(total_steps=config.train.steps, first_step=resume_step or 0))
        signals = stack.enter_context(StopSignals(line.message))
        for note in notes:
            line.message(note)
            log.event("checkpoint-failed", resume_step or 0, note)
        trainer = _make_trainer(
            decisions, corpus, store, log, line, files, has_checkpoint=checkpoint is not None
        )
        if checkpoint is not None:
            trainer.restore(checkpoint)
        _announce(trainer, run_dir, checkpoint)
        try:
            trainer.run(signals)
        except TrainingError as error:
            log.event("finish", trainer.position.step, str(error))
            store.wait()
            write_report(run_dir)
            raise
        return _finish(run_dir, trainer, signals)


def _write_decisions(
    run_dir: Path, decisions: Decisions, corpus: Corpus, *, is_resume: bool
) -> tuple[Plan, dict[str, str]]:
    """Leave config, plan and tokenizer in the run folder; a resumed run keeps its plan."""
    config_path, plan_path = run_dir / CONFIG, run_dir / PLAN
    plan = decisions.plan
    if plan_path.exists():
        saved = Plan.read(plan_path)
        plan = saved if saved.fingerprint == plan.fingerprint else plan
    if not is_resume or not config_path.exists():
        corpus.tokenizer.save(run_dir / TOKENIZER)
        # The configuration comes last: a folder with one can be resumed.
        write_text(plan_path, plan.to_json())
        write_text(config_path, to_toml(decisions.config, decisions.reasons))
    return plan, {CONFIG: config_path.read_text(encoding="utf-8"), PLAN: plan.to_json()}


def _make_trainer(
    decisions: Decisions,
    corpus: Corpus,
    store: CheckpointStore,
    log: MetricsLog,
    line: StepLine,
    files: dict[str, str],
    *,
    has_checkpoint: bool,
) -> Trainer:
    """Build the model by its plan, prove the plan, and compile."""
    config, device = decisions.config, decisions.device.torch_device
    torch.manual_seed(config.run.seed)
    if device.type == "cuda":
        # Equal seeds must give equal losses; cuBLAS needs its workspace fixed before it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)

    def fill(model: Decoder) -> None:
        if has_checkpoint:
            return  # the trainer loads every parameter from the checkpoint
        if config.model.weights is not None:
            fill_from_weights(model, config.model.weights)
        else:
            initialise(model, config.run.seed)

    line.phase("measuring the peak rate of the device")
    peaks = device_peaks(device, decisions.device.name)
    line.peak_origin = peaks.origin
    line.phase("building the model")
    meter = MemoryMeter(device)
    executable = realise(
        decisions.plan,
        decisions.architecture,
        fill,
        device=device,
        parameters=config.train.parameters,
        loss_chunk=config.train.loss_chunk or 0,
        z_loss=config.train.z_loss,
    )
    prove(executable, decisions.plan)
    if config.train.compile == "on":
        line.phase("compiling the blocks during the first step")
        compile_blocks(executable.model)
    return Trainer(decisions, corpus, executable, peaks, meter, store=store, log=log, line=line, files=files)


def _announce(trainer: Trainer, run_dir: Path, checkpoint: Checkpoint | None) -> None:
    config, architecture = trainer.config, trainer.decisions.architecture
    name = str(config.model.weights or config.model.preset)
    sentence = (
        f"{name}: {format_count(architecture.num_parameters)} parameters in {config.train.parameters}, "
        f"GEMMs in {config.precision}, {trainer.decisions.device.name}; "
        f"{format_count(trainer.corpus.train.num_tokens)} training tokens, "
        f"{format_count(trainer.corpus.held_out.num_tokens)} held out; {run_dir}"
    )
    trainer.line.message(sentence)
    trainer.line.message(f"data: {trainer.corpus.checked}")
    kind = "resume" if checkpoint else "start"
    flops = count_flops(architecture, decided(config.train.sequence))
    trainer.log.event(
        kind,
        trainer.position.step,
        f"from {checkpoint.folder.name}" if checkpoint else "from the beginning",
        device=trainer.decisions.device.name,
        parameters=architecture.num_parameters,
        flops_per_token_causal=flops.causal,
        flops_per_token_full=flops.full,
        peak_origin=trainer.peaks.origin,
        environment={
            "scrimp": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
    )
    if checkpoint:
        trainer.line.message(f"continuing from step {checkpoint.step:,}")


def _finish(run_dir: Path, trainer: Trainer, signals: StopSignals) -> RunSummary:
    """Last evaluation, last checkpoint, sample, measured plan, report."""
    step = trainer.position.step
    eval_loss: float | None = None
    if signals.received is None:
        evaluation = trainer.evaluate()
        eval_loss = evaluation.loss if evaluation else None
    trainer.line.phase("writing the checkpoint")
    trainer.save(wait=True)
    trainer.report_checkpoints()
    if signals.received is None:
        _sample(trainer)
        trainer.log.event("finish", step, "all steps done")
    else:
        trainer.log.event("signal", step, f"{signals.received.name}: checkpoint written, run can be resumed")
    _write_measured_plan(run_dir, trainer)
    report = write_report(run_dir)
    line = trainer.line
    if signals.received is not None:
        line.message(f"stopped after step {step:,}; go on with: scrimp train --run.dir {run_dir} --resume")
    line.message(f"report: {report}")
    return RunSummary(run_dir, signals.exit_code, step, eval_loss, report)


def _sample(trainer: Trainer) -> None:
    """Continue the beginning of a document, held out where there is one, as a reader would judge."""
    trainer.line.phase("generating a sample")
    corpus = trainer.corpus
    tokenizer, stream = corpus.tokenizer, corpus.held_out if corpus.held_out.num_tokens else corpus.train
    context = trainer.decisions.architecture.context
    prompt_ids = [int(i) for i in stream.read(0, min(16, stream.num_tokens, context - 1))]
    model: Decoder = trainer.executable.model
    model.eval()
    with trainer.executable.autocast():
        ids = list(
            generate(
                model,
                prompt_ids,
                max_tokens=min(SAMPLE_TOKENS, context - len(prompt_ids)),
                temperature=0.8,
                top_p=0.95,
                seed=trainer.config.run.seed,
                end_ids=tokenizer.end_ids,
            )
        )
    model.train()
    prompt = tokenizer.decode(prompt_ids)
    text = tokenizer.decode(prompt_ids + ids).removeprefix(prompt)
    trainer.log.event(
        "sample", trainer.position.step, "beginning of a document, temperature 0.8", prompt=prompt, text=text
    )
    trainer.line.message(f"sample (prompt | continuation):\n{prompt} | {text}")


def _write_measured_plan(run_dir: Path, trainer: Trainer) -> None:
    """Put what was measured beside the plan's predictions, and remember the rate."""
    rates = trainer.rates[MEASURED_AFTER:]
    if not rates:
        return
    rate = statistics.median(rates)
    measured = Figures(
        peak_device_bytes=trainer.meter.peak_device_bytes(),
        peak_host_bytes=trainer.meter.peak_host_bytes(),
        step_seconds=decided(trainer.train.batch_tokens) / rate,
    )
    plan = dataclasses.replace(trainer.decisions.plan, measured=measured)
    write_text(run_dir / PLAN, plan.to_json())
    remember_throughput(plan, trainer.config, rate)
    trainer.line.message(
        f"{format_rate(rate)} (median, measured); peak memory {format_bytes(measured.peak_device_bytes)} (measured)"
    )
