"""Run folders under contention, after kills and with edited files: nothing is mixed up or lost."""

import errno
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from tiny_run import TINY, flags, losses, records, scrimp, write_corpus

from scrimp.cli import main
from scrimp.config import Config, RunConfig
from scrimp.errors import CheckpointError, StorageError
from scrimp.planner import Plan
from scrimp.training.checkpoint_writing import Writing
from scrimp.training.run_folder import RunLock, claim_new_folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def finished(corpus: Path) -> Path:
    run_dir = corpus.parent / "finished"
    assert (
        main(flags(corpus, run_dir, "--train.steps=6", "--checkpoint.every=2", "--checkpoint.keep-last=3"))
        == 0
    )
    return run_dir


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


def test_a_folder_in_use_is_refused_and_free_again_when_its_process_dies(tmp_path: Path) -> None:
    ready, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        with RunLock(tmp_path / "run"):
            os.write(says, b".")
            time.sleep(60)
        os._exit(1)
    assert os.read(ready, 1) == b"."
    with pytest.raises(StorageError, match="in use"), RunLock(tmp_path / "run"):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with RunLock(tmp_path / "run"):
        pass


def test_runs_that_start_together_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with claim_new_folder(Config()) as first, claim_new_folder(Config()) as second:
        assert first != second
    named = Config(run=RunConfig(dir=tmp_path / "named"))
    with claim_new_folder(named), pytest.raises(StorageError, match="in use"), claim_new_folder(named):
        pass


@pytest.mark.slow
def test_a_folder_that_was_used_while_the_data_were_prepared_is_refused(finished: Path) -> None:
    claim = claim_new_folder(Config(run=RunConfig(dir=finished)))
    with pytest.raises(CheckpointError, match="holds a run already"), claim:
        pass


@pytest.mark.slow
def test_a_run_killed_before_its_configuration_was_there_can_be_started_again(
    corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "tokenizer").mkdir(parents=True)
    (run_dir / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    (run_dir / ".plan.json.partial").write_text("{", encoding="utf-8")
    (run_dir / ".lock").touch()
    assert main(flags(corpus, run_dir, "--train.steps=1")) == 0


def test_the_same_command_with_resume_goes_on(
    corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus.parent)
    words = [
        *["train", *TINY, "--data.source=corpus.txt", "--data.cache=cache", f"--run.dir={tmp_path / 'run'}"],
        *["--precision=auto", "--train.steps=6", "--checkpoint.every=2"],
    ]
    assert main(words) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert main([*words, "--resume"]) == 0
    assert losses(tmp_path / "run") == losses(finished)


def test_an_edited_configuration_is_refused_on_resume(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "edited"
    shutil.copytree(finished, run_dir)
    text = (run_dir / "config.toml").read_text(encoding="utf-8")
    (run_dir / "config.toml").write_text(text.replace("seed = 0", "seed = 3"), encoding="utf-8")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 2
    assert "run.seed = 3 (the checkpoint has 0)" in capsys.readouterr().err


def test_a_change_that_resuming_allows_is_kept_with_the_reasons(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "changed"
    shutil.copytree(finished, run_dir)
    assert main(["train", f"--run.dir={run_dir}", "--resume", "--evaluation.tokens=128"]) == 0
    text = (run_dir / "config.toml").read_text(encoding="utf-8")
    assert "tokens = 128\n" in text
    assert "warmup_steps = 1  # a twentieth of 6 steps" in text


@pytest.mark.slow
def test_a_folder_called_stdlib_does_not_replace_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "stdlib" / "one.txt").write_text("one\n\ntwo", encoding="utf-8")
    assert main(["train", *TINY, f"--data.cache={tmp_path / 'c'}", "--run.dir=run", "--train.steps=1"]) == 0
    assert 'source = "stdlib"' in (tmp_path / "run" / "config.toml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_failed_checkpoint_does_not_keep_the_last_one_from_being_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One background write meets a full disk; space is there again at the end."""
    write, failures = Writing.write, []

    def full_once(self: Writing) -> None:
        if self.step == 4 and not failures:
            failures.append(self.step)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self)

    monkeypatch.setattr(Writing, "write", full_once)
    run_dir = tmp_path / "run"
    assert (
        main(flags(corpus, run_dir, "--train.steps=5", "--checkpoint.every=4", "--evaluation.every=0")) == 0
    )
    assert failures == [4]
    kinds = [event["kind"] for event in records(run_dir, "events.jsonl")]
    assert "checkpoint-failed" in kinds
    assert (run_dir / "checkpoints" / "step-00000005" / "manifest.json").exists()
    assert (run_dir / "report.html").exists()


def test_weights_without_their_tokenizer_are_not_trained_on_other_ids(
    finished: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "exported"
    assert main(["export", str(finished), str(exported)]) == 0
    (exported / "tokenizer.json").unlink()
    words = ["train", "--device=cpu", f"--model.weights={exported}", f"--data.source={corpus}"]
    assert main([*words, f"--run.dir={tmp_path / 'new'}", "--train.steps=1"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_loss_chunk_and_a_small_context_pass_the_proof(corpus: Path, tmp_path: Path) -> None:
    assert main(flags(corpus, tmp_path / "chunk", "--train.steps=1", "--train.loss-chunk=4")) == 0
    more = ("--train.steps=1", "--model.context=4", "--train.sequence=4", "--train.batch-tokens=16")
    assert main(flags(corpus, tmp_path / "context", *more)) == 0


def test_a_path_that_cannot_be_one_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["train", "--data.source=~nosuchuser/x"],
        ["train", f"--data.source={'x' * 5000}"],
        ["train", f"--run.dir={tmp_path / ('x' * 300)}", *TINY],
    ):
        assert main(words) == 2
        assert "error:" in capsys.readouterr().err


@pytest.mark.slow
def test_a_compiler_that_does_not_work_is_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    done = scrimp(*flags(corpus, tmp_path / "run", "--train.steps=1", "--train.compile=on"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "--train.compile off" in done.stderr


@pytest.mark.slow
def test_the_plan_of_a_ready_tokenizer_counts_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--data.tokenizer=bytes", "--device=cpu"]) == 0
    rows = 320  # 257 entries, rounded up to a multiple of 64
    assert f"{3_000_384 - (4096 - rows) * 192:,}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_shown_before_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model.preset=llama-3-70b", "--device=cpu"]) == 2
    out = capsys.readouterr()
    assert "optimizer states" in out.out
    assert "does not fit" in out.err


def test_several_ranks_are_refused_by_name(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(flags(corpus, tmp_path / "run", "--train.steps=1")) == 2
    assert "WORLD_SIZE=2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_waiting_for_the_lock_is_not_waiting_forever(tmp_path: Path) -> None:
    began = time.monotonic()
    with RunLock(tmp_path), pytest.raises(StorageError), RunLock(tmp_path):
        pass
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_run_goes_on_when_the_folder_of_its_tokenizer_is_gone(
    finished: Path, corpus: Path, tmp_path: Path
) -> None:
    tokenizer, run_dir = tmp_path / "tokenizer", tmp_path / "run"
    shutil.copytree(finished / "tokenizer", tokenizer)
    more = ("--train.steps=6", "--checkpoint.every=2")
    words = [word for word in flags(corpus, run_dir, *more) if word != TINY[1]]
    assert main([*words, f"--data.tokenizer={tokenizer}", "--checkpoint.keep-last=3"]) == 0
    shutil.rmtree(tokenizer)
    for step in (6, 4):  # the second time config.toml names the run's own copy, the checkpoint the folder
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}")
        assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert losses(run_dir) == losses(finished)


@pytest.mark.slow
def test_a_finished_run_is_not_written_again(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "done"
    shutil.copytree(finished, run_dir)
    manifest = run_dir / "checkpoints" / "step-00000006" / "manifest.json"
    written = manifest.stat().st_mtime_ns
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert manifest.stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_budget_that_changes_on_resume_stands_in_the_plan(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "budget"
    shutil.copytree(finished, run_dir)
    assert main(["train", f"--run.dir={run_dir}", "--resume", "--budget.device-memory=10GB"]) == 0
    assert Plan.read(run_dir / "plan.json").budget == {"device_memory": 10_000_000_000}


@pytest.mark.slow
def test_the_plan_of_a_finished_run_can_be_shown(corpus: Path, tmp_path: Path) -> None:
    words = [word for word in flags(corpus, tmp_path / "run", "--train.steps=1") if word != TINY[1]]
    assert main(words) == 0  # a BPE of 4,096 that ends early: the model has fewer rows
    assert main(["plan", str(tmp_path / "run" / "config.toml")]) == 0
