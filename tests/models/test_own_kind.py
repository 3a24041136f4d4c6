"""A kind of decoder from the user's own file: trained, resumed, used, and run only where it is trusted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import flags, losses, scrimp, write_corpus

from scrimp import user_code
from scrimp.cli import main
from scrimp.config import preset
from scrimp.models import spec_of
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_model.py"
KIND = f"--model.kind={EXAMPLE}:Parallel"


@pytest.mark.slow
def test_the_example_trains_resumes_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    words = flags(corpus, run, KIND, "--train.steps=4", "--checkpoint.every=2", "--precision=fp8")
    words.append("--memory.activations=block")  # hands activations on to the block of one's own
    assert main(words) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert main([*words, "--trust-code"]) == 0
    first = losses(run)
    plain = tmp_path / "plain"
    assert main(flags(corpus, plain, "--train.steps=4", "--precision=fp8")) == 0
    assert losses(plain) != first
    again = ["train", f"--run.dir={run}", "--resume-from=2", "--trust-code"]
    assert main(again) == 0
    assert losses(run) == first
    generate = ["generate", str(run), "--prompt=def", "--tokens=3"]
    assert scrimp(*generate).returncode == 2  # in a process that has trusted nothing
    assert main([*generate, "--trust-code"]) == 0
    more = flags(corpus, tmp_path / "more", "--train.steps=2", f"--model.weights={run}", "--trust-code")
    more = [
        word
        for word in more
        if not word.startswith(("--model.num", "--model.width", "--model.ffn", "--data.tok"))
    ]
    assert main(more) == 2
    assert "which nobody has named" in capsys.readouterr().err
    assert main([*more, KIND]) == 0
    assert main(["export", str(run), str(tmp_path / "out"), "--trust-code"]) == 2
    assert "transformers has no class" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("body", ["Own = 3", "class Own: ...", "from scrimp.models import ModelSpec as Own"])
def test_what_is_no_specification_is_refused(
    body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.py"
    file.write_text(body + "\n", encoding="utf-8")
    assert main(["plan", f"--model.kind={file}:Own", "--trust-code"]) == 2
    assert "not the specification of a model" in capsys.readouterr().err
    assert main(["plan", "--model.kind=llama"]) == 2
    assert "FILE.py:NAME" in capsys.readouterr().err


def test_attention_and_mlp_read_the_same_stream() -> None:
    """The block adds what each of them gives alone; Llama's MLP would read what attention has added."""
    architecture = replace(preset("llama-3m"), num_layers=1, vocab_size=64, family=f"{EXAMPLE}:Parallel")
    with user_code.trusting(True):
        model = build_model(architecture, device=torch.device("cpu"), dtype=torch.float32)
        assert spec_of(architecture).parameters == sum(p.numel() for p in model.parameters())
    initialise(model, 0)
    block, outputs = next(model.each_block()), list[torch.Tensor]()
    block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    tokens = torch.arange(12)[None] % 64
    with torch.no_grad():
        model(tokens)
        mlp = block.mlp(model.embed(tokens), block.mlp_norm)
        block.mlp.down.weight.zero_()
        model(tokens)
    torch.testing.assert_close(outputs[0], outputs[1] + mlp)
    assert mlp.abs().max() > 1e-3
