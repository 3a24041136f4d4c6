"""What operands take beside gates, and where backward makes inputs again: by hand."""

from __future__ import annotations

import dataclasses

import pytest

from scrimp.config import preset
from scrimp.config.resolved import ResolvedLayout
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.made_operands import again_bytes, layer_operands, made_operands
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import software


def setting_of(recipe: str, *, program: str = "scrimp", tp: int = 1) -> Setting:
    return Setting(
        model=sizes_of(spec_of(preset("llama-3.2-1b"))),
        cluster=load_hardware("2xh100"),
        sequence=1024,
        global_batch=8,
        micro_batch=1,
        layout=ResolvedLayout(dp=2 // tp, fsdp=1, tp=tp),
        software=software(program),
        precision=recipe,
    )


def figures(setting: Setting) -> dict[str, tuple[float, float]]:
    """What changes beside a gate: of down's fprop for each input, of gate_up's gradients for each output."""
    block, recipe = setting.model.blocks[0], setting.precision
    before, after = (next(one for one in block.linears if one.gate == where) for where in ("before", "after"))
    found = {}
    for linear, gemm, at in ((after, "fprop", 1), (before, "dgrad", 2), (before, "wgrad", 2)):
        plain, own = made_operands(gemm, recipe, setting), layer_operands(linear, gemm, recipe, setting)
        assert plain is not None
        assert own is not None
        found[gemm] = plain[at], own[at]
    return found


def test_a_gate_and_the_codes_of_tiles_move_each_number_once() -> None:
    """Forward gate and up are read and two codes written; backward gate, up and a gradient, for two gradients of two
    codes each."""
    found = figures(setting_of("fp8"))
    assert found["fprop"][1] + 6 == pytest.approx(2 * 2 + 2, abs=0.1)
    both = sum(found[gemm][1] for gemm in ("dgrad", "wgrad"))
    assert 2 * both + 10 == pytest.approx(3 * 2 + 2 * 2, abs=0.1)


def test_a_scale_of_the_tensor_takes_a_second_reading() -> None:
    found = figures(setting_of("fp8_tensor"))
    assert found["fprop"][1] + 6 == pytest.approx(2 * 2 * 2 + 2, abs=0.1)
    assert 2 * (found["dgrad"][1] + found["wgrad"][1]) + 10 == pytest.approx(2 * 3 * 2 + 2 * 2, abs=0.1)


@pytest.mark.parametrize(
    "setting", [setting_of("fp8", tp=2), setting_of("bf16"), setting_of("fp8", program="llmq")]
)
def test_gates_are_passes_where_ranks_share_weights_and_where_nothing_is_quantized(setting: Setting) -> None:
    block = setting.model.blocks[0]
    for linear in (one for one in block.linears if one.gate):
        for gemm in ("fprop", "dgrad", "wgrad"):
            own = layer_operands(linear, gemm, setting.precision, setting)
            assert own == made_operands(gemm, setting.precision, setting)


def test_inputs_that_are_made_again_are_read_again_for_wgrad() -> None:
    """Normed inputs in bf16, 2 bytes for each number; of the gate's result gate and up, instead of a pass that reads
    both and writes it."""
    setting = setting_of("fp8")
    block, model = setting.model.blocks[0], setting.model
    ffn = next(one.inputs for one in block.linears if one.gate == "after")
    assert again_bytes(block, setting, ("swiglu",)) == pytest.approx((2 + 2 - 6) * ffn, rel=0.05)
    more = again_bytes(block, setting, ("swiglu", "norms")) - again_bytes(block, setting, ("swiglu",))
    assert more == pytest.approx(2 * 2 * model.width, rel=0.05)
    # What is multiplied again makes its codes with its own operand.
    everything = ("swiglu", "norms", "mlp", "qkv", "attention")
    assert again_bytes(block, setting, everything) < again_bytes(block, setting, ("swiglu", "norms"))
    plain = dataclasses.replace(setting, precision="bf16")
    assert again_bytes(block, plain, everything) == 0


def test_what_attention_gives_waits_in_bf16_and_wgrad_quantizes_it() -> None:
    setting = setting_of("fp8")
    (out,) = (one for one in setting.model.blocks[0].linears if one.origin == "kept")
    own, waiting = layer_operands(out, "wgrad", "fp8", setting), made_operands("wgrad", "fp8", setting)
    assert own is not None
    assert waiting is not None
    assert own[1] - waiting[1] == pytest.approx(2)  # read once more; a code is written either way
