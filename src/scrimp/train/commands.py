"""What `scrimp eval`, `generate`, `export` and `plan` do, apart from parsing their arguments."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scrimp.config import Config, MemoryConfig, flatten
from scrimp.data import ChatTemplate, CorpusSpec, Progress, Tokenizer, open_corpus
from scrimp.errors import ConfigError, DataError, ModelError, StorageError
from scrimp.export import ExportTarget
from scrimp.models import spec_of
from scrimp.models.generation import generate
from scrimp.models.huggingface.export import export_model
from scrimp.models.model import build_model
from scrimp.planner import count_flops, ideal_seconds_per_token
from scrimp.planner.memory.room import NoRoomError
from scrimp.planner.precision import PrecisionPlan
from scrimp.profiler import device_peaks, recall_throughput, resolve_device
from scrimp.report.tables import key_value_table
from scrimp.report.units import format_bytes, format_count, format_flops, format_rate, printable
from scrimp.runtime import Executable
from scrimp.train.evaluation import Evaluation, evaluate
from scrimp.train.export_seal import seal_export
from scrimp.train.memory.account_table import account_tables, attention_text
from scrimp.train.precision.preview import Preview, preview
from scrimp.train.precision.question import shares_of
from scrimp.train.run_state import read_state
from scrimp.train.setup import Decisions, decide, expected_vocabulary, fit_vocabulary
from scrimp.train.start import anchored
from scrimp.train.trained_weights import MODEL_PREFIX, Target, finite_weights, open_target

ECHOED = 2000
"""Characters of a prompt that `generate` prints, the last ones."""
_TOKENS_BEFORE = 16
"""Decoded again with a new token: a character, or a space between words, may depend on those before it."""


def _console() -> Any:
    from rich.console import Console

    return Console(markup=False, highlight=False)


def dry_run(
    config: Config,
    given: Collection[str] = frozenset(),
    out: Path | None = None,
    target: ExportTarget | None = None,
) -> None:
    """Print what a run would need and how fast it would be; prepare and start nothing.

    With precision snip and a run as model.weights: measure its newest checkpoint, and show the plan.

    Args:
        given: dotted keys that the user wrote; of a run that is measured, its own settings count for others.
        out: file for the measured plan.
        target: the trainer that the measured plan is to run in.
    """
    if out is not None and out.exists():
        raise StorageError(f"{out} exists already", do="choose another name; nothing is overwritten")
    measured = preview(config, given, target)
    if measured is not None:
        _show_measured(measured, out)
        return
    if out is not None or target is not None:
        raise ConfigError(
            "there is no measured plan" + (" to write" if out is not None else f" to make for {target}"),
            got=("--target" if out is None else f"--out {out}") + " without a run to measure",
            expected="precision snip, and a run with a checkpoint",
            do="give --precision snip --model.weights RUN",
        )
    decisions, no_room = _decided(anchored(config))
    console = _console()
    console.print(_run_table(decisions))
    if decisions.config.is_planned:
        console.print(_starting_map(decisions))
    for table in account_tables(decisions):
        console.print(table)
    if decisions.reasons:
        values = flatten(decisions.config)
        choices = [(key, f"{values[key]}  ({reason})") for key, reason in sorted(decisions.reasons.items())]
        console.print(key_value_table(choices, title="decided by Scrimp"))
    if no_room is not None:
        raise no_room
    decisions.refuse_misfit()


def _decided(config: Config) -> tuple[Decisions, NoRoomError | None]:
    """The decisions of a run; where nothing fits those of one that keeps everything, to be shown, and the refusal."""

    def decisions_of(config: Config) -> Decisions:
        decisions = decide(config)
        return fit_vocabulary(decisions, expected_vocabulary(decisions))

    try:
        return decisions_of(config), None
    except NoRoomError as no_room:
        resident = MemoryConfig(activations="keep", weights="device", gradients="device", optimizer="device")
        shown = decisions_of(replace(config, memory=resident))
        memory = replace(shown.memory, reason="nothing: everything resident, to show what it takes")
        return replace(shown, memory=memory), no_room


def _run_table(decisions: Decisions) -> Any:
    """What a run is, and how fast it would be."""
    config, architecture, plan = decisions.config, decisions.architecture, decisions.plan
    sequence, count = config.train.sequence, spec_of(architecture).parameters
    flops = count_flops(spec_of(architecture), sequence)
    rate = recall_throughput(plan, config)
    peaks = device_peaks(decisions.device.torch_device, decisions.device.name)
    compute = config.precision_rules.compute
    ideal = 1 / ideal_seconds_per_token(spec_of(architecture), sequence, plan.gemms, peaks, compute)
    backends, attention = decisions.describe_backends(), attention_text(decisions)
    measured = (
        f"{format_rate(rate)} (measured by an earlier run)" if rate else "not measured yet on this machine"
    )
    tuning = decisions.tuning_bytes
    rows = [
        ("parameters", f"{count:,} ({format_count(count)})"),
        ("FLOPs per token, causal form", format_flops(flops.causal)),
        ("FLOPs per token, full form", format_flops(flops.full)),
        ("tokens per step", f"{config.train.batch_tokens:,} in sequences of {sequence:,}"),
        ("tokens in the run", f"{config.train.batch_tokens * config.train.steps:,}"),
        ("device", f"{decisions.device.name} ({decisions.device.spelling})"),
        ("speed of light", f"{format_rate(ideal)} (predicted; {peaks.description})"),
        *([("quantized GEMMs", backends)] if backends else []),
        *([("shapes of tiles", f"tried before the model is made, {format_bytes(tuning)}")] if tuning else []),
        *([("attention", attention)] if attention else []),
        ("tokens/s", measured),
    ]
    return key_value_table(rows, title=f"{config.model.weights or config.model.preset}, {config.precision}")


def _starting_map(decisions: Decisions) -> Any:
    """The formats of a run that plans them, before its first plan."""
    from scrimp.report.precision_text import precision_map_text

    layers = {layer: choice for layer, choice in decisions.plan.gemms.items() if layer != "head"}
    shares = shares_of(decisions.architecture)
    return precision_map_text(layers, shares, title="precision until the first plan")


def _show_measured(found: Preview, out: Path | None) -> None:
    """A measured plan on the terminal, and in a file if one is named."""
    from scrimp.report.precision_text import precision_map_text

    plan, console = found.plan, _console()
    shares = {layer: row.flops_share for layer, row in plan.layers.items()}
    title = f"precision after step {found.step:,}, chosen by {plan.policy}"
    console.print(precision_map_text(plan.precisions, shares, title=title))
    predicted = plan.predicted
    budget = ", ".join(f"{name} {value:g}" for name, value in plan.budget.items())
    rows = [
        ("budget", budget or f"none: policy {plan.policy} keeps no budget"),
        ("FLOPs in 4 bits", f"{predicted['fp4_flops'] or 0:.1%} of the blocks' linear layers"),
        (
            "loss divergence",
            f"{predicted['loss_divergence'] or 0:.2e} of the loss (predicted; {interval_text(plan, 'loss', '.2e')})",
        ),
        (
            "weight divergence",
            f"{predicted['weight_divergence'] or 0:.1%} of an update "
            f"(predicted; {interval_text(plan, 'weight', '.1%')})",
        ),
        ("certainty", "one batch says nothing of it" if plan.certainty is None else f"{plan.certainty:.0%}"),
        ("solver", f"{plan.solver.get('name', 'none')} {plan.solver.get('note', '')}".strip()),
    ]
    console.print(key_value_table(rows, title="the plan"))
    console.print(key_value_table(next_best_choices(plan), title="the next-best choices (predicted)"))
    if out is not None:
        plan.write(out)
        console.print(f"written: {out}")


def interval_text(plan: PrecisionPlan, what: str, number_format: str) -> str:
    """How far a predicted divergence, of loss or weight, may be off by the batches that were measured."""
    pair = plan.intervals.get(f"{what}_divergence")
    if pair is None:
        return "no interval: one batch was measured" if plan.batches == 1 else "no interval"
    low, high = (format(bound, number_format) for bound in pair)
    return f"95% from {low} to {high}, by {plan.batches} batches"


def next_best_choices(plan: PrecisionPlan, count: int = 4) -> list[tuple[str, str]]:
    """The promotions that would save most harm per FLOP, and the demotions that would cost least."""
    moves = [
        (layer, gemm, one.choice, name, (harm - one.harm[one.choice]) / max(row.flops_share, 1e-12))
        for layer, row in plan.layers.items()
        for gemm, one in row.gemms.items()
        for name, harm in one.harm.items()
        if name != one.choice
    ]
    saving = sorted((move for move in moves if move[4] < 0), key=lambda move: move[4])[:count]
    costing = sorted((move for move in moves if move[4] > 0), key=lambda move: move[4])[:count]
    return [
        (f"{layer}.{gemm}", f"{now} to {name}: harm {change * plan.layers[layer].flops_share:+.2g}")
        for layer, gemm, now, name, change in (*saving, *costing)
    ]


def load_executable(target: Target, device_name: str) -> Executable:
    """The target's model on a device, ready for inference: a run in the format of its parameters,
    a Hugging Face folder in bf16 on CUDA and fp32 on a CPU."""
    device = resolve_device(device_name)
    dtype = torch.bfloat16 if device.torch_device.type == "cuda" else torch.float32
    if target.checkpoint is not None:
        dtype = next(target.checkpoint.tensors(MODEL_PREFIX))[1].dtype
    model = build_model(target.architecture, device=device.torch_device, dtype=dtype)
    target.fill(model)
    model.eval()
    return Executable(
        model, device.torch_device, "fp32" if dtype == torch.float32 else "bf16", loss_chunk=1024
    )


def evaluate_target(
    folder: Path,
    data: str,
    *,
    device: str = "auto",
    sequence: int | None = None,
    text_column: str = "text",
    conversations: bool = False,
) -> Evaluation:
    """Evaluate a run or a Hugging Face folder on all of a text, or on the answers of conversations, and print the
    figures."""
    target = open_target(folder)
    if sequence is not None and not 1 <= sequence <= target.architecture.context:
        raise ModelError(
            "the sequence does not fit the model's context",
            got=sequence,
            expected=f"1 to {target.architecture.context}",
        )
    trained = read_state(target.checkpoint).sequence if target.checkpoint else 2048
    length = sequence or min(trained, target.architecture.context)
    executable = load_executable(target, device)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="scrimp-eval-"))
        spec = CorpusSpec(
            source=data,
            text_column=text_column,
            conversations=conversations,
            tokenizer=str(target.tokenizer_folder),
            held_out=0.0,
        )
        corpus = open_corpus(spec, cache=Path(scratch), progress=False)
        bytes_per_token = corpus.train.text_bytes / corpus.train.num_tokens
        bar = stack.enter_context(Progress("evaluating", corpus.train.text_bytes))
        result = evaluate(
            executable,
            corpus.train,
            sequence=length,
            micro_batch=8,
            max_tokens=None,
            mask_documents=target.masks_documents,
            on_tokens=lambda tokens: bar.update(int(tokens * bytes_per_token)),
        )
        documents = corpus.train.num_documents
    _console().print(
        key_value_table(
            [
                ("loss (nats per token)", f"{result.loss:.4f}"),
                ("perplexity", f"{result.perplexity:.2f}"),
                ("bits per byte", f"{result.bits_per_byte:.4f}"),
                ("tokens", f"{result.num_targets:,} in {documents:,} documents"),
                ("sequence", f"{length:,}"),
                ("documents", "kept apart" if target.masks_documents else "not kept apart, as trained"),
                ("format", executable.precision),
            ],
            title=f"{folder} on {data}, measured",
        )
    )
    return result


def generate_text(
    folder: Path,
    prompt: str,
    *,
    tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str = "auto",
) -> str:
    """Continue `prompt`, printing the text as it comes; returns prompt and continuation.

    Control characters are printed as Python writes them, and of a long prompt only the end.
    """
    _refuse_no_text(prompt)
    target = open_target(folder)
    executable = load_executable(target, device)
    prompt_ids = target.tokenizer.encode_prompt(prompt)
    ids = list(prompt_ids)
    text = target.tokenizer.decode(ids)
    sys.stdout.write("… " * (len(text) > ECHOED) + printable(text[-ECHOED:]))
    chosen = generate(
        executable.model,
        prompt_ids,
        max_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        end_ids=target.tokenizer.end_ids,
    )
    for piece in new_text(target.tokenizer, ids, chosen):
        sys.stdout.write(printable(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return target.tokenizer.decode(ids)


def new_text(tokenizer: Tokenizer, ids: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """What tokens add to a text, piece by piece.

    Args:
        ids: of the text so far; the tokens are added to it.
    """
    # The text so far is not decoded anew for each token: only what the last few give, and the new one.
    start = max(0, len(ids) - _TOKENS_BEFORE)
    shown = tokenizer.decode(ids[start:])
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids[start:])
        # A character may span several tokens: wait until its last byte is there.
        if text.startswith(shown) and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            start = max(start, len(ids) - _TOKENS_BEFORE)
            shown = tokenizer.decode(ids[start:])
    yield tokenizer.decode(ids[start:])[len(shown) :]


def _refuse_no_text(prompt: str) -> None:
    """Refuse a prompt with bytes that are not UTF-8: Python keeps those of a command line as lone surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            "the prompt is not UTF-8 text",
            got=f"{prompt[error.start]!a} after {error.start:,} characters",
            do="give it in UTF-8",
        ) from None


def export_run(run_dir: Path, out: Path) -> None:
    """Write a checkpoint, or the newest one of a run, as a Hugging Face folder."""
    target = open_target(run_dir)
    if target.checkpoint is None:
        raise ModelError(f"{run_dir} is a Hugging Face folder already", expected="a Scrimp run")
    tokenizer, step, masks = target.tokenizer, target.checkpoint.step, target.masks_documents

    def save_and_seal(folder: Path) -> None:
        tokenizer.save(folder)
        seal_export(folder, step, mask_documents=masks)

    export_model(
        finite_weights(target.checkpoint),
        target.architecture,
        out,
        bos_id=tokenizer.delimiter_id,
        eos_ids=tokenizer.end_ids if tokenizer.chat_template is None else ChatTemplate(tokenizer).end_ids,
        save_tokenizer=save_and_seal,
    )
    own = '"PreTrainedTokenizerFast"' in tokenizer.files().get("tokenizer_config.json", "")
    if target.architecture.family == "qwen2" and own:
        _console().print(
            "note: beside a qwen2 model, AutoTokenizer of transformers 5 follows Qwen's own rules whatever the folder "
            "says; load this tokenizer with PreTrainedTokenizerFast.from_pretrained"
        )
    _console().print(f"exported step {target.checkpoint.step:,} to {out}")
