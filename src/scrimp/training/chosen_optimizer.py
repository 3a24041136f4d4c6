"""Which optimizer a run has where that is open (`optimizer.name = "auto"` under `budget.device_memory`).

Problem  AdamW's states are half of what plain training keeps. Where a budget has no room for them, a subspace of low
         rank has; what that costs in loss depends on model and length.
Method   What costs time alone comes before what may cost loss. So AdamW is taken if its step fits in any way that the
         settings allow (recomputation, a smaller micro-batch, states on the host: all that `decide` tries), else the
         first of Fira's ranks with which it does::

             adamw      fira, rank width / 4      width / 8      width / 16

         Whether a step fits, in the budget and in what is free, is asked of the run's own decision, once for each; so
         what other settings refuse, their own checks refuse. The resolved configuration holds name and rank: a run that
         goes on decides neither anew.
Price    Said with the choice, as measured in small models (docs/recipes.md), with each optimizer at its best rate.
Limits   Formats of moments stay the user's: `optimizer.moments = 8bit` takes less than a rank of width / 4 and is never
         tried. GaLore saves four bytes a matrix beside Fira, and is not either. The search for layouts counts states as
         AdamW's (`planner.layout.state_formats`); the traced account, which has the last word, does not. What an
         optimizer needs on several ranks is said for the layout that is taken where nothing fits as searched.
Checked  tests/training/test_chosen_optimizer.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from scrimp.config import Config, replace_values
from scrimp.config.optimizers import AUTO
from scrimp.errors import ConfigError, PlanError
from scrimp.planner import refuse_misfit
from scrimp.planner.memory.account import StepAccount
from scrimp.planner.memory.room import NoRoomError
from scrimp.report.units import format_bytes

if TYPE_CHECKING:
    from scrimp.training.setup import Decisions

FIRST: Final = "adamw"
_SECOND: Final = "fira"
_DIVISORS: Final = (4, 8, 16)
_PRICE: Final = (
    "price: at its best rate fira of rank width / 4 ended 0.02 above adamw at 1M (four seeds, -0.02 to +0.06), 0.04 "
    "above at 3M (docs/recipes.md), ranks of width / 8 and / 16 another 0.06 and 0.10 (docs/lab-log.md); at 60M to 1B "
    "full rank is published as best"
)


@dataclass(frozen=True)
class _Candidate:
    name: str
    rank: int | None = None
    divisor: int = 0

    def __str__(self) -> str:
        return self.name if self.rank is None else f"{self.name} of rank {self.rank:,}"


def choose_optimizer(config: Config, width: int, decide: Callable[[Config], Decisions]) -> Decisions:
    """The run with the first optimizer whose step fits.

    Args:
        config: with `optimizer.name` auto.
        width: of the model.
        decide: of the same run with a name in its place.

    Raises:
        NoRoomError: none fits; it names what was tried.
        ConfigError, PlanError: as `decide` refuses the run whatever its optimizer.
    """
    failed: list[str] = []
    first: PlanError | None = None
    for one in _candidates(width):
        try:
            found = decide(replace_values(config, {"optimizer.name": one.name, "optimizer.rank": one.rank}))
            misfit = _misfit(found)
        except NoRoomError as error:
            misfit = error
        except (ConfigError, PlanError) as error:
            if one.name == FIRST:
                raise
            failed.append(f"{one.name} is refused: {error.what}")  # whatever its rank
            break
        if misfit is None:
            return _explained(found, one, failed, config)
        failed.append(f"{one} {_needs(misfit)}")
        if first is None:
            first = misfit
            failed.append(f"there is {_there_is(misfit)}")
    assert first is not None, "what refuses AdamW otherwise is raised as it is"
    raise NoRoomError(
        "no optimizer that auto tries fits in memory", got="; ".join(failed), do=f"with {FIRST}, {first.do}"
    )


def _explained(found: Decisions, one: _Candidate, failed: list[str], config: Config) -> Decisions:
    """The run, with why it has this optimizer."""
    states = _states_text(found.memory.account)
    if one.rank is None:
        why = {"optimizer.name": f"a step fits in budget.device_memory, with {states}"}
    else:
        why = {
            "optimizer.name": f"{'; '.join(failed)}; {states}; {_PRICE}",
            "optimizer.rank": f"the width / {one.divisor}, the largest of / 4, / 8, / 16 that fits",
        }
        if config.optimizer.lr is not None:
            scale = found.config.optimizer.low_rank_scale
            why["optimizer.name"] += f"; of optimizer.lr, which is given, its matrices move by {scale:g}"
    return replace(found, reasons=found.reasons | why)


def _states_text(account: StepAccount) -> str:
    device, host = (dict(rows).get("optimizer states", 0) for rows in (account.device, account.host))
    away = f", of which {format_bytes(host)} on the host" if host else ""
    return f"{format_bytes(device + host)} of optimizer states{away}"


def with_first(config: Config) -> Config:
    """The configuration with the optimizer that is tried first, where it is open."""
    return replace_values(config, {"optimizer.name": FIRST}) if config.optimizer.name == AUTO else config


def _candidates(width: int) -> Iterator[_Candidate]:
    yield _Candidate(FIRST)
    ranks = {max(1, width // divisor): divisor for divisor in reversed(_DIVISORS)}
    yield from (_Candidate(_SECOND, rank, ranks[rank]) for rank in sorted(ranks, reverse=True))


def _misfit(found: Decisions) -> PlanError | None:
    """How a run is refused whose own settings do not fit, and which is decided all the same."""
    try:
        refuse_misfit(found.memory, found.config, found.budgets)
    except PlanError as error:
        return error
    return None


def _there_is(error: PlanError) -> str:
    """What limited a run: its budget, or what is free."""
    return str(error.got if error.expected is None else error.expected)


def _needs(error: PlanError) -> str:
    if error.expected is not None:
        return f"takes {error.got}"
    budget = error.device_budget if isinstance(error, NoRoomError) else None
    return "fits on no device beside this host" if budget is None else f"needs {budget}"
