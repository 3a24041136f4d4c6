"""Predicted against measured damage of single GEMMs, in a plain loop, early and late, on three kinds of model.

Question  A plan weighs fprop, dgrad and wgrad of all layers against each other. Are the sizes that SNIP predicts right
          for each kind of GEMM, are they in the right order, and do errors of several GEMMs add up as variances?
Method    A small model of transformers is trained in bf16 with torch's AdamW, in a loop that knows nothing of Scrimp.
          At some steps `scrimp.measure` takes statistics of two batches. Then each GEMM alone runs in the format, from
          unchanged weights and moments: on the same batches (`same`), on later ones that the statistics have not seen
          (`later`), and on the same ones with all else in fp32 (`exact`), where no other rounding is disturbed:

              update   root of the sum over matrices of (|change of AdamW's direction| / |W|)^2, rms over batches; the
                       direction is written down here, not taken from Scrimp
              loss     change of the loss by fprop in the format, its rms and its mean over batches

          Additivity: groups of GEMMs (pairs, kinds, whole plans) likewise; squared size over the sum of the
          squared sizes of its members, each measured alone.
Reading   `ratio`: median over layers of predicted over measured. `rank`: Spearman over all GEMMs, or all layers.
Run       python benchmarks/snip_rates.py --model llama --format nvfp4
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import facts
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import scrimp
from scrimp.gemm import LinearPrecision, PlannedModel, swap_in
from scrimp.planner.precision.divergence import Method, Weights, divergence, mean_divergence
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import GEMMS

Array = NDArray[np.float64]
VOCABULARY, SEQUENCE, ROWS = 4096, 256, 16
LR, WARM_UP, CLIP = 2e-3, 50, 1.0
WIDTH, BLOCKS, HEADS, MLP = 192, 4, 6, 512
STATISTICS, MEASURED, LOSS_BATCHES, AHEAD = 2, 1, 12, 20
KEPT = "bf16"
INDEPENDENT = Method(losses="independent")
MODELS = ("llama", "qwen2", "gpt2")


def main() -> None:
    """Train, stop at the steps, measure, and print a row of JSON for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--format", default="nvfp4", help="of the GEMMs that are perturbed")
    parser.add_argument("--steps", type=int, nargs="+", default=[60, 300])
    parser.add_argument("--text", type=Path, help="a file; unset: source text of the standard library")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gains", default="auto", help="how gains are measured: ratios, blocks or exact")
    parser.add_argument("--parts", nargs="+", default=["same", "exact"], choices=("same", "later", "exact"))
    parser.add_argument("--out", type=Path, help="file that rows are added to")
    options = parser.parse_args()
    about = facts("torch", "transformers") | {"threads": torch.get_num_threads()}
    for row in study(options):
        line = json.dumps(vars(options) | {"out": None, "text": options.text and options.text.name} | row)
        print(json.dumps({k: v for k, v in row.items() if k != "raw"}, indent=1), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(about | json.loads(line)) + "\n")


def study(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each of the steps, in order."""
    tokens = tokens_of(options.text)
    for step, model, optimizer in trained(options.model, BLOCKS, tokens, options.steps, seed=options.seed):
        yield {"step": step} | Bench(model, optimizer, tokens, step, options).row()


def trained(
    kind: str, blocks: int, tokens: Tensor, steps: Sequence[int], *, seed: int
) -> Iterator[tuple[int, nn.Module, torch.optim.Optimizer]]:
    """A model and its optimizer after each of the steps of one run."""
    torch.manual_seed(seed)
    model = build(kind, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(max(steps) + 1):
        if step in steps:
            yield step, model, optimizer
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARM_UP)
        loss_of(model, batch_at(tokens, step, seed)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}", file=sys.stderr, flush=True)


class Bench:
    """A model at one step: its statistics, and what each GEMM alone and in groups does."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tokens: Tensor,
        step: int,
        options: argparse.Namespace,
    ) -> None:
        self.model, self.optimizer, self.low, self.step = model, optimizer, options.format, step
        self.here = [batch_at(tokens, step + i, options.seed) for i in range(LOSS_BATCHES)]
        self.later = [batch_at(tokens, step + AHEAD + i, options.seed) for i in range(LOSS_BATCHES)]
        self.profile: PrecisionProfile = scrimp.measure(
            model, optimizer, self.here[:STATISTICS], loss_of,
            formats=(KEPT, self.low), gains=options.gains, max_norm=CLIP, seed=step,
        )  # fmt: skip
        self.layers = list(self.profile.layers)
        self.parts, self.compute = options.parts, "bf16"

    def row(self) -> dict[str, Any]:
        """Everything that is compared; `raw` holds the measured sizes."""
        planned = swap_in(self.model, dict.fromkeys(self.layers, LinearPrecision.of(KEPT)))
        found: dict[str, Any] = {}
        raw: dict[str, Any] = {}
        try:
            for name, batches, compute in (
                ("same", self.here, "bf16"),
                ("later", self.later, "bf16"),
                ("exact", self.here, "fp32"),
            ):
                if name not in self.parts:
                    continue
                self.compute = compute
                updates, losses = self.singles(planned, batches)
                raw[name] = {"update": updates.tolist(), "loss": losses.tolist()}
                found[name] = self.compared(updates, losses)
                if name == self.parts[-1]:
                    found["groups"] = self.additivity(planned, batches, updates, losses)
        finally:
            planned.swap_out()
        p = self.profile.formats.index(self.low)
        mean = mean_divergence(self.profile)
        raw["predicted"] = {
            "update": mean.update[..., p].tolist(),
            "loss": mean.loss[:, p].tolist(),
            "curvature": mean.curvature[:, p].tolist(),
        }
        raw["statistics"] = [
            {
                "parts": (batch.losses[:, p] / batch.loss).tolist(),
                "independent": divergence(self.profile, batch, INDEPENDENT).loss[:, p].tolist(),
            }
            for batch in self.profile.batches
        ]
        return found | {"raw": raw | {"layers": self.layers}}

    def singles(self, planned: PlannedModel, batches: Sequence[Tensor]) -> tuple[Array, Array]:
        """[L, 3] updates, rms over batches, and [B, L] changes of the loss, signed."""
        updates = np.zeros((MEASURED, len(self.layers), 3))
        losses = np.zeros((LOSS_BATCHES, len(self.layers)))
        for b, batch in enumerate(batches):
            clean = self.response(planned, batch, [])
            for i in range(len(self.layers)):
                if b >= MEASURED:
                    losses[b, i] = self.loss_in(planned, batch, [(i, 0)]) - clean[0]
                    continue
                for gemm in range(3):
                    loss, moved = self.damage(planned, batch, [(i, gemm)], clean)
                    updates[b, i, gemm] = moved
                    losses[b, i] = loss if gemm == 0 else losses[b, i]
        return np.sqrt((updates**2).mean(0)), losses / abs(clean[0])

    def damage(
        self,
        planned: PlannedModel,
        batch: Tensor,
        group: list[tuple[int, int]],
        clean: tuple[float, dict[str, Tensor]],
    ) -> tuple[float, float]:
        """Change of the loss, and relative change of the update, by a group of GEMMs in the format."""
        loss, directions = self.response(planned, batch, group)
        weights = dict(self.model.named_parameters())
        moved = sum(
            float((directions[name] - direction).square().sum() / weights[name].detach().square().sum())
            for name, direction in clean[1].items()
        )
        return loss - clean[0], moved**0.5

    def compared(self, updates: Array, losses: Array) -> dict[str, Any]:
        """Ratios and rank correlations of one set of batches."""
        p, mean = self.profile.formats.index(self.low), mean_divergence(self.profile)
        predicted = mean.update[..., p]
        rms, signed = np.sqrt((losses**2).mean(0)), losses.mean(0)
        both = np.sqrt(mean.loss[:, p] ** 2 + mean.curvature[:, p] ** 2)
        return {
            "update_ratio": {
                gemm: float(np.median(predicted[:, j] / updates[:, j])) for j, gemm in enumerate(GEMMS)
            },
            "update_rank": spearman(predicted, updates),
            "loss_ratio": float(np.median(mean.loss[:, p] / rms)),
            "loss_ratio_with_mean": float(np.median(both / rms)),
            "loss_rank": spearman(mean.loss[:, p], rms),
            "loss_rank_with_mean": spearman(both, rms),
            "loss_halves": spearman(
                np.sqrt((losses[::2] ** 2).mean(0)), np.sqrt((losses[1::2] ** 2).mean(0))
            ),
            "mean_over_rms": float(np.median(np.abs(signed) / rms)),
            "chance": float(np.sqrt(2 / np.pi / len(losses))),
            "curvature_total": float(mean.curvature[:, p].sum()),
            "signed_total": float(signed.sum()),
            "signed_error": float(losses.sum(1).std(ddof=1) / len(losses) ** 0.5),
            "curvature_rank_with_signed": spearman(mean.curvature[:, p], signed),
        }

    def additivity(
        self, planned: PlannedModel, batches: Sequence[Tensor], updates: Array, losses: Array
    ) -> dict[str, dict[str, float]]:
        """Squared size of groups over the sum of their members' squared sizes; predicted and measured loss."""
        every = [(i, j) for i in range(len(self.layers)) for j in range(3)]
        groups: dict[str, list[list[tuple[int, int]]]] = {
            gemm: [[(i, j) for i, k in every if k == j]] for j, gemm in enumerate(GEMMS)
        } | {"all": [every], "half": []}
        generator = np.random.default_rng(0)
        shuffled = [every[i] for i in generator.permutation(len(every))]
        groups["half"] = [shuffled[: len(every) // 2], shuffled[len(every) // 2 :]]
        groups["pairs"] = [shuffled[i : i + 2] for i in range(0, 24, 2)]
        groups["snip"] = [self.planned_group("snip")]
        groups["backward-first"] = [self.planned_group("backward-first")]
        clean = [self.response(planned, batch, []) for batch in batches[:MEASURED]]
        found = {}
        for name, members in groups.items():
            ratios, sums, changes = [], [], []
            for group in members:
                pairs = [
                    self.damage(planned, b, group, c) for b, c in zip(batches[:MEASURED], clean, strict=True)
                ]
                square = float(np.mean([moved**2 for _, moved in pairs]))
                ratios.append(square / sum(updates[i, j] ** 2 for i, j in group))
                changes.append(float(np.mean([loss for loss, _ in pairs])) / abs(clean[0][0]))
                sums.append(float(sum(losses[:MEASURED, i].mean() for i, j in group if j == 0)))
            found[name] = {
                "update": float(np.median(ratios)),
                "loss_measured": float(np.mean(changes)),
                "loss_summed": float(np.mean(sums)),
            }
        return found

    def planned_group(self, policy: str) -> list[tuple[int, int]]:
        """The GEMMs that a policy runs in the format, at three quarters of FLOPs."""
        plan = scrimp.plan(self.profile, 0.75, policy=policy, weights=Weights())
        recipes = [plan.precisions[name] for name in self.layers]
        return [(i, j) for i, one in enumerate(recipes) for j, gemm in enumerate(GEMMS)
                if getattr(one, gemm) == self.low]  # fmt: skip

    def put(self, planned: PlannedModel, group: list[tuple[int, int]]) -> None:
        """A group of GEMMs into the format, the others into what is kept."""
        recipes = [[self.compute] * 3 for _ in self.layers]
        for i, j in group:
            recipes[i][j] = self.low
        planned.replan(
            {
                name: LinearPrecision(*one, saved=self.compute)
                for name, one in zip(self.layers, recipes, strict=True)
            }
        )

    def response(
        self, planned: PlannedModel, batch: Tensor, group: list[tuple[int, int]]
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss, and AdamW's next direction of every matrix; nothing is updated."""
        self.put(planned, group)
        planned.clock.begin(self.step)
        loss = loss_of(self.model, batch, self.compute)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        factor = min(1.0, CLIP / (float(norm) + 1e-6))
        found = {}
        for name, weight in self.model.named_parameters():
            if weight.ndim >= 2 and weight.grad is not None:
                found[name] = adamw_direction(self.optimizer, weight, weight.grad * factor)
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach()), found

    @torch.no_grad()
    def loss_in(self, planned: PlannedModel, batch: Tensor, group: list[tuple[int, int]]) -> float:
        """The loss alone."""
        self.put(planned, group)
        planned.clock.begin(self.step)
        return float(loss_of(self.model, batch, self.compute))


def adamw_direction(optimizer: torch.optim.Optimizer, weight: Tensor, gradient: Tensor) -> Tensor:
    """What AdamW would subtract, per learning rate and without decay (Loshchilov & Hutter, algorithm 2)."""
    (group,) = optimizer.param_groups
    beta1, beta2 = group["betas"]
    state = optimizer.state[weight]
    step = float(state["step"]) + 1
    first = beta1 * state["exp_avg"] + (1 - beta1) * gradient
    second = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient.square()
    direction: Tensor = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + group["eps"])
    return direction


# -- model and data ----------------------------------------------------------------------------


def build(kind: str, blocks: int) -> nn.Module:
    """A decoder of a few million parameters, with first weights by torch's seed."""
    common = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, "use_cache": False}
    sizes = common | {
        "hidden_size": WIDTH,
        "num_hidden_layers": blocks,
        "num_attention_heads": HEADS,
        "intermediate_size": MLP,
        "max_position_embeddings": SEQUENCE,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=HEADS))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=HEADS // 3))
    shape = {"n_embd": WIDTH, "n_layer": blocks, "n_head": HEADS, "n_positions": SEQUENCE}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**common, **shape, **dropout))


def tokens_of(text: Path | None) -> Tensor:
    """[N] byte-level BPE tokens of a file, or of the standard library's source."""
    if text:
        content = text.read_text(encoding="utf-8")
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        content = "\n".join(
            path.read_text(encoding="utf-8", errors="replace") for path in sorted(library.glob("*.py"))
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(content.splitlines(True), trainers.BpeTrainer(vocab_size=VOCABULARY))
    return torch.tensor(tokenizer.encode(content).ids)


def batch_at(tokens: Tensor, step: int, seed: int) -> Tensor:
    """[R, S + 1] windows at random places, the same whenever the step is asked for."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - SEQUENCE - 1, (ROWS, 1), generator=generator)
    return tokens[starts + torch.arange(SEQUENCE + 1)]


def loss_of(model: nn.Module, windows: Tensor, compute: str = "bf16") -> Tensor:
    """Mean cross-entropy of the next token, in nats."""
    with torch.autocast("cpu", torch.bfloat16, enabled=compute == "bf16"):
        logits = model(input_ids=windows[:, :-1]).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def spearman(first: Array, second: Array) -> float:
    """Rank correlation, ties by order."""
    ranks = [np.argsort(np.argsort(np.ravel(values))) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
