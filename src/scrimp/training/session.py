"""One call of `scrimp train`: from a configuration to a run folder with a trained model.

`train` is read top to bottom in the order of events: decide and open the data (`start`), claim the folder,
realise the plan, restore if asked, run (`loop`), finish (`finish`). Whatever ends the run, the files
that it leaves are complete, and the last lines say how to go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from scrimp import objectives
from scrimp.config import Config, to_toml
from scrimp.data import load_tokenizer
from scrimp.errors import CheckpointError, ConfigError, PlanError, TrainingError
from scrimp.files import write_whole
from scrimp.gemm import BackendChooser
from scrimp.launchers import copy_of
from scrimp.models import spec_of
from scrimp.models.compiled import is_compiler_error
from scrimp.models.initialise import initialise
from scrimp.models.model import Model
from scrimp.optim import Copies, build, build_outer
from scrimp.planner import Plan
from scrimp.profiler import MemoryMeter, peaks_of
from scrimp.runtime import (
    Executable,
    backends_text,
    compile_blocks,
    deterministic,
    prove,
    realise,
    tune,
)
from scrimp.runtime.memory import ArenaTooSmallError
from scrimp.runtime.parallel import RankMesh
from scrimp.training.announce import announce
from scrimp.training.checkpoint import CheckpointStore
from scrimp.training.distillation import own_average
from scrimp.training.finish import RunSummary, finish, finish_failed
from scrimp.training.guards import StopSignals
from scrimp.training.loop import Trainer
from scrimp.training.memory.decide import decision_of
from scrimp.training.memory.host_room import left_of_budget, take_host_room
from scrimp.training.memory.kept_operands import with_kept_operands
from scrimp.training.memory.limits import device_limit, refuse_beyond_memory
from scrimp.training.memory.oom import is_out_of_memory
from scrimp.training.metrics import MetricsLog
from scrimp.training.plan_in_force import PlanInForce
from scrimp.training.progress import StepLine
from scrimp.training.run import Run
from scrimp.training.run_folder import (
    CONFIG,
    PLAN,
    TOKENIZER,
    RunLock,
    chosen_values,
    claim_new_folder,
    drop_plans_after,
    refuse_checkpoint,
    refuse_used_folder,
    saved_config,
)
from scrimp.training.run_record import make_record, read_record, write_record
from scrimp.training.setup import Decisions
from scrimp.training.source_weighting import weighting_of
from scrimp.training.start import Start, digests_of, fresh_start, resumed_start
from scrimp.training.trained_weights import fill_from_checkpoint, fill_from_weights
from scrimp.world import World, told_like


def train(
    config: Config,
    *,
    resume: bool = False,
    resume_from: int | None = None,
    restart: bool = False,
    given: Collection[str] = frozenset(),
    planned_seconds: float | None = None,
) -> RunSummary:
    """Train by a configuration.

    Args:
        resume: go on from the newest good checkpoint of `config.run.dir`.
        resume_from: go on from the checkpoint of this step; newer ones are set aside.
        restart: with `resume`, begin again at step 0 where no checkpoint can be used.
        given: dotted keys that the user wrote; a resumed run takes all others from its folder.
        planned_seconds: of a step, as a saved plan predicts them that decided the configuration.

    Raises:
        ScrimpError: bad input (nothing was started), or a run that failed.
    """
    if restart and (resume_from is not None or not resume):
        raise ConfigError(
            "--restart does not go with --resume-from"
            if resume_from is not None
            else "--restart needs --resume",
            expected="--resume --restart: go on from the newest checkpoint, or at step 0 where none can be used",
        )
    world, began = World.current(), time.monotonic()
    with world.together("the run"):
        if resume or resume_from is not None:
            if config.run.dir is None:
                raise CheckpointError("--resume needs a run", do="name it with --run.dir")
            refuse_checkpoint(config.run.dir)
            saved_config(config.run.dir)  # refuse what holds no run before a lock file is left in it
            with RunLock(config.run.dir, world):
                start = resumed_start(
                    config.run.dir, config, given, from_step=resume_from, may_restart=restart, world=world
                )
                return _train_in(config.run.dir, start, began)
        if config.run.dir is not None:
            refuse_used_folder(config.run.dir)
        start = fresh_start(config, world, given)
        decisions = dataclasses.replace(start.decisions, planned_seconds=planned_seconds)
        start = dataclasses.replace(start, decisions=decisions)
        with claim_new_folder(config, world) as run_dir:
            return _train_in(run_dir, start, began)


def _refuse_lone_copy(copies: int) -> None:
    """Refuse settings of several copies where this job is not one of so many, and the reverse."""
    place = copy_of(os.environ)
    if copies != (1 if place is None else place.copies):
        raise ConfigError(
            "outer.copies is not the number of copies that were started",
            got=f"outer.copies {copies}, and {'one job' if place is None else f'{place.copies} copies'}",
            do="start a run of several copies with scrimp launch --copies, with as many as it began with",
        )


def _train_in(run_dir: Path, start: Start, began: float) -> RunSummary:
    _refuse_lone_copy(start.decisions.config.outer.copies)
    start = _in_folder(run_dir, start)
    config, world = start.decisions.config, start.decisions.world
    files = world.once("writing the run's first files", lambda: _write_decisions(run_dir, start))
    room = left_of_budget(config, start.decisions.device, start.room.arena.capacity if start.room else 0)
    store = CheckpointStore(
        run_dir,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.keep_every,
        room=room,
        world=world,
    )
    resume_step = start.checkpoint.step if start.checkpoint else None
    left = world.once("clearing the run's folder", lambda: _cleared(run_dir, store, start))
    store.refuse_separate_folders()
    with contextlib.ExitStack() as stack:
        log = MetricsLog(run_dir, resume_step=resume_step, world=world)
        stack.callback(log.close)
        line = StepLine(total_steps=config.train.steps, first_step=resume_step or 0, world=world)
        stack.enter_context(line)
        signals = stack.enter_context(StopSignals(line.message, world))
        for note in start.notes:
            line.message(note)
            log.event("checkpoint-failed", resume_step or 0, note)
        for path in left:
            line.message(f"left behind: {path}, which may be deleted")
        trainer = _make_trainer(_begun(run_dir, start, store, log, line, files), start, began)
        stack.callback(trainer.close)
        announce(trainer.run, run_dir, start)
        try:
            with world.together("training"), _named_failures(trainer):
                with deterministic(trainer.run.executable.device, trainer.run.train.deterministic):
                    trainer.train(signals)
                return finish(run_dir, trainer, signals)
        except TrainingError as failure:
            finish_failed(run_dir, trainer, failure)
            raise


def _cleared(run_dir: Path, store: CheckpointStore, start: Start) -> list[str]:
    """Clear what a killed process left; where the run goes back, the checkpoints that were set aside."""
    store.prepare()
    if not start.goes_back:
        return []
    step = start.checkpoint.step if start.checkpoint else None
    left = store.set_aside_after(-1 if step is None else step)
    drop_plans_after(run_dir, step or 0)
    return list(map(str, left))


def _in_folder(run_dir: Path, start: Start) -> Start:
    """A start in its folder: a resumed run has its own plan and reasons, and takes host memory by these."""
    decisions = start.decisions
    config = dataclasses.replace(decisions.config, run=dataclasses.replace(decisions.config.run, dir=run_dir))
    reasons, began_with, before = decisions.reasons, decisions.plan.backends, ""
    config_path, plan_path = run_dir / CONFIG, run_dir / PLAN
    is_resumed = config_path.exists()
    if is_resumed:
        kept = chosen_values(run_dir, config).items()
        reasons = {key: why for key, why in kept if key not in start.by_user} | reasons
        saved = _saved_plan(plan_path, start)
        if saved is not None:
            began_with, before = saved.backends, saved.layout.text
            if config.is_planned and start.checkpoint is None:  # its formats are of a later step
                saved = dataclasses.replace(saved, gemms=decisions.plan.gemms)
            if any(key.startswith("layout.") for key in start.given):
                saved = dataclasses.replace(saved, layout=decisions.plan.layout)
            if saved.fingerprint == decisions.plan.fingerprint:
                saved.check_runnable(decisions.plan, str(plan_path), spec_of(decisions.architecture).origins)
                decisions = _carried_on(saved, start)
    decisions = dataclasses.replace(decisions, config=config, reasons=reasons)
    decisions = decisions.with_recorded_backends(anew="backend" in start.given)
    if is_resumed:  # by the back ends of its record
        decisions.refuse_tuning_misfit()
    plan = decisions.plan
    if config.is_planned and plan.placement.uses_host:
        raise PlanError(
            "nothing of a step can live on the host beside precision snip",
            got=f"a block of {plan_path} that offloads or has states on the host",
            expected="all of the model on the device: statistics read the states of all layers at once",
        )
    states = plan.placement.states
    if config.adapter.rank and any((*states.weights, *states.gradients, *states.optimizer)):
        raise PlanError(
            "weights and states stay on the device beside adapters",
            got=f"a block of {plan_path} that has some on the host",
            do="write device there",
        )
    room = take_host_room(decisions.memory, config, decisions.device) if is_resumed else start.room
    ran = "" if began_with in ({}, plan.backends) else backends_text(began_with)
    return dataclasses.replace(start, decisions=decisions, room=room, ran_by=ran, laid_before=before)


def _saved_plan(path: Path, start: Start) -> Plan | None:
    """The plan of a run that goes on; where its file is gone that of the checkpoint, of which it is a copy."""
    if path.exists():
        return Plan.read(path)
    if start.checkpoint is None or not (start.checkpoint.folder / PLAN).is_file():
        return None
    return Plan.from_json(start.checkpoint.read_file(PLAN), origin=str(start.checkpoint.folder / PLAN))


def _write_decisions(run_dir: Path, start: Start) -> dict[str, str]:
    """Leave config, plan and tokenizer in the run folder; the first two are in every checkpoint too, without the
    name of the folder, so that the same run gives the same checkpoints in another one."""
    # Without a configuration, whatever else is there is of a start that was killed, perhaps with other data.
    is_new = not (run_dir / CONFIG).exists()
    if is_new or not (run_dir / TOKENIZER / "tokenizer.json").exists():
        start.corpus.tokenizer.replace(run_dir / TOKENIZER)
    if is_new or read_record(run_dir) is None:
        digests = digests_of(start.decisions.config)
        own = make_record(load_tokenizer(run_dir / TOKENIZER), start.corpus.digest, digests, start.written)
        write_record(run_dir, start.record or own)
    config = start.decisions.config
    files = {
        PLAN: start.decisions.plan.to_json(),
        CONFIG: to_toml(config, start.decisions.reasons),
    }
    # The configuration comes last: a folder with one can be resumed.
    for name, text in files.items():
        write_whole(run_dir / name, text)
    nowhere = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=None))
    return files | {CONFIG: to_toml(nowhere, start.decisions.reasons)}


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
    _refuse_on_ranks(plan)
    config, architecture, device = decisions.config, decisions.architecture, decisions.device
    memory = decision_of(plan, config, architecture, device)
    copy = memory.costs.checkpoint_copy
    refuse_beyond_memory(memory, config, device, copy)
    machine = dataclasses.replace(memory.machine, device_bytes=device_limit(config, device, copy))
    memory = with_kept_operands(dataclasses.replace(memory, machine=machine), config, device)
    decisions = decisions.with_memory(memory)
    # Its seconds were not measured here.
    predicted = dataclasses.replace(decisions.plan.predicted, step_seconds=None)
    return dataclasses.replace(decisions, plan=dataclasses.replace(plan, predicted=predicted))


def _refuse_on_ranks(plan: Plan) -> None:
    """Refuse an edited plan that several ranks do not carry out."""
    states = plan.placement.states
    on_host = [name for name in ("weights", "gradients") if any(getattr(states, name))]
    if plan.fingerprint.world_size > 1 and (on_host or states.update == "cpu"):
        raise PlanError(
            "weights and gradients stay on the device on several ranks, and so do updates",
            got=f"a plan.json that was edited: {' and '.join(on_host) or 'an update on the CPU'}",
            do="write device there, or train in one process",
        )


def _refuse_two_wills(edited: Collection[str], given: Collection[str]) -> None:
    settings = sorted(key for key in given if key.startswith("memory."))
    if edited and settings:
        raise PlanError(
            "plan.json was edited, and a setting of the same things is given",
            got=f"edited {' and '.join(edited)}; given {', '.join(settings)}",
            expected="one of the two",
            do="leave the setting out, or restore plan.json from a checkpoint",
        )


def _make_trainer(run: Run, start: Start, began: float) -> Trainer:
    """Prove the plan of a run, restore, and compile."""
    trainer = Trainer(run, began)
    if start.checkpoint is not None:
        trainer.checkpoints.restore(start.checkpoint)
    elif start.source is not None:
        trainer.checkpoints.begin_from(start.source)
    # Of the weights that are trained: before, a resumed run's parameters are whatever lay in memory.
    prove(run.executable, run.plans.plan)
    if trainer.cycle is not None:
        trainer.cycle.prepare()
        if start.checkpoint is None:
            trainer.cycle.write_start()
    run.optimizer.zero_grad()  # it sums gradients itself where weights have masters: the probe's too
    if run.config.train.compile == "on":
        run.line.phase("compiling the blocks during the first step")
        compile_blocks(run.executable.model)
    return trainer


def _begun(
    run_dir: Path,
    start: Start,
    store: CheckpointStore,
    log: MetricsLog,
    line: StepLine,
    files: dict[str, str],
) -> Run:
    """Measure the device, tune its kernels, and build the model and its optimizer."""
    decisions = start.decisions
    config, device = decisions.config, decisions.device.torch_device
    torch.manual_seed(config.run.seed)
    line.phase("measuring the peak rate of the device")
    peaks = peaks_of(decisions.device)
    line.peak_origin = peaks.description
    choose, tuned = decisions.backends(), decisions.tuned_gemms()
    if tuned:
        line.phase("trying shapes of tiles for the GEMMs")
        tune(tuned, device)  # before there is a model, and a proof: nothing of it lies in memory later
    line.phase("building the model")
    meter = MemoryMeter(device, start.room.arena.owns) if start.room else MemoryMeter(device)
    executable = _realised(start, choose)
    place = copy_of(os.environ)
    copies = None if place is None else Copies(place, decisions.world)
    record = read_record(run_dir)
    assert record is not None  # `_write_decisions` has written it
    optimizer = build(config.optimizer, executable, seed=config.run.seed_of_rounding)
    return Run(
        decisions=decisions,
        dir=run_dir,
        corpus=start.corpus,
        executable=executable,
        optimizer=optimizer,
        outer=build_outer(config.outer, optimizer, executable.mesh, config.optimizer.lr, copies),
        average=own_average(executable, config.objective),
        weighting=weighting_of(config),
        plans=PlanInForce(decisions.plan),
        meter=meter,
        peaks=peaks,
        store=store,
        log=log,
        line=line,
        record=record,
        files=files,
        base=start.base,
    )


def _realised(start: Start, choose: BackendChooser) -> Executable:
    """The model of the plan, with its first weights where no checkpoint is loaded into it later, and those of a base,
    of which checkpoints have no copy."""
    decisions = start.decisions
    config, device = decisions.config, decisions.device.torch_device

    def fill(model: Model) -> None:
        if start.base is not None:
            with decisions.world.together("reading the base's weights"):
                fill_from_weights(model, start.base.folder)
            initialise(model, config.run.seed)
            return
        if start.checkpoint is not None:
            return  # every parameter is loaded from the checkpoint later
        if config.model.weights is None:
            initialise(model, config.run.seed)
            return
        with decisions.world.together("reading the weights"):
            if start.source is not None:
                fill_from_checkpoint(model, start.source)
            else:
                fill_from_weights(model, config.model.weights)

    return realise(
        decisions.plan,
        decisions.architecture,
        fill,
        device=device,
        parameters=config.train.parameters,
        compute=config.precision_rules.compute,
        seed=config.run.seed_of_rounding,
        loss_chunk=config.train.loss_chunk,
        objective=objectives.build(config.objective),
        choose=choose,
        replans=config.is_planned,
        room=start.room,
        most_tokens=decisions.micro_batch_tokens,
        longest=config.train.sequence,
        mesh=RankMesh(
            config.layout,
            decisions.world,
            device.type,
            copies_apart=config.outer.every > 0 and config.layout.dp > 1,
        ),
    )


@contextlib.contextmanager
def _named_failures(trainer: Trainer) -> Iterator[None]:
    """Turn what a machine cannot do into errors that say what to do."""
    try:
        yield
    except (RuntimeError, ArenaTooSmallError) as error:
        if is_out_of_memory(error):
            raise told_like(_out_of_memory(trainer, error), error) from None
        if is_compiler_error(error):
            raise told_like(_not_compiled(error), error) from None
        raise


def _out_of_memory(trainer: Trainer, error: Exception) -> TrainingError:
    train, step, stepper = trainer.run.train, trainer.run.step, trainer.stepper
    when = f"after step {step}"
    if stepper.is_updating:
        when = f"in the update of step {step + 1}, which cannot be taken again"
    elif stepper.no_plan_takes_less:
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
