"""The study of precision once more, outside of Scrimp's trainer: a plain loop, a model of transformers, any text.

Question  `scrimp study` compares policies in Scrimp's own trainer, on its own models. Does what it says hold for a loop
          that knows nothing of Scrimp but `measure`, `plan` and `apply`, and for other kinds of model?
Method    A small model of transformers is trained in bf16 (torch's AdamW) up to a middle step, once for each seed.
          From there every policy trains on for some steps at a rate that falls to zero, each continuation with an own
          data order and own rounding noise, which all policies share: differences are paired. The figure is the
          held-out loss in bf16 at the end, as gap to the run that stays in bf16, in per cent.
Reading   Rows of JSON, one for each run; `--report` prints gaps and paired differences of all rows in the file.
          What the file holds already is not run again.
Limits    Small models on small texts, formats emulated. 80 steps say little of a whole run.
Run       python benchmarks/snip_plain_loop.py --model llama --low fp4 --high fp8 --text FILE --out rows.jsonl
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import snip_rates as lab
import torch
from environment import facts
from torch import Tensor, nn

import scrimp

HELD_OUT, EVALUATED = 0.05, 32
POLICIES = ("snip", "backward-first", "first-last")
SETTINGS = ("model", "blocks", "low", "high", "share", "middle", "steps", "text")


def main() -> None:
    """Run what the file lacks, a row for each run, or report on its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=lab.MODELS, default="llama")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--low", default="nvfp4")
    parser.add_argument("--high", default="mxfp8")
    parser.add_argument("--share", type=float, default=0.75, help="of the blocks' FLOPs in the low format")
    parser.add_argument("--middle", type=int, default=300, help="steps in bf16 before")
    parser.add_argument("--steps", type=int, default=80, help="steps by the plan")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of weights and data before")
    parser.add_argument("--continuations", type=int, default=2, help="of each seed")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--text", type=Path, help="a text file; unset: the standard library's source")
    parser.add_argument("--out", type=Path, required=True, help="file that rows are added to")
    parser.add_argument("--report", action="store_true", help="only print what the file's rows say")
    options = parser.parse_args()
    if not options.report:
        about = facts("torch", "transformers")
        for row in rows(options):
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | about) + "\n")
            print(json.dumps(row), flush=True)
    for line in report(kept_rows(options.out)):
        print(line)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs that the file lacks, seed by seed."""
    case = {name: getattr(options, name) for name in SETTINGS} | {
        "text": options.text.name if options.text else "stdlib"
    }
    done = [row for row in kept_rows(options.out) if case.items() <= row.items()]
    have = {(row["seed"], row["continuation"], row["policy"]) for row in done}
    tokens = lab.tokens_of(options.text)
    cut = int(len(tokens) * (1 - HELD_OUT))
    for seed in options.seeds:
        wanted = [
            (seed, continuation, policy)
            for continuation in range(options.continuations)
            for policy in ("bf16", *options.policies)
        ]
        if have.issuperset(wanted):
            continue
        ((_, model, optimizer),) = lab.trained(
            options.model, options.blocks, tokens[:cut], [options.middle], seed=seed
        )
        for _, continuation, policy in (one for one in wanted if one not in have):
            trained = continued(model, optimizer, tokens[:cut], policy, continuation, seed, options)
            loss = held_out_loss(trained, tokens[cut:])
            yield case | {"seed": seed, "continuation": continuation, "policy": policy, "loss": loss}


def continued(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    policy: str,
    continuation: int,
    seed: int,
    options: argparse.Namespace,
) -> nn.Module:
    """A copy of the model after its last steps, by a plan of the policy."""
    model, optimizer = copies_of(model, optimizer)
    # Batches of the trunk and of each continuation lie apart.
    order, first, planned = seed * 1000 + continuation + 1, options.middle, None
    if policy != "bf16":
        profile = scrimp.measure(
            model, optimizer, [lab.batch_at(tokens, first + i, order) for i in range(lab.STATISTICS)],
            lab.loss_of, formats=(options.high, options.low), max_norm=lab.CLIP, seed=order,
        )  # fmt: skip
        planned = scrimp.apply(model, scrimp.plan(profile, options.share, policy=policy), seed=order)
    for step in range(first, first + options.steps):
        for group in optimizer.param_groups:
            group["lr"] = lab.LR * (1 - (step - first) / options.steps)
        lab.loss_of(model, lab.batch_at(tokens, step, order)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), lab.CLIP)
        optimizer.step()
        optimizer.zero_grad()
    if planned is not None:
        planned.swap_out()
    print(f"seed {seed} continuation {continuation} {policy}", file=sys.stderr, flush=True)
    return model


def copies_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Both with own storage, the second one over the first one's weights."""
    other = copy.deepcopy(model)
    again = torch.optim.AdamW(other.parameters(), lr=lab.LR, betas=(0.9, 0.95), weight_decay=0.1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, again


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: Tensor) -> float:
    """Mean over windows spread evenly over the held-out text, every product in bf16."""
    starts = torch.linspace(0, len(tokens) - lab.SEQUENCE - 1, EVALUATED * lab.ROWS).long()
    windows = tokens[starts[:, None] + torch.arange(lab.SEQUENCE + 1)]
    losses = [lab.loss_of(model, part).item() for part in windows.split(lab.ROWS)]
    return float(np.mean(losses))


def kept_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of the file; none where there is no file yet."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def report(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each case and policy: its gap, and snip's less its own."""
    cases = sorted({tuple(row[name] for name in SETTINGS) for row in rows})
    for case in cases:
        losses = {
            (row["policy"], row["seed"], row["continuation"]): row["loss"]
            for row in rows
            if tuple(row[name] for name in SETTINGS) == case
        }
        gaps: dict[str, dict[tuple[int, int], float]] = {}
        for (policy, *pair), loss in losses.items():
            if policy != "bf16" and ("bf16", *pair) in losses:
                gaps.setdefault(policy, {})[pair[0], pair[1]] = 100 * (loss / losses["bf16", *pair] - 1)
        yield "  ".join(f"{name} {value}" for name, value in zip(SETTINGS, case, strict=True))
        for policy, found in gaps.items():
            line = f"  {policy:16} gap {np.mean(list(found.values())):+.4f} %, {len(found)} pairs"
            both = [gaps["snip"][pair] - found[pair] for pair in found if pair in gaps.get("snip", {})]
            if policy != "snip" and len(both) > 1:
                error = np.std(both, ddof=1) / len(both) ** 0.5
                line += f"; snip less {policy} {np.mean(both):+.4f} ± {error:.4f}"
                line += f", lower in {sum(one < 0 for one in both)}"
            yield line


if __name__ == "__main__":
    main()
