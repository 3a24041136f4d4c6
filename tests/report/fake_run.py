"""Makes run folders that look like real ones: a noisy falling loss, a schedule, events, a plan."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

CONFIG = """\
device = "cpu"  # this machine has no CUDA device
precision = "fp32"  # the device is a CPU

[run]
dir = "runs/fake"
seed = 0

[data]
source = "stdlib"
tokenizer = "bpe"  # no tokenizer was given, so one is trained on the corpus
held_out = 0.02
mask_documents = true

[model]
preset = "llama-3m"
vocab_size = 4096  # the tokenizer has 4,096 entries

[train]
steps = {steps}
sequence = 256  # by the size of the model, 3.1M parameters
batch_tokens = 4096
micro_batch = 8
lr = 0.003
schedule = "cosine"
warmup_steps = 20
"""


def metrics(steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """One record per step, as a run writes them."""
    random.seed(seed)
    records = []
    for step in range(1, steps + 1):
        share = step / max(steps, 1)
        loss = 3.0 + 5.3 * math.exp(-share * 12) + 1.1 * math.exp(-share * 2.5) + random.gauss(0, 0.09)
        skipped = steps > 100 and step == steps // 3
        wait = abs(random.gauss(0.0004, 0.0002)) + (0.03 if random.random() < 0.01 else 0)
        seconds = 0.42 * (1 + abs(random.gauss(0, 0.03))) + wait + (2.5 if step == 1 else 0)
        warm = min(1.0, step / 20)
        rate = 4096 / seconds
        record: dict[str, Any] = {
            "step": step,
            "tokens": step * 4096,
            "loss": None if skipped else round(loss, 5),
            "grad_norm": None if skipped else round(math.exp(random.gauss(0.2, 0.35) - share), 4),
            "lr": 3e-3 * warm * (0.55 + 0.45 * math.cos(math.pi * share)),
            "tokens_per_s": rate,
            "mfu_bf16": rate * 13.1e6 / 3.1e11,
            "sol": rate * 13.1e6 / 2.6e11,
            "peak_device_bytes": int(1.15e9 + 2e8 * min(1, share * 9)),
            "peak_host_bytes": int(1.15e9 + 2e8 * min(1, share * 9)),
            "data_wait_s": wait,
            "step_s": seconds,
            "skipped": skipped,
        }
        if step % max(1, steps // 10) == 0:
            record["eval_loss"] = round(3.06 + 1.25 * math.exp(-share * 2.6) + 5 * math.exp(-share * 12), 4)
            record["eval_bits_per_byte"] = round(record["eval_loss"] / 2.05, 4)
        records.append(record)
    return records


def events(steps: int, *, finished: bool = True) -> list[dict[str, Any]]:
    """Events of such a run."""
    time = "2026-03-01T10:0{}:00.123456+00:00"
    found: list[dict[str, Any]] = [
        {
            "kind": "start", "step": 0, "time": time.format(0), "reason": "from the beginning",
            "torch": "2.13.0", "threads": 2, "device": "Example CPU, 2 cores",
        },
        {"kind": "plan", "step": 0, "time": time.format(0), "reason": "everything fits on the device"},
    ]  # fmt: skip
    found += [
        {"kind": "checkpoint", "step": step, "time": time.format(1), "reason": "complete"}
        for step in range(max(1, steps // 10), steps + 1, max(1, steps // 10))
    ]
    if steps > 100:
        found.append(
            {"kind": "skipped", "step": steps // 3, "time": time.format(2), "reason": "loss is not finite"}
        )
        found.append(
            {
                "kind": "outlier", "step": steps // 2, "time": time.format(3),
                "reason": "gradient norm 4.31 is 5.2 standard deviations above the window's mean", "z": 5.2314,
            }
        )  # fmt: skip
    if finished:
        found.append(
            {
                "kind": "sample", "step": steps, "time": time.format(4),
                "reason": "held-out beginning, temperature 0.8",
                "prompt": "def read_lines(path, encoding=None):\n    ",
                "text": '"""Return the lines of a file."""\n    with open(path, "r") as file:\n'
                "        for line in file:\n            yield line.strip()\n\n\nclass Reader(object):\n"
                "    def __init__(self, name, self):\n        self.name = name\n",
            }
        )  # fmt: skip
        found.append({"kind": "finish", "step": steps, "time": time.format(5), "reason": "all steps done"})
    return found


def plan(layers: int = 6) -> dict[str, Any]:
    """A plan with two kinds of blocks."""
    names = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    gemm = {
        "fprop": "fp32",
        "dgrad": "fp32",
        "wgrad": "fp32",
        "saved": "fp32",
        "reason": "the device is a CPU",
    }
    gemms = {f"blocks.{block}.{name}": dict(gemm) for block in range(layers) for name in names}
    mixed = {"fprop": "fp4", "dgrad": "fp8", "wgrad": "bf16", "saved": "fp8", "reason": "lowest divergence"}
    gemms[f"blocks.{layers - 1}.mlp.down"] = mixed
    gemms["head"] = dict(gemm)
    fits = "predicted peak 1,210,000,000 bytes fits in 8,000,000,000"
    place = {"weights": "device", "gradients": "device", "optimizer": "device", "reason": fits}
    return {
        "scrimp_plan": 1,
        "fingerprint": {
            "model": "llama-0123456789ab", "device": "Example CPU, 2 cores", "torch": "2.13.0", "world_size": 1,
        },
        "budget": {"device_memory": 4_294_967_296},
        "gemms": gemms,
        "blocks": {str(block): {"activations": "keep", "reason": fits} for block in range(layers)},
        "states": {name: dict(place) for name in [*map(str, range(layers)), "embedding", "head"]},
        "layout": {"stages": [[0, layers - 1]], "dp": 1, "fsdp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1},
        "predicted": {
            "peak_device_bytes": 1_210_000_000, "peak_host_bytes": None, "step_seconds": 0.40,
            "loss_divergence": None, "weight_divergence": None,
        },
        "measured": {"peak_device_bytes": 1_350_000_000, "peak_host_bytes": 1_350_000_000, "step_seconds": 0.43,
                     "loss_divergence": None, "weight_divergence": None},
    }  # fmt: skip


def write_run(folder: Path, steps: int = 300, *, finished: bool = True) -> Path:
    """A whole run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(steps=steps), encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(plan()), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", metrics(steps))
    write_lines(folder / "events.jsonl", events(steps, finished=finished))
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
