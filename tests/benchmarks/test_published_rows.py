"""Published training runs: shapes against printed sizes and FLOPs a token, rows against their own arithmetic.

Sources print TFLOP/s beside tokens/s; their ratio is the FLOPs of a token, which a shape gives on its
own. A wrong shape, a mistyped number or a row of another model breaks the equality.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import scrimp.planner.layout.software as room
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.lines import PRECISIONS

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "published"
FILES = "rows.jsonl", "beside.jsonl", "sweeps.jsonl", "held_out.jsonl"
LINES = [line for name in FILES for line in (FOLDER / name).read_text().splitlines()]
ROWS: list[dict[str, Any]] = [json.loads(line) for line in LINES]
SOFTWARES = {path.stem for path in Path(room.__file__).parent.glob("softwares/*.toml")}
Shape = dict[str, Any]
SHAPES: dict[str, Shape] = tomllib.loads((FOLDER / "shapes.toml").read_text())

# Rows of each table, counted in the tables; a line with a second number in parentheses is two rows.
# Groups with a plus are the other rows of the same source.
COUNTS = {
    "A": 46 + 3,  # 8B and 405B on B200 in two formats, DeepSeek-V3 of 25.09 in two granularities
    "B": 13,
    "C": 64,
    "D": 9,
    "E": 10,
    "F": 4 * 2,  # full and selective recompute
    "H": 15,
    "LLMQ-1xH100": 5 * 2,
    "LLMQ-8xH100": 5 * 2,
    "LLMQ-cards": 4 * 2 + 5 * 2 + 4 * 2 + 5 * 2 + 5 * 2 + 4 * 2,  # 5060 Ti, 4090, 5090, L40S, PRO 6000, Spark
    "LLMQ-four": 4 * 2 + 2,  # four 4090, L40S, PRO 6000, 5090; eight PRO 6000
    "LLaMA-Factory": 5,
    "section-5": 13,
    "A+": 197 + 4 - (49 - 5) - 1,  # all but 25.09, four lines in two formats; the rest stands above
    "C+": 216 - 64 - 2,  # two stand in section-5
    "H+": 26 - 15 - 1,  # one stands in section-5
    "AA": 136 + 112,  # with flash attention 2: RMSNorm as one kernel, and operator by operator
    "vTrain": 109,
    # Six sizes on four 4090, four and eight PRO 6000; 7B stands above. Beside it one and four 5090, four L40S.
    "LLMQ+": 3 * 6 * 2 - 6 + 8 + 7 + 8,
    # Held out.
    "fms-fsdp": 4 * 2,
    "dgxc": 2 * (5 + 6 + 6) + 2 * (8 + 4) + 2 * 3 * 3,  # tables of H100: Llama, Nemotron; of GB200
    "MLPerf GPT-3": 7 + 3 + 3,  # v3.1, v4.0, v4.1
    "MLPerf 405B": 12 + 8,  # v5.0, v5.1
    "MLPerf 8B": 18,
    "BLOOM": 60,
    "AutoModel": 4,
    "InternEvo": 4 * 8 - 1 + 11 + 3,  # throughput, 8 GPUs of tp 1 once; FLOPS with and without recomputation
    "Primus": 3,
}

# NumParams of llm-foundry's table at 2,048 positions, biases and norms included.
EXACT = {
    "mpt-125m": 125_311_488,
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008,
    "mpt-13b": 12_853_954_560,
    "mpt-30b": 29_975_214_080,
    "mpt-70b": 64_862_437_376,
}

# Billions of parameters, as printed by the source, the model card or the paper.
PRINTED = {
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.0,
    "llama-2-34b": 34,
    "llama-2-70b": 69.0,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3.1-405b": 405,
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "gpt3-5b": 5,
    "gpt3-20b": 20,
    "gpt3-175b": 175,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "deepseek-v3": 671,
    "deepseek-v3-mtp": 671 + 11.5,
    "gpt-oss-120b": 116.8,
    "megatron-1.7b": 1.7,
    "megatron-7.1b": 7.1,
    "megatron-16b": 16,
    "megatron-32b": 32,
    "megatron-70b": 70,
    "megatron-119b": 119,
    "megatron-177b": 177,
    "megatron-314b": 314,
    "megatron-462b": 462,
    "ptdp-1.7b": 1.7,
    "ptdp-3.6b": 3.6,
    "ptdp-7.5b": 7.5,
    "ptdp-18b": 18.4,
    "ptdp-39b": 39.1,
    "ptdp-76b": 76.1,
    "ptdp-145b": 145.6,
    "ptdp-310b": 310.1,
    "ptdp-530b": 529.6,
    "ptdp-1t": 1008.0,
    "gpt-22b": 22,
    "gpt-175b": 175,
    "gpt-530b": 530,
    "gpt-1t": 1008.0,
    "internlm-7b": 7.32,
    "nemotron-4-15b": 15.6,
    "nemotron-4-340b": 341,
    "mlperf-gpt3-175b": 175,
    # Blocks of 3.19 billion, of 405 billion with two tables.
    "llama-3.1-405b-8l": 8 * 3.19 + 4.2,
    "llama-3.1-405b-30l": 30 * 3.19 + 4.2,
    "llama-3.1-405b-62l": 62 * 3.19 + 4.2,
}

# The same of BLOOM's candidates, by width and layers.
BLOOM = {
    "12288-96": 177,
    "12288-100": 184,
    "12288-106": 195,
    "13312-82": 178,
    "13312-84": 182,
    "13312-94": 203,
    "13824-78": 182,
    "14336-70": 176,
    "14336-72": 181,
    "14336-82": 206,
}
PRINTED |= {
    name: BLOOM[name.removeprefix("bloom-").rpartition("-")[0]]
    for name in SHAPES
    if name.startswith("bloom-")
}

# No exact size is printed; the FLOPs a token of their rows hold the shape.
BY_FLOPS = {"nemotron-3-8b", "nemotron-3-22b"}

# The paper prints no size: with 128k words, MFU and seconds of each run give their FLOPs a token.
BY_MFU = {"aa-llama-13b", "aa-llama-30b", "aa-llama-65b"}

# How a source counts the attention core in the TFLOP/s that it prints.
FORMS = {"A": "causal", "B": "full", "section-5": "causal", "A+": "causal", "AutoModel": "causal"}

HARDWARE = re.compile(
    r"(?:(\d+)x)?(?:(\d+)x)?"
    r"(?:h100|h100-96|h200|b200|b300|gb200|gb300|a100-40|a100-80|l40s|mi325x|mi350x|mi355x|rtx\d{4}(?:ti)?|rtxpro6000|dgxspark)"
)


def devices(hardware: str) -> int:
    """Number of devices that a hardware name stands for."""
    if hardware.endswith(".toml"):
        return load_hardware(FOLDER / hardware).devices
    found = HARDWARE.fullmatch(hardware)
    assert found, hardware
    return math.prod(int(count) for count in found.groups() if count)


def matrices(shape: Shape, *, active: bool) -> int:
    """Entries of the matrices of all blocks: every expert's, or those that one token meets."""
    width: int = shape["width"]
    heads: int = shape["heads"]
    if latent := shape.get("latent_attention"):
        query = latent["q_rank"] * (width + heads * (latent["nope_size"] + latent["rope_size"]))
        into = width * (latent["kv_rank"] + latent["rope_size"])
        outof = latent["kv_rank"] * heads * (latent["nope_size"] + latent["value_size"])
        attention: int = query + into + outof + heads * latent["value_size"] * width
    else:
        attention = 2 * width * shape["head_size"] * (heads + shape["kv_heads"])
    factors = 3 if shape["gated"] else 2
    blocks: int = shape["layers"] + shape.get("next_token_modules", 0)
    experts = shape.get("experts")
    if not experts:
        return blocks * (attention + factors * width * int(shape["ffn_width"]))
    met: int = experts["chosen"] if active else experts["count"]
    routed = factors * width * (met * experts["width"] + experts["shared"] * experts["shared_width"])
    dense: int = experts["first_dense_layers"]
    joins: int = shape.get("next_token_modules", 0) * 2 * width * width
    sparse: int = (blocks - dense) * (routed + width * experts["count"])
    return blocks * attention + sparse + dense * factors * width * int(shape["ffn_width"]) + joins


def parameters(shape: Shape) -> int:
    """All parameters except the biases and norms, which are under 1 % of every shape here."""
    tables: int = shape["vocab_size"] * (1 if shape["tied"] else 2) + shape["learned_positions"]
    return matrices(shape, active=False) + tables * int(shape["width"])


def biases_and_norms(shape: Shape) -> int:
    """Vectors of a model with biases on every linear layer and LayerNorms of scale and shift."""
    width: int = shape["width"]
    inner = shape["head_size"] * (shape["heads"] + 2 * shape["kv_heads"])
    block: int = inner + width + shape["ffn_width"] + width + 2 * 2 * width
    return int(shape["layers"]) * block + 2 * width


def flops(shape: Shape, sequence: int, form: str) -> float:
    """FLOPs of one token's forward and backward pass; the attention core is counted whole, by half or not."""
    modules = shape.get("next_token_modules", 0)
    dense: int = 6 * (matrices(shape, active=True) + (1 + modules) * shape["vocab_size"] * shape["width"])
    if latent := shape.get("latent_attention"):
        core = shape["heads"] * (latent["nope_size"] + latent["rope_size"] + latent["value_size"]) / 2
    else:
        core = shape["heads"] * shape["head_size"]
    blocks = shape["layers"] + modules
    windowed = blocks // shape["window_every"] if "window" in shape else 0
    seen = {"full": 2, "causal": 1, "none": 0}[form] * sequence
    return float(dense + 6 * core * ((blocks - windowed) * seen + windowed * 2 * shape.get("window", 0)))


def printed_flops(row: dict[str, Any]) -> float:
    """FLOPs of one token as the source of this row counts them."""
    setting, extra = row["setting"], row["extra"]
    shape = SHAPES[setting["model"]]
    if setting["software"] in (
        "fsdp",
        "fsdp-pure",
    ):  # llm-foundry: six for every parameter, the table of positions too
        return flops(shape, setting["sequence"], "full") + float(6 * shape["width"] * setting["sequence"])
    if "packed" in extra:
        return flops(shape, setting["sequence"], "none")
    if "two of the three matrices of an expert" in extra.get("doubt", ""):
        unlike = {key: value for key, value in shape.items() if key != "window"} | {"gated": False}
        return flops(unlike, setting["sequence"], "causal")
    return flops(shape, setting["sequence"], FORMS[row["group"]])


@pytest.mark.parametrize("name", sorted(EXACT))
def test_parameters_are_exactly_those_printed(name: str) -> None:
    assert parameters(SHAPES[name]) + biases_and_norms(SHAPES[name]) == EXACT[name]


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_parameters_are_near_the_printed_size(name: str) -> None:
    assert parameters(SHAPES[name]) == pytest.approx(PRINTED[name] * 1e9, rel=0.03)


def test_every_shape_is_held_to_a_number() -> None:
    assert set(SHAPES) == EXACT.keys() | PRINTED.keys() | BY_FLOPS | BY_MFU


def test_flops_a_token_are_those_printed() -> None:
    compared = Counter[str]()
    for row in ROWS:
        teraflops = row["extra"].get("printed_teraflops_per_device")
        if teraflops is None or row.get("derived"):
            continue
        printed = teraflops * 1e12 / row["measured"]["tokens_per_second_per_device"]
        assert printed_flops(row) == pytest.approx(
            printed, rel=0.023 if "rounded" in row["extra"] else 0.012
        ), row
        compared[row["setting"]["model"]] += 1
    assert compared.keys() >= BY_FLOPS
    assert compared.total() == 49 + 13 + 64 + 3 + 156 + 150 + 3


def test_flops_a_token_are_those_of_the_printed_mfu() -> None:
    """Aleph Alpha counts every parameter, the table of words too. Means of shares and of seconds are of the same steps:
    their product is larger where steps differ, so that the median row tells."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in ROWS:
        if (share := row["extra"].get("printed_mfu")) is None:
            continue
        setting = row["setting"]
        shape, tokens = SHAPES[setting["model"]], setting["global_batch"] * setting["sequence"]
        printed = share * 312e12 * devices(setting["hardware"]) * row["measured"]["step_seconds"] / tokens
        counted = flops(shape, setting["sequence"], "full") + 6 * shape["vocab_size"] * shape["width"]
        found[setting["model"]].append(counted / printed)
    assert found.keys() == BY_MFU
    for name, ratios in found.items():
        assert statistics.median(ratios) == pytest.approx(1, abs=0.003), name


def test_derived_times_follow_from_the_shape() -> None:
    """Tokens/s of sections D and E, again from the shape; with full recompute the blocks run forward twice."""
    derived = [row for row in ROWS if row.get("derived")]
    assert {row["group"] for row in derived} == {"D", "E"}
    for row in derived:
        setting, measured = row["setting"], row["measured"]
        shape = SHAPES[setting["model"]]
        token = flops(shape, setting["sequence"], "full")
        if setting["recompute"] == "full":
            token += (token - 6 * shape["vocab_size"] * shape["width"]) / 3
        tokens = row["extra"]["printed_teraflops_per_device"] * 1e12 / token
        assert measured["tokens_per_second_per_device"] == pytest.approx(tokens, rel=1e-4), row
        step = setting["global_batch"] * setting["sequence"] / devices(setting["hardware"]) / tokens
        assert measured["step_seconds"] == pytest.approx(step, rel=1e-4), row


def test_flops_a_token_are_those_of_bloom_s_hardware_teraflops() -> None:
    """Blocks, attention included, run forward twice; the head once."""
    compared = 0
    for row in ROWS:
        if (teraflops := row["extra"].get("hardware_teraflops_per_device")) is None:
            continue
        setting = row["setting"]
        shape, tokens = SHAPES[setting["model"]], setting["global_batch"] * setting["sequence"]
        head = 6 * shape["vocab_size"] * shape["width"]
        counted = (flops(shape, setting["sequence"], "full") - head) * 4 / 3 + head
        printed = teraflops * 1e12 * devices(setting["hardware"]) * row["measured"]["step_seconds"] / tokens
        assert counted == pytest.approx(printed, rel=0.003), row
        compared += 1
    assert compared == COUNTS["BLOOM"]


def test_flops_a_token_are_those_of_the_utilisation_of_fms() -> None:
    """For 34B and 70B fms prints 6 % less on both cards, by a count of its own."""
    for row in ROWS:
        if row["group"] == "fms-fsdp" and row["setting"]["model"] in ("llama-2-7b", "llama-2-13b"):
            peak = 312e12 if "a100" in row["setting"]["hardware"] else 989.4e12
            shape = SHAPES[row["setting"]["model"]]
            token = (
                flops(shape, row["setting"]["sequence"], "full") + 6 * shape["vocab_size"] * shape["width"]
            )
            share = row["measured"]["tokens_per_second_per_device"] * token / peak
            assert share == pytest.approx(row["extra"]["mfu"], abs=0.012), row


def test_first_predictions_stand_beside_held_out_rows_alone() -> None:
    """None where it was refused then."""
    held = len((FOLDER / "held_out.jsonl").read_text().splitlines())
    assert sum("first" in row for row in ROWS) == held
    for row in ROWS[-held:]:
        first = row["first"]
        assert first is None or list(first) == ["tokens_per_second_per_device", "fits"], row


def test_counts_of_rows() -> None:
    assert Counter(row["group"] for row in ROWS) == COUNTS


def test_no_row_twice() -> None:
    keys = [json.dumps([row["source"], row["setting"], row["extra"]], sort_keys=True) for row in ROWS]
    assert len(set(keys)) == len(keys)


def test_rows_hold_the_named_keys_in_one_order() -> None:
    order = [
        "source",
        "group",
        "setting",
        "measured",
        "derived",
        "scored",
        "why_not",
        "assumed",
        "extra",
        "first",
    ]
    for row in ROWS:
        assert list(row) == [key for key in order if key in row]
        assert row.keys() >= set(order) - {"derived", "first"}
        assert row["scored"] == (row["why_not"] is None), row
        assert set(row["assumed"]) <= row["setting"].keys() | row["setting"]["layout"].keys(), row
        assert len(set(row["assumed"])) == len(row["assumed"]), row
        assert row["measured"], row
        assert row["measured"].keys() <= {"tokens_per_second_per_device", "step_seconds", "peak_bytes"}, row
        assert all(value > 0 for value in row["measured"].values()), row


def test_layouts_fit_devices_batches_and_models() -> None:
    for row in ROWS:
        setting, layout = row["setting"], row["setting"]["layout"]
        shape = SHAPES[setting["model"]]
        ranks = layout["dp"] * layout["fsdp"]
        assert ranks * layout["tp"] * layout["pp"] * layout["cp"] == devices(setting["hardware"]), row
        micro_batches, rest = divmod(setting["global_batch"], setting["micro_batch"] * ranks)
        assert micro_batches >= 1, row
        assert rest == 0, row
        assert layout["schedule"] == ("interleaved" if layout["virtual"] > 1 else "1f1b"), row
        # Megatron's and PyTorch's interleaved schedules take whole rounds of stages.
        if layout["virtual"] > 1:
            assert micro_batches % layout["pp"] == 0, row
        assert layout["pp"] * layout["virtual"] <= shape["layers"] + 2, row
        assert shape["heads"] % layout["tp"] == 0, row
        shared = (1, 2, 3) if row["group"] == "InternEvo" else (2, 3)
        assert layout["zero"] in (shared if layout["fsdp"] > 1 else (0, 1, 3)), row
        assert layout["ep"] == 1 or shape["experts"]["count"] % layout["ep"] == 0, row
        assert ranks * layout["cp"] * layout["tp"] % (layout["ep"] * layout["etp"]) == 0, row
        assert setting["precision"] in PRECISIONS, row
        assert setting["software"] in SOFTWARES, row
        again = setting["recompute"]
        assert again in {"none", "selective", "full"} or 0 < again < shape["layers"], row
