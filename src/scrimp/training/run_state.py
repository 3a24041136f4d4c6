"""What a run's checkpoint keeps beside its tensors, as typed values.

Problem  `state.json` decides how a run goes on. A manifest covers it, but whoever hands a checkpoint over can write
         both: a text where the step belongs must end as a refusal, not in the depths of the loop.
Method   The state is read into `RunState` strictly, before anything is built (see `scrimp.json_files`).
Limits   The two plans inside (`precision.plan`, `precision.analysis`) are texts here; their own readers check them.
Checked  tests/training/test_run_state.py; with mutated files in tests/hostile/
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from scrimp.config import Architecture
from scrimp.errors import CheckpointError
from scrimp.json_files import as_typed
from scrimp.training.checkpoint import STATE, Checkpoint

_DO = "use an older checkpoint, or the version of Scrimp that wrote it"


@dataclass
class Position:
    """How far a run is; with the tensors, its whole state. Samples and tokens follow from the step."""

    step: int = 0
    updates: int = 0
    """Steps that moved the weights: those that were not skipped."""
    updates_before: int = 0
    """Updates of the run whose optimizer's states it began with (`optimizer.from_weights`)."""

    @property
    def all_updates(self) -> int:
        """Updates that the optimizer's states have seen."""
        return self.updates_before + self.updates


@dataclass(frozen=True)
class RunState:
    """The content of a run's state.json."""

    position: Position
    architecture: Architecture
    data_digest: str
    """The digest of the corpus that the run trains on."""
    sequence: int
    """Tokens of a row."""
    run_digest: str | None = None
    """The digest of run.json; None in checkpoints of earlier versions."""
    precision: dict[str, Any] | None = None
    """The precision cycle's (`scrimp.training.precision.formats_in_plan`); None of a run whose formats are fixed."""
    base: str | None = None
    """The digest of the weights that adapters stand beside (`trained_weights.Base`), of which a checkpoint has no copy;
    None without adapters."""
    source_losses: dict[str, float] | None = None
    """Averages of the losses of sources that have been seen (`scrimp.training.source_weighting`); None: all sources
    count alike."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `CheckpointStore.save`."""
        values = dataclasses.asdict(self) | {"architecture": self.architecture.to_json()}
        may_lack = ("precision", "base", "source_losses")
        return {key: value for key, value in values.items() if key not in may_lack or value}


def read_state(checkpoint: Checkpoint) -> RunState:
    """The state of a run's checkpoint.

    Raises:
        CheckpointError: a key is missing or unknown, a value has the wrong type or is impossible.
    """
    origin = str(checkpoint.folder / STATE)
    state = as_typed(checkpoint.state, RunState, origin=origin, error=CheckpointError, do=_DO)
    position = state.position
    is_possible = 0 <= position.updates <= position.step and position.updates_before >= 0
    if position.step != checkpoint.step or not is_possible:
        raise CheckpointError(
            f"{origin}: position is impossible",
            got=f"step {position.step}, {position.updates} updates",
            expected=f"step {checkpoint.step}, as the folder's name says, and at most as many updates",
            do=_DO,
        )
    if (state.base is None) != (state.architecture.adapter is None):
        raise CheckpointError(
            f"{origin}: base and architecture.adapter do not go together",
            got="adapters without a base" if state.base is None else "a base without adapters",
            expected="both or neither",
            do=_DO,
        )
    if not 1 <= state.sequence <= state.architecture.context:
        expected = f"1 to {state.architecture.context}, the model's context"
        raise CheckpointError(
            f"{origin}: sequence is impossible", got=state.sequence, expected=expected, do=_DO
        )
    return state
