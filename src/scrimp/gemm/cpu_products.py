"""bf16 products on CPUs without units for bf16: multiplied in float32, rounded once.

Problem  torch gives bf16 products to oneDNN where a CPU has AVX512 or AMX. Elsewhere, as on CPUs with AVX2 alone, a
         loop multiplies number by number: 0.9 GFLOP/s a thread where float32 reaches 84 (measured, 1,024 cubed).
Method   In a process that trains on such a CPU, torch's CPU kernels for products and attention are replaced by ones
         that widen bf16 operands, call torch's own kernel, and round its result. A product of two bf16 numbers is
         exact in float32, short of underflow, so the result differs from that of a unit in the order of its sums
         alone. Everything above the kernel (autograd, autocast, dispatch modes, compiled graphs) sees the operator
         that it always saw.
Where    `scrimp.profiler.resolve_device` asks for it when it takes a CPU: every command, `scrimp.train`, `scrimp.plan`.
         Nothing changes at import.
Limits   Each product costs some 7 microseconds more, of any type, and for as long as it runs widened copies of its
         operands (counted in `scrimp.profiler.memory_trace.workspace`). mv and dot stay torch's.
Source   torch.library.get_kernel, whose documentation shows a kernel that is replaced for some of its calls
Checked  tests/gemm/test_cpu_products.py
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_OPERATORS = {**dict.fromkeys(_PRODUCTS, (3, 1)), _FLASH: (3, 1), f"{_FLASH}_backward": (5, 3)}
"""How many of an operator's arguments, and of its results, from the first on, are of one type."""

Kernel = Callable[..., Any]


@functools.cache
def has_bf16_units() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widen_bf16_products() -> None:
    """Multiply bf16 in float32 from now on in this process, where the CPU has no units for bf16."""
    if not has_bf16_units():
        replace_kernels()


def widens_bf16_products() -> bool:
    """Whether this process does."""
    return replace_kernels.cache_info().currsize > 0


@functools.cache
def replace_kernels() -> torch.library.Library:
    """Put the kernels in place whatever the CPU has, once. They stay for as long as the process."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, counts in _OPERATORS.items():
            library.impl(name, _returning(name, *counts), "CPU", with_keyset=True)
        for name in _PRODUCTS:
            library.impl(f"{name}.out", _writing(f"{name}.out", name), "CPU", with_keyset=True)
            if name in ("addmm", "baddbmm"):
                library.impl(f"{name}_", _in_place(f"{name}_", name), "CPU", with_keyset=True)
    return library


def _returning(name: str, operands: int, rounded: int) -> Kernel:
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, *args: Any, **named: Any) -> Any:
        if not _is_bf16(args[:operands]):
            return original.call_boxed(keys, *args, **named)
        found = original.call_boxed(keys, *map(_wide, args), **{k: _wide(v) for k, v in named.items()})
        if isinstance(found, Tensor):
            return found.bfloat16()
        return *(one.bfloat16() for one in found[:rounded]), *found[rounded:]

    return kernel


def _writing(name: str, functional: str) -> Kernel:
    original, product = (torch.library.get_kernel(f"aten::{one}", "CPU") for one in (name, functional))

    def kernel(keys: Any, *args: Any, out: Tensor, **named: Any) -> Tensor:
        if not _is_bf16(args, out):
            result: Tensor = original.call_boxed(keys, *args, out=out, **named)
            return result
        found = product.call_boxed(keys, *map(_wide, args), **named)
        return out.resize_(found.shape).copy_(found)

    return kernel


def _in_place(name: str, functional: str) -> Kernel:
    original, product = (torch.library.get_kernel(f"aten::{one}", "CPU") for one in (name, functional))

    def kernel(keys: Any, *args: Any, **named: Any) -> Tensor:
        if not _is_bf16(args):
            result: Tensor = original.call_boxed(keys, *args, **named)
            return result
        target: Tensor = args[0]
        return target.copy_(product.call_boxed(keys, *map(_wide, args), **named))

    return kernel


def _is_bf16(args: tuple[Any, ...], *more: Tensor) -> bool:
    """Whether torch's loop would run: tensors of two types are refused by torch's own kernel."""
    return all(x.dtype == torch.bfloat16 for x in (*args, *more) if isinstance(x, Tensor))


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x
