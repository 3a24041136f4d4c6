"""Initial weights that depend on the seed and on the parameter's name, and on nothing else.

Problem  One generator for all parameters makes every weight depend on the order and on the
         number of the parameters before it: a deeper model, a tied head or another layout
         over devices would change all of them.
Method   Each parameter draws from its own generator, seeded by SHA-256 of (seed, name), on
         the CPU in float32, and is then copied to its device and type; of several ranks each draws the
         whole and keeps its part.
         Matrices: normal(0, 0.02), as transformers does for all four families; both factors of a product of rank r:
         normal(0, s) with s^2 = 0.02 / sqrt(r), so that B A, whose numbers are sums of r products, has the variance
         r s^4 = 0.02^2 of a matrix;
         numbers of a sparse matrix beside a product: uniform on +- 1 / sqrt(in), as SLTrain draws them;
         norm weights: 1, with their offset; biases: 0;
         of adapters A: uniform on +- 1 / sqrt(in), as peft draws it; B: 0, so that nothing is added at first.
Checked  tests/models/test_initialise.py
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scrimp.gemm import SparseLowRankLinear
from scrimp.models.blocks import RMSNorm
from scrimp.models.model import Model
from scrimp.parts import part_of

STANDARD_DEVIATION = 0.02


def parameter_seed(seed: int, name: str) -> int:
    """The 63-bit seed of one parameter's own generator."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def initialise(model: Model, seed: int) -> None:
    """Fill every parameter that is trained, in place: all, or adapters, whose base has its weights from elsewhere.

    Args:
        model: its parameters must have storage (not on the meta device).
        seed: the run's seed.
    """
    sparse = {
        f"{name}.S": module.in_features
        for name, module in model.named_modules()
        if isinstance(module, SparseLowRankLinear)
    }
    for name, parameter in model.trained().items():
        part = part_of(parameter)
        value = initial_value(name, part.shape, seed, sparse.get(name))
        for box in part.boxes():
            box.local.copy_(value[box.place])
    for module in model.modules():
        if isinstance(module, RMSNorm) and module.offset and module.weight.requires_grad:
            part_of(module.weight).local.fill_(1.0 - module.offset)


def initial_value(name: str, shape: Sequence[int], seed: int, inputs: int | None = None) -> Tensor:
    """One parameter's first value, in float32 on the CPU.

    Args:
        inputs: of the layer whose sparse matrix it has the numbers of; None: it has those of none.
    """
    if name.endswith(("bias", ".lora_b")):
        return torch.zeros(tuple(shape))
    if len(shape) == 1:
        return torch.ones(tuple(shape))
    deviation, ranks = STANDARD_DEVIATION, {".A.weight": shape[0], ".B.weight": shape[1]}
    rank = ranks.get(name[-len(".A.weight") :])
    if rank is not None:
        deviation = math.sqrt(STANDARD_DEVIATION / math.sqrt(rank))
    generator = torch.Generator().manual_seed(parameter_seed(seed, name))
    if name.endswith(".lora_a") or inputs is not None:
        bound = (inputs or shape[1]) ** -0.5
        return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)
    return torch.empty(tuple(shape)).normal_(0.0, deviation, generator=generator)
