"""The micro-batch that a run can have, with what is done so that it fits.

Problem  A batch can be cut in many ways. Large pieces keep a device busy and need more recomputation or offload to fit;
         another cut is another order of sums, so the losses differ in their last bits.
Method   `memory.split fixed` (the default): the micro-batch that was decided without regard to memory, so that memory
         changes no number; only where nothing fits, and none was given, a smaller one.
         `memory.split fastest`: from one sequence upwards every divisor of the batch is planned, with its blocks
         timed, until one does not fit; the fastest step wins. The run's configuration then holds its size.
Limits   On a shared machine two sizes that are near each other may change places.
Checked  tests/train/test_micro_batch.py
"""

from __future__ import annotations

from scrimp.config import Architecture, Config, decided, replace_values
from scrimp.errors import ConfigError
from scrimp.planner import account_of
from scrimp.planner.bytes.decision import MemoryDecision
from scrimp.planner.bytes.room import NoRoomError
from scrimp.profiler import Device
from scrimp.report.units import format_duration
from scrimp.train.memory_plan import decide_memory

Found = tuple[Config, MemoryDecision | None]


def decide_micro_batch(
    device: Device, config: Config, architecture: Architecture, reasons: dict[str, str]
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


def _fastest(device: Device, config: Config, architecture: Architecture, reasons: dict[str, str]) -> Found:
    sequences = decided(config.train.batch_tokens) // decided(config.train.sequence)
    best: tuple[Config, MemoryDecision] | None = None
    tried: list[str] = []
    for size in (size for size in range(1, sequences + 1) if sequences % size == 0):
        try:
            changed, memory = _with_size(device, config, architecture, size)
        except NoRoomError:
            if best is None:
                raise
            break
        assert memory is not None
        tried.append(f"{size}: {format_duration(memory.timeline.seconds)}")
        if best is None or memory.timeline.seconds < best[1].timeline.seconds:
            best = changed, memory
    assert best is not None
    reasons["train.micro_batch"] = f"the fastest step of {', '.join(tried)} (predicted)"
    reasons["memory.split"] = "the fastest was found: the run keeps its micro-batch"
    return best


def _first_that_fits(
    device: Device,
    config: Config,
    architecture: Architecture,
    reasons: dict[str, str],
    *,
    may_change: bool,
) -> Found:
    refusal: NoRoomError | None = None
    for size in _smaller_and_smaller(config) if may_change else [decided(config.train.micro_batch)]:
        try:
            found = _with_size(device, config, architecture, size)
        except NoRoomError as error:
            refusal = error
            continue
        if refusal is not None:
            reasons["train.micro_batch"] = "the largest of those tried that fits in memory"
        return found
    assert refusal is not None
    raise refusal


def _with_size(device: Device, config: Config, architecture: Architecture, size: int) -> Found:
    changed = replace_values(config, {"train.micro_batch": size, "memory.split": "fixed"})
    account = account_of(changed, architecture)
    memory = decide_memory(
        changed,
        architecture,
        device,
        resident_bytes=account.peak,
        copy_bytes=account.checkpoint_copy,
        must_predict=config.memory.split == "fastest",
    )
    return changed, memory


def _smaller_and_smaller(config: Config) -> list[int]:
    """The micro-batch that was decided, then divisors of the batch, each at most half of the last."""
    train = config.train
    sizes, sequences = [decided(train.micro_batch)], decided(train.batch_tokens) // decided(train.sequence)
    for size in range(sizes[0] // 2, 0, -1):
        if sequences % size == 0 and size <= sizes[-1] // 2:
            sizes.append(size)
    return sizes
