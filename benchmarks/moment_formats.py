"""What AdamW's moments cost in other formats: drift of weights, loss, bytes and time.

Question  Which 8-bit code should m and v have, is rounding to nearest good enough, and what does each format of
          moments and weights cost against fp32?
Method    One small decoder on the bytes of Python's own library.
          Drift: the model trains in fp32; every candidate is fed the same gradients and keeps weights of its own.
          Drift = |W - W_fp32| / |W_fp32 - W_start|, so that nothing is amplified by training on what drifted.
          Codes are compared on one moment at a time, the other one in fp32, all with a scale per 128; "floor" keeps
          v from becoming zero. torchao's AdamW8bit (nearest, dynamic map, blocks of 256) runs as it is, not compiled.
          Loss: each format trains on its own, same seeds and data; held-out loss at the end.
          Time: one matrix of 8 million elements, one thread, best of a few steps; bytes: of all state tensors.
Limits    0.5 M parameters, a few hundred steps. Says nothing of gradients with larger outliers than this model has.
Run       python benchmarks/moment_formats.py             (about four minutes on one core)
          python benchmarks/moment_formats.py --parts codes drift
"""

from __future__ import annotations

import argparse
import glob
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from moment_codes import Rounding, exact, float8, mirrored, positive, rounding, shifted
from torch import Tensor, nn

from scrimp.config import Architecture, OptimizerConfig
from scrimp.formats import Noise
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.optim import AdamW, MomentFormat, Moments, Step, update

MODEL = Architecture(
    family="llama",
    vocab_size=256,
    num_layers=2,
    width=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    ffn_width=384,
    context=128,
)
ROWS, SEQUENCE = 8, 128
PEAK_LR, WARMUP, CLIP = 3e-3, 20, 1.0
TRAIN = OptimizerConfig(weight_decay=0.1, beta1=0.9, beta2=0.95, clip=CLIP)
FORMATS: tuple[MomentFormat, ...] = ("fp32", "bf16", "8bit")
Weights = dict[str, Tensor]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=["codes", "drift", "loss", "time"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--code-steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"environment": facts("torch", "torchao") | {"device": cpu()}}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "codes": lambda: drifts(codes(), options.code_steps),
        "drift": lambda: drifts(formats(), options.steps),
        "loss": lambda: {name: losses(name, options.steps, options.seeds) for name in SETTINGS},
        "time": times,
    }
    for name in options.parts:
        record[name] = parts[name]()
        print(f"{name}:", *(f"  {k}: {v}" for k, v in record[name].items()), sep="\n", flush=True)
    write_pair(options.out, f"{options.date}-moment-formats-cpu", record, page(record))


# -- data and model ----------------------------------------------------------------------------


def text() -> Tensor:
    """Bytes of modules that every Python has."""
    files = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:60]
    return torch.frombuffer(
        bytearray(b"".join(Path(f).read_bytes() for f in files)), dtype=torch.uint8
    ).long()


def batches(seed: int, *, held_out: bool = False) -> Iterator[Tensor]:
    """Token rows [ROWS, SEQUENCE + 1] from the first nine tenths, or from the last."""
    data = text()
    cut = len(data) * 9 // 10
    data = data[cut:] if held_out else data[:cut]
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(data) - SEQUENCE - 1, (ROWS,), generator=generator)
        yield torch.stack([data[s : s + SEQUENCE + 1] for s in starts])


def model_of(dtype: torch.dtype, seed: int) -> Model:
    """A decoder with its start values."""
    model = build_model(MODEL, dtype=dtype)
    initialise(model, seed)
    return model


def loss_of(model: Model, rows: Tensor) -> Tensor:
    """Mean cross-entropy."""
    logits = model.head(model(rows[:, :-1])).float()
    return F.cross_entropy(logits.reshape(-1, MODEL.vocab_size), rows[:, 1:].reshape(-1))


def lr_at(step: int) -> float:
    """Warm-up, then constant: the same for every candidate."""
    return PEAK_LR * min(1.0, step / WARMUP)


# -- drift -------------------------------------------------------------------------------------


class Candidate:
    """Weights of its own, moved by gradients that others made."""

    def __init__(self, weights: Weights, move: Callable[[str, Tensor, Tensor, Step], None]) -> None:
        self.weights = {name: w.clone() for name, w in weights.items()}
        self._move = move

    def step(self, gradients: Weights, step: Step) -> None:
        """One update of every matrix."""
        for name, gradient in gradients.items():
            self._move(name, self.weights[name], gradient, step)


def ours(weights: Weights, format_: MomentFormat, dtype: torch.dtype) -> Candidate:
    """As `scrimp.optim` does it."""
    typed = {name: w.to(dtype) for name, w in weights.items()}
    moments = {name: Moments.zeros(format_, w) for name, w in typed.items()}

    def move(name: str, weight: Tensor, gradient: Tensor, step: Step) -> None:
        noise = Noise(0).derive(sum(name.encode()), step.number)
        update(weight, gradient.to(dtype), moments[name], step, noise)

    return Candidate(typed, move)


def coded(weights: Weights, mean: Rounding, square: Rounding) -> Candidate:
    """fp32 weights, moments rounded after each step by any rule."""
    state = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}

    def move(name: str, weight: Tensor, gradient: Tensor, step: Step) -> None:
        m, v = state[name]
        m = m * step.beta1 + gradient * (1 - step.beta1)
        v = v * step.beta2 + gradient.square() * (1 - step.beta2)
        root = (v / (1 - step.beta2**step.number)).sqrt() + step.eps
        weight.mul_(1 - step.lr * step.weight_decay)
        weight.sub_(step.lr / (1 - step.beta1**step.number) * m / root)
        state[name] = mean(m), square(v)

    return Candidate(weights, move)


def torchao(weights: Weights, dtype: torch.dtype) -> Candidate:
    """torchao's AdamW8bit, eager."""
    from torchao.optim import AdamW8bit

    typed = {name: nn.Parameter(w.to(dtype, copy=True)) for name, w in weights.items()}
    optimizers = {
        name: AdamW8bit(
            [p],
            lr=torch.tensor(0.0),
            betas=(TRAIN.beta1, TRAIN.beta2),
            eps=TRAIN.eps,
            weight_decay=TRAIN.weight_decay,
            bf16_stochastic_round=dtype == torch.bfloat16,
        )
        for name, p in typed.items()
    }

    def move(name: str, weight: Tensor, gradient: Tensor, step: Step) -> None:
        typed[name].grad = gradient.to(dtype)
        optimizers[name].param_groups[0]["lr"].fill_(step.lr)
        with torch.compiler.set_stance("force_eager"):
            optimizers[name].step()
        weight.copy_(typed[name].detach())

    return Candidate({name: p.detach() for name, p in typed.items()}, move)


def formats() -> dict[str, Callable[[Weights], Candidate]]:
    """What can be set, and torchao's."""
    made: dict[str, Callable[[Weights], Candidate]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        weights = str(dtype).removeprefix("torch.")
        for format_ in FORMATS:
            made[f"{weights} weights, {format_} moments"] = lambda w, f=format_, d=dtype: ours(w, f, d)
        made[f"{weights} weights, torchao AdamW8bit"] = lambda w, d=dtype: torchao(w, d)
    return made


def drifts(candidates: dict[str, Callable[[Weights], Candidate]], steps: int) -> dict[str, dict[str, Any]]:
    """Candidate to its drift, the length of its way and its largest difference in learning rates."""
    model = model_of(torch.float32, 0)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim >= 2}
    start = {name: p.detach().clone() for name, p in matrices.items()}
    made = {name: make(start) for name, make in candidates.items()}
    optimizer = AdamW(dict(model.named_parameters()), TRAIN)
    for number, rows in zip(range(1, steps + 1), batches(0), strict=False):
        loss_of(model, rows).backward()
        optimizer.clip(optimizer.gradient_norm(), CLIP)
        gradients = {name: g for name, g in optimizer.gradients().items() if name in matrices}
        step = Step(number, lr_at(number), TRAIN.beta1, TRAIN.beta2, TRAIN.eps, TRAIN.weight_decay)
        for candidate in made.values():
            candidate.step(gradients, step)
        optimizer.step(lr_at(number))
        optimizer.zero_grad()
    final = {name: p.detach() for name, p in matrices.items()}
    return {name: compared(one.weights, final, start) for name, one in made.items()}


def compared(found: Weights, final: Weights, start: Weights) -> dict[str, Any]:
    """Figures of one candidate: over all matrices, those of the blocks, and the worst of all."""
    blocks = [name for name in final if name.startswith("blocks.")]
    drift = {name: relative(found, final, start, [name]) for name in final}
    return {
        "drift": relative(found, final, start, list(final)),
        "drift in blocks": relative(found, final, start, blocks),
        "worst drift": max(drift.values()),
        "worst": max(drift, key=lambda name: drift[name]),
        "length": distance(found, start, list(final)) / distance(final, start, list(final)),
        "largest": max(float((found[n] - final[n]).abs().max()) for n in final) / PEAK_LR,
    }


def relative(found: Weights, final: Weights, start: Weights, names: list[str]) -> float:
    """How far from the reference, over how far the reference went."""
    return distance(found, final, names) / distance(final, start, names)


def distance(a: Weights, b: Weights, names: list[str]) -> float:
    """2-norm over some matrices."""
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in names))


# -- codes -------------------------------------------------------------------------------------


def codes() -> dict[str, Callable[[Weights], Candidate]]:
    """One moment in a code, the other in fp32."""
    from torchao.optim.quant_utils import create_dynamic_map

    def dynamic(signed: bool) -> Tensor:
        return torch.tensor(sorted(create_dynamic_map(signed=signed)))

    linear = torch.arange(256) / 255
    means = {
        "int8": torch.arange(-127, 128) / 127,
        "E4M3": float8(torch.float8_e4m3fn),
        "E5M2": float8(torch.float8_e5m2),
        "dynamic map": dynamic(True),
        "shifted, 3 + 4 bits (chosen)": mirrored(shifted(4, 8)),
        "shifted, 2 + 5 bits": mirrored(shifted(5, 4)),
    }
    squares = {
        "int8": linear,
        "sqrt(v) in int8": linear.square(),
        "E4M3": positive(float8(torch.float8_e4m3fn)),
        "E5M2": positive(float8(torch.float8_e5m2)),
        "dynamic map": positive(dynamic(False)),
        "shifted, 4 + 4 bits (chosen)": shifted(4, 16),
        "shifted, 3 + 5 bits": shifted(5, 8),
    }
    made: dict[str, Callable[[Weights], Candidate]] = {}
    for stochastic in (True, False):
        how = "stochastic" if stochastic else "nearest"
        for name, table in means.items():
            made[f"m {name}, {how}"] = lambda w, t=table, s=stochastic: coded(w, rounding(t, s), exact)
        for name, table in squares.items():
            made[f"v {name}, {how}, floor"] = lambda w, t=table, s=stochastic: coded(
                w, exact, rounding(t, s, floor=True)
            )
    made["v int8, stochastic, no floor"] = lambda w: coded(w, exact, rounding(linear, True))
    return made


# -- loss, time, bytes -------------------------------------------------------------------------

SETTINGS: dict[str, tuple[torch.dtype, bool, MomentFormat]] = {
    f"{weights}, {format_} moments": (dtype, master, format_)
    for weights, dtype, master in (
        ("fp32", torch.float32, False),
        ("bf16 + fp32 master", torch.bfloat16, True),
        ("bf16", torch.bfloat16, False),
    )
    for format_ in FORMATS
}


def losses(name: str, steps: int, seeds: list[int]) -> dict[str, Any]:
    """Held-out loss of each seed after training in a format."""
    dtype, master, format_ = SETTINGS[name]
    found = []
    for seed in seeds:
        model = model_of(dtype, seed)
        train = OptimizerConfig(
            weight_decay=0.1, beta2=TRAIN.beta2, clip=CLIP, master_weights=master, moments=format_
        )
        optimizer = AdamW(dict(model.named_parameters()), train, seed=seed)
        for number, rows in zip(range(1, steps + 1), batches(seed), strict=False):
            loss_of(model, rows).backward()
            optimizer.clip(optimizer.gradient_norm(), CLIP)
            # To zero at the end: the noise of constant updates would hide what is left of the format's.
            optimizer.step(lr_at(number) * (1 - number / (steps + 1)))
            optimizer.zero_grad()
        with torch.no_grad():
            held_out = [
                float(loss_of(model, rows))
                for _, rows in zip(range(20), batches(99, held_out=True), strict=False)
            ]
        found.append(sum(held_out) / len(held_out))
    print(f"  {name}: {found}", flush=True)
    return {"losses": found, "mean": sum(found) / len(found)}


def times() -> dict[str, dict[str, float]]:
    """ns and bytes per parameter of one matrix; gradients in the weights' type, fp32 for masters."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for format_ in FORMATS:
            weight = torch.randn(2048, 4096).to(dtype)
            gradient = torch.randn_like(weight).mul_(1e-3)
            moments = Moments.zeros(format_, weight)
            best = math.inf
            for number in range(1, 6):
                step = Step(number, 1e-3, 0.9, 0.95, 1e-8, 0.1)
                begin = time.perf_counter()
                update(weight, gradient, moments, step, Noise(number))
                best = min(best, time.perf_counter() - begin)
            state = sum(t.nbytes for t in moments.tensors().values())
            found[f"{str(dtype).removeprefix('torch.')} weights, {format_} moments"] = {
                "ns": best / weight.numel() * 1e9,
                "moment bytes": state / weight.numel(),
                "weight, gradient and moment bytes": state / weight.numel() + 2 * weight.element_size(),
            }
    return found


def page(record: dict[str, Any]) -> str:
    """The tables."""
    lines = ["# Formats of AdamW's moments", "", str(__doc__).split("Run  ")[0].rstrip(), ""]
    for part, title in (("codes", "Codes, one moment at a time"), ("drift", "Formats together")):
        if part in record:
            rows = [
                (
                    name,
                    *(f"{r[k]:.4f}" for k in ("drift", "drift in blocks", "length")),
                    f"{r['worst drift']:.3f}, {r['worst']}",
                    f"{r['largest']:.1f}",
                )
                for name, r in record[part].items()
            ]
            heads = ("candidate", "drift", "in blocks", "length of the way", "worst tensor", "largest, in lr")
            lines += [f"## {title}", "", *table(*heads, rows=rows)]
    if "loss" in record:
        rows = [
            (n, f"{r['mean']:.4f}", ", ".join(f"{x:.4f}" for x in r["losses"]))
            for n, r in record["loss"].items()
        ]
        lines += ["## Loss", "", *table("weights and moments", "held-out loss", "by seed", rows=rows)]
    if "time" in record:
        rows = [(n, *(f"{r[k]:.2f}" for k in r)) for n, r in record["time"].items()]
        heads = ("update", "ns per parameter", "moments, bytes per parameter", "with weight and gradient")
        lines += ["## Time and bytes", "", *table(*heads, rows=rows)]
    return "\n".join([*lines, f"Environment: {record['environment']}", ""])


def table(*columns: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """A table and an empty line."""
    return [*markdown_table(columns, rows), ""]


if __name__ == "__main__":
    main()
