"""What `memory.py` runs: configurations, cards and budgets by device, and the published figures that stand beside.

A configuration is a list of options of `scrimp train`. Those for a CPU are tiny: they show that the script works, and
their predicted peaks are checked against torch's profiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.config import preset

GIB = 2**30
MIB = 2**20
ROUNDED = ("--train.parameters=bf16", "--optimizer.master-weights=false")
"""bf16 weights without masters: 8 bytes a parameter with gradient and bf16 moments."""
ROUNDED8 = (*ROUNDED, "--optimizer.moments=8bit")
TRACED = "--memory.optimizer=device"
"""Where it is: but a setting, so that the step is traced even where everything fits easily by its formula."""
ALL_ON_HOST = ("--memory.weights=host", "--memory.gradients=host", "--memory.optimizer=host")
DOCUMENTS = "--data.mask-documents"


@dataclass(frozen=True)
class Case:
    """One configuration."""

    name: str
    options: tuple[str, ...]
    gib: float = 1.0
    """Device memory that it needs, generously: what runs side by side must fit together."""
    is_compiled: bool = False
    """Its account is an upper bound: the planner counts what eager blocks keep."""


def case(
    name: str,
    model: str,
    rows: int,
    sequence: int,
    *more: str,
    gib: float = 1.0,
    micro_batches: int = 1,
    is_compiled: bool = False,
) -> Case:
    """A configuration with the micro-batch `rows` x `sequence`; later options win."""
    options = [
        f"--model.preset={model}",
        f"--model.vocab-size={preset(model).vocab_size}",
        f"--train.sequence={sequence}",
        f"--train.batch-tokens={rows * sequence * micro_batches}",
        f"--train.micro-batch={rows}",
        f"--train.compile={'on' if is_compiled else 'off'}",
    ]
    if DOCUMENTS not in more:
        options.append("--data.no-mask-documents")
    return Case(name, (*options, *more), gib, is_compiled)


def keeping(level: str) -> str:
    """The option that makes every block do so with its activations."""
    return f"--memory.activations={level}"


def peak_cases_cuda() -> tuple[Case, ...]:
    """Sizes, lengths, levels, offload, formats, searched plans, compiled blocks."""
    return (*_llamas(), *_qwen_600m(), *_qwen_of_billions())


def _llamas() -> tuple[Case, ...]:
    levels = ("swiglu", "norms", "mlp", "qkv", "attention", "block")
    return (
        case("60M", "llama-60m", 32, 1024, TRACED, gib=14),
        case("60M, two micro-batches", "llama-60m", 16, 2048, TRACED, gib=14, micro_batches=2),
        case("60M, documents", "llama-60m", 32, 1024, TRACED, DOCUMENTS, gib=14),
        case("300M", "llama-300m", 16, 1024, TRACED, gib=23),
        *(case(f"300M, {level}", "llama-300m", 16, 1024, keeping(level), gib=19) for level in levels),
        case("300M, fp32", "llama-300m", 4, 1024, TRACED, "--precision=fp32", gib=22),
        case("300M, fp8", "llama-300m", 16, 1024, TRACED, "--precision=fp8", gib=22),
        case("300M, compiled", "llama-300m", 16, 1024, TRACED, gib=23, is_compiled=True),
    )


def _qwen_600m() -> tuple[Case, ...]:
    small = "qwen3-0.6b"
    return (
        case("0.6B", small, 4, 2048, TRACED, gib=28),
        case("0.6B, again", small, 4, 2048, TRACED, gib=28),
        case("0.6B, two micro-batches", small, 4, 2048, TRACED, gib=28, micro_batches=2),
        case("0.6B, documents", small, 4, 2048, keeping("mlp"), DOCUMENTS, gib=20),
        case("0.6B, short", small, 32, 256, keeping("norms"), gib=23),
        case("0.6B, long", small, 1, 8192, keeping("qkv"), gib=15),
        case("0.6B, no masters", small, 4, 2048, TRACED, *ROUNDED, gib=22),
        case("0.6B, 8-bit moments", small, 4, 2048, keeping("mlp"), *ROUNDED8, gib=15),
        case("0.6B, offloaded", small, 4, 2048, keeping("keep+offload"), gib=15),
        case("0.6B, optimizer on the host", small, 4, 2048, "--memory.optimizer=host", gib=21),
        case(
            "0.6B, half of the states on the host",
            small,
            4,
            2048,
            *(f"--memory.{name}=14" for name in ("weights", "gradients", "optimizer")),
            keeping("norms+offload"),
            gib=12,
            micro_batches=2,
        ),
        case("0.6B, fp8", small, 4, 2048, keeping("mlp"), "--precision=fp8", gib=20),
        case("0.6B, compiled", small, 4, 2048, keeping("block"), gib=15, is_compiled=True),
        case("0.6B on 14 GB", small, 4, 2048, "--budget.device-memory=14GB", gib=18),
        case(
            "0.6B on 14 GB, compiled",
            small,
            4,
            2048,
            "--budget.device-memory=14GB",
            DOCUMENTS,
            gib=18,
            is_compiled=True,
        ),
    )


def _qwen_of_billions() -> tuple[Case, ...]:
    middle, large = "qwen3-1.7b", "qwen3-4b"
    return (
        case("1.7B", middle, 2, 2048, keeping("mlp"), gib=34),
        case("1.7B, no masters", middle, 4, 2048, keeping("norms"), *ROUNDED, gib=29),
        case("1.7B, fp8", middle, 4, 2048, keeping("attention"), "--precision=fp8", *ROUNDED, gib=18),
        case(
            "1.7B, all on the host",
            middle,
            4,
            2048,
            *ROUNDED,
            *ALL_ON_HOST,
            keeping("block+offload"),
            gib=9,
            micro_batches=2,
        ),
        case("1.7B on 20 GB", middle, 4, 2048, "--budget.device-memory=20GB", DOCUMENTS, gib=24),
        case("4B, no masters", large, 4, 2048, keeping("block"), *ROUNDED, gib=36),
        case("4B, 8-bit moments", large, 8, 1024, keeping("attention"), *ROUNDED8, gib=28),
        case(
            "4B, optimizer on the host",
            large,
            2,
            2048,
            keeping("mlp"),
            "--memory.optimizer=host",
            *ROUNDED,
            gib=23,
        ),
        case("4B on 16 GB", large, 2, 2048, "--budget.device-memory=16GB", *ROUNDED, gib=20),
    )


BUDGETS = ("--budget.device-memory=200MB", "--budget.host-memory=1GB")
TINY = "llama-3m"
PEAKS: dict[str, tuple[Case, ...]] = {
    "cuda": peak_cases_cuda(),
    "cpu": (
        case("3M", TINY, 2, 256, TRACED),
        case("3M, again", TINY, 2, 256, TRACED),
        case("3M, block, two micro-batches", TINY, 2, 256, keeping("block"), micro_batches=2),
        case("3M, no masters, mlp", TINY, 2, 256, keeping("mlp"), "--precision=bf16", *ROUNDED),
        case("3M, offloaded", TINY, 4, 256, keeping("keep+offload"), *BUDGETS),
    ),
}


@dataclass(frozen=True)
class Card:
    """A card of so much memory, and what is trained on it: it must have been made to fit."""

    name: str
    nbytes: int
    case: Case


HOST_1GB = "--budget.host-memory=1GB"
CARDS: dict[str, tuple[Card, ...]] = {
    "cuda": (
        Card("16 GB", 16 * GIB, case("1.7B, no masters", "qwen3-1.7b", 4, 2048, *ROUNDED, micro_batches=2)),
        Card("24 GB", 24 * GIB, case("1.7B", "qwen3-1.7b", 4, 2048, DOCUMENTS)),
        Card("40 GB", 40 * GIB, case("4B, no masters", "qwen3-4b", 4, 2048, *ROUNDED)),
    ),
    "cpu": (
        Card("70 MiB", 70 * MIB, case("3M", TINY, 4, 256, HOST_1GB, micro_batches=2)),
        Card(
            "40 MiB", 40 * MIB, case("3M, no masters", TINY, 4, 256, "--precision=bf16", *ROUNDED, HOST_1GB)
        ),
    ),
}
"""Each must have bit-equal losses on the full device, where it fits too."""


@dataclass(frozen=True)
class Size:
    """A model whose plans are timed."""

    case: Case
    budgets: tuple[float, ...] = (0.7, 0.5, 0.35)
    """Shares of the peak with everything resident: plans are searched within these."""
    others: tuple[str, ...] = ("mlp", "block", "keep+offload")
    """Levels of all blocks that are timed besides."""


TIMES: dict[str, tuple[Size, ...]] = {
    "cuda": (
        Size(case("0.6B", "qwen3-0.6b", 8, 2048, micro_batches=2)),
        Size(case("1.7B, no masters", "qwen3-1.7b", 4, 2048, *ROUNDED, micro_batches=4)),
    ),
    "cpu": (Size(case("3M", TINY, 4, 256, HOST_1GB), (0.6,), ("block",)),),
}


@dataclass(frozen=True)
class Reference:
    """A reference case: a model on a card beside a host."""

    model: str
    card_bytes: int
    host_bytes: int
    """The whole process."""
    host_reserve: int
    """What the plan leaves of these: interpreter and CUDA's libraries."""
    batch_tokens: int
    options: tuple[str, ...]
    """The micro-batch is left to Scrimp."""


SPEED = ("--train.sequence=1024", "--precision=bf16", "--data.no-mask-documents", *ROUNDED)
"""As in LLMQ's tables: bf16 weights rounded stochastically, random weights, 1,024 tokens a row."""
TINY_SPEED = ("--model.vocab-size=4096", "--train.sequence=256", *SPEED[1:])
_GB = 10**9
REFERENCES: dict[str, dict[str, Reference]] = {
    "cuda": {
        "qwen7b": Reference("qwen2.5-7b", 16 * GIB, 57 * _GB, 5 * _GB, 65_536, SPEED),
        "qwen7b-8bit": Reference(
            "qwen2.5-7b", 16 * GIB, 57 * _GB, 5 * _GB, 65_536, (*SPEED, "--optimizer.moments=8bit")
        ),
        "qwen14b": Reference(
            "qwen2.5-14b", 24 * GIB, 110 * _GB, 5 * _GB, 65_536, (*SPEED, "--optimizer.moments=8bit")
        ),
        # All of an 80 GB card, and the tokens of a step of LLMQ's tables.
        "qwen7b-card": Reference("qwen2.5-7b", 76 * GIB, 110 * _GB, 5 * _GB, 524_288, SPEED),
    },
    "cpu": {
        "qwen7b": Reference(TINY, 40 * MIB, 2 * _GB, _GB, 2048, TINY_SPEED),
        "qwen7b-8bit": Reference(
            TINY, 40 * MIB, 2 * _GB, _GB, 2048, (*TINY_SPEED, "--optimizer.moments=8bit")
        ),
        "qwen14b": Reference(TINY, 30 * MIB, 2 * _GB, _GB, 2048, (*TINY_SPEED, "--optimizer.moments=8bit")),
        "qwen7b-card": Reference(TINY, 400 * MIB, 2 * _GB, _GB, 4096, TINY_SPEED),
    },
}

_LLMQ_7B = (
    ("LLMQ, RTX 5060 Ti 16 GB", "bf16", 890),
    ("LLMQ, RTX 5060 Ti 16 GB", "fp8", 1_460),
    ("LLMQ, RTX 4090 24 GB", "bf16", 2_780),
    ("LLMQ, H100 80 GB, all of it", "bf16", 13_850),
    ("LLaMA-Factory, RTX 4090 24 GB", "bf16", 2_520),
)
PUBLISHED: dict[str, tuple[tuple[str, str, int], ...]] = {
    "qwen7b": _LLMQ_7B,
    "qwen7b-8bit": _LLMQ_7B,
    "qwen7b-card": _LLMQ_7B,
    "qwen14b": (
        ("LLMQ, RTX 4090 24 GB", "bf16", 1_350),
        ("LLMQ, RTX 4090 24 GB", "fp8", 2_000),
        ("LLMQ, H100 80 GB, all of it", "bf16", 6_330),
        ("LLaMA-Factory, RTX 4090 24 GB", "bf16", 1_140),
    ),
}
"""System and hardware, format, tokens/s: published by LLMQ's authors for sequences of 1,024 tokens, never measured
here. Their cards compute and copy at other rates than the one whose memory is limited here."""
