"""The memory account against the tensors that autograd really keeps."""

import contextlib
import dataclasses

import pytest
import torch

from scrimp.config import Architecture
from scrimp.formats import quantize
from scrimp.model import Decoder, initialise
from scrimp.plan import MemoryAccount, account_memory, linear_layers
from scrimp.plan.memory import saved_input_bytes
from scrimp.precision import RECIPES, parse_rules

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
def test_the_largest_emulated_gemm_needs_both_operands_in_fp32(tokens: int) -> None:
    sizes = {"micro_batch": 1, "sequence": tokens}
    plain = account("bf16", **sizes)
    # gate_up is the largest: 320 outputs, 64 inputs.
    x, w, g = tokens * 64, 320 * 64, tokens * 320
    assert account("fp8", **sizes).block_backward - plain.block_backward == 4 * max(x + w, g + w, g + x)
    only_fprop = account("bf16,*.fprop=fp8", **sizes)
    down = tokens * 160 + 64 * 160
    assert only_fprop.block_backward - plain.block_backward == 4 * max(x + w, down)
    assert account("fp8", **sizes).head == plain.head


def test_a_quantized_head_needs_its_operands_for_one_chunk() -> None:
    for chunk in (64, 0):
        plain, planned = account("bf16", loss_chunk=chunk), account("bf16,head=fp8", loss_chunk=chunk)
        tokens = chunk or TOKENS
        x, w, g = tokens * 64, 96 * 64, tokens * 96
        assert planned.head - plain.head == 4 * max(x + w, g + w, g + x)
        assert planned.activations == plain.activations
        assert planned.block_backward == plain.block_backward


def test_fewer_saved_bytes_make_a_smaller_peak_at_a_large_batch() -> None:
    wide = dataclasses.replace(LLAMA, num_layers=24, width=256, ffn_width=1024, head_size=64)
    peaks = [account(text, wide, micro_batch=16).peak for text in ("fp32", "bf16", "fp8", "nvfp4")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
