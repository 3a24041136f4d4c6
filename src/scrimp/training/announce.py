"""The first lines of a run, and the event that says what begins, where, and with which software."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from scrimp import __version__
from scrimp.data import Mixture, packed, passes_over
from scrimp.models import spec_of
from scrimp.planner import count_flops
from scrimp.report.units import format_count
from scrimp.training.memory.account_table import account_text, attention_text
from scrimp.training.rank_order import order_advice
from scrimp.training.run import Run
from scrimp.training.start import Start


def announce(run: Run, run_dir: Path, start: Start) -> None:
    """Say on the console, and in events.jsonl, what begins or goes on: model, data, memory, layout, back ends."""
    config, spec = run.config, spec_of(run.decisions.architecture)
    corpus, device = run.corpus, run.decisions.device
    frozen, count = format_count(spec.parameters - spec.adapter_parameters), spec.adapter_parameters
    adapters = f", {format_count(count)} more in adapters, which alone are trained" if count else ""
    run.line.message(
        f"{config.model.weights or config.model.preset}: {frozen} parameters in "
        f"{config.train.parameters}{adapters}, GEMMs in {config.precision}, {device.name}; "
        f"{format_count(corpus.train.num_tokens)} training tokens, "
        f"{format_count(corpus.held_out.num_tokens)} held out; {run_dir}"
    )
    run.line.message(f"data: {corpus.checked}")
    if isinstance(corpus, Mixture):
        _announce_mixture(run, corpus)
    elif corpus.train.has_answers:
        run.tell("packing", packed(corpus.train, config.train.sequence).sentence)
    run.line.message(account_text(run.decisions))
    _announce_layout(run, start)
    attention = attention_text(run.decisions)
    if attention:
        run.line.message(f"attention: {attention}")
    _note_edited_plan(run)
    if config.is_planned:
        run.line.message(
            f"precision is planned: {config.snip.formats} per GEMM, first at step {config.snip.first}, "
            f"every {config.snip.every} steps; until then {config.snip.start}"
        )
    backends = run.decisions.describe_backends()
    if backends:
        run.line.message(f"GEMMs: {backends}")
    if start.ran_by:
        what = f"GEMMs ran {start.ran_by} before: the same formats, sums in another order"
        run.line.message(what)
        run.event("backends-changed", what, now=backends)
    _record_start(run, start, backends)
    if start.checkpoint:
        done = start.checkpoint.step >= config.train.steps
        say = "all steps are done already" if done else f"continuing from step {start.checkpoint.step:,}"
        run.line.message(say)
    elif start.goes_back:
        run.line.message("no checkpoint can be used: beginning at step 0")


def _announce_mixture(run: Run, mixture: Mixture) -> None:
    """What each source gives to the run, and how often it is read."""
    passes, total = passes_over(mixture.train, run.train.sequence, run.samples), sum(mixture.shares)
    sentences, sources = [], []
    for number, label in enumerate(mixture.labels):
        share, stream = mixture.shares[number] / total, mixture.train.streams[number]
        if stream.has_answers:
            run.tell("packing", f"{label}: {packed(stream, run.train.sequence).sentence}")
        tokens = format_count(stream.num_tokens)
        sentences.append(
            f"{label} {share:.1%} of the samples, {passes[number]:.3g} passes over {tokens} tokens"
        )
        figures = {"share": share, "tokens": stream.num_tokens, "passes": passes[number]}
        sources.append({"label": label, "source": mixture.names[number], **figures})
    digest = mixture.digest_of_sources
    run.tell("mixture", f"mixture: {'; '.join(sentences)}", sources=sources, digest_of_sources=digest)


def _announce_layout(run: Run, start: Start) -> None:
    """How the run is laid over its ranks, and how before it was resumed, where that differs."""
    layout = start.decisions.plan.layout.text
    if start.laid_before not in ("", layout):
        run.tell("layout", f"layout: {layout}; before: {start.laid_before}")
    elif run.decisions.world.size > 1:
        run.line.message(f"layout: {layout}")
    order = order_advice(run.decisions)
    if order:
        run.line.message(order)


def _record_start(run: Run, start: Start, backends: str) -> None:
    """The event that says what begins, where, and with which software."""
    spec = spec_of(run.decisions.architecture)
    flops = count_flops(spec, run.config.train.sequence)
    run.event(
        "resume" if start.checkpoint else "start",
        f"from {start.checkpoint.folder.name}" if start.checkpoint else "from the beginning",
        device=run.decisions.device.name,
        parameters=spec.parameters,
        trained=spec.trained_parameters,
        flops_per_token_causal=flops.causal,
        flops_per_token_full=flops.full,
        peak_origin=run.peaks.origin,
        backends=backends,
        environment={
            "scrimp": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
    )


def _note_edited_plan(run: Run) -> None:
    """Say so where plan.json no longer says what a fixed `precision` does; it is carried out as it stands."""
    plan = run.plans.plan
    if run.config.is_planned:
        return
    rules = run.config.precision_rules.assign(spec_of(run.decisions.architecture).origins)
    edited = [layer for layer, choice in plan.gemms.items() if choice != rules[layer]]
    if edited:
        note = (
            f"plan.json differs from `precision` in {len(edited)} layers, {edited[0]} first: the plan counts"
        )
        run.line.message(note)
        run.event("plan", note)
