"""lm-eval asks Scrimp's model: the same numbers as from its own model on the exported folder."""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.cli.trained import load_executable
from scrimp.errors import ConfigError, ModelError
from scrimp.tasks import BUILT_IN, Task, read_texts, score
from scrimp.tasks.scoring import encode, score_rows
from scrimp.training.trained_weights import open_target

HAS_LM_EVAL = True
try:
    from scrimp.tasks import harness
except ConfigError:
    HAS_LM_EVAL = False
needs_lm_eval = pytest.mark.skipif(
    not HAS_LM_EVAL, reason="NOT RUN: lm-eval is not installed (pip install 'scrimp[lm-eval]')"
)

PAIRS = [
    ("def add(a, b):\n    return", " a + b"),
    ("The text of a line ", "continues here"),
    ("two lines\n\n", "    def f(self):"),
    ("", "Nothing stands before"),
    ("of a long text " * 40, " the end"),
    ("é ü ", "ß"),
    ("import", " re"),
]
GUIDE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a trained tokenizer, and beside it its export."""
    folder = tmp_path_factory.mktemp("run")
    words = flags(
        write_corpus(folder), folder / "run", "--train.steps=30", "--optimizer.lr=0.01", "--model.context=64"
    )
    words[words.index("--data.tokenizer=bytes")] = "--data.vocab-size=400"
    assert main(words) == 0
    assert main(["export", str(folder / "run"), str(folder / "out")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def asked(run: Path) -> Any:
    target = open_target(run)
    return harness.AskedModel(load_executable(target, "cpu"), target.tokenizer)


@pytest.fixture(scope="module")
def theirs(run: Path) -> Any:
    """lm-eval's own model."""
    pytest.importorskip("transformers", reason="lm-eval's own model needs transformers")
    huggingface = importlib.import_module("lm_eval.models.huggingface")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return huggingface.HFLM(
        pretrained=str(run.with_name("out")),
        device="cpu",
        dtype="float32",
        batch_size=3,
        softmax_dtype="float32",
    )


@needs_lm_eval
def test_log_probabilities_are_those_of_lm_eval_s_own_model(asked: Any, theirs: Any) -> None:
    assert theirs.max_length == 64
    found, expected = asked.loglikelihood(requests(*PAIRS)), theirs.loglikelihood(requests(*PAIRS))
    for (log_p, is_greedy), (their_log_p, they_are_greedy) in zip(found, expected, strict=True):
        assert log_p == pytest.approx(their_log_p, abs=2e-3)
        assert is_greedy == they_are_greedy


@needs_lm_eval
def test_whole_texts_are_scored_in_windows_as_by_lm_eval_s_own_model(asked: Any, theirs: Any) -> None:
    texts = requests(("import re",), ("def f(self):\n    return self.value\n" * 12,))
    found, expected = asked.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts)
    assert found == pytest.approx(expected, abs=1e-2)
    assert asked.loglikelihood_rolling(requests(("",))) == [0]


@needs_lm_eval
def test_what_is_written_is_what_lm_eval_s_own_model_writes(asked: Any, theirs: Any) -> None:
    options = {"until": ["\n\n"], "max_gen_toks": 20, "do_sample": False, "temperature": 0.0}
    asks = requests(("def f(self", options), ("    return", {**options, "until": "e"}))
    assert asked.generate_until(asks) == theirs.generate_until(asks)


@needs_lm_eval
def test_what_cannot_be_written_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigError, match="num_beams"):
        asked.generate_until(requests(("a", {"max_gen_toks": 4, "num_beams": 4})))
    with pytest.raises(ModelError, match="max_gen_toks"):
        asked.generate_until(requests(("a", {"max_gen_toks": 64})))


@needs_lm_eval
def test_lm_eval_finds_the_accuracy_that_scrimp_finds(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = read_texts(str(run.with_name("corpus.txt")), "text")
    short = [
        item
        for item in BUILT_IN["continuation"].task("continuation", texts).items
        if max(map(len, item.choices)) < 60
    ]
    task = Task("items", tuple(short[:40]))
    lines = [vars(item) for item in task.items]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    of_guide = re.search(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert of_guide
    (tmp_path / "mine.yaml").write_text(of_guide[1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    target = open_target(run)
    executable = load_executable(target, "cpu")
    ours = score(executable, target.tokenizer, task)
    found = harness.measure(executable, target.tokenizer, ["mine.yaml"], trusted=True)
    figures = {figure.name: figure for figure in found}
    assert figures["acc_bytes"].value == sum(ours.is_right) / 40
    assert figures["acc_bytes"].items == 40
    assert figures["acc_bytes"].error is not None
    # In ASCII characters are bytes.
    assert figures["acc_norm"].value == figures["acc_bytes"].value
    # Without the division: what lm-eval takes for right is what has the largest sum.
    rows = [
        [encode(target.tokenizer, item.context, choice) for choice in item.choices] for item in task.items
    ]
    sums = [[one.log_p for one in score_rows(executable, of_item)] for of_item in rows]
    right = [one.index(max(one)) == item.answer for one, item in zip(sums, task.items, strict=True)]
    assert figures["acc"].value == sum(right) / 40
    assert figures["acc"].value != figures["acc_norm"].value
    # And by the command, of the exported folder.
    command = ["eval", str(run.with_name("out")), "--tasks", "lm-eval:mine.yaml", "--trust-code"]
    capsys.readouterr()
    assert main(command) == 0
    assert re.search(rf"acc_bytes +{figures['acc_bytes'].value:.4f} ", capsys.readouterr().out)


@needs_lm_eval
@pytest.mark.parametrize("name", ["mine.yaml", "mine.YML", "mine.txt", "mine"])
def test_a_file_that_is_not_trusted_is_refused_before_a_model_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """lm-eval reads any file that is there as one of tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("task: mine\nprocess_docs: !function code.run\n", encoding="utf-8")
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')\n", encoding="utf-8")
    assert main(["eval", "no-run", "--tasks", f"lm-eval:{name}"]) == 2
    assert "--trust-code" in capsys.readouterr().err


@needs_lm_eval
@pytest.mark.slow
def test_a_file_that_is_no_task_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = open_target(run)
    for text in ("task: [mine", "task: mine\nnobody_knows_this: 1\n"):
        (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="lm-eval cannot ask"):
            harness.measure(load_executable(target, "cpu"), target.tokenizer, ["mine.yaml"], trusted=True)


@needs_lm_eval
@pytest.mark.slow
def test_an_unknown_task_is_refused(run: Path) -> None:
    target = open_target(run)
    with pytest.raises(ConfigError, match="lm-eval cannot ask nobody_knows_this"):
        harness.measure(
            load_executable(target, "cpu"), target.tokenizer, ["nobody_knows_this"], trusted=False
        )


def test_without_lm_eval_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "scrimp.tasks.harness", raising=False)
    assert main(["eval", "run", "--tasks", "copying,lm-eval:arc_easy"]) == 2
    assert "scrimp[lm-eval]" in capsys.readouterr().err
