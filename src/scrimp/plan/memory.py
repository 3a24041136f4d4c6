"""Bytes of one training step, by category: the account that `scrimp plan` prints before step 0.

Problem  Out of memory at step 1, or at the first long document, is the commonest way to lose
         an afternoon. Every large tensor of a step has a known shape; add them up first.
Method   State per parameter (bytes), nothing sharded or offloaded::

             fp32 parameters                weight 4 + gradient 4 + m, v 8            = 16
             bf16 parameters                weight 2 + gradient 2 + m, v 4            =  8
             bf16 with fp32 master weights  weight 2 + gradient 4 + m, v 8 + master 4 = 18

         Saved for backward per token and block, in elements (D width, A attention width, N*K all
         key heads, F ffn width)::

             2 D                      inputs of the two norms, in the residual stream's format
             2 D + 2 A + 2 N K + 3 F  normed inputs; rotated q, k, v and the attention output;
                                      gate, up and their product, in the compute format

         plus fp32 statistics: two norms and H softmax sums. QK norms add the projections before
         them; bf16 autocast over fp32 parameters a bf16 copy of the block's weights. The head's logits exist `chunk`
         tokens at a time. The peak is the larger of two moments: head and loss, and the backward pass of the
         last block. The fused optimizer step needs no memory of its own.

         Of these, 2 D + F are inputs X [T, I] of qkv, gate_up and down that only wgrad reads. A plan may
         keep each as the codes that a recipe's wgrad reads, scaled along T, so that it takes the
         recipe's storage bytes of shape (I, T); or not at all (recompute). The A of the
         attention output stays whatever `out` saves, since attention's own backward reads it: a
         format other than the compute format comes on top.

         A layer with any choice but the compute format casts its weight as it goes: no copy of it
         stays. The reference back end holds both operands of a quantized GEMM in fp32 while it runs;
         the largest pair counts, for the blocks and for the head::

             4 max(T I + O I, T O + O I, T O + T I)      fprop, dgrad, wgrad; T = chunk in the head

Limits   The allocator's rounding, cached blocks and library workspaces come on top: a run reports
         its measured peak beside this prediction. Fused back ends hold less than the reference's fp32
         operands. An input that is recomputed lives while temporary gradients of the same size do not yet.
Checked  tests/plan/test_memory.py: within 3 % of the storages that autograd really saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scrimp.config import Architecture
from scrimp.plan.flops import GEMM_NAMES, linear_shapes
from scrimp.precision import GEMMS, OPERANDS, RECOMPUTE, LinearPrecision, recipe, storage_bytes

BYTES = {"fp32": 4, "bf16": 2}
CHECKPOINT_FILE_BYTES = 512 * 2**20
HADAMARD_SIZE = 16
"""Tokens are padded to a multiple of it where a recipe rotates X along them."""


@dataclass(frozen=True)
class MemoryAccount:
    """Predicted bytes by category; `peak` is not their sum but the largest moment."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Saved by all blocks between forward and backward."""
    head: int
    """Logits of one chunk, their gradient, and the gradient of the hidden states; operands as below."""
    block_backward: int
    """Temporary gradients inside one block, and fp32 operands of its largest emulated GEMM."""

    @property
    def states(self) -> int:
        """What stays from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def checkpoint_copy(self) -> int:
        """Host copy of the state while a checkpoint is written beside the training, and the one
        file of it that is being assembled."""
        state = self.weights + self.optimizer
        return state + min(state, CHECKPOINT_FILE_BYTES)

    @property
    def peak(self) -> int:
        """Largest moment of a step."""
        return self.states + self.activations + max(self.head, self.block_backward)

    def rows(self) -> list[tuple[str, int]]:
        """Category and bytes, for a table."""
        return [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer states", self.optimizer),
            ("activations", self.activations),
            ("head and loss", self.head),
            ("block backward", self.block_backward),
        ]


def saved_bytes_per_token(architecture: Architecture, *, precision: str, parameters: str) -> int:
    """Bytes per token that one block keeps for its backward pass beside the inputs of qkv, gate_up
    and down."""
    a = architecture
    # Two inputs of norms lie in the residual stream, which has the format of the parameters.
    residual = 2 * a.width * BYTES[parameters]
    elements = 2 * a.attention_width + 2 * a.kv_width + 2 * a.ffn_width
    statistics = 4 * (2 + a.num_heads)
    if a.qk_norm:  # the fused projections before the norms stay beside the rotated heads
        elements += a.qkv_width
        statistics += 4 * (a.num_heads + a.num_kv_heads)
    return residual + elements * BYTES[precision] + statistics


def saved_input_bytes(saved: str, tokens: int, width: int) -> int:
    """Bytes of the input [tokens, width] of a linear layer, as backward keeps it."""
    if saved == RECOMPUTE:
        return 0
    gemm = recipe(saved).wgrad
    if gemm is None:
        return tokens * width * BYTES[saved]
    columns = math.ceil(tokens / HADAMARD_SIZE) * HADAMARD_SIZE if gemm.b.hadamard else tokens
    return storage_bytes((width, columns), gemm.b.element, gemm.b.scaling)


def saved_inputs_of_block(
    architecture: Architecture, block: Mapping[str, LinearPrecision], tokens: int, *, precision: str
) -> int:
    """Bytes of the inputs that one block's layers keep beside what attention keeps anyway.

    Args:
        block: name within the block (mlp.down) to choice.
    """
    total = 0
    for name, choice in block.items():
        if name != "attention.out" or choice.saved != precision:
            total += saved_input_bytes(choice.saved, tokens, linear_shapes(architecture)[name][1])
    return total


def saved_weight_copies(
    architecture: Architecture, block: Mapping[str, LinearPrecision], *, precision: str, parameters: str
) -> int:
    """Bytes of one block's weights that autocast keeps in the compute format until backward."""
    if precision == parameters:
        return 0
    shapes, plain = linear_shapes(architecture), LinearPrecision.of(precision)
    return BYTES[precision] * sum(
        math.prod(shapes[name]) for name, choice in block.items() if choice == plain
    )


def saved_bytes_of_block(
    architecture: Architecture,
    block: Mapping[str, LinearPrecision],
    tokens: int,
    *,
    precision: str,
    parameters: str,
) -> int:
    """All that one block keeps between forward and backward; arguments as above."""
    return (
        tokens * saved_bytes_per_token(architecture, precision=precision, parameters=parameters)
        + saved_inputs_of_block(architecture, block, tokens, precision=precision)
        + saved_weight_copies(architecture, block, precision=precision, parameters=parameters)
    )


def emulated_operand_bytes(choice: LinearPrecision, tokens: int, outputs: int, inputs: int) -> int:
    """Bytes of both fp32 operands of the largest quantized GEMM of one layer; 0 if it has none."""
    elements = {"x": tokens * inputs, "w": outputs * inputs, "g": tokens * outputs}
    pairs = [
        sum(elements[operand] for operand in OPERANDS[gemm])
        for gemm in GEMMS
        if recipe(choice.gemm(gemm)).gemm(gemm) is not None
    ]
    return 4 * max(pairs, default=0)


def account_memory(
    architecture: Architecture,
    *,
    precision: str,
    parameters: str,
    master_weights: bool,
    micro_batch: int,
    sequence: int,
    loss_chunk: int,
    linears: Mapping[str, LinearPrecision] | None = None,
) -> MemoryAccount:
    """The account of one device that holds the whole model.

    Args:
        precision: compute format: of the activations, and of GEMMs that `linears` does not name (fp32, bf16).
        parameters: format of the trained parameters.
        master_weights: fp32 copies, moments and gradient sums beside bf16 parameters.
        micro_batch: sequences per forward pass.
        sequence: tokens per sequence.
        loss_chunk: tokens whose logits exist at once; 0 for all.
        linears: layer name (``blocks.0.mlp.down``, ``head``) to choice; None: all in `precision`.
    """
    count = architecture.num_parameters
    parameter_bytes, compute_bytes = BYTES[parameters], BYTES[precision]
    state_bytes = 4 if master_weights else parameter_bytes
    tokens = micro_batch * sequence
    chunk = min(loss_chunk or tokens, tokens)
    a = architecture
    linears, plain = linears or {}, LinearPrecision.of(precision)
    blocks = [
        {name: linears.get(f"blocks.{i}.{name}", plain) for name in GEMM_NAMES} for i in range(a.num_layers)
    ]
    shapes = linear_shapes(a)
    choices = {(name, choice) for block in blocks for name, choice in block.items()}
    operands = max(emulated_operand_bytes(choice, tokens, *shapes[name]) for name, choice in choices)
    head_operands = emulated_operand_bytes(linears.get("head", plain), chunk, *shapes["head"])
    logits = chunk * a.vocab_size * (4 + compute_bytes)
    # Backward of SwiGLU holds the gradients of product, gate and up beside one residual gradient.
    block_backward = tokens * compute_bytes * (3 * a.ffn_width + 2 * a.width)
    return MemoryAccount(
        weights=count * parameter_bytes,
        gradients=count * state_bytes,
        optimizer=count * (2 * state_bytes + (4 if master_weights else 0)),
        activations=sum(
            saved_bytes_of_block(a, block, tokens, precision=precision, parameters=parameters)
            for block in blocks
        ),
        head=logits + tokens * a.width * compute_bytes + head_operands,
        block_backward=block_backward + operands,
    )
