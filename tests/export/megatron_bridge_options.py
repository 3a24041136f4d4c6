"""The options of Megatron-Bridge's performance launcher that concern a layout, as its parser had them at 067f987d.

Copied from scripts/performance/argument_parser.py (Apache 2.0, NVIDIA). Whatever else stands in a command must be an
override of a key that the configuration has.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

_GPUS = ("h100", "b200", "b300", "gb200", "gb300", "vr200", "r100")
_DTYPES = ("bf16", "fp8_cs", "fp8_mx", "fp8_sc", "nvfp4")
KEYS = {
    "ddp.use_megatron_fsdp",
    "ddp.use_distributed_optimizer",
    "ddp.num_distributed_optimizer_instances",
    "ddp.outer_dp_sharding_strategy",
    "model.pipeline_model_parallel_layout",
    "model.recompute_granularity",
    "model.recompute_method",
    "model.recompute_num_layers",
    "optimizer.optimizer_cpu_offload",
    "optimizer.optimizer_offload_fraction",
}
"""Fields of DistributedDataParallelConfig, TransformerConfig and OptimizerConfig that an export may override."""


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "1", "t", "yes", "y", "false", "0", "f", "no", "n"):
        raise ValueError(text)
    return text.lower() in ("true", "1", "t", "yes", "y")


def _optional(text: str) -> int | None:
    return None if text == "None" else int(text)


def parsed(script: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Flags and overrides of the one command in a script."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-m", "--model_family_name", type=str.lower, required=True)
    parser.add_argument("-mr", "--model_recipe_name", type=str.lower, required=True)
    parser.add_argument("-ng", "--num_gpus", type=int, required=True)
    parser.add_argument("-g", "--gpu", type=str, choices=_GPUS, required=True)
    parser.add_argument("-c", "--compute_dtype", type=str, choices=_DTYPES, default="bf16")
    for short, name in (
        ("-gb", "global_batch_size"),
        ("-mb", "micro_batch_size"),
        ("-sl", "seq_length"),
        ("-tp", "tensor_model_parallel_size"),
        ("-pp", "pipeline_model_parallel_size"),
        ("-cp", "context_parallel_size"),
        ("-ep", "expert_model_parallel_size"),
        ("-rl", "recompute_num_layers"),
        ("-ol", "activation_offload_layers"),
    ):
        parser.add_argument(short, f"--{name}", type=int)
    parser.add_argument("-vp", "--virtual_pipeline_model_parallel_size", type=_optional, default=-1)
    parser.add_argument("-et", "--expert_tensor_parallel_size", type=int, nargs="?", const=None)
    parser.add_argument("--pipeline_model_parallel_layout", type=str)
    parser.add_argument("--recompute_modules", type=lambda text: text.split(","))
    parser.add_argument("--use_megatron_fsdp", type=_bool)
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    words = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
    assert words[:2] == ["python", "scripts/performance/setup_experiment.py"]
    assert words[-1] == "$@"
    found, rest = parser.parse_known_args(words[2:-1])
    overrides = dict(word.split("=", 1) for word in rest)
    assert overrides.keys() <= KEYS
    return vars(found), overrides
