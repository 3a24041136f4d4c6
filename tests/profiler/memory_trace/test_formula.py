"""Traced bytes against those that a formula gives: tensors of known shape, counted by hand.

Of what a block keeps per token, in elements (D width, A attention width, N*K all key heads, F ffn width, H heads)::

    2 D                          residual stream before each norm, in the format of the parameters
    D + D + F                    inputs X of qkv, gate_up and down: in the compute format, or as codes
    2 A + 2 N K + 2 F            rotated q, k, v and the attention output; gate and up
    2 + H                        fp32 statistics: two norms, softmax sums
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
from test_peaks import LLAMA, QWEN2, QWEN3

from scrimp.config import Architecture
from scrimp.gemm.backends import reference
from scrimp.models import spec_of
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.planner.memory.costs import StepCosts
from scrimp.precision import parse_rules
from scrimp.profiler.memory_trace import TracedStep, remembered

SIZES = {"fp32": 4, "bf16": 2}
TOKENS = 2 * 256
INPUTS = (LLAMA.width, LLAMA.width, LLAMA.ffn_width)


def traced(architecture: Architecture, precision: str, **changes: object) -> StepCosts:
    rules = parse_rules(precision)
    arguments = {
        "precision": rules.compute,
        "parameters": rules.compute,
        "optimizer": AdamWMemory(rules.compute),
        "micro_batch": 2,
        "sequence": 256,
        "loss_chunk": 0,
        **changes,
    }
    linears = rules.assign(spec_of(architecture).origins)
    return TracedStep(architecture, linears=linears, **arguments).costs()  # type: ignore[arg-type]


def kept(costs: StepCosts) -> int:
    (kind,) = costs.classes
    return kind.choices["keep"].kept


@functools.cache
def kept_in_bf16() -> int:
    return kept(traced(LLAMA, "bf16"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "architecture", [dataclasses.replace(LLAMA, num_kv_heads=4), QWEN2, LLAMA], ids=["mha", "qwen2", "gqa"]
)
@pytest.mark.every(2)
def test_a_block_keeps_what_the_formula_says(architecture: Architecture, precision: str) -> None:
    a, size = architecture, SIZES[precision]
    elements = 4 * a.width + 2 * a.attention_width + 2 * a.kv_width + 3 * a.ffn_width
    expected = TOKENS * (elements * size + 4 * (2 + a.num_heads))
    assert kept(traced(a, precision)) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("precision", "bytes_of_inputs"),
    [
        # One byte an element, and an fp32 scale per 128 tokens of each channel.
        ("fp8", (TOKENS + 4 * TOKENS // 128) * sum(INPUTS)),
        # The attention output stays in bf16 for attention itself: its codes come on top.
        (
            "fp8,*.attention.out.saved=fp8",
            (TOKENS + 4 * TOKENS // 128) * (sum(INPUTS) + LLAMA.attention_width),
        ),
        ("fp4", (TOKENS // 2 + 4 * TOKENS // 128) * sum(INPUTS)),
        ("mxfp8", (TOKENS + TOKENS // 32) * sum(INPUTS)),
        ("nvfp4", (TOKENS // 2 + TOKENS // 16) * sum(INPUTS) + 3 * 4),
        ("fp8,*.wgrad=bf16", 2 * TOKENS * sum(INPUTS)),
        (
            "bf16,*.mlp.down.saved=fp8",
            2 * TOKENS * sum(INPUTS[:2]) + (TOKENS + 4 * TOKENS // 128) * INPUTS[2],
        ),
        # The norm before gate_up runs again, and with it its statistics.
        ("fp8,*.mlp.*.saved=recompute", (TOKENS + 4 * TOKENS // 128) * INPUTS[0] - 4 * TOKENS),
    ],
)
@pytest.mark.slow
def test_what_wgrad_reads_takes_the_bytes_of_its_format(precision: str, bytes_of_inputs: int) -> None:
    others = kept_in_bf16() - 2 * TOKENS * sum(INPUTS)
    assert kept(traced(LLAMA, precision)) == others + bytes_of_inputs


@pytest.mark.parametrize(
    ("parameters", "master", "bytes_per_parameter"),
    [("fp32", False, 16), ("bf16", False, 8), ("bf16", True, 18)],
)
@pytest.mark.parametrize("architecture", [LLAMA, QWEN2, QWEN3], ids=["llama", "tied", "norms"])
@pytest.mark.every(2)
def test_states_take_the_published_bytes_per_parameter(
    architecture: Architecture, parameters: str, master: bool, bytes_per_parameter: int
) -> None:
    costs = traced(architecture, parameters, optimizer=AdamWMemory(parameters, master))
    gradients = costs.ends.gradients + sum(costs.classes[number].gradients for number in costs.blocks)
    assert costs.checkpoint_copy + gradients == bytes_per_parameter * spec_of(architecture).parameters


@pytest.mark.slow
def test_a_gpus_emulated_products_do_not_depend_on_the_cpu_that_traces_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def peaks(device: str) -> list[int]:
        found = []
        for is_fast in (True, False):
            monkeypatch.setattr(remembered, "_KNOWN", {})  # it has met these products
            monkeypatch.setattr(reference, "multiplies_bf16_fast", lambda _, answer=is_fast: answer)
            (kind,) = traced(LLAMA, "fp8", device_functions=device).classes
            found.append(kind.choices["keep"].forward_peak)
        return found

    fast, slow = peaks("cuda")
    assert fast == slow
    fast, slow = peaks("cpu")
    assert fast != slow  # there the carriers follow the processor
