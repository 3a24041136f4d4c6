"""What `scrimp choose-base` does: measure, choose under a budget of bytes, show."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.progress import Progress

from scrimp.cli.model_commands import ChooseBase
from scrimp.cli.show import plain_console, say
from scrimp.cli.trained import opened_text, sequence_of
from scrimp.errors import ConfigError, DataError
from scrimp.models import spec_of
from scrimp.models.model import Model, build_model
from scrimp.planner.precision.stored import choose_stored, stored_text, weight_bytes
from scrimp.precision.stored import AS_IT_IS, STORABLE
from scrimp.profiler import resolve_device
from scrimp.report.tables import key_value_table
from scrimp.report.units import format_bytes, format_count
from scrimp.statistics.stored_weights import PredictionDivergence, storable
from scrimp.training.trained_weights import Target, open_target

_ROOM = 1.3
"""Memory for the model and what its passes take, as a multiple of its weights."""


def choose_base(options: ChooseBase) -> None:
    """Measure each layer in each format, choose, and print the rules with what they cost together."""
    formats = [name.strip() for name in options.formats.split(",")]
    unknown = [name for name in formats if name not in STORABLE]
    if unknown:
        raise ConfigError(
            "--formats names what stores no weights", got=", ".join(unknown), expected=", ".join(STORABLE)
        )
    target = open_target(options.target)
    if target.architecture.rank is not None:
        raise ConfigError(
            "a base of low rank has no adapters yet, beside which it would be stored",
            got=f"model.rank {target.architecture.rank}",
            do="export it, which multiplies its factors out, and name that folder",
        )
    tokens = _tokens(target, options)
    model = _loaded(target, options.device)
    shapes = {name: (len(one), one.shape[1]) for name, one in storable(model).items()}
    whole = {name: dict.fromkeys(formats, 0.0) for name in shapes}
    choose_stored(
        whole, shapes, options.budget
    )  # a budget that cannot be kept is refused before anything is run
    measured = PredictionDivergence(model, tokens.to(next(model.parameters()).device))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring layers", total=len(shapes) * len(formats))
        costs = measured.of_each(formats, lambda: progress.advance(task))
    chosen = choose_stored(costs, shapes, options.budget)
    _show(options, model, measured, costs, chosen)


def _loaded(target: Target, device_name: str) -> Model:
    """In fp32 where that fits: in bf16 the rounding of activations is a floor below every divergence."""
    device = resolve_device(device_name)
    parameters = spec_of(target.architecture).parameters
    fits = _ROOM * 4 * parameters < device.available_bytes
    dtype = torch.float32 if fits else torch.bfloat16
    model = build_model(target.architecture, device=device.torch_device, dtype=dtype)
    target.fill(model)
    say(f"{device.name}: {format_count(parameters)} parameters in {'fp32' if fits else 'bf16'}")
    return model.eval()


def _tokens(target: Target, options: ChooseBase) -> torch.Tensor:
    length = sequence_of(target, options.sequence)
    with opened_text(
        target, options.data, text_column=options.text_column, conversations=options.conversations
    ) as corpus:
        rows = min(max(1, options.tokens // length), corpus.train.num_tokens // length)
        if rows == 0:
            raise DataError(
                f"{options.data} is shorter than a sequence",
                got=f"{corpus.train.num_tokens:,} tokens",
                expected=f"at least {length:,}",
                do="give more text, or a shorter --sequence",
            )
        read = corpus.train.read(0, rows * length).astype("int64")
    return torch.from_numpy(read).view(rows, length)


def _show(
    options: ChooseBase,
    model: Model,
    measured: PredictionDivergence,
    costs: dict[str, dict[str, float]],
    chosen: dict[str, str],
) -> None:
    shapes = {name: (len(one), one.shape[1]) for name, one in storable(model).items()}
    size = sum(weight_bytes(shapes[layer], name) for layer, name in chosen.items())
    share = size / sum(weight_bytes(shape, AS_IT_IS) for shape in shapes.values())
    stored = {layer: name for layer, name in chosen.items() if name != AS_IT_IS}
    predicted = sum(costs[layer][name] for layer, name in stored.items())
    rows = [
        (f"all in {name}", f"{sum(one[name] for one in costs.values()):.5f} nats per token, predicted")
        for name in next(iter(costs.values()))
    ]
    rows += [
        ("chosen", f"{predicted:.5f} predicted, {measured.of(stored):.5f} measured together"),
        ("linear layers", f"{format_bytes(size)}, {share:.1%} of theirs in bf16"),
        (
            "layers",
            ", ".join(
                f"{list(chosen.values()).count(name)} in {name}" for name in sorted({*chosen.values()})
            ),
        ),
    ]
    console = plain_console()
    console.print(
        key_value_table(rows, title=f"{options.target} on {options.data}: divergence of its predictions")
    )
    console.print(f"--adapter.base {stored_text(chosen)}", soft_wrap=True)
