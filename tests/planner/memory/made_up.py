"""Costs for tests: random small ones, and those of a Llama shape from formulas."""

from collections.abc import Mapping

from hypothesis import strategies as st

from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.planner.memory.machine import Machine

MACHINE = Machine(
    device_bytes=16 * 2**30,
    host_bytes=57 * 10**9,
    upload=2.4e10,
    download=2.4e10,
    upload_together=2.0e10,
    download_together=2.0e10,
    cpu_adam=1e9,
    device_memory=9e11,
)
"""A machine like a consumer card on PCIe 4 x16."""
QWEN_7B = {"width": 3584, "ffn": 18944, "heads": 28, "kv_heads": 4, "blocks": 28, "vocabulary": 152064}
QWEN_14B = {"width": 5120, "ffn": 13824, "heads": 40, "kv_heads": 8, "blocks": 48, "vocabulary": 152064}

_bytes = st.integers(0, 60)
_seconds = st.integers(0, 8).map(float)


@st.composite
def block_costs(draw: st.DrawFn) -> BlockCost:
    return BlockCost(
        kept=draw(_bytes),
        forward_peak=draw(_bytes),
        backward_peak=draw(_bytes),
        accumulating_peak=draw(st.none() | _bytes),
        cast=draw(st.sampled_from((0, 0, 7))),
        host=draw(st.sampled_from((0, 0, 5, 20, 33))),
        forward_seconds=draw(_seconds),
        backward_seconds=draw(_seconds),
    )


@st.composite
def block_classes(draw: st.DrawFn, choices: int = 3) -> BlockClass:
    found = [draw(block_costs()) for _ in range(draw(st.integers(1, choices)))]
    return BlockClass(
        weights=draw(_bytes),
        gradients=draw(_bytes),
        optimizer=draw(_bytes),
        choices={f"choice{i}": cost for i, cost in enumerate(found)},
        parameters=draw(_bytes),
    )


@st.composite
def step_costs(draw: st.DrawFn, blocks: int = 4, choices: int = 3) -> StepCosts:
    classes = tuple(draw(st.lists(block_classes(choices), min_size=1, max_size=2)))
    numbers = st.integers(0, len(classes) - 1)
    ends = EndsCost(
        *(draw(_bytes) for _ in range(4)),
        head_gradients=draw(_bytes),
        embedding_peak=draw(_bytes),
        waiting=draw(st.sampled_from((0, 9))),
        seconds=draw(_seconds),
    )
    return StepCosts(
        classes=classes,
        blocks=tuple(draw(st.lists(numbers, min_size=1, max_size=blocks))),
        ends=ends,
        boundary=draw(st.integers(0, 10)),
        optimizer_peak=draw(_bytes),
        resident=draw(_bytes),
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    rates = st.sampled_from((1.0, 4.0, 15.0, 1e6))
    up, down = draw(rates), draw(rates)
    share = draw(st.sampled_from((1.0, 0.7)))
    return Machine(
        device_bytes=draw(st.integers(50, 700)),
        host_bytes=draw(st.sampled_from((0, 100, 10**6))),
        upload=up,
        download=down,
        upload_together=share * up,
        download_together=share * down,
        cpu_adam=draw(rates),
        device_memory=draw(rates) * 10,
        pinned_bytes=draw(st.sampled_from((None, 80))),
    )


def llama_costs(
    shape: Mapping[str, int],
    tokens: int,
    *,
    weights: int = 2,
    gradients: int = 2,
    optimizer: float = 4,
    flops: float = 6e13,
) -> StepCosts:
    """By the formulas of the memory specification: LLMQ's levels; a backward pass works on all that a block has, and on
    the gradients of gate and up with a copy.

    Args:
        shape: widths and counts, heads of 128.
        tokens: of a micro-batch; rows of 1024, head in pieces of 1024.
        weights, gradients, optimizer: bytes per parameter of a block (ends in bf16).
        flops: per second.
    """
    d, f, h, kv = shape["width"], shape["ffn"], shape["heads"], shape["kv_heads"]
    qkv = 128 * (h + 2 * kv)
    numbers = d * qkv + 128 * h * d + 3 * d * f
    embedding = shape["vocabulary"] * d
    per_byte = flops / 9e11  # FLOPs in the time that a byte of device memory takes
    leaves = {  # bytes per token that a level no longer keeps, FLOPs per token that it makes again
        "keep": (0, 0),
        "swiglu": (2 * f, 6 * f * per_byte),
        "norms": (4 * d, 8 * d * per_byte),
        "mlp": (4 * f, 4 * d * f),
        "qkv": (2 * qkv, 2 * d * qkv),
        "attention": (2 * 128 * h, 4 * 128 * h * 512),
        "block": (2 * d, 2 * 128 * h * d),
    }
    everything = sum(left for left, _ in leaves.values()) + 2 * d + 4 * h + 8
    kept, again, choices = everything, 0.0, {}
    forward = (2 * numbers + 4 * 128 * h * 512) * tokens / flops
    for level, (left, made) in leaves.items():
        kept, again = kept - left, again + made
        cost = {
            "forward_peak": everything * tokens,
            "backward_peak": (everything + 8 * f) * tokens + gradients * numbers,
            "forward_seconds": forward,
            "backward_seconds": 2 * forward + again * tokens / flops,
        }
        choices[level] = BlockCost(kept=kept * tokens, **cost)
        choices[f"{level}+offload"] = BlockCost(kept=0, host=kept * tokens, **cost)
    block = BlockClass(
        weights * numbers, gradients * numbers, int(optimizer * numbers), choices, parameters=numbers
    )
    ends = EndsCost(
        weights=4 * embedding,
        gradients=4 * embedding,
        optimizer=int(2 * min(optimizer, 4) * embedding),
        head_peak=2 * embedding + 6 * shape["vocabulary"] * 1024 + 4 * d * tokens,
        head_gradients=2 * embedding,
        embedding_peak=2 * embedding,
        seconds=6 * embedding * tokens / flops,
    )
    return StepCosts((block,), (0,) * shape["blocks"], ends, boundary=2 * d * tokens)
