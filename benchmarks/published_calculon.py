"""Calculon's predictions of published runs, from a checkout of its own repository.

Problem  A planner's error says little alone: Calculon (Isaev et al., SC 2023) predicts steps of Megatron's GPT from a
         few numbers too.
Method   Each row that Calculon can say is put into its words: its system files of the A100 (a100_80e, with which its
         own checks are made) and the H100, blocks of attention and an MLP, tp, pp and dp, interleaving, recomputation.
         A gated MLP stands as one of 1.5 times the width, which has as many FLOPs and parameters.
Limits   No other device; no groups of key heads, experts, context parallelism, shards of weights or offloading.
         Calculon has no head and no loss, and gives every stage as many blocks as the largest has.
Source   github.com/calculon-ai/calculon, caa4b11f, Apache-2.0
Run      python benchmarks/published_runs.py --calculon PATH
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.setting import Setting

SYSTEMS = {"a100-80": "a100_80e.json", "h100": "h100_80g_nvl8.json"}
DATA_TYPES = {"bf16": "float16", "fp16": "float16", "fp8_tensor": "float8"}
RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}
_NODE = 8


class Calculon:
    """Calculon as it lies in a folder.

    Args:
        checkout: of its repository.
    """

    def __init__(self, checkout: Path) -> None:
        sys.path.insert(0, str(checkout))
        self._module: Any = importlib.import_module("calculon")
        self._llm: Any = importlib.import_module("calculon.llm").Llm
        self._systems = {
            device: json.loads((checkout / "systems" / file).read_text(encoding="utf-8"))
            for device, file in SYSTEMS.items()
        }

    def step_seconds(self, setting: Setting, shape: ModelShape) -> float | None:
        """Seconds of a step of a setting and a model of this shape; None where Calculon cannot say or refuses it."""
        if not can_say(setting, shape):
            return None
        model = self._llm(self._llm.Application(application(setting, shape)), logging.getLogger("calculon"))
        try:
            run = self._llm.Execution.from_json(execution(setting))
            system = self._module.System(self._systems[setting.device.name])
            model.compile(system, run)
            model.run(system)
        except (self._llm.Error, AssertionError):
            return None
        return float(model.get_total_time())


def can_say(setting: Setting, shape: ModelShape) -> bool:
    """Whether Calculon has words for a setting."""
    layout = setting.layout
    is_plain = not (shape.experts or shape.latent_attention or shape.window or shape.next_token_modules)
    return (
        is_plain
        and shape.kv_heads == shape.heads
        and setting.device.name in SYSTEMS
        and setting.precision in DATA_TYPES
        and setting.recompute in RECOMPUTE
        and setting.offload == type(setting.offload)()
        and layout.fsdp == layout.cp == layout.ep == 1
    )


def application(setting: Setting, shape: ModelShape) -> dict[str, int]:
    """The model in its words."""
    return {
        "hidden": shape.width,
        "feedforward": round(shape.ffn_width * (1.5 if shape.gated else 1.0)),
        "seq_size": setting.sequence,
        "attn_heads": shape.heads,
        "attn_size": shape.head_size,
        "num_blocks": shape.layers,
    }


def execution(setting: Setting) -> dict[str, Any]:
    """The layout in its words."""
    layout, software = setting.layout, setting.software
    sequence_parallel = setting.sequence_parallel and layout.tp > 1
    full = setting.recompute == "full"
    # Neighbours of tp share a node first; other axes cross nodes where there are several.
    outside = int(layout.ranks > _NODE)
    return {
        "num_procs": layout.ranks,
        "tensor_par": layout.tp,
        "pipeline_par": layout.pp,
        "data_par": layout.dp,
        "tensor_par_net": int(layout.tp > _NODE),
        "pipeline_par_net": outside,
        "data_par_net": outside,
        "batch_size": setting.global_batch,
        "microbatch_size": setting.micro_batch,
        "datatype": DATA_TYPES[setting.precision],
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTE[str(setting.recompute)],
        "pipeline_interleaving": layout.virtual or 1,
        "optimizer_sharding": layout.zero == 1 and layout.dp > 1,
        "tensor_par_comm_type": "rs_ag" if sequence_parallel else "ar",
        "tensor_par_overlap": "ring" if software.hidden_exchanges > 0 and layout.tp > 1 else "none",
        "seq_par_ag_redo": sequence_parallel and not full,
        "data_par_overlap": software.hidden_gathers > 0 and layout.dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
