"""Runs on weighted mixtures: what each source gives, evaluations of each, the same course however it is cut."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import math
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
from chats import conversations, sft_flags, write_chats
from runs_on_ranks import check_same_course, check_same_tensors, on_ranks
from tiny_run import TINY, losses, records

from scrimp.cli import main
from scrimp.cli.trained import load_executable
from scrimp.config import load_config
from scrimp.data import Mixture
from scrimp.data.interleave import Interleave
from scrimp.training.evaluation import Evaluation, evaluate, of_mixture
from scrimp.training.run_data import open_run_corpus
from scrimp.training.trained_weights import open_target
from scrimp.world import ALONE

SHARES = (5, 3, 2)
NAMES = ("inspect.txt", "argparse.txt", "logging.txt")
TOKENS, SEQUENCE, STEPS = 1536, 64, 12


def write_texts(folder: Path) -> str:
    """The mixture of three texts of 100 kB or so that every Python has."""
    for name, module in zip(NAMES, (inspect, argparse, logging), strict=True):
        (folder / name).write_text(inspect.getsource(module), encoding="utf-8")
    weights = ("0.5", "0.3", "0.20")
    return ",".join(f"{folder / name}={weight}" for name, weight in zip(NAMES, weights, strict=True))


def mix_flags(folder: Path, mix: str, run_dir: Path, *more: str) -> list[str]:
    words = [word for word in TINY if "evaluation" not in word]
    return [
        "train", *words, f"--data.mix={mix}", f"--data.cache={folder / 'cache'}", f"--run.dir={run_dir}",
        f"--evaluation.tokens={TOKENS}", f"--train.steps={STEPS}", "--checkpoint.every=6", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder)
    return folder


@pytest.fixture(scope="module")
def finished(texts: Path) -> Path:
    """A run that was never interrupted."""
    assert main(mix_flags(texts, write_texts(texts), texts / "finished")) == 0
    return texts / "finished"


def event(run: Path, kind: str) -> dict[str, Any]:
    return [one for one in records(run, "events.jsonl") if one["kind"] == kind][-1]


def mixture_of(run: Path) -> Mixture:
    corpus = open_run_corpus(load_config(run / "config.toml"), ALONE, progress=False)
    assert isinstance(corpus, Mixture)
    return corpus


def test_a_run_says_what_each_source_gives(finished: Path) -> None:
    config = load_config(finished / "config.toml")
    assert config.data.mix == ",".join(
        f"{finished.parent / name}={share}" for name, share in zip(NAMES, SHARES, strict=True)
    )
    counts = Interleave(SHARES).counts(STEPS * 256 // SEQUENCE)
    sources = event(finished, "mixture")["sources"]
    for number, (source, part) in enumerate(zip(sources, mixture_of(finished).parts, strict=True)):
        assert source["label"] == NAMES[number]
        assert source["share"] == SHARES[number] / 10
        assert source["tokens"] == part.train.num_tokens
        assert source["passes"] == counts[number] / ((part.train.num_tokens - 1) // SEQUENCE)


def test_each_source_is_evaluated_as_it_would_be_alone(finished: Path) -> None:
    last, said = records(finished)[-1], event(finished, "evaluation")
    target = open_target(finished)
    executable = load_executable(target, "cpu")
    for name, part in zip(NAMES, mixture_of(finished).parts, strict=True):
        alone = evaluate(
            executable,
            part.held_out,
            sequence=SEQUENCE,
            micro_batch=1,
            max_tokens=TOKENS // 3,
            mask_documents=True,
        )
        assert alone.num_targets == TOKENS // 3
        assert last[f"eval_loss/{name}"] == pytest.approx(alone.loss, rel=1e-6)
        assert said["sources"][name] == last[f"eval_loss/{name}"]
    weighted = sum(last[f"eval_loss/{name}"] * share / 10 for name, share in zip(NAMES, SHARES, strict=True))
    assert last["eval_loss"] == said["loss"] == pytest.approx(weighted, rel=1e-12)
    assert "held-out loss" in said["reason"]
    assert all(name in said["reason"] for name in NAMES)


def test_bits_per_byte_of_a_mixture_by_hand() -> None:
    """A quarter of the tokens at 2 nats and 4 bytes, the rest at 1 nat and 2 bytes: 1.25 nats and 2.5 bytes a token."""
    found = of_mixture(
        {
            "a": Evaluation(2.0, 2 / math.log(2) / 4, 10, 40.0),
            "b": Evaluation(1.0, 1 / math.log(2) / 2, 30, 60.0),
        },
        (1, 3),
    )
    assert found.loss == 1.25
    assert found.bits_per_byte == pytest.approx(1.25 / math.log(2) / 2.5)
    assert (found.num_targets, found.text_bytes) == (40, 100.0)


def test_a_run_goes_on_bit_for_bit_and_with_no_other_mixture(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    same = write_texts(finished.parent)  # with weights, where the run has shares
    assert main(["train", f"--run.dir={run}", "--resume-from=6", f"--data.mix={same}"]) == 0
    assert losses(run) == losses(finished)
    for key in ("grad_norm", "eval_loss", f"eval_loss/{NAMES[2]}"):
        assert [one.get(key) for one in records(run)] == [one.get(key) for one in records(finished)]
    assert event(run, "resume")["step"] == 6
    capsys.readouterr()
    first, second, third = same.split(",")
    for other in (f"{first},{second},{third}1", f"{second},{first},{third}", f"{first},{second}"):
        assert main(["train", f"--run.dir={run}", "--resume", f"--data.mix={other}"]) == 2
        assert "the configuration is not the one of the run" in capsys.readouterr().err


def test_a_run_goes_on_with_the_text_of_every_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mix = write_texts(tmp_path)
    assert main(mix_flags(tmp_path, mix, tmp_path / "run", "--train.steps=1")) == 0
    text = tmp_path / NAMES[2]
    text.write_text(text.read_text().replace("logger", "Logger"))
    assert main(["train", f"--run.dir={tmp_path / 'run'}", "--resume"]) == 2
    assert "the data are not those that the run was trained on" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_train_on_the_same_mixture(finished: Path, tmp_path: Path) -> None:
    words = mix_flags(finished.parent, write_texts(finished.parent), tmp_path / "two", "--layout.dp=2")
    on_ranks(2, tmp_path / "ranks", words)
    check_same_course(tmp_path / "two", finished)
    check_same_tensors(tmp_path / "two", finished, STEPS)
    for name in NAMES:
        key = f"eval_loss/{name}"
        assert records(tmp_path / "two")[-1][key] == pytest.approx(records(finished)[-1][key], rel=1e-5)


@pytest.mark.slow
def test_conversations_mix(tmp_path: Path) -> None:
    write_chats(tmp_path)
    more = [json.dumps({"messages": chat[:2]}) + "\n" for chat in conversations(40)]
    (tmp_path / "more.jsonl").write_text("".join(more[1:] + more[:1]), encoding="utf-8")
    mix = f"{tmp_path / 'chats.jsonl'}=3,{tmp_path / 'more.jsonl'}=1"
    words = [
        f"--data.mix={mix}" if word.startswith("--data.source") else word
        for word in sft_flags(tmp_path, tmp_path / "run", "--train.steps=15", "--data.held-out=0")
    ]
    assert main(words) == 0
    by_step = losses(tmp_path / "run")
    assert by_step[15] < 0.6 * by_step[1]
    packings = [
        one["reason"] for one in records(tmp_path / "run", "events.jsonl") if one["kind"] == "packing"
    ]
    assert packings[0].startswith("chats.jsonl: 60 conversations in ")
    assert packings[1].startswith("more.jsonl: 40 conversations in ")


@pytest.mark.slow
def test_one_tokenizer_for_texts_and_shards(texts: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    assert main(["prepare", str(texts / NAMES[0]), str(shards), "--bpe-vocab-size=400"]) == 0
    mix = f"{shards}=1,{texts / NAMES[1]}=1"
    words = mix_flags(tmp_path, mix, tmp_path / "run", "--train.steps=1")
    words.remove("--data.tokenizer=bytes")
    assert main(words) == 0
    mixture = mixture_of(tmp_path / "run")
    assert len({part.tokenizer.digest for part in mixture.parts}) == 1
    assert mixture.tokenizer.vocab_size == 400
    assert main(["train", f"--run.dir={tmp_path / 'run'}", "--resume"]) == 0


REFUSED = {
    "one source": ("{first}=1", "data.mix has one source"),
    "unknown": ("{first}=1,nowhere.txt=1", "there is no file or folder nowhere.txt"),
    "too small": ("{first}=1,{tiny}=1", "what is trained on of {tiny} is shorter than one sequence"),
    "the same file": ("{first}=1,./{folder}/../{folder}/inspect.txt=1", "hold the same text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_mixtures_are_refused_before_there_is_a_folder(
    case: str,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(texts.parent)
    tiny = tmp_path / "tiny.txt"
    tiny.write_text(textwrap.dedent(inspect.getsource(losses))[:60])
    named = {"first": texts / NAMES[0], "tiny": tiny, "folder": texts.name}
    mix, message = (part.format(**named) for part in REFUSED[case])
    assert main(mix_flags(tmp_path, mix, tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert message in said
    if case == "too small":
        assert "tokens" in said
        assert "at least 65" in said
    assert not (tmp_path / "run").exists()


def test_a_trained_tokenizer_does_not_go_with_shards(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tmp_path / "shards"
    assert main(["prepare", str(texts / NAMES[0]), str(shards), "--tokenizer=bytes"]) == 0
    words = mix_flags(tmp_path, f"{shards}=1,{texts / NAMES[1]}=1", tmp_path / "run", "--data.tokenizer=bpe")
    assert main(words) == 2
    assert "data.tokenizer bpe does not go with shards in data.mix" in capsys.readouterr().err
