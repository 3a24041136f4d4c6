"""Peak FLOP rates of a device: the denominators of MFU and the speed of light.

Known accelerators have their dense spec-sheet rates (no sparsity; tensor cores with fp32
accumulation). Any other device, a CPU above all, is measured: the fastest of several square
products per format, in this process, with the threads that training uses. A measured peak is
a lower bound of the hardware's, so MFU against it is an upper bound; the origin says which it is.
"""

from __future__ import annotations

import time

import torch

from scrimp.plan import Peaks

# Vendor data sheets, dense TFLOP/s: (bf16, fp32). The first name contained in the device's name wins.
_SPEC_TFLOPS: tuple[tuple[str, float, float], ...] = (
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.4, 67.0),
    ("H200", 989.4, 67.0),
    ("GH200", 989.4, 67.0),
    ("A100", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
    ("L4", 121.0, 30.3),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
)
_SIZE = 1024
_SECONDS = 0.1


def device_peaks(device: torch.device, name: str) -> Peaks:
    """Peak rates of a device in fp32 and bf16; measuring takes about half a second."""
    # A slice of a card or a laptop's version has other rates than the card of that name: measured too.
    words = name.split()
    is_whole_card = not {"MIG", "Laptop", "Max-Q"} & set(words)
    for spec, bf16, fp32 in _SPEC_TFLOPS:
        if is_whole_card and _contains(words, spec.split()):
            return Peaks({"bf16": bf16 * 1e12, "fp32": fp32 * 1e12}, f"spec sheet of the {spec}, dense")
    rates = {"fp32": _gemm_rate(device, torch.float32), "bf16": _gemm_rate(device, torch.bfloat16)}
    return Peaks(rates, f"measured here: best {_SIZE}x{_SIZE}x{_SIZE} products")


def _contains(words: list[str], part: list[str]) -> bool:
    """Whether the words of `part` stand in `words` one after the other ("L4" is not in "L40")."""
    # Vendors join the memory to the name with a dash, as in "A100-SXM4-80GB".
    plain = [word.split("-")[0] for word in words]
    return any(
        sequence[start : start + len(part)] == part
        for sequence in (words, plain)
        for start in range(len(words))
    )


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(0)
    # Random data: products of zeros run above the rate of real ones on power-limited devices.
    left = torch.randn(_SIZE, _SIZE, generator=generator, device=device).to(dtype)
    right = torch.randn(_SIZE, _SIZE, generator=generator, device=device).to(dtype)
    best = float("inf")
    until = time.perf_counter() + _SECONDS
    runs = 0
    while runs < 5 or time.perf_counter() < until:
        start = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
        runs += 1
    return 2.0 * _SIZE**3 / best
