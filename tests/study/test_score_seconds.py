"""`scrimp score --card`: steps times the seconds that `scrimp plan --hardware` predicts, and named so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import row_for

from scrimp.cli import main
from scrimp.cli.score_seconds import _step_seconds
from scrimp.errors import ScrimpError
from scrimp.planner.hardware import load_hardware
from scrimp.study.conduct import STUDY_FILE
from scrimp.study.definition import parse_study
from scrimp.study.rows import Curve, append_row

SIZES = {"num_layers": 2, "width": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_width": 192, "vocab_size": 320}
TEXT = """
seeds = 1
figure = "steps_to_target"
target = 2.0
[settings]
data.tokenizer = "bytes"
train.steps = 40
train.sequence = 128
train.batch_tokens = 1024
evaluation.every = 10
{sizes}
[[variants]]
name = "plain"
precision = "bf16"
[[variants]]
name = "low"
precision = "fp8"
[[variants]]
name = "planned"
precision = "snip"
budget.fp4_flops = 0.75
[[variants]]
name = "never"
precision = "bf16"
optimizer.lr = 1e-2
[[variants]]
name = "muon"
optimizer.name = "muon"
"""
LOSSES = {
    "plain": [3.0, 2.0],
    "low": [3.0, 2.5, 1.9],
    "planned": [3.0, 2.5, 2.4, 1.9],
    "never": [3.0, 2.5, 2.4, 2.1],
    "muon": [1.0],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workload whose target `plain` reaches after 20 steps, `low` after 30, `planned` after 40, `never` not."""
    sizes = "\n".join(f"model.{name} = {size}" for name, size in SIZES.items())
    study = parse_study(TEXT.format(sizes=sizes), name="mine", where="mine.toml")
    found = tmp_path / "mine"
    found.mkdir()
    (found / STUDY_FILE).write_text(study.text)
    for name, losses in LOSSES.items():
        curve = Curve(steps=[10.0 * (n + 1) for n in range(len(losses))], values=losses)
        figures = {"held_out_loss": losses[-1]}
        append_row(found, row_for(study, name, 0, 1.0, 40, held_out=curve, figures=figures))
    return found


def planned_seconds(precision: str, capsys: pytest.CaptureFixture[str]) -> float:
    """What the command for plans says of a step on an H100."""
    sizes = [f"--model.{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
    words = ["plan", "--hardware=h100", "--json", f"--precision={precision}", *sizes]
    capsys.readouterr()
    assert main([*words, "--train.sequence=128", "--train.batch-tokens=1024"]) == 0
    found: float = json.loads(capsys.readouterr().out)["best"][0]["step_seconds"]
    return found


def test_seconds_are_steps_times_those_that_a_plan_has(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {
        "plain": f"{20 * planned_seconds('bf16', capsys):.3g}",
        "low": f"{30 * planned_seconds('fp8', capsys):.3g}",
        "planned": f"{40 * planned_seconds('snip', capsys):.3g}",
        "never": "never",
        "muon": "–",
    }
    page = tmp_path / "score.html"
    assert main(["score", str(folder), "--card=h100", f"--out={page}"]) == 0
    out = capsys.readouterr().out
    told = out[: out.index("time to")]
    rows = [line.split() for line in told.splitlines()]
    # Rows of steps have tokens in brackets besides.
    assert {row[0]: row[1] for row in rows if len(row) == 2 and row[0] in expected} == expected
    assert "muon: a search on other hardware does not know optimizer.name muon" in told
    text = page.read_text(encoding="utf-8")
    assert "Predicted seconds on h100" in text
    assert f">{expected['low']}<" in text


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"adapter.rank": 8}, "adapter.rank"),
        ({"objective.name": "distill", "objective.teachers": "ema"}, "objective.name, objective.teachers"),
        ({"outer.every": 4}, "outer.every"),
        ({"model.rank": 8, "model.sparse_share": 0.1}, "sparse matrix"),
        ({"model.weights": Path("/nowhere")}, "nowhere"),
    ],
)
def test_what_predictions_do_not_know_is_named(more: dict[str, object], why: str) -> None:
    settings = {"train.sequence": 128, "train.batch_tokens": 1024, "data.tokenizer": "bytes", **more}
    with pytest.raises(ScrimpError, match=why):
        _step_seconds(settings, load_hardware("h100"))


def test_a_card_that_nobody_knows_is_refused_and_nothing_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "score.html"
    assert main(["score", str(folder), "--card=h1000", f"--out={page}"]) == 2
    assert "h1000" in capsys.readouterr().err
    assert not page.exists()
