"""Seconds in which the host launches the passes of a block; a device that is faster waits for it.

Problem  Small experts in 8 bits are hundreds of kernels a layer, which Python launches more slowly than they run.
Method   Operations that a module runs take `Software.host_ops` times as long as torch's plain ones
         (`Node.host_op_seconds`); what a loop in C++ launches for each expert takes one plain one each::

             forward = (host_ops * of modules + of experts) * host_op_seconds

         A part that is a graph takes nothing. Backward passes launch twice as much. Once a layer, forward, the host
         reads how many tokens each expert has, or in some programs how long the longest sequence is; until the exchange
         or attention is launched the device has nothing to do.
Limits   Numbers of operations are estimates but for routing. Otherwise the host is taken to be far ahead.
Source   Kernels of router and what prepares the exchange: 31 for all-to-all, 17 for DeepEP (Optimizing DeepSeek-V3
         Training Performance on NVIDIA GB200 NVL72, Megatron-LM b6bf017a, docs/discussions, sections 2.1.4 and 2.2.1).
         Experts one by one: 33 us for each small product of multi-stream cuBLAS on GB200 (TransformerEngine PR 3134),
         where a plain operation takes 33 to 37 us.
Checked  tests/planner/layout/test_host_times.py: that guide's eager step of DeepSeek-V3
"""

from __future__ import annotations

from collections.abc import Collection

from scrimp.config.activations import GATED, HEADS
from scrimp.models import BlockSpec, LinearSpec
from scrimp.planner.layout.execution import ALL_TO_ALL, ATTENTION, ROUTER, STEP
from scrimp.planner.layout.made_operands import made_operands
from scrimp.planner.layout.setting import Setting

_OTHER_OPS = 10
"""Attention, residuals and reshapes: an estimate."""
_TRAFFIC_OPS = 2
_ROUTING_OPS, _FUSED_ROUTING_OPS = 31, 17
_EXCHANGE_OPS = 10
"""Sorting tokens, sending them, and both back: an estimate."""
_OVERLAP_OPS = 40
"""What overlapped exchanges cost besides: a layer is four nodes (attention, dispatch, experts, combine), of which each
waits for an event, sets and resets its stream, detaches and marks its tensors and records an event: ten calls
(Megatron-LM core_v0.15.0, megatron/core/pipeline_parallel/utils.py, ScheduleNode)."""
_CHECKPOINT_OPS = 10
"""What a part that is made again costs besides, in modules: random states kept and set, its graph built again. An
estimate; leaving out `qkv` gave that guide 611 TFLOP/s instead of 566."""
_CLAMP_OPS = 5
"""Gate and up, clamped apart and joined."""
_ROTATION_OPS = 20
"""Ten each for queries and keys: cut, cosine, halves, sine, sum and joined."""
_BIAS_OPS = 3
"""For each expert's bias: product with the router's share, sum, and its part of joining them."""


def layer_ops(linear: LinearSpec, recipe: str, setting: Setting) -> float:
    """Plain operations of a layer's forward pass that the host launches. A module's operand in 8 or 4 bits takes two
    more, of experts one for each, which run one by one."""
    graphs, is_low = setting.execution.graphs, recipe not in ("bf16", "fp16", "fp32")
    if STEP in graphs or not setting.software.host_ops:
        return 0.0
    if linear.experts > 1:
        # Products and operands of both layers: half of one kernel.
        each = 0.5 if setting.execution.fused_experts else 1.0 + is_low
        return matrices(linear, setting) * each
    graph = ATTENTION if linear.name.startswith("attention") else ROUTER
    counted = made_operands("fprop", recipe, setting)
    making = 2 * is_low if counted is None else counted[0]
    return 0.0 if graph in graphs else setting.software.host_ops * (1 + making)


def other_ops(block: BlockSpec, setting: Setting) -> float:
    """The same of all else."""
    graphs, software = setting.execution.graphs, setting.software
    if STEP in graphs or not software.host_ops:
        return 0.0
    experts = [one for one in block.linears if one.experts > 1]
    modules, plain = 0, 0
    if ATTENTION not in graphs:
        others = sum(one.again not in (GATED, "mlp") for one in block.traffic)
        modules += _OTHER_OPS + _TRAFFIC_OPS * others
        plain += _ROTATION_OPS * rotates_apart(block, setting)
    if ROUTER not in graphs:
        modules += _TRAFFIC_OPS * sum(one.again == GATED for one in block.traffic)
    if experts:
        routing = _ROUTING_OPS if setting.execution.dispatcher == ALL_TO_ALL else _FUSED_ROUTING_OPS
        modules += _EXCHANGE_OPS + routing * (ROUTER not in graphs)
        adds = adds_expert_biases(block, setting)
        plain += (matrices(experts[0], setting) * _BIAS_OPS + _CLAMP_OPS) * adds
        plain += _OVERLAP_OPS * setting.execution.overlap_experts
    return software.host_ops * modules + plain


def matrices(linear: LinearSpec, setting: Setting) -> int:
    """How many weight matrices of the layer this rank holds."""
    return linear.experts // setting.layout.ep if linear.experts > 1 else 1


def again_seconds(block: BlockSpec, setting: Setting, named: Collection[str]) -> float:
    """What the host launches more, backward, for parts that are made again (`block_activations`)."""
    graphs, software = setting.execution.graphs, setting.software
    if STEP in graphs or not software.host_ops:
        return 0.0
    outside = {GATED, "mlp"}
    launched = [part for part in named if part in outside or ATTENTION not in graphs]
    modules = float(_CHECKPOINT_OPS * len(launched))
    if HEADS in launched:
        made = [one for one in block.linears if one.name.startswith("attention.") and one.cut == "outputs"]
        modules += sum(layer_ops(one, setting.recipe(one.name, "fprop"), setting) for one in made) / (
            software.host_ops
        )
    return software.host_ops * modules * setting.place.node.host_op_seconds


def idle_seconds(block: BlockSpec, setting: Setting) -> float:
    """How long the device waits, forward, after the host has read where tokens go, or how long sequences are."""
    software = setting.software
    routed = any(one.experts > 1 for one in block.linears) and setting.layout.ep > 1
    if STEP in setting.execution.graphs:
        return 0.0
    operations = software.attention_reads + _EXCHANGE_OPS * routed
    return software.host_ops * operations * setting.place.node.host_op_seconds


def adds_expert_biases(block: BlockSpec, setting: Setting) -> bool:
    """Whether what experts give is added to their biases, and their gates clamped, by operations of their own."""
    apart = setting.software.unfused_experts and not setting.execution.fused_experts
    return apart and _has_expert_biases(block)


def rotates_apart(block: BlockSpec, setting: Setting) -> bool:
    """Whether queries and keys are rotated by operations of their own, as YaRN scales them; so they are taken to be
    where experts have biases: of gpt-oss alone both are published."""
    return setting.software.unfused_experts and _has_expert_biases(block)


def _has_expert_biases(block: BlockSpec) -> bool:
    down = [one.name for one in block.linears if one.experts > 1][-1:]
    return any(one.name == f"{name}.bias" for name in down for one in block.layers)
