"""LLMQ's speed on this GPU beside Scrimp's: models of 7B and 14B, one after the other on the same card.

Question  LLMQ publishes tokens/s for Qwen2.5 on cards of 16 and 24 GB. What are they on this card, and Scrimp's beside
          them?
Method    LLMQ's Python interface trains from random weights, on random tokens, at the sequence length and tokens of a
          step of `memory.py`'s reference cases, by settings that its authors publish: for the smallest card of each
          model (whole blocks recomputed, residuals, moments, masters and gradients on the host), and with
          qwen7b-card those of its table for one H100. The first step is left out (it captures CUDA graphs). Then
          Scrimp's reference case: `memory.py --part` of the same name, in a process of its own, limited to its card.
Figures   Tokens/s of the median step with fastest and slowest; bytes that LLMQ's allocator names, device and host.
Limits    LLMQ has no limit of device memory: its settings make it small, the card is whole. pyllmq's wheels want the
          CUDA libraries that they were built with; where they do not load, LLMQ is NOT RUN, and why is said.
          Written after its documented interface, not run yet.
Run       python benchmarks/llmq.py --part qwen7b                 # about ten minutes
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from environment import RESULTS, ROOT, facts, markdown_table, write_pair
from memory_cases import REFERENCES
from memory_page import rate_of

from scrimp.config import Architecture, preset

SEQUENCE = 1024
_SMALLEST = ("recompute_block", "recompute_ffn", "recompute_swiglu", "recompute_att", "recompute_qkv")
_ON_HOST = ("offload_residual", "offload_opt_m", "offload_opt_v", "offload_master", "offload_grads")
_SHARDED = ("shard_weights", "shard_gradients")  # on one GPU: weights and gradients can live on the host
_QUANTIZED = ("persistent_quants", "offload_quants")
MATMUL = {"bf16": "bf16", "fp8": "e4m3"}


@dataclass(frozen=True)
class Settings:
    """How LLMQ trains a model in a format on a card."""

    micro_batch: int
    head_chunks: int
    attention_chunks: int
    """Chunks of attention's backward pass."""
    switches: tuple[str, ...]


SMALLEST = {
    "bf16": Settings(32, 32, 32, (*_SMALLEST, *_ON_HOST, *_SHARDED)),
    "fp8": Settings(32, 32, 32, (*_SMALLEST, *_ON_HOST, *_SHARDED, *_QUANTIZED)),
}
ON_H100 = {
    "bf16": Settings(4, 2, 2, ()),
    "fp8": Settings(16, 4, 4, ("recompute_ffn", "recompute_rms_norm", "offload_residual")),
}
"""Settings for Qwen2.5-7B: benchmarks/H100x1.md of LLMQ at b77d969."""


def settings_of(part: str, precision: str) -> Settings:
    """Those that are published for a reference case."""
    return (ON_H100 if part == "qwen7b-card" else SMALLEST)[precision]


@dataclass(frozen=True)
class Speed:
    """How fast one system is."""

    name: str
    rates: tuple[float, ...]
    """Tokens/s of each step."""
    note: str

    @property
    def row(self) -> tuple[str, str, str, str]:
        """For a table."""
        if not self.rates:
            return self.name, "NOT RUN", "", self.note
        spread = f"{max(self.rates):,.0f}, {min(self.rates):,.0f}; {len(self.rates)}"
        return self.name, f"{statistics.median(self.rates):,.0f}", spread, self.note


def speed_of_llmq(part: str, precision: str, steps: int) -> Speed:
    """LLMQ's, in a process of its own: whatever it holds on the device is gone before Scrimp is timed."""
    name = f"LLMQ, {precision}"
    with tempfile.TemporaryDirectory(prefix="scrimp-llmq-") as folder:
        path = Path(folder) / "rates.json"
        words = ["--part", part, "--precision", precision, "--steps", str(steps), "--only-llmq", str(path)]
        # It says what it says on this script's own streams: who kills both keeps that.
        status = subprocess.run([sys.executable, __file__, *words], cwd=ROOT).returncode
        if status:
            return Speed(name, (), f"exit status {status}: its last words are above")
        found = json.loads(path.read_text(encoding="utf-8"))
    return Speed(name, tuple(found["rates"]), found["note"])


def run_llmq(part: str, precision: str, steps: int) -> dict[str, Any]:
    """Tokens/s of every timed step, and what it takes."""
    case = REFERENCES["cuda"][part]
    pyllmq = importlib.import_module("pyllmq")
    settings = settings_of(part, precision)
    accumulation = case.batch_tokens // (settings.micro_batch * SEQUENCE)
    trainer = pyllmq.LLMQTrainer(
        ngpu=1,
        config=config_of(pyllmq, preset(case.model)),
        options=options_of(pyllmq, precision, settings),
        batch_size=settings.micro_batch,
        seq_len=SEQUENCE,
        grad_accum=accumulation,
    )
    trainer.init_weights()
    seconds = [
        timed_step(trainer, number, accumulation, settings.micro_batch) for number in range(steps + 1)
    ][1:]
    sizes = trainer.get_allocator_info(0).values()
    device, host = (
        sum(size.get(kind, 0) for size in sizes for kind in kinds)
        for kinds in (("device", "stack"), ("pinned", "pageable"))
    )
    note = f"{device / 2**30:.1f} GiB on the device, {host / 1e9:.1f} GB on the host, by its own account"
    return {"rates": [case.batch_tokens / one for one in seconds], "note": note}


def timed_step(trainer: Any, number: int, accumulation: int, rows: int) -> float:
    """Seconds of one step, its update included."""
    generator = np.random.default_rng(number)
    batches = generator.integers(0, 150_000, (accumulation, rows, SEQUENCE + 1), dtype=np.int32)
    start = time.perf_counter()
    for batch in batches:
        trainer.step(np.ascontiguousarray(batch[:, :-1]), np.ascontiguousarray(batch[:, 1:]))
    trainer.update(1e-5, 0.9, 0.95, number + 1, 0.1, 1.0)
    return time.perf_counter() - start


def config_of(pyllmq: Any, architecture: Architecture) -> Any:
    """The model as LLMQ names it."""
    return pyllmq.Config(
        architecture="qwen2",
        hidden_size=architecture.width,
        intermediate_size=architecture.ffn_width,
        vocab_size=architecture.vocab_size,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        num_hidden_layers=architecture.num_layers,
        max_position_embeddings=architecture.context,
        rope_theta=architecture.rope_theta,
        rms_norm_eps=architecture.norm_eps,
        tie_word_embeddings=architecture.tied_embeddings,
        dtype="bf16",
    )


def options_of(pyllmq: Any, precision: str, settings: Settings) -> Any:
    """Settings as LLMQ's interface takes them."""
    options = pyllmq.LLamaOptions()
    for name in settings.switches:
        setattr(options, name, True)
    options.lmhead_chunks, options.attn_bwd_chunks = settings.head_chunks, settings.attention_chunks
    options.momentum_type = options.variance_type = "bf16"
    options.matmul_type = MATMUL[precision]
    options.use_cuda_graphs = True
    return options


def speed_of_scrimp(part: str, folder: Path, day: str, budget_s: float) -> Speed:
    """Scrimp's reference case, in a process of its own."""
    case = REFERENCES["cuda"][part]
    name = f"Scrimp, bf16, limited to {case.card_bytes / 2**30:.0f} GiB"
    words = ["--part", part, "--budget-s", f"{budget_s:.0f}", "--date", day, "--out", str(folder)]
    path = folder / f"{day}-memory-{part}-cuda.json"
    path.unlink(missing_ok=True)
    status = subprocess.run([sys.executable, "benchmarks/memory.py", *words], cwd=ROOT).returncode
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    if not runs or not runs[-1].get("seconds"):
        return Speed(name, (), f"exit status {status}: its last words are above")
    return Speed(name, (rate_of(runs[-1]),), f"median step; see {path.name}")


def main() -> int:
    """Both sides in turn; 0 if both ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(REFERENCES["cuda"]), default="qwen7b")
    parser.add_argument("--precision", choices=list(MATMUL), default="bf16", help="LLMQ's")
    parser.add_argument("--steps", type=int, default=3, help="that are timed of LLMQ")
    parser.add_argument("--budget-s", type=float, default=400.0, help="seconds for Scrimp's side")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--only-llmq", type=Path, metavar="FILE", help="its figures into FILE, nothing else")
    arguments = parser.parse_args()
    if arguments.only_llmq:
        found = run_llmq(arguments.part, arguments.precision, arguments.steps)
        arguments.only_llmq.write_text(json.dumps(found), encoding="utf-8")
        return 0
    record = facts("torch", "pyllmq")
    speeds = [speed_of_llmq(arguments.part, arguments.precision, arguments.steps)]
    print(speeds[0].row, flush=True)
    record["speeds"] = [speed.row for speed in speeds]
    if speeds[0].rates:  # Scrimp's side may not come to its end
        write_pair(arguments.out, f"{arguments.date}-llmq-{arguments.part}", record)
    speeds.append(speed_of_scrimp(arguments.part, arguments.out, arguments.date, arguments.budget_s))
    columns = ("system", "tokens/s, median step", "fastest, slowest; steps", "note")
    lines = markdown_table(columns, [speed.row for speed in speeds])
    record["speeds"] = [speed.row for speed in speeds]
    title = f"# {arguments.part}: LLMQ and Scrimp on the same card"
    page = "\n".join([title, "", f"`{record['command']}` at {record['commit']}", "", *lines, ""])
    if any(speed.rates for speed in speeds):
        write_pair(arguments.out, f"{arguments.date}-llmq-{arguments.part}", record, page)
    print(page)
    return 0 if all(speed.rates for speed in speeds) else 1


if __name__ == "__main__":
    sys.exit(main())
