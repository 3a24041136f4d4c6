"""How a step is run, where a program leaves it to its user: graphs, the exchange of tokens, fused experts.

Problem  Two runs of one program, model and layout differ by half where one launches every kernel from Python and the
         other replays a graph; a recipe sets this beside the layout.
Method   What Megatron-Core calls cuda_graph_scope, moe_token_dispatcher_type with its flex back ends,
         overlap_moe_expert_parallel_comm, the operation fuser of grouped experts, fp8_dot_product_attention,
         fp8_output_proj.
         A line that says none of it has what users usually set (`usual_execution`): for models with experts what
         most recipes of Megatron-Bridge do on such machines, else Megatron-Core's defaults.
Limits   Recipes of one machine differ between releases and models: by the usual one, published runs with experts are
         predicted within 14 % in the median, by their own within 9 %. Other programs have one way each, which their
         files in `softwares/` say.
Checked  tests/planner/layout/test_execution.py
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from scrimp.config import nearest_word
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import ConfigError
from scrimp.models.shapes import ModelSizes
from scrimp.planner.hardware import Cluster

STEP, ATTENTION, ROUTER = "step", "attention", "router"
GRAPHS = (STEP, ATTENTION, ROUTER)
ALL_TO_ALL = "alltoall"
DISPATCHERS = (ALL_TO_ALL, "deepep", "hybridep")
_OF_A_BOARD = 8
"""GPUs that NVLink joins without a rack of switches."""
_HOPPER = ("h100", "h200")
OF_TORCHTITAN = ("async_tp",)
"""What users of TorchTitan set; all else is set by users of Megatron."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What a user sets; an empty one is what the program does by itself."""

    graphs: tuple[str, ...] = ()
    """Parts that are CUDA graphs, which the host launches at once: attention (with norms), router (with what prepares
    the exchange, and shared experts), step (everything)."""
    dispatcher: str = ALL_TO_ALL
    """How tokens travel: alltoall sends one copy to each expert, by NCCL; deepep and hybridep one to each rank, and
    one to each node."""
    overlap_experts: bool = False
    """Whether that runs beside another micro-batch's computing."""
    fused_experts: bool = False
    """Whether experts' products, gate and quantization are one kernel each way."""
    async_tp: bool = False
    """Whether the exchanges of tp run in pieces beside the products that need them (TorchTitan's
    enable_async_tensor_parallel; Megatron does so by itself)."""
    fp8_attention: bool = False
    """Whether attention multiplies in 8 bits."""
    fp8_head: bool = False
    """Whether the head multiplies in the blocks' precision."""


def usual_execution(
    software: str, model: ModelSizes, cluster: Cluster, layout: ResolvedLayout, recompute: str | int = "none"
) -> Execution:
    """What users of a program set where a line does not say it.

    Source: Megatron-Bridge, src/megatron/bridge/perf_recipes, releases 25.11 to 26.06: of machines whose NVLink joins
    more than eight GPUs most have graphs of attention and router and HybridEP's dispatcher; of Hopper GPUs most
    overlap the exchange where ranks have several stages, and else have HybridEP; of others the recipes have nothing in
    common. Megatron-Core overlaps nothing beside full recomputation (its transformer_config).
    """
    node, experts_are_shared = cluster.groups[0].node, layout.ep > 1
    if software != "megatron" or model.blocks[-1].routed_parameters == 0:
        return Execution()
    if node.devices > _OF_A_BOARD:
        dispatcher = "hybridep" if experts_are_shared or layout.tp > 1 else ALL_TO_ALL
        return Execution(graphs=(ATTENTION, ROUTER), dispatcher=dispatcher)
    if node.device.name.partition("-")[0] not in _HOPPER or not experts_are_shared:
        return Execution()
    if (layout.virtual or 1) > 1 and recompute != "full":
        return Execution(overlap_experts=True)
    return Execution(dispatcher="hybridep")


def check_execution(execution: Execution, software: str) -> None:
    """Refuse what no program does.

    Raises:
        ConfigError: a word is not known, or the program's users do not set it.
    """
    words: list[tuple[str, str, tuple[str, ...]]] = [
        ("execution.graphs", one, GRAPHS) for one in execution.graphs
    ]
    for key, word, known in [*words, ("execution.dispatcher", execution.dispatcher, DISPATCHERS)]:
        if word not in known:
            near = nearest_word(word, known)
            raise ConfigError(
                f"{key} is not known",
                got=word,
                expected=f"one of {', '.join(known)}",
                do=f"did you mean {near}?" if near else "see docs/planner.md",
            )
    given = [one.name for one in fields(execution) if getattr(execution, one.name) != one.default]
    for name in given:
        program = "torchtitan" if name in OF_TORCHTITAN else "megatron"
        if not software.startswith(program):
            raise ConfigError(
                f"execution.{name} is not set by users of {software}",
                expected=f"software {program}, or an execution without it",
            )
