"""What each level of recomputation makes again, in the account of one device and in a search for layouts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from scrimp.config import preset
from scrimp.config.activations import LEVELS
from scrimp.config.resolved import ResolvedLayout
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.block_times import block_seconds, level_seconds
from scrimp.planner.layout.predict import kernels_of, planned_seconds
from scrimp.planner.layout.product_times import product_seconds
from scrimp.planner.layout.setting import FULL, SELECTIVE, BlockPlan, Setting
from scrimp.planner.layout.software import software

SPEC = spec_of(preset("llama-3m"))
OWN = Setting(
    model=sizes_of(SPEC),
    cluster=load_hardware("h100"),
    sequence=512,
    global_batch=2,
    micro_batch=2,
    layout=ResolvedLayout(dp=1, fsdp=1),
    software=dataclasses.replace(software("scrimp"), host_ops=0.0),
)


def test_each_level_makes_more_again_and_never_the_whole_forward_pass() -> None:
    block, kernels = SPEC.block(0), kernels_of(OWN)
    one = block_seconds(block, OWN, kernels)
    again = [level_seconds(block, OWN, kernels, level) for level in LEVELS]
    assert again[0] == 0
    assert all(less < more for less, more in itertools.pairwise(again))
    assert again[LEVELS.index("norms")] == one.norms
    # The last product, and the last sum: nothing reads them twice.
    down, width = next(one for one in block.linears if one.name == "mlp.down"), SPEC.architecture.width
    last = product_seconds(down, "fprop", "bf16", OWN, kernels) + kernels.moved(3 * width * 2.0 * OWN.tokens)
    assert again[-1] == one.again.compute == pytest.approx(one.forward.compute - last)


def test_a_search_makes_again_what_the_levels_say_and_other_programs_all() -> None:
    block, kernels = SPEC.block(0), kernels_of(OWN)
    one = block_seconds(block, OWN, kernels)
    for recompute, level in ((SELECTIVE, "norms"), (FULL, "block")):
        planned = planned_seconds(0, BlockPlan(recompute=recompute), OWN, kernels)[1].compute
        assert planned - one.backward.compute == pytest.approx(level_seconds(block, OWN, kernels, level))
    other = dataclasses.replace(OWN, software=software("fsdp"))
    whole = planned_seconds(0, BlockPlan(recompute=FULL), other, kernels_of(other))
    alone = planned_seconds(0, BlockPlan(), other, kernels_of(other))
    assert (whole[1].compute - alone[1].compute) == pytest.approx(alone[0].compute)
