"""Stages: each goes on from the one before, a killed one where it was; what cannot be is refused before the first."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, losses, records, scrimp, write_corpus

import scrimp as scrimp_package
from scrimp.cli import main
from scrimp.training.metrics import MetricsLog
from scrimp.training.run_folder import saved_config

STAGES = """
[[stages]]
train.steps = 4

[[stages]]
data.source = "{other}"
train.steps = 3

[[stages]]
data.source = "{other}"
run.seed = 1
train.steps = 2
optimizer.from_weights = false
precision = "bf16"
train.parameters = "bf16"
"""
COMMON = ["--optimizer.lr=2e-3", "--evaluation.every=0", "--train.micro-batch=2"]


def words(folder: Path, *more: str, text: str = STAGES, run: str = "run") -> list[str]:
    """The command of a training in stages on two texts."""
    corpus, other = write_corpus(folder), folder / "other.txt"
    other.write_text("\n\n".join(f"{number} times {number} is {number**2}." for number in range(2000)))
    (folder / "stages.toml").write_text(f'data.source = "{corpus}"\n{text.format(other=other)}')
    cache = f"--data.cache={folder / 'cache'}"
    command = ["train", str(folder / "stages.toml"), *TINY, *COMMON, cache]
    return [*command, f"--run.dir={folder / run}", *more]


def one_by_one(folder: Path) -> list[dict[int, float]]:
    """The losses of the same runs, started by hand."""
    corpus, other = folder / "corpus.txt", folder / "other.txt"
    common = ["train", *TINY, *COMMON, f"--data.cache={folder / 'cache'}"]
    own: list[list[str]] = [
        [f"--data.source={corpus}", "--train.steps=4"],
        [f"--data.source={other}", "--train.steps=3", "--optimizer.from-weights"],
        [f"--data.source={other}", "--train.steps=2", "--run.seed=1"],
    ]
    own[1].append(f"--model.weights={folder / 'hand-1'}")
    own[2] += [f"--model.weights={folder / 'hand-2'}", "--precision=bf16", "--train.parameters=bf16"]
    found = []
    for number, more in enumerate(own, start=1):
        run = folder / f"hand-{number}"
        assert main([*common, f"--run.dir={run}", *more]) == 0
        found.append(losses(run))
    return found


OFTEN = ("--checkpoint.every=2", "--checkpoint.keep-last=9")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with a training that nothing stopped, and what it said."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(words(folder, *OFTEN)) == 0
    return folder, said.getvalue()


def test_stages_are_the_runs_that_one_would_start_by_hand(whole: tuple[Path, str]) -> None:
    """The last one has other formats, and so another plan, and empty states."""
    folder, said = whole
    assert "stage 3 of 3: " in said
    runs = [folder / "run" / f"stage-{number}" for number in (1, 2, 3)]
    assert [losses(run) for run in runs] == one_by_one(folder)
    plans = [(run / "plan.json").read_text() for run in runs]
    assert '"bf16"' in plans[2]
    assert '"bf16"' not in plans[0]
    assert {(run / "tokenizer" / "tokenizer.json").read_text() for run in runs} == {
        (runs[0] / "tokenizer" / "tokenizer.json").read_text()
    }
    assert main(words(folder, *OFTEN)) == 0  # nothing is left to do
    assert [len(losses(run)) for run in runs] == [4, 3, 2]
    assert [one["kind"] for one in records(runs[0], "events.jsonl")].count("resume") == 0


@pytest.mark.parametrize(("stage", "stop"), [(1, 3), (2, 1)])
@pytest.mark.every(2)
def test_a_killed_training_goes_on_in_its_stage_with_the_same_command(
    stage: int, stop: int, tmp_path: Path, whole: tuple[Path, str]
) -> None:
    """After a checkpoint, and before the first one of its stage: batches and losses of later steps are the same."""
    command = words(tmp_path, *OFTEN)
    kill_at(tmp_path / "run" / f"stage-{stage}", stop, command)
    begun = sorted(path.name for path in (tmp_path / "run").glob("stage-*"))
    assert begun == [f"stage-{number}" for number in range(1, stage + 1)]
    assert main(command) == 0
    for number, steps in ((1, 4), (2, 3), (3, 2)):
        expected = losses(whole[0] / "run" / f"stage-{number}")
        assert losses(tmp_path / "run" / f"stage-{number}") == expected, f"stage {number}"
        assert len(expected) == steps


def kill_at(run: Path, step: int, command: list[str]) -> None:
    """Run a command in a process that is killed as soon as a run's log has a step."""
    pid = os.fork()
    if pid == 0:
        own = MetricsLog.step

        def stops(self: MetricsLog, record: dict[str, Any]) -> None:
            own(self, record)
            log = run / "metrics.jsonl"
            if log.exists() and log.read_bytes().count(b"\n") >= step:
                os.kill(os.getpid(), signal.SIGKILL)

        MetricsLog.step = stops  # type: ignore[method-assign, assignment]
        os._exit(main(command))
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


def test_a_stop_by_signal_is_said_and_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = MetricsLog.step

    def stops(self: MetricsLog, record: dict[str, Any]) -> None:
        own(self, record)
        if (tmp_path / "run" / "stage-2").exists() and record["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsLog, "step", stops)
    assert main(words(tmp_path)) == 128 + signal.SIGTERM
    assert f"with --run.dir {tmp_path / 'run'}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "stage-3").exists()
    monkeypatch.undo()
    assert main(words(tmp_path, "--resume")) == 0
    assert [len(losses(tmp_path / "run" / f"stage-{number}")) for number in (1, 2, 3)] == [4, 3, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[stages]]\n[[stages]]\ndata.source = 'gone.txt'\n",
            "stage 2: there is no file or folder gone.txt",
        ),
        ("[[stages]]\n[[stages]]\ndata.held_out = 'gone.txt'\n", "stage 2: there is no file or folder"),
        ("[[stages]]\n[[stages]]\ndata.mix = 'stdlib:json=1,gone.txt=1'\n", "stage 2: there is no file"),
        ("[[stages]]\n[[stages]]\nprecision = 'fp3'\n", "stage 2: "),
        ("[[stages]]\n[[stages]]\noptimizer.clip = -1.0\n", "stage 2: optimizer.clip is out of range"),
        (
            "[[stages]]\n[[stages]]\noptimizer.moments = '8bit'\n",
            "stage 2: the optimizer's states of stage 1 are not those that this run keeps",
        ),
        ("[[stages]]\n[[stages]]\nbudget.device_memory = '1MB'\n", "stage 2: "),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_stage(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(tmp_path, text=text)
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_shards_of_another_tokenizer_are_refused_before_the_first_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tmp_path / "shards"
    corpus = write_corpus(tmp_path)
    assert main(["prepare", str(corpus), str(shards), "--bpe-vocab-size=300"]) == 0
    text = f"[[stages]]\n[[stages]]\ndata.source = '{shards}'\n"
    assert main(words(tmp_path, text=text)) == 2  # bytes
    assert "made with another tokenizer" in capsys.readouterr().err
    assert main([*words(tmp_path, text=text), "--data.tokenizer=auto"]) == 2
    assert "have a tokenizer of their own" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_folders_that_hold_something_else_and_changed_stages_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = "[[stages]]\ntrain.steps = 2\n[[stages]]\ntrain.steps = 1\n"
    command = words(tmp_path, text=two)
    assert main([*command, "--resume"]) == 2
    assert "holds no stage to go on with" in capsys.readouterr().err
    assert main(command) == 0
    for text, message in (
        ("[[stages]]\ntrain.steps = 3\n[[stages]]\n", "stage 1: the configuration is not the one of the run"),
        ("[[stages]]\ntrain.steps = 2\n", "expected a new folder, or one with stages 1 to 1"),
    ):
        capsys.readouterr()
        assert main(words(tmp_path, text=text)) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert message.replace("expected a", "expected a") in said
    assert main(words(tmp_path, text=two, run="run/stage-1")) == 2
    assert "holds a run without stages already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_without_a_name_is_the_next_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [word for word in words(tmp_path, "--train.steps=1") if not word.startswith("--run.dir")]
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(command) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["llama-3m-001", "llama-3m-002"]
    config = saved_config(Path("runs/llama-3m-002/stage-2"))
    assert config.model.weights == tmp_path / "runs" / "llama-3m-002" / "stage-1"


def test_a_dry_run_shows_all_stages_and_starts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words(tmp_path)[1:]]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"stage {number} of 3") for number in (1, 2, 3)]
    parts = [shown[begin:end] for begin, end in zip(places, [*places[1:], len(shown)], strict=True)]
    assert [", bf16" in part for part in parts] == [False, False, True]
    for part, steps in zip(parts, (4, 3, 2), strict=True):
        assert re.search(rf"tokens in the run +{256 * steps:,} ", part)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_python_and_ranks_train_stages_too(tmp_path: Path) -> None:
    command = words(tmp_path, "--train.steps=2")
    done = scrimp("launch", "--ranks=2", *command, "--layout.fsdp=2")
    assert done.returncode == 0, done.stderr
    together = losses(tmp_path / "run" / "stage-2")
    settings = {
        key: value
        for key, _, value in (
            word.removeprefix("--").partition("=") for word in command[2:] if word.startswith("--")
        )
    }
    values: dict[str, Any] = {key.replace("-", "_"): value for key, value in settings.items()}
    numbers = {key: json.loads(value) for key, value in values.items() if value[:1].isdigit()}
    values |= numbers | {"run.dir": str(tmp_path / "alone")}
    values["layout.search"] = False
    values.pop("layout.no_search")
    ended = scrimp_package.train(tmp_path / "stages.toml", values)
    assert ended.run_dir == tmp_path / "alone" / "stage-3"
    alone = losses(tmp_path / "alone" / "stage-2")
    assert [together[step] for step in (1, 2)] == pytest.approx([alone[1], alone[2]], rel=1e-5)
