"""What a GEMM's format does to the loss, batch by batch: measured, and as three first-order predictions have it.

Question  SNIP predicts the size of the change from norms, as if errors were independent of gradients. How much of it is
          that, how much the first-order change of the very batch, and how much is second order?
Method    fprop of every layer alone in a format, on batches from a checkpoint on; in bf16 else. Of each batch:

              measured     loss in the format less the clean one
              inner        <gX, eX> + <gW, eW>                        the first-order change itself
              elementwise  sqrt(sum gX^2 eX^2 + sum gW^2 eW^2)        its deviation, errors of random sign
              norms        sqrt((|gX| |eX|)^2 / numel + the same of W)  SNIP's form, which the planner uses

          gX is the gradient through the layer alone, G W; eX and eW are errors to nearest.
Run       python benchmarks/snip_study.py trunk --seeds 0 --trunk-steps 300 --work runs/snip
          python benchmarks/snip_loss.py runs/snip/seed0 300 nvfp4
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from snip_lab import BASE, Lab, spearman
from torch import Tensor

from scrimp.data import Batch
from scrimp.formats import fake_quantize
from scrimp.gemm import Execution, observing

Array = NDArray[np.float64]
PREDICTIONS = ("inner", "elementwise", "norms")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder with a kept checkpoint")
    parser.add_argument("step", type=int, help="of the checkpoint")
    parser.add_argument("format")
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    lab = Lab(options.run, options.step)
    rows = []
    for micro_batches in lab.batches(options.step, options.batches):
        first_order, clean = predicted(lab, options.step, micro_batches, options.format)
        rows.append((measured(lab, options.step, micro_batches, options.format) - clean, first_order))
    show(np.array([one for one, _ in rows]), np.array([one for _, one in rows]))


def predicted(lab: Lab, step: int, micro_batches: list[Batch], fmt: str) -> tuple[Array, float]:
    """[L, 3] as `PREDICTIONS`, the last two squared, and the clean loss."""
    lab.planned.replan(BASE)
    sums: dict[str, Array] = defaultdict(lambda: np.zeros(3))
    gradients: dict[str, Tensor] = {}
    weights: dict[str, list[Tensor]] = {}

    def error(layer: str, operand: int, value: Tensor) -> Tensor:
        planned = lab.planned.layers[layer]
        use = planned.uses("fprop", planned.clock.now, fmt)[operand]
        assert use.operand is not None
        return fake_quantize(value, use.operand, use.axis, noise=use.noise).dequantize() - value.float()

    def see(one: Execution) -> None:
        if one.gemm == "dgrad":
            gradients[one.layer] = one.result.float()
        elif one.gemm == "fprop" and one.layer not in weights:
            assert isinstance(one.b, Tensor)
            weights[one.layer] = [error(one.layer, 1, one.b.detach())]
        elif one.gemm == "wgrad":
            assert isinstance(one.b, Tensor)
            sums[one.layer] += terms(gradients.pop(one.layer), error(one.layer, 0, one.b.detach()))
            weights[one.layer].append(one.result.float())

    with observing(see, plain=True):
        loss = 0.0
        for part in lab.losses(step, micro_batches):
            part.backward()
            loss += float(part.detach())
    lab.optimizer.zero_grad()
    for layer, (of_weight, *parts) in weights.items():
        sums[layer] += terms(torch.stack(parts).sum(0), of_weight)
    return np.array([sums[layer] for layer in lab.layers]), loss


def terms(gradient: Tensor, error: Tensor) -> Array:
    """The three predictions of one operand, the last two squared."""
    norms = float(gradient.square().sum()) * float(error.square().sum()) / gradient.numel()
    return np.array([float((gradient * error).sum()), float((gradient * error).square().sum()), norms])


@torch.no_grad()
def measured(lab: Lab, step: int, micro_batches: list[Batch], fmt: str) -> Array:
    """[L] losses with fprop of one layer in the format."""
    found = []
    for layer in lab.layers:
        lab.replan({layer: [fmt, "bf16", "bf16"]})
        found.append(sum(float(part) for part in lab.losses(step, micro_batches)))
    lab.planned.replan(BASE)
    return np.array(found)


def show(changes: Array, first_order: Array) -> None:
    """Print what [B, L] changes and [B, L, 3] predictions say of each other."""
    rms = np.sqrt((changes**2).mean(0))
    inner = first_order[..., 0]
    for batch, (change, one) in enumerate(zip(changes, inner, strict=True)):
        print(f"batch {batch}: inner and measured correlate by {np.corrcoef(one, change)[0, 1]:.2f}")
    sizes = (inner**2).mean(0), first_order[..., 1].mean(0), first_order[..., 2].mean(0)
    for name, square in zip(PREDICTIONS, sizes, strict=True):
        size = np.sqrt(square)
        print(f"{name}: {np.median(size / rms):.3f} of the measured size, Spearman {spearman(size, rms):.3f}")
    mean = np.median(np.abs(changes.mean(0)) / rms)
    print(f"mean over batches: {mean:.2f} of the rms (chance: {np.sqrt(2 / np.pi / len(changes)):.2f})")
    print(
        f"second order: {(changes - inner).mean():.2e} on average, rms of all {np.sqrt((changes**2).mean()):.2e}"
    )


if __name__ == "__main__":
    main()
