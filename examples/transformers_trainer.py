"""Scrimp in the Trainer of transformers: one callback plans the precision of every GEMM while it trains.

A tiny Llama from a configuration, on the bytes of your Python's own source text, in bf16 on the CPU, where the formats
are emulated; nothing is downloaded, about half a minute. Needs transformers and accelerate.

    python examples/transformers_trainer.py
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from scrimp.integrations.transformers import SnipCallback
from scrimp.report.precision_text import precision_map_text

CONTEXT = 64


def dataset() -> list[dict[str, torch.Tensor]]:
    """Pieces of the standard library's source, a token per byte."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((library / name).read_bytes() for name in ("argparse.py", "typing.py", "inspect.py"))
    pieces = torch.tensor(list(text[: len(text) // CONTEXT * CONTEXT])).view(-1, CONTEXT)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


class PrintPlans(TrainerCallback):
    """Shows each plan of a SnipCallback as it comes into force."""

    def __init__(self, snip: SnipCallback) -> None:
        self.snip, self.shown = snip, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        plan, history = self.snip.plan, self.snip.history
        if plan is None or len(history) == self.shown:
            return
        self.shown = len(history)
        shares = {name: layer.flops_share for name, layer in plan.layers.items()}
        title = f"\nafter update {state.global_step}: {plan.reason}"
        Console(width=100).print(precision_map_text(plan.precisions, shares, title=title))


def main() -> None:
    """Train, with two plans on the way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fp4", type=float, default=0.75, help="share of the linear FLOPs in 4 bits")
    options = parser.parse_args()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    snip = SnipCallback(options.fp4, first=15, every=20, switch_after=5)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            warmup_steps=10,
            bf16=True,
            use_cpu=True,
            logging_steps=10,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = Trainer(
            LlamaForCausalLM(config), arguments, train_dataset=dataset(), callbacks=[snip, PrintPlans(snip)]
        )
        trainer.train()


if __name__ == "__main__":
    main()
