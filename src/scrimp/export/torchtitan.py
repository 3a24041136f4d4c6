"""A plan as a configuration of TorchTitan: a Python file with a function that its ConfigManager loads.

Problem  TorchTitan's configuration is a function that returns a `Trainer.Config`; the options of its command line are
         frozen and will go. A name that it does not know must stop the run, not be ignored.
Method   The file takes the trainer's own configuration of the model, and sets fields of its dataclasses, which have
         slots: a field that another version has not raises. With B sequences of a step over R = dp x fsdp readers, b
         of a micro-batch::

             pp 1    local_batch_size b                             gradients accumulate over B / (R b) of them
             pp > 1  local_batch_size B / R, microbatch_size b      one pass of the pipeline is a step

ZeRO     FSDP2 gathers blocks' weights again for the backward pass ("default", stage 3; the head's stay, as Scrimp's do)
         or keeps them ("never", 2). Gradients are reduced in each micro-batch. In a pipeline torch's stages keep
         weights and reduce gradients after the last micro-batch: that is stage 1, and the only one.
Limits   Formats are those of whole layers. Blocks recompute alike. What is on the host is all of weights, gradients and
         states, or nothing. Experts are whole (no etp).
Source   TorchTitan 0.3.0: config/manager.py, config/configs.py, distributed/fsdp.py, distributed/pipeline_parallel.py
Checked  tests/export/test_torchtitan.py: against the fields of 0.3.0, and by its own parser where it is installed
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.config.pipeline import V_SHAPED
from scrimp.errors import PlanError
from scrimp.export.layout_file import (
    MIXED,
    LayoutExport,
    comments,
    offloaded,
    recomputation,
    states_in_other_formats,
    uses_formats,
    zero_stage,
)
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Setting
from scrimp.planner.layout.stages import blocks_of_stages

VERSION = "0.3.0"
FUNCTION = "scrimp_plan"
MODELS = {
    "llama-3.1-8b": ("llama3", "llama3_8b", "8B"),
    "llama-3.1-70b": ("llama3", "llama3_70b", "70B"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b", "0.6B"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b", "1.7B"),
    "qwen3-14b": ("qwen3", "qwen3_14b", "14B"),
    "qwen3-32b": ("qwen3", "qwen3_32b", "32B"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
}
"""Preset to TorchTitan's module, configuration and flavor."""
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
_CONVERTERS = {
    "fp8_row": 'Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)',
    "mxfp8": 'MXFP8LinearConverter.Config(fqns=["layers"], model_compile_enabled=True)',
    "nvfp4": 'NVFP4LinearConverter.Config(fqns=["layers"], model_compile_enabled=True)',
}
"""Recipe to the converter of all layers of blocks."""
_ALL_ON_HOST = ("optimizer", "master", "gradients", "weights")
_NOTES = (
    "TorchTitan keeps fp32 weights and casts them as they are gathered, where Scrimp has bf16 weights and fp32 masters",
    "the plan's seconds and bytes are those of the software that it was made for; "
    'scrimp plan --batch predicts this trainer where its line says "software": "torchtitan"',
)


@dataclass(frozen=True)
class _Said:
    """What is written, and what is not."""

    lines: tuple[str, ...]
    imports: tuple[str, ...] = ()
    cannot: tuple[str, ...] = ()


def to_torchtitan(setting: Setting, model: str) -> LayoutExport:
    """A plan as TorchTitan's configuration.

    Raises:
        PlanError: TorchTitan has not this model, or ranks share experts' widths.
    """
    if model not in MODELS:
        raise PlanError(
            f"TorchTitan {VERSION} has no configuration of {model} that is the same model",
            expected=", ".join(MODELS),
            do="plan for one of these",
        )
    if setting.layout.etp > 1:
        raise PlanError(
            f"TorchTitan {VERSION} has no ranks that share an expert",
            got=f"layout.etp {setting.layout.etp}",
            do="plan with --layout.etp 1",
        )
    module, base, flavor = MODELS[model]
    parts = (
        _batch(setting),
        _degrees(setting),
        _stages(setting),
        _zero(setting),
        _recompute(setting),
        _host(setting),
        _formats(setting, module, flavor),
    )
    cannot = tuple(one for part in parts for one in part.cannot)
    imports = sorted(
        {
            f"from torchtitan.models.{module}.config_registry import {base}",
            "from torchtitan.trainer import Trainer",
            *(line for part in parts for line in part.imports),
        }
    )
    head = comments(
        cannot,
        _NOTES,
        (
            f"A plan for {setting.layout.ranks:,} ranks, written by Scrimp for TorchTitan {VERSION}.",
            f"NGPU={setting.layout.ranks} MODULE=<this file's module> CONFIG={FUNCTION} ./run_train.sh",
        ),
    )
    body = [f"    {line}" for part in parts for line in part.lines]
    function = [f"def {FUNCTION}() -> Trainer.Config:", f"    config = {base}()", *body, "    return config"]
    text = "\n".join([*head, "", *imports, "", "", *function, ""])
    return LayoutExport(
        text, f"python -m torchtitan.train --module <its module> --config {FUNCTION}", cannot, _NOTES
    )


def _batch(setting: Setting) -> _Said:
    local = setting.micro_batch * (setting.micro_batches if setting.layout.pp > 1 else 1)
    return _Said(
        (
            f"config.training.seq_len = {setting.sequence}",
            f"config.training.local_batch_size = {local}",
            f"config.training.global_batch_size = {setting.global_batch}",
            'config.training.dtype = "float32"',
            'config.training.mixed_precision_param = "bfloat16"',
        )
    )


def _degrees(setting: Setting) -> _Said:
    layout = setting.layout
    named = {
        "data_parallel_replicate_degree": layout.dp,
        "data_parallel_shard_degree": layout.fsdp,
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": setting.sequence_parallel,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
    }
    lines = [f"config.parallelism.{name} = {value}" for name, value in named.items()]
    cannot: tuple[str, ...] = ()
    if layout.cp > 1:
        if layout.cp_method == "zigzag":
            lines.append('config.parallelism.context_parallel_load_balancer = "headtail"')
        else:
            cannot = (f"context parallelism by {layout.cp_method}: it runs head and tail (zigzag)",)
    return _Said(tuple(lines), cannot=cannot)


def _stages(setting: Setting) -> _Said:
    layout = setting.layout
    if layout.pp == 1:
        return _Said(())
    virtual = layout.virtual or 1
    auto = "interleaved" if virtual > 1 else "1f1b"
    schedule = layout.schedule if layout.schedule in _SCHEDULES else auto
    cannot = (f"schedule {layout.schedule}: {auto}",) * (layout.schedule in V_SHAPED)
    parts = [[f"layers.{index}" for index in blocks] for blocks in blocks_of_stages(setting)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return _Said(
        (
            f'config.parallelism.pipeline_parallel_schedule = "{_SCHEDULES[schedule]}"',
            f"config.parallelism.pipeline_parallel_microbatch_size = {setting.micro_batch}",
            "config.parallelism.module_fqns_per_model_part = [",
            *(f"    {part!r},".replace("'", '"') for part in parts),
            "]",
            "config.training.disable_cuda_graphs = True",
        ),
        cannot=cannot,
    )


def _zero(setting: Setting) -> _Said:
    layout, stage = setting.layout, zero_stage(setting)
    if layout.shards == 1:
        return _Said(())
    runs = "never" if layout.pp > 1 or stage not in (3, MIXED) else "default"
    lines = (f'config.parallelism.fsdp_reshard_after_forward = "{runs}"',)
    is_one_pass = setting.micro_batches == 1
    if layout.pp > 1 and stage != 1:
        return _Said(lines, cannot=(f"ZeRO stage {stage} in a pipeline: its stages run stage 1",))
    if layout.pp == 1 and stage == 1 and not is_one_pass:
        return _Said(lines, cannot=("ZeRO stage 1: gradients are reduced in each micro-batch (stage 2)",))
    if stage == MIXED:
        return _Said(lines, cannot=("weights of some blocks that stay gathered: those of none do",))
    return _Said(lines)


def _recompute(setting: Setting) -> _Said:
    what = recomputation(setting)
    cannot: tuple[str, ...] = ()
    start = "from torchtitan.distributed.activation_checkpoint import"
    if what == NONE:
        return _Said(("config.activation_checkpoint = None",))
    if what == SELECTIVE:
        words = "recomputation of norms and gates: it makes all again but most products and attention"
        policy, cannot = "SelectiveAC", (words,)
    elif what == FULL:
        policy = "FullAC"
    else:
        words = (
            f"recomputation of {what if what == MIXED else f'{what} blocks of each stage'}: all blocks are"
        )
        policy, cannot = "FullAC", (words,)
    return _Said((f"config.activation_checkpoint = {policy}.Config()",), (f"{start} {policy}",), cannot)


def _host(setting: Setting) -> _Said:
    away = offloaded(setting)
    everything = set(away) == set(_ALL_ON_HOST)
    line = f"config.training.enable_cpu_offload = {everything}"
    other = states_in_other_formats(setting)
    if not away or everything:
        return _Said((line,), cannot=other)
    return _Said((line,), cannot=(f"{', '.join(away)} on the host: they stay on the device", *other))


def _formats(setting: Setting, module: str, flavor: str) -> _Said:
    compiles = ("config.compile.enable = True", 'config.compile.components = ["model", "loss"]')
    single = ("formats of single products or blocks: all run in the plan's precision",) * uses_formats(
        setting
    )
    if setting.precision == "bf16":
        return _Said(compiles, cannot=single)
    if setting.precision not in _CONVERTERS:
        words = f"precision {setting.precision}: linear layers run in bf16"
        return _Said(compiles, cannot=(*single, words))
    converter = _CONVERTERS[setting.precision]
    kind = converter.split(".")[0]
    imports = (
        f"from torchtitan.components.quantization import {kind}",
        f"from torchtitan.models.{module} import model_registry",
    )
    registry = f'config.model_spec = model_registry("{flavor}", converters=[{converter}])'
    return _Said((*compiles, registry), imports, single)
