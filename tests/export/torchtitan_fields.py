"""The dataclasses of TorchTitan 0.3.0 that an exported plan sets: their fields, types and slots, and nothing else.

Copied from torchtitan/config/configs.py and distributed/activation_checkpoint.py of that release (BSD 3-Clause, Meta
Platforms). A plan is executed against them where TorchTitan is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, Literal, get_type_hints

from scrimp.json_files import as_typed


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    max_norm: float = 1.0
    steps: int = 10000
    enable_cpu_offload: bool = False
    disable_cuda_graphs: bool = False
    dtype: Literal["bfloat16", "float32"] = "float32"
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    mixed_precision_reduce: Literal["float32"] = "float32"
    gc_freq: int = 50
    gc_debug: bool = False


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    enable_fsdp_symm_mem: bool = False
    tensor_parallel_degree: int = 1
    enable_sequence_parallel: bool = True
    spmd_backend: Literal["partial_dtensor", "full_dtensor", "spmd_types"] = "spmd_types"
    pipeline_parallel_degree: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None
    pipeline_parallel_first_stage_less_layers: int = 1
    pipeline_parallel_last_stage_less_layers: int = 1
    pipeline_parallel_layers_per_stage: int | None = None
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: str | None = ""
    pipeline_parallel_microbatch_size: int = 1
    context_parallel_degree: int = 1
    context_parallel_load_balancer: str | None = "headtail"
    context_parallel_ptrr_mask_key: str | None = None
    expert_parallel_degree: int = 1


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    enable: bool = False
    enable_async_tensor_parallel: bool = False
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    backend: str = "inductor"


@dataclass(kw_only=True, slots=True)
class Policy:
    """A policy of activation checkpointing."""

    name: str


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """Sections that a plan may set."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    activation_checkpoint: Any = None
    model_spec: Any = None


def configured(text: str) -> TrainerConfig:
    """What an exported file configures, every value checked against its field's type."""
    names: dict[str, Any] = {}
    with _modules():
        exec(compile(text, "plan.py", "exec"), names)
        config: TrainerConfig = names["scrimp_plan"]()
    for section in (config.training, config.parallelism, config.compile):
        hints = get_type_hints(type(section))
        for one in fields(section):
            as_typed(getattr(section, one.name), hints[one.name], origin=one.name, error=TypeError, do="")
    return config


@contextmanager
def _modules() -> Iterator[None]:
    """Modules of these names for what a file imports."""
    configurations = ("llama3_8b", "llama3_70b", "qwen3_14b", "qwen3_30b_a3b")
    converters = ("Float8LinearConverter", "MXFP8LinearConverter", "NVFP4LinearConverter")
    found: dict[str, dict[str, Any]] = {
        "torchtitan.trainer": {"Trainer": _holder(TrainerConfig)},
        "torchtitan.distributed.activation_checkpoint": {
            name: _holder(lambda name=name: Policy(name=name)) for name in ("FullAC", "SelectiveAC")
        },
        "torchtitan.components.quantization": {
            name: _holder(lambda name=name, **named: (name, named)) for name in converters
        },
    }
    for kind in ("llama3", "qwen3"):
        found[f"torchtitan.models.{kind}.config_registry"] = dict.fromkeys(configurations, TrainerConfig)
        found[f"torchtitan.models.{kind}"] = {
            "model_registry": lambda flavor, converters: (flavor, converters)
        }
    before = {name: sys.modules.get(name) for name in found}
    for name, values in found.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            sys.modules.pop(name)
            if module_before is not None:
                sys.modules[name] = module_before


def _holder(config: Any) -> Any:
    return type("Holder", (), {"Config": staticmethod(config)})
