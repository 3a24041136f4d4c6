"""The memory account against the tensors that autograd really keeps."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from scrimp.config import Architecture
from scrimp.formats import blocks, quantize
from scrimp.gemm.backends import reference
from scrimp.gemm.layer import PlannedLayer, backward, forward, reference_only
from scrimp.model import Decoder, initialise
from scrimp.planner import MemoryAccount, account_memory, linear_layers, memory
from scrimp.planner.memory import emulated_bytes, saved_input_bytes
from scrimp.precision import GEMMS, RECIPES, LinearPrecision, parse_rules

T = TypeVar("T")

LLAMA = Architecture(
    family="llama",
    vocab_size=96,
    num_layers=1,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    ffn_width=160,
    context=512,
)
ARCHITECTURES = {
    "llama-gqa": LLAMA,
    "llama-mha": dataclasses.replace(LLAMA, num_kv_heads=4),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, head_size=24),
    "deep": dataclasses.replace(LLAMA, num_layers=3),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS, SEQUENCE = 2, 128


def bytes_saved_by_blocks(architecture: Architecture, precision: str, parameters: str) -> int:
    """Distinct storages that autograd saves, less those of a model without blocks."""

    def saved(num_layers: int) -> int:
        model = Decoder(dataclasses.replace(architecture, num_layers=1), dtype=DTYPES[parameters])
        initialise(model, 0)
        model.blocks.extend([_copy(model.blocks[0]) for _ in range(num_layers - 1)])
        if num_layers == 0:
            del model.blocks[0]
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, int] = {}
        kept = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
                kept.append(tensor)
            return tensor

        tokens = torch.arange(ROWS * SEQUENCE).view(ROWS, SEQUENCE) % architecture.vocab_size
        cast = contextlib.nullcontext()
        if precision != parameters:
            cast = torch.autocast("cpu", DTYPES[precision])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
            hidden = model(tokens)
        assert hidden.requires_grad
        return sum(storages.values())

    return saved(architecture.num_layers) - saved(0)


def _copy(block: torch.nn.Module) -> torch.nn.Module:
    import copy

    return copy.deepcopy(block)


@pytest.mark.parametrize(("precision", "parameters"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_activations_equal_what_autograd_saves(name: str, precision: str, parameters: str) -> None:
    architecture = ARCHITECTURES[name]
    account = account_memory(
        architecture,
        precision=precision,
        parameters=parameters,
        master_weights=False,
        micro_batch=ROWS,
        sequence=SEQUENCE,
        loss_chunk=0,
    )
    assert account.activations == pytest.approx(
        bytes_saved_by_blocks(architecture, precision, parameters), rel=0.03
    )


@pytest.mark.parametrize(
    ("parameters", "master", "bytes_per_parameter"),
    [("fp32", False, 16), ("bf16", False, 8), ("bf16", True, 18)],
)
def test_states_take_the_published_bytes_per_parameter(
    parameters: str, master: bool, bytes_per_parameter: int
) -> None:
    account = account_memory(
        LLAMA,
        precision=parameters,
        parameters=parameters,
        master_weights=master,
        micro_batch=1,
        sequence=16,
        loss_chunk=0,
    )
    assert account.states == bytes_per_parameter * LLAMA.num_parameters


def test_a_loss_chunk_bounds_the_logits() -> None:
    def head(chunk: int) -> int:
        return account_memory(
            LLAMA,
            precision="fp32",
            parameters="fp32",
            master_weights=False,
            micro_batch=4,
            sequence=128,
            loss_chunk=chunk,
        ).head

    assert head(0) == head(512) == head(4096)
    assert head(0) - head(128) == 384 * LLAMA.vocab_size * 8


def account(precision: str, architecture: Architecture = LLAMA, **changes) -> MemoryAccount:
    """The account of a run by its rules, with parameters in the compute format."""
    rules = parse_rules(precision)
    assigned = rules.assign(linear_layers(architecture))
    sizes = {
        "parameters": rules.compute,
        "micro_batch": ROWS,
        "sequence": SEQUENCE,
        "loss_chunk": 0,
        **changes,
    }
    return account_memory(
        architecture,
        precision=rules.compute,
        master_weights=False,
        linears={layer: choice for layer, (choice, _) in assigned.items()},
        **sizes,
    )


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_choices_of_one_high_precision_change_no_account(name: str, parameters: str) -> None:
    architecture = ARCHITECTURES[name]
    plain = account_memory(
        architecture,
        precision="bf16",
        parameters=parameters,
        master_weights=False,
        micro_batch=ROWS,
        sequence=SEQUENCE,
        loss_chunk=0,
    )
    assert account("bf16", architecture, parameters=parameters) == plain
    assert account("bf16,*=bf16,head.saved=bf16", architecture, parameters=parameters) == plain


# Known answers of 256 tokens, width 64, 4 heads of 16, 2 KV heads, ffn 160: 2 bytes of two residual inputs, of
# q, k, v, attention's output, gate and up and of three inputs, 4 of two norms and 4 softmax sums.
TOKENS = ROWS * SEQUENCE
BF16_BYTES = TOKENS * (2 * (2 * 64 + 2 * 64 + 2 * 32 + 2 * 160 + 64 + 64 + 160) + 4 * (2 + 4))


@pytest.mark.parametrize(
    ("precision", "bytes_of_inputs"),
    [
        ("bf16", 2 * TOKENS * (64 + 64 + 160)),
        # One byte an element, and an fp32 scale per 128 tokens of each channel.
        ("fp8", (TOKENS + 4 * TOKENS // 128) * (64 + 64 + 160)),
        # The attention output stays in bf16 for attention itself: its codes come on top.
        ("fp8,*.attention.out.saved=fp8", (TOKENS + 4 * TOKENS // 128) * (64 + 64 + 160 + 64)),
        ("fp4", (TOKENS // 2 + 4 * TOKENS // 128) * (64 + 64 + 160)),
        ("mxfp8", (TOKENS + TOKENS // 32) * (64 + 64 + 160)),
        ("nvfp4", (TOKENS // 2 + TOKENS // 16) * (64 + 64 + 160) + 3 * 4),
        ("fp8,*.wgrad=bf16", 2 * TOKENS * (64 + 64 + 160)),
        ("bf16,*.mlp.down.saved=fp8", 2 * TOKENS * (64 + 64) + (TOKENS + 4 * TOKENS // 128) * 160),
        ("fp8,*.mlp.*.saved=recompute", (TOKENS + 4 * TOKENS // 128) * 64),
        ("bf16,*.mlp.down.saved=fp32", 2 * TOKENS * (64 + 64) + 4 * TOKENS * 160),
    ],
)
def test_what_wgrad_reads_takes_the_bytes_of_its_format(precision: str, bytes_of_inputs: int) -> None:
    assert account("bf16").activations == BF16_BYTES
    others = BF16_BYTES - 2 * TOKENS * (64 + 64 + 160)
    assert account(precision).activations == others + bytes_of_inputs


def test_blocks_may_differ() -> None:
    deep = ARCHITECTURES["deep"]
    low, high, mixed = (account(text, deep).activations for text in ("fp8", "bf16", "fp8,blocks.0.*=bf16"))
    assert 3 * (mixed - low) == high - low > 0


@pytest.mark.parametrize("tokens", [1, 17, 128, 200])
@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].wgrad])
def test_saved_codes_take_the_bytes_that_quantizing_gives(name: str, tokens: int) -> None:
    gemm = RECIPES[name].wgrad
    assert gemm is not None
    x = gemm.b
    codes = quantize(torch.ones(tokens, 24), x.element, x.scaling, 0, x.rounding, hadamard=x.hadamard)
    assert saved_input_bytes(name, tokens, 24) == codes.nbytes


def test_planned_layers_keep_no_copies_of_weights() -> None:
    gap = account("bf16", parameters="fp32").activations - account("bf16", parameters="bf16").activations
    planned = account("fp8", parameters="fp32").activations - account("fp8", parameters="bf16").activations
    assert planned == 2 * TOKENS * 64 * 2  # the residual stream in fp32
    assert gap - planned == 2 * LLAMA.block_matmul_parameters
    mixed = (
        account("bf16,*.mlp.down=fp8", parameters=parameters).activations for parameters in ("fp32", "bf16")
    )
    fp32_parameters, bf16_parameters = mixed
    assert fp32_parameters - bf16_parameters == gap - 2 * 64 * 160


@pytest.mark.parametrize("tokens", [32, 1024])
def test_a_block_counts_its_largest_emulated_gemm(tokens: int) -> None:
    sizes = {"micro_batch": 1, "sequence": tokens}
    plain, planned = account("bf16", **sizes), account("fp8", **sizes)
    # Outputs and inputs of qkv, out, gate_up, down.
    shapes = [(128, 64), (64, 64), (320, 64), (64, 160)]

    def largest(*gemms: str) -> int:
        choice = LinearPrecision.of("fp8")
        return max(
            emulated_bytes(choice, gemm, tokens, *shape, precision="bf16", parameters="bf16")
            for gemm in gemms
            for shape in shapes
        )

    assert planned.block_backward - plain.block_backward == largest("fprop", "dgrad", "wgrad") > 0
    assert planned.head == plain.head
    only_dgrad = account("bf16,*.dgrad=fp8", **sizes)
    assert only_dgrad.block_backward - plain.block_backward == largest("dgrad")


def test_a_quantized_head_needs_its_gemms_for_one_chunk() -> None:
    added = []
    for chunk in (64, 0):
        plain, planned = account("bf16", loss_chunk=chunk), account("bf16,head=fp8", loss_chunk=chunk)
        added.append(planned.head - plain.head)
        assert planned.activations == plain.activations
        assert planned.block_backward == plain.block_backward
    assert 0 < added[0] < added[1]


def test_the_account_knows_the_pieces_in_which_the_reference_works() -> None:
    assert memory.PIECE_ELEMENTS == blocks.PIECE_ELEMENTS


def measured_peaks(
    name: str, shape: tuple[int, int, int], compute: torch.dtype, parameters: torch.dtype
) -> dict[str, int]:
    """Profiler's peak of each GEMM of a planned layer, less what the account counts elsewhere."""
    layer = PlannedLayer("layer", LinearPrecision.of(name), choose=reference_only)
    tokens, outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, inputs, generator=generator).to(compute)
    w = torch.randn(outputs, inputs, generator=generator).to(parameters)
    g = torch.randn(tokens, outputs, generator=generator).to(compute)
    now = layer.clock.now

    def grads(of: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return backward(g, codes, w, layer, compute, now, needs_x=of == "dgrad", needs_weight=of == "wgrad")

    (y, codes), fprop = allocated(lambda: forward(x, w, layer, compute, keep_codes=True))
    assert codes is not None
    (dx, _), dgrad = allocated(lambda: grads("dgrad"))
    (_, dw), wgrad = allocated(lambda: grads("wgrad"))
    assert dx is not None
    assert dw is not None
    return {"fprop": fprop - y.nbytes - codes.nbytes, "dgrad": dgrad - dx.nbytes, "wgrad": wgrad - dw.nbytes}


def allocated(function: Callable[[], T]) -> tuple[T, int]:
    """What a function returns, and the largest sum of live bytes that it allocated."""
    function()  # what is made once
    with torch.profiler.profile(profile_memory=True) as profile:
        result = function()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return result, peak


@pytest.mark.parametrize(("compute", "parameters"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].wgrad])
def test_the_emulated_gemms_of_a_layer_hold_at_most_what_the_account_says(
    name: str, device: str, compute: str, parameters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pieces of an accelerator on this CPU, with bf16 carriers whether or not it multiplies them fast.
    monkeypatch.setitem(blocks.PIECE_ELEMENTS, "cpu", memory.PIECE_ELEMENTS[device])
    monkeypatch.setattr(reference, "multiplies_bf16_fast", lambda device: True)
    for shape in ((2048, 1024, 1024), (1024, 2048, 512), (1000, 300, 700)):
        measured = measured_peaks(name, shape, DTYPES[compute], DTYPES[parameters])
        predicted = {
            gemm: emulated_bytes(
                LinearPrecision.of(name),
                gemm,
                *shape,
                precision=compute,
                parameters=parameters,
                device=device,
            )
            for gemm in GEMMS
        }
        assert all(predicted[gemm] >= measured[gemm] for gemm in GEMMS), (shape, predicted, measured)
        assert max(predicted.values()) <= 2 * max(measured.values()), (shape, predicted, measured)


def test_kept_codes_of_a_plain_layer_are_counted_while_they_are_made_and_read() -> None:
    kept = dataclasses.replace(LinearPrecision.of("bf16"), saved="mxfp8")
    sizes = {"precision": "bf16", "parameters": "bf16"}
    made, gradient, read = (emulated_bytes(kept, gemm, 256, 64, 160, **sizes) for gemm in GEMMS)
    assert made > 0
    assert gradient == 0
    assert read >= 12 * 256 * 160


def test_fewer_saved_bytes_make_a_smaller_peak_at_a_large_batch() -> None:
    wide = dataclasses.replace(LLAMA, num_layers=24, width=256, ffn_width=1024, head_size=64)
    peaks = [account(text, wide, micro_batch=16).peak for text in ("fp32", "bf16", "fp8", "nvfp4")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
