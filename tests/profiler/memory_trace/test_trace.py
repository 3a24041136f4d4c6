"""Costs from a trace: what they add up to, other devices, and that nothing else notices."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_peaks import FORMATS, LLAMA, QWEN2

from scrimp.config import Architecture
from scrimp.config.activations import ALL_ACTIVATIONS, LEVELS
from scrimp.errors import PlanError
from scrimp.formats import grouping
from scrimp.models import spec_of
from scrimp.models.flash import Gpu, Heads, most_backward_bytes
from scrimp.models.functions import rms_norm
from scrimp.objectives import cross_entropy as loss
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.placement import Placement
from scrimp.planner.memory.states import device_peak
from scrimp.precision import LinearPrecision
from scrimp.profiler.memory_trace import TracedStep, remembered, trace

quantize = importlib.import_module("scrimp.formats.quantize")  # the package's name for it is a function

LLAMA_1B = Architecture(
    family="llama",
    vocab_size=128_256,
    num_layers=16,
    width=2048,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    ffn_width=8192,
    context=8192,
)


def traced(architecture: Architecture = LLAMA, **changes) -> StepCosts:  # type: ignore[no-untyped-def]
    arguments = {
        "precision": "bf16",
        "parameters": "bf16",
        "optimizer": AdamWMemory("bf16"),
        "micro_batch": 2,
        "sequence": 256,
        "loss_chunk": 0,
        **changes,
    }
    return TracedStep(architecture, **arguments).costs()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("chunk", [32, 100])
@pytest.mark.slow
def test_three_chunks_of_the_loss_take_what_all_of_them_take(
    monkeypatch: pytest.MonkeyPatch, device: str, chunk: int
) -> None:
    """512 tokens: 16 equal chunks, or six of which the last is shorter."""
    some = traced(loss_chunk=chunk, device_functions=device)
    monkeypatch.setattr(trace, "ends_alone", contextlib.nullcontext)
    assert traced(loss_chunk=chunk, device_functions=device) == some


def test_every_level_keeps_less_and_none_loses_weights() -> None:
    (block,) = traced(activations=LEVELS).classes
    kept = [block.choices[level].kept for level in LEVELS]
    assert all(more > less for more, less in itertools.pairwise(kept))
    assert kept[-1] == 2 * 256 * 128 * 2  # its output alone
    assert block.weights == block.gradients == 2 * spec_of(LLAMA).block(0).parameters
    assert block.optimizer == 4 * spec_of(LLAMA).block(0).parameters
    assert block.parameters == spec_of(LLAMA).block(0).parameters


@pytest.mark.slow
def test_an_offloaded_block_leaves_its_output_less_its_input() -> None:
    for formats in (FORMATS["bf16"], FORMATS["autocast"]):
        (block,) = traced(activations=ALL_ACTIVATIONS, **{"parameters": "fp32", **formats}).classes
        for level in LEVELS:
            here, there = block.choices[level], block.choices[f"{level}+offload"]
            # What is too small to move, and attention's results that recomputation holds itself.
            assert there.kept < (16_384 if level != "qkv" else here.kept), level
            assert here.kept + here.cast == there.kept + there.cast + there.host


@pytest.mark.slow
def test_cast_copies_of_recomputed_blocks_live_until_the_loss() -> None:
    (block,) = traced(parameters="fp32", activations=("keep", "block")).classes
    weights = 2 * spec_of(LLAMA).block(0).parameters_per_token
    assert (block.choices["keep"].cast, block.choices["block"].cast) == (0, weights)


@pytest.mark.slow
def test_blocks_of_equal_formats_are_one_class() -> None:
    fp8 = LinearPrecision.of("fp8")
    costs = traced(linears={"blocks.1.mlp.down": fp8}, sequence=64)
    assert costs.blocks == (0, 1, 0)
    plain, quantized = (block.choices["keep"] for block in costs.classes)
    assert quantized.kept < plain.kept


@pytest.mark.slow
def test_a_tied_heads_gradient_waits_for_the_embeddings() -> None:
    scalars = 64
    assert traced().ends.waiting < scalars
    waiting = traced(QWEN2).ends.waiting
    assert waiting == pytest.approx(2 * QWEN2.vocab_size * QWEN2.width, abs=scalars)


@pytest.mark.slow
def test_states_follow_the_optimizers_formats() -> None:
    small = traced(optimizer=AdamWMemory("bf16", moments="8bit")).classes[0].optimizer
    assert 2 * spec_of(LLAMA).block(0).parameters < small < 2.2 * spec_of(LLAMA).block(0).parameters
    masters = traced(optimizer=AdamWMemory("bf16", master_weights=True)).classes[0]
    assert (masters.gradients, masters.optimizer) == (
        4 * spec_of(LLAMA).block(0).parameters,
        12 * spec_of(LLAMA).block(0).parameters,
    )


@pytest.mark.slow
def test_cuda_keeps_what_plain_operations_save() -> None:
    def kept(**changes) -> int:  # type: ignore[no-untyped-def]
        return traced(**changes).classes[0].choices["keep"].kept

    tokens, a = 2 * 256, LLAMA
    # The values are a view that holds the whole of qkv; SiLU of gate beside gate and up; fp32 softmax sums and two
    # norms' statistics; a granule of 512 bytes.
    rotated = a.attention_width + a.kv_width
    elements = (
        4 * a.width + a.attention_width + 2 * a.kv_width + rotated + a.attention_width + 4 * a.ffn_width
    )
    expected = tokens * (2 * elements + 4 * (a.num_heads + 2))
    assert kept(device_functions="cuda") == pytest.approx(expected, rel=0.03)
    assert kept(device_functions="cuda") > kept()


@pytest.mark.slow
def test_attention_without_a_fused_kernel_holds_its_scores() -> None:
    def kept(architecture: Architecture, width: str) -> int:
        formats = {"precision": width, "parameters": width, "device_functions": "cuda"}
        return traced(architecture, **formats).classes[0].choices["keep"].kept

    own_keys = dataclasses.replace(LLAMA, num_kv_heads=LLAMA.num_heads)
    scores = 4 * 2 * LLAMA.num_heads * 256 * 256
    for architecture in (LLAMA, own_keys):
        assert kept(architecture, "fp32") > 2 * kept(architecture, "bf16") + scores / 2


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("parameters", ["bf16", "fp32"])
@pytest.mark.every(4)
@pytest.mark.slow
def test_older_gpus_hold_the_scores_of_attention_in_bf16(parameters: str, kv_heads: int) -> None:
    def kept(capability: tuple[int, int]) -> int:
        costs = traced(a, device_functions="cuda", gpu=Gpu(72, capability), parameters=parameters)
        return costs.classes[0].choices["keep"].kept

    a = dataclasses.replace(LLAMA, num_kv_heads=kv_heads)
    rows, length, heads, size = 2, 256, a.num_heads, a.head_size
    tokens = rows * length
    # In fp32: a softmax for every pair of tokens, queries, and keys and values repeated for every query head.
    unfused = 4 * heads * (rows * length**2 + 3 * tokens * size)
    # Softmax sums, rotated queries and keys, and the values as a view of the whole of qkv.
    fused = 4 * tokens * heads + 2 * tokens * size * (2 * heads + 3 * kv_heads)
    assert kept((7, 5)) - kept((8, 0)) == unfused - fused
    assert kept((7, 0)) == kept((7, 5))
    assert kept((8, 0)) == kept((8, 9)) == kept((9, 0)) == kept((12, 0))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.slow
def test_sums_in_any_order_take_the_bytes_of_one_copy(documents: bool) -> None:
    def peaks(deterministic: bool) -> tuple[int, int]:
        gpu = Gpu(132, (9, 0), deterministic)
        found = traced(device_functions="cuda", documents=documents, gpu=gpu).classes[0].choices["keep"]
        return found.kept, found.backward_peak

    def workspace(deterministic: bool) -> int:
        a = LLAMA
        heads = Heads(a.num_heads, a.num_kv_heads, a.head_size, 132, deterministic)
        return most_backward_bytes(heads, 2, 256)

    (kept, ordered), (kept_free, free) = peaks(True), peaks(False)
    assert kept_free == kept
    more = workspace(True) - workspace(False)
    assert 0.8 * more < ordered - free <= more, "without its copies another part of the block takes most"


@pytest.mark.slow
def test_where_no_kernel_keeps_documents_apart_a_gpu_has_a_mask_of_bytes() -> None:
    def tables(documents: bool, capability: tuple[int, int], head_size: int = 32) -> int:
        a = dataclasses.replace(LLAMA, head_size=head_size)
        gpu = Gpu(72, capability)
        return traced(a, device_functions="cuda", documents=documents, gpu=gpu).tables

    mask = 2 * 256 * 256
    assert tables(True, (7, 5)) - tables(False, (7, 5)) == mask
    assert tables(True, (8, 0)) == tables(False, (8, 0))
    assert tables(True, (8, 0), 36) - tables(False, (8, 0), 36) == mask  # no whole multiple of 8


@pytest.mark.slow
def test_a_kernel_that_knows_windows_takes_no_mask() -> None:
    mistral = dataclasses.replace(LLAMA, family="mistral", sliding_window=128)
    fused, old = (Gpu(72, capability) for capability in ((8, 0), (7, 5)))
    assert traced(mistral, device_functions="cuda", gpu=fused) == traced(device_functions="cuda", gpu=fused)
    tables = [traced(a, device_functions="cuda", gpu=old).tables for a in (LLAMA, mistral)]
    assert tables[1] - tables[0] == 256 * 256


@pytest.mark.slow
def test_a_trace_leaves_everything_as_it_was() -> None:
    state, x = torch.get_rng_state(), torch.randn(4, 8).bfloat16()
    torch.set_rng_state(state)
    expected = rms_norm(x, torch.ones(8), 1e-5)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        inside = traced(parameters="fp32", sequence=64)
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
    traced(device_functions="cuda", linears={"head": LinearPrecision.of("nvfp4")}, sequence=64)
    assert inside == traced(parameters="fp32", sequence=64)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(rms_norm(x, torch.ones(8), 1e-5), expected)
    assert type(torch.ones(1)) is torch.Tensor


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> list[slice]:
    """Everything is cut into more than three pieces, by the reference; the pieces that were quantized."""
    monkeypatch.setattr("scrimp.gemm.backends.numba.has_numba", lambda: False)
    for sizes in (grouping.PIECE_ELEMENTS, loss.BLOCK_ELEMENTS):
        for device in ("cpu", "cuda"):
            monkeypatch.setitem(sizes, device, 2**12)
    monkeypatch.setattr(remembered, "_KNOWN", {})
    found: list[slice] = []

    def spied(*arguments: Any) -> Iterator[Any]:
        for piece in rounded(*arguments):
            found.append(piece.rows)
            yield piece

    rounded = quantize._rounded
    monkeypatch.setattr(quantize, "_rounded", spied)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "device"),
    [
        (recipe, device)
        for recipe in ("nvfp4", "fp8", "fp8_row", "fp8_tensor", "fp4", "mxfp8")
        for device in ("cpu", "cuda")
    ],
)
def test_pieces_at_the_ends_cost_what_all_pieces_do(
    many_pieces: list[slice], monkeypatch: pytest.MonkeyPatch, recipe: str, device: str
) -> None:
    arguments = {
        "linears": {
            layer: LinearPrecision.of(recipe) for layer in spec_of(LLAMA).layers() if layer != "head"
        },
        "activations": ("keep", "block"),
        "device_functions": device,
        "sequence": 320,
    }
    ends, taken = traced(**arguments), len(many_pieces)
    monkeypatch.setattr(remembered, "_KNOWN", {})
    monkeypatch.setattr(trace, "ends_alone", contextlib.nullcontext)
    assert traced(**arguments) == ends
    assert len(many_pieces) - taken > 2 * taken > 0


@pytest.mark.slow
def test_a_process_quantizes_once_per_shape_and_device(many_pieces: list[slice]) -> None:
    linears = {"blocks.0.mlp.down": LinearPrecision.of("fp8")}
    first = traced(linears=linears)
    taken = len(many_pieces)
    assert traced(linears=linears) == first
    assert len(many_pieces) == taken > 0
    traced(linears=linears, device_functions="cuda")
    assert len(many_pieces) == 2 * taken


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(PlanError, match="keep, swiglu"):
        traced(activations=("everything",))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.slow
def test_a_billion_parameters_take_seconds_under_all_choices(device: str) -> None:
    start = time.process_time()
    costs = traced(
        LLAMA_1B,
        parameters="fp32",
        optimizer=AdamWMemory("fp32"),
        sequence=2048,
        loss_chunk=2048,
        activations=ALL_ACTIVATIONS,
        device_functions=device,
    )
    assert time.process_time() - start < 10
    peak = device_peak(costs, Placement.resident(16), False)
    assert 16 * spec_of(LLAMA_1B).parameters < peak < 24 * spec_of(LLAMA_1B).parameters
