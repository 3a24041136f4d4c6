"""The passes of a step: they add up to its prediction, and floors are what a hand reckons."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config import preset
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import PlanError
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.setting import BlockPlan, Offload, Setting
from scrimp.planner.layout.software import in_states, software
from scrimp.planner.layout.state_formats import StateFormats
from scrimp.planner.layout.step_account import above_floor, floor_of, passes_of
from scrimp.precision import GEMMS, HEAD, RECIPES

OWN = ("scrimp", "scrimp-eager")


def setting(program="scrimp", name="qwen2.5-0.5b", *, masters=True, **changes):
    found = software(program)
    usual = {
        "model": sizes_of(spec_of(preset(name))),
        "cluster": load_hardware("h100"),
        "sequence": 1024,
        "global_batch": 64,
        "micro_batch": 8,
        "layout": ResolvedLayout(dp=1, fsdp=1),
        "software": in_states(found, StateFormats(masters=masters)) if program in OWN else found,
    }
    return Setting(**usual | changes)


def seconds(passes):
    return sum(one.seconds for one in passes)


@given(
    program=st.sampled_from(("scrimp", "llmq", "torchtitan")),
    model=st.sampled_from(("qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-7b")),
    precision=st.sampled_from([name for name in RECIPES if name != "fp32" and not name.startswith("int8")]),
    recompute=st.sampled_from(("none", "selective", "full")),
    masters=st.booleans(),
    micro_batch=st.sampled_from((4, 64)),
    plans_head=st.booleans(),
)
def test_passes_add_up_to_the_prediction_and_floors_lie_below(
    program, model, precision, recompute, masters, micro_batch, plans_head
):
    one = setting(
        program, model, masters=masters, precision=precision, recompute=recompute, micro_batch=micro_batch
    )
    if plans_head:
        one = dataclasses.replace(one, formats={f"{HEAD}.{gemm}": precision for gemm in GEMMS})
    said = predict(one).seconds
    # Predictions let sums of gradients run beside products, as they do in programs of another name.
    beside = dataclasses.replace(one, software=dataclasses.replace(one.software, name="another"))
    assert seconds(passes_of(beside)) == pytest.approx(said["compute"] + said["optimizer"], rel=1e-9)
    if program in OWN:
        taken, least = passes_of(one), floor_of(one)
        assert seconds(least) < seconds(taken)
        assert above_floor(one)[0].seconds > 0.05 * (seconds(taken) - seconds(least))


@pytest.mark.parametrize(
    ("masters", "precision", "in_blocks", "launches"),
    [
        (False, "bf16", 8 * 2 - 2, 8),
        (False, "mxfp8", 7 * 6, 8 * (4 * 24 + 1)),
        (False, "fp8", 7 * 6, 8 * (4 * 24 + 1)),
        (False, "fp4", 8 * 2 - 2, 8),
        (True, "bf16", 8 * 6 - 4, 8),
        (True, "mxfp8", 7 * 10 + 6, 8 * (4 * 24 + 1)),
    ],
)
def test_sums_of_gradients_are_those_of_eight_micro_batches(masters, precision, in_blocks, launches):
    """A kernel reads 4 + 2 bytes and writes 4 in float32, the first time 2 and 4; in bf16 it reads 2 + 2, writes 2. A
    product that adds reads and writes the sum, the first one writes it, and all leave out a result of 2 bytes. To sums
    in bf16 those of many micro-batches do not add."""
    one = setting(masters=masters, precision=precision)
    found = {each.name: each for each in passes_of(one)}["sums of gradients"]
    numbers = sum(linear.parameters for block in one.model.blocks for linear in block.linears)
    of_head = 7 * 10 + 6 if masters else 7 * 6
    assert found.moved == pytest.approx(in_blocks * numbers + of_head * one.model.head_parameters, rel=1e-9)
    assert found.launches == launches


def test_weights_that_are_quantized_once_move_their_bytes_once():
    """fp8: three bytes a number of the weight for fprop, and for dgrad, in each of eight micro-batches."""
    apart, kept = (setting(precision="fp8", keeps_operands=keeps) for keeps in (False, True))
    moved = [{one.name: one.moved for one in passes_of(each)} for each in (apart, kept)]
    name = "operands in 8 or 4 bits"
    numbers = sum(linear.parameters for block in apart.model.blocks for linear in block.linears)
    assert moved[0].pop(name) - moved[1].pop(name) == pytest.approx(7 * (3 + 3) * numbers, rel=1e-9)
    assert moved[0] == moved[1]


def floors(**changes):
    return {one.name: one for one in floor_of(setting(name="llama-3.2-1b", **changes))}


D, F, C, A, L, V = 2048, 8192, 3072, 2048, 16, 128_256
"""Llama 3.2 1B: width, ffn, queries with keys and values, what attention gives, blocks, words."""
TOKENS = 64 * 1024
IN_BLOCKS = D * C + A * D + 3 * D * F


def test_floors_of_bf16_are_those_that_a_hand_reckons():
    found = floors()
    stream, gates, rotation = 16 * D, 8 * F, 4 * C
    final_norm = 6 * D
    moved = 2 * TOKENS * (L * (stream + gates + rotation) + final_norm)
    assert found["norms, gates, rotation"].moved == moved
    assert found["loss"].moved == 4 * TOKENS * V
    # A master and both moments read and written, a sum in fp32 read, a weight in bf16 written.
    parameters = L * (IN_BLOCKS + 2 * D) + V * D
    assert found["update"].moved == pytest.approx((24 + 4 + 2) * parameters, rel=1e-3)
    assert found["sums of gradients"].moved == (8 * 6 - 4) * (L * IN_BLOCKS + V * D)
    assert found["products"].flops == 6 * TOKENS * L * IN_BLOCKS
    assert "operands in 8 or 4 bits" not in found
    alone = floors(masters=False)
    assert alone["update"].moved == pytest.approx((2 * (4 + 2) + 2) * parameters, rel=1e-3)
    assert alone["sums of gradients"].moved == (8 * 2 - 2) * (L * IN_BLOCKS + V * D)


@pytest.mark.parametrize(
    ("recipe", "code", "later"), [("fp8", 1, 0), ("mxfp4", 0.5, 0), ("fp8_tensor", 1, 4)]
)
def test_floors_of_operands_are_those_that_a_hand_reckons(recipe, code, later):
    found = floors(precision=recipe)
    # What is kept in bf16 anyway shows its largest number when it is written.
    made, kept = 2 * code - 2 + later, 2 * code + 2
    inputs = made * (D + D + F) + kept * A
    gradients = made * (C + 2 * F) + kept * (D + D)
    assert found["operands in 8 or 4 bits"].moved == TOKENS * L * (inputs + gradients)
    weights = 2 * code * L * IN_BLOCKS
    assert found["update"].moved - floors()["update"].moved == weights


@pytest.mark.parametrize(("recipe", "code", "later"), [("mxfp4", 0.5, 0), ("fp8_tensor", 1, 4)])
def test_floors_of_a_head_in_eight_bits_are_those_that_a_hand_reckons(recipe, code, later):
    """Codes both ways of the final norm's result and of the logits' gradients, and of the weight by the update."""
    plain, found = floors(), floors(formats={f"{HEAD}.{gemm}": recipe for gemm in GEMMS})
    assert found["operands in 8 or 4 bits"].moved == TOKENS * (2 * code - 2 + later) * (D + V)
    assert found["update"].moved - plain["update"].moved == 2 * code * D * V
    assert found["head"].flops == plain["head"].flops
    assert found["loss"] == plain["loss"]


def test_a_step_of_full_recomputation_runs_its_forward_pass_again():
    none, full = ({one.name: one for one in passes_of(setting(recompute=one))} for one in ("none", "full"))
    again = full["made again"]
    # All but the last product, which nothing reads: of products a third is forward, of attention 2 of 7.
    down = sum(2 * 64 * 1024 * linear.parameters for linear in setting().model.blocks[0].linears[-1:]) * 24
    forward = none["products"].flops / 3 + none["attention"].flops * 2 / 7
    assert again.flops == pytest.approx(forward - down, rel=1e-9)
    assert {name: one for name, one in full.items() if name != "made again"} == none


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": load_hardware("8xh100"), "layout": ResolvedLayout(dp=8, fsdp=1)}, "several devices"),
        ({"model": sizes_of(spec_of(preset("qwen3-30b-a3b")))}, "a model with experts"),
        ({"offload": Offload(optimizer=True)}, "on the host"),
        ({"recompute": 3}, "a number of blocks"),
        ({"blocks": (BlockPlan(),) * 24}, "one by one"),
    ],
)
def test_steps_without_an_account_are_refused_by_name(changes, words):
    with pytest.raises(PlanError, match=words):
        passes_of(setting(**changes))


def test_faster_memory_shortens_what_moves_numbers_alone():
    one = setting(precision="fp8_tensor")
    group = one.cluster.groups[0]
    device = dataclasses.replace(group.node.device, memory_bandwidth=2 * group.node.device.memory_bandwidth)
    node = dataclasses.replace(group.node, device=device)
    cluster = dataclasses.replace(one.cluster, groups=(dataclasses.replace(group, node=node),))
    fast = {found.name: found for found in passes_of(dataclasses.replace(one, cluster=cluster))}
    for slow in passes_of(one):
        halved = slow.name not in ("products", "attention", "head")
        assert fast[slow.name].seconds == pytest.approx(slow.seconds / (2 if halved else 1), rel=1e-9)
