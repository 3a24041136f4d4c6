"""The memory account against the tensors that autograd really keeps."""

import contextlib
import dataclasses

import pytest
import torch

from scrimp.config import Architecture
from scrimp.model import Decoder, initialise
from scrimp.plan import account_memory

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
