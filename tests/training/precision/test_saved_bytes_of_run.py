"""What a training run really keeps of its layers' inputs, and what its plan says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import flags, records, write_corpus

from scrimp.cli import main
from scrimp.gemm import PlannedLinear
from scrimp.planner import Plan
from scrimp.planner.precision import PrecisionPlan

WORDS = [
    *("--train.steps=5", "--train.micro-batch=4", "--memory.activations=keep", "--evaluation.every=0"),
    *("--snip.formats=bf16,fp8,mxfp8,nvfp4,mxfp4", "--snip.first=1", "--snip.every=0", "--snip.delay=1"),
    "--snip.probe-every=0",
]
SWITCH = 3


class Watch:
    """Bytes that each planned layer saved beside its weight in a pass before backward: in the newest, and the most."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.newest: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self._layer: PlannedLinear | None = None
        run = PlannedLinear.forward

        def forward(layer: PlannedLinear, x: torch.Tensor) -> torch.Tensor:
            self._layer, name = layer, layer.planned.name
            if torch.is_grad_enabled():
                self.newest[name] = 0
            y = run(layer, x)
            self._layer = None
            if torch.is_grad_enabled():
                self.most[name] = max(self.most.get(name, 0), self.newest[name])
            return y

        patch.setattr(PlannedLinear, "forward", forward)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what a planned layer saves; tokens are more than any features, so that a weight is known by shape."""
        if self._layer is not None and not _is_weight(tensor, self._layer):
            self.newest[self._layer.planned.name] += tensor.nbytes
        return tensor


def _is_weight(tensor: torch.Tensor, layer: PlannedLinear) -> bool:
    shapes = (layer.weight.shape, layer.weight.T.shape)
    return tensor.dtype in (torch.bfloat16, torch.float32) and tensor.shape in shapes


def watched_run(run_dir: Path, corpus: Path, patch: pytest.MonkeyPatch, *more: str) -> Watch:
    watch = Watch(patch)
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda tensor: tensor):
        assert main(flags(corpus, run_dir, *WORDS, *more)) == 0
    return watch


@pytest.mark.slow
@pytest.mark.parametrize(("rules", "most"), [("", 0.55), (",*.qkv.saved=fp8,blocks.0.*.wgrad=mxfp8", 0.6)])
def test_the_bytes_that_a_run_keeps_fall_to_the_share_that_its_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: str, most: float
) -> None:
    run_dir, words = tmp_path / "run", (f"--precision=snip{rules}", f"--budget.saved-bytes={most}")
    watch = watched_run(run_dir, write_corpus(tmp_path), monkeypatch, *words)
    plan = PrecisionPlan.read(run_dir / "plans" / f"step-{SWITCH:08d}.precision.json")
    assert plan.budget == {"saved_bytes": most}
    layers = [layer for layer in Plan.read(run_dir / "plan.json").gemms if layer != "head"]
    in_bf16 = sum(2 * 256 * (64 if layer.endswith("down") else 32) for layer in layers)
    kept = sum(watch.newest[layer] for layer in layers)
    assert kept / in_bf16 == pytest.approx(plan.predicted["saved_bytes"], abs=1e-9)
    assert kept / in_bf16 <= most
    if not rules:
        assert sum(watch.most[layer] for layer in layers) == in_bf16, "before the first plan all is bf16"
    (event,) = [event for event in records(run_dir, "events.jsonl") if event["kind"] == "replan"]
    assert event["saved_bytes"] == plan.predicted["saved_bytes"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--precision=snip", "--budget.saved-bytes=0.3"], "at least 0.42"),
        (["--precision=snip", "--budget.saved-bytes=0"], "budget.saved_bytes"),
        (["--precision=fp8", "--budget.saved-bytes=0.5"], "no effect on fixed formats"),
        (["--precision=snip", "--budget.saved-bytes=0.5", "--budget.fp4-flops=0.5"], "one budget"),
        (["--precision=snip,*.wgrad=bf16", "--budget.saved-bytes=0.9"], "at least 1.0000"),
        (["--precision=snip,*.mlp.*.saved=recompute", "--budget.saved-bytes=0.2"], "at least 0.25"),
        (["--precision=snip", "--snip.policy=first-last", "--budget.saved-bytes=0.8"], "only a share"),
        (["--precision=snip", "--budget.saved-bytes=0.5", "--train.compile=on"], "train.compile to off"),
    ],
)
def test_what_no_plan_can_keep_is_refused_before_a_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    run_dir = tmp_path / "run"
    assert main(flags(write_corpus(tmp_path), run_dir, "--train.steps=5", *words)) == 2
    assert says in capsys.readouterr().err
    assert not run_dir.exists()


@pytest.mark.slow
def test_the_plan_of_a_checkpoint_shows_the_bytes_and_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "plan.json"
    assert main(flags(write_corpus(tmp_path), run_dir, "--train.steps=5", "--precision=bf16")) == 0
    asked: list[Any] = ["plan", "--precision=snip", f"--model.weights={run_dir}"]
    assert main([*asked, "--budget.saved-bytes=0.5", f"--out={out}"]) == 0
    plan = PrecisionPlan.read(out)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"inputs kept for backward {plan.predicted['saved_bytes']:.1%} of their bytes in bf16" in shown
    assert 0.42 < plan.predicted["saved_bytes"] <= 0.5
    assert main([*asked, "--budget.saved-bytes=0.3"]) == 2
    assert "budget.saved_bytes cannot be reached" in capsys.readouterr().err
