"""Settings of models with routed experts: what is refused, by which key."""

from __future__ import annotations

import pytest

from scrimp.config import Config, replace_values
from scrimp.config.model_section import base_architecture
from scrimp.config.resolve import resolve
from scrimp.config.values import check_values
from scrimp.errors import ConfigError, PlanError
from scrimp.export import export_precision
from scrimp.training.setup import decide
from scrimp.world import World

BASE = {"device": "cpu", "data.tokenizer": "bytes", "model.preset": "mixtral-8m", "train.sequence": 64}


@pytest.mark.parametrize(
    ("settings", "ranks", "match"),
    [
        (
            {"precision": "snip", "budget.speedup": 1.5},
            1,
            "budget.speedup is not carried out for models with routed experts yet",
        ),
        (
            {"precision": "snip", "budget.saved_bytes": 0.5, "layout.etp": 2},
            2,
            "budget.saved_bytes is not carried out beside layout.etp yet",
        ),
        (
            {"model.preset": "llama-3m", "layout.ep": 2},
            2,
            "layout.ep shares experts, and this model has none",
        ),
        ({"model.preset": "llama-3m", "layout.etp": 2}, 2, "layout.etp shares experts"),
        ({"model.preset": "llama-3m", "model.capacity_factor": 1.0}, 1, "is of models with routed experts"),
        ({"model.capacity_factor": 0.0}, 1, "model.capacity_factor"),
        ({"layout.ep": 3}, 6, "layout.ep does not divide the experts of a block - got 8 over 3"),
        ({"layout.ep": 4}, 2, "layout.ep x layout.etp does not divide the ranks of a stage - got 2 over 4"),
        ({"layout.pp": 2, "layout.ep": 4}, 4, "does not divide the ranks of a stage - got 2 over 4"),
        ({"layout.etp": 3}, 3, "layout.etp does not divide the width of an expert - got 256 over 3"),
        ({"layout.ep": 2, "optimizer.moments": "8bit"}, 2, "optimizer.moments 8bit"),
        ({"layout.ep": 2, "precision": "snip", "snip.gains": "exact"}, 2, "snip.gains exact"),
        ({"layout.tp": 2, "precision": "snip", "snip.gains": "exact"}, 2, "snip.gains exact"),
        ({"layout.ep": 2, "train.compile": "on"}, 2, "train.compile on"),
    ],
)
def test_what_is_not_carried_out_is_refused_by_name(
    settings: dict[str, object], ranks: int, match: str
) -> None:
    config = replace_values(Config(), {**BASE, **settings})
    with pytest.raises(ConfigError, match=match):
        resolve_on(config, ranks)


def resolve_on(config: Config, ranks: int) -> object:
    check_values(config)
    return resolve(config, base_architecture(config, None), device_type="cpu", ranks=ranks)


def test_shared_experts_are_not_compiled_where_nobody_says() -> None:
    config = replace_values(Config(), {**BASE, "layout.ep": 2, "precision": "fp32"})
    found = resolve(config, base_architecture(config, None), device_type="cuda", ranks=2)
    assert found.config.train.compile == "off"
    assert "tokens decide" in found.reasons["train.compile"]


@pytest.mark.slow
def test_a_plan_says_which_formats_experts_and_routers_have() -> None:
    settings = {
        **BASE,
        "precision": "fp8,*.experts.down=nvfp4,*.1.mlp.router=fp8",
        "model.capacity_factor": 1.5,
    }
    plan = decide(replace_values(Config(), settings), world=World()).plan
    formats = {layer: choice.recipes for layer, choice in plan.gemms.items()}
    assert formats["blocks.0.mlp.experts.gate_up"] == ("fp8",) * 3
    assert formats["blocks.0.mlp.experts.down"] == ("nvfp4",) * 3
    assert formats["blocks.0.mlp.router"] == ("bf16",) * 3
    assert formats["blocks.1.mlp.router"] == ("fp8",) * 3
    assert plan.gemms["blocks.0.mlp.router"].reason == "the router stays in bf16"
    with pytest.raises(
        PlanError, match=r"routed experts cannot be exported to torchao yet.*mlp\.experts\.gate_up"
    ):
        export_precision(plan, "torchao", "huggingface")
