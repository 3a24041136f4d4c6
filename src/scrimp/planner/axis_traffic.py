"""Bytes that each rank sends in a step, by the axes of its layout.

Problem  Which axis may cross a slow link is a question of bytes, and these follow from model, layout and batch.
Method   With P_b the parameters of all blocks and P those of the model, w bytes each, L blocks of width D, m
         micro-batches of a step, T the tokens that a rank has in a step, N key heads of size K, H query heads,
         activations of e bytes, F = fsdp x cp::

             fsdp, cp     (m w (2 P_b - P_s + P - P_b) + 4 r P) / tp (F - 1)/F   gathers and reduced gradients
             dp           2 * 4 r P / (tp F) (dp - 1)/dp                    all-reduce of what is left of these
             tp           2 (4 L + 2) e T D (tp - 1)/tp                     all-gathers and reduce-scatters
             cp, rings    L 2 T N K (2 (cp - 1) e + 4 cp) / tp              keys, values; gradients in float32
             cp, ulysses  L 4 e T (H + N) K (cp - 1)/cp                     queries, keys, values, results, twice

         in so many collectives (those of whole copies and of cp are not predicted)::

             fsdp, cp     m (2 L - L_s + 1) + r (L + 1)                     dp beside shards   r (L + 1)
             tp           2 m (4 L + 2)

         Beside frozen weights P is everything where it is gathered, and the adapters where it is reduced, in r L
         collectives.
         P_s and L_s of blocks whose weights stay gathered (`layout.gathered`; all below zero 3), r = m reductions in a
         step (zero 1, and whole copies: one).
Limits   What recomputation exchanges again does not count, nor sums of norms and losses, nor key heads that Ulysses
         repeats, nor what Muon and GaLore exchange (`scrimp.optim.shared_maps`). Weights that are gathered in FP8 count
         as in their own format, up to four times too much (`scrimp.runtime.parallel.quantized_gather`).
Checked  tests/parity/: what ranks were counted to send
"""

from __future__ import annotations

from scrimp.config.gathered import gathered_blocks
from scrimp.config.layout import AXES
from scrimp.config.resolved import ResolvedConfig, ResolvedLayout
from scrimp.models import BlockSpec, ModelSpec
from scrimp.planner.rank_placement import AxisTraffic

REDUCED_BYTES = 4
"""Bytes of a gradient's number while it is reduced or goes round a ring."""
NUMBER_BYTES = {"fp32": 4, "bf16": 2}


def degrees_of(layout: ResolvedLayout) -> dict[str, int]:
    """Ranks along each axis, the outermost first."""
    return {axis: getattr(layout, axis) for axis in AXES}


def traffic_of(spec: ModelSpec, config: ResolvedConfig) -> list[AxisTraffic]:
    """What each rank sends in a step, by the formulas above; nothing where an axis has one rank."""
    layout, units = config.layout, spec.num_blocks + 1
    gathers = units + spec.num_blocks - len(gathered_blocks(layout, spec.num_blocks))
    # Units without anything that is trained reduce nothing: all but the blocks beside adapters.
    reducing = units if spec.architecture.adapter is None else spec.num_blocks
    reductions = _reductions(config) * reducing
    calls = config.micro_batches * gathers + reductions
    in_layers = 2 * config.micro_batches * (4 * spec.num_blocks + 2)
    found = [
        AxisTraffic(("fsdp", "cp"), _gathered_and_reduced(spec, config), calls=calls),
        AxisTraffic(
            ("dp",), _summed_over_copies(spec, config), calls=reductions if layout.shards > 1 else None
        ),
        AxisTraffic(("tp",), _exchanged_in_layers(spec, config), calls=in_layers),
        AxisTraffic(("cp",), _exchanged_in_attention(spec, config)),
    ]
    degrees = degrees_of(layout)
    return [one for one in found if any(degrees[axis] > 1 for axis in one.axes)]


def _gathered_and_reduced(spec: ModelSpec, config: ResolvedConfig) -> float:
    layout = config.layout
    stay = gathered_blocks(layout, spec.num_blocks)
    own, adapter = NUMBER_BYTES[config.train.parameters], NUMBER_BYTES[config.trained_format]

    def weights_of(one: BlockSpec | ModelSpec) -> int:
        return (one.parameters - one.adapter_parameters) * own + one.adapter_parameters * adapter

    again = sum(weights_of(block) for number, block in enumerate(spec.blocks) if number not in stay)
    weights = config.micro_batches * (again + weights_of(spec))
    gradients = REDUCED_BYTES * _reductions(config) * spec.trained_parameters
    return (weights + gradients) / layout.tp * _ring(layout.shards)


def _summed_over_copies(spec: ModelSpec, config: ResolvedConfig) -> float:
    layout = config.layout
    part = spec.trained_parameters / (layout.tp * layout.shards)
    return 2 * REDUCED_BYTES * _reductions(config) * part * _ring(layout.dp)


def _exchanged_in_layers(spec: ModelSpec, config: ResolvedConfig) -> float:
    stream = _activation_bytes(config) * _tokens(config) * spec.architecture.width
    return 2 * (4 * spec.num_blocks + 2) * stream * _ring(config.layout.tp)


def _exchanged_in_attention(spec: ModelSpec, config: ResolvedConfig) -> float:
    layout, size = config.layout, _activation_bytes(config)
    if layout.cp == 1:
        return 0.0
    found = 0.0
    for block in spec.blocks:
        attends = block.attention
        if layout.cp_method == "ulysses":
            heads = attends.num_heads + attends.num_kv_heads
            found += 4 * size * heads * attends.head_size * _ring(layout.cp)
        else:
            numbers = 2 * attends.num_kv_heads * attends.head_size
            found += numbers * (2 * (layout.cp - 1) * size + REDUCED_BYTES * layout.cp)
    return found * _tokens(config) / layout.tp


def _reductions(config: ResolvedConfig) -> int:
    return 1 if config.layout.zero == 1 or config.layout.shards == 1 else config.micro_batches


def _tokens(config: ResolvedConfig) -> float:
    """That a rank has in a step."""
    return config.train.batch_tokens / (config.layout.data_ranks * config.layout.cp)


def _activation_bytes(config: ResolvedConfig) -> int:
    return NUMBER_BYTES[config.precision_rules.compute]


def _ring(ranks: int) -> float:
    """Share of a tensor that each of so many ranks sends."""
    return (ranks - 1) / ranks
