"""Several ranks share the layers of a transformers model in a training loop of your own (tensor parallelism).

Each rank has its own heads and its own part of every MLP, found by tracing the model; the loop stays plain PyTorch.
A GPT-2 with random weights learns the bytes of your Python's own source text. CPUs are enough; no network, a minute.

    python examples/share_layers.py                           the plan for two ranks, in one process
    torchrun --nproc-per-node 2 examples/share_layers.py      two ranks train
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import scrimp

CONTEXT, BATCH = 64, 8


def batches(seed: int) -> torch.Tensor:
    """A batch of bytes, equal on all ranks: they train one copy of the model together."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([torch.tensor(list(text[start : start + CONTEXT])) for start in starts.tolist()])


def main() -> None:
    """Share, train, put together again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="updates (default: 30)")
    steps = parser.parse_args().steps
    torch.manual_seed(0)  # the same weights, and the same dropout between blocks, on every rank
    # Attention with dropout would stay whole on every rank: they would draw other masks than one process does.
    config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    tokens = batches(0)
    call = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if "RANK" not in os.environ:
        print(scrimp.tensor_plan(model, call, ranks=2))
        return

    dist.init_process_group("gloo")
    shared = scrimp.share_layers(model, call)
    is_first = dist.get_rank() == 0
    if is_first:
        print(shared.plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = batches(step)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        norm = shared.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_first and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {float(loss.detach()):.3f}, gradient norm {float(norm):.2f}")

    state = shared.whole_state_dict()  # on every rank; what an unshared model loads
    if is_first:
        whole = GPT2LMHeadModel(config)
        whole.load_state_dict(state)
        print(f"the whole model again: {sum(p.numel() for p in whole.parameters()):,} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
