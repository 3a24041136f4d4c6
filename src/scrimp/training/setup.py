"""Decides a run: every open choice gets a value with a reason, or the run is refused.

The order is from cheap to expensive, so that bad input is refused before anything is prepared:
values, device, architecture, decisions and contradictions, plan and memory, data, and only
then a run folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass

import torch

from scrimp import objectives, optim
from scrimp.config import (
    Architecture,
    Config,
    Resolution,
    ResolvedConfig,
    base_architecture,
    check_values,
    ranks_of,
    replace_values,
    resolve,
)
from scrimp.config.optimizers import AUTO, check_choice
from scrimp.data import Corpus, Mixture
from scrimp.errors import CheckpointError, ConfigError, PlanError
from scrimp.gemm import BackendChooser
from scrimp.gemm.problem import DTYPES
from scrimp.models import spec_of
from scrimp.models.adapter_checks import check_adapter
from scrimp.models.context_parallel import check_shared_rows
from scrimp.planner import BackendChoice, Plan, build_plan, refuse_misfit, with_precisions
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.room import Budgets
from scrimp.precision import GEMMS, HIGH_PRECISION, parse_rules
from scrimp.profiler import Device, resolve_device
from scrimp.runtime import choose_backends, describe_backends, recorded_backends, tuned_gemms
from scrimp.runtime.backends import Tuned
from scrimp.runtime.determinism import refuse_undetermined
from scrimp.training.chosen_layout import RanksHere, choose_on, measured_ranks
from scrimp.training.chosen_optimizer import choose_optimizer, with_first
from scrimp.training.distillation import check_teachers, refuse_other_teachers
from scrimp.training.memory.host_room import checkpoint_bytes
from scrimp.training.memory.kept_operands import with_kept_operands
from scrimp.training.memory.limits import budgets_of, device_limit
from scrimp.training.memory.micro_batch import decide_micro_batch
from scrimp.training.precision.reachable import refuse_unreachable_bytes, refuse_unreachable_share
from scrimp.training.run_data import (
    VOCAB_MULTIPLE,
    decide_tokenizer,
    expected_vocabulary,
    fit_vocabulary,
    has_open_vocabulary,
    refuse_other_tokenizer,
    refuse_short,
    refuse_unread_settings,
    rows_for,
)
from scrimp.training.trained_weights import architecture_of_weights, going_on
from scrimp.world import ALONE, World


@dataclass(frozen=True)
class Decisions:
    """A run that has been decided but not begun."""

    asked: Config
    """What was asked for."""
    config: ResolvedConfig
    """The same, with no open choice left in it."""
    architecture: Architecture
    device: Device
    plan: Plan
    reasons: dict[str, str]
    """Dotted key to the reason of an automatic choice."""
    memory: MemoryDecision
    """What is done so that a step fits."""
    copy_bytes: int
    """Predicted host memory that writing a checkpoint takes."""
    here: RanksHere | None = None
    """What the ranks were measured to reach, where their layout was open."""
    planned_seconds: float | None = None
    """Seconds of a step, as predicted by the saved plan that the run trains by."""
    given: frozenset[str] = frozenset()
    """Dotted keys that the user wrote."""

    @property
    def world(self) -> World:
        """The ranks of the run."""
        return self.device.world

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one forward pass of a rank."""
        return self.config.train.micro_batch_tokens // self.config.layout.cp

    def backends(self) -> BackendChooser:
        """What runs each GEMM on the device, in any format that a plan may give it; PlanError where nothing does,
        or not what was asked for."""
        choosers = [
            choose_backends(
                plan,
                self.architecture,
                self.device.torch_device,
                tokens=self.micro_batch_tokens,
                head_tokens=self.config.train.loss_chunk,
                backend=self.config.backend,
            )
            for plan in self._plans()
        ]
        return choosers[0]

    def _plans(self) -> list[Plan]:
        """The plan; of formats that are planned while training, one for each that GEMMs may get."""
        if not self.config.is_planned:
            return [self.plan]
        rules = parse_rules(self.config.precision)
        bases = dict.fromkeys([*self.config.candidates, self.config.snip.start])
        layers = spec_of(self.architecture).origins
        return [with_precisions(self.plan, rules.with_base(base), layers) for base in bases]

    def with_recorded_backends(self, *, anew: bool = False) -> Decisions:
        """The same run, its back ends in its plan: those that stand there, unless the user asks for another one; for
        what nothing stands there, what is fastest here and now. PlanError as by `backends`.

        Args:
            anew: whatever stands there, as where the user asks for `auto`.
        """
        recorded = {} if anew or self.config.backend != "auto" else self.plan.backends
        found = dataclasses.replace(self, plan=dataclasses.replace(self.plan, backends=recorded))
        choose, rows = found.backends(), dict(recorded)
        for plan in found._plans():
            new = recorded_backends(
                plan,
                self.architecture,
                choose,
                self.device.torch_device,
                tokens=self.micro_batch_tokens,
                head_tokens=self.config.train.loss_chunk,
            )
            rows |= {row: rows.get(row, choice).merged(choice) for row, choice in new.items()}
        rows = self.world.once(  # of several ranks those that the first finds fastest
            "choosing back ends",
            lambda: rows,
            write=lambda found: {row: dataclasses.asdict(choice) for row, choice in found.items()},
            read=lambda told: {row: BackendChoice(**choice) for row, choice in told.items()},
        )
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, backends=rows))

    def tuned_gemms(self) -> list[Tuned]:
        """What back ends try before the run, in any format that a plan may give a GEMM."""
        plans = [plan for plan in self._plans() if _quantizes(plan)]
        if not plans:  # nothing is quantized: no back end is asked for, and no device
            return []
        choose, has_masters = self.backends(), self.config.optimizer.master_weights
        return [
            one
            for plan in plans
            for one in tuned_gemms(
                plan,
                self.architecture,
                choose,
                self.device.torch_device,
                tokens=self.micro_batch_tokens,
                head_tokens=self.config.train.loss_chunk,
                out=DTYPES[self.config.precision_rules.compute],
                sums=torch.float32 if has_masters else DTYPES[self.config.train.parameters],
            )
        ]

    @property
    def tuning_bytes(self) -> int:
        """Device memory that back ends take to try shapes of tiles, before the model is made; no part of a step."""
        return max((one.nbytes for one in self.tuned_gemms()), default=0)

    def refuse_tuning_misfit(self) -> None:
        """Raise PlanError if there is not so much memory as trying shapes of tiles takes."""
        needed, copy = self.tuning_bytes, self.memory.costs.checkpoint_copy
        limit = device_limit(self.config, self.device, copy)
        if needed > limit:
            raise PlanError(
                "there is no memory for trying which shapes of tiles are fastest",
                got=f"{needed:,} bytes for the largest GEMM of a Triton kernel, before the model is made",
                expected=f"at most {limit:,}",
                do="raise --budget.device-memory or lower --train.micro-batch, or use another back end "
                "(--backend reference runs everything)",
            )

    def describe_backends(self) -> str:
        """Which back end runs which recipe, in words; empty where nothing is quantized."""
        device = self.device.torch_device
        return describe_backends(
            self.plan, self.architecture, self.backends(), device, tokens=self.micro_batch_tokens
        )

    def with_memory(self, memory: MemoryDecision) -> Decisions:
        """The same run with another decision about its memory."""
        found = _decisions(self.device, self.asked, self.config, self.architecture, self.reasons, memory)
        return dataclasses.replace(
            found, here=self.here, planned_seconds=self.planned_seconds, given=self.given
        )

    def with_corpus(self, corpus: Corpus | Mixture) -> Decisions:
        """The same run, now that its tokenizer is known: decided anew where the embedding gets other rows by it.

        Raises:
            ModelError: the weights are those of another tokenizer.
            ConfigError: it has more entries than the model has rows.
            DataError: the corpus is too short.
            PlanError: the run does not fit, or no longer.
        """
        refuse_other_tokenizer(self.config, corpus)
        entries, found = corpus.tokenizer.vocab_size, self
        if not has_open_vocabulary(self.asked):
            fit_vocabulary(self.config, self.architecture, entries)  # refuses what does not fit
        elif rows_for(entries) != self.architecture.vocab_size:
            found = decide(self.asked, entries=entries, world=self.world, given=self.given)
        else:
            reasons = self.reasons | {"model.vocab_size": _reason_for_rows(entries)}
            found = dataclasses.replace(self, reasons=reasons)
        refuse_other_teachers(found.config, found.architecture, corpus)
        refuse_short(found.config, corpus)
        found.refuse_misfit()  # again: of the memory that was free, preparing the data may have taken long
        return found

    @property
    def budgets(self) -> Budgets:
        """The memory that there is as the user knows it."""
        asks, copy = self.memory.account.host_peak > 0, self.memory.costs.checkpoint_copy
        return budgets_of(self.config, self.device, copy, asks_for_host=asks)

    def refuse_misfit(self) -> None:
        """Raise PlanError if a step, or what comes before the first, exceeds its budget or the memory that is free."""
        refuse_misfit(self.memory, self.config, self.budgets)
        self.refuse_tuning_misfit()


def decide(
    config: Config,
    *,
    architecture: Architecture | None = None,
    entries: int | None = None,
    world: World = ALONE,
    plans_ahead: bool = False,
    given: Collection[str] = frozenset(),
) -> Decisions:
    """Resolve a configuration on this machine; starts nothing and reads no corpus.

    Args:
        architecture: of a run that is resumed; None derives it from the configuration.
        entries: of the tokenizer; None: as many as it has, or may get where it is still to be trained.
        world: the ranks of the run, all of which decide alike.
        plans_ahead: one process decides for as many ranks as `config.layout` says.
        given: dotted keys that the user wrote, which a search keeps though they are as they were.
    """
    config = going_on(config)
    ranks = ranks_of(config.layout) if plans_ahead and world.size == 1 else world.size
    _check(config, ranks)
    device = resolve_device(config.device, world)
    if config.train.deterministic:
        refuse_undetermined(device.torch_device)
    if architecture is None:
        weights = architecture_of_weights(config.model.weights) if config.model.weights else None
        architecture = base_architecture(config, weights)
    elif config.model.weights is None and architecture != base_architecture(config, None):
        raise CheckpointError(
            "the checkpoint belongs to another model",
            got=f"{spec_of(architecture).parameters:,} parameters in {architecture.num_layers} blocks",
            expected=f"the model of the run's configuration, {config.model.preset} with its changes",
            do="restore the run's own checkpoints, or start a new run",
        )
    check_adapter(spec_of(architecture))
    # In this order: the tokenizer, the model's rows, the optimizer, all other settings, the plan.
    named, reasons = decide_tokenizer(config, architecture)
    entries = expected_vocabulary(named, architecture) if entries is None else entries
    fitted, architecture = fit_vocabulary(named, architecture, entries)
    if has_open_vocabulary(config):
        reasons["model.vocab_size"] = _reason_for_rows(entries)
    if config.device == "auto":
        reasons["device"] = device.reason

    here = _ranks_here(with_first(fitted), architecture, device)

    def decided(fitted: Config) -> Decisions:
        return _decided(fitted, config, architecture, device, ranks, reasons, frozenset(given), here)

    if config.optimizer.name == AUTO:
        return choose_optimizer(fitted, architecture.width, decided)
    return decided(fitted)


def _decided(
    fitted: Config,
    asked: Config,
    architecture: Architecture,
    device: Device,
    ranks: int,
    reasons: dict[str, str],
    given: frozenset[str],
    here: RanksHere | None,
) -> Decisions:
    """All other settings, and the plan.

    Args:
        fitted: what was asked for, with its tokenizer, its model's rows and its optimizer.
        here: the ranks, where a layout is searched for.
    """
    resolution = resolve(fitted, architecture, device_type=device.torch_device.type, ranks=ranks)
    found = None
    if here is not None:
        found = _as_searched(here, resolution, device, asked, fitted, reasons, given)
    found = found or _resolved(device, asked, resolution, architecture, reasons)
    return dataclasses.replace(found, here=here, given=given)


def _ranks_here(config: Config, architecture: Architecture, device: Device) -> RanksHere | None:
    """The ranks, measured once for all optimizers that may be tried; None: no layout is searched for."""
    # The search knows no teachers, which some layouts cannot run, and no frozen weights.
    if device.world.size == 1 or config.objective.teachers is not None or config.adapter.rank > 0:
        return None
    kind, ranks = device.torch_device.type, device.world.size
    default = resolve(config, architecture, device_type=kind, ranks=ranks)
    return measured_ranks(config, default, architecture, device)


def _check(config: Config, ranks: int) -> None:
    """Refuse what no device and no model can make right."""
    check_values(config)
    check_choice(config)
    objectives.check(config.objective)
    check_teachers(config)
    optim.check(config, ranks)
    refuse_unread_settings(config)


def _as_searched(
    here: RanksHere,
    default: Resolution,
    device: Device,
    asked: Config,
    fitted: Config,
    reasons: dict[str, str],
    given: Collection[str],
) -> Decisions | None:
    """The run as the search finds it, as far as the traced account confirms that it fits; None: in no way."""
    kind, architecture = device.torch_device.type, default.architecture
    chosen = choose_on(here.cluster, fitted, default, architecture, device_type=kind, given=given)
    for number, (values, why) in enumerate(() if chosen is None else chosen.ways()):
        with contextlib.suppress(ConfigError, PlanError):
            wanted = replace_values(fitted, values)
            other = resolve(wanted, architecture, device_type=kind, ranks=here.ranks)
            other.reasons.update(why)
            found = _resolved(device, asked, other, architecture, reasons)
            same_size = found.config.train.micro_batch == other.config.train.micro_batch
            if found.memory.fits and (number > 0 or same_size):
                return found
    return None


def _resolved(
    device: Device,
    asked: Config,
    resolution: Resolution,
    architecture: Architecture,
    reasons: dict[str, str],
) -> Decisions:
    resolved = dataclasses.replace(resolution.config, device=device.spelling)
    _check_shared_rows(resolved, architecture, device)
    return _plan_for(device, asked, resolved, architecture, reasons | resolution.reasons)


def _check_shared_rows(config: ResolvedConfig, architecture: Architecture, device: Device) -> None:
    """Refuse rows that the ranks of `layout.cp` cannot share."""
    if config.layout.cp == 1:
        return
    for attends in dict.fromkeys(block.attention for block in spec_of(architecture).blocks):
        check_shared_rows(
            config.layout.cp_method,
            config.layout.cp,
            attends,
            config.train.sequence,
            device=device.torch_device,
            dtype=DTYPES[config.precision_rules.compute],
        )


def _reason_for_rows(entries: int) -> str:
    return f"the tokenizer's {entries:,} entries, rounded up to a multiple of {VOCAB_MULTIPLE}"


def _plan_for(
    device: Device,
    asked: Config,
    config: ResolvedConfig,
    architecture: Architecture,
    reasons: dict[str, str],
) -> Decisions:
    if config.is_planned:
        pinned = parse_rules(config.precision).pinned(list(spec_of(architecture).origins))
        refuse_unreachable_share(config, architecture, pinned)
        refuse_unreachable_bytes(config, architecture)
    config, memory = decide_micro_batch(device, config, architecture, reasons)
    memory = with_kept_operands(memory, config, device)
    decisions = _decisions(device, asked, config, architecture, reasons, memory)
    plan = json.loads(decisions.plan.to_json())
    device.world.agree("the plan of the run", plan, do="give all ranks the same settings")
    return decisions


def _decisions(
    device: Device,
    asked: Config,
    config: ResolvedConfig,
    architecture: Architecture,
    reasons: dict[str, str],
    memory: MemoryDecision,
) -> Decisions:
    copy = checkpoint_bytes(config, device, memory.costs, memory.account.host_peak)
    plan = build_plan(
        config,
        architecture,
        device_name=device.name,
        device_is_host=device.is_host,
        torch_version=torch.__version__,
        reasons=reasons,
        placement=memory.placement,
        why=memory.reason,
        predicted=memory.predicted(copy),
    )
    return Decisions(asked, config, architecture, device, plan, reasons, memory, copy)


def _quantizes(plan: Plan) -> bool:
    """Whether any GEMM of a plan runs in a low format."""
    return any(getattr(row, gemm) not in HIGH_PRECISION for row in plan.gemms.values() for gemm in GEMMS)
