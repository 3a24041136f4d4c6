"""What kernels allocate for themselves and free before they return: bytes that no tensor shows.

CPU     Operators on numbers of two widths first copy the narrower operands to the wider type; so do norms that sum
        wider than they read; and what is scattered into numbers of 16 bits, or gathered of them, is so by way of a copy
        in fp32. Flash attention holds scores of one tile of queries by keys per thread, its backward pass two
        (t threads, tiles of q x k, q = 256, 64 or 32 by length, k = 512, head size K, fp32)::

            forward   4 t (q k + 2 q + q K)            backward   4 t (2 q k + q)

        and both tiles once more in bf16 where inputs are. With AMX the forward pass packs all keys and values (B rows
        of N key heads, T tokens) where each thread has enough work with them::

            pack      4 B N T K + 2 t k K, and where K is odd one column more of each query, key and value

        Where a CPU has no units for bf16 (`scrimp.gemm.cpu_products`), products and attention in bf16 hold all operands
        and results in fp32 beside them, and attention's tiles in fp32 alone.

        Products in bf16 take what `products` says. In attention's backward pass each thread multiplies its own tiles,
        and takes that once for itself. A matrix of 60 x 60 numbers or more that lies transposed is copied through a
        tile of 60 x 60, also where a product is added to it.
Both    Attention without a fused kernel takes a softmax that knows rows without any key: one byte for each number.
        Eigenvectors of a symmetric matrix of n rows take LAPACK's least for dividing and conquering, 1 + 6 n + 2 n^2
        numbers and 3 + 5 n integers; cuSOLVER is taken to need as much, which was not measured.
CUDA    Nothing is copied to widen. Flash attention's backward pass sums the queries' gradient in fp32, where it is
        deterministic in several copies, by the formula of `scrimp.models.flash`; counted for the worst of one document
        in each row to documents of 128 tokens on average.

Limits  cuDNN's attention, which may run where kernels need not be deterministic, is counted as flash attention.
        Shorter documents take more on CUDA, up to the bound of `scrimp.models.flash` where rows can be cut.
        torch's profiler sees the memory of one thread's products in attention's backward pass, not of all.
        cuBLAS's workspace is taken once and stays.
Source  ATen/TensorIterator.cpp; ATen/native: Copy.cpp, cpu/FlashAttentionKernel.cpp, transformers/attention.cpp
Checked tests/profiler/memory_trace/test_tracker.py: the CPU's against torch's profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from scrimp.gemm.cpu_products import widens_bf16_products
from scrimp.models.flash import Gpu, Heads, most_backward_bytes
from scrimp.profiler.memory_trace.products import product_bytes, unit_here

WorkspaceRule = Callable[[Any, Any, Any], int]
"""From operator, its positional and its named arguments to bytes."""

_aten = torch.ops.aten
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_NORMS = (_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar)
_SOFTMAX = _aten._safe_softmax.default
_EIGENVECTORS = _aten._linalg_eigh.default
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.mm.out: 0,
    _aten.addmm.default: 1,
    _aten.addmm.out: 1,
    _aten.addmm_.default: 1,
}
"""Operator to place of the left operand."""
_BATCHED = {
    _aten.bmm.default: 0,
    _aten.bmm.out: 0,
    _aten.baddbmm.default: 1,
    _aten.baddbmm.out: 1,
    _aten.baddbmm_.default: 1,
}
_WIDENED = _PRODUCTS | _BATCHED
_WHOLE_WIDENED = {
    _aten.scatter_.src: 0,
    _aten.scatter_.value: 0,
    _aten.scatter_add_.default: 0,
    _aten.scatter.src: 0,
    _aten.scatter.value: 0,
    _aten.scatter_add.default: 0,
    _aten.gather.default: 2,
}
"""Operator to place of the argument that has as many numbers as are widened."""
_COPIES = (_aten.copy_.default, _aten._foreach_copy_.default)
_COPIED_AT_ONCE = 60 * 60
_KEYS = 512
_LEAST_PACKED = 64
_SCALAR = 4
_ROUNDED_UP = 3 * 512
"""Three allocations on CUDA, each up to its granule."""


def no_workspace(operator: Any, args: Any, named: Any) -> int:
    """Nothing: live tensors alone."""
    return 0


def cpu_workspace(operator: Any, args: Any, named: Any) -> int:
    """Bytes that a CPU kernel takes."""
    if operator is _FLASH or operator is _FLASH_BACKWARD:
        is_backward = operator is _FLASH_BACKWARD
        query, key, value = args[is_backward : is_backward + 3]
        return _cpu_attention(query, key, value, named, is_backward=is_backward)
    if widens_bf16_products() and operator in _WIDENED:
        return _wide_product(operator, args)
    if operator in _PRODUCTS:
        place = _PRODUCTS[operator]
        return max(_product(*args[place:][:2]), _transposed(args[0]) if place else 0)
    if operator is _SOFTMAX:
        return _empty_rows(args[0])
    if operator is _EIGENVECTORS:
        return _eigenvectors(args[0])
    if operator in _WHOLE_WIDENED:
        is_reduced = args[0].dtype in (torch.bfloat16, torch.float16)
        return args[_WHOLE_WIDENED[operator]].numel() * torch.float32.itemsize if is_reduced else 0
    if operator in _NORMS:
        wide = named.get("dtype")
        tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        return max((x.numel() * wide.itemsize for x in tensors if wide not in (None, x.dtype)), default=0)
    if operator is _aten.copy_.default and args[0].is_contiguous() and args[0].dtype == args[1].dtype:
        return _transposed(args[1])
    if operator in _COPIES or torch.Tag.pointwise not in operator.tags:
        return 0
    return _widened([value for value in (*args, *named.values()) if isinstance(value, Tensor)])


def cuda_workspace(gpu: Gpu) -> WorkspaceRule:
    """Bytes that a CUDA kernel takes, where the CPU's attention operator stands for CUDA's."""

    def rule(operator: Any, args: Any, named: Any) -> int:
        if operator is _SOFTMAX:
            return _empty_rows(args[0]) + _ROUNDED_UP
        if operator is _EIGENVECTORS:
            return _eigenvectors(args[0]) + _ROUNDED_UP
        if operator is not _FLASH_BACKWARD:
            return 0
        (rows, heads, length, size), keys = args[1].shape, args[2].shape[1]
        found = Heads(heads, keys, size, gpu.multiprocessors, gpu.deterministic)
        return most_backward_bytes(found, rows, length)

    return rule


def _widened(tensors: list[Tensor]) -> int:
    """Copies of the narrower of some operands in the widest type among them; numbers without axes are free."""
    floats = [x for x in tensors if x.is_floating_point() and x.dim()]
    widest = max((x.dtype for x in floats), key=lambda dtype: dtype.itemsize, default=None)
    return 0 if widest is None else sum(x.numel() * widest.itemsize for x in floats if x.dtype != widest)


def _transposed(source: Tensor) -> int:
    """What a copy of a transposed matrix into a contiguous one of its type goes through."""
    is_transposed = source.dim() == 2 and source.stride() == (1, source.shape[0])
    return _COPIED_AT_ONCE * source.itemsize if is_transposed and source.numel() >= _COPIED_AT_ONCE else 0


def _empty_rows(scores: Tensor) -> int:
    """Which numbers are -inf, which rows hold nothing else, and a zero for these."""
    return scores.numel() + scores.numel() // scores.shape[-1] + scores.itemsize


def _eigenvectors(matrix: Tensor) -> int:
    """Numbers, integers, and what says whether it went well."""
    n = matrix.shape[-1]
    return (1 + 6 * n + 2 * n * n) * matrix.itemsize + 4 * (3 + 5 * n) + 3 * _SCALAR


def _product(left: Tensor, right: Tensor) -> int:
    if left.dtype != torch.bfloat16:
        return 0
    transposed = left.stride(0) == 1 and left.stride(1) > 1
    (m, k), n = left.shape, right.shape[1]
    return product_bytes(m, n, k, unit_here(), torch.get_num_threads(), transposed=transposed)


def _wide_product(operator: Any, args: tuple[Tensor, ...]) -> int:
    """What a product of bf16 matrices takes that is made in fp32."""
    place = _WIDENED[operator]
    left, right = args[place : place + 2]
    if left.dtype != torch.bfloat16:
        return _transposed(args[0]) if place else 0
    made = left.numel() // max(left.shape[-1], 1) * right.shape[-1]
    tile = 2 * _transposed(args[0]) if place else 0  # of what is added, widened before it is copied
    is_there = operator._schema.is_mutable  # the result, in what is added or in `out`
    return _rounded(args[: place + 2], made, tile) + (2 * made if is_there else 0)


def _rounded(operands: Iterable[Tensor], made: int, inside: int) -> int:
    """Beside a result of `made` numbers in bf16: fp32 copies of operands while it is made in fp32, then it in both."""
    wide = 4 * sum(x.numel() for x in operands) + inside
    return max(wide + 4 * made, 6 * made) - 2 * made


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, named: Any, *, is_backward: bool) -> int:
    length, head_size = query.shape[2:]
    queries = 256 if length >= 768 else 64 if length >= 192 else 32
    queries, keys = min(queries, length), min(_KEYS, key.shape[2])
    tiles = 2 if is_backward else 1
    numbers = tiles * queries * keys + (queries if is_backward else queries * (2 + head_size))
    if query.dtype == torch.bfloat16 and widens_bf16_products():
        mask = named.get("attn_mask")
        operands = [query, key, value, *[query, query] * is_backward]
        operands += [mask] if mask is not None and mask.dtype == torch.bfloat16 else []
        results = operands[: 3 if is_backward else 1]  # as large as these
        tile_bytes = 4 * torch.get_num_threads() * numbers
        return _rounded(operands, sum(x.numel() for x in results), tile_bytes)
    reduced = tiles * queries * keys * query.itemsize if query.itemsize < 4 else 0
    found = torch.get_num_threads() * (4 * numbers + reduced)
    if query.dtype != torch.bfloat16:
        return found
    return found + (
        _tile_products(length, queries, keys, head_size) if is_backward else _packed(query, key, queries)
    )


def _packed(query: Tensor, key: Tensor, queries: int) -> int:
    """Keys and values, packed for AMX by the forward pass."""
    (rows, heads, length, size), (key_heads, total), threads = (
        query.shape,
        key.shape[1:3],
        torch.get_num_threads(),
    )
    tasks = rows * heads * -(-length // queries)
    is_worth_it = (tasks + threads - 1) / threads * queries >= 4 * rows * key_heads
    if unit_here() != "amx" or min(length, total) < _LEAST_PACKED or not is_worth_it:
        return 0
    even, keys = size + size % 2, min(_KEYS, total)
    values = total + total % 2 + (keys % 2) * ((total - 1) // keys)
    odd = queries * even * (size % 2) + queries * (keys % 2)
    return 2 * (rows * key_heads * (even * total + values * size) + threads * (keys * size + odd))


def _tile_products(length: int, queries: int, keys: int, size: int) -> int:
    """Scratch of the products of one tile of queries by keys; the last tile of a row may be a smaller one."""
    unit, threads = unit_here(), torch.get_num_threads()
    found = 0
    for q in {queries, length % queries or queries}:
        for k in {keys, length % keys or keys}:
            shapes = ((q, k, size, False), (q, size, k, False), (k, size, q, True))
            most = max(
                product_bytes(m, n, depth, unit, threads, transposed=turned) for m, n, depth, turned in shapes
            )
            found = max(found, most)
    return threads * (found + _SCALAR) if found else 0
