"""How a run on several ranks is laid out where that is open: what the search finds to be fastest on this machine.

Problem  Shards over all ranks take the least memory, and are rarely the fastest.
Method   The machine is measured on all ranks at once (`scrimp.training.measured_ranks`), and asked is the one search
         (`scrimp.planner.layout.search`) for all that is open: degrees, ZeRO stage, stages and schedule, the
         micro-batch, what each block makes again, keeps gathered or sends away, and states on the host. It is asked
         twice: for the degrees that were decided without it (shards over all ranks), and for any that the runtime
         carries out, as `resolve` says. Other degrees, or another stage of ZeRO, are taken where they are predicted to
         save more than `LEAST_GAIN`; all else as it was found. All ranks predict from the same figures, so they choose
         alike. The resolved configuration keeps every choice with its reason: a run that is resumed searches nothing.
         Where formats are planned while training, their budget counts in the search; formats themselves stay SNIP's.
Memory   The account that is traced has the last word (`scrimp.training.setup`): where it does not confirm that the
         choice fits, it decides memory itself, in this layout or, where nothing fits in it, on shards over all ranks.
Limits   What an outer optimizer trains keeps its copies. Schedules that go there and back (zbv, dualpipev) are
         searched where one is given. `memory.split fastest` keeps choosing micro-batch and memory.
Checked  tests/training/test_chosen_layout.py; benchmarks/ranks_planned.py: against measured steps
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scrimp.config import Architecture, Config, Resolution, ResolvedConfig, flatten, replace_values, resolve
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import ConfigError, PlanError
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.hardware import Cluster
from scrimp.planner.layout.at_hand import as_decided, question_of, setting_of_run, text_of
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import Candidate, search
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import Software
from scrimp.planner.layout.state_formats import run_states
from scrimp.profiler import Device
from scrimp.profiler.measured_cluster import RankRates, cluster_of, software_here
from scrimp.report.units import format_bytes, format_duration
from scrimp.training.measured_ranks import rates_of_run
from scrimp.training.memory.block_seconds import links_of
from scrimp.training.memory.limits import device_limit, host_limit
from scrimp.training.searched_plan import choices_of

LEAST_GAIN = 1.1
"""How much faster another layout must be: predictions are not closer than that."""
_KEPT = 3
"""Plans of a search, of which the first that is carried out is taken."""
_BY_ACCOUNT = ("memory.", "layout.gathered")
"""Keys that the account of memory decides itself where it does not confirm what was found."""


@dataclass(frozen=True)
class ChosenLayout:
    """Settings that the search decides, and why."""

    values: dict[str, Any]
    reasons: dict[str, str]
    best: Candidate
    before: Candidate | None
    """The best with the degrees that were decided without a search; None: none of them is predicted to fit."""

    @property
    def is_other(self) -> bool:
        """Whether it has other degrees, or another stage of ZeRO."""
        return self.best is not self.before

    def ways(self) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """The settings and their reasons, then those of the layout and the micro-batch alone."""
        yield self.values, self.reasons
        values = {key: value for key, value in self.values.items() if not key.startswith(_BY_ACCOUNT)}
        if values != self.values:
            found = {key: reason for key, reason in self.reasons.items() if key in values}
            why = "what the search found does not fit by the traced account, which decides itself"
            yield values, found | {"memory.activations": why}


@dataclass(frozen=True)
class RanksHere:
    """What the ranks of a run reach, each with so much memory."""

    rates: RankRates
    ranks: int
    name: str
    memory_bytes: int
    host_bytes: int = 0
    """Bytes of host memory that each rank has for what a step may send there."""
    upload: float = 0.0
    """Bytes per second to and from there."""

    @property
    def cluster(self) -> Cluster:
        """As the search knows hardware."""
        return cluster_of(
            self.rates,
            ranks=self.ranks,
            name=self.name,
            memory_bytes=self.memory_bytes,
            host_bytes=self.host_bytes,
            upload=self.upload,
        )


def measured_ranks(
    config: Config, default: Resolution, architecture: Architecture, device: Device
) -> RanksHere | None:
    """The ranks, measured where their layout is open; a collective.

    Args:
        config: with the layout as the user left it.
        default: the same, decided without a search.
    """
    if not is_open(config, default):
        return None
    world = device.world
    limit, host = (
        int(world.smallest(size))
        for size in (device_limit(default.config, device, 0), host_limit(default.config, device))
    )
    rates = rates_of_run(default.config, architecture, device)
    upload = links_of(device).upload if host else 0.0
    return RanksHere(rates, world.size, device.name, limit, host, upload)


def choose_on(
    cluster: Cluster,
    config: Config,
    default: Resolution,
    architecture: Architecture,
    *,
    device_type: str,
    given: Collection[str] = frozenset(),
) -> ChosenLayout | None:
    """What the search decides for a run; None where it finds nothing that fits.

    Args:
        config: with the layout as the user left it.
        default: the same, decided without a search.
        given: dotted keys that the user wrote.
    """
    decided = default.config

    def is_carried_out(values: Mapping[str, Any]) -> bool:
        asked = replace_values(config, values)
        try:
            resolve(asked, architecture, device_type=device_type, ranks=cluster.devices)
        except (ConfigError, PlanError):
            return False
        return True

    def may_be(layout: ResolvedLayout, micro_batch: int) -> bool:
        degrees = {f"layout.{name}": value for name, value in as_decided(layout).items()}
        return is_carried_out(degrees | {"train.micro_batch": micro_batch})

    program = program_of(decided, cluster, device_type)
    question = question_of(config, decided, sizes_of(spec_of(architecture)), cluster, program, given)
    question = replace(question, may_be=may_be)

    def best_of(question: Question) -> Candidate | None:
        found = search(question, keep=_KEPT, has_families=False).best
        return next((one for one in found if is_carried_out(_values(config, one.setting))), None)

    before = best_of(replace(question, given={**question.given, **as_decided(decided.layout)}))
    best = best_of(question)
    if best is None or (before is not None and before.seconds < LEAST_GAIN * best.seconds):
        best = before
    return None if best is None else _chosen(config, decided, best, before)


def _chosen(
    config: Config, decided: ResolvedConfig, best: Candidate, before: Candidate | None
) -> ChosenLayout:
    text, plain = text_of(best.setting.layout), text_of(decided.layout)
    if best is before:
        why = f"{text}: no other layout is predicted to be {LEAST_GAIN:g} times as fast"
    elif before is None:
        why = f"{text}: {plain} is predicted to fit in no way"
    else:
        why = f"{text}: predicted {before.seconds / best.seconds:.1f} times as fast as {plain}"
    peak = max(one.total for one in best.memory)
    beside = (
        f"searched with {text}: predicted {format_duration(best.seconds)} a step, {format_bytes(round(peak))}"
    )
    if config.is_planned:
        beside += "; the budget of formats counted, which stay SNIP's"
    values = _values(config, best.setting)
    is_layout = {key: key.startswith("layout.") and key != "layout.gathered" for key in values}
    return ChosenLayout(
        values, {key: why if is_so else beside for key, is_so in is_layout.items()}, best, before
    )


def _values(config: Config, setting: Setting) -> dict[str, Any]:
    """What the search decides and the user has not given."""
    usual, asked = flatten(Config()), flatten(config)
    is_timed = config.memory.split == "fastest"
    return {
        key: value
        for key, value in choices_of(setting).items()
        if value != asked[key]
        and asked[key] == usual[key]
        and not (is_timed and key.startswith(("memory.", "train.")))
    }


def program_of(config: ResolvedConfig, cluster: Cluster, device_type: str) -> Software:
    """Scrimp's own step as this run takes it."""
    return software_here(
        cluster,
        device_type,
        compute=config.precision_rules.compute,
        compiled=config.train.compile == "on",
        states=run_states(config.optimizer),
        deterministic=config.train.deterministic,
        documents=config.data.mask_documents,
    )


def step_of_run(
    config: ResolvedConfig,
    architecture: Architecture,
    cluster: Cluster,
    activations: Sequence[str],
    device_type: str = "cuda",
) -> Setting | None:
    """A run's step on some hardware as the search predicts it; None where degrees, batch and devices do not fit.

    Args:
        activations: of each block.
    """
    program = program_of(config, cluster, device_type)
    return setting_of_run(config, sizes_of(spec_of(architecture)), cluster, program, activations)


def is_open(config: Config, default: Resolution) -> bool:
    """Whether there is anything to search."""
    layout, ranks = config.layout, default.config.layout.ranks
    are_left = layout.dp is None and layout.fsdp is None and layout.pp * layout.cp * layout.tp < ranks
    return layout.search and are_left and config.outer.every == 0
