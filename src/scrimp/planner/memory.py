"""Bytes of one training step, by category: the account that `scrimp plan` prints before step 0.

Problem  Out of memory at step 1, or at the first long document, is the commonest way to lose
         an afternoon. Every large tensor of a step has a known shape; add them up first.
Method   State per parameter (bytes), nothing sharded or offloaded::

             fp32 parameters                weight 4 + gradient 4 + m, v 8            = 16
             bf16 parameters                weight 2 + gradient 2 + m, v 4            =  8
             bf16 with fp32 master weights  weight 2 + gradient 4 + m, v 8 + master 4 = 18
             moments in bf16                4 instead of m, v 8
             moments in 8 bits              2 + 2 scales of 2 bytes per 128 elements of a row = 2.03; vectors 8

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
         stays. An emulated GEMM C = A B of M N results holds beside C, for the largest of each block's
         and of the head's (T = chunk), with A, B their carriers::

             A + max(make A, B + max(make B, products of 4 to 12 M N)) - C

         A carrier has 2 bytes an element, 4 for tiles and blocks (two bf16 numbers) and in fp32 runs; `make`
         is a few fp32 arrays of one piece of work, the rotated copy, or the decoding of kept codes.

Limits   The allocator's rounding, cached blocks and library workspaces come on top: a run reports
         its measured peak beside this prediction. Emulated GEMMs are counted as an upper bound; fused back
         ends hold less, and a CPU without fast bf16 more, as it carries fp32. An input that is recomputed
         lives while temporary gradients of the same size do not yet.
Checked  tests/planner/test_memory.py: within 3 % of the storages that autograd really saves; emulated
         GEMMs against the profiler, never below and at most twice above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scrimp.config import Architecture
from scrimp.planner.flops import GEMM_NAMES, linear_shapes
from scrimp.precision import (
    GEMMS,
    OPERANDS,
    RECOMPUTE,
    LinearPrecision,
    Operand,
    lookup_element,
    lookup_scaling,
    recipe,
    storage_bytes,
)

BYTES = {"fp32": 4, "bf16": 2}
_MOMENTS = {4: "fp32", 2: "bf16"}
MOMENT_BLOCK = 128
"""Elements of a row that share a scale of 8-bit moments."""
CHECKPOINT_FILE_BYTES = 512 * 2**20
PIECE_ELEMENTS = {"cpu": 2**18, "cuda": 2**22}
"""Elements that the reference quantizes at once, as `scrimp.formats.blocks` (which needs torch) has them."""
ARRAYS = {"nearest": 2.25, "stochastic": 3.25, "encode": 7.75}
"""fp32 arrays of a piece's size that live at once while it is rounded, with its scales (a quarter)."""
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
    """Logits of one chunk, their gradient, and the gradient of the hidden states; its emulated GEMMs."""
    block_backward: int
    """Temporary gradients inside one block, and what its largest emulated GEMM holds."""

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


@dataclass(frozen=True)
class _Emulated:
    """A matrix as an operand of an emulated GEMM, and what it costs."""

    operand: Operand | None
    """None: in high precision, multiplied as it is."""
    rows: int
    columns: int
    is_upright: bool
    """Scaled along the rows (axis -2)."""
    compute: int
    """Bytes of an element of the compute format."""
    piece: int
    """Elements that the reference quantizes at once."""

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def is_two_numbers(self) -> bool:
        """Carried as two bf16 numbers: fp32 scales inside the sum."""
        if self.operand is None or self.compute == 4:
            return False
        scaling = lookup_scaling(self.operand.scaling)
        return scaling.scale_type == "fp32" and scaling.columns is not None

    @property
    def has_outer_scale(self) -> bool:
        """A scale multiplies the product."""
        if self.operand is None:
            return False
        scaling = lookup_scaling(self.operand.scaling)
        return scaling.has_tensor_scale or scaling.columns is None

    def carrier(self, *, is_loaded: bool = False) -> int:
        """Bytes while the GEMM runs; kept codes are decoded to fp32 and then cast."""
        if self.operand is None:
            return 0
        cast = 4 if self.is_two_numbers else self.compute
        return self.elements * (cast + (4 if is_loaded and self.compute != 4 else 0))

    def making(self, *, stores: bool = False) -> int:
        """Temporary bytes while it is quantized, and encoded where its codes are to be kept."""
        if self.operand is None:
            return 0
        scaling = lookup_scaling(self.operand.scaling)
        across, along = scaling.rows or 1, scaling.columns or 1
        group_rows, group_columns = (along, across) if self.is_upright else (across, along)
        # Ragged groups are padded, and a piece has whole groups.
        columns = math.ceil(self.columns / group_columns) * group_columns
        padded = math.ceil(self.rows / group_rows) * group_rows * columns
        piece = min(padded, max(self.piece, group_rows * columns))
        arrays = ARRAYS[self.operand.rounding]
        if stores and lookup_element(self.operand.element).bits == 4:
            arrays = ARRAYS["encode"]
        if piece < padded:  # the piece before this one, and its noise, are not yet freed
            arrays += 2
        pieces = int(4 * arrays * piece)
        if self.operand.hadamard:  # in fp32: the padded copy while it is rotated, then the rotated one
            return max(8 * padded + pieces // 4, 4 * padded + pieces)
        if self.is_upright and scaling.name == "row":  # magnitudes of all elements before their maxima
            return max(8 * padded, pieces)
        return pieces

    @property
    def loading(self) -> int:
        """Bytes while kept codes are decoded (values, scales and product), split in two numbers, and copied by
        a CPU's product of ragged shapes."""
        assert self.operand is not None
        if lookup_element(self.operand.element).bits == 4:  # and the integers of one piece
            return 15 * self.elements + 16 * min(self.elements, self.piece)
        return self.elements * (8 if lookup_scaling(self.operand.scaling).columns is None else 15)


def emulated_bytes(
    choice: LinearPrecision,
    gemm: str,
    tokens: int,
    outputs: int,
    inputs: int,
    *,
    precision: str,
    parameters: str,
    device: str = "cuda",
) -> int:
    """Bytes that one GEMM of a layer holds at most in the reference back end, beside its result and the
    codes that it keeps; 0 where nothing is quantized. Arguments as of `account_memory`."""
    shapes = {"x": (tokens, inputs), "w": (outputs, inputs), "g": (tokens, outputs)}
    compute = BYTES[precision]

    def emulated(name: str, gemm: str, index: int) -> _Emulated:
        entry = recipe(name).gemm(gemm)
        operand = None if entry is None else (entry.a, entry.b)[index]
        is_upright = gemm == "wgrad" or (gemm == "dgrad" and index == 1)
        piece = PIECE_ELEMENTS.get(device, PIECE_ELEMENTS["cuda"])
        return _Emulated(operand, *shapes[OPERANDS[gemm][index]], is_upright, compute, piece)

    a, b = (emulated(choice.gemm(gemm), gemm, index) for index in (0, 1))
    kept = None if choice.saved == RECOMPUTE else emulated(choice.saved, "wgrad", 1)
    if kept is None or kept.operand is None or gemm == "dgrad":
        kept = None
    if a.operand is None and kept is None:
        return 0
    rows, columns = {"fprop": (tokens, outputs), "dgrad": (tokens, inputs), "wgrad": (outputs, inputs)}[gemm]
    result = rows * columns * compute
    products = result if a.operand is None else rows * columns * _product_bytes(a, b)
    making_a = a.making()
    if gemm == "fprop" and kept is not None:
        making_a = max(making_a, kept.making(stores=True))
    if gemm == "wgrad" and kept is not None:
        is_read = kept.operand == b.operand
        own = compute * b.elements  # of X in high precision, where wgrad reads other codes
        again = own + max(b.making(), b.carrier() + products)
        with_b = max(kept.loading, b.carrier(is_loaded=True) + products if is_read else again)
    else:
        cast = compute * b.elements if gemm != "wgrad" and precision != parameters else 0
        with_b = b.carrier() + max(cast + b.making(), products)
    # Of each row and column: sums of hashes, scales.
    vectors = 64 * (tokens + outputs + inputs)
    # A weight's gradient is added to a sum of its own, so its result is not counted elsewhere.
    counted = 0 if gemm == "wgrad" else result
    return max(0, a.carrier() + max(making_a, with_b) + vectors - counted)


def _largest_gemm(
    choice: LinearPrecision,
    tokens: int,
    shape: tuple[int, int],
    *,
    precision: str,
    parameters: str,
    device: str,
) -> int:
    """Bytes of the largest of a layer's emulated GEMMs."""
    return max(
        emulated_bytes(
            choice, gemm, tokens, *shape, precision=precision, parameters=parameters, device=device
        )
        for gemm in GEMMS
    )


def _product_bytes(a: _Emulated, b: _Emulated) -> int:
    """Bytes per element of a result while its products are summed, scaled and cast."""
    if (
        a.is_two_numbers or b.is_two_numbers
    ):  # the sum, the next product in bf16 (and a CPU's copy), and in fp32
        return 4 + 2 + 2 + 4
    if a.has_outer_scale or b.has_outer_scale:  # before and after the scale
        return 4 + 4
    return 4 if a.compute == 4 else 4 + 2


def moment_bytes(architecture: Architecture, moments: str) -> int:
    """Bytes of AdamW's two moving averages of all parameters, as `scrimp.train.optimizer` keeps them."""
    a = architecture
    if moments != "8bit":
        return 2 * BYTES[moments] * a.num_parameters
    shapes = linear_shapes(a)
    head = shapes.pop("head")
    tables = [head] * (1 if a.tied_embeddings else 2)
    matrices = [*list(shapes.values()) * a.num_layers, *tables]
    elements = sum(map(math.prod, matrices))
    scales = sum(rows * math.ceil(columns / MOMENT_BLOCK) for rows, columns in matrices)
    return 2 * (elements + 2 * scales + 4 * (a.num_parameters - elements))


def account_memory(
    architecture: Architecture,
    *,
    precision: str,
    parameters: str,
    master_weights: bool,
    moments: str = "auto",
    micro_batch: int,
    sequence: int,
    loss_chunk: int,
    linears: Mapping[str, LinearPrecision] | None = None,
    device: str = "cuda",
) -> MemoryAccount:
    """The account of one device that holds the whole model.

    Args:
        precision: compute format: of the activations, and of GEMMs that `linears` does not name (fp32, bf16).
        parameters: format of the trained parameters.
        master_weights: fp32 copies and gradient sums beside bf16 parameters.
        moments: format of AdamW's averages (fp32, bf16, 8bit); auto: that of the weights they move.
        micro_batch: sequences per forward pass.
        sequence: tokens per sequence.
        loss_chunk: tokens whose logits exist at once; 0 for all.
        linears: layer name (``blocks.0.mlp.down``, ``head``) to choice; None: all in `precision`.
        device: type whose pieces of work count (cpu, cuda); those of cuda are larger.
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
    holds = {"precision": precision, "parameters": parameters, "device": device}
    emulated = max(_largest_gemm(choice, tokens, shapes[name], **holds) for name, choice in choices)
    head = _largest_gemm(linears.get("head", plain), chunk, shapes["head"], **holds)
    logits = chunk * a.vocab_size * (4 + compute_bytes)
    # Backward of SwiGLU holds the gradients of product, gate and up beside one residual gradient.
    block_backward = tokens * compute_bytes * (3 * a.ffn_width + 2 * a.width)
    return MemoryAccount(
        weights=count * parameter_bytes,
        gradients=count * state_bytes,
        optimizer=moment_bytes(a, _MOMENTS[state_bytes] if moments == "auto" else moments)
        + (4 * count if master_weights else 0),
        activations=sum(
            saved_bytes_of_block(a, block, tokens, precision=precision, parameters=parameters)
            for block in blocks
        ),
        head=logits + tokens * a.width * compute_bytes + head,
        block_backward=block_backward + emulated,
    )
