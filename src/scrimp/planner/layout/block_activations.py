"""Bytes that a block keeps of a pass until its backward pass, part by part.

Problem  Programs differ in what recomputation makes again: a norm, a gate, every second product, or all of a block.
Method   What autograd saves of one block is a sum of parts, for n tokens in bytes a token (D width, A and N widths of
         queries and keys, V of results, F of gates; H heads, s the sequence)::

             stream   2 * 2 D             inputs of both norms (4 D where norms follow attention and MLP too)
             norm     D and D             outputs of norms, which products read: 2 bytes each, or of its codes
             qkv      2 (A + 2 N)         queries, keys, values; A + N once more for each other copy that is kept
             att      2 V                 result of attention
             mlp      2 * 2 F             outputs of gate and up
             swiglu   F                   gates times up, which the last product reads
             scores   5 H s               where attention is not fused: softmax, dropout and its mask

         Where a schedule lets gradients of weights wait, inputs and outputs of every layer, I + O: 2 bytes each, or of
         its codes (`later_bytes`).
         Selective recomputation keeps a share of each part: that of the software's file, or none of the parts that a
         setting names (`Setting.recompute_parts`). Full recomputation keeps the block's input alone.
Limits   Tokens of experts are equally shared. Of gates and ups that are products of two factors, what lies between the
         factors is counted twice. Statistics of norms and of attention are left out: below 1 %.
Source   Korthikanti et al., arXiv 2205.05198, section 4 and table 2; flash attention keeps no scores
Checked  tests/planner/layout/test_rank_bytes.py
"""

from __future__ import annotations

from collections.abc import Mapping

from scrimp.config.activations import GATED, HEADS
from scrimp.models import BlockSpec, LinearSpec
from scrimp.models.shapes import value_width
from scrimp.models.spec import VectorSpec
from scrimp.planner.layout.kernels import UNFUSED, element_bytes
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Setting

PARTS = ("stream", "norm", HEADS, "att", "mlp", GATED, "scores")
NAMED = PARTS[1:]
"""Those that a setting can name."""
BESIDE = {"mlp": (GATED, "norm"), "att": (HEADS,)}
"""Parts that are made again on the way to another: gate and up are made of the norm's output, and give what the last
product reads; attention's result is made of queries, keys and values. The products of routed experts are not made
again, whatever is named."""


def held_parts(block: BlockSpec, setting: Setting) -> Mapping[str, float]:
    """What a block keeps of one pass with nothing made again, by part."""
    if id(block) not in setting.held_parts:
        setting.held_parts[id(block)] = _held_parts(block, setting)
    return setting.held_parts[id(block)]


def _held_parts(block: BlockSpec, setting: Setting) -> dict[str, float]:
    attends, layout, software = block.attention, setting.layout, setting.software
    width, tokens = setting.model.width, setting.tokens
    names = {one.name for one in block.layers if isinstance(one, VectorSpec)}
    keys = attends.num_kv_heads * attends.head_size
    values = attends.num_kv_heads * (attends.value_size or attends.head_size)
    # A norm of queries and keys keeps what it read: a copy, since these are pieces of a larger tensor.
    copies = software.held_rotations + ("attention.q_norm.weight" in names)
    found = dict.fromkeys(PARTS, 0.0)
    found[HEADS] = 2.0 * tokens * (copies * (attends.width + keys) + values) / layout.tp
    found["att"] = 2.0 * tokens * value_width(attends) / layout.tp
    # Before a norm that follows attention or the MLP lies one input more. OLMo 2 has none but these.
    norms = sum(f"{name}.weight" in names for name in ("attention_norm", "mlp_norm"))
    follow = sum(f"{name}.weight" in names for name in ("attention_output_norm", "mlp_output_norm"))
    found["stream"] = boundary_bytes(setting) * (2.0 + follow * (norms > 0))
    normed: set[str] = set()
    for linear in block.linears:
        weighted_before = linear.experts > 1 and _is_last(linear) and not software.keeps_expert_outputs
        if linear.again == "mlp" and not weighted_before:
            found["mlp"] += 2.0 * tokens * linear.chosen * linear.outputs / layout.tp
        part = linear.name.partition(".")[0]
        reads_norm = linear.experts == 1 and linear.inputs == width and not _is_last(linear)
        if linear.origin == "kept" or (reads_norm and part in normed):
            continue
        if reads_norm:
            # What a norm gave is kept once, however many products read it.
            normed.add(part)
        size = element_bytes(setting.recipe(linear.name, "wgrad")) * tokens * linear.chosen * linear.inputs
        # Without sequence parallelism each rank of tp has what the norm gave; with it, where it keeps what it gathers.
        has_all = software.keeps_gathered or not setting.sequence_parallel
        is_whole = has_all and linear.cut == "outputs" and linear.experts == 1
        found[GATED if _is_last(linear) else "norm"] += size / (1 if is_whole else layout.tp)
    gated = [one for one in block.linears if one.again == "mlp" and len(one.rows) == 2]
    gates = sum(one.chosen * one.outputs / 2 for one in gated)
    found["mlp"] += software.kept_gates * 2.0 * tokens * gates / layout.tp
    found["norm"] += software.kept_norms * 2.0 * boundary_bytes(setting)
    if software.attention_kernel == UNFUSED:
        found["scores"] = 5.0 * tokens * setting.sequence * attends.num_heads / layout.tp
    return found


def _is_last(linear: LinearSpec) -> bool:
    """Whether a product reads what gates and up gave."""
    return linear.cut == "inputs" and linear.origin != "kept"


def kept_bytes(block: BlockSpec, setting: Setting) -> float:
    """All of it."""
    return sum(held_parts(block, setting).values())


def selective_shares(block: BlockSpec, setting: Setting) -> Mapping[str, float]:
    """What selective recomputation keeps of each part of a block; a part that is not named is kept."""
    if setting.recompute_parts:
        return dict.fromkeys(named_parts(block, setting), 0.0)
    software = setting.software
    if block.attention.value_size is not None and software.selective_latent:
        return dict(software.selective_latent)
    if block.routed_parameters and software.selective_experts:
        return dict(software.selective_experts)
    return dict(software.selective)


def named_parts(block: BlockSpec, setting: Setting) -> set[str]:
    """The parts of a block that a setting names, with those that are made on the way."""
    named = set(setting.recompute_parts) - ({"mlp"} if block.routed_parameters else set())
    return {*named, *(beside for part in named for beside in BESIDE.get(part, ()))}


def boundary_bytes(setting: Setting) -> float:
    """The residual stream of a pass between two blocks."""
    shared = setting.layout.tp if setting.sequence_parallel else 1
    return 2.0 * setting.tokens * setting.model.width / shared


def waiting_bytes(block: BlockSpec, plan: BlockPlan, setting: Setting) -> float:
    """What a block holds on the device of each pass in flight."""
    if plan.offload:
        return 0.0
    boundary = boundary_bytes(setting)
    stays = 0.0 if setting.offload.residuals else boundary
    if plan.recompute == FULL:
        return stays
    parts = held_parts(block, setting)
    shares = selective_shares(block, setting) if plan.recompute == SELECTIVE else {}
    size = sum(one * shares.get(name, 1.0) for name, one in parts.items())
    return max(size - boundary, 0.0) + stays


def made_again_bytes(block: BlockSpec, plan: BlockPlan, setting: Setting) -> float:
    """What a block has on the device besides while its backward pass runs: what is made again, or comes back: of what
    waits on the host another block's comes at the same time."""
    kept = kept_bytes(block, setting)
    if plan.offload:
        return 2.0 * kept
    if plan.recompute == NONE:
        return 0.0
    dropped = kept - waiting_bytes(block, plan, setting)
    if plan.recompute == SELECTIVE and (setting.recompute_parts or dropped <= 0.0):
        return dropped
    # Of a search's selective recomputation all but the stream, below 1 % of a device more than what it makes again: so
    # that room which blocks made again in full leave is never too much (`block_choices`).
    return kept - boundary_bytes(setting)


def working_bytes(block: BlockSpec, setting: Setting) -> float:
    """What the backward pass of a block has of its own: gradients of gate and up, and of the stream before and after
    it."""
    return setting.software.gate_gradients * held_parts(block, setting)["mlp"] + 2.0 * boundary_bytes(setting)


def backward_bytes(block: BlockSpec, plan: BlockPlan, setting: Setting) -> float:
    """What a block has on the device besides what waits, while its backward pass runs."""
    return made_again_bytes(block, plan, setting) + working_bytes(block, setting)


def later_bytes(block: BlockSpec, setting: Setting) -> float:
    """What a block holds of a pass whose gradients of weights are still to be made, and nothing else: of each layer its
    input and the gradient of its result."""
    found, layout = 0.0, setting.layout
    for linear in block.linears:
        each, ranks = element_bytes(setting.recipe(linear.name, "wgrad")), layout.tp
        cut = {"outputs": (1.0, ranks), "inputs": (ranks, 1.0)}.get(linear.cut or "", (ranks, ranks))
        if linear.experts > 1:
            cut = ranks, ranks
        inputs, outputs = linear.inputs / cut[0], linear.outputs / cut[1]
        found += each * setting.tokens * linear.chosen * (inputs + outputs)
    return found
