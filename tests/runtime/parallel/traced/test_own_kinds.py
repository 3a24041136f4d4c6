"""Tracing finds of Scrimp's own kinds the cuts that `cut_layers` makes by what it knows of their blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity import SMALL, VOCABULARY

from scrimp.config import Config, replace_values
from scrimp.config.architecture import Architecture
from scrimp.models.cut_layers import cut_layers
from scrimp.models.model import build_model
from scrimp.models.tensor_ranks import AllHeadsNorm, TensorRanks
from scrimp.parts import Cut
from scrimp.runtime.parallel.traced import TensorPlan, find
from scrimp.training.setup import decide

TOKENS = torch.zeros((3, 10), dtype=torch.long)
RANKS = 2


def architecture_of(preset: str) -> Architecture:
    settings = {
        "device": "cpu",
        "data.tokenizer": "bytes",
        "model.preset": preset,
        "model.vocab_size": VOCABULARY,
        **{f"model.{name}": size for name, size in SMALL.items()},
    }
    return decide(replace_values(Config(), settings)).architecture


def by_hand(architecture: Architecture, folder: Path) -> tuple[dict[str, Cut], set[str]]:
    """What `cut_layers` leaves the first rank, and the norms over all heads."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ranks = TensorRanks(dist.group.WORLD)  # type: ignore[arg-type]
        ranks.size = RANKS  # nothing is exchanged here
        model = build_model(architecture, device="meta")
        cuts = cut_layers(model, ranks)
        norms = {name for name, module in model.named_modules() if isinstance(module, AllHeadsNorm)}
    finally:
        dist.destroy_process_group()
    return cuts, norms


@pytest.mark.parametrize(
    "preset",
    [
        "llama-3m",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2.5-0.5b", "qwen3-0.6b", "olmo2-1b")),
        pytest.param("gemma3-1b", marks=pytest.mark.slow),
    ],
)
def test_the_cuts_are_those_of_cut_layers(preset: str, tmp_path: Path) -> None:
    architecture = architecture_of(preset)
    plan: TensorPlan = find(build_model(architecture, device="meta"), (TOKENS,), {}, RANKS)
    expected, norms = by_hand(architecture, tmp_path)
    assert plan.shapes.keys() == expected.keys()
    for name, cut in expected.items():
        if name == "head.weight":  # the loss reads it, not the model's forward pass
            assert name not in plan.cuts
            continue
        is_cut = cut.local_shape != cut.shape
        assert (name in plan.cuts) == is_cut
        if is_cut:
            found = plan.cuts[name].of(0, RANKS)
            assert (found.shape, found.ranges, found.dimension) == (cut.shape, cut.ranges, cut.dimension)
    assert set(plan.norms) == norms
    # Weights that each rank uses for its own heads alone (`cut_layers` cuts tokens, too: gradients of all norms).
    assert set(plan.added) == {
        name
        for name in expected
        if name.endswith(("q_norm.weight", "k_norm.weight")) and name not in plan.cuts
    }
