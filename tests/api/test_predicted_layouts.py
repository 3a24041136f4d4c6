"""`scrimp.predict` and `scrimp.search`: what the command line says, as values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_settings import LLAMA_8B

import scrimp
from scrimp.cli import main
from scrimp.errors import ConfigError, PlanError, ScrimpError
from scrimp.planner.hardware import load_hardware

LINE: dict[str, Any] = {
    "model": "llama-3.2-1b",
    "hardware": "4xh100",
    "sequence": 4096,
    "global_batch": 32,
    "micro_batch": 2,
    "layout": {"fsdp": 2, "tp": 2},
    "recompute": "selective",
    "precision": "fp8_tensor",
}


def test_a_prediction_is_the_answer_of_a_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.jsonl"
    file.write_text(json.dumps(LINE), encoding="utf-8")
    assert main(["plan", "--batch", str(file)]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = scrimp.predict(**LINE)
    assert found.step_seconds == answer["step_seconds"]
    assert found.tokens_per_second_per_device == answer["tokens_per_second_per_device"]
    assert found.seconds == answer["seconds"]
    assert [dict(one) for one in found.peak_bytes] == [
        pytest.approx(one["peak_bytes"], abs=1) for one in answer["stages"]
    ]
    assert found.fits
    assert not scrimp.predict(**LINE | {"model": "llama-3-70b"}).fits


def test_a_model_is_a_name_or_a_shape() -> None:
    names = ("layers", "width", "heads", "kv_heads", "head_size", "ffn_width", "vocab_size")
    plain = {name: getattr(LLAMA_8B, name) for name in names}
    one, other = (scrimp.predict(**LINE | {"model": model}) for model in (LLAMA_8B, plain))
    assert one.step_seconds == other.step_seconds > 0


def test_a_search_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hardware 4xh100 --model.preset llama-3.2-1b --train.sequence 4096 --train.batch-tokens 131072"
    assert main(["plan", *words.split(), "--layout.tp", "2", "--tokens", "1T", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    asked = {name: LINE[name] for name in ("model", "hardware", "sequence", "global_batch")}
    found = scrimp.search(**asked, layout={"tp": 2}, tokens=1e12)
    assert found.as_json() == answer
    assert [one.step_seconds for one in found.plans] == [one["step_seconds"] for one in answer["best"]]
    assert {one.setting.layout.tp for one in found.plans} == {2}
    assert found.tried == answer["settings_tried"]
    best = answer["best"][0]
    names = ("layout", "micro_batch", "recompute", "offload", "precision", "blocks")
    assert scrimp.predict(**asked, **{name: best[name] for name in names}) == found.plans[0]
    one = found.plans[0].setting
    given = scrimp.predict(
        **asked,
        layout={"tp": 2, "fsdp": 2, "zero": one.layout.zero},
        blocks=one.blocks,
        micro_batch=one.micro_batch,
        offload=one.offload,
    )
    assert given.step_seconds == found.plans[0].step_seconds
    (only,) = scrimp.search(**asked, micro_batch=4, keep=1).plans
    assert only.setting.micro_batch == 4


@pytest.mark.slow
def test_ranks_of_zero_are_searched_as_they_are_predicted() -> None:
    asked = {name: LINE[name] for name in ("model", "hardware", "sequence", "global_batch")}
    devices = load_hardware(LINE["hardware"]).devices
    for given in ({"dp": devices, "zero": 3}, {"dp": devices, "zero": 2}):
        (found,) = scrimp.search(**asked, layout=given, keep=1).plans
        assert (found.setting.layout.dp, found.setting.layout.fsdp) == (1, devices)
    usual, free = (scrimp.search(**asked, layout=one, keep=1).plans for one in ({}, {"zero": None}))
    assert usual == free


@pytest.mark.slow
def test_formats_of_other_programs_are_searched() -> None:
    asked = {name: LINE[name] for name in ("model", "hardware", "sequence", "global_batch")}
    half = scrimp.search(**asked, precision="fp16", software="megatron", keep=1).plans[0]
    assert half.setting.precision == "fp16"
    usual, auto = (scrimp.search(**asked, precision=one, keep=1).plans[0] for one in ("bf16", "auto"))
    assert auto == usual
    own = {"optimizer.moments": "fp32", "optimizer.master_weights": True}
    assert scrimp.search(**asked, software="megatron", settings=own, keep=1).plans


@pytest.mark.slow
def test_numbers_and_paths_of_other_libraries_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[nodes]]\nnode = "dgx-h100"\ndevices = 4\n', encoding="utf-8")
    layout = {"fsdp": np.int64(2), "tp": 2}
    found = scrimp.predict(**LINE | {"hardware": file, "sequence": np.int64(4096), "layout": layout})
    assert found.step_seconds == scrimp.predict(**LINE).step_seconds
    asked = {name: LINE[name] for name in ("model", "hardware", "sequence", "global_batch")}
    one, other = (scrimp.search(**asked, tokens=tokens, keep=1) for tokens in ("1T", 1e12))
    assert one.as_json() == other.as_json()


def test_a_prediction_takes_what_users_of_the_program_set() -> None:
    alone, graphs = (
        scrimp.predict(**LINE | {"software": "megatron"}, execution=execution)
        for execution in (None, {"graphs": ["step"]})
    )
    assert graphs.setting.execution.graphs == ("step",)
    assert graphs.step_seconds < alone.step_seconds


def test_a_schedule_alone_leaves_its_degrees_to_the_search() -> None:
    asked = {name: LINE[name] for name in ("model", "hardware", "sequence", "global_batch")}
    (plan,) = scrimp.search(**asked, layout={"schedule": "zbv"}, keep=1).plans
    assert (plan.setting.layout.schedule, plan.setting.layout.virtual) == ("zbv", 2)
    assert plan.setting.layout.pp > 1


def test_an_objective_chooses_the_question() -> None:
    asked = {name: LINE[name] for name in ("model", "sequence", "global_batch")}
    found = scrimp.search(**asked, hardware="h100", objective="smallest-cluster", tokens=1e10, days=1)
    assert found.answer.question.cluster.devices > 1
    assert scrimp.search(**asked | {"model": "llama-3-70b"}, hardware="rtx4060ti").plans == ()


@pytest.mark.parametrize(
    ("change", "says", "kind"),
    [
        ({"model": "llama-3.2-1"}, "did you mean llama-3.2-1b", ConfigError),
        ({"sequence": "long"}, "sequence", ConfigError),
        ({"layout": {"tpp": 2}}, "tp", ConfigError),
        ({"global_batch": 0}, "global_batch is out of range", ConfigError),
        ({"objective": "fastest"}, "one of step-time", ConfigError),
        ({"objective": None}, "one of step-time", ConfigError),
        ({"objective": "step_time"}, "did you mean step-time", ConfigError),
        ({"days": 3.0}, "nothing says what", PlanError),
        ({"tokens": -1.0}, "tokens are out of range", PlanError),
        ({"tokens": "many"}, "tokens is no number of tokens", ConfigError),
        ({"keep": 0}, "keep is out of range", ConfigError),
        ({"layout": {"schedule": "zbv", "pp": 1}}, "a pipeline: layout.pp above 1", ConfigError),
        ({"layout": {"schedule": "zbv", "virtual": 3}}, "2 stages on each rank", ConfigError),
        ({"micro_batch": 0}, "micro_batch is out of range", ConfigError),
        ({"precision": None}, "precision is no str", ConfigError),
        ({"precision": "fp17"}, "did you mean fp16|unknown recipe", ConfigError),
        ({"settings": [("memory.optimizer", "host")]}, "settings is no Mapping", ConfigError),
        ({"settings": {1: 2}}, "1 is not a setting of a search", ConfigError),
        ({"settings": {"optimizer.name": "muon"}}, "plan on the machine itself", ConfigError),
        ({"settings": {"snip.formats": "mxfp8,nvfp4"}}, "for a search that chooses formats", ConfigError),
        ({"statistics": 3, "precision": "snip"}, "statistics are no profile", ConfigError),
        ({"layout": {"tp": 2, "sequence_parallel": False}}, "share the tokens", ConfigError),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(
    change: dict[str, Any], says: str, kind: type[ScrimpError]
) -> None:
    asked = {name: LINE[name] for name in ("model", "hardware", "sequence", "global_batch")}
    with pytest.raises(kind, match=says):
        scrimp.search(**asked | change)
    with pytest.raises(PlanError, match="the degrees of the layout are not those of the cluster"):
        scrimp.predict(**LINE | {"layout": {"tp": 3}})
