"""Constants of the 8-bit codes of AdamW's averages; what they mean is said in `scrimp.optim.moments`.

Here, so that the operators there and the kernel in `scrimp.gemm.kernels.adamw` have the same.
"""

BLOCK = 128
"""Elements of a row that share a scale."""
DROPPED_BITS = 19
"""Mantissa bits that are dropped: 4 of fp32's 23 stay."""
SHIFT = 2.0**-15
"""c: 112 << 4 in the upper bits of fp32, a multiple of 256, so that a byte's wrap-around subtracts it."""
SHIFT_CODE = 112 << 4
STEP = SHIFT / 16
"""The smallest step in y."""
TOP_SIGNED = 2.0**-7 * (1 - 1 / 32) - SHIFT
TOP_UNSIGNED = 2.0 * (1 - 1 / 32) - SHIFT
"""Largest |x| / s that the codes reach, of 7 bits and a sign, and of 8 bits."""
MARGIN = 1 + 2.0**-18
"""Keeps a block's largest number below these tops whatever its scaling rounds to."""
SMALLEST_SCALE = 2.0**-120
