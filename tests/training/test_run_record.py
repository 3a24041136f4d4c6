"""A run's tokenizer is the one that it began with, or the run is not used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import TINY, flags, losses, write_corpus

from scrimp.cli import main
from scrimp.data import load_tokenizer
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training.run_record import make_record, read_record, write_record

MORE = ("--train.steps=6", "--checkpoint.every=2", "--evaluation.every=0", "--data.vocab-size=300")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("record"))


@pytest.fixture(scope="module")
def whole(corpus: Path) -> Path:
    """A run with a BPE of its own."""
    run_dir = corpus.parent / "whole"
    assert main([word for word in flags(corpus, run_dir, *MORE) if word != TINY[1]]) == 0
    return run_dir


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def swap_ids(run_dir: Path) -> None:
    """Two pieces of text change places in the vocabulary: a tokenizer that loads, and says other things."""
    path = run_dir / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def add_end(run_dir: Path) -> None:
    """A file that was not there: it says that another token ends a text."""
    path = run_dir / "tokenizer" / "generation_config.json"
    path.write_text('{"eos_token_id": 65}', encoding="utf-8")


def commands(target: Path, corpus: Path, out: Path) -> dict[str, list[str]]:
    return {
        "eval": ["eval", str(target), f"--data={corpus}", "--device=cpu"],
        "generate": ["generate", str(target), "--prompt=def", "--device=cpu", "--tokens=4"],
        "export": ["export", str(target), str(out)],
        "train": [
            *["train", "--device=cpu", f"--model.weights={target}", f"--data.source={corpus}"],
            *[f"--data.cache={out.parent}", f"--run.dir={out}", "--train.steps=1"],
        ],
        "resume": ["train", f"--run.dir={target}", "--resume"],
        "verify": ["verify", str(target)],
    }


@pytest.mark.parametrize("alter", [swap_ids, add_end])
@pytest.mark.parametrize("name", ["eval", "generate", "export", "train", "resume", "verify"])
@pytest.mark.every(5)
def test_an_altered_tokenizer_is_refused(
    name: str, alter: object, copy: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(alter)
    alter(copy)
    out = copy.parent / "out"
    assert main(commands(copy, corpus, out)[name]) == 2
    shown = capsys.readouterr()
    assert (
        f"the tokenizer in {copy}/tokenizer is not the one that the run began with" in shown.err + shown.out
    )
    assert not out.exists()


def test_a_tokenizer_that_was_changed_with_its_record_is_refused_by_the_checkpoint(
    copy: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swap_ids(copy)
    record = read_record(copy)
    assert record is not None
    write_record(copy, make_record(load_tokenizer(copy / "tokenizer"), record.data, {}))
    for name in ("eval", "export", "resume", "verify"):
        assert main(commands(copy, corpus, copy.parent / "out")[name]) == 2
        shown = capsys.readouterr()
        assert "run.json is not the one of the run's checkpoints" in shown.err + shown.out
    (copy / "run.json").unlink()
    assert main(commands(copy, corpus, copy.parent / "out")["eval"]) == 2
    assert "run.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"scrimp_run": 1e999}', "altered"])
def test_a_damaged_record_is_named(
    copy: Path, corpus: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "run.json"
    if text == "altered":
        text = path.read_text(encoding="utf-8").replace('"data": "', '"data": "0')
    path.write_text(text, encoding="utf-8")
    assert main(commands(copy, corpus, copy.parent / "out")["generate"]) == 2
    shown = capsys.readouterr().err
    assert str(path) in shown
    assert "Traceback" not in shown


@pytest.mark.slow
def test_a_run_of_an_earlier_version_gets_its_record_when_it_is_resumed(
    copy: Path, whole: Path, corpus: Path
) -> None:
    forget(copy)
    assert main(commands(copy, corpus, copy.parent / "out")["export"]) == 0
    assert not (copy / "run.json").exists()
    assert main(commands(copy, corpus, copy.parent / "out")["resume"]) == 0
    assert (copy / "run.json").read_bytes() == (whole / "run.json").read_bytes()
    swap_ids(copy)
    assert main(commands(copy, corpus, copy.parent / "out")["eval"]) == 2


def test_a_run_of_an_earlier_version_with_another_tokenizer_than_its_data_gets_none(
    copy: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget(copy)
    swap_ids(copy)
    assert main(commands(copy, corpus, copy.parent / "out")["resume"]) == 2
    assert "is not the one of the run's data" in capsys.readouterr().err
    assert not (copy / "run.json").exists()


@pytest.mark.slow
def test_a_tokenizer_that_is_gone_is_put_back_by_resuming(copy: Path, whole: Path, corpus: Path) -> None:
    shutil.rmtree(copy / "tokenizer")
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    assert main(commands(copy, corpus, copy.parent / "out")["resume"]) == 0
    for path in (whole / "tokenizer").iterdir():
        assert (copy / "tokenizer" / path.name).read_bytes() == path.read_bytes()
    assert losses(copy) == losses(whole)


@pytest.mark.parametrize("name", ["eval", "generate", "export", "train", "verify"])
@pytest.mark.every(6)
def test_a_lost_record_is_computed_again(
    name: str, copy: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "run.json").unlink()
    assert main(commands(copy, corpus, copy.parent / "out")[name]) == 0
    assert not (copy / "run.json").exists()
    if name == "verify":
        assert "the next --resume writes it" in capsys.readouterr().out


@pytest.mark.slow
def test_a_lost_record_is_written_again_by_resuming(copy: Path, whole: Path, corpus: Path) -> None:
    (copy / "run.json").unlink()
    assert main(commands(copy, corpus, copy.parent / "out")["resume"]) == 0
    assert (copy / "run.json").read_bytes() == (whole / "run.json").read_bytes()


def test_a_lost_record_is_named_where_the_tokenizer_is_another(
    copy: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "run.json").unlink()
    add_end(copy)
    for name in ("eval", "resume", "verify"):
        assert main(commands(copy, corpus, copy.parent / "out")[name]) == 2
        shown = capsys.readouterr()
        assert "run.json is missing" in shown.err + shown.out
        assert f"another tokenizer in {copy}/tokenizer" in shown.err + shown.out
    assert not (copy / "run.json").exists()


@pytest.mark.slow
def test_other_data_are_refused_before_the_first_checkpoint(
    copy: Path, corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    shutil.copyfile(corpus, text)
    run_dir = tmp_path / "early"
    assert main(flags(text, run_dir, "--train.steps=2")) == 0
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "events.jsonl").unlink()
    (run_dir / "metrics.jsonl").unlink()
    text.write_text(text.read_text(encoding="utf-8").replace("self", "that"), encoding="utf-8")
    for more in ([], ["--restart"]):
        capsys.readouterr()
        assert main(["train", f"--run.dir={run_dir}", "--resume", *more]) == 2
        assert "the data are not those that the run was trained on" in capsys.readouterr().err
    shutil.copyfile(corpus, text)
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0


def test_a_checkpoint_of_other_data_than_its_run_is_named(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_state(copy / "checkpoints" / "step-00000004", data_digest="0" * 64)
    assert main(["verify", str(copy)]) == 2
    assert "step-00000004 was trained on other data than its run" in capsys.readouterr().out


def change_state(folder: Path, **values: object) -> None:
    """Change values in the state of a checkpoint; None removes one. Its checksums are made again."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8")) | values
    state = {key: value for key, value in state.items() if value is not None}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    manifests.seal(folder, state["position"]["step"], not_finite=(), skipped_steps=0)


def forget(run_dir: Path) -> None:
    """Make the run one of a version without records."""
    (run_dir / "run.json").unlink()
    for folder in (run_dir / "checkpoints").iterdir():
        change_state(folder, run_digest=None)
