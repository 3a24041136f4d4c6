"""What order costs a step: a difference of two predictions, and the words for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from scrimp.config import preset
from scrimp.config.resolved import ResolvedLayout
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.attention_price import price_of_order, price_text
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import in_states, software, with_attention
from scrimp.planner.layout.state_formats import StateFormats
from scrimp.planner.layout.step_account import above_floor


def setting(hardware: str = "h100", program: str = "scrimp", **changes: Any) -> Setting:
    found = software(program)
    usual = {
        "model": sizes_of(spec_of(preset("qwen2.5-7b"))),
        "cluster": load_hardware(hardware),
        "sequence": 1024,
        "global_batch": 512,
        "micro_batch": 4,
        "layout": ResolvedLayout(dp=1, fsdp=1),
        "software": in_states(found, StateFormats(masters=False)) if program.startswith("scrimp") else found,
        "precision": "fp8_tensor",
    }
    return Setting(**usual | changes)


def priced(one: Setting) -> tuple[float, str | None]:
    seconds = predict(one).step_seconds
    return price_of_order(one, seconds), price_text(one, seconds)


def in_any_order(one: Setting) -> Setting:
    return dataclasses.replace(
        one, software=with_attention(one.software, deterministic=False, documents=False)
    )


def test_the_price_is_what_the_account_has_above_its_floor() -> None:
    """The floor's attention is the device's best; all else of a step is the same, and a step is a little more."""
    one = setting()
    (attention,) = (each for each in above_floor(one) if each.taken.name == "attention")
    price, text = priced(one)
    assert price == pytest.approx((1.0 + one.software.step_share) * attention.seconds, rel=1e-9)
    assert price == pytest.approx(0.50, abs=0.01)
    seconds = predict(one).step_seconds
    assert text == (
        f"attention held to FlashAttention-2: +{price:.2g} s of {seconds:.3g} s a step, "
        f"+{price / (seconds - price):.1%}; without: --train.no-deterministic --data.no-mask-documents"
    )


def test_a_run_without_order_saves_what_another_pays() -> None:
    price, _ = priced(setting())
    saved, text = priced(in_any_order(setting()))
    assert saved == pytest.approx(-price)
    assert text is not None
    assert text.startswith(f"attention by torch's choice, not FlashAttention-2: -{price:.2g} s of ")


@pytest.mark.parametrize("hardware", ["a100-80", "rtx4090", "b300", "mi300x"])
def test_devices_on_which_torch_has_one_kernel_pay_nothing(hardware: str) -> None:
    assert priced(setting(hardware)) == (0.0, None)
    assert priced(in_any_order(setting(hardware))) == (0.0, None)


def test_rows_that_ranks_pass_on_and_windows_have_one_kernel() -> None:
    shared = setting("2xh100", layout=ResolvedLayout(dp=1, fsdp=1, cp=2))
    assert priced(shared) == (0.0, None)
    heads = dataclasses.replace(shared.layout, cp_method="ulysses")
    assert priced(dataclasses.replace(shared, layout=heads))[0] > 0.1
    model = dataclasses.replace(preset("qwen2.5-7b"), family="mistral", sliding_window=512)
    assert priced(setting(model=sizes_of(spec_of(model)))) == (0.0, None)


def test_documents_leave_one_kernel_whatever_the_order() -> None:
    plain = software("scrimp")
    assert plain.attention_kernel == "flash-2"
    for deterministic, documents, kernel in (
        (True, True, "flash-2"),
        (True, False, "flash-2"),
        (False, True, "flash-2"),
        (False, False, "torch"),
    ):
        found = with_attention(plain, deterministic=deterministic, documents=documents)
        assert found.attention_kernel == kernel


@pytest.mark.parametrize("program", ["llmq", "megatron", "torchtitan", "aa-scaling", "fsdp"])
def test_another_programs_kernel_is_that_of_its_file(program: str) -> None:
    found = software(program)
    assert with_attention(found, deterministic=False, documents=False) is found
    assert priced(setting(program=program, precision="bf16")) == (0.0, None)
