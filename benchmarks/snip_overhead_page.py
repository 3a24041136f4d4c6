"""The study's section on overhead: lists of Markdown lines from records of `snip_overhead`, by `snip_cadence`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environment import markdown_table
from snip_cadence import Cadence, amortised, extra_bytes, extrapolated, median
from snip_gaps import Expectation

MIB = 2**20


def overhead_expectations(records: Sequence[Mapping[str, Any]], cadence: Cadence) -> list[Expectation]:
    """Under 1 % of training time at the default cadence."""
    text = "measuring, switching and probing under 1 % of training time at the default cadence"
    found = []
    for record in records:
        costs = amortised(record, cadence)
        share, worst = costs["share of plan steps"], costs["share of bf16 steps, with solver"]
        note = f"of bf16 steps, the solver counted as waited for: {worst:.2%}"
        found.append(Expectation(text, f"{share:.2%}", "yes" if share < 0.01 else "no", note))
    return found or [Expectation(text, "", "not measured")]


def overhead_section(records: Sequence[Mapping[str, Any]], cadence: Cadence) -> list[str]:
    """Seconds, bytes, shares, and the larger model."""
    text = ["## 4. Overhead", ""]
    if not records:
        return [*text, "Not measured yet: `snip_study.py overhead`.", ""]
    for record in records:
        text += [
            f"{record['parameters'] / 1e6:.1f}M parameters, steps of {record['tokens']:,} tokens, {record['device']}, "
            f"{record['threads']} threads, load {record['load_before']:.1f} before; measured, median (fastest, "
            "slowest). Extra memory is above the peak of a step in the plan's formats; of the solver, which runs "
            "beside steps, what it adds. "
            f"Commit {record['commit']}."
            + ("" if record["high_water_marks_reset"] else " Peaks include those of all acts before."),
            "",
            *markdown_table(("act", "seconds", "extra memory, MiB"), act_rows(record)),
            "",
            *_shares(record, cadence),
            *_larger(record, cadence),
        ]
    return text


def act_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """One row per act."""

    def row(name: str, act: Mapping[str, Any], extra: int | None) -> list[str]:
        seconds = act["seconds"]
        spread = f"{median(seconds):.4g} ({min(seconds):.4g}, {max(seconds):.4g})"
        return [name, spread, "" if extra is None else f"{extra / MIB:,.0f}"]

    def waited_for(name: str, act: Mapping[str, Any]) -> list[str]:
        return row(name, act, extra_bytes(record, act))

    steps = (("step in bf16", "bf16"), ("step in the plan's formats", "plan"))
    return [
        *(row(name, record["step"][key], None) for name, key in steps),
        *(
            waited_for(f"measure {', '.join(c['formats'])}; batches: {c['batches']}", c)
            for c in record["collect"]
        ),
        *(row(f"solve: {name}", act, act["growth_bytes"]) for name, act in record["solve"].items()),
        waited_for("switch", record["switch"]),
        row("step after a switch", {"seconds": record["switch"]["after"]}, None),
        waited_for("probe", record["probe"]),
    ]


def _shares(record: Mapping[str, Any], cadence: Cadence) -> list[str]:
    costs = amortised(record, cadence)
    share = {name: costs[f"share of {name} steps"] for name in record["step"]}
    waited = {name: costs[f"share of {name} steps, with solver"] for name in record["step"]}
    return [
        f"Default cadence: a plan every {cadence.every:,} steps from {cadence.batches} batches, a probe every "
        f"{cadence.probe_every:,} steps and after each switch. Training waits {costs['stall of a re-plan, s']:.3g} s "
        f"for a re-plan and {costs['regular probes of a period, s']:.3g} s for the regular probes of a period; the "
        f"solver takes {costs['solver, s']:.3g} s beside it. That is {share['plan']:.2%} of the time of steps in the "
        f"plan's formats and {share['bf16']:.2%} of that of bf16 steps ({waited['plan']:.2%} and {waited['bf16']:.2%} "
        "if the solver were waited for).",
        "",
    ]


def _larger(record: Mapping[str, Any], cadence: Cadence) -> list[str]:
    e = extrapolated(record, cadence)
    return [
        f"Estimated from measurements, for {e['preset']} at sequences of {e['sequence']:,} and steps of "
        f"{e['batch_tokens']:,} tokens: a re-plan stalls training for the time of "
        f"{e['bf16 passes of a stall']:.1f} bf16 steps over its statistics batch of {e['statistics_tokens']:,} tokens. "
        f"That is {e['stall, steps']:.2f} training steps or {e['stall, FLOPs'] / 1e15:.2g} PFLOP: "
        f"{e['stall, s at the assumed rate']:.3g} s at an assumed {e['flops_per_s'] / 1e12:.0f} TFLOP/s, "
        f"{e['stall, s at the rate of here']:.3g} s at the {e['rate of here, FLOP/s'] / 1e12:.2g} TFLOP/s measured "
        f"here. With regular probes it is {e['share of training']:.3%} of training. Everything is scaled as GEMMs "
        "are, which is too much rather than too little.",
        "",
    ]
