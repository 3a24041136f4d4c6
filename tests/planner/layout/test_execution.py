"""What users of a program set: words that are refused, lines that keep it, and what it changes of a step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scrimp.errors import ConfigError
from scrimp.json_files import decode_json
from scrimp.planner.layout.execution import Execution, check_execution
from scrimp.planner.layout.lines import Line, answer_line, line_of, line_text, setting_of
from scrimp.planner.layout.predict import predict

ROUTED: dict[str, Any] = {
    "model": {
        "layers": 8,
        "width": 2048,
        "heads": 32,
        "kv_heads": 4,
        "head_size": 128,
        "ffn_width": 6144,
        "vocab_size": 32000,
        "experts": {"count": 128, "chosen": 8, "width": 768},
    },
    "hardware": "16xgb200",
    "sequence": 4096,
    "global_batch": 64,
    "micro_batch": 4,
    "layout": {"dp": 16, "ep": 16, "zero": 1},
    "precision": "mxfp8",
    "software": "megatron",
}


def seconds(hardware: str = "16xgb200", **execution: Any) -> float:
    line = ROUTED | {"hardware": hardware, "execution": execution}
    found = answer_line(json.dumps(line), where="line 1")
    assert "error" not in found, found
    return float(found["step_seconds"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"execution": {"graphs": ["steps"]}}, "did you mean step"),
        ({"execution": {"dispatcher": "deeep"}}, "did you mean deepep"),
        ({"recompute": "selective", "recompute_parts": ["moe_act"]}, "recompute_parts are not"),
        ({"execution": {"graph": ["step"]}}, "did you mean graphs"),
        ({"execution": {"graphs": ["step"]}, "software": "scrimp"}, "not set by users of scrimp"),
    ],
)
def test_what_no_program_does_is_refused(change: dict[str, Any], says: str) -> None:
    assert says in answer_line(json.dumps(ROUTED | change), where="line 7")["error"]


def test_a_blank_execution_goes_with_every_program() -> None:
    for software in ("scrimp", "torchtitan", "megatron"):
        check_execution(Execution(), software)
    with pytest.raises(ConfigError):
        check_execution(Execution(overlap_experts=True), "torchtitan")


STAGES = {"dp": 8, "pp": 2, "virtual": 2, "ep": 8, "zero": 1}


@pytest.mark.parametrize(
    ("hardware", "change", "usual"),
    [
        ("16xgb200", {}, {"graphs": ["attention", "router"], "dispatcher": "hybridep"}),
        ("16xgb200", {"layout": {"dp": 16, "zero": 1}}, {"graphs": ["attention", "router"]}),
        ("16xh100", {}, {"dispatcher": "hybridep"}),
        ("16xh100", {"layout": {"dp": 16, "zero": 1}}, {}),
        ("16xh100", {"layout": STAGES}, {"overlap_experts": True}),
        ("16xh100", {"layout": STAGES, "recompute": "full"}, {"dispatcher": "hybridep"}),
        ("16xb200", {}, {}),
        ("16xmi300x", {"precision": "fp8_tensor"}, {}),
    ],
)
def test_what_a_line_does_not_say_is_what_users_usually_set(
    hardware: str, change: dict[str, Any], usual: dict[str, Any]
) -> None:
    silent = ROUTED | {"hardware": hardware} | change
    said = answer_line(json.dumps(silent | {"execution": usual}), where="a line")
    assert answer_line(json.dumps(silent), where="a line") == said
    assert "error" not in said
    setting = setting_of(decode_json(json.dumps(silent), Line, origin="a line", error=ConfigError, do=""))
    assert line_of(setting, "model", hardware).execution is None
    for change in ({"software": "scrimp"}, {"model": "llama-3.1-8b", "layout": {"dp": 16, "zero": 1}}):
        text = json.dumps(silent | {"precision": "bf16"} | change)
        other = setting_of(decode_json(text, Line, origin="a line", error=ConfigError, do=""))
        assert other.execution == Execution()


def test_a_line_keeps_it() -> None:
    text = json.dumps(ROUTED | {"execution": {"graphs": ["attention", "router"], "dispatcher": "hybridep"}})
    first = decode_json(text, Line, origin="line", error=ConfigError, do="")
    setting = setting_of(first)
    assert setting.execution == Execution(graphs=("attention", "router"), dispatcher="hybridep")
    again = line_text(line_of(setting, first.model, first.hardware))
    kept = setting_of(decode_json(again, Line, origin="line", error=ConfigError, do=""))
    assert predict(kept) == predict(setting)


def test_each_switch_is_faster_where_it_is_meant_to_be() -> None:
    eager = seconds()
    parts = seconds(graphs=["attention", "router"])
    whole = seconds(graphs=["step"])
    assert whole < parts < eager
    assert seconds(graphs=["step"], fused_experts=True) < whole
    once = seconds(graphs=["step"], dispatcher="hybridep")
    assert seconds(graphs=["step"], dispatcher="hybridep", overlap_experts=True) < once < whole
    # Over a network, one copy a node saves most.
    far = [seconds("2x8xh100", graphs=["step"], dispatcher=one) for one in ("alltoall", "hybridep")]
    assert far[1] < 0.75 * far[0]


def test_eight_bits_in_head_and_attention() -> None:
    """The head is faster. Attention is faster forward than it is slower backward, but not where tokens see few keys,
    whom its backward kernel in 8 bits goes through all the same."""
    whole = seconds(graphs=["step"])
    assert seconds(graphs=["step"], fp8_head=True) < whole
    shape = ROUTED["model"]
    latent = {"kv_rank": 512, "q_rank": 1536, "nope_size": 128, "rope_size": 64, "value_size": 128}
    for change, faster in (({"latent_attention": latent}, True), ({"window": 128}, False)):
        line = ROUTED | {"model": shape | change}
        without, with_it = (
            answer_line(
                json.dumps(line | {"execution": {"graphs": ["step"], "fp8_attention": one}}), where="line 1"
            )["step_seconds"]
            for one in (False, True)
        )
        assert (with_it < without) == faster


def test_parts_that_are_made_again_add_up() -> None:
    """Selective recomputation of named parts takes what they take forward; each adds to it."""

    def of(*parts: str) -> float:
        graphs = {"graphs": ["step"]}
        line = ROUTED | {"recompute": "selective", "recompute_parts": parts, "execution": graphs}
        return float(answer_line(json.dumps(line), where="line 1")["step_seconds"])

    none = seconds(graphs=["step"])
    norms, gates, both = of("norm"), of("swiglu"), of("norm", "swiglu")
    assert none < norms < both
    assert none < gates < both
    assert both - none == pytest.approx(norms - none + gates - none, rel=1e-6)
