"""The micro-batch that a run can have, with what is done so that it fits.

Problem  A batch can be cut in many ways. Large pieces keep a device busy and need more recomputation or offload to fit;
         another cut is another order of sums, so the losses differ in their last bits.
Method   `memory.split fixed` (the default): the micro-batch that was decided without regard to memory, so that memory
         changes no number; only where nothing fits, and none was given, a smaller one: of its divisors, each at most
         half of the last, the first that fits. Whether any does, the smallest says; only what is taken is timed.
         `memory.split fastest`: from one sequence upwards every divisor of the batch is planned, with its blocks
         timed, until one does not fit; the fastest step wins. The run's configuration then holds its size.
Limits   On a shared machine two sizes that are near each other may change places.
Checked  tests/training/memory/test_micro_batch.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from scrimp.config import Architecture, Resolution, ResolvedConfig, replace_values, resolve
from scrimp.config.pipeline import fits
from scrimp.errors import ConfigError
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.room import NoRoomError
from scrimp.profiler import Device
from scrimp.report.units import format_duration
from scrimp.training.memory.decide import decide_memory
from scrimp.training.memory.limits import OneMemoryError
from scrimp.training.memory.refusal import refusal_of

Found = tuple[ResolvedConfig, MemoryDecision]


def decide_micro_batch(
    device: Device, config: ResolvedConfig, architecture: Architecture, reasons: dict[str, str]
) -> Found:
    """A configuration whose micro-batch fits, and what a step does so that it does.

    Args:
        reasons: of automatic choices; those made here are added.

    Raises:
        ConfigError: `memory.split fastest` beside a micro-batch that was given.
        NoRoomError: no micro-batch fits; it says what would.
    """
    is_open = "train.micro_batch" in reasons
    if config.memory.split == "fastest":
        if not is_open:
            raise ConfigError(
                "memory.split fastest chooses the micro-batch, and one is given",
                got=f"train.micro_batch {config.train.micro_batch}",
                do="leave one of the two out",
            )
        return _fastest(device, config, architecture, reasons)
    return _first_that_fits(device, config, architecture, reasons, may_change=is_open)


def _fastest(
    device: Device, config: ResolvedConfig, architecture: Architecture, reasons: dict[str, str]
) -> Found:
    sized = _Sized(device, config, architecture, reasons)
    found = _all_that_fit(sized, may_measure=True)
    if len({memory.costs.seconds_origin for _, memory in found}) > 1:  # one yardstick for all of them
        found = _all_that_fit(sized, may_measure=False)
    best = min(found, key=lambda one: one[1].seconds)
    tried = [f"{changed.train.micro_batch}: {format_duration(memory.seconds)}" for changed, memory in found]
    reasons["train.micro_batch"] = f"the fastest step of {', '.join(tried)} (predicted)"
    reasons["memory.split"] = "the fastest was found: the run keeps its micro-batch"
    return sized.adopt(best[0]), best[1]


def _all_that_fit(sized: _Sized, *, may_measure: bool) -> list[tuple[ResolvedConfig, MemoryDecision]]:
    """Every divisor of a rank's batch, from one sequence upwards, until one does not fit."""
    sequences = sized.config.rank_sequences
    found: list[tuple[ResolvedConfig, MemoryDecision]] = []
    for size in (size for size in range(1, sequences + 1) if sequences % size == 0):
        try:
            changed, memory = sized.plan(size, must_predict=True, may_measure=may_measure)
        except NoRoomError:
            if not found:
                raise sized.refusal(size) from None
            break
        if found and not memory.fits:  # a setting of the user's own is not searched for, and raises nothing
            break
        found.append((changed, memory))
    return found


def _first_that_fits(
    device: Device,
    config: ResolvedConfig,
    architecture: Architecture,
    reasons: dict[str, str],
    *,
    may_change: bool,
) -> Found:
    sized = _Sized(device, config, architecture, reasons)
    size, *smaller = _smaller_and_smaller(config) if may_change else [config.train.micro_batch]
    first = sized.attempt(size)
    if _does_fit(first):
        return first
    # All of these add to gradients that exist: where the smallest does not fit, none does; but for stages of a
    # pipeline, of which more micro-batches wait where they are smaller.
    least = smaller[-1] if smaller else size
    if smaller and config.layout.pp == 1 and not _does_fit(sized.attempt(least, may_measure=False)):
        smaller = []
    for size in smaller:
        found = sized.attempt(size)
        if _does_fit(found):
            reasons["train.micro_batch"] = "the largest of those tried that fits in memory"
            return sized.adopt(found[0]), found[1]
    if first is None:
        raise sized.refusal(least)
    return first  # the user's own setting: refused with its figures when the plan is there


def _does_fit(found: Found | None) -> TypeGuard[Found]:
    return found is not None and found[1].fits


@dataclass(frozen=True)
class _Sized:
    """A run at other micro-batches; what follows from it is decided again."""

    device: Device
    config: ResolvedConfig
    architecture: Architecture
    reasons: dict[str, str]

    def plan(self, size: int, *, must_predict: bool = False, may_measure: bool = True) -> Found:
        """The configuration at a micro-batch, and what a step does so that it fits.

        Raises:
            NoRoomError: nothing fits.
        """
        changed = self._at(size)
        memory = decide_memory(
            changed, self.architecture, self.device, must_predict=must_predict, may_measure=may_measure
        )
        return changed, memory

    def attempt(self, size: int, *, may_measure: bool = True) -> Found | None:
        """The same; None where nothing fits."""
        try:
            return self.plan(size, may_measure=may_measure)
        except NoRoomError:
            return None

    def refusal(self, size: int) -> NoRoomError:
        """What would fit, with no other micro-batch than this."""
        try:
            self.plan(size, may_measure=False)
        except OneMemoryError as error:  # its parts fit: sizes for each would help nobody
            return error
        except NoRoomError:
            pass
        return refusal_of(self._at(size), self.architecture, self.device)

    def _at(self, size: int) -> ResolvedConfig:
        changed = replace_values(self.config, {"train.micro_batch": size, "memory.split": "fixed"})
        if size != self.config.train.micro_batch and "train.loss_chunk" in self.reasons:
            return self._resolved(changed).config
        return changed

    def adopt(self, config: ResolvedConfig) -> ResolvedConfig:
        """Say why the loss has its chunks, at another micro-batch."""
        if config.train.micro_batch != self.config.train.micro_batch and "train.loss_chunk" in self.reasons:
            self.reasons["train.loss_chunk"] = self._resolved(config).reasons["train.loss_chunk"]
        return config

    def _resolved(self, config: ResolvedConfig) -> Resolution:
        """With the chunks of the loss that its micro-batch asks for."""
        open_again = replace_values(config, {"train.loss_chunk": None})
        kind, ranks = self.device.torch_device.type, self.config.layout.ranks
        return resolve(open_again, self.architecture, device_type=kind, ranks=ranks)


def _smaller_and_smaller(config: ResolvedConfig) -> list[int]:
    """The micro-batch that was decided, then divisors of the batch, each at most half of the last."""
    sizes, sequences = [config.train.micro_batch], config.rank_sequences
    for size in range(sizes[0] // 2, 0, -1):
        divides = sequences % size == 0 and fits(config.layout, sequences // size)
        if divides and size <= sizes[-1] // 2:
            sizes.append(size)
    return sizes
