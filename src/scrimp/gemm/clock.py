"""The address of the rounding noise: run, step, row of the batch, layer, GEMM, operand.

Stochastic rounding draws from streams (see `scrimp.formats.noise`). A stream's key is made of
the run's seed, the step, the layer's name and the use of the tensor; a row's address is its place in the whole
batch of the step. So the noise is independent between all of them, and the same however the batch is cut
into micro-batches and ranks.

A training loop calls `Clock.begin` before every micro-batch. A loop that never does gets a new
step for every forward pass of the swapped module.
"""

from __future__ import annotations

import zlib

from scrimp.formats import Noise

_GEMM_IDS = {"fprop": 1, "dgrad": 2, "wgrad": 3}


class Clock:
    """Which micro-batch the forward pass belongs to; shared by all layers of a model."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self.first_row = 0
        self.is_set = False

    def begin(self, step: int, first_row: int = 0) -> None:
        """The next forward pass is of this step, its first token this row of the step's batch."""
        self.step, self.first_row, self.is_set = step, first_row, True

    def tick(self) -> None:
        """A forward pass begins: a new step, unless the loop says which."""
        if not self.is_set:
            self.step += 1

    @property
    def now(self) -> tuple[int, int]:
        """Step and first row: what the backward pass must remember."""
        return self.step, self.first_row

    def noise(self, layer: str, gemm: str, operand: int, now: tuple[int, int], first_column: int = 0) -> Noise:
        """The stream of one operand (0 or 1) of a GEMM of a layer."""
        step, first_row = now
        stream = Noise(0, first_row, first_column)
        return stream.derive(self.seed, step, zlib.crc32(layer.encode()), _GEMM_IDS[gemm], operand)
