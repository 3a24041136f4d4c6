"""Where does measuring pay? Predicted harm of plans by rules, over that of SNIP's plan, model by model.

Question  A free rule (dgrad and wgrad in 4 bits, fprop protected from both ends inwards) trains as well as measured
          costs where its guess is right. By SNIP's own costs, on which models and at which shares is it wrong?
Method    Models of `snip_rates` in a plain loop; at some steps `scrimp.measure` takes statistics of two batches. Each
          policy plans at each share of FLOPs in 4 bits, and each plan's cost V (eq. 8) is added up, as a share of V of
          everything in 4 bits.
Limits    A prediction by the costs that SNIP minimizes: its plan is the lowest by construction. It says where a
          difference is to be looked for by training, and, where the ratio is near 1, that there is none to be found.
Run       python benchmarks/snip_headroom.py --models llama gpt2 qwen2 --blocks 4 12 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import snip_rates as lab
import torch
from environment import facts

import scrimp
from scrimp.planner.precision.divergence import Weights, gemm_costs, mean_divergence
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import GEMMS

SHARES = (0.5, 0.75, 0.9, 0.95)
POLICIES = ("snip", "backward-first", "first-last", "layer-type", "min-rel-err-gemm")


def main() -> None:
    """Print a row for each model and step, and add it to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=lab.MODELS, default=list(lab.MODELS))
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--steps", type=int, nargs="+", default=[60, 300])
    parser.add_argument("--low", default="nvfp4")
    parser.add_argument("--high", default="mxfp8")
    parser.add_argument("--out", required=True, help="file that rows are added to")
    options = parser.parse_args()
    about = facts("torch", "transformers")
    tokens = lab.tokens_of(None)
    for kind in options.models:
        for blocks in options.blocks:
            for row in rows(kind, blocks, tokens, options):
                print(json.dumps(row), flush=True)
                with open(options.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(about | row) + "\n")


def rows(
    kind: str, blocks: int, tokens: torch.Tensor, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One for each step of one model's training."""
    for step, model, optimizer in lab.trained(kind, blocks, tokens, options.steps, seed=0):
        batches = [lab.batch_at(tokens, step + i, 0) for i in range(lab.STATISTICS)]
        profile = scrimp.measure(
            model, optimizer, batches, lab.loss_of,
            formats=(options.high, options.low), max_norm=lab.CLIP, seed=step,
        )  # fmt: skip
        harms = {share: {one: harm(profile, one, share, options.low) for one in POLICIES} for share in SHARES}
        yield {"model": kind, "blocks": blocks, "step": step, "low": options.low, "harm": harms} | by_kind(
            profile, options.low
        )


def costs(profile: PrecisionProfile, low: str) -> np.ndarray:
    """[L, 3, P], V of every GEMM, everything in the low format being 1."""
    found: np.ndarray = gemm_costs(profile, mean_divergence(profile), Weights())
    return found / found[..., profile.formats.index(low)].sum()


def harm(profile: PrecisionProfile, policy: str, share: float, low: str) -> float:
    """V of a policy's plan."""
    plan = scrimp.plan(profile, share, policy=policy)
    chosen = [[profile.formats.index(getattr(plan.precisions[layer], gemm)) for gemm in GEMMS]
              for layer in profile.layers]  # fmt: skip
    return float(np.take_along_axis(costs(profile, low), np.array(chosen)[..., None], -1).sum())


def by_kind(profile: PrecisionProfile, low: str) -> dict[str, Any]:
    """Shares of V: of each kind of GEMM, and of fprop in each block."""
    every = costs(profile, low)[..., profile.formats.index(low)]
    blocks: dict[str, float] = {}
    for layer, cost in zip(profile.layers, every[:, 0], strict=True):
        number = next(part for part in layer.split(".") if part.isdigit())
        blocks[number] = blocks.get(number, 0.0) + float(cost)
    return {"kinds": dict(zip(GEMMS, every.sum(0).tolist(), strict=True)), "fprop_of_blocks": blocks}


if __name__ == "__main__":
    main()
