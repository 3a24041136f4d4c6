"""An optimizer from the user's own file: trained, resumed bit for bit, accounted for, and refused where it must be."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from states import states_of
from tiny_run import flags, losses, write_corpus
from torch import nn

from scrimp import user_code
from scrimp.cli import main
from scrimp.config import Config, OptimizerConfig, preset
from scrimp.errors import ConfigError
from scrimp.models.model import build_model
from scrimp.optim import check
from scrimp.optim.own import OwnOptimizer, memory
from scrimp.profiler.memory_trace import TracedStep

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_optimizer.py"
LION = OptimizerConfig(name=f"{EXAMPLE}:Lion", lr=1e-3, master_weights=False)
STEPS = ("--train.steps=6", "--checkpoint.every=2", "--checkpoint.keep-last=3", "--optimizer.lr=1e-3")
SNIP = ("--snip.first=1", "--snip.every=2", "--snip.delay=1", "--snip.formats=fp8,nvfp4")


@pytest.fixture(autouse=True)
def trusted() -> Iterator[None]:
    with user_code.trusting(True):
        yield


def named(folder: Path, text: str, name: str = "Own") -> OptimizerConfig:
    path = folder / "own.py"
    path.write_text("import torch\n" + textwrap.dedent(text), encoding="utf-8")
    return dataclasses.replace(LION, name=f"{path}:{name}")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "snip"])
def test_the_example_trains_and_resumes_bit_for_bit(precision: str, tmp_path: Path) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    own = (f"--optimizer.name={EXAMPLE}:Lion", "--trust-code", f"--precision={precision}")
    assert main(flags(corpus, run, *STEPS, *own, *(SNIP if precision == "snip" else ()))) == 0
    whole = losses(run)
    assert whole[6] < whole[1]
    assert main(["train", f"--run.dir={run}", "--resume", "--resume-from=2", "--trust-code"]) == 0
    assert losses(run) == whole


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor])
def test_torchs_own_classes_move_as_they_do_alone_and_resume(kind: type, tmp_path: Path) -> None:
    settings = named(tmp_path, f"Own = torch.optim.{kind.__name__}")
    straight, reference, resumed = (nn.Linear(6, 5) for _ in range(3))
    for other in (reference, resumed):
        other.load_state_dict(straight.state_dict())
    optimizer = OwnOptimizer(dict(straight.named_parameters()), settings)
    again = OwnOptimizer(dict(resumed.named_parameters()), settings)
    alone = type(optimizer._inner)(
        [{"params": [reference.weight]}, {"params": [reference.bias], "weight_decay": 0.0}],
        **{key: value for key, value in optimizer._inner.defaults.items() if key != "decoupled_weight_decay"},
    )

    def step(model: nn.Module, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    for number in range(4):
        step(straight, number)
        step(reference, number)
        optimizer.step(1e-3)
        alone.step()
        if number == 1:
            saved = {name: tensor.clone() for name, tensor in states_of(optimizer).items()}
            weights = {name: p.detach().clone() for name, p in straight.named_parameters()}
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), reference.parameters(), strict=True))

    again.prepare(2)
    places = states_of(again)
    assert places.keys() == saved.keys()
    for name, tensor in places.items():
        tensor.copy_(saved[name])
    resumed.load_state_dict(weights)
    again.restore_updates(2)
    for number in (2, 3):
        step(resumed, number)
        again.step(1e-3)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


@pytest.mark.slow
def test_the_account_learns_states_from_a_step_without_memory() -> None:
    architecture = dataclasses.replace(preset("llama-3m"), num_layers=2)
    costs = TracedStep(
        architecture,
        precision="fp32",
        parameters="fp32",
        optimizer=memory(architecture, LION, "fp32"),
        micro_batch=1,
        sequence=64,
        loss_chunk=0,
    ).costs()
    model = build_model(architecture, dtype=torch.float32)
    optimizer = OwnOptimizer(dict(model.named_parameters()), LION)
    for parameter in model.parameters():
        parameter.detach().zero_()
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    held = sum(tensor.nbytes for name, tensor in states_of(optimizer).items() if name.endswith("average"))
    assert costs.ends.optimizer + sum(costs.classes[number].optimizer for number in costs.blocks) == held
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert largest <= costs.optimizer_peak <= 3 * largest


REFUSED = {
    "no class": ("Own = 3", "is not an optimizer"),
    "no optimizer": ("class Own: pass", "is not an optimizer"),
    "a closure": ("Own = torch.optim.LBFGS", "cannot be (made|predicted)"),
    "reads numbers": (
        """
        class Own(torch.optim.SGD):
            def step(self, closure=None):
                if float(self.param_groups[0]["params"][0].grad.sum()) > 0:
                    super().step()
        """,
        "cannot be predicted",
    ),
    "lists": (
        """
        class Own(torch.optim.SGD):
            def step(self, closure=None):
                for p in self.param_groups[0]["params"]:
                    self.state[p]["history"] = [p.grad]
        """,
        "history, a list",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_accounted_for_is_refused_by_name(case: str, tmp_path: Path) -> None:
    text, message = REFUSED[case]
    settings = named(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        TracedStep(
            preset("llama-3m"),
            precision="fp32",
            parameters="fp32",
            optimizer=memory(preset("llama-3m"), settings, "fp32"),
            micro_batch=1,
            sequence=64,
            loss_chunk=0,
        ).costs()


def test_snip_needs_a_rule(tmp_path: Path) -> None:
    config = Config(optimizer=named(tmp_path, "Own = torch.optim.RMSprop"), precision="snip")
    with pytest.raises(ConfigError, match="RMSprop, which has no method update_rule"):
        check(config)
    check(dataclasses.replace(config, precision="bf16"))
    check(dataclasses.replace(config, optimizer=LION))


def test_code_that_is_not_trusted_does_not_run() -> None:
    with user_code.trusting(False), pytest.raises(ConfigError, match="trust-code"):
        check(Config(optimizer=LION))
