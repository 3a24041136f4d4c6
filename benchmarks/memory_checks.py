"""What `memory.py` concludes from the figures of its runs: pure functions, each an outcome that held or did not.

A run is the dictionary that `memory_run.py` writes, with a `name`; one that left no figures has a `failure` instead,
and whatever it was to show has then not held.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
Outcome = tuple[str, bool, str]
"""What was checked, whether it held, and the figure that shows it."""

PEAK_ERROR = 0.04
TIME_ERROR = 0.05
REGRET = 0.03
ALLOWANCE_SHARE = 0.01
ALLOWANCE_BYTES = 64 << 20
"""A prediction says "fits" falsely where the measured peak passes it by more. The bytes are for cuBLAS's workspaces, of
32 MiB each, which come from CUDA's allocator and which no prediction counts; on a CPU there are none."""
WARM_UP_STEPS = 5
REPLANS = ("memory-replan", "weight-operands")
"""Events of a run that did not keep to its first plan."""


def failure_of(run: Run) -> str:
    """Why a run has no figures that count; empty where it has."""
    replans = [kind for kind in run.get("events", ()) if kind in REPLANS]
    said = f"it went on by another plan, {len(replans)} times" if replans else ""
    return " ".join(str(run.get("error") or run.get("failure") or said).split())


def peak_error(run: Run) -> float:
    """Error of the predicted peak, as a share of the measured one; negative: predicted too little."""
    return float(run["predicted"]["device"] / run["device"] - 1)


def says_fits_falsely(run: Run) -> bool:
    """Whether more was held than was predicted, in the steps or while the model was built."""
    held = max(run["device"], run["building"] or 0)
    workspaces = 0 if run["reserved"] is None else ALLOWANCE_BYTES
    return bool(held > run["predicted"]["device"] * (1 + ALLOWANCE_SHARE) + workspaces)


def ran(runs: Sequence[Run], planned: int) -> Outcome:
    """Every configuration left figures."""
    failed = [f"{run['name']}: {failure_of(run)[-200:]}" for run in runs if failure_of(run)]
    missing = planned - len(runs)
    figure = f"{len(runs) - len(failed)} of {planned}"
    if missing:
        failed.append(f"{missing} were not begun")
    return "every configuration ran", not failed, "; ".join([figure, *failed])


def peaks_near(runs: Sequence[Run], upper_bounds: frozenset[str] = frozenset()) -> Outcome:
    """Predicted peaks are near the measured ones.

    Args:
        upper_bounds: names of runs whose account is only said to be no less.
    """
    judged = [run for run in runs if run["name"] not in upper_bounds]
    errors = {run["name"]: peak_error(run) for run in judged if not failure_of(run)}
    far = [name for name, error in errors.items() if abs(error) > PEAK_ERROR]
    held = len(errors) == len(judged) and bool(errors) and not far
    return f"predicted peak within {PEAK_ERROR:.0%} of the measured", held, _range_of(errors, far)


def no_false_fits(runs: Sequence[Run]) -> Outcome:
    """No run held more than was predicted."""
    name = f'never a false "fits" (by more than {ALLOWANCE_SHARE:.0%} and {ALLOWANCE_BYTES >> 20} MiB)'
    known = [run for run in runs if not failure_of(run)]
    false = [f"{run['name']} ({peak_error(run):+.1%})" for run in known if says_fits_falsely(run)]
    held = len(known) == len(runs) and bool(known) and not false
    return name, held, f"{len(false)} of {len(known)}" + (f": {', '.join(false)}" if false else "")


def times_near(runs: Sequence[Run]) -> Outcome:
    """Predicted seconds of a step are near the measured ones."""
    errors = {run["name"]: time_error(run) for run in runs if not failure_of(run)}
    far = [name for name, error in errors.items() if abs(error) > TIME_ERROR]
    held = len(errors) == len(runs) and bool(errors) and not far
    return f"predicted step time within {TIME_ERROR:.0%} of the measured", held, _range_of(errors, far)


def time_error(run: Run) -> float:
    """Error of the predicted step, as a share of the measured one; all of it where nothing was predicted."""
    predicted = run["predicted"]["seconds"]
    return -1.0 if predicted is None else float(predicted / step_seconds(run)[0] - 1)


def timed_steps(run: Run) -> list[float]:
    """Seconds of the steps after the warm-up; of few steps of all but the first."""
    seconds = list(run["seconds"])
    return seconds[WARM_UP_STEPS:] if len(seconds) >= 2 * WARM_UP_STEPS else seconds[1:] or seconds


def step_seconds(run: Run) -> tuple[float, float, float]:
    """Median, fastest and slowest of them."""
    seconds = timed_steps(run)
    return statistics.median(seconds), min(seconds), max(seconds)


def regret(runs: Sequence[Run], budgets: Mapping[str, int], model: str) -> Outcome:
    """The chosen plans against the fastest that was measured within the same budget.

    Args:
        runs: of one model, chosen ones and others.
        budgets: name of each chosen one to its bytes.
    """
    known = {run["name"]: run for run in runs if not failure_of(run)}
    found = {}
    for name, budget in budgets.items():
        if name not in known:
            continue
        fitting = [run for run in known.values() if run["predicted"]["device"] <= budget]
        fastest = min(step_seconds(run)[0] for run in fitting)
        found[name] = step_seconds(known[name])[0] / fastest - 1
    far = [name for name, value in found.items() if value > REGRET]
    held = len(known) == len(runs) and len(found) == len(budgets) and bool(found) and not far
    return f"{model}: regret below {REGRET:.0%}", held, _range_of(found, far)


def kept_to_card(name: str, full: Run, run: Run, card_bytes: int) -> Outcome:
    """On a card a run had room, kept to its plan, and lost what it loses on the full device."""
    what = f"{name}: fits, and losses are equal bit for bit"
    for one, where in ((full, "on the full device"), (run, "on the card")):
        if failure_of(one):
            return what, False, f"{where}: {failure_of(one)[-300:]}"
    trouble = trouble_of(run, card_bytes)
    if run["losses"] != full["losses"]:
        pairs = zip(run["losses"], full["losses"], strict=False)
        step = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), "the number of them")
        trouble.append(f"losses differ, first in step {step}")
    peak = f"{run['device'] / 2**30:.2f} GiB of tensors, {occupied(run) / 2**30:.2f} GiB in all"
    return what, not trouble, "; ".join([peak, *trouble])


def occupied(run: Run) -> int:
    """Bytes of the device with what is no tensor: the allocator's slack, CUDA's context and libraries."""
    return int((run["reserved"] or run["device"]) + run["context"])


def trouble_of(run: Run, card_bytes: int) -> list[str]:
    """What went otherwise than planned."""
    found = []
    if run["trouble"]["num_ooms"]:
        found.append(f"out of memory {run['trouble']['num_ooms']} times")
    if occupied(run) > card_bytes:
        found.append(f"{occupied(run) / 2**30:.2f} GiB are more than the card has")
    return found


def _range_of(shares: Mapping[str, float], far: Sequence[str]) -> str:
    if not shares:
        return "nothing ran"
    values = list(shares.values())
    text = f"{min(values):+.2%} to {max(values):+.2%}, median {statistics.median(values):+.2%}, {len(values)} runs"
    return text + (f"; beyond: {', '.join(f'{name} {shares[name]:+.1%}' for name in far)}" if far else "")
