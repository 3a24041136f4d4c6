"""The address of the rounding noise: run, step, row of the batch, layer, GEMM, operand.

Stochastic rounding draws from streams (see `scrimp.formats.noise`). A stream's key is made of
the run's seed, the step, the layer's name and the use of the tensor; a row's address is its place in the whole
batch of the step. So the noise is independent between all of them, and the same however the batch is cut
into micro-batches and ranks.

A training loop calls `Clock.begin` before every micro-batch. A loop that never does gets a new
step for every forward pass of the swapped module.

The reading is a tensor: a compiled graph takes it as an input like any other, where a Python number would be
compiled into the graph, and every step would compile anew.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from scrimp.formats import Noise

_GEMM_IDS = {"fprop": 1, "dgrad": 2, "wgrad": 3}


class Clock:
    """Which micro-batch the forward pass belongs to; shared by all layers of a model."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.reading = _reading(0, 0)
        self.is_set = False

    def __deepcopy__(self, memo: dict[int, object]) -> Clock:
        """Itself: copies of a model keep time with it, in their hooks as in their layers."""
        return self

    def begin(self, step: int, first_row: int = 0) -> None:
        """The next forward pass is of this step, its first token this row of the step's batch."""
        self.reading, self.is_set = _reading(step, first_row), True

    def tick(self) -> None:
        """A forward pass begins: a new step, unless the loop says which."""
        if not self.is_set:
            # Not in place: what the backward pass remembers stays as it was.
            self.reading = self.reading + _ONE_STEP

    @property
    def now(self) -> tuple[int, int]:
        """Step and first row: what the backward pass must remember."""
        step, first_row = self.reading.tolist()
        return step, first_row

    @property
    def step(self) -> int:
        """Optimizer step, or forward passes so far."""
        return self.now[0]

    @property
    def first_row(self) -> int:
        """Row of the step's batch at which the micro-batch begins."""
        return self.now[1]

    def noise(
        self, layer: str, gemm: str, operand: int, now: tuple[int, int], columns: tuple[range, ...] = ()
    ) -> Noise:
        """The stream of one operand (0 or 1) of a GEMM of a layer.

        Args:
            columns: of the operand that are here; empty: all.
        """
        step, first_row = now
        stream = Noise(0, first_row, columns=columns)
        return stream.derive(self.seed, step, zlib.crc32(layer.encode()), _GEMM_IDS[gemm], operand)


def _reading(step: int, first_row: int) -> Tensor:
    """[2], int64 on the CPU."""
    with torch.inference_mode(False):  # autograd could not keep a tensor made in it
        return torch.tensor([step, first_row], dtype=torch.int64, device="cpu")


_ONE_STEP = _reading(1, 0)
