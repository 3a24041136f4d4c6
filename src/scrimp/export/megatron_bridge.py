"""A plan as flags of Megatron-Bridge: a shell script that its performance launcher's parser reads.

Problem  A recipe of Megatron-Bridge brings a layout, recomputation and sharding of its own: what a plan does not say
         would stay as the recipe has it.
Method   Degrees and batches are flags of `scripts/performance/argument_parser.py`; what has no flag, or no flag that
         switches it off, is an override of the configuration (`section.key=value`), which the launcher applies first.
         Each setting that a recipe may bring is written, also where it is none.
ZeRO     The distributed optimizer is stage 1: gradients are reduced after the last micro-batch. Megatron-FSDP is stage
         3. Stage 2 has no flag.
Stages   `pipeline_model_parallel_layout` has a letter for each layer: E the embedding, t a block, L the loss; | between
         stages. It is written where stages are not equal.
Limits   Formats are those of all layers; those of single layers are exported by `scrimp export-precision`. Blocks of
         which norms and gates alone are made again have no name there. Activations leave from a model without stages
         of which nothing is made again.
Source   Megatron-Bridge 067f987d: scripts/performance/argument_parser.py, utils/overrides.py, utils/precision.py,
         docs/training/activation-recomputation.md
Checked  tests/export/test_megatron_bridge.py: read by a parser with the options of that commit
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from scrimp.config.pipeline import V_SHAPED
from scrimp.errors import PlanError
from scrimp.export.layout_file import (
    MIXED,
    LayoutExport,
    comments,
    has_equal_stages,
    offloaded,
    recomputation,
    states_in_other_formats,
    uses_formats,
    zero_stage,
)
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Setting
from scrimp.planner.layout.stages import block_plans, blocks_of_stages

COMMIT = "067f987d"
SCRIPT = "scripts/performance/setup_experiment.py"
MODELS = {
    "llama-3-8b": ("llama", "llama3_8b"),
    "llama-3-70b": ("llama", "llama3_70b"),
    "qwen3-30b-a3b": ("qwen", "qwen3_30b_a3b"),
}
"""Preset to family and recipe."""
DEVICES = ("h100", "b200", "b300", "gb200", "gb300")
_DTYPES = {"bf16": "bf16", "fp8_tensor": "fp8_cs", "fp8": "fp8_sc", "mxfp8": "fp8_mx", "nvfp4": "nvfp4"}
"""Recipe to what Megatron-Bridge calls it: current scaling, sub-channel scaling, MX."""
_NOTES = (
    "the plan's seconds and bytes are those of the software that it was made for; "
    'scrimp plan --batch predicts this trainer where its line says "software": "megatron"',
    "the launcher asks for --account and --partition besides, and a recipe of this model for this GPU",
)


@dataclass(frozen=True)
class _Said:
    """Flags and overrides that are written, and what is not."""

    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    cannot: tuple[str, ...] = ()


def to_megatron_bridge(setting: Setting, model: str) -> LayoutExport:
    """A plan as flags of Megatron-Bridge.

    Raises:
        PlanError: Megatron-Bridge has no recipe of this model, or does not know the device.
    """
    gpu = setting.device.name.lower().split("-")[0]
    if model not in MODELS or gpu not in DEVICES:
        raise PlanError(
            "Megatron-Bridge has no recipe for this plan",
            got=f"{model} on {setting.device.name}",
            expected=f"one of {', '.join(MODELS)}, on one of {', '.join(DEVICES)}",
            do="plan for one of these",
        )
    family, recipe = MODELS[model]
    first = _Said(("-m", family, "-mr", recipe, "-g", gpu, "-ng", f"{setting.layout.ranks}"))
    parts = (
        first,
        _batch(setting),
        _degrees(setting),
        _stages(setting),
        _sharding(setting),
        _recompute(setting),
        _host(setting),
        _formats(setting),
    )
    cannot = tuple(one for part in parts for one in part.cannot)
    opening = (
        f"A plan for {setting.layout.ranks:,} ranks, written by Scrimp for Megatron-Bridge ({COMMIT}).",
        "In its folder: sh THIS_FILE --account ... --partition ...",
    )
    rows = [" ".join(map(shlex.quote, row)) for part in parts for row in (part.flags, part.overrides) if row]
    command = " \\\n    ".join([f"python {SCRIPT}", *rows, '"$@"'])
    text = "\n".join(["#!/bin/sh", *comments(cannot, _NOTES, opening), command, ""])
    return LayoutExport(text, "sh FILE --account ... --partition ...", cannot, _NOTES)


def _batch(setting: Setting) -> _Said:
    return _Said(
        ("-gb", f"{setting.global_batch}", "-mb", f"{setting.micro_batch}", "-sl", f"{setting.sequence}")
    )


def _degrees(setting: Setting) -> _Said:
    layout = setting.layout
    flags = ("-tp", f"{layout.tp}", "-cp", f"{layout.cp}", "-ep", f"{layout.ep}", "-et", f"{layout.etp}")
    alone = layout.tp > 1 and not setting.sequence_parallel
    cannot: tuple[str, ...] = ("tp without sequence parallelism: ranks of tp share the tokens",) * alone
    if layout.cp > 1 and layout.cp_method != "zigzag":
        cannot += (f"context parallelism by {layout.cp_method}: a ring of head and tail (zigzag)",)
    return _Said(flags, cannot=cannot)


def _stages(setting: Setting) -> _Said:
    layout, virtual = setting.layout, setting.layout.virtual or 1
    flags = ("-pp", f"{layout.pp}", "-vp", f"{virtual}" if virtual > 1 else "None")
    other = layout.schedule in ("gpipe", *V_SHAPED)
    cannot = (f"schedule {layout.schedule}: {'interleaved' if virtual > 1 else '1f1b'}",) * other
    if layout.pp == 1 or has_equal_stages(setting):
        return _Said(flags, ("model.pipeline_model_parallel_layout=null",), cannot)
    letters = ["t" * len(blocks) for blocks in blocks_of_stages(setting)]
    letters[0], letters[-1] = f"E{letters[0]}", f"{letters[-1]}L"
    return _Said((*flags, "--pipeline_model_parallel_layout", "|".join(letters)), cannot=cannot)


def _sharding(setting: Setting) -> _Said:
    layout, stage = setting.layout, zero_stage(setting)
    if layout.shards > 1 and stage not in (0, 1):
        kept = {2: "weights that stay gathered", MIXED: "weights of some blocks that stay gathered"}
        words = f"{kept.get(stage)}: all are gathered again for the backward pass (ZeRO stage 3)"
        apart = (
            f"ddp.num_distributed_optimizer_instances={layout.dp}",
            "ddp.outer_dp_sharding_strategy=no_shard",
        )
        copies = apart if layout.dp > 1 else ()
        return _Said(("--use_megatron_fsdp", "true"), copies, (words,) if stage in kept else ())
    shares = layout.shards > 1 and stage == 1
    overrides: tuple[str, ...] = (
        "ddp.use_megatron_fsdp=false",
        f"ddp.use_distributed_optimizer={str(shares).lower()}",
    )
    if layout.dp > 1 and shares:
        overrides += (f"ddp.num_distributed_optimizer_instances={layout.dp}",)
    return _Said((), overrides)


def _recompute(setting: Setting) -> _Said:
    what = recomputation(setting)
    if what == NONE:
        names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        return _Said((), tuple(f"model.{name}=null" for name in names))
    if what == SELECTIVE:
        words = "recomputation of norms and gates: of norms alone, which takes more memory"
        return _Said(("--recompute_modules", "layernorm"), cannot=(words,))
    if isinstance(what, int):
        return _Said(("-rl", f"{what}"))
    most = max(len(blocks) for blocks in blocks_of_stages(setting))
    words = "recomputation that differs between stages or blocks: all blocks are made again"
    return _Said(("-rl", f"{most}"), cannot=(words,) * (what != FULL))


def _host(setting: Setting) -> _Said:
    plans, away = block_plans(setting), offloaded(setting)
    leaving = [one.offload for one in plans]
    count = sum(leaving)
    rest = [
        name for name in away if name not in ("optimizer", "master") and not name.startswith("activations")
    ]
    # Megatron-Core lets the first layers' activations leave, and refuses it beside stages and recomputation.
    says = setting.layout.pp == 1 and recomputation(setting) == NONE and all(leaving[:count])
    flags = ("-ol", f"{count}") if count and says else ()
    rest += [f"activations of {count} blocks"] if count and not says else []
    states = {"optimizer", "master"} & set(away)
    overrides: tuple[str, ...] = (f"optimizer.optimizer_cpu_offload={str(len(states) == 2).lower()}",)
    overrides += ("optimizer.optimizer_offload_fraction=1.0",) * (len(states) == 2)
    rest += sorted(states) if len(states) == 1 else []
    words = (f"{', '.join(rest)} on the host: they stay on the device",) if rest else ()
    return _Said(flags, overrides, (*words, *states_in_other_formats(setting)))


def _formats(setting: Setting) -> _Said:
    cannot: tuple[str, ...] = (
        "formats of single products or blocks: all run in the plan's precision (scrimp export-precision "
        "writes a file of them)",
    ) * uses_formats(setting)
    if setting.precision in _DTYPES:
        return _Said(("-c", _DTYPES[setting.precision]), cannot=cannot)
    words = f"precision {setting.precision}: bf16"
    return _Said(("-c", "bf16"), cannot=(*cannot, words))
