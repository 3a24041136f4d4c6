"""What must hold between predictions of a step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_settings import LLAMA_8B, ROUTED, setting

from scrimp.errors import PlanError
from scrimp.planner.layout.block_times import PassSeconds
from scrimp.planner.layout.predict import beside, predict
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Offload, Setting
from scrimp.planner.layout.stage_memory import peak_bytes


def seconds(one: Setting) -> float:
    return predict(one).step_seconds


@given(
    st.sampled_from(
        [{}, {"zero": 1}, {"tp": 2}, {"pp": 2}, {"pp": 4, "virtual": 2}, {"cp": 2}, {"tp": 2, "pp": 2}]
    ),
    st.sampled_from(["bf16", "fp8_tensor", "mxfp8"]),
    st.sampled_from(["8xh100", "8xb200", "2x8xa100-80"]),
)
def test_causes_add_up_to_the_step(layout: dict[str, int], precision: str, hardware: str) -> None:
    schedule = "interleaved" if layout.get("virtual", 1) > 1 else "1f1b"
    found = predict(setting(hardware=hardware, precision=precision, schedule=schedule, **layout))
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds)
    assert min(found.seconds.values()) >= -1e-9


def test_no_step_is_faster_than_its_products_at_their_peak() -> None:
    one = setting()
    flops = LLAMA_8B.sizes.flops_per_token(4096) * 64 * 4096 / 8
    assert seconds(one) > flops / one.device.peak.bf16


def test_formats_recomputation_and_links_have_their_price() -> None:
    assert seconds(setting(precision="fp8_tensor")) < seconds(setting())
    plain, some, full = (seconds(setting(recompute=one)) for one in ("none", 16, "full"))
    assert plain < some < full
    # All products but the last of a block run once more, beside three passes of all of them and of the head.
    model = LLAMA_8B.sizes
    again = sum(one.parameters_per_token - one.linears[-1].parameters for one in model.blocks)
    passes = 3 * (sum(one.parameters_per_token for one in model.blocks) + model.head_parameters)
    assert full / plain == pytest.approx(1 + again / passes, rel=0.05)
    near, far = setting(hardware="2x8xh100", tp=8), setting(hardware="8x2xh100", tp=8)
    assert seconds(far) > seconds(near)


def test_a_bubble_shrinks_with_micro_batches_and_stages() -> None:
    shares = []
    for batch, virtual in ((8, 1), (64, 1), (64, 4)):
        one = setting(
            pp=4, global_batch=batch, virtual=virtual, schedule="interleaved" if virtual > 1 else "1f1b"
        )
        found = predict(one)
        shares.append(found.seconds["bubble"] / found.step_seconds)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(
        3 / 7, rel=0.2
    )  # (p - 1) / (m + p - 1), m = 4; the last stage is longer


def test_experts_on_many_nodes_cost_their_travels() -> None:
    """Beside those of a long batch, adding up the gradients of experts that four nodes have costs little."""
    near, far = (
        predict(setting(ROUTED, "4x8xh100", of="megatron", zero=1, ep=ep, global_batch=512)).seconds[
            "communication_exposed"
        ]
        for ep in (8, 32)
    )
    assert far > 2 * near


def test_experts_are_added_up_by_those_who_have_the_same() -> None:
    """Each rank of ep has experts of its own: none is added up where all ranks are in ep."""
    own, shared = (
        predict(setting(ROUTED, "2x8xh100", zero=1, ep=ep, global_batch=16)).seconds["communication_exposed"]
        for ep in (16, 1)
    )
    assert own < shared


def test_units_are_copied_whose_weights_are_gathered() -> None:
    """FSDP2 moves what has come once more, in the stream of all else: what nothing hides."""
    one = setting(zero=3)
    plain = dataclasses.replace(one, software=dataclasses.replace(one.software, unit_copies=0.0))
    numbers, bandwidth = LLAMA_8B.sizes.parameters, one.device.bandwidth
    copied = one.micro_batches * 2.0 * (2 * 2.0 + 4.0) * numbers / bandwidth
    found = seconds(one) - seconds(plain)
    assert found == pytest.approx(
        copied, rel=0.15
    )  # the words are gathered once, and all wait for the slowest


def test_copies_share_what_they_add_up() -> None:
    copies, shards = setting(dp=8, zero=1, micro_batch=4), setting(dp=1, micro_batch=4)
    assert predict(copies).seconds["communication_exposed"] >= 0
    assert seconds(shards) == pytest.approx(seconds(copies), rel=0.1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"micro_batch": 3}, "the batch cannot be shared by the ranks that read it"),
        ({"global_batch": 12}, "the batch cannot be shared"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, int], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        dataclasses.replace(setting(), **changed)
    with pytest.raises(PlanError, match="the degrees of the layout are not those of the cluster"):
        setting(tp=3)


FIVE = ("dp", "tp", "pp", "optimizer", "recompute")
"""PanGu-alpha's dimensions (arXiv 2104.12369, section 4): data, operator-level, pipeline and optimizer parallelism, and
rematerialisation."""


@pytest.mark.parametrize("on", list(itertools.product((False, True), repeat=5)))
def test_all_combinations_of_five_dimensions_are_predicted(on: tuple[bool, ...]) -> None:
    """Each dimension does what it is for, whatever the others are."""

    def with_(switches: dict[str, bool]) -> Setting:
        degrees = {name: 1 + switches[name] for name in ("dp", "tp", "pp")}
        shards = 1 + switches["optimizer"]
        devices = math.prod(degrees.values()) * shards
        return setting(
            hardware=f"{devices}xh100" if devices > 1 else "h100",
            fsdp=shards,
            zero=1,
            recompute="full" if switches["recompute"] else "none",
            **degrees,
        )

    switches = dict(zip(FIVE, on, strict=True))
    one = with_(switches)
    step, memory = seconds(one), peak_bytes(one)
    assert step > 0
    assert len(memory) == one.layout.pp
    for name, is_on in switches.items():
        if is_on:
            continue
        other = with_({**switches, name: True})
        if name == "recompute":
            assert seconds(other) > step
            kept = "activations"
        else:
            assert seconds(other) < step
            kept = "optimizer"
        if name != "dp":
            assert peak_bytes(other)[0].categories[kept] < memory[0].categories[kept]


def test_copies_to_the_host_run_beside_exchanges_too() -> None:
    """Else a pass would be shorter where it computes more: what it waits for hides no copies."""
    assert beside(PassSeconds(1.0, 2.0), 2.5).total == 3.0
    assert beside(PassSeconds(1.0, 2.0), 3.5).total == 3.5


def test_devices_without_a_pipeline_wait_for_the_link_between_their_nodes(tmp_path: Path) -> None:
    """16 devices of two kinds that share weights all gather over the link between them."""

    def step(rate: float) -> float:
        file = tmp_path / f"{rate:g}.toml"
        file.write_text(
            '[[nodes]]\nnode = "dgx-h100"\n[[nodes]]\nnode = "dgx-h200"\n'
            f'[link.between]\nname = "x"\nbytes_per_second = {rate}\nlatency_seconds = 1e-5\nachieved = 0.8\n',
            encoding="utf-8",
        )
        return seconds(setting(hardware=str(file), fsdp=16))

    assert step(1e9) > 2 * step(5e10)


@given(
    st.sampled_from([{}, {"zero": 1}, {"pp": 2, "zero": 1}, {"pp": 4, "zero": 1}]),
    st.sampled_from([NONE, SELECTIVE, FULL]),
    st.sampled_from([Offload(), Offload(optimizer=True, master=True, gradients=True, weights=True)]),
    st.sampled_from(["8xrtx4090", "4x2xrtx4060ti", "8xh100"]),
    st.sampled_from([8, 16, 64]),
)
@settings(max_examples=30, deadline=None)
def test_no_recomputation_makes_a_step_shorter_than_its_least(
    layout: dict[str, int], recompute: str, offload: Offload, hardware: str, batch: int
) -> None:
    """More computing hides more of the reductions."""
    small = dataclasses.replace(LLAMA_8B, layers=4, width=1024, ffn_width=4096)
    free = setting(small, hardware, global_batch=batch, **layout)
    free = dataclasses.replace(free, offload=offload if free.layout.pp == 1 else Offload())
    found = predict(free)
    assert found.least <= found.step_seconds
    assert found.least <= seconds(dataclasses.replace(free, recompute=recompute)) * (1 + 1e-9)
