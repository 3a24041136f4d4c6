"""Whole runs of Muon, Fira and an optimizer of one's own that go from ranks to one process and back."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from distributed import spawn
from tiny_run import flags, losses, write_corpus

from scrimp.cli import main
from scrimp.training.checkpoint import CheckpointStore

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_optimizer.py"
STEPS, HALF = 6, 3
SETTINGS = [
    f"--train.steps={STEPS}",
    f"--checkpoint.every={HALF}",
    "--checkpoint.keep-last=4",
    "--evaluation.every=0",
    "--train.micro-batch=1",
    "--model.num-kv-heads=2",
]
ADAM = "import torch\n\nclass Own(torch.optim.Adam):\n    elementwise = True\n"


def commands(rank: int, lines: Sequence[Sequence[str]]) -> list[int]:
    return [main(list(words)) for words in lines]


def goes_on(run: Path, at: Path, *more: str) -> list[str]:
    shutil.copytree(run, at)
    return ["train", f"--run.dir={at}", f"--resume-from={HALF}", "--trust-code", *more]


@pytest.mark.slow
def test_runs_go_from_ranks_to_one_process_and_back(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ADAM)
    words = {
        "muon": ["--optimizer.name=muon"],
        "fira": ["--optimizer.name=fira", "--optimizer.rank=8", "--optimizer.refresh-every=2"],
        "own": [f"--optimizer.name={tmp_path / 'own.py'}:Own", "--trust-code"],
    }
    corpus = write_corpus(tmp_path)
    alone = [flags(corpus, tmp_path / name, *SETTINGS, *more) for name, more in words.items()]
    assert commands(0, alone) == [0] * len(words)
    on_two = [
        line
        for name, more in words.items()
        for line in (
            flags(corpus, tmp_path / f"{name} shards", *SETTINGS, *more),
            goes_on(tmp_path / name, tmp_path / f"{name} from one"),
            goes_on(tmp_path / name, tmp_path / f"{name} cut layers from one", "--layout.tp=2"),
        )
    ]
    (tmp_path / "two").mkdir()
    assert spawn(2, commands, tmp_path / "two", on_two) == [[0] * len(on_two)] * 2
    back = [goes_on(tmp_path / f"{name} shards", tmp_path / f"{name} to one") for name in words]
    assert commands(0, back) == [0] * len(words)
    for name in words:
        expected = list(losses(tmp_path / name).values())
        for other in ("shards", "from one", "cut layers from one", "to one"):
            assert list(losses(tmp_path / f"{name} {other}").values()) == pytest.approx(expected, rel=1e-5), (
                name,
                other,
            )
        stores = [
            CheckpointStore(tmp_path / run, keep_last=1, keep_every=0) for run in (name, f"{name} shards")
        ]
        one, two = (dict(store.at(STEPS).tensors()) for store in stores)
        assert {n: (t.shape, t.dtype) for n, t in one.items()} == {
            n: (t.shape, t.dtype) for n, t in two.items()
        }


def test_an_optimizer_that_does_not_say_that_elements_move_alone_is_refused_on_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("import torch\n\nclass Own(torch.optim.Adam):\n    pass\n")
    words = [f"--optimizer.name={tmp_path / 'own.py'}:Own", "--trust-code", "--layout.fsdp=2"]
    assert main(["plan", "--data.tokenizer=bytes", *words]) == 2
    assert "write `elementwise = True` into the class Own" in capsys.readouterr().err.replace("\n", " ")
