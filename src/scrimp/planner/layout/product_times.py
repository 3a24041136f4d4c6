"""Seconds of the products of one linear layer, with the making of their operands.

Method   A product takes what its kernel takes (`kernels`), on a rank's part of the layer and of the tokens. In 8 or 4
         bits its operands are made first: where a program was counted by recipe (`Software.quantize`), each product as
         that says of the layer's input, output and weight; else the operand that no other product of the layer makes,
         by `quantize_bytes` for each of its numbers.
Limits   Tokens of routed experts are equally shared.
Checked  tests/planner/layout/test_block_passes.py, tests/planner/layout/test_product_table.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from scrimp.models import BlockSpec, LinearSpec
from scrimp.planner.layout.host_times import matrices
from scrimp.planner.layout.kernels import Kernels, kind_of
from scrimp.planner.layout.made_operands import layer_operands, made_operands
from scrimp.planner.layout.setting import Setting
from scrimp.precision import GEMMS, HIGH_PRECISION

_WRITTEN_BYTES = 2.0
"""For each number of an operand that is written as codes at once, along rows and along columns."""


@dataclass(frozen=True)
class Products:
    """What formats decide of the passes of a block, or of one of its layers; arrays for many sets of formats."""

    forward: Any
    """Seconds of its products."""
    backward: Any
    ops: Any
    """Operations that the host launches for them, forward: in plain ones (`host_times`)."""
    once: Any
    """Seconds of those forward products that no level makes again."""
    weights: Any = 0.0
    """The part of `backward` that makes gradients of weights."""


@dataclass(frozen=True)
class Case:
    """A block of a setting, or one of its layers; cases are equal that take the same seconds."""

    key: tuple[object, ...]
    """All that the seconds follow from, things that are looked at as a whole by their id."""
    what: BlockSpec | LinearSpec = field(compare=False)
    setting: Setting = field(compare=False)
    kernels: Kernels = field(compare=False)


def case_of_products(what: BlockSpec | LinearSpec, setting: Setting, kernels: Kernels) -> Case:
    """All that seconds of products follow from, but for their recipes."""
    layout, things = setting.layout, (what, setting.software, kernels.device)
    place = (setting.tokens, layout.tp, layout.ep, layout.etp, setting.sequence_parallel)
    of_kernels = (kernels.launch_seconds, setting.execution)
    return Case((*map(id, things), *place, *of_kernels), what, setting, kernels)


@lru_cache(maxsize=2**15)
def counted_layer(case: Case, *recipes: str) -> tuple[float, ...]:
    """Its three products."""
    linear, setting, kernels = case.what, case.setting, case.kernels
    assert isinstance(linear, LinearSpec)
    return tuple(
        product_seconds(linear, gemm, recipe, setting, kernels)
        for gemm, recipe in zip(GEMMS, recipes, strict=True)
    )


def product_seconds(linear: LinearSpec, gemm: str, recipe: str, setting: Setting, kernels: Kernels) -> float:
    """One product of a layer; in 8 or 4 bits, with the making of the operand that no other product of it makes."""
    layout = setting.layout
    is_expert = linear.experts > 1
    ranks = layout.etp if is_expert else layout.tp
    outputs, inputs = float(linear.outputs), float(linear.inputs)
    if linear.cut == "outputs":
        outputs /= ranks
    elif linear.cut == "inputs":
        inputs /= ranks
    rows, count = setting.tokens, matrices(linear, setting)
    if is_expert:
        rows = setting.tokens * linear.chosen * layout.etp / (layout.tp * count)
    elif linear.cut is None and setting.sequence_parallel:
        rows /= layout.tp
    pieces = [outputs * share for share in output_shares(linear, setting)]
    read = inputs if gemm == "fprop" else outputs
    if gemm == "wgrad":
        summed = gradient_sums(setting) * inputs * count
        found = sum(
            kernels.product(one, inputs, rows, recipe, count=count, extra=summed * one) for one in pieces
        )
    else:
        sizes = [(one, inputs) if gemm == "fprop" else (inputs, one) for one in pieces]
        found = sum(kernels.product(rows, made, inner, recipe, count=count) for made, inner in sizes)
    counted = layer_operands(linear, gemm, recipe, setting)
    if counted is not None:
        launches, x, y, w = counted
        size = x * rows * inputs + y * rows * outputs + w * outputs * inputs
        return found + kernels.moved(count * size, kernels=int(count * launches))
    if recipe in HIGH_PRECISION or gemm == "wgrad":
        return found
    if gemm == "dgrad":
        found += kernels.moved(setting.software.transposed_weight_bytes * outputs * inputs * count, kernels=0)
    fused = is_expert and setting.execution.fused_experts
    is_written = fused and linear.cut == ("inputs" if gemm == "fprop" else "outputs")
    each = _WRITTEN_BYTES if is_written else quantize_bytes(setting, recipe)
    fixed = setting.software.quantize_seconds * (1 if fused else count)
    return found + kernels.moved(each * rows * count * read) + fixed


def made_head(recipe: str, gemm: str, read: float, setting: Setting, kernels: Kernels) -> float:
    """The making of a product's operands, of the head."""
    tokens, model = setting.tokens, setting.model
    counted = made_operands(gemm, recipe, setting)
    if counted is not None:
        V, D = model.vocab_size / setting.layout.tp, model.width
        launches, x, y, w = counted
        return kernels.moved(x * tokens * D + y * tokens * V + w * V * D, kernels=int(launches))
    if recipe in HIGH_PRECISION or gemm == "wgrad":
        return 0.0
    return kernels.moved(quantize_bytes(setting, recipe) * tokens * read)


def output_shares(linear: LinearSpec, setting: Setting) -> list[float]:
    """Parts of a layer's outputs that are products of their own."""
    if setting.software.stacks_layers or linear.experts > 1 or not linear.rows:
        return [1.0]
    return [one / linear.outputs for one in linear.rows]


def quantize_bytes(setting: Setting, recipe: str) -> float:
    """Bytes for each number of an operand that is quantized in a pass, by a program that was not counted by recipe."""
    software = setting.software
    in_blocks = kind_of(recipe, setting.device) in ("fp8_block", "int8", "mxfp8")
    return software.quantize_block_bytes if in_blocks else software.quantize_bytes


def gradient_sums(setting: Setting) -> float:
    """Bytes for each number of a weight that adding up its gradient moves in one pass."""
    return setting.software.gradient_sum_bytes
