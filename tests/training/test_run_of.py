"""A checkpoint is found to be part of its run however it is named, and stands alone where it was copied out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.training.run_folder import run_of

GENERATE = ("--prompt=def", "--tokens=2", "--device=cpu")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run-of")
    more = ("--train.steps=4", "--checkpoint.every=2", "--data.no-mask-documents")
    assert main(flags(write_corpus(root), root / "run", *more)) == 0
    return root / "run"


@pytest.mark.slow
def test_a_checkpoint_named_from_beside_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir / "checkpoints" / "step-00000004")
    for name in ("../step-00000002", ".", "../../checkpoints/step-00000002"):
        assert run_of(Path(name)) == run_dir
        assert main(["generate", name, *GENERATE]) == 0
    assert run_of(run_dir) == run_dir


def test_a_checkpoint_that_was_copied_out_takes_a_tokenizer_of_its_own(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "checkpoints" / "step-00000004"
    shutil.copytree(run_dir / "checkpoints" / "step-00000004", alone)
    assert main(["generate", str(alone), *GENERATE]) == 2
    assert f"copy the folder tokenizer of its run to {alone}/tokenizer" in capsys.readouterr().err
    shutil.copytree(run_dir / "tokenizer", alone / "tokenizer")
    assert main(["generate", str(alone), *GENERATE]) == 0
    (alone / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": 65}', encoding="utf-8")
    assert main(["generate", str(alone), *GENERATE]) == 2
    assert f"another tokenizer in {alone}/tokenizer" in capsys.readouterr().err
    assert main(["train", f"--run.dir={alone}", "--resume"]) == 2
    assert "put it into checkpoints/ of its run" in capsys.readouterr().err


def test_a_run_without_its_tokenizer_says_where_it_belongs(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    shutil.rmtree(copy / "tokenizer")
    assert main(["generate", str(copy), *GENERATE]) == 2
    assert f"prepared corpus to {copy}/tokenizer" in capsys.readouterr().err
    corpus = next((run_dir.parent / "cache").glob("*/corpus.json")).parent
    shutil.copytree(corpus / "tokenizer", copy / "tokenizer")
    assert main(["generate", str(copy), *GENERATE]) == 0


@pytest.mark.slow
def test_an_export_is_evaluated_as_its_run_was_trained(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run_dir), str(tmp_path / "model")]) == 0
    for target in (run_dir, tmp_path / "model"):
        capsys.readouterr()
        assert main(["eval", str(target), f"--data={run_dir.parent / 'corpus.txt'}", "--device=cpu"]) == 0
        assert "not kept apart, as trained" in capsys.readouterr().out
