"""What choosing formats while training costs: from seconds of single acts to shares of a run, and to a larger model.

::

    period      a measurement, a switch, the probe that follows it, and a probe every `probe_every` steps
    share       seconds of a period that training waits for / (every x seconds of a plain step)
    solver      runs in a thread beside the training: told apart, and in `with solver` counted as if it were waited for
    larger      an act takes the time of so many bf16 passes over its tokens, measured here; of another model as many
                passes over its statistics batch, whose FLOPs are counted, so that its share of a step needs no rate

Limits   Work per element (errors, norms, the optimizer's rule) grows more slowly than that of GEMMs: the larger model
         is charged too much. Emulated steps are slow, and make the share of measuring small: the share of bf16
         steps stands beside.
Checked  tests/benchmarks/test_snip_report.py
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from scrimp.config import Config, TrainConfig, preset
from scrimp.config.schema import SnipConfig
from scrimp.config.snip import decide_delay, decide_every, decide_probe
from scrimp.models import spec_of
from scrimp.planner.flops import count_flops

LONG_RUN = 1_000_000
"""Steps of a run in which every default has its full size."""


@dataclass(frozen=True)
class Cadence:
    """How often a run measures, in steps."""

    every: int
    probe_every: int
    delay: int
    batches: int

    @classmethod
    def default(cls) -> Cadence:
        """The cadence of `precision = snip` in a long run."""
        config = Config(train=TrainConfig(steps=LONG_RUN))
        every = decide_every(config)[0]
        config = replace(config, snip=SnipConfig(every=every))
        return cls(every, decide_probe(config)[0], decide_delay(config)[0], config.snip.batches)


@dataclass(frozen=True)
class Larger:
    """The model that is extrapolated to, and how it would be trained."""

    preset: str = "llama-1b"
    sequence: int = 2048
    micro_batch: int = 4
    micro_batches: int = 4
    """Micro-batches of a statistics batch: as many as the cycle takes at most."""
    batch_tokens: int = 524_288
    flops_per_s: float = 4e14
    """An assumed rate of a large device, about 40 % of an H100's peak."""

    @property
    def statistics_tokens(self) -> int:
        return self.sequence * self.micro_batch * self.micro_batches


def median(values: Sequence[float]) -> float:
    """The median of some seconds."""
    return statistics.median(values)


def measurement(record: Mapping[str, Any], batches: int) -> Mapping[str, Any]:
    """The row of the run's own two candidates, and of this many batches or the nearest."""
    own = {record["high"], record["low"]}
    rows = [row for row in record["collect"] if set(row["formats"]) == own]
    found: Mapping[str, Any] = min(rows, key=lambda row: abs(row["batches"] - batches))
    return found


def extra_bytes(record: Mapping[str, Any], act: Mapping[str, Any]) -> int:
    """Peak of an act above that of a step in the plan's formats."""
    return max(0, int(act["peak_bytes"] - record["step"]["plan"]["peak_bytes"]))


def amortised(record: Mapping[str, Any], cadence: Cadence) -> dict[str, float]:
    """Shares of training time at a cadence, of steps in the plan's formats and of bf16 steps.

    Args:
        record: as `snip_overhead.measure` gives it.
    """
    waits, solver = stall(record, cadence), median(record["solve"]["plan with certainty"]["seconds"])
    regular = cadence.every // cadence.probe_every * median(record["probe"]["seconds"])
    found = {"stall of a re-plan, s": waits, "regular probes of a period, s": regular, "solver, s": solver}
    for name, step in record["step"].items():
        training = cadence.every * median(step["seconds"])
        found[f"share of {name} steps"] = (waits + regular) / training
        found[f"share of {name} steps, with solver"] = (waits + regular + solver) / training
    return found


def stall(record: Mapping[str, Any], cadence: Cadence) -> float:
    """Seconds that training waits for one re-plan: measuring, switching, and the probe that follows."""
    return (
        median(measurement(record, cadence.batches)["seconds"])
        + median(record["switch"]["seconds"])
        + median(record["probe"]["seconds"])
    )


def extrapolated(record: Mapping[str, Any], cadence: Cadence, larger: Larger | None = None) -> dict[str, Any]:
    """The stall of a re-plan of a larger model, by counted FLOPs; estimated from measurements."""
    larger = larger or Larger()
    flops = count_flops(spec_of(preset(larger.preset)), larger.sequence).causal
    seconds = median(record["step"]["bf16"]["seconds"])
    passes = stall(record, cadence) / seconds
    regular = cadence.every // cadence.probe_every * median(record["probe"]["seconds"]) / seconds
    per_step = larger.statistics_tokens / larger.batch_tokens
    here = record["flops_per_token"] * record["tokens"] / seconds
    work = passes * flops * larger.statistics_tokens
    return {
        **asdict(larger),
        "statistics_tokens": larger.statistics_tokens,
        "flops_per_token": flops,
        "bf16 passes of a stall": passes,
        "stall, FLOPs": work,
        "stall, steps": passes * per_step,
        "stall, s at the assumed rate": work / larger.flops_per_s,
        "stall, s at the rate of here": work / here,
        "rate of here, FLOP/s": here,
        "share of training": (passes + regular) * per_step / cadence.every,
    }
