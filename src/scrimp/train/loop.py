"""The training loop: one optimizer step after another, and everything that happens between them.

One step, over micro-batches i of a batch with N real targets in all::

    loss = sum_i cross_entropy_i / N        so that cutting the batch otherwise changes nothing
    backward of (cross_entropy_i + z_i) / N for each i, gradients add up; under the last one the optimizer may begin
    skip if loss or gradient norm is not finite; clip; update; next

The state of a run is small: parameters, optimizer, random state, and two integers (step and
updates). Everything else (data order, learning rate, initialisation) is a function of
the configuration and of these, which is why a resumed run repeats the same losses bit for bit.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scrimp.config import decided
from scrimp.data import Batch, Corpus, Loader
from scrimp.errors import StorageError
from scrimp.files import write_whole
from scrimp.models import spec_of
from scrimp.optim import make_optimizer
from scrimp.planner import Plan, count_flops, ideal_seconds_per_token, mfu
from scrimp.planner.flops import Peaks
from scrimp.profiler import MemoryMeter
from scrimp.report.memory_text import runs_of
from scrimp.runtime import Executable, StepProof
from scrimp.runtime.memory import ArenaTooSmallError, PhaseEdges
from scrimp.train.checkpoint import Checkpoint, CheckpointStore
from scrimp.train.evaluation import Evaluation, evaluate
from scrimp.train.guards import NonFiniteGuard, OutlierWatch, StopSignals
from scrimp.train.memory.check import MemoryCheck
from scrimp.train.memory.oom import MemoryTrouble, is_out_of_memory
from scrimp.train.memory.phases import EVALUATION, MEASURING, TRAINING, cache_of, heap_of
from scrimp.train.memory.replan import most_on_host
from scrimp.train.metrics import MetricsLog
from scrimp.train.precision.cycle import PrecisionCycle
from scrimp.train.progress import StepLine
from scrimp.train.run_folder import PLAN
from scrimp.train.run_record import RunRecord
from scrimp.train.run_state import Position, RunState, read_state
from scrimp.train.schedule import Schedule
from scrimp.train.setup import Decisions

RANDOM_STATE = "random.torch"
COUNTED_STEP = 3
"""The step, from a start on, in which a CPU's tensors are counted: the first steps make what later ones find, and
rates are taken from the steps after it."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one step measured."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    seconds: float
    data_wait_seconds: float


class Trainer:
    """Runs steps, evaluates, and writes checkpoints and metrics."""

    def __init__(
        self,
        decisions: Decisions,
        corpus: Corpus,
        executable: Executable,
        peaks: Peaks,
        meter: MemoryMeter,
        *,
        store: CheckpointStore,
        log: MetricsLog,
        line: StepLine,
        files: dict[str, str],
        record: RunRecord,
    ) -> None:
        self.decisions, self.corpus, self.executable, self.peaks = decisions, corpus, executable, peaks
        self.config, self.train = decisions.config, decisions.config.train
        self.store, self.log, self.line, self.files, self.meter = store, log, line, files, meter
        self.optimizer = make_optimizer(
            executable,
            self.config.optimizer,
            seed=self.config.run.seed,
            speculates=self.config.memory.speculate,
        )
        self._lr = Schedule.build(self.config)
        self.position = Position()
        self.rates: list[float] = []
        self._run_record = record
        self._last_saved: int | None = None
        self.is_updating = False
        """Whether an update was broken off: what is there must not be kept."""
        self._log_trouble = False
        self._last_evaluation: tuple[int, Evaluation] | None = None
        self._non_finite = NonFiniteGuard(self.train.nonfinite_patience)
        self._outliers = (OutlierWatch("loss"), OutlierWatch("gradient norm"))
        sequence = decided(self.train.sequence)
        self._sequences_per_step = decided(self.train.batch_tokens) // sequence
        self._flops_per_token = count_flops(spec_of(decisions.architecture), sequence).causal
        self._trouble = MemoryTrouble(decisions, executable)
        self.no_plan_takes_less = False
        """Whether a step ran out of memory, and no plan that takes less was found."""
        self._check = MemoryCheck(decisions.memory, most_on_host(executable, self.config))
        self._count_tensors_at: int | None = None
        """No step before this one counts a CPU's tensors; None: none does."""
        self._ran_out_of_memory = False
        """Then no step counts tensors any more: the profiler ends the process where it gets no memory."""
        heap = heap_of(executable.device, self._report_heap)
        self.phases = PhaseEdges(cache_of(executable.device, meter), self._report_cache, heap)
        self._proof: StepProof | None = None
        self._is_first_of_plan = False
        self._ideal_seconds = 0.0
        self.cycle: PrecisionCycle | None = None
        if self.config.is_planned:
            run_dir = decided(self.config.run.dir)
            self.cycle = PrecisionCycle(
                decisions, executable, self.optimizer, self._batches, log=log, line=line, run_dir=run_dir
            )
        self._adopt(decisions.plan, proves_all=True)

    def _follow(self, cycle: PrecisionCycle) -> None:
        if cycle.plan is not self.decisions.plan:
            self._adopt(cycle.plan, proves_all=cycle.doubt is not None)

    def _adopt(self, plan: Plan, *, proves_all: bool = False) -> None:
        """A plan is in force: its speed of light, its file in checkpoints, and its GEMMs proven in the next step.

        Args:
            proves_all: not those alone that it changes.
        """
        self._prove_next_step(plan, None if proves_all else self.decisions.plan)
        self.decisions = dataclasses.replace(self.decisions, plan=plan)
        # Without what was timed on the machine: the same run gives the same bytes.
        untimed = dataclasses.replace(plan.predicted, step_seconds=None)
        self.files[PLAN] = dataclasses.replace(plan, predicted=untimed, measured=None).to_json()
        self.phases.plan(TRAINING, plan.predicted.peak_device_bytes or 0)
        self._ideal_seconds = ideal_seconds_per_token(
            spec_of(self.decisions.architecture),
            decided(self.train.sequence),
            plan.gemms,
            self.peaks,
            self.config.precision_rules.compute,
        )
        self._count_tensors_at = None if self._ran_out_of_memory else self.position.step + 1

    def _prove_next_step(self, plan: Plan, before: Plan | None) -> None:
        if not self.executable.planned:
            return
        self._is_first_of_plan = True
        if self._proof is None or before is None or plan.gemms != before.gemms:
            self._proof = StepProof(self.executable, plan, before, self._proof)

    # -- state ---------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the run's state, by the name it has in a checkpoint."""
        state = {f"model.{name}": p for name, p in self.executable.parameters()}
        state |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.tensors()}
        state[RANDOM_STATE] = torch.get_rng_state()
        return state

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: tensors are loaded in place."""
        tensors = self.tensors()
        checkpoint.load(tensors)
        torch.set_rng_state(tensors[RANDOM_STATE])
        state = read_state(checkpoint)
        self.position = state.position
        self.optimizer.restore_updates(self.position.updates)
        if self.cycle is not None:
            self.cycle.restore(state.precision, self.position.step)
            self._adopt(self.cycle.plan, proves_all=True)
        self._last_saved = checkpoint.step

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint of this step, unless it has one; in the background unless `wait`."""
        if self._last_saved == self.position.step:
            if wait:
                self.store.wait()
            return
        state = RunState(
            self.position,
            self.decisions.architecture,
            self._run_record.data,
            decided(self.train.sequence),
            self._run_record.digest,
            None if self.cycle is None else self.cycle.to_state(),
        )
        skipped = self.position.step - self.position.updates
        self.store.save(
            self.position.step, self.tensors(), state.to_json(), self.files, skipped_steps=skipped, wait=wait
        )
        self._last_saved = self.position.step

    def report_checkpoints(self) -> None:
        """Record checkpoints that became complete; a failed one is recorded and the run goes on."""
        try:
            for step in self.store.poll():
                bad = self.store.not_finite[step]
                note = f"complete, but not finite: {', '.join(bad[:3])}" if bad else "complete"
                self.log.event("checkpoint", step, note, finite=not bad)
                if bad:
                    self.line.message(f"checkpoint of step {step} {note}; the last finite one stays")
        except StorageError as error:
            self.checkpoint_failed(error)
        if self.log.trouble and not self._log_trouble:
            self.line.message(f"metrics are waiting in memory: {self.log.trouble}")
        self._log_trouble = self.log.trouble is not None

    def wait_for_checkpoint(self) -> None:
        """Wait for a checkpoint that is being written; record it, or that it failed."""
        try:
            self.store.wait()
        except StorageError as error:
            self.checkpoint_failed(error)
        self.report_checkpoints()

    def checkpoint_failed(self, error: StorageError) -> None:
        """Record that a checkpoint could not be written; older ones are untouched."""
        self._last_saved = None
        self.log.event("checkpoint-failed", self.position.step, str(error))
        self.line.message(
            f"checkpoint not written: {error}; older checkpoints are untouched, training goes on"
        )

    # -- the loop ------------------------------------------------------------------------------

    def run(self, signals: StopSignals) -> None:
        """Step until the last one or a signal.

        Raises:
            TrainingError: too many non-finite steps in a row.
        """
        self._count_tensors_at = min(self.position.step + COUNTED_STEP, self.train.steps)
        with self._loader(self.position.step) as loader:
            while self.position.step < self.train.steps and signals.received is None:
                if self.cycle is not None:
                    self.cycle.before_step(self.position.step)
                    self._follow(self.cycle)
                result = self._counted_step(loader)
                if self.cycle is not None:
                    self.cycle.after_step(
                        self.position.step - 1, result.loss, result.grad_norm, result.seconds
                    )
                    self._follow(self.cycle)
                record = self._record(result)
                self._check_predictions()
                if self._is_due(self.config.evaluation.every):
                    record |= self._evaluation_record()
                self.log.step(record)
                self.line.update(record)
                self._watch(result)
                self.report_checkpoints()
                self._non_finite.stop_if_exhausted(self.position.step)
                if self._is_due(self.config.checkpoint.every) and self.position.step < self.train.steps:
                    self.wait_for_checkpoint()  # one that failed must not keep this one from being tried
                    try:
                        self.save()
                    except StorageError as error:
                        self.checkpoint_failed(error)

    def _evaluation_record(self) -> dict[str, float]:
        evaluation = self.evaluate()
        if evaluation is None:
            return {}
        return {"eval_loss": evaluation.loss, "eval_bits_per_byte": evaluation.bits_per_byte}

    def evaluate(self) -> Evaluation | None:
        """Evaluate on the held-out split, record and show it; once per step at most.

        None where no document is held out.
        """
        if not self.corpus.held_out.num_tokens:
            return None
        if self._last_evaluation and self._last_evaluation[0] == self.position.step:
            return self._last_evaluation[1]
        self.line.phase("evaluating")
        self.phases.switch(EVALUATION)
        result = evaluate(
            self.executable,
            self.corpus.held_out,
            sequence=decided(self.train.sequence),
            micro_batch=decided(self.train.micro_batch),
            max_tokens=decided(self.config.evaluation.tokens),
            mask_documents=self.config.data.mask_documents,
        )
        sentence = f"held-out loss {result.loss:.4f}, {result.bits_per_byte:.4f} bits per byte"
        self.log.event(
            "evaluation", self.position.step, sentence, loss=result.loss, bits_per_byte=result.bits_per_byte
        )
        self.line.message(f"step {self.position.step}: {sentence}")
        self._last_evaluation = (self.position.step, result)
        return result

    def _report_cache(self, sentence: str) -> None:
        self._report_heap(sentence)
        self.line.message(f"step {self.position.step}: {sentence}")

    def _report_heap(self, sentence: str) -> None:
        self.log.event("memory-phase", self.position.step, sentence)

    def _is_due(self, every: int | None) -> bool:
        return decided(every) > 0 and self.position.step % decided(every) == 0

    def _batches(self, step: int, count: int) -> Iterator[list[Batch]]:
        """The micro-batches of some steps, beside the run's own loader: what is measured before or after a step."""
        self.phases.switch(MEASURING)
        with self._loader(step) as loader:
            for _ in range(count):
                yield next(loader)

    def _loader(self, step: int) -> Loader:
        """Batches from a step on."""
        train = self.train
        return Loader(
            self.corpus.train,
            sequence=decided(train.sequence),
            sequences_per_step=self._sequences_per_step,
            micro_batch=decided(train.micro_batch),
            seed=self.config.run.seed,
            first_sample=step * self._sequences_per_step,
            mask_documents=self.config.data.mask_documents,
            pin=self.executable.device.type == "cuda",
        )

    def _counted_step(self, loader: Loader) -> StepResult:
        """A step; on a CPU an early one of each plan with its tensors counted."""
        number, counts_at = self.position.step + 1, self._count_tensors_at
        proves = self._is_first_of_plan and number < self.train.steps  # and holds copies of operands
        if not self.meter.counts_steps or counts_at is None or number < counts_at or proves:
            return self._step(loader)
        self._count_tensors_at = None  # before the step, in which another plan may be adopted
        self.wait_for_checkpoint()  # whose copy is no part of a step
        with self.meter.counting(number):
            result = self._step(loader)
        if self._ran_out_of_memory:
            self.meter.forget_counts()  # what was counted is of two plans
        return result

    def _step(self, loader: Loader) -> StepResult:
        self.phases.switch(TRAINING)
        start = time.perf_counter()
        batches = next(loader)
        num_targets = sum(batch.num_targets for batch in batches)
        total = self._passes(batches, num_targets)
        while total is None:  # out of memory, and by now with a plan that takes less
            total = self._passes(batches, num_targets)
        norm = self.optimizer.gradient_norm()
        loss = float(total) / max(1, num_targets)
        lr = self._lr(self.position.step)
        reason = self._non_finite.check(loss, norm)
        if reason is None:
            self.optimizer.clip(norm, self.config.optimizer.clip)
            self.is_updating = True  # from here to the end the state is of no step
            self.optimizer.step(lr)
            self.is_updating = False
        else:
            self.log.event("skipped", self.position.step + 1, reason)
            self.line.message(f"step {self.position.step + 1} skipped: {reason}")
        self.optimizer.zero_grad()
        self.position.step += 1
        self.position.updates = self.optimizer.num_updates
        waited = loader.wait_seconds
        return StepResult(loss, norm, lr, reason is not None, time.perf_counter() - start, waited)

    def _passes(self, batches: list[Batch], num_targets: int) -> Tensor | None:
        """Forward and backward of a step's micro-batches: the sum of the losses; None if memory ran out, and the plan
        was changed to one that takes less."""
        try:
            with self._counting(len(batches)):
                return self._passes_once(batches, num_targets)
        except (RuntimeError, ArenaTooSmallError) as error:
            if not is_out_of_memory(error):
                raise
            # Its frames hold what the step had kept; the plan is made when they are gone.
            error.__traceback__ = None
            trouble = error
        self._take_less(trouble)
        return None

    def _passes_once(self, batches: list[Batch], num_targets: int) -> Tensor:
        # Sums stay on the device: reading one per micro-batch would make the host wait each time.
        total, first_row = torch.zeros((), device=self.executable.device), 0
        for batch in batches:
            if batch is batches[-1]:
                self.optimizer.will_step(self._lr(self.position.step))
            self.executable.begin(self.position.step, first_row)
            sums = self.executable.loss(batch.tokens_BT, batch.targets_BT, batch.document_starts)
            (sums.total / max(1, num_targets)).backward()
            self.executable.end_backward()
            total += sums.cross_entropy.detach()
            del sums  # the graph, and with it masks and tables, before the next one is made
            first_row += batch.tokens_BT.numel()
        return total

    def _take_less(self, trouble: Exception) -> None:
        """After a step that ran out of memory: activations that take less from now on.

        Raises:
            Exception: the trouble itself, where no plan takes less.
        """
        self.executable.give_up()
        self.optimizer.zero_grad()
        if self.executable.device.type == "cuda":
            torch.cuda.empty_cache()
        step = self.position.step + 1
        plan = self._trouble.plan_of_less(self.decisions.plan, step, trouble)
        if plan is None:
            self.no_plan_takes_less = True
            raise trouble
        self._ran_out_of_memory = True
        self._change_memory(plan, step)

    def _change_memory(self, plan: Plan, step: int) -> None:
        """Blocks do from now on what another plan says; between two attempts at a step, or two steps."""
        self.executable.change_activations(plan)
        self.meter.forget_counts()
        if self.cycle is not None:
            self.cycle.plan = plan
        self._adopt(plan)
        write_whole(decided(self.config.run.dir) / PLAN, plan.to_json())
        choices = runs_of([block.activations for block in plan.blocks.values()])
        self.log.event("memory-replan", step, f"{plan.blocks['0'].reason}: {choices}")
        self.line.message(f"step {step}: {plan.blocks['0'].reason}; goes on with {choices}")

    def _check_predictions(self) -> None:
        """After the first steps: measured beside predicted, and another plan where they differ."""
        tokens, step = decided(self.train.batch_tokens), self.position.step
        device = self.executable.device
        # On CUDA since training was last entered (`phases`): building and evaluation have peaks of their own.
        is_cuda = device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if is_cuda else self.meter.peak_device_bytes()
        found = self._check.after_step(
            self.decisions.plan, step, [tokens / rate for rate in self.rates], peak
        )
        if found is None:
            return
        self.log.event("memory-check", step, found.sentence, **dataclasses.asdict(found.measured))
        self.line.message(f"step {step}: {found.sentence}")
        if found.plan is not None:
            self._change_memory(found.plan, step)

    @contextlib.contextmanager
    def _counting(self, micro_batches: int) -> Iterator[None]:
        """Check in a plan's first step that the planned GEMMs that run inside are those of the plan, in its formats."""
        if self._proof is None:
            yield
            return
        if not self._is_first_of_plan:
            yield
            self._proof.check()
            return
        tokens = decided(self.train.micro_batch) * decided(self.train.sequence)
        chunks = -(-tokens // (decided(self.train.loss_chunk) or tokens))
        with self._proof.of_step(micro_batches=micro_batches, head_chunks=micro_batches * chunks):
            yield
        self._is_first_of_plan = False
        sentence, doubt = self._proof.sentence, None if self.cycle is None else self.cycle.doubt
        if doubt is not None:
            if self._proof.is_complete:
                sentence += ", every planned one: the prediction was off"
            self.line.message(f"step {self.position.step + 1}: {doubt}; {sentence}")
        self.log.event("proof", self.position.step + 1, sentence)

    def _record(self, result: StepResult) -> dict[str, Any]:
        rate = decided(self.train.batch_tokens) / result.seconds
        self.rates.append(rate)
        return {
            "step": self.position.step,
            "tokens": self.position.step * decided(self.train.batch_tokens),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens_per_s": rate,
            "mfu_bf16": mfu(self._flops_per_token, rate, self.peaks),
            "sol": self._ideal_seconds * rate,
            "tensor_peak_bytes": self.meter.peak_device_bytes(),
            "process_peak_bytes": self.meter.process_peak_bytes(),
            "process_growth_bytes": self.meter.process_growth_bytes(),
            "data_wait_s": result.data_wait_seconds,
            "step_s": result.seconds,
            "skipped": result.skipped,
        }

    def _watch(self, result: StepResult) -> None:
        if result.skipped:
            return
        for watch, value in zip(self._outliers, (result.loss, result.grad_norm), strict=True):
            sentence = watch.check(value)
            if sentence:
                self.log.event("outlier", self.position.step, sentence)
                self.line.message(f"step {self.position.step}: {sentence}")
