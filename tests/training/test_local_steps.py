"""Runs whose copies train alone for some steps: they meet before each checkpoint, and go on under any layout."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from distributed import spawn
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main
from scrimp.optim.outer import Round
from scrimp.planner import Plan
from scrimp.training.callbacks.local_steps import exchange_text
from scrimp.training.checkpoint import CheckpointStore

STEPS, HALF = 10, 5
SETTINGS = [
    f"--train.steps={STEPS}",
    f"--checkpoint.every={HALF}",
    "--checkpoint.keep-last=4",
    "--evaluation.every=4",
    "--train.micro-batch=1",
    "--optimizer.clip=0.5",
    "--outer.every=3",
]
STALE = ["--outer.overlap", "--outer.lr=1", "--outer.momentum=0.5"]


def command(rank: int, words: Sequence[str]) -> int:
    return main(list(words))


def on_ranks(ranks: int, folder: Path, words: Sequence[str]) -> None:
    """In processes of its own: what a run has left behind in one would be counted as another's."""
    folder.mkdir()
    assert spawn(ranks, command, folder, words) == [0] * ranks


def goes_on(run: Path, at: Path, *more: str) -> list[str]:
    shutil.copytree(run, at)
    return ["train", f"--run.dir={at}", f"--resume-from={HALF}", *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local-steps")
    corpus = write_corpus(folder)
    words = {
        "two copies": ["--layout.dp=2"],
        "stale": [*STALE, "--layout.dp=2"],
        "bytes": ["--outer.exchange=fp8"],  # a copy on each rank is what `outer.every` asks for
        "stale bytes": [*STALE, "--outer.exchange=fp8", "--layout.dp=2"],
        "added up": ["--outer.every=0", "--layout.dp=2"],
    }
    for name, more in words.items():
        on_ranks(2, folder / f"{name} ranks", flags(corpus, folder / name, *SETTINGS, *more))
    for name in ("two copies", "stale"):
        on_ranks(2, folder / f"{name} again ranks", goes_on(folder / name, folder / f"{name} again"))
    return folder


def loss_of(run: Path) -> float:
    return losses(run)[STEPS]


def tensors_of(run: Path, step: int) -> dict[str, bytes]:
    (checkpoint,) = (
        one for one in CheckpointStore(run, keep_last=1, keep_every=0).complete() if one.step == step
    )
    return {name: tensor.numpy().tobytes() for name, tensor in checkpoint.tensors() if name != "random.torch"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two copies", "stale"])
def test_a_run_goes_on_bit_for_bit(runs: Path, name: str) -> None:
    assert losses(runs / f"{name} again") == losses(runs / name)
    assert tensors_of(runs / f"{name} again", STEPS) == tensors_of(runs / name, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two copies", "stale", "bytes"])
def test_copies_learn_about_as_much_alone(runs: Path, name: str) -> None:
    first = losses(runs / name)[1]
    assert first == losses(runs / "added up")[1]
    gained = first - loss_of(runs / "added up")
    assert first - loss_of(runs / name) > 0.5 * gained
    assert losses(runs / name) != losses(runs / "added up")


@pytest.mark.slow
def test_a_checkpoint_holds_one_of_everything(runs: Path) -> None:
    found = tensors_of(runs / "two copies", HALF)
    plain = tensors_of(runs / "added up", HALF)
    assert {name for name in found if not name.startswith("outer.")} == set(plain)
    momenta = {name for name in found if name.startswith("outer.") and name.endswith(".momentum")}
    assert momenta == {
        f"outer.{name.removeprefix('model.')}.momentum" for name in plain if name.startswith("model.")
    }
    assert all(any(found[name]) for name in momenta)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, []), (4, ["--layout.dp=2"]), (4, ["--layout.dp=2", "--layout.pp=2"])]
)
def test_a_run_goes_on_with_other_copies(
    runs: Path, tmp_path: Path, ranks: int, layout: Sequence[str]
) -> None:
    words = goes_on(runs / "two copies", tmp_path / "run", *layout)
    if ranks == 1:
        assert main(words) == 0
    else:
        on_ranks(4, tmp_path / "ranks", words)
    assert sorted(losses(tmp_path / "run")) == list(range(1, STEPS + 1))
    wanted = losses(runs / "two copies")
    # Shards and stages of two copies add up the same numbers in another order; one copy learns from twice the tokens.
    near = 1e-5 if ranks == 4 else 0.05
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=near)
    if "--layout.pp=2" in layout:  # of shards in tests/runtime/parallel/test_shared_memory.py
        check_account(tmp_path / "run", after=HALF)


@pytest.mark.slow
def test_what_the_exchange_took_is_recorded(runs: Path) -> None:
    events = [one for one in records(runs / "two copies", "events.jsonl") if one["kind"] == "outer"]
    # Steps 3, 4 (an evaluation), 5 (a checkpoint), 8: of these a whole round ends at 3 and 8 alone.
    assert [one["step"] for one in events] == [3, 8]
    assert all(one["round"]["exchange_s"] > 0 for one in events)
    waits = [one["step"] for one in records(runs / "two copies") if one.get("exchange_wait_s")]
    assert waits == [3, 8]


@pytest.mark.slow
def test_the_account_covers_what_is_counted(runs: Path) -> None:
    for name in ("two copies", "stale", "bytes", "stale bytes"):
        check_account(runs / name)


def check_account(run: Path, *, after: int = 0) -> None:
    counted = max(one.get("tensor_peak_bytes") or 0 for one in records(run) if one["step"] > after)
    predicted = Plan.read(run / "plan.json").predicted.peak_device_bytes
    assert predicted is not None
    assert 0.6 * predicted < counted <= 1.1 * predicted, (counted, predicted)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["evaluation.every", "checkpoint.every"])
def test_steps_at_which_copies_meet_stay(
    runs: Path, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = goes_on(runs / "two copies", tmp_path / "run", f"--{key}=1")
    assert main(words) == 2
    assert f"{key} = 1 (the run has {4 if key == 'evaluation.every' else HALF})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--optimizer.moments=8bit"], "optimizer.moments 8bit is not carried out beside outer.every"),
        (["--memory.optimizer=host"], "memory.optimizer host is not carried out beside outer.every"),
        (["--precision=snip"], "precision snip is not carried out beside outer.every"),
        (
            ["--train.parameters=bf16", "--precision=bf16", "--optimizer.master-weights=false"],
            "optimizer.master_weights false is not carried out beside outer.every",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path / "none.txt", tmp_path / "run", *SETTINGS, *words)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Round(8, 4.0, 1.0, 1.0), "8 local steps took 4.00 s, an exchange 1.00 s: 20% of the time"),
        (Round(8, 4.0, 1.0, 0.0), "8 local steps took 4.00 s, an exchange 1.00 s, hidden behind them"),
        (
            Round(8, 4.0, 6.0, 2.0),
            "8 local steps took 4.00 s, an exchange 6.00 s, of which 2.00 s were waited for: "
            "outer.every 12 would hide it",
        ),
    ],
)
def test_the_condition_for_hiding_the_exchange_is_said(found: Round, says: str) -> None:
    assert exchange_text(found) == says
