"""Peak FLOP rates of a device: the denominators of MFU and the speed of light.

Known accelerators have their dense spec-sheet rates (no sparsity; tensor cores with fp32
accumulation), fp8, fp4 and int8 (sums in int32) included where the card has units for them; a card with fp4 units also
has those for scales of small blocks. At which rate each recipe runs says `scrimp.planner.flops`. Any other
device, a CPU above all, is measured: the fastest of several square products per format, in this
process, with the threads that training uses; on a GPU the fastest of several rounds of large products, `IN_A_ROW`
of them launched one behind the other before the device is waited for, so that launches cost nothing.
One process measures a device once, so that whatever it predicts, it predicts by the same rates.
A measured peak is a lower bound of the hardware's, so MFU against it is an upper bound; the origin says which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import NamedTuple

import torch

from scrimp.planner import Peaks
from scrimp.profiler.device import Device
from scrimp.timing import best


class _Rates(NamedTuple):
    """Dense TFLOP/s of a vendor's data sheet; None where the card has no units of that width."""

    bf16: float
    fp32: float
    fp8: float | None = None
    fp4: float | None = None
    int8: float | None = None


# The first name contained in the device's name wins. Sheets that give rates "with sparsity" are halved. GeForce
# cards run fp8 at twice these rates with fp16 sums, which training does not use; sums in int32 cost them nothing.
_SPEC_TFLOPS: dict[str, _Rates] = {
    "H100 PCIe": _Rates(756.0, 51.0, fp8=1513.0, int8=1513.0),
    "H100 NVL": _Rates(835.0, 60.0, fp8=1671.0, int8=1671.0),
    "H100": _Rates(989.4, 67.0, fp8=1978.9, int8=1978.9),
    "H200": _Rates(989.4, 67.0, fp8=1978.9, int8=1978.9),
    "GH200": _Rates(989.4, 67.0, fp8=1978.9, int8=1978.9),
    "B200": _Rates(2250.0, 80.0, fp8=4500.0, fp4=9000.0),
    "A100": _Rates(312.0, 19.5, int8=624.0),
    "L40S": _Rates(362.0, 91.6, fp8=733.0, int8=733.0),
    "L4": _Rates(121.0, 30.3, fp8=242.5, int8=242.5),
    "RTX 5090": _Rates(209.5, 104.8, fp8=419.0, fp4=1676.0, int8=838.0),
    "RTX 4090": _Rates(165.2, 82.6, fp8=330.3, int8=660.6),
    "RTX 3090": _Rates(71.0, 35.6, int8=284.0),
}
SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the products; smaller ones leave multiprocessors of a large GPU idle."""
_SMALLEST = 128
_LONGEST_S = 0.05
"""On a CPU sizes double up to here: torch takes two seconds for a product of 1,024 in bf16 without units for it."""
IN_A_ROW = {"cpu": 1, "cuda": 10}
ROUNDS = 3
"""At least so many of each format; more within `_SECONDS`."""
_SECONDS = 0.1


@cache
def device_peaks(device: torch.device, name: str) -> Peaks:
    """Peak rates of a device by width; an unknown device is measured in fp32 and bf16, once per process.

    Measuring takes a few tenths of a second, and as long as `ROUNDS` rounds and one product take where that is more.
    """
    # A slice of a card or a laptop's version has other rates than the card of that name: measured too.
    words = name.split()
    is_whole_card = not {"MIG", "Laptop", "Max-Q"} & set(words)
    for spec, sheet in _SPEC_TFLOPS.items():
        if is_whole_card and _contains(words, spec.split()):
            rates = {name: rate * 1e12 for name, rate in sheet._asdict().items() if rate is not None}
            return Peaks(rates, f"spec sheet of the {spec}, dense")
    rates = {"fp32": _gemm_rate(device, torch.float32), "bf16": _gemm_rate(device, torch.bfloat16)}
    return Peaks(rates, "measured here: the best products of square matrices")


def peaks_of(device: Device) -> Peaks:
    """The peak rates that all ranks reckon with: those that the first of them finds."""
    return device.world.once(
        "measuring the peak rate of the device",
        lambda: device_peaks(device.torch_device, device.name),
        write=asdict,
        read=lambda found: Peaks(**found),
    )


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
    size = SIZES[device.type] if device.type == "cuda" else _size_on_cpu(device, dtype)
    seconds = best(
        _product(size, device, dtype),
        device,
        rounds=ROUNDS,
        least_s=_SECONDS,
        in_a_row=IN_A_ROW[device.type],
    )
    return 2.0 * size**3 / seconds


def _size_on_cpu(device: torch.device, dtype: torch.dtype) -> int:
    """The largest size up to `SIZES` whose product takes `_LONGEST_S` at most, as the next smaller one foretells."""
    largest = SIZES[device.type]
    size = min(_SMALLEST, largest)
    while size < largest and 8 * best(_product(size, device, dtype), device, rounds=1) <= _LONGEST_S:
        size *= 2
    return size


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    generator = torch.Generator(device).manual_seed(0)
    # Random data: products of zeros run above the rate of real ones on power-limited devices.
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product)
