"""What a run in progress is made of: the parts that the loop and its callbacks share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scrimp.config import ResolvedConfig
from scrimp.config.resolved import ResolvedTrain
from scrimp.data import Batch, Corpus, Loader, Mixture
from scrimp.optim import Optimizer, OuterOptimizer
from scrimp.planner import Plan
from scrimp.planner.flops import Peaks
from scrimp.profiler import MemoryMeter
from scrimp.report.memory_text import runs_of
from scrimp.runtime import Executable
from scrimp.runtime.averaged_weights import AveragedWeights
from scrimp.runtime.memory import PhaseEdges
from scrimp.training.checkpoint import CheckpointStore
from scrimp.training.memory.between_phases import MEASURING, cache_of, heap_of
from scrimp.training.memory.kept_operands import without_operands
from scrimp.training.metrics import MetricsLog
from scrimp.training.plan_in_force import PlanInForce
from scrimp.training.progress import StepLine
from scrimp.training.run_record import RunRecord
from scrimp.training.run_state import Position
from scrimp.training.setup import Decisions
from scrimp.training.source_weighting import SourceWeighting
from scrimp.training.trained_weights import Base


@dataclass
class Run:
    """One run in progress."""

    decisions: Decisions
    """As the run began; the current plan is `plans.plan`."""
    dir: Path
    """Its folder."""
    corpus: Corpus | Mixture
    executable: Executable
    optimizer: Optimizer
    plans: PlanInForce
    meter: MemoryMeter
    peaks: Peaks
    store: CheckpointStore
    log: MetricsLog
    line: StepLine
    record: RunRecord
    outer: OuterOptimizer | None
    """What moves copies that take steps of their own."""
    files: dict[str, str]
    """Name to text of what every checkpoint holds beside the plan."""
    average: AveragedWeights | None = None
    """The average of the weights, where the model learns from it."""
    weighting: SourceWeighting | None = None
    """What targets count by their source; None: all alike."""
    base: Base | None = None
    """The weights that adapters stand beside; None without adapters."""
    position: Position = field(default_factory=Position)
    rates: list[float] = field(default_factory=list)
    """Tokens per second of each step since the start."""
    go_on_with: str = ""
    """Where the run is to stop for another layout (`layout.switch`): the command that goes on."""

    def __post_init__(self) -> None:
        heap = heap_of(self.executable.device, lambda sentence: self.event("memory-phase", sentence))
        self.phases = PhaseEdges(
            cache_of(self.executable.device, self.meter),
            lambda sentence: self.tell("memory-phase", sentence),
            heap,
        )
        """Where training, evaluation and measuring begin and end."""
        self.keeps_operands = self.decisions.memory.operands > 0
        """Whether products keep their operands of weights over a step (`scrimp.training.memory.kept_operands`)."""

    @property
    def config(self) -> ResolvedConfig:
        """Settings, all decided."""
        return self.decisions.config

    @property
    def train(self) -> ResolvedTrain:
        """Their section of steps and batches."""
        return self.decisions.config.train

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        return self.position.step

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.train.batch_tokens

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a forward pass."""
        return self.decisions.micro_batch_tokens

    @property
    def first_row(self) -> int:
        """Address of the first token that this rank reads, among those of a batch; each rank has a range of its own."""
        tokens = self.config.rank_sequences * self.train.sequence // self.config.layout.cp
        layout, copies = self.config.layout, None if self.outer is None else self.outer.copies
        readers = layout.data_ranks * layout.cp
        place = self.decisions.world.rank // layout.tp % readers
        return (place + (0 if copies is None else copies.place.copy * readers)) * tokens

    def event(self, kind: str, sentence: str, *, step: int | None = None, **fields: Any) -> None:
        """Record that something happened, after the last step unless another is named."""
        self.log.event(kind, self.step if step is None else step, sentence, **fields)

    def tell(self, kind: str, sentence: str, *, step: int | None = None, **fields: Any) -> None:
        """Record it, and show it."""
        self.event(kind, sentence, step=step, **fields)
        self.line.message(f"step {self.step if step is None else step}: {sentence}")

    def change_blocks(self, plan: Plan, step: int) -> None:
        """Let blocks do from now on what another plan says; between two steps, or two attempts at this one."""
        self.keeps_operands = False  # the plan was found without
        self.plans.change(plan)
        choices = runs_of(plan.placement.activations)
        reason = plan.blocks["0"].reason
        self.event("memory-replan", f"{reason}: {choices}", step=step)
        self.line.message(f"step {step}: {reason}; goes on with {choices}")

    def give_up_operands(self, reason: str) -> None:
        """Let each micro-batch quantize weights from now on; between two attempts at a step."""
        memory, plan = self.decisions.memory, self.plans.plan
        self.keeps_operands = False
        less = memory.account.peak - without_operands(memory).account.peak
        peak = (plan.predicted.peak_device_bytes or memory.account.peak) - less
        predicted = dataclasses.replace(plan.predicted, peak_device_bytes=peak)
        self.plans.change(dataclasses.replace(plan, predicted=predicted))
        sentence = f"{reason}: weights are quantized in each micro-batch from now on"
        self.tell("weight-operands", sentence, step=self.step + 1)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model has the weights to evaluate while this is entered (`Optimizer.evaluating`)."""
        self.executable.settle()  # what ranks have gathered is of the other weights
        with self.optimizer.evaluating():
            try:
                yield
            finally:
                self.executable.settle()

    def is_due(self, every: int) -> bool:
        """Whether what happens every so many steps (0: never) happens after the last step."""
        return every > 0 and self.step % every == 0

    def batches(self, step: int, count: int) -> Iterator[list[Batch]]:
        """The micro-batches of some steps, beside the run's own loader: what is measured before or after a step."""
        self.phases.switch(MEASURING)
        with self.loader(step) as loader:
            for _ in range(count):
                yield next(loader)

    @property
    def copy(self) -> tuple[int, int]:
        """Which of the copies that are jobs of their own this is, and how many they are."""
        if self.outer is None or self.outer.copies is None:
            return 0, 1
        return self.outer.copies.place.copy, self.outer.copies.place.copies

    @property
    def samples(self) -> int:
        """Sequences of all steps, of all copies."""
        return self.train.steps * self.train.sequences_per_step * self.copy[1]

    def loader(self, step: int) -> Loader:
        """Batches from a step on."""
        train, sequence = self.train, self.train.sequence
        sequences, mesh, (copy, copies) = train.sequences_per_step, self.executable.mesh, self.copy
        return Loader(
            self.corpus.train,
            sequence=sequence,
            sequences_per_step=copies * sequences,
            micro_batch=train.micro_batch,
            seed=self.config.run.seed,
            first_sample=step * copies * sequences,
            rank=copy * mesh.data_ranks + mesh.data_rank,
            world_size=copies * mesh.data_ranks,
            mask_documents=self.config.data.mask_documents,
            pin=self.executable.device.type == "cuda",
        )
