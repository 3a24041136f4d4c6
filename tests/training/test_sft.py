"""Supervised fine-tuning: the loss is that of each conversation alone, a run learns, its template goes with it."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from chats import FACTS, SMALL, TEMPLATE, conversations, sft_flags, write_chats
from tiny_run import losses, records, write_corpus

from scrimp.cli import main
from scrimp.config import ObjectiveConfig, load_config
from scrimp.data import ChatTemplate, Corpus, evaluation_batches, load_tokenizer, verify
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.objectives import build
from scrimp.report.records import read_jsonl
from scrimp.training import finish
from scrimp.training.run_state import read_state
from scrimp.training.trained_weights import checkpoint_of

SHORT = ("--train.steps=4", "--checkpoint.every=2", "--data.held-out=0")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt its conversations by heart."""
    folder = tmp_path_factory.mktemp("learnt")
    write_chats(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "SAMPLE_TOKENS", 48)  # a whole answer
        assert main(sft_flags(folder, folder / "run", "--train.steps=80", "--data.held-out=0")) == 0
    return folder / "run"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """The answers of `scrimp chat` to lines of standard input."""

    def answers(target: Path, *lines: str, more: tuple[str, ...] = ("--temperature=0",)) -> list[str]:
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert main(["chat", str(target), "--device=cpu", *more]) == 0
        return capsys.readouterr().out.splitlines()

    return answers


def test_a_run_learns_its_answers_and_says_them(learnt: Path, told) -> None:  # type: ignore[no-untyped-def]
    by_step = losses(learnt)
    assert by_step[1] > 5
    assert by_step[80] < 0.1
    one, two, _, last = FACTS
    assert told(learnt, last, two) == [FACTS[last], FACTS[two]]
    assert told(learnt, one, "", "/reset", two, "/quit", one) == [FACTS[one], FACTS[two]]
    packing = next(event for event in read_jsonl(learnt / "events.jsonl") if event["kind"] == "packing")
    assert packing["reason"].startswith("60 conversations in ")


@pytest.mark.slow
def test_the_sample_of_a_run_begins_an_answer(learnt: Path) -> None:
    sample = next(event for event in read_jsonl(learnt / "events.jsonl") if event["kind"] == "sample")
    assert sample["prompt"].endswith("assistant: ")
    assert any(sample["text"] == answer for answer in FACTS.values())


@pytest.mark.slow
def test_an_export_carries_the_template_and_answers_alike(learnt: Path, told, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from transformers import PreTrainedTokenizerFast

    out = tmp_path / "exported"
    assert main(["export", str(learnt), str(out)]) == 0
    theirs = PreTrainedTokenizerFast.from_pretrained(out)
    messages = conversations()[0]
    expected = theirs.apply_chat_template(messages, return_dict=False)
    assert ChatTemplate(load_tokenizer(out)).encode(messages, "here").tokens.tolist() == expected
    for question, answer in FACTS.items():
        assert told(out, question) == [answer]

    # And fine-tuning goes on from there, with the template of the weights.
    write_chats(tmp_path)
    run = tmp_path / "again"
    words = ["train", *SMALL[:2], *SMALL[7:], f"--data.source={tmp_path / 'chats.jsonl'}", f"--run.dir={run}"]
    words += [f"--model.weights={out}", f"--data.cache={tmp_path / 'cache'}", *SHORT]
    assert main([word for word in words if "optimizer" not in word]) == 0
    assert losses(run)[1] < 0.2
    assert (run / "tokenizer" / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.slow
def test_a_resumed_run_repeats_its_losses_bit_for_bit(tmp_path: Path) -> None:
    write_chats(tmp_path)
    run = tmp_path / "run"
    assert main(sft_flags(tmp_path, run, *SHORT)) == 0
    whole = losses(run)
    (tmp_path / "template.jinja").unlink()  # the run has a copy of its own
    assert main(["train", f"--run.dir={run}", "--resume", "--resume-from=2"]) == 0
    assert losses(run) == whole


def test_the_loss_is_that_of_each_conversation_alone(tmp_path: Path) -> None:
    """Packed or not, in any micro-batches: all that the assistant wrote, each token once, after its own past."""
    write_chats(tmp_path)
    run = tmp_path / "run"
    assert main(sft_flags(tmp_path, run, "--train.steps=1", "--data.held-out=0")) == 0
    corpus = Corpus(next((tmp_path / "cache").glob("chats-*")))
    assert verify(corpus.folder, progress=False).ok
    architecture = read_state(checkpoint_of(run)).architecture
    model = build_model(architecture)
    initialise(model, 0)
    objective = build(ObjectiveConfig(name="sft"))
    settings = {"sequence": 128, "max_tokens": 10**9, "mask_documents": True}
    with torch.no_grad():
        found = []
        for micro_batch in (1, 5):
            batches = list(evaluation_batches(corpus.train, micro_batch=micro_batch, **settings))  # type: ignore[arg-type]
            loss = sum(float(objective.loss(model, batch).loss.double()) for batch in batches)
            found.append((loss, sum(map(objective.count, batches))))
        template = ChatTemplate(load_tokenizer("bytes").with_chat_template(TEMPLATE))
        expected, count = 0.0, 0
        for messages in conversations():
            chat = template.encode(messages, "here")
            ids = torch.from_numpy(chat.tokens.astype("int64"))[None]
            answers = torch.from_numpy(chat.answers)[1:]
            logits = model.logits(model(ids[:, :-1]))[0].double()
            expected += float(F.cross_entropy(logits[answers], ids[0, 1:][answers], reduction="sum"))
            count += int(answers.sum())
    for loss, num_targets in found:
        assert num_targets == count
        assert loss == pytest.approx(expected, rel=1e-5)


def test_held_out_conversations_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whole conversations, of a source of their own or by share."""
    write_chats(tmp_path)
    run, other = tmp_path / "run", tmp_path / "other.jsonl"
    messages = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]
    other.write_text(json.dumps({"messages": messages}) + "\n")
    assert main(sft_flags(tmp_path, run, *SHORT, f"--data.held-out={other}")) == 0
    evaluated = [record for record in records(run) if "eval_loss" in record]
    assert evaluated
    assert all(record["eval_bits_per_byte"] > 0 for record in evaluated)
    capsys.readouterr()
    assert main(["eval", str(run), f"--data={other}", "--conversations", "--device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"{evaluated[-1]['eval_loss']:.4f}" in shown
    assert "3 in 1" in shown  # H, i, and the end


@pytest.mark.slow
def test_shards_are_prepared_beforehand_and_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, template = write_chats(tmp_path)
    words = [
        "prepare",
        str(source),
        str(tmp_path / "shards"),
        "--conversations",
        "--tokenizer=bytes",
        "--held-out=0",
    ]
    assert main([*words, f"--chat-template={template}"]) == 0
    assert main(["verify", str(tmp_path / "shards")]) == 0
    run = tmp_path / "run"
    ready = ["train", *SMALL, f"--data.source={tmp_path / 'shards'}", f"--run.dir={run}", "--train.steps=1"]
    assert main(ready) == 0
    capsys.readouterr()
    assert main([word for word in ready if "objective" not in word and "run.dir" not in word]) == 2
    assert "hold conversations" in capsys.readouterr().err


REFUSED = {
    "no template": (["--data.chat-template=unset"], "has no chat template"),
    "across conversations": (["--data.no-mask-documents"], "cannot be switched off"),
    "no tokenizer": (["--data.tokenizer=bpe"], "need a tokenizer that there is already"),
    "text": (["--data.source=stdlib"], "holds text, not conversations"),
    "template of text": (["--objective.name=next-token"], "is for conversations"),
    "no file": (["--data.chat-template=none.jinja"], "there is no file"),
    "nothing fits": (["--train.sequence=8"], "no conversation with an answer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_a_run_begins(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, message = REFUSED[name]
    write_chats(tmp_path)
    assert main(sft_flags(tmp_path, tmp_path / "run", *SHORT, *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_base_model_is_told_how_it_gets_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told
) -> None:  # type: ignore[no-untyped-def]
    from tiny_run import flags

    run = tmp_path / "base"
    assert main(flags(write_corpus(tmp_path), run, "--train.steps=1")) == 0
    capsys.readouterr()
    assert main(["chat", str(run), "--device=cpu"]) == 2
    error = capsys.readouterr().err
    assert "has no chat template" in error
    assert "--objective.name sft" in error
    _, template = write_chats(tmp_path)
    assert len(told(run, "Hello", more=(f"--chat-template={template}", "--tokens=2", "--temperature=0"))) == 1


def test_a_conversation_that_fills_the_context_is_refused(
    learnt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = load_config(learnt / "config.toml").model.context or 512
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * (2 * context) + "\n"))
    assert main(["chat", str(learnt), "--device=cpu"]) == 2
    assert "fills the model's context" in capsys.readouterr().err


def test_the_system_message_comes_first_and_the_seed_decides(learnt: Path, told) -> None:  # type: ignore[no-untyped-def]
    draws = ("--temperature=5", "--tokens=8", "--system=Be brief.")
    first, again = (told(learnt, "Who are you?", more=(*draws, "--seed=1")) for _ in range(2))
    other = told(learnt, "Who are you?", more=(*draws, "--seed=2"))
    assert first == again != other


@pytest.mark.slow
def test_on_a_terminal_it_asks_and_goes_on_after_a_refusal(learnt: Path) -> None:
    """A message that does not fit ends nothing there; the end of input does."""
    own, theirs = pty.openpty()
    words = ["chat", str(learnt), "--device=cpu", "--temperature=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "scrimp", *words],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"},
    )
    os.close(theirs)
    for line in ("x" * 1500, "/what", "Who are you?", "/quit"):
        os.write(own, f"{line}\n".encode())
    out, error = process.communicate(timeout=120)
    os.close(own)
    assert process.returncode == 0
    assert "I am Scrimp." in out
    assert "fills the model's context" in error
    assert "there is no command /what" in error
