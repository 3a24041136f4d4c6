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

[optimizer]
lr = 0.003

[schedule]
name = "cosine"
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
            "tensor_peak_bytes": int(1.15e9 + 2e8 * min(1, share * 9)),
            "process_peak_bytes": int(1.95e9 + 3e8 * min(1, share * 9)),
            "process_growth_bytes": int(1.55e9 + 3e8 * min(1, share * 9)),
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
        "measured": {"peak_device_bytes": 1_350_000_000, "counted_in_step": 3, "process_peak_bytes": 2_250_000_000,
                     "process_growth_bytes": 1_850_000_000, "step_seconds": 0.43,
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


# -- a run that re-plans ---------------------------------------------------------------------------

FUSED = {"attention.qkv": 3.0, "attention.out": 1.0, "mlp.gate_up": 6.0, "mlp.down": 3.0}
"""Linear layers of a block with their FLOPs in any unit."""
SPLIT = {
    "self_attn.q_proj": 4.0, "self_attn.k_proj": 1.0, "self_attn.v_proj": 1.0, "self_attn.o_proj": 4.0,
    "mlp.gate_proj": 14.0, "mlp.up_proj": 14.0, "mlp.down_proj": 14.0,
}  # fmt: skip
GEMM_HARM = {"fprop": 1.0, "dgrad": 0.55, "wgrad": 0.3}
FORMAT_HARM = {"bf16": 0.0, "mxfp8": 0.03, "fp8": 0.04, "nvfp4": 1.0, "fp4": 1.6}


def analysis(
    step: int,
    *,
    blocks: int = 6,
    linears: dict[str, float] | None = None,
    prefix: str = "blocks",
    formats: tuple[str, ...] = ("fp8", "nvfp4"),
    budget: float = 0.75,
    stages: int = 1,
    measured: bool = True,
) -> dict[str, Any]:
    """What a re-plan leaves: harms that vary with depth, layer and step; the greedy choice under a budget."""
    linears = linears or FUSED
    noise = random.Random(step)
    total = blocks * sum(linears.values())
    layers: dict[str, Any] = {}
    for block in range(blocks):
        depth = 0.25 + 1.9 * (2 * block / max(blocks - 1, 1) - 1) ** 4 + 0.3 * math.sin(block + step / 300)
        for name, flops in linears.items():
            kind = 2.5 if "down" in name else 1.4 if name.endswith(("out", "v_proj")) else 0.7
            gemms = {}
            for gemm, factor in GEMM_HARM.items():
                size = abs(depth) * kind * factor * math.exp(noise.gauss(0, 0.25)) * flops / total
                loss = 0.4 * size if gemm == "fprop" else 0.0
                harm = {name: size * FORMAT_HARM[name] for name in formats}
                gemms[gemm] = {
                    "choice": formats[-1],
                    "harm": harm,
                    "loss": {name: loss * FORMAT_HARM[name] for name in formats},
                    "update": {name: (size - loss) * FORMAT_HARM[name] for name in formats},
                }
            stage = block * stages // blocks
            layers[f"{prefix}.{block}.{name}"] = {
                "flops_share": flops / total,
                "stage": stage,
                "gemms": gemms,
            }
    share = choose(layers, formats, budget)
    spent = sum(row["harm"][row["choice"]] for layer in layers.values() for row in layer["gemms"].values())
    return {
        "scrimp_precision": 1, "step": step, "measured_at": step - 2, "policy": "snip", "granularity": "gemm",
        "formats": list(formats), "budget": {"fp4_flops": budget}, "layers": layers,
        "predicted": {"fp4_flops": share, "loss_divergence": 1.1e-3 * (1 + spent),
                      "weight_divergence": 0.02 * (1 + spent), "step_seconds": None},
        "measured": {"loss_divergence": 0.97e-3 * (1 + spent), "weight_divergence": 0.0188 * (1 + spent)}
        if measured else None,
        "certainty": 0.91, "solver": {"name": "HiGHS", "gap": 0.0, "seconds": 0.04, "note": ""},
        "seconds": {"measure": 2.1, "solve": 0.04, "stall": 0.0},
    }  # fmt: skip


def choose(layers: dict[str, Any], formats: tuple[str, ...], budget: float) -> float:
    """Narrow formats for the GEMMs with the least harm per FLOP, until the budget is met; the share."""
    wide, narrow = formats[0], formats[-1]
    rows = [
        (row["harm"][narrow] / layer["flops_share"], layer["flops_share"] / 3, row)
        for layer in layers.values()
        for row in layer["gemms"].values()
    ]
    share, limit = 0.0, 0.0
    for rate, flops, row in sorted(rows, key=lambda entry: entry[0]):
        narrowed = share < budget - 1e-9
        row["choice"] = narrow if narrowed else wide
        share, limit = (share + flops, rate) if narrowed else (share, limit)
    for rate, _, row in rows:
        row["certainty"] = round(1 - 0.5 * math.exp(-abs(math.log(rate / limit)) * 3.5), 3)
    return share


def plan_of(found: dict[str, Any], **changes: str) -> dict[str, Any]:
    """The plan that an analysis leads to; the head stays in bf16. `changes`: layer to one format."""
    result = plan(1)
    gemms = {
        layer: {gemm: choice["choice"] for gemm, choice in row["gemms"].items()}
        | {"saved": "bf16", "reason": f"snip at step {found['step']}: least predicted harm at this budget"}
        for layer, row in found["layers"].items()
    }
    gemms["head"] = {**dict.fromkeys((*GEMM_HARM, "saved"), "bf16"), "reason": "the head stays in bf16"}
    for layer, name in changes.items():
        gemms[layer] |= dict.fromkeys(GEMM_HARM, name) | {"reason": "promoted by a guard"}
    blocks = {name.split(".")[-3] for name in found["layers"] if name.count(".") >= 2}
    result["gemms"] = gemms
    result["blocks"] = {block: {"activations": "keep", "reason": "fits"} for block in sorted(blocks, key=int)}
    return result


def start_plan(found: dict[str, Any], name: str = "fp8") -> dict[str, Any]:
    """One format for all layers of an analysis, as before the first re-plan."""
    result = plan_of(found)
    for layer, row in result["gemms"].items():
        if layer != "head":
            row |= dict.fromkeys(GEMM_HARM, name) | {"reason": "warm-up, before the first statistics"}
    return result


def count_changes(before: dict[str, Any], after: dict[str, Any]) -> int:
    """GEMMs whose format differs between two plans of the same layers."""
    return sum(
        before["gemms"][layer][gemm] != row[gemm]
        for layer, row in after["gemms"].items()
        for gemm in GEMM_HARM
    )


def write_analysis(folder: Path, found: dict[str, Any], decided: dict[str, Any] | None = None) -> None:
    """A plan and its analysis, as a re-plan leaves them."""
    name = f"step-{found['step']:08}"
    (folder / "plans").mkdir(exist_ok=True)
    (folder / "plans" / f"{name}.json").write_text(json.dumps(decided or plan_of(found)))
    (folder / "plans" / f"{name}.precision.json").write_text(json.dumps(found))


def write_replanned_run(folder: Path, steps: int = 1600, every: int = 400, **shape: Any) -> Path:
    """A whole run folder with re-plans every `every` steps, a guard's promotion and probes."""
    write_run(folder, steps)
    replans = range(every, steps, every)
    found = [analysis(step, **shape, measured=step != replans[-1]) for step in replans]
    time = "2026-03-01T10:02:00.123456+00:00"
    told = events(steps)
    (folder / "plan.json").write_text(json.dumps(start_plan(found[0])))
    before = start_plan(found[0])
    for number, one in enumerate(found):
        write_analysis(folder, one)
        before, changed = plan_of(one), count_changes(before, plan_of(one))
        told.append(
            {
                "kind": "replan", "step": one["step"], "time": time, "changed": changed,
                "sentence": f"{changed} GEMMs changed; 4 bit now does {one['predicted']['fp4_flops']:.1%} of "
                "the linear FLOPs",
                "reason": "every 400 steps" if number else "warm-up is over",
            }
        )  # fmt: skip
        told.append(
            {"kind": "probe", "step": one["step"] + 100, "time": time, "reason": "shadow evaluation in bf16",
             "loss_gap": 0.0041, "gradient_cosine": 0.987}
        )  # fmt: skip
    step = found[-1]["step"] + every // 2
    layer = list(found[-1]["layers"])[len(found[-1]["layers"]) // 2]
    promoted = plan_of(found[-1], **{layer: "fp8"})
    (folder / "plans" / f"step-{step:08}.json").write_text(json.dumps(promoted))
    told.append(
        {
            "kind": "promotion", "step": step, "time": time, "changed": count_changes(before, promoted),
            "sentence": f"{layer} was promoted to fp8 for 2,000 steps",
            "reason": "the gradient norm was 3.4 times its median over 100 steps",
        }
    )  # fmt: skip
    write_lines(folder / "events.jsonl", sorted(told, key=lambda event: event["step"]))
    return folder
