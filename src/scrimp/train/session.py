"""One call of `scrimp train`: from a configuration to a run folder with a trained model.

`train` is read top to bottom in the order of events: decide and open the data (`start`), claim the folder,
realise the plan, restore if asked, run (`loop`), finish (`finish`). Whatever ends the run, the files
that it leaves are complete, and the last lines say how to go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from scrimp import __version__
from scrimp.config import Config, decided, reasons_in, to_toml
from scrimp.errors import CheckpointError, PlanError, TrainingError
from scrimp.files import write_whole
from scrimp.model import Decoder, initialise
from scrimp.planner import Plan, account_of, count_flops
from scrimp.profiler import MemoryMeter, device_peaks
from scrimp.report.units import format_count
from scrimp.runtime import compile_blocks, deterministic, precisions_of, prove, realise
from scrimp.runtime.memory import ArenaTooSmallError, uses_host
from scrimp.train.checkpoint import CheckpointStore
from scrimp.train.finish import RunSummary, finish, finish_failed
from scrimp.train.guards import StopSignals
from scrimp.train.loop import Trainer
from scrimp.train.memory.host_room import left_of_budget, take_host_room
from scrimp.train.memory.limits import device_limit, refuse_beyond_memory
from scrimp.train.memory.plan import decision_of
from scrimp.train.memory.shown import account_text
from scrimp.train.memory.trouble import is_out_of_memory
from scrimp.train.metrics import MetricsLog
from scrimp.train.progress import StepLine
from scrimp.train.run_folder import (
    CONFIG,
    PLAN,
    TOKENIZER,
    RunLock,
    claim_new_folder,
    refuse_used_folder,
    saved_config,
)
from scrimp.train.setup import Decisions
from scrimp.train.start import Start, fresh_start, resumed_start
from scrimp.train.weights import fill_from_weights


def train(config: Config, *, resume: bool = False, given: Collection[str] = frozenset()) -> RunSummary:
    """Train by a configuration.

    Args:
        resume: go on from the newest good checkpoint of `config.run.dir`.
        given: dotted keys that the user wrote; a resumed run takes all others from its folder.

    Raises:
        ScrimpError: bad input (nothing was started), or a run that failed.
    """
    # Determinism needs it, and torch looks once: at the first product on the device, which may be a probe's.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if resume:
        if config.run.dir is None:
            raise CheckpointError("--resume needs a run", do="name it with --run.dir")
        saved_config(config.run.dir)  # refuse what holds no run before a lock file is left in it
        with RunLock(config.run.dir):
            return _train_in(config.run.dir, resumed_start(config.run.dir, config, given))
    if config.run.dir is not None:
        refuse_used_folder(config.run.dir)
    start = fresh_start(config)
    with claim_new_folder(config) as run_dir:
        return _train_in(run_dir, start)


def _train_in(run_dir: Path, start: Start) -> RunSummary:
    start = _in_folder(run_dir, start)
    config = start.decisions.config
    files = _write_decisions(run_dir, start)
    left = left_of_budget(config, start.decisions.device, start.room.arena.capacity if start.room else 0)
    store = CheckpointStore(
        run_dir, keep_last=config.train.keep_last, keep_every=config.train.keep_every, room=left
    )
    store.prepare()
    resume_step = start.checkpoint.step if start.checkpoint else None
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(contextlib.closing(MetricsLog(run_dir, resume_step=resume_step)))
        line = stack.enter_context(StepLine(total_steps=config.train.steps, first_step=resume_step or 0))
        signals = stack.enter_context(StopSignals(line.message))
        for note in start.notes:
            line.message(note)
            log.event("checkpoint-failed", resume_step or 0, note)
        trainer = _make_trainer(start, store, log, line, files)
        stack.callback(trainer.optimizer.close)
        _announce(trainer, run_dir, start)
        if trainer.cycle is not None:
            stack.callback(trainer.cycle.close)
        try:
            with _named_failures(trainer), deterministic(trainer.executable.device):
                trainer.run(signals)
        except TrainingError as failure:
            finish_failed(run_dir, trainer, failure)
            raise
        with _named_failures(trainer):
            return finish(run_dir, trainer, signals)


def _in_folder(run_dir: Path, start: Start) -> Start:
    """A start in its folder: a resumed run has its own plan and reasons, and takes host memory by these."""
    decisions = start.decisions
    config = dataclasses.replace(decisions.config, run=dataclasses.replace(decisions.config.run, dir=run_dir))
    reasons = decisions.reasons
    config_path, plan_path = run_dir / CONFIG, run_dir / PLAN
    is_resumed = config_path.exists()
    if is_resumed:
        reasons = reasons_in(config_path.read_text(encoding="utf-8"), config)
        if plan_path.exists():
            saved = Plan.read(plan_path)
            if saved.fingerprint == decisions.plan.fingerprint:
                saved.check_runnable(decisions.plan, str(plan_path))
                decisions = _carried_on(saved, start)
    plan = decisions.plan
    if config.is_planned and uses_host(plan):
        raise PlanError(
            "nothing of a step can live on the host beside precision snip",
            got=f"a block of {plan_path} that offloads or has states on the host",
            expected="all of the model on the device: statistics read the states of all layers at once",
        )
    room = (
        take_host_room(plan, config, decisions.architecture, decisions.device) if is_resumed else start.room
    )
    decisions = dataclasses.replace(decisions, config=config, reasons=reasons)
    return dataclasses.replace(start, decisions=decisions, room=room)


def _write_decisions(run_dir: Path, start: Start) -> dict[str, str]:
    """Leave config, plan and tokenizer in the run folder; the first two are in every checkpoint too."""
    if not (run_dir / CONFIG).exists():
        start.corpus.tokenizer.save(run_dir / TOKENIZER)
    files = {
        PLAN: start.decisions.plan.to_json(),
        CONFIG: to_toml(start.decisions.config, start.decisions.reasons),
    }
    # The configuration comes last: a folder with one can be resumed.
    for name, text in files.items():
        write_whole(run_dir / name, text)
    return files


def _carried_on(saved: Plan, start: Start) -> Decisions:
    """A resumed run: formats as they were, memory as it is decided now, but for what its user has edited."""
    decisions, now = start.decisions, start.decisions.plan
    edited = {name: getattr(saved, name) for name in saved.edited}
    _refuse_two_wills(edited, start.given)
    plan = dataclasses.replace(
        saved, budget=now.budget, predicted=now.predicted, blocks=now.blocks, states=now.states
    )
    plan = dataclasses.replace(plan, written={name: saved.written[name] for name in edited})
    if not edited:
        return dataclasses.replace(decisions, plan=plan)
    plan = dataclasses.replace(plan, **edited)
    config, architecture, device = decisions.config, decisions.architecture, decisions.device
    memory = decision_of(plan, config, architecture, device)
    copy = account_of(config, architecture).checkpoint_copy
    refuse_beyond_memory(memory, config, device, copy)
    machine = dataclasses.replace(memory.machine, device_bytes=device_limit(config, device, copy))
    decisions = decisions.with_memory(dataclasses.replace(memory, machine=machine))
    # Its seconds were not measured here.
    predicted = dataclasses.replace(decisions.plan.predicted, step_seconds=None)
    return dataclasses.replace(decisions, plan=dataclasses.replace(plan, predicted=predicted))


def _refuse_two_wills(edited: Collection[str], given: Collection[str]) -> None:
    settings = sorted(key for key in given if key.startswith("memory."))
    if edited and settings:
        raise PlanError(
            "plan.json was edited, and a setting of the same things is given",
            got=f"edited {' and '.join(edited)}; given {', '.join(settings)}",
            expected="one of the two",
            do="leave the setting out, or restore plan.json from a checkpoint",
        )


def _make_trainer(
    start: Start, store: CheckpointStore, log: MetricsLog, line: StepLine, files: dict[str, str]
) -> Trainer:
    """Build the model by its plan, prove the plan, restore, and compile."""
    decisions = start.decisions
    config, device = decisions.config, decisions.device.torch_device
    torch.manual_seed(config.run.seed)

    def fill(model: Decoder) -> None:
        if start.checkpoint is not None:
            return  # every parameter is loaded from the checkpoint below
        if config.model.weights is not None:
            fill_from_weights(model, config.model.weights)
        else:
            initialise(model, config.run.seed)

    line.phase("measuring the peak rate of the device")
    peaks = device_peaks(device, decisions.device.name)
    line.peak_origin = peaks.description
    choose = decisions.backends()
    line.phase("building the model")
    meter = MemoryMeter(device)
    executable = realise(
        decisions.plan,
        decisions.architecture,
        fill,
        device=device,
        parameters=config.train.parameters,
        compute=config.precision_rules.compute,
        seed=config.run.seed,
        loss_chunk=decided(config.train.loss_chunk),
        z_loss=config.train.z_loss,
        choose=choose,
        replans=config.is_planned,
        room=start.room,
        most_tokens=decisions.micro_batch_tokens,
        longest=decided(config.train.sequence),
    )
    trainer = Trainer(
        decisions, start.corpus, executable, peaks, meter, store=store, log=log, line=line, files=files
    )
    if start.checkpoint is not None:
        trainer.restore(start.checkpoint)
    # Of the weights that are trained: before, a resumed run's parameters are whatever lay in memory.
    prove(executable, trainer.decisions.plan)
    if trainer.cycle is not None:
        trainer.cycle.prepare()
        if start.checkpoint is None:
            trainer.cycle.write_start()
    trainer.optimizer.zero_grad()  # it sums gradients itself where weights have masters: the probe's too
    if config.train.compile == "on":
        line.phase("compiling the blocks during the first step")
        compile_blocks(executable.model)
    return trainer


@contextlib.contextmanager
def _named_failures(trainer: Trainer) -> Iterator[None]:
    """Turn what a machine cannot do into errors that say what to do."""
    try:
        yield
    except (RuntimeError, ArenaTooSmallError) as error:
        if is_out_of_memory(error):
            raise _out_of_memory(trainer, error) from None
        # By module: importing the compiler's exceptions would import the compiler.
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise _not_compiled(error) from None
        raise


def _out_of_memory(trainer: Trainer, error: Exception) -> TrainingError:
    train, step = trainer.train, trainer.position.step
    when = f"after step {step}"
    if trainer.is_updating:
        when = f"in the update of step {step + 1}, which cannot be taken again"
    elif trainer.no_plan_takes_less:
        when = f"in step {step + 1}, and no plan takes less"
    if isinstance(error, ArenaTooSmallError):
        return TrainingError(
            f"the host memory that was taken for the run ran out {when}",
            got=error.got,
            do="send less there: other --memory.activations, or less of --memory.weights, --memory.gradients and "
            "--memory.optimizer; go on with --resume",
        )
    return TrainingError(
        f"the device ran out of memory {when}",
        got=str(error).split(". ")[0],
        do=f"lower --train.micro-batch (now {train.micro_batch}), or --train.loss-chunk (now {train.loss_chunk}), "
        "and go on with --resume",
    )


def _not_compiled(error: Exception) -> TrainingError:
    return TrainingError(
        "the blocks cannot be compiled on this machine",
        got=str(error).strip().splitlines()[0],
        expected="a working C++ compiler, and Triton on CUDA",
        do="install one, or go on with --resume --train.compile off",
    )


def _announce(trainer: Trainer, run_dir: Path, start: Start) -> None:
    config, architecture = trainer.config, trainer.decisions.architecture
    corpus, device = trainer.corpus, trainer.decisions.device
    trainer.line.message(
        f"{config.model.weights or config.model.preset}: {format_count(architecture.num_parameters)} parameters in "
        f"{config.train.parameters}, GEMMs in {config.precision}, {device.name}; "
        f"{format_count(corpus.train.num_tokens)} training tokens, "
        f"{format_count(corpus.held_out.num_tokens)} held out; {run_dir}"
    )
    trainer.line.message(f"data: {corpus.checked}")
    trainer.line.message(account_text(trainer.decisions))
    _note_edited_plan(trainer)
    if config.is_planned:
        trainer.line.message(
            f"precision is planned: {config.snip.formats} per GEMM, first at step {config.snip.first}, "
            f"every {config.snip.every} steps; until then {config.snip.start}"
        )
    backends = trainer.decisions.describe_backends()
    if backends:
        trainer.line.message(f"GEMMs: {backends}")
    flops = count_flops(architecture, decided(config.train.sequence))
    trainer.log.event(
        "resume" if start.checkpoint else "start",
        trainer.position.step,
        f"from {start.checkpoint.folder.name}" if start.checkpoint else "from the beginning",
        device=device.name,
        parameters=architecture.num_parameters,
        flops_per_token_causal=flops.causal,
        flops_per_token_full=flops.full,
        peak_origin=trainer.peaks.origin,
        backends=backends,
        environment={
            "scrimp": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
    )
    if start.checkpoint:
        done = start.checkpoint.step >= config.train.steps
        say = "all steps are done already" if done else f"continuing from step {start.checkpoint.step:,}"
        trainer.line.message(say)


def _note_edited_plan(trainer: Trainer) -> None:
    """Say so where plan.json no longer says what a fixed `precision` does; it is carried out as it stands."""
    plan = trainer.decisions.plan
    if trainer.config.is_planned:
        return
    rules = trainer.config.precision_rules.assign(list(plan.gemms))
    edited = [layer for layer, choice in precisions_of(plan).items() if choice != rules[layer][0]]
    if edited:
        note = (
            f"plan.json differs from `precision` in {len(edited)} layers, {edited[0]} first: the plan counts"
        )
        trainer.line.message(note)
        trainer.log.event("plan", trainer.position.step, note)
