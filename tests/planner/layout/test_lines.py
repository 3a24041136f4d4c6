"""Settings as lines: docs/planner.md, bad lines, and shapes from files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from whole_settings import with_memory

from scrimp.cli import main
from scrimp.errors import ConfigError
from scrimp.json_files import decode_json
from scrimp.planner.layout.lines import Line, answer, answer_line, line_of, line_text, setting_of
from scrimp.planner.layout.shape_files import read_shape

PAGE = (Path(__file__).parents[3] / "docs" / "planner.md").read_text(encoding="utf-8")
GOOD: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "8xh100",
    "sequence": 8192,
    "global_batch": 128,
    "micro_batch": 1,
    "layout": {"fsdp": 8},
}
SHAPE: dict[str, Any] = {
    "layers": 4,
    "width": 512,
    "heads": 8,
    "kv_heads": 2,
    "head_size": 64,
    "ffn_width": 1024,
    "vocab_size": 32000,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_line_of_the_page_has_the_answer_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, answer = map(json.loads, blocks("json")[:2])
    file = tmp_path / "settings.jsonl"
    file.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert main(["plan", "--batch", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == answer.keys()
    assert found["step_seconds"] == pytest.approx(answer["step_seconds"], rel=1e-6)
    assert found["seconds"] == pytest.approx(answer["seconds"], rel=1e-6)
    for ours, theirs in zip(found["stages"], answer["stages"], strict=True):
        assert ours["peak_bytes"] == pytest.approx(theirs["peak_bytes"], rel=1e-6)
        assert ours["moment"] == theirs["moment"]


def test_a_shape_is_a_file_or_stands_in_the_line(tmp_path: Path) -> None:
    file = tmp_path / "shape.toml"
    file.write_text(blocks("toml")[0], encoding="utf-8")
    shape = read_shape(file)
    in_file = answer_line(json.dumps(GOOD | {"model": str(file)}), where="line 1")
    values = {
        "layers": shape.layers,
        "width": shape.width,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "ffn_width": shape.ffn_width,
        "vocab_size": shape.vocab_size,
        "experts": vars(shape.experts),
    }
    in_line = answer_line(json.dumps(GOOD | {"model": values}), where="line 1")
    assert in_file["step_seconds"] == in_line["step_seconds"] > 0


def test_an_answer_has_the_id_of_its_line() -> None:
    for change in ({}, {"micro_batch": 3}):
        assert answer_line(json.dumps(GOOD | {"id": "mine 7"} | change), where="a line")["id"] == "mine 7"
    assert "id" not in answer_line(json.dumps(GOOD), where="a line")


def test_zero_of_data_parallel_ranks_shares_what_they_have() -> None:
    """Users of other programs write `dp` for ranks of ZeRO 2 and 3; copies are those without."""

    def found(**layout: int) -> dict[str, Any]:
        return answer_line(json.dumps(GOOD | {"layout": layout}), where="a line")

    for zero in (2, 3):
        assert found(dp=8, zero=zero) == found(fsdp=8, zero=zero)
    assert found(dp=8) == found(dp=8, zero=0)
    assert found(dp=2, fsdp=4, zero=3) == found(dp=2, fsdp=4)


def test_a_setting_fits_where_devices_and_hosts_hold_it() -> None:
    """As a search has it: states that leave need host memory."""
    offload = {"optimizer": True, "master": True, "gradients": True, "weights": True}
    text = json.dumps(
        GOOD | {"hardware": "rtx5090", "sequence": 512, "layout": {}, "offload": offload, "micro_batch": 1}
    )
    like = setting_of(decode_json(text, Line, origin="a line", error=ConfigError, do=""))
    sizes = ((32e9, 1e12), (32e9, 16e9), (8e9, 1e12))
    assert [answer(with_memory(like, *each))["fits"] for each in sizes] == [True, False, False]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "llama-3.1-8"}, "did you mean llama-3.1-8b"),
        ({"hardware": "8xh10"}, "did you mean 'h100'"),
        ({"sequence": 0}, "sequence is out of range"),
        ({"sequence": "long"}, "line 7"),
        ({"layout": {"fsdp": 8, "virtual": 0}}, "layout.virtual is out of range"),
        ({"layout": {"fsdp": 8, "zero": 4}}, "layout.zero is out of range"),
        ({"layout": {"fsd": 8}}, "did you mean fsdp"),
        ({"layout": {"tp": 3}}, "the degrees of the layout are not those of the cluster"),
        ({"layout": {"fsdp": 8, "schedule": "waves"}}, "layout.schedule is not known"),
        ({"precision": "fp7"}, "precision is not known"),
        ({"recompute": "most"}, "recompute is not known"),
        ({"software": "megatro"}, "did you mean megatron"),
        ({"offload": {"weight": True}}, "did you mean weights"),
        ({"micro_batch": 3}, "the batch cannot be shared"),
        ({"model": "none.toml"}, "none.toml"),
        ({"recompute": "selective", "recompute_parts": ["gates"]}, "recompute_parts"),
        ({"recompute_parts": ["norm"]}, "recompute none"),
        ({"layout": {"fsdp": 4, "pp": 2, "zero": 1, "stages": "a,b"}}, "layout.stages is no list of blocks"),
        (
            {"layout": {"fsdp": 4, "pp": 2, "zero": 1, "stages": "16,17"}},
            "layout.stages does not fit the model",
        ),
        ({"layout": {"fsdp": 4, "pp": 2, "zero": 1, "stages": "32,0"}}, "layout.stages is no list of blocks"),
        ({"layout": {"fsdp": 8, "ep": 2}}, "layout.ep does not divide the experts"),
        ({"layout": {"fsdp": 8, "etp": 3}}, "layout.ep x layout.etp does not divide the ranks of a stage"),
        ({"layout": {"tp": 6}, "hardware": "6xh100", "software": "megatron"}, "tp does not divide the heads"),
        ({"layout": {"cp": 6}, "hardware": "6xh100"}, "layout.cp does not divide the tokens"),
        ({"layout": {"cp": 8}, "sequence": 8200}, "twice layout.cp does not divide the tokens"),
        ({"layout": {"pp": 64, "zero": 1}, "hardware": "64xh100"}, "more ranks than the model has blocks"),
        ({"layout": {"pp": 8, "virtual": 8}}, "64 stages, 32 blocks"),
        ({"layout": {"pp": 8, "virtual": 5}, "software": "megatron"}, "40 stages, 32 blocks"),
        ({"layout": {"fsdp": 8, "virtual": 2}}, "layout.virtual is of a pipeline"),
        ({"layout": {"tp": 3}, "hardware": "3xh100"}, "layout.tp does not divide the heads"),
        ({"layout": {"tp": 16}, "hardware": "16xh100"}, "layout.tp does not divide the key heads"),
        ({"layout": {"tp": 2, "cp": 4}}, "software scrimp does not run layout.cp beside layout.tp"),
        (
            {"layout": {"cp": 8, "cp_method": "ulysses"}, "software": "megatron"},
            "software megatron does not share rows in this way",
        ),
        (
            {"layout": {"cp": 64, "cp_method": "ulysses"}, "hardware": "64xh100"},
            "layout.cp does not divide the heads that ulysses exchanges",
        ),
        ({"layout": {"fsdp": 8, "etp": 2}}, "layout.etp does not divide the experts"),
        ({"layout": {"fsdp": 8, "zero": 0}}, "layout.zero 0 shares nothing"),
        ({"layout": {"cp": 8, "zero": 0}, "software": "megatron"}, "layout.zero 0 shares nothing"),
        ({"model": SHAPE | {"learned_positions": 512}}, "longer than the model's table of positions"),
        ({"offload": {"activation_layers": -1}}, "offload.activation_layers is out of range"),
        (
            {"offload": {"activation_layers": 33}},
            "offload.activation_layers is more blocks than the model has",
        ),
        (
            {"layout": {"pp": 2, "fsdp": 4, "zero": 1}, "offload": {"optimizer": True}},
            "ranks of a pipeline keep all on their devices",
        ),
        ({"states": {"masters": False}, "offload": {"master": True}}, "there are no masters"),
        ({"attention_kernel": "cudnn"}, "attention_kernel cudnn is not one of software scrimp"),
        (
            {"attention_kernel": "torch", "software": "megatron"},
            "attention_kernel torch is not one of software megatron",
        ),
        ({"recompute": 33}, "recompute is more blocks than the model has"),
        ({"blocks": [{"formats": [["mlp.dwn.wgrad", "fp8"]]}] * 32}, "did you mean mlp.down.wgrad"),
    ],
)
def test_a_bad_line_is_answered_with_its_number(change: dict[str, Any], says: str) -> None:
    found = answer_line(json.dumps(GOOD | change), where="settings.jsonl, line 7")
    assert found.keys() == {"error"}
    assert says in found["error"]
    assert "line 7" in found["error"]


def test_a_key_that_a_line_has_twice_is_named() -> None:
    text = json.dumps(GOOD)[:-1] + ', "model": "llama-3.1-70b"}'
    assert "twice" in answer_line(text, where="line 7")["error"]
    assert "got model" in answer_line(text, where="line 7")["error"]


@pytest.mark.parametrize(
    "change",
    [
        {"layout": {"dp": 8, "zero": 0}},
        {"layout": {"pp": 8, "virtual": 4}},
        {"layout": {"cp": 8, "cp_method": "striped"}},
        {"layout": {"cp": 8, "cp_method": "ulysses"}},
        {"layout": {"tp": 2, "cp": 4}, "software": "megatron"},
        {"layout": {"pp": 2, "fsdp": 4, "virtual": 17, "zero": 1}, "software": "megatron"},
        {"model": SHAPE | {"learned_positions": 512}, "software": "fsdp"},
    ],
)
def test_what_ranks_of_a_program_run_is_predicted(change: dict[str, Any]) -> None:
    assert answer_line(json.dumps(GOOD | change), where="line 1")["step_seconds"] > 0


def test_a_file_is_read_again_for_each_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook files change between two predictions, and a path is of the folder that one is in."""
    shape, cluster = tmp_path / "shape.toml", tmp_path / "cluster.toml"
    text = "\n".join(f"{name} = {value}" for name, value in SHAPE.items())
    monkeypatch.chdir(tmp_path)
    line = json.dumps(GOOD | {"model": shape.name, "hardware": cluster.name})

    def seconds(layers: int, node: str) -> float:
        shape.write_text(text.replace("layers = 4", f"layers = {layers}"), encoding="utf-8")
        cluster.write_text(f'[[nodes]]\nnode = "{node}"\n', encoding="utf-8")
        found: float = answer_line(line, where="line 1")["step_seconds"]
        return found

    first = seconds(4, "dgx-h100")
    assert seconds(8, "dgx-h100") > 1.2 * first
    assert seconds(4, "dgx-a100-80") > 1.2 * first
    assert seconds(4, "dgx-h100") == first


def test_a_cluster_of_two_kinds_of_nodes_is_answered(tmp_path: Path) -> None:
    """8 devices of one kind with 8 of a slower one are faster than alone, by stages that fit them."""
    file = tmp_path / "two.toml"
    file.write_text('[[nodes]]\nnode = "dgx-a100-80"\n[[nodes]]\nnode = "dgx-h100"\n', encoding="utf-8")
    layout = {"pp": 2, "fsdp": 8, "zero": 1, "stages": "9,23"}
    line = GOOD | {"hardware": str(file), "layout": layout, "recompute": "full"}
    both = answer_line(json.dumps(line), where="line 1")
    alone = GOOD | {"hardware": "8xh100", "layout": {"fsdp": 8}, "recompute": "full"}
    assert both["step_seconds"] < answer_line(json.dumps(alone), where="line 2")["step_seconds"]
    assert len(both["stages"]) == 2


def test_other_lines_are_answered_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{{\n\n{json.dumps(GOOD)}\n", encoding="utf-8")
    assert main(["plan", "--batch", str(file)]) == 2
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["error" in one for one in answers] == [False, True, False]
    assert "line 2" in answers[1]["error"]
    assert main(["plan", "--batch", str(file), "--train.steps", "5"]) == 2
    assert "--batch takes its settings from its file alone" in capsys.readouterr().err


def test_lines_end_where_the_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mark of byte order is no text, and a line separator within one ends no line."""
    file = tmp_path / "settings.jsonl"
    texts = [json.dumps(GOOD), json.dumps(GOOD | {"model": "a\u2028b"}, ensure_ascii=False), "{"]
    file.write_text("\r\n".join(texts), encoding="utf-8-sig", newline="")
    assert main(["plan", "--batch", str(file)]) == 2
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["step_seconds"] > 0
    assert "line 2" in second["error"]
    assert "line 3" in third["error"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"layout": {"fsdp": 2, "pp": 4, "zero": 1, "virtual": 2, "schedule": "interleaved"}, "recompute": 3},
        {"layout": {"fsdp": 4, "tp": 2, "sequence_parallel": False}, "offload": {"optimizer": True}},
        {
            "blocks": [{"recompute": "full", "formats": [["mlp.down.wgrad", "fp8"]]}]
            + [{"gathered": True}] * 31
        },
        {"software": "megatron", "precision": "fp8_tensor"},
        {"attention_kernel": "torch"},
    ],
)
def test_a_line_that_is_written_reads_as_the_same_setting(change: dict[str, Any]) -> None:
    line = decode_json(json.dumps(GOOD | change), Line, origin="line", error=ConfigError, do="")
    setting = setting_of(line)
    written = line_text(line_of(setting, line.model, line.hardware))
    again = decode_json(written, Line, origin="line", error=ConfigError, do="")
    assert again == line
    assert setting_of(again) == setting


V = GOOD | {"layout": {"fsdp": 2, "pp": 4, "zero": 1, "schedule": "zbv"}}


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_line_of_a_v_is_answered(schedule: str, zero: int) -> None:
    line = V | {"layout": V["layout"] | {"schedule": schedule, "zero": zero}}
    found = answer_line(json.dumps(line), where="line 1")
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    plain = {"fsdp": 2, "pp": 4, "zero": zero}
    other = answer_line(json.dumps(V | {"layout": plain, "software": "scrimp-eager"}), where="line 1")
    assert found["seconds"]["bubble"] < 0.6 * other["seconds"]["bubble"]
    # Embedding, head and loss are the first rank's.
    logits = [one["peak_bytes"]["logits"] for one in found["stages"]]
    assert logits[1:] == [0, 0, 0]
    setting = setting_of(decode_json(json.dumps(line), Line, origin="a line", error=ConfigError, do=""))
    assert (setting.layout.virtual, setting.software.name) == (2, "scrimp-eager")
    again = line_of(setting, "llama-3.1-8b", "8xh100")
    assert setting_of(again) == setting


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": {"fsdp": 8, "schedule": "zbv"}}, "a pipeline: layout.pp above 1"),
        ({"layout": V["layout"] | {"virtual": 3}}, "2 stages on each rank"),
        ({"offload": {"optimizer": True}}, "everything on the device"),
        ({"software": "llmq"}, "not carried out by software llmq"),
        ({"software": "megatron"}, "not carried out by software megatron"),
        ({"hardware": "32xh100", "layout": {"pp": 32, "schedule": "zbv"}}, "64 stages, 32 blocks"),
        (
            {"global_batch": 8, "layout": V["layout"] | {"schedule": "dualpipev"}},
            "cannot run this number of micro-batches",
        ),
    ],
)
def test_what_ranks_do_not_carry_out_beside_a_v_is_refused_by_name(
    change: dict[str, Any], words: str
) -> None:
    assert words in answer_line(json.dumps(V | change), where="line 1")["error"]
