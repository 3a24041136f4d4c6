"""The embedding's own learning rate: it moves as at that rate, all else as without it, whatever the optimizer."""

from __future__ import annotations

import copy
import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gradients import give_gradients

from scrimp.config import Architecture, OptimizerConfig
from scrimp.errors import ConfigError
from scrimp.models import EMBEDDING_WEIGHT
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.optim.adamw import AdamW
from scrimp.optim.galore import GaLore
from scrimp.optim.muon import Muon
from scrimp.optim.nadamw import NAdamW
from scrimp.optim.own import OwnOptimizer, memory
from scrimp.optim.schedule_free import ScheduleFree
from scrimp.optim.targets import Targets
from scrimp.user_code import trusting

LR, RATIO = 0.01, 4.0
TIED = Architecture(
    family="llama",
    vocab_size=96,
    num_layers=1,
    width=32,
    num_heads=2,
    num_kv_heads=2,
    head_size=16,
    ffn_width=64,
    context=64,
    tied_embeddings=True,
)
SETTINGS = OptimizerConfig(lr=LR, master_weights=False, moments="fp32", weight_decay=0.1)
MAKERS: dict[str, Callable[[Model, OptimizerConfig], Targets]] = {
    "adamw": lambda model, settings: AdamW(model.trained(), settings),
    "nadamw": lambda model, settings: NAdamW(model.trained(), settings),
    "schedule-free": lambda model, settings: ScheduleFree(model.trained(), settings),
    "muon": lambda model, settings: Muon(model.trained(), settings, model.spec),
    "fira": lambda model, settings: GaLore(
        model.trained(), dataclasses.replace(settings, name="fira", rank=8), model.spec
    ),
    "own": lambda model, settings: OwnOptimizer(model.trained(), settings),
}


def trained(model: Model, name: str, lr: float, ratio: float, path: Path) -> tuple[Model, Targets]:
    """A copy of the model after three steps at a rate, and its optimizer."""
    found = copy.deepcopy(model)
    settings = dataclasses.replace(SETTINGS, lr=lr, embedding_lr_ratio=ratio)
    if name == "own":
        settings = dataclasses.replace(settings, name=f"{path}:Own")
    optimizer = MAKERS[name](found, settings)
    for step in range(3):
        give_gradients(found, step)
        optimizer.step(lr)
        optimizer.zero_grad()
    return found, optimizer


def test_a_stage_without_the_embedding_numbers_the_other_groups_alike(tmp_path: Path) -> None:
    """Checkpoints of a pipeline have one set of the groups' numbers."""
    path = tmp_path / "own.py"
    path.write_text("import torch\nOwn = torch.optim.AdamW\n", encoding="utf-8")
    settings = dataclasses.replace(SETTINGS, name=f"{path}:Own", embedding_lr_ratio=RATIO)
    whole = build_model(TIED).trained()
    later = {name: one for name, one in whole.items() if name != EMBEDDING_WEIGHT}
    with trusting(True):
        first, second = (OwnOptimizer(named, settings) for named in (whole, later))
    decays = [[group["weight_decay"] for group in one._inner.param_groups] for one in (first, second)]
    assert decays == [[0.1, 0.0, 0.1], [0.1, 0.0]]


def test_an_own_optimizer_that_makes_groups_of_its_own_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    text = """
        import torch

        class Own(torch.optim.SGD):
            def __init__(self, params, lr):
                super().__init__([one for group in params for one in group["params"]], lr=lr)
    """
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    settings = dataclasses.replace(SETTINGS, name=f"{path}:Own", embedding_lr_ratio=RATIO)
    parameters = build_model(TIED).trained()
    with trusting(True):
        OwnOptimizer(parameters, dataclasses.replace(settings, embedding_lr_ratio=1.0))
        for make in (lambda: OwnOptimizer(parameters, settings), lambda: memory(TIED, settings, "fp32")):
            with pytest.raises(ConfigError, match="puts the embedding into a group with other parameters"):
                make()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_the_embedding_alone_moves_at_its_rate(name: str, tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("import torch\nOwn = torch.optim.Adam\n", encoding="utf-8")
    model = build_model(dataclasses.replace(TIED, tied_embeddings=tied))
    initialise(model, 0)
    with trusting(True):
        (found, optimizer), (slow, _), (fast, _) = (
            trained(model, name, lr, ratio, path) for lr, ratio in ((LR, RATIO), (LR, 1.0), (RATIO * LR, 1.0))
        )
    for key, value in found.named_parameters():
        expected = (fast if key == EMBEDDING_WEIGHT else slow).get_parameter(key)
        assert torch.equal(value, expected), key
        rule = optimizer.rule(key)
        assert rule is not None
        relative = rule.lr / LR if name == "own" else rule.lr
        assert relative == pytest.approx(RATIO if key == EMBEDDING_WEIGHT else 1.0)
    assert not torch.equal(found.embedding.weight, slow.embedding.weight)
