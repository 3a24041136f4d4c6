"""What `scrimp eval`, `generate` and `export` do with a trained model, apart from parsing their arguments."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from scrimp.cli.show import plain_console
from scrimp.config import Sampling
from scrimp.data import ChatTemplate, Corpus, CorpusSpec, Progress, Tokenizer, open_corpus
from scrimp.errors import DataError, ModelError
from scrimp.models.generation import generate
from scrimp.models.huggingface.adapter_files import export_adapter
from scrimp.models.huggingface.export import OWN_TOKENIZER_RULES, export_model
from scrimp.models.model import build_model
from scrimp.profiler import resolve_device
from scrimp.report.tables import key_value_table
from scrimp.report.units import printable
from scrimp.runtime import Executable
from scrimp.training.evaluation import Evaluation, evaluate
from scrimp.training.export_seal import seal_export
from scrimp.training.run_state import read_state
from scrimp.training.trained_weights import (
    Target,
    base_of,
    finite_tensors,
    finite_weights,
    is_run,
    open_target,
)

ECHOED = 2000
"""Characters of a prompt that `generate` prints, the last ones."""
_TOKENS_BEFORE = 16
"""Decoded again with a new token: a character, or a space between words, may depend on those before it."""


def load_executable(target: Target, device_name: str) -> Executable:
    """The target's model on a device, ready for inference: a run in the format of its parameters,
    a Hugging Face folder in bf16 on CUDA and fp32 on a CPU."""
    device = resolve_device(device_name)
    dtype = torch.bfloat16 if device.torch_device.type == "cuda" else torch.float32
    if target.checkpoint is not None:
        dtype = next(finite_weights(target.checkpoint))[1].dtype
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
    length = sequence_of(target, sequence)
    executable = load_executable(target, device)
    with contextlib.ExitStack() as stack:
        corpus = stack.enter_context(
            opened_text(target, data, text_column=text_column, conversations=conversations)
        )
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
    rows = [
        ("loss (nats per token)", f"{result.loss:.4f}"),
        ("perplexity", f"{result.perplexity:.2f}"),
        ("bits per byte", f"{result.bits_per_byte:.4f}"),
        ("tokens", f"{result.num_targets:,} in {documents:,} documents"),
        ("sequence", f"{length:,}"),
        ("documents", "kept apart" if target.masks_documents else "not kept apart, as trained"),
        ("format", executable.precision),
    ]
    plain_console().print(key_value_table(rows, title=f"{folder} on {data}, measured"))
    return result


def sequence_of(target: Target, sequence: int | None) -> int:
    """Tokens of the sequences that a model reads: those asked for, or as trained.

    Raises:
        ModelError: they do not fit its context.
    """
    context = target.architecture.context
    if sequence is not None and not 1 <= sequence <= context:
        raise ModelError(
            "the sequence does not fit the model's context", got=sequence, expected=f"1 to {context}"
        )
    trained = read_state(target.checkpoint).sequence if target.checkpoint else 2048
    return sequence or min(trained, context)


@contextlib.contextmanager
def opened_text(
    target: Target, data: str, *, text_column: str = "text", conversations: bool = False
) -> Iterator[Corpus]:
    """All of a text, or of conversations, encoded by a model's tokenizer, in a folder that is thrown away."""
    spec = CorpusSpec(
        source=data,
        text_column=text_column,
        conversations=conversations,
        tokenizer=str(target.tokenizer_folder),
        held_out=0.0,
    )
    with tempfile.TemporaryDirectory(prefix="scrimp-eval-") as scratch:
        yield open_corpus(spec, cache=Path(scratch), progress=False)


def generate_text(
    folder: Path,
    prompt: str,
    *,
    tokens: int,
    sampling: Sampling,
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
        sampling=sampling,
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
    if target.architecture.family in OWN_TOKENIZER_RULES and own:
        plain_console().print(
            f"note: beside a {target.architecture.family} model, AutoTokenizer of transformers 5 follows rules of its "
            "own, whatever the folder says; load this tokenizer with PreTrainedTokenizerFast.from_pretrained"
        )
    plain_console().print(f"exported step {target.checkpoint.step:,} to {out}")


def export_adapter_of(run_dir: Path, out: Path) -> None:
    """Write the adapters of a checkpoint, or of the newest one of a run, as a folder for peft."""
    target = open_target(run_dir)
    state = None if target.checkpoint is None else read_state(target.checkpoint)
    if target.checkpoint is None or state is None or state.architecture.adapter is None:
        raise ModelError(
            f"{run_dir} has no adapters",
            got="weights that were all trained",
            expected="a run with --adapter.rank",
            do="leave --adapter out: the whole model is exported",
        )
    base = base_of(target.checkpoint, state).folder
    export_adapter(
        dict(finite_tensors(target.checkpoint)),
        state.architecture,
        out,
        base=None if is_run(base) else base,
        save_tokenizer=target.tokenizer.save,
    )
    if is_run(base):
        plain_console().print(f"note: peft needs the base as a Hugging Face folder: export {base} too")
    plain_console().print(f"exported the adapters of step {target.checkpoint.step:,} to {out}")
