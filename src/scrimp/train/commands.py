"""What `scrimp eval`, `generate`, `export` and `plan` do, apart from parsing their arguments."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from scrimp.config import Config, decided, flatten
from scrimp.data import CorpusSpec, Progress, open_corpus
from scrimp.errors import ModelError
from scrimp.model import Decoder, export_model, generate
from scrimp.planner import account_of, count_flops, gemm_formats, ideal_seconds_per_token
from scrimp.profiler import device_peaks, recall_throughput, resolve_device
from scrimp.report.tables import account_table, key_value_table
from scrimp.report.units import format_bytes, format_count, format_flops, format_rate
from scrimp.runtime import Executable
from scrimp.train.evaluation import Evaluation, evaluate
from scrimp.train.setup import decide, expected_vocabulary, fit_vocabulary
from scrimp.train.start import anchored
from scrimp.train.weights import MODEL_PREFIX, Target, open_target


def _console() -> Any:
    from rich.console import Console

    return Console(markup=False, highlight=False)


def dry_run(config: Config) -> None:
    """Print what a run would need and how fast it would be; prepare and start nothing."""
    decisions = decide(anchored(config))
    decisions = fit_vocabulary(decisions, expected_vocabulary(decisions))
    config, architecture, plan = decisions.config, decisions.architecture, decisions.plan
    sequence = decided(config.train.sequence)
    flops = count_flops(architecture, sequence)
    rate = recall_throughput(plan, config)
    peaks = device_peaks(decisions.device.torch_device, decisions.device.name)
    compute = config.precision_rules.compute
    ideal = 1 / ideal_seconds_per_token(architecture, sequence, gemm_formats(plan), peaks, compute)
    backends = decisions.describe_backends()
    console = _console()
    name = str(config.model.weights or config.model.preset)
    console.print(
        key_value_table(
            [
                (
                    "parameters",
                    f"{architecture.num_parameters:,} ({format_count(architecture.num_parameters)})",
                ),
                ("FLOPs per token, causal form", format_flops(flops.causal)),
                ("FLOPs per token, full form", format_flops(flops.full)),
                ("tokens per step", f"{config.train.batch_tokens:,} in sequences of {sequence:,}"),
                ("tokens in the run", f"{decided(config.train.batch_tokens) * config.train.steps:,}"),
                ("device", f"{decisions.device.name} ({decisions.device.spelling})"),
                ("speed of light", f"{format_rate(ideal)} (predicted; {peaks.description})"),
                *([("quantized GEMMs", backends)] if backends else []),
                (
                    "tokens/s",
                    f"{format_rate(rate)} (measured by an earlier run)"
                    if rate
                    else "not measured yet on this machine",
                ),
            ],
            title=f"{name}, {config.precision}",
        )
    )
    account = account_of(config, architecture)
    rows = [*account.rows(), ("copy for a checkpoint, on the host", account.checkpoint_copy)]
    peak = format_bytes(plan.predicted.peak_device_bytes)
    console.print(account_table(rows, title=f"predicted bytes, peak on the device {peak}"))
    if decisions.reasons:
        choices = [
            (key, f"{flatten(config)[key]}  ({reason})") for key, reason in sorted(decisions.reasons.items())
        ]
        console.print(key_value_table(choices, title="decided by Scrimp"))
    decisions.refuse_misfit()


def load_executable(target: Target, device_name: str) -> Executable:
    """The target's model on a device, ready for inference: a run in the format of its parameters,
    a Hugging Face folder in bf16 on CUDA and fp32 on a CPU."""
    device = resolve_device(device_name)
    dtype = torch.bfloat16 if device.torch_device.type == "cuda" else torch.float32
    if target.checkpoint is not None:
        dtype = next(target.checkpoint.tensors(MODEL_PREFIX))[1].dtype
    model = Decoder(target.architecture, device=device.torch_device, dtype=dtype)
    target.fill(model)
    model.eval()
    return Executable(
        model, device.torch_device, "fp32" if dtype == torch.float32 else "bf16", loss_chunk=1024
    )


def evaluate_target(
    folder: Path, data: str, *, device: str = "auto", sequence: int | None = None, text_column: str = "text"
) -> Evaluation:
    """Evaluate a run or a Hugging Face folder on all of a text, and print the figures."""
    target = open_target(folder)
    if sequence is not None and not 1 <= sequence <= target.architecture.context:
        raise ModelError(
            "the sequence does not fit the model's context",
            got=sequence,
            expected=f"1 to {target.architecture.context}",
        )
    trained = target.checkpoint.state["sequence"] if target.checkpoint else 2048
    length = sequence or min(trained, target.architecture.context)
    executable = load_executable(target, device)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="scrimp-eval-"))
        spec = CorpusSpec(
            source=data, text_column=text_column, tokenizer=str(target.tokenizer_folder), held_out=0.0
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
            mask_documents=True,
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
    """Continue `prompt`, printing the text as it comes; returns prompt and continuation."""
    target = open_target(folder)
    executable = load_executable(target, device)
    prompt_ids = target.tokenizer.encode_prompt(prompt)
    ids = list(prompt_ids)
    shown = target.tokenizer.decode(ids)
    sys.stdout.write(shown)
    for token in generate(
        executable.model,
        prompt_ids,
        max_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        end_ids=target.tokenizer.end_ids,
    ):
        ids.append(token)
        text = target.tokenizer.decode(ids)
        # A character may span several tokens: wait until its last byte is there.
        if text.startswith(shown) and not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    text = target.tokenizer.decode(ids)
    sys.stdout.write(text[len(shown) :] + "\n")
    return text


def export_run(run_dir: Path, out: Path) -> None:
    """Write the newest checkpoint of a run as a Hugging Face folder."""
    target = open_target(run_dir)
    if target.checkpoint is None:
        raise ModelError(f"{run_dir} is a Hugging Face folder already", expected="a Scrimp run")
    weights = (
        (name.removeprefix(MODEL_PREFIX), tensor) for name, tensor in target.checkpoint.tensors(MODEL_PREFIX)
    )
    tokenizer = target.tokenizer
    export_model(
        weights,
        target.architecture,
        out,
        bos_id=tokenizer.delimiter_id,
        eos_ids=tokenizer.end_ids,
        save_tokenizer=tokenizer.save,
    )
    own = '"PreTrainedTokenizerFast"' in tokenizer.files().get("tokenizer_config.json", "")
    if target.architecture.family == "qwen2" and own:
        _console().print(
            "note: beside a qwen2 model, AutoTokenizer of transformers 5 follows Qwen's own rules whatever the folder "
            "says; load this tokenizer with PreTrainedTokenizerFast.from_pretrained"
        )
    _console().print(f"exported step {target.checkpoint.step:,} to {out}")
