"""Seconds of what a device runs: matrix products, attention, and all that only moves numbers.

Method   A product of M rows, N columns and inner size K in a format takes::

             max(2 M N K / (peak * achieved * waves * depth), bytes / (bandwidth * achieved of memory)) + launch

             waves = t / ceil(t)       t = tiles of the result / multiprocessors: the last wave is not full
             depth = K / (K + K_half)  each tile begins and ends once, whatever K is

         with the smaller of the tiles that kernels have where it is faster. What large products reach is a constant of
         the device and the format. Attention's FLOPs are 2 (q + v) for each pair of a query and a key that it sees,
         2.5 times as many backward, at shares of the bf16 peak. All else is bytes over bandwidth.
         Before flash attention all scores of s x s went through memory: products of inner size K and s over the whole
         square, and `SCORE_BYTES` for each score of a head, of which the masked half counts too.
Limits   A product alone: its neighbours' use of the cache and of power is in `achieved`. Of cuDNN's attention no
         size of heads is asked: torch takes it for multiples of 8 up to 128, on H100 and H200 from cuDNN 9.10 on up to
         256 (sdp_utils.cpp). Others are predicted too fast where attention is `torch`.
Source   Waves: NVIDIA, Matrix Multiplication Background User's Guide, section 5; 2.5: Dao, arXiv 2307.08691; scores:
         Korthikanti et al., arXiv 2205.05198, section 4.1
Checked  tests/planner/layout/test_kernels.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import get_args

from scrimp.errors import PlanError
from scrimp.planner.hardware import Device, Kind

KINDS: dict[str, Kind] = {
    "fp16": "bf16",
    "fp8": "fp8_block",
    "fp8_tensor": "fp8",
    "fp8_row": "fp8",
    "int8_fallback": "int8",
    "int8_hadamard": "int8",
    "fp4": "fp8_block",
    "mxfp4": "nvfp4",
}
"""Recipes whose products a hardware file has under another name. E2M1 under float32 scales runs as E4M3.
int8_fallback is predicted as if nothing fell back: which share does is a matter of the numbers, of a layer at most all,
which is its fprop twice."""
KNOWN: tuple[Kind, ...] = get_args(Kind)
BEST, FLASH_2, TORCH, UNFUSED, FLASH_TRITON = "best", "flash-2", "torch", "unfused", "flash-triton"
_HOPPER, _BLACKWELL = (0.58, 0.6), (361e12, 334e12)
"""What FlashAttention-2 reaches where it has no kernels of its own, forward and backward. On H100s shares of the rate:
350 of 616 TFLOP/s, about 305 of 515 (Shah et al., arXiv 2407.08608, section 1 and figures 5 and 6). On B200s FLOP/s,
hardly more than there: heads of 128 at 8,192 tokens (tritonbench PR 171), and of 64 without mask at 16,384
(flash-attention issue 1589: 379 and 334; 343 and 329 at 8,192, where an H100 has 310 and 299 by PR 2688). That of a
B300 is taken to be as fast as a B200's, which nobody has published."""
FLASH_2_SHARES = dict.fromkeys(("h100", "h100-96", "h200"), _HOPPER)
FLASH_2_RATES = dict.fromkeys(("b200", "gb200", "b300", "gb300"), _BLACKWELL)
CUDNN_ON = (*FLASH_2_SHARES, "b200", "gb200")
"""Devices on which torch takes cuDNN's kernel, if sums may come in any order: compute capability 9.0 and 10.0, not the
B300's 10.3 (torch, sdp_utils.cpp); for a run `scrimp.models.flash` says the same by capability."""
LONG_KEYS = 16384.0
"""Keys at which hardware files give attention's rate."""
OLDER_KEYS_HALF = 300.0
"""Keys at which FlashAttention-2 runs at half of its rate: 191, 260, 298, 319 and 333 TFLOP/s at 512, 1, 2, 4 and 8
thousand, 335 at 16 (Shah et al., causal, heads of 128), by this 215, 264, 298, 318 and 329. Where hardware files say
nothing it is 480: 327, 432, 514, 568 and 599 where FlashAttention-3 has 292, 423, 521, 579 and 602 there."""
WIDE_HEAD, NARROW_HEADS, OLDER_NARROW_HEADS = 128, 0.75, 0.88
"""Share of the rate that heads of 64 have: FlashAttention-3 497 of 648 TFLOP/s there without mask, FlashAttention-2 324
of 370."""
FP8_ATTENTION = {False: (1.26, 0.92), True: (1.47, 1.31)}
"""How much faster attention in 8 bits (MXFP8) is, forward and backward, for heads of 128 and for wider ones of latent
attention: geometric means of GB200 and GB300 at 4,096 tokens (cudnn-frontend 3929da2,
benchmark/sdpa_benchmark_training/results, llama3.1 and dsv3, April 2026). Backward it goes through all keys, whatever
the window (gpt_oss there: 2.1 ms, 0.47 in bf16)."""
TRITON_SLOWER = 1.8
"""FlashAttention-2 is 1.3 to 2.5 times as fast as the first FlashAttention in Triton (arXiv 2307.08691, section 4.1):
the geometric mean."""
SCORE_BYTES = (13.0, 19.0)
"""Moved for each score of a head in fp16. Forward: the product writes 2; scale, mask and softmax read 2 and write 2;
dropout reads 2, writes 2 and its mask; the product after reads 2. Backward: the gradient's product writes 2; dropout
reads 2 and the mask and writes 2; softmax reads 4 and writes 2; products for values, queries and keys read 2 each."""
_SMALLER = 3
"""Sizes of tiles that kernels have: the device's, a half of it and a quarter."""
_SMALLER_COST = 0.1
"""Share of the rate that each halving of a tile loses, since operands are read more often: an estimate."""


@dataclass(frozen=True)
class Kernels:
    """What one device takes for one thing after another.

    Args:
        launch_seconds: that each kernel adds.
        attention_kernel: best; flash-2, which does not use what newer devices have; torch, that is the best
            on `CUDNN_ON` and for whole rows, else flash-2; flash-triton, the first one in Triton; unfused, scores in
            memory.
    """

    device: Device
    launch_seconds: float = 0.0
    attention_kernel: str = "best"

    def product(
        self, rows: float, columns: float, inner: float, recipe: str, *, count: int = 1, extra: float = 0.0
    ) -> float:
        """Seconds of `count` products of [rows, inner] and [inner, columns] at once.

        Args:
            extra: bytes that are moved besides, as of sums in float32.
        """
        if rows <= 0:
            return 0.0
        rate = self.device.rate(kind_of(recipe, self.device), inner) or 0.0
        compute = 2.0 * rows * columns * inner * count / (rate * self._waves(rows, columns, count))
        moved = count * (element_bytes(recipe) * inner * (rows + columns) + 2.0 * rows * columns) + extra
        return max(compute, moved / self.bandwidth) + self.launch_seconds

    def attention(
        self,
        pairs: float,
        widths: float,
        *,
        keys: float,
        head_size: int,
        backward: bool = False,
        in_8_bits: bool = False,
        in_parts: bool = False,
    ) -> float:
        """Seconds of the kernel.

        Args:
            pairs: of queries and keys that they see, of all rows.
            widths: numbers of a token's queries and of its results, all heads.
            keys: that a query sees at most.
            in_parts: a window hides keys, or ranks pass them on.
        """
        if self.attention_kernel == UNFUSED:
            scores = 2.0 * pairs * widths / (2.0 * head_size)
            rate = self.device.rate("bf16", head_size) or 1.0
            flops = (4.0 if backward else 2.0) * 2.0 * pairs * widths
            return flops / rate + self.moved(SCORE_BYTES[backward] * scores, kernels=6)
        share, half = self._attention_share(backward=backward, in_parts=in_parts)
        share *= keys / (keys + half) * (1.0 + half / LONG_KEYS)
        if head_size < WIDE_HEAD:
            share *= NARROW_HEADS if half > OLDER_KEYS_HALF else OLDER_NARROW_HEADS
        if in_8_bits:
            share *= FP8_ATTENTION[head_size > WIDE_HEAD][backward]
        flops = (5.0 if backward else 2.0) * pairs * widths
        return flops / (self.device.peak.bf16 * share) + self.launch_seconds

    def _attention_share(self, *, backward: bool, in_parts: bool) -> tuple[float, float]:
        """Share of bf16's peak for many keys, and the keys for which it is half of that."""
        device, kernel = self.device, self.attention_kernel
        achieved, half = device.achieved, device.shape.keys_half
        share = achieved.attention_backward if backward else achieved.attention_forward
        if kernel == BEST or (kernel == TORCH and device.name in CUDNN_ON and not in_parts):
            return share, half
        if device.name in FLASH_2_SHARES:
            share, half = share * FLASH_2_SHARES[device.name][backward], OLDER_KEYS_HALF
        elif device.name in FLASH_2_RATES:
            share, half = FLASH_2_RATES[device.name][backward] / device.peak.bf16, OLDER_KEYS_HALF
        return share / TRITON_SLOWER if kernel == FLASH_TRITON else share, half

    def moved(self, num_bytes: float, *, kernels: int = 1) -> float:
        """Seconds of reading and writing so much in all."""
        return num_bytes / self.bandwidth + kernels * self.launch_seconds

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of the memory, as kernels reach it."""
        return self.device.bandwidth

    def _waves(self, rows: float, columns: float, count: int) -> float:
        shape = self.device.shape
        high, wide, best = shape.tile_rows, shape.tile_columns, 0.0
        for smaller in range(_SMALLER):
            tiles = count * math.ceil(rows / high) * math.ceil(columns / wide)
            whole = rows * columns * count / (tiles * high * wide)
            turns = tiles / self.device.multiprocessors
            best = max(best, whole * turns / math.ceil(turns) * (1.0 - _SMALLER_COST * smaller))
            high, wide = min(high, wide), max(1, max(high, wide) // 2)
        return best


def kind_of(recipe: str, device: Device) -> Kind:
    """How a device multiplies in a recipe; without units for it as in bf16.

    Raises:
        PlanError: units for it are there, but nothing says how fast products of them are.
    """
    name = KINDS.get(recipe, recipe)
    if name == "int8" and device.rate("int8") is None:
        raise PlanError(
            f"no rate of INT8 products is known for {device.name}",
            got=f"precision {recipe}",
            expected="peak.int8 and achieved.int8 in a hardware file",
            do="give a file of your own with both, or plan another format",
        )
    kind: Kind = next((one for one in KNOWN if one == name), "bf16")
    return "bf16" if device.rate(kind) is None else kind


@lru_cache
def element_bytes(recipe: str) -> float:
    """Bytes of a number of an operand, without scales."""
    if recipe == "fp32":
        return 4.0
    if recipe in ("bf16", "fp16"):
        return 2.0
    return 0.5 if recipe in ("fp4", "nvfp4", "mxfp4") else 1.0
