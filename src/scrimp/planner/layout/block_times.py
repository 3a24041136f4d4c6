"""Seconds of the passes of one block, of the head with its loss, and of the optimizer, on one device.

Method   The products of every linear layer, forward, for its input and for its weight; attention; and the bytes of
         all else, by the block's specification and the rates of `kernels`. Products in 8 or 4 bits cost the bytes of
         making their operands too. Routed experts are taken to be equally busy: of n tokens k n come to a rank, each
         of its experts gets as many.
         Exchanges within a block (tp, cp, experts) add what no computing hides; see `exposed`. A ring of cp runs beside
         attention alone, Ulysses beside nothing; copies that an exchange takes run alone. A pass that the host launches
         more slowly (`host_times`) takes as long as that. Experts that are fused write the down layer's operand, and
         the gradient of the gate's, as codes.
         Of the formats of a block's products nothing but `Products` follows: the passes of many sets of formats are
         counted at once, with arrays in it.
         What a level of recomputation makes again (`scrimp.config.activations`) is its part of the forward pass, as the
         block's specification says of each product and operation (`level_seconds`).
Limits   Where quantization was not counted by recipe (`product_times`), weights are made once a step, and count there.
Checked  tests/planner/layout/test_block_passes.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from scrimp.config.activations import GATED, HEADS, LEVELS
from scrimp.models import BlockSpec, LinearSpec
from scrimp.models.shapes import value_width
from scrimp.planner.layout.block_activations import named_parts
from scrimp.planner.layout.execution import ALL_TO_ALL
from scrimp.planner.layout.host_times import (
    adds_expert_biases,
    again_seconds,
    idle_seconds,
    layer_ops,
    other_ops,
    rotates_apart,
)
from scrimp.planner.layout.kernels import Kernels, element_bytes
from scrimp.planner.layout.made_operands import again_bytes
from scrimp.planner.layout.product_times import (
    Case,
    Products,
    case_of_products,
    counted_layer,
    gradient_sums,
    made_head,
    product_seconds,
)
from scrimp.planner.layout.setting import Setting
from scrimp.precision import GEMMS, HEAD

ASYNC_TP = 0.7
"""Share of tp's exchanges that run beside products in pieces: as Megatron's, which do too."""
_PARTS_BYTES = 1.0
"""Read for each byte that is reduced in pieces, to add up the parts of all ranks (stacked_partials in
torch/distributed/_symmetric_memory, _fused_matmul_reduce_scatter)."""
RING_GRADIENT_BYTES = 4.0
"""Bytes for each number of the gradients that go round a ring with keys and values: float32."""
_BIAS_BYTES = {True: (12.0, 12.0), False: (28.0, 40.0)}
"""For each number that experts give where biases are added apart; True: tokens travel by NCCL, with their router's
shares in bf16, else in float32 (`moe_router_dtype`; DeepEP and HybridEP take no other). Forward: bias by share is
written (4), added (6 read, 4 written), joined (8) and cast (6; in bf16 2, 4 and 2, 4, 0); backward: cast (6), joined
(4), cast (6) and, for bias and share each, multiplied (8) and summed up (4; in bf16 4 and 2, twice)."""
_CLAMP_BYTES = (16.0, 20.0)
"""For each number of a gate where experts have biases: gate and up are clamped by operations of their own before the
fused gate (weighted_bias_quick_geglu_impl): two read and write (8), joined (8); backward two of gradients and inputs
(12), joined (8)."""
_ROTATION_BYTES = (20.0, 24.0)
"""For each number of queries and keys beyond one fused pass, where YaRN scales them, which no fused kernel does
(apply_rotary_pos_emb, mscale): products with cosine and sine (8), half negated (2), joined (4), added (6), joined
(4), less 4; backward the same and what three uses add up."""
_SCALE_BYTES = {"fp8": 4 / 128, "int8": 4 / 128, "mxfp8": 1 / 32, "nvfp4": 1 / 16}
"""Bytes of scales that lie along rows, for each number, by recipe."""


@dataclass(frozen=True)
class PassSeconds:
    """One pass."""

    compute: float
    communication: float = 0.0
    """That no computing hides."""
    hidden: float = 0.0
    """Seconds of exchanges beside computing."""

    @property
    def total(self) -> float:
        """From its beginning to its end."""
        return self.compute + self.communication

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            self.compute + other.compute,
            self.communication + other.communication,
            self.hidden + other.hidden,
        )

    def times(self, count: int) -> PassSeconds:
        """So many of them, one after the other."""
        return PassSeconds(count * self.compute, count * self.communication, count * self.hidden)

    def slowed(self, contention: float) -> PassSeconds:
        """With what each second of a hidden exchange adds to computing."""
        return PassSeconds(self.compute + contention * self.hidden, self.communication, self.hidden)


@dataclass(frozen=True)
class BlockSeconds:
    """Both passes of one block and one micro-batch."""

    forward: PassSeconds
    backward: PassSeconds
    """Without what is made again."""
    attention: float
    """The forward part that is attention's kernel."""
    cheap: float
    """The part that is no product and no attention."""
    products: float
    """The forward part that is products."""
    parts: float = 0.0
    """The forward part that `Setting.recompute_parts` names."""
    last: float = 0.0
    """The forward part that full recomputation leaves out."""
    norms: float = 0.0
    """What the level `norms` makes again."""
    again: PassSeconds = PassSeconds(0.0)
    """What the level `block` makes again: the forward pass without what nothing reads a second time."""
    weights: float = 0.0
    """The part of the backward pass that makes gradients of weights, which can wait."""


def block_seconds(
    block: BlockSpec, setting: Setting, kernels: Kernels, products: Products | None = None
) -> BlockSeconds:
    """A block on a rank of the setting. Of layouts that differ in stages, copies and shards alone it takes the same
    seconds, which are counted once.

    Args:
        products: in other formats than the setting's; seconds are arrays where these are.
    """
    if products is not None and not isinstance(products.forward, float):
        return _passes(block, setting, kernels, products)
    layout = setting.layout
    things = (block, setting.model, setting.cluster, setting.software)
    ranks = (layout.tp, layout.cp, layout.ep, layout.etp, setting.sequence_parallel, setting.places)
    method = layout.cp_method if layout.cp > 1 else ""
    sizes = (setting.sequence, setting.micro_batch, setting.precision, *setting.formats.items())
    key = (*map(id, things), method, *ranks, *sizes, setting.execution, setting.recompute_parts)
    return _counted(Case(key, block, setting, kernels), products)


@lru_cache(maxsize=4096)
def _counted(case: Case, products: Products | None) -> BlockSeconds:
    block, setting, kernels = case.what, case.setting, case.kernels
    assert isinstance(block, BlockSpec)
    if products is not None:
        return _passes(block, setting, kernels, products)
    forward = backward = ops = once = weights = 0.0
    for linear in block.linears:
        recipes = [setting.recipe(linear.name, gemm) for gemm in GEMMS]
        fprop, dgrad, wgrad = counted_layer(case_of_products(linear, setting, kernels), *recipes)
        forward, backward, weights = forward + fprop, backward + dgrad + wgrad, weights + wgrad
        ops += layer_ops(linear, recipes[0], setting)
        once += fprop * (not linear.again)
    return _passes(block, setting, kernels, Products(forward, backward, ops, once, weights))


def _passes(block: BlockSpec, setting: Setting, kernels: Kernels, products: Products) -> BlockSeconds:
    attention, moved = (
        [of(block, setting, kernels, backward=one) for one in (False, True)] for of in (_attention, _moved)
    )
    windows = products.forward + attention[0], products.backward + attention[1]
    computed = windows[0] + moved[0] + idle_seconds(block, setting), windows[1] + moved[1]
    running = _beside_exchanges(block, setting, windows, computed)
    host = setting.place.node.host_op_seconds * (other_ops(block, setting) + products.ops)
    # A backward pass launches twice as much.
    waits = larger(0.0, host - running[0].total), larger(0.0, 2.0 * host - running[1].total)
    copies, rows = _exchange_copies(setting), _shared_rows(block, setting, attention)
    forward, backward = (
        one + PassSeconds(wait, copies) + ring for one, wait, ring in zip(running, waits, rows, strict=True)
    )
    repeated = computed[0] - products.once - _moved_by(block, setting, kernels, ("",))
    quantized = again_bytes(block, setting, levels_until("block")) * setting.tokens
    repeated += kernels.moved(quantized, kernels=0)
    launches = larger(0.0, host - repeated - forward.communication)
    return BlockSeconds(
        forward,
        backward,
        attention[0],
        moved[0],
        products.forward,
        _parts(block, setting, kernels, attention[0], waits[1]) if setting.recompute_parts else 0.0,
        _last(block, setting, kernels) if setting.software.full_leaves_last else 0.0,
        _moved_by(block, setting, kernels, levels_until("norms")),
        PassSeconds(repeated + launches, forward.communication, forward.hidden),
        products.weights,
    )


def _beside_exchanges(
    block: BlockSpec, setting: Setting, windows: Sequence[Any], computed: Sequence[Any]
) -> list[PassSeconds]:
    """Both passes beside what ranks of tp exchange, and then beside tokens on their way to experts.

    Args:
        windows: seconds, of what each pass computes, in which exchanges may run.
    """
    software, execution = setting.software, setting.execution
    exchanges, tokens = _exchanges(block, setting), _tokens_to_experts(block, setting)
    in_pieces = ASYNC_TP if execution.async_tp else software.hidden_exchanges
    in_pieces *= setting.precision not in software.whole_exchanges
    hidden = software.hidden_experts if execution.overlap_experts else 0.0
    # The forward pass of one micro-batch runs beside the backward pass of another: they share what they hide.
    shared, found = (windows[0] + windows[1]) / 2, []
    for each, exchange, window in zip(computed, exchanges, windows, strict=True):
        one = exposed(each, exchange, window, in_pieces)
        found.append(one + exposed(0.0, tokens, larger(0.0, shared - one.hidden), hidden))
    return found


def levels_until(level: str) -> tuple[str, ...]:
    """Those whose parts are made again at this level."""
    return LEVELS[1 : LEVELS.index(level) + 1]


def level_seconds(block: BlockSpec, setting: Setting, kernels: Kernels, level: str) -> float:
    """Seconds of what a level of recomputation makes again."""
    if level == LEVELS[-1]:
        return block_seconds(block, setting, kernels).again.compute
    made = levels_until(level)
    products = sum(
        product_seconds(one, "fprop", setting.recipe(one.name, "fprop"), setting, kernels)
        for one in block.linears
        if one.again in made
    )
    attends = _attention(block, setting, kernels, backward=False) if "attention" in made else 0.0
    return products + attends + _moved_by(block, setting, kernels, made)


def _parts(block: BlockSpec, setting: Setting, kernels: Kernels, attention: float, waits: Any) -> Any:
    """Seconds of the parts that selective recomputation names. A device that waits for the host makes them while it
    waits; then what the host launches more counts.

    Args:
        attention: seconds of its kernel, forward.
        waits: seconds that a backward pass without them waits for the host.
    """
    named = named_parts(block, setting)
    made = _named_seconds(block, setting, kernels, named) + attention * ("att" in named)
    launches = (waits > 0.0) * again_seconds(block, setting, named)
    return larger(0.0, larger(made - waits, launches))


def _named_seconds(block: BlockSpec, setting: Setting, kernels: Kernels, named: Collection[str]) -> float:
    """Seconds, forward, of these parts without attention's kernel."""
    found = 0.0
    for one in block.linears:
        of_mlp = one.again == "mlp" and "mlp" in named
        if of_mlp or (one.name.startswith("attention.") and one.cut == "outputs" and HEADS in named):
            found += product_seconds(one, "fprop", setting.recipe(one.name, "fprop"), setting, kernels)
    levels = {level for level, part in (("norms", "norm"), (GATED, GATED)) if part in named}
    numbers = sum(one.forward for one in block.traffic if one.again in levels)
    each = numbers * setting.software.activation_bytes
    if GATED in named and adds_expert_biases(block, setting):
        each += sum(_CLAMP_BYTES[0] * one.chosen * one.inputs for one in _downs(block))
    return found + kernels.moved(each * setting.tokens * setting.software.traffic / setting.layout.tp)


def _downs(block: BlockSpec) -> list[LinearSpec]:
    """The last product of routed experts, if there are any."""
    return [one for one in block.linears if one.experts > 1][-1:]


def _last(block: BlockSpec, setting: Setting, kernels: Kernels) -> float:
    """Seconds, forward, of a block's last product."""
    one = block.linears[-1]
    return product_seconds(one, "fprop", setting.recipe(one.name, "fprop"), setting, kernels)


def exposed(compute: float, exchange: float, window: float, hidden: float) -> PassSeconds:
    """A pass with an exchange of which so large a share can run beside the computing of its window."""
    beside = smaller(hidden * exchange, window)
    return PassSeconds(compute, exchange - beside, beside)


def smaller(one: Any, other: Any) -> Any:
    """The smaller of two numbers, or of each pair in two arrays."""
    return min(one, other) if isinstance(one, float) and isinstance(other, float) else np.minimum(one, other)


def larger(one: Any, other: Any) -> Any:
    """The same, the larger."""
    return max(one, other) if isinstance(one, float) and isinstance(other, float) else np.maximum(one, other)


def head_seconds(setting: Setting, kernels: Kernels) -> BlockSeconds:
    """The final norm, the head and the loss."""
    model, tokens, tp = setting.model, setting.tokens, setting.layout.tp
    V, D = model.vocab_size / tp, model.width
    software, words = setting.software, model.vocab_size if setting.software.gathers_logits else V
    logits = kernels.moved(tokens * words * software.bytes_per_logit)
    stream = tokens * D * software.activation_bytes / (tp if setting.sequence_parallel else 1)
    base = setting.precision if setting.execution.fp8_head else "bf16"
    fprop, dgrad, wgrad = (setting.formats.get(f"{HEAD}.{gemm}", base) for gemm in GEMMS)
    forward = kernels.product(tokens, V, D, fprop) + logits / 2 + kernels.moved(2 * stream)
    backward = kernels.product(tokens, D, V, dgrad) + logits / 2 + kernels.moved(4 * stream)
    backward += kernels.product(V, D, tokens, wgrad, extra=gradient_sums(setting) * V * D)
    forward += made_head(fprop, "fprop", D, setting, kernels)
    backward += sum(
        made_head(recipe, gemm, V, setting, kernels) for recipe, gemm in ((dgrad, "dgrad"), (wgrad, "wgrad"))
    )
    exchange = setting.groups["tp"].gathered(tokens * D * setting.software.activation_bytes)
    times = model.heads
    return BlockSeconds(
        PassSeconds(times * forward, times * exchange),
        PassSeconds(times * backward, times * exchange),
        0.0,
        times * logits / 2,
        0.0,
    )


def embedding_seconds(setting: Setting, kernels: Kernels) -> BlockSeconds:
    """Words into vectors, and their gradients."""
    whole, shared = (
        setting.tokens * setting.model.width,
        setting.layout.tp if setting.sequence_parallel else 1,
    )
    size = whole * setting.software.activation_bytes / shared
    exchange = setting.groups["tp"].gathered(whole * setting.software.activation_bytes)
    forward = kernels.moved(2 * size)
    backward = kernels.moved(size + whole * 8.0 / shared)
    return BlockSeconds(PassSeconds(forward, exchange), PassSeconds(backward, exchange), 0.0, forward, 0.0)


def _attention(block: BlockSpec, setting: Setting, kernels: Kernels, *, backward: bool) -> float:
    attends, layout = block.attention, setting.layout
    keys, _ = attends.keys(setting.sequence)
    pairs = setting.micro_batch * setting.sequence * keys / layout.cp
    widths = (attends.width + value_width(attends)) / layout.tp
    seen = min(setting.sequence, attends.window or setting.sequence)
    eight = setting.execution.fp8_attention
    if eight and backward:
        seen = setting.sequence
        pairs = setting.micro_batch * setting.sequence * (setting.sequence + 1) / 2 / layout.cp
    return kernels.attention(
        pairs,
        widths,
        keys=seen,
        head_size=attends.head_size,
        backward=backward,
        in_8_bits=eight,
        in_parts=seen < setting.sequence or (layout.cp > 1 and layout.cp_method != "ulysses"),
    )


def _moved(block: BlockSpec, setting: Setting, kernels: Kernels, *, backward: bool) -> float:
    tp, stream = setting.layout.tp, setting.layout.tp if setting.sequence_parallel else 1
    numbers = sum(
        (one.backward if backward else one.forward) / (stream if one.on_stream else tp)
        for one in block.traffic
    )
    experts, extra = [linear for linear in block.linears if linear.experts > 1], 0.0
    if experts:
        up, down = experts
        copies = down.chosen * down.outputs / tp
        if setting.execution.fused_experts:
            numbers -= up.chosen * (up.outputs + down.inputs) / tp
        if adds_expert_biases(block, setting):
            extra += _BIAS_BYTES[setting.execution.dispatcher == ALL_TO_ALL][backward] * copies
            extra += _CLAMP_BYTES[backward] * down.chosen * down.inputs / tp
        if rotates_apart(block, setting):
            attends = block.attention
            rotated = attends.width + attends.num_kv_heads * attends.head_size
            extra += _ROTATION_BYTES[backward] * rotated / tp
        sorts = setting.software.unfused_experts and setting.execution.dispatcher == ALL_TO_ALL
        if sorts and setting.layout.ep > 1:
            # Once more on each way, by expert: read and written.
            numbers += 4 * copies
    size = (numbers * setting.software.activation_bytes + extra) * setting.tokens * setting.software.traffic
    return kernels.moved(size, kernels=2 * len(block.traffic))


def _moved_by(block: BlockSpec, setting: Setting, kernels: Kernels, levels: Collection[str]) -> float:
    """The forward part of it that these levels make again; "": that none does."""
    made = [one for one in block.traffic if one.again in levels]
    tp, stream = setting.layout.tp, setting.layout.tp if setting.sequence_parallel else 1
    numbers = sum(one.forward / (stream if one.on_stream else tp) for one in made)
    size = numbers * setting.software.activation_bytes * setting.tokens * setting.software.traffic
    size += again_bytes(block, setting, levels) * setting.tokens
    return kernels.moved(size, kernels=2 * len(made))


def _exchanges(block: BlockSpec, setting: Setting) -> tuple[float, float]:
    """Seconds of what ranks of tp and cp exchange within a block, forward and backward."""
    layout, groups, tokens = setting.layout, setting.groups, setting.tokens
    stream = tokens * setting.model.width * setting.software.activation_bytes
    experts = [linear for linear in block.linears if linear.experts > 1]
    forward = backward = 0.0
    if layout.tp > 1:
        gathers = 4 if not experts or layout.etp > 1 else 2
        # One half of them gathers, the other reduces.
        tp, (inputs, gradients) = groups["tp"], _gathered_shares(setting)
        forward += gathers / 2 * (tp.gathered(stream) + tp.gathered(stream * inputs))
        backward += gathers / 2 * (tp.gathered(stream) + tp.gathered(stream * gradients))
        # Inputs of the layers may be gathered once more for their weights' gradients.
        if not setting.software.keeps_gathered:
            backward += gathers / 2 * tp.gathered(stream * inputs)
        backward += setting.software.norm_sums * groups["tp"].hops
    return forward, backward


def _gathered_shares(setting: Setting) -> tuple[float, float]:
    """Bytes that ranks of tp gather for one of activations: of layers' inputs, and of gradients of what layers make.
    Codes whose scales lie along rows have no others along columns in them, which gradients need too."""
    software, recipe = setting.software, setting.precision
    if recipe == "fp8_tensor":
        return (0.5, 0.5) if software.gathers_codes else (1.0, 1.0)
    if recipe not in _SCALE_BYTES or not software.gathers_scaled_codes:
        return 1.0, 1.0
    share = (element_bytes(recipe) + _SCALE_BYTES[recipe]) / software.activation_bytes
    return share, 2.0 * share


def _exchange_copies(setting: Setting) -> float:
    """Seconds, in one pass of a block, in which the device moves what ranks of tp exchange; in pieces only to add up
    the parts of a reduction."""
    software = setting.software
    if setting.layout.tp == 1 or not software.exchange_copies:
        return 0.0
    stream = setting.tokens * setting.model.width * software.activation_bytes
    each = software.exchange_copies * (1.0 + _gathered_shares(setting)[0])
    each = _PARTS_BYTES if setting.execution.async_tp else each
    return 2.0 * each * stream / setting.device.bandwidth


def _shared_rows(block: BlockSpec, setting: Setting, attention: Sequence[float]) -> list[PassSeconds]:
    """What ranks of cp exchange in attention, forward and backward: a ring passes keys and values round, and in the
    backward pass once more with their gradients in float32, beside attention; Ulysses exchanges tokens for heads and
    back, and nothing runs beside it."""
    layout, attends, group = setting.layout, block.attention, setting.groups["cp"]
    if layout.cp == 1:
        return [PassSeconds(0.0), PassSeconds(0.0)]
    size, values = setting.software.activation_bytes, attends.value_size or attends.head_size
    heads = attends.num_heads if setting.software.repeats_keys else attends.num_kv_heads
    keys = setting.tokens / layout.tp * heads * (attends.head_size + values)
    if layout.cp_method == "ulysses":
        queries = setting.tokens / layout.tp * attends.num_heads * (attends.head_size + values)
        seconds = group.exchanged(size * (queries + keys))
        return [PassSeconds(0.0, seconds), PassSeconds(0.0, seconds)]
    # Gradients make one step more, back to their keys.
    gradients = RING_GRADIENT_BYTES * layout.cp / (layout.cp - 1)
    rings = [group.gathered(layout.cp * each * keys) for each in (size, size + gradients)]
    hidden = setting.software.hidden_rings
    return [exposed(0.0, ring, window, hidden) for ring, window in zip(rings, attention, strict=True)]


def _tokens_to_experts(block: BlockSpec, setting: Setting) -> float:
    """Seconds of tokens on their way to experts and back, in one pass."""
    layout = setting.layout
    chosen = next((one.chosen for one in block.linears if one.experts > 1), 0)
    if not chosen or layout.ep == 1:
        return 0.0
    stream = setting.tokens * setting.model.width * setting.software.activation_bytes
    once = setting.execution.dispatcher != ALL_TO_ALL
    return 2.0 * setting.groups["ep"].travelled(stream / layout.tp, chosen, once=once)
