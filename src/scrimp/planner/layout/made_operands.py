"""What products in 8 or 4 bits take beside themselves: the making of their operands, in launches and bytes.

Problem  An operand is read in bf16 and written in codes. How often depends on recipe and device; on whether backward
         makes the input again, which then is quantized for wgrad alone; and on gates, whose numbers Scrimp makes where
         they are quantized (`scrimp.gemm.gated_products`), so that the gate has no pass of its own.
Method   Figures of a program's file, counted by `scrimp.profiler.counted_formats`, for each number of a layer's input
         x, output y and weight. Who reads a gate's number reads two (2 bytes more), of its gradients one and a half for
         each (1 byte more); what the gate's own passes would move (6 bytes for each number of its result, 10 backward)
         is taken off the products beside it::

             after a gate     fprop   x + 2 r - 6           r readings of the input
             before a gate    dgrad   y + r - 5,  wgrad  y + r'

Limits   Inputs that are made again count in the precision of the whole step, whatever formats single products have. A
         gate is taken to have no pass where fprop, or dgrad, is quantized: where wgrad then is not, it has one. Of
         layers whose weights ranks of tp share, or that are factors or have adapters, gates are passes. That they
         are in eager blocks that make norms again, with schedules that part backward, and in compiled blocks whose
         wgrad is in high precision, is left out.
Checked  tests/planner/layout/test_made_operands.py, tests/profiler/test_counted_formats.py
"""

from __future__ import annotations

from collections.abc import Collection

from scrimp.config.activations import GATED
from scrimp.models import BlockSpec, LinearSpec
from scrimp.planner.layout.kernels import kind_of
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import Readings
from scrimp.precision import HIGH_PRECISION, is_router

GATE_BYTES = (6.0, 10.0)
"""Forward for each number of a gate's result: it, gate and up; backward also the gradients of all three."""


def made_operands(gemm: str, recipe: str, setting: Setting) -> tuple[float, float, float, float] | None:
    """Launches, and bytes for each number of input, output and weight, where the program was counted."""
    if not setting.software.quantize:
        return None
    return setting.software.made(recipe, gemm, units=_has_units(recipe, setting))


def layer_operands(
    linear: LinearSpec, gemm: str, recipe: str, setting: Setting
) -> tuple[float, float, float, float] | None:
    """The same of a layer in a block: less what a gate beside it does not move, more where its input waits in bf16."""
    found, readings = made_operands(gemm, recipe, setting), _readings(recipe, setting)
    if found is None or readings is None:
        return found
    launches, x, y, w = found
    if linear.origin == "kept" and gemm == "wgrad":
        x += readings.again_bytes  # what attention gives waits in bf16
    if not _defers(linear, setting):
        return launches, x, y, w
    if linear.gate == "after" and gemm == "fprop":
        x += 2.0 * readings.inputs - GATE_BYTES[0]
    elif linear.gate == "before" and gemm == "dgrad":
        y += readings.dgrad - GATE_BYTES[1] / 2.0
    elif linear.gate == "before" and gemm == "wgrad":
        y += readings.wgrad
    return launches, x, y, w


def again_bytes(block: BlockSpec, setting: Setting, levels: Collection[str]) -> float:
    """Bytes for each token that inputs move which these levels make again, and wgrad quantizes by themselves."""
    found, readings = 0.0, _readings(setting.precision, setting)
    if readings is None:
        return found
    for linear in inputs_again(block, levels):
        each = readings.again_bytes
        if linear.gate == "after" and _defers(linear, setting):
            each += 2.0 * (readings.again - readings.inputs) - GATE_BYTES[0]
        ranks = setting.layout.tp if linear.cut == "inputs" else 1
        found += each * linear.chosen * linear.inputs / ranks
    return found


def inputs_again(block: BlockSpec, levels: Collection[str]) -> list[LinearSpec]:
    """Layers whose inputs these levels make again, and that are not multiplied again themselves."""
    return [
        linear
        for linear in block.linears
        if _level_of_input(linear) in levels and linear.again not in levels and not _is_routed(linear)
    ]


def _is_routed(linear: LinearSpec) -> bool:
    """Routers, and experts before a gate: their inputs wait, or are made again with their products."""
    return is_router(linear.name) or (linear.experts > 1 and linear.gate != "after")


def _level_of_input(linear: LinearSpec) -> str:
    if linear.origin != "made":
        return "block"
    return GATED if linear.gate == "after" else "norms"


def _defers(linear: LinearSpec, setting: Setting) -> bool:
    is_whole = linear.experts == 1 and linear.rank == 0 and linear.made_of is None
    return is_whole and setting.layout.tp == 1


def _has_units(recipe: str, setting: Setting) -> bool:
    return recipe not in HIGH_PRECISION and kind_of(recipe, setting.device) != "bf16"


def _readings(recipe: str, setting: Setting) -> Readings | None:
    if not setting.software.quantize:
        return None
    return setting.software.readings_of(recipe, units=_has_units(recipe, setting))
