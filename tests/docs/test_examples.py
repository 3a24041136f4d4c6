"""The examples run as a user runs them, and show what they say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEED_TRANSFORMERS = ("share_layers.py", "transformers_trainer.py")


def output_of(name: str, folder: Path, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def assert_two_plans_and_a_falling_loss(text: str, losses: list[float], share: float) -> None:
    reasons = re.findall(r"(?:step|update) \d+: (.+)", text)
    assert reasons[0].startswith("first plan")
    assert re.fullmatch(r"the same plan again|kept: .+|\d+ GEMMs changed: .+", reasons[1])
    assert len(reasons) == 2
    shares = [float(found) for found in re.findall(r"nvfp4 ([\d.]+)%", text)]
    assert len(shares) == 2
    assert min(shares) >= 100 * share - 0.05
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
def test_the_plain_loop_plans_twice_and_learns(tmp_path: Path) -> None:
    text = output_of("train_any_loop.py", tmp_path)
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) >= 3
    assert_two_plans_and_a_falling_loss(text, losses, 0.75)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_trainer_plans_twice_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    text = output_of("transformers_trainer.py", tmp_path, "--fp4", "0.5")
    losses = [float(found) for found in re.findall(r"'loss': '?([\d.]+)", text)]
    assert len(losses) == 6
    assert_two_plans_and_a_falling_loss(text, losses, 0.5)
    figures = re.findall(r"'snip/fp4_flops': '?([\d.]+)", text)
    assert len(figures) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_ranks_share_layers_and_learn(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    finished = subprocess.run(
        [*launcher, str(EXAMPLES / "share_layers.py"), "--steps", "20"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert "attn.c_attn  x 2   outputs     4 parts in each of 3 stretches" in finished.stdout
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", finished.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 0.1
    assert "the whole model again" in finished.stdout


@pytest.mark.parametrize(
    "path",
    [
        EXAMPLES / "train_any_loop.py",  # the others import transformers: seconds each
        *(pytest.param(EXAMPLES / name, marks=pytest.mark.slow) for name in NEED_TRANSFORMERS),
    ],
    ids=lambda path: path.name,
)
def test_an_example_says_how_it_is_run_and_helps(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"python examples/{path.name}" in path.read_text(encoding="utf-8")
    if "transformers" in path.name:
        pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(path), run_name="__main__")
    assert "--steps" in capsys.readouterr().out
