"""How many bits do a GPU's FP8 tensor cores keep of a sum, and are FP4 products by them exact?

Question  Hopper's FP8 accumulator is reported to keep about 14 bits (DeepSeek-V3). Scrimp multiplies E2M1 codes,
          written as E4M3, on these units: is that FP4 arithmetic exact? Is adding up in fp32 at every 128 of K
          enough, or must it be every 32?
Bits      One product 2^16 and one of 2^(16 - n), the rest zero: the largest n that the sum keeps (fp32: 23),
          with both within 32 of K (one instruction), and with 128 between them.
Exact     E2M1 codes, all scales 1: any sum of up to 4096 products is a multiple of 1/4 below 2^18, exact in
          fp32. So every element must equal the float64 product; how many do not, and by how much?
Errors    Operands as in training, quantized as fp8 and fp4 plan it (tiles, and blocks of W): the error of each way to
          multiply the same codes and scales, from their float64 product.
Ways      Triton's `scaled_matmul` promoted every 128 and every 32; torch's `_scaled_mm` with fast accumulation and
          without (one scale); torch's tile products; the reference back end.
Run       python benchmarks/accumulator.py --device cuda
          TRITON_INTERPRET=1 python benchmarks/accumulator.py --size 32 --ks 128      # the script itself, on a CPU
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from stopwatch import first_line
from torch import Tensor

from scrimp.formats import QuantizedTensor
from scrimp.formats.codes import decode
from scrimp.gemm import kernels
from scrimp.gemm.backends import BACKENDS
from scrimp.gemm.backends.operands import KernelCodes
from scrimp.gemm.probe import Sizes, make_trial
from scrimp.precision import Operand, lookup_element

TILE, MOST_BITS = 128, 24
GAPS = {"bits in one instruction": 1, "bits 128 apart": TILE}
Product = Callable[[KernelCodes, KernelCodes], Tensor]
"""Multiplies codes with tiles (or blocks) along K, in float32."""


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the result")
    parser.add_argument("--ks", type=int, nargs="+", default=[128, 1024, 4096], help="multiples of 128")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if any(k % TILE or k > 4096 for k in options.ks):
        parser.error("--ks takes multiples of 128 up to 4096: beyond it sums are not exact in fp32")
    name = torch.cuda.get_device_name() if options.device == "cuda" else cpu()
    record: dict[str, Any] = {"environment": facts("torch", "triton") | {"device": name}}
    record["bits"] = [
        attempt(way, partial(bits_kept, product, device)) for way, product in unscaled().items()
    ]
    record["exact"] = [
        {"K": k} | attempt(way, partial(exactness, product, options.size, k, device))
        for k in options.ks
        for way, product in unscaled().items()
    ]
    record["errors"] = [
        {"recipe": recipe, "K": k} | attempt(way, partial(error, measure, recipe, options.size, k, device))
        for recipe in ("fp4", "fp8")
        for k in options.ks
        for way, measure in scaled().items()
    ]
    text = page(record)
    path = write_pair(options.out, f"{options.date}-accumulator-{options.device}", record, text)
    print(text, f"written: {path.name}")


def attempt(way: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured, or why not."""
    try:
        return {"way": way} | measure()
    except Exception as failure:  # a kernel that this device lacks
        return {"way": way, "failure": first_line(failure)}


# -- ways to multiply --------------------------------------------------------------------------


def scaled() -> dict[str, Product]:
    """Those that take scales of tiles and blocks."""
    return {
        "triton, every 128": partial(by_triton, 128),
        "triton, every 32": partial(by_triton, 32),
        "torch, tiles": by_torch_tiles,
        "reference": by_reference,
    }


def unscaled() -> dict[str, Product]:
    """Those that take codes whose scales are all 1."""
    ways = scaled()
    del ways["reference"]  # multiplies no codes
    return ways | {
        "torch, fast accumulation": partial(by_torch, True),
        "torch, no fast accumulation": partial(by_torch, False),
    }


def by_triton(promote_every: int, a: KernelCodes, b: KernelCodes) -> Tensor:
    """Scrimp's kernel."""
    return kernels.scaled_matmul(
        a.codes, a.scales, b.codes, b.scales, torch.float32, promote_every=promote_every
    )


def by_torch(fast: bool, a: KernelCodes, b: KernelCodes) -> Tensor:
    """One scale, which is 1."""
    one = torch.ones((), device=a.codes.device)
    return torch._scaled_mm(a.codes, b.codes.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)


def by_torch_tiles(a: KernelCodes, b: KernelCodes) -> Tensor:
    """The torch back end's products of E4M3 tiles and blocks."""
    backend = BACKENDS["torch"]
    left, right = (
        backend.load(QuantizedTensor(x.codes, x.scales, None, Operand("e4m3", kind), -1, x.codes.shape))
        for x, kind in ((a, "tile"), (b, "tile" if len(b.scales) == len(b.codes) else "block"))
    )
    return backend.multiply("fprop", left, right, torch.float32)


def by_reference(a: KernelCodes, b: KernelCodes) -> Tensor:
    """Products of float32 values, as the reference back end makes them."""
    return dequantized(a).float() @ dequantized(b).float().T


def dequantized(x: KernelCodes) -> Tensor:
    """float64 values."""
    scales = x.scales.double().repeat_interleave(TILE, 1)[:, : x.codes.shape[1]]
    if len(scales) != len(x.codes):
        scales = scales.repeat_interleave(TILE, 0)[: len(x.codes)]
    return x.codes.double() * scales


# -- measurements ------------------------------------------------------------------------------


def bits_kept(product: Product, device: torch.device) -> dict[str, int]:
    """Largest n of which a sum of 2^16 keeps 2^(16 - n), near and far along K."""
    found = {}
    for name, gap in GAPS.items():
        kept = 0
        for n in range(1, MOST_BITS + 1):
            a, b = torch.zeros(2, 16, 2 * TILE)
            a[:, 0], b[:, 0] = 256.0, 256.0
            # As an E4M3 product: exponents from -9 to 8 on each side.
            exponent = 16 - n
            a[:, gap], b[:, gap] = 2.0 ** -(-exponent // 2), 2.0 ** (exponent // 2)
            y = product(unit_tiles(a, device), unit_tiles(b, device))
            if bool((y.double() == 65536.0 + 2.0**exponent).all()):
                kept = n
        found[name] = kept
    return found


def exactness(product: Product, size: int, k: int, device: torch.device) -> dict[str, float]:
    """Elements of a product of E2M1 codes that are not exact, and the largest error in units of 1/4."""
    generator = torch.Generator().manual_seed(0)
    packed = [torch.randint(0, 256, (size, k // 2), generator=generator, dtype=torch.uint8) for _ in range(2)]
    a, b = (unit_tiles(decode(x, lookup_element("e2m1"), k), device) for x in packed)
    wrong = (product(a, b).double() - dequantized(a) @ dequantized(b).T).abs()
    return {"inexact, share": float((wrong > 0).double().mean()), "largest, in 1/4": 4 * float(wrong.max())}


def error(product: Product, recipe: str, size: int, k: int, device: torch.device) -> dict[str, float]:
    """Relative error of fprop from the float64 product of the same codes and scales."""
    trial = make_trial("fprop", recipe, Sizes(size, k, size), device, torch.bfloat16)
    backend, uses = BACKENDS["triton"], trial.uses()
    a, b = backend.prepare(trial.a, uses[0]), backend.prepare(trial.b, uses[1])
    exact = dequantized(a) @ dequantized(b).T
    magnitudes = dequantized(a).abs() @ dequantized(b).abs().T
    wrong = (product(a, b).double() - exact).abs()
    return {
        "relative error": float(wrong.norm() / exact.norm()),
        "largest / sum of magnitudes": float(
            (wrong / magnitudes.clamp_min(torch.finfo(magnitudes.dtype).tiny)).max()
        ),
    }


def unit_tiles(values: Tensor, device: torch.device) -> KernelCodes:
    """Codes of values that E4M3 has, with scales of 1."""
    codes = values.to(torch.float8_e4m3fn)
    assert torch.equal(codes.float(), values)
    return KernelCodes(codes.to(device), torch.ones(len(values), values.shape[1] // TILE, device=device))


# -- the page ----------------------------------------------------------------------------------


def page(record: dict[str, Any]) -> str:
    """The result as Markdown."""
    environment = record["environment"]
    text = [
        "# The accumulator of FP8 tensor cores",
        "",
        f"{environment['device']}, torch {environment['versions']['torch']}, "
        f"triton {environment['versions']['triton']}. Measured; how: the docstring of `benchmarks/accumulator.py`.",
        "",
        f"- command: {environment['command']}",
        f"- commit: {environment['commit']}",
    ]
    titles = {
        "bits": "Bits that a sum keeps below its first (fp32: 23):",
        "exact": "FP4 codes with scales of 1, whose sums are exact in fp32:",
        "errors": "Errors of fprop as the recipe quantizes it:",
    }
    for section, title in titles.items():
        rows = record[section]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines = [[shown(row.get(column, "")) for column in columns] for row in rows]
        text += ["", title, "", *markdown_table(columns, lines)]
    return "\n".join([*text, ""])


def shown(value: Any) -> str:
    """A cell."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
