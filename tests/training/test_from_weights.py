"""A run that begins with the weights and the optimizer's states of another goes on as that one would have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import flags, losses, scrimp, write_corpus

from scrimp.cli import main

SEQUENCE = 64
SAME = [
    f"--train.batch-tokens={SEQUENCE}",
    "--train.micro-batch=1",
    "--schedule.name=constant",
    "--schedule.warmup-steps=1",
    "--optimizer.lr=2e-3",
    "--evaluation.tokens=64",
    "--evaluation.every=0",
]


def one_sample(folder: Path) -> tuple[Path, Path]:
    """Text that fills one sequence, so that all batches are the same, and some to evaluate on."""
    text, held_out = folder / "corpus.txt", folder / "held_out.txt"
    text.write_text(
        "the quick brown fox jumps over the lazy dog and then sleeps well"[:SEQUENCE], encoding="utf-8"
    )
    held_out.write_text(
        "some other words, of which nothing is learned here, and quite a few more of them" * 2
    )
    return text, held_out


def train(folder: Path, name: str, *more: str) -> dict[int, float]:
    """The losses of a run on the one sample."""
    text, held_out = one_sample(folder)
    assert main(flags(text, folder / name, f"--data.held-out={held_out}", *SAME, *more)) == 0
    return losses(folder / name)


OWN = """
import torch


class Decaying(torch.optim.AdamW):
    elementwise = True

    def __init__(self, parameters, lr, **ignored):
        super().__init__(parameters, lr=lr, weight_decay=5.0)


class Slowing(torch.optim.Optimizer):
    # Its steps become smaller by their number.
    elementwise = True

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.add_(p.grad.sign(), alpha=-group["lr"] / state["count"])
"""


@pytest.mark.parametrize(
    "settings",
    [
        [],
        pytest.param(["--optimizer.moments=8bit"], marks=pytest.mark.slow),
        pytest.param(["--optimizer.name=muon"], marks=pytest.mark.slow),
        pytest.param(["--precision=bf16", "--train.parameters=bf16"], marks=pytest.mark.slow),
    ],
)
def test_states_go_over_with_the_weights_again_and_again(settings: list[str], tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", "--train.steps=8", *settings)
    train(tmp_path, "first", "--train.steps=3", *settings)
    onward = ["--optimizer.from-weights", *settings]
    second = train(tmp_path, "second", "--train.steps=2", f"--model.weights={tmp_path / 'first'}", *onward)
    third = train(tmp_path, "third", "--train.steps=3", f"--model.weights={tmp_path / 'second'}", *onward)
    assert [second[step] for step in (1, 2)] == [whole[step] for step in (4, 5)]
    assert [third[step] for step in (1, 2, 3)] == [whole[step] for step in (6, 7, 8)]
    fresh = train(tmp_path, "fresh", "--train.steps=3", f"--model.weights={tmp_path / 'first'}", *settings)
    assert fresh[1] == whole[4]
    assert fresh[3] != whole[6], "empty states give other updates"


def test_a_run_that_took_states_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    train(tmp_path, "first", "--train.steps=3")
    words = ["--train.steps=4", f"--model.weights={tmp_path / 'first'}", "--optimizer.from-weights"]
    second = train(tmp_path, "second", "--checkpoint.every=2", *words)
    run = tmp_path / "second"
    assert main(["verify", str(run)]) == 0
    assert main(["train", f"--run.dir={run}", "--resume-from=2"]) == 0
    assert losses(run) == second


@pytest.mark.slow
def test_an_average_goes_over_with_the_weights_that_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = ["--optimizer.name=schedule-free"]
    whole = train(tmp_path, "whole", "--train.steps=6", *free)
    train(tmp_path, "first", "--train.steps=3", *free)
    onward = [f"--model.weights={tmp_path / 'first'}", "--train.steps=3", *free]
    second = train(tmp_path, "second", "--optimizer.from-weights", *onward)
    assert [second[step] for step in (1, 2, 3)] == [whole[step] for step in (4, 5, 6)]
    fresh = train(tmp_path, "fresh", *onward)
    assert fresh[1] != whole[4], "a run without its states begins at the average"
    text, _ = one_sample(tmp_path)
    words = [*SAME, *onward, "--optimizer.from-weights", "--optimizer.beta1=0.8"]
    assert main(flags(text, tmp_path / "other", *words)) == 2
    assert "optimizer.beta1 = 0.8 (the run has 0.9)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_ranks_take_the_states_of_a_run_of_one_process(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    common = ["--train.steps=3", "--optimizer.lr=2e-3", "--evaluation.every=0"]
    assert main(flags(corpus, tmp_path / "first", *common)) == 0
    onward = [*common, f"--model.weights={tmp_path / 'first'}", "--optimizer.from-weights"]
    assert main(flags(corpus, tmp_path / "alone", *onward)) == 0
    ranks = flags(corpus, tmp_path / "ranks", *onward, "--layout.fsdp=2")
    done = scrimp("launch", "--ranks=2", *ranks)
    assert done.returncode == 0, done.stderr
    alone, together = losses(tmp_path / "alone"), losses(tmp_path / "ranks")
    assert [together[step] for step in (1, 2, 3)] == pytest.approx(
        [alone[step] for step in (1, 2, 3)], rel=1e-5
    )


@pytest.mark.parametrize("name", ["Slowing", pytest.param("Decaying", marks=pytest.mark.slow)])
def test_states_and_numbers_of_an_own_optimizer_go_over_and_making_room_for_them_moves_no_weight(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = [f"--optimizer.name={tmp_path / 'own.py'}:{name}", "--trust-code"]
    whole = train(tmp_path, "whole", "--train.steps=4", *own)
    train(tmp_path, "first", "--train.steps=2", *own)
    words = [f"--model.weights={tmp_path / 'first'}", "--optimizer.from-weights", *own]
    second = train(tmp_path, "second", "--train.steps=2", *words)
    assert [second[1], second[2]] == [whole[3], whole[4]]


def test_states_that_are_not_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, held_out = one_sample(tmp_path)
    train(tmp_path, "first", "--train.steps=2")
    common = [f"--data.held-out={held_out}", *SAME, "--train.steps=2", "--optimizer.from-weights"]
    export = tmp_path / "exported"
    assert main(["export", str(tmp_path / "first"), str(export)]) == 0
    for words, message in (
        ([], "optimizer.from_weights needs a run"),
        ([f"--model.weights={export}"], "which is no Scrimp run"),
        (
            [f"--model.weights={tmp_path / 'first'}", "--optimizer.moments=8bit"],
            "optimizer.moments = 8bit (the run has fp32)",
        ),
        (
            [f"--model.weights={tmp_path / 'first'}", "--optimizer.name=muon"],
            "optimizer.name = muon (the run has adamw)",
        ),
    ):
        assert main(flags(text, tmp_path / "second", *common, *words)) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "second").exists()
