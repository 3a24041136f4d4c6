"""Code of the user's own: runs where the command line trusts it, nowhere else, and is part of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import flags, losses, records, write_corpus

from scrimp import user_code
from scrimp.cli import main
from scrimp.errors import ConfigError

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "own_objective.py"
STEPS = ("--train.steps=4", "--checkpoint.every=2", "--optimizer.lr=1e-3")


def own(folder: Path, *, smoothing: float = 0.1) -> Path:
    """The example, copied, so that it can be changed."""
    text = EXAMPLE.read_text(encoding="utf-8").replace("SMOOTHING = 0.1", f"SMOOTHING = {smoothing}")
    folder.mkdir(exist_ok=True)
    path = folder / "own.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: a file that was loaded stays as it was."""
    monkeypatch.setattr(user_code, "_modules", {})


@pytest.mark.slow
def test_the_example_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    corpus, code = write_corpus(tmp_path), own(tmp_path / "code")
    name = f"--objective.name={code}:Smoothed"
    assert main(flags(corpus, tmp_path / "whole", *STEPS, name, "--trust-code")) == 0
    whole = losses(tmp_path / "whole")
    assert all(0 <= record["accuracy"] <= 1 for record in records(tmp_path / "whole"))
    assert main(flags(corpus, tmp_path / "plain", *STEPS)) == 0
    assert whole[1] != losses(tmp_path / "plain")[1]
    digest = json.loads((tmp_path / "whole" / "run.json").read_text())["code"]
    assert digest == user_code.digests({"objective.name": f"{code}:Smoothed"})

    again = ["train", f"--run.dir={tmp_path / 'whole'}", "--resume-from=2", "--resume", "--trust-code"]
    assert main(again) == 0
    assert losses(tmp_path / "whole") == whole


@pytest.mark.parametrize("where", ["option", "file", "resumed"])
@pytest.mark.every(3)
def test_code_is_refused_without_trust_before_anything_starts(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, code, run = write_corpus(tmp_path), own(tmp_path / "code"), tmp_path / "run"
    name = f"{code}:Smoothed"
    words = flags(corpus, run, *STEPS, f"--objective.name={name}")
    if where == "file":
        file = tmp_path / "settings.toml"
        file.write_text(f'[objective]\nname = "{name}"\n')
        words = ["train", str(file), *flags(corpus, run, *STEPS)[1:]]
    elif where == "resumed":
        assert main([*words, "--trust-code"]) == 0
        words = ["train", f"--run.dir={run}", "--resume"]
        before = sorted(run.rglob("*"))
    (tmp_path / "code" / "own.py").write_text(
        code.read_text() + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n"
        if where != "resumed"
        else code.read_text()
    )
    user_code._modules.clear()
    capsys.readouterr()
    assert main(words) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert run.exists() == (where == "resumed")
    if where == "resumed":
        assert sorted(run.rglob("*")) == before


@pytest.mark.slow
def test_no_file_can_say_that_code_is_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("trust_code = true\n", "[run]\ntrust_code = true\n"):
        (tmp_path / "settings.toml").write_text(text)
        assert main(["plan", str(tmp_path / "settings.toml")]) == 2
        assert "trust_code" in capsys.readouterr().err
    assert main(flags(write_corpus(tmp_path), tmp_path / "run", *STEPS, "--trust-code")) == 0
    assert "trust" not in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.slow
def test_a_run_whose_code_was_altered_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, code, run = write_corpus(tmp_path), own(tmp_path / "code"), tmp_path / "run"
    assert main(flags(corpus, run, *STEPS, f"--objective.name={code}:Smoothed", "--trust-code")) == 0
    own(tmp_path / "code", smoothing=0.2)
    resume = ["train", f"--run.dir={run}", "--resume-from=2", "--resume", "--trust-code"]
    assert main(resume) == 2
    assert "has changed since this process loaded it" in capsys.readouterr().err
    user_code._modules.clear()
    assert main(resume) == 2
    assert "has changed since the run began" in capsys.readouterr().err
    own(tmp_path / "code")
    user_code._modules.clear()
    assert main(resume) == 0


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("import sys\nsys.exit(3)\n", "Loss", "cannot be run"),
        ("class Loss:\n    build = classmethod(lambda cls: 1)\n", "Loss", "cannot be built"),
        ("x = 1\n", "Loss", "has no Loss"),
        ("class Loss: pass\n", "Loss", "lacks build"),
        (
            "class Loss:\n    build = classmethod(lambda cls, settings: cls())\n",
            "Loss",
            "does not build an objective",
        ),
        ("x = 1\n\nraise ValueError('no')\n", "Loss", "ValueError: no (line 3)"),
        ("def f(:\n", "Loss", "SyntaxError"),
    ],
)
def test_code_that_is_no_objective_is_refused(text: str, name: str, message: str, tmp_path: Path) -> None:
    from scrimp.config import ObjectiveConfig
    from scrimp.objectives import check

    (tmp_path / "own.py").write_text(text)
    with user_code.trusting(True), pytest.raises(ConfigError) as caught:
        check(ObjectiveConfig(name=f"{tmp_path / 'own.py'}:{name}"))
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with user_code.trusting(True), pytest.raises(ConfigError, match="no file"):
        user_code.load("objective.name", f"{tmp_path / 'none.py'}:Loss")


@pytest.mark.parametrize(
    "value", ["next-token", "my.py", "my.py:", ":Loss", "my.py:1x", "hf:OWNER/NAME", None, 3]
)
def test_only_a_file_and_a_name_are_code(value: object) -> None:
    assert not user_code.is_code(value)
    assert user_code.is_code("some folder/my.py:Loss")
