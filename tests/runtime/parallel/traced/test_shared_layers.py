"""Models that ranks share, on gloo: outputs, losses, every gradient and weights after steps of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from sharing_families import FAMILIES, FIVE, example, loss_of, model_of
from torch import Tensor, nn

from scrimp.errors import ConfigError, ModelError
from scrimp.profiler.collectives import counting_collectives
from scrimp.runtime.parallel.traced import SharedLayers, find

pytestmark = pytest.mark.slow

STEPS, CLIP, LR = 3, 0.5, 1e-3
Found = dict[str, Any]


def trained(model: nn.Module, shared: SharedLayers | None) -> Found:
    """Logits, loss, whole gradients and norm of the first step; losses of all; whole weights after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    found: Found = {"losses": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in range(2):  # gradients accumulate
            loss, logits = loss_of(model, 2 * step + half)
            loss.backward()
            found["losses"].append(float(loss.detach()))
        if not step:
            found["logits"] = logits.detach()
            found["gradients"] = {name: whole(shared, name, p.grad) for name, p in model.named_parameters()}
        clip = shared.clip_grad_norm_ if shared else partial(nn.utils.clip_grad_norm_, model.parameters())
        found.setdefault("norm", float(clip(CLIP)))
        optimizer.step()
    found["weights"] = model.state_dict() if shared is None else shared.whole_state_dict()
    return found


def whole(shared: SharedLayers | None, name: str, gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.clone() if shared is None else shared.whole(name, gradient).clone()


def on_rank(rank: int, families: Sequence[str]) -> dict[str, Found]:
    found = {}
    for family in families:
        model = model_of(family)
        shared = SharedLayers(model, find(model, (), example(), dist.get_world_size()))
        found[family] = trained(model, shared)
    return found


def check(families: Sequence[str], ranks: int, folder: Path) -> None:
    found = spawn(ranks, on_rank, folder, families)
    for family in families:
        one = trained(model_of(family), None)
        for rank in found:
            got, first = rank[family], found[0][family]
            assert (got["losses"], got["norm"]) == (first["losses"], first["norm"])
            assert got["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
            assert got["losses"] == pytest.approx(one["losses"], rel=1e-5)
            assert got["norm"] == pytest.approx(one["norm"], rel=1e-5)
            for name in ("gradients", "weights"):
                assert got[name].keys() == one[name].keys()
                assert all(torch.equal(got[name][key], first[name][key]) for key in got[name])
            tensors = {"logits": got["logits"]} | got["gradients"]
            for name, expected in ({"logits": one["logits"]} | one["gradients"]).items():
                most = 1e-5 * float(expected.abs().max()) + 1e-7
                assert float((tensors[name] - expected).abs().max()) <= most, (family, name)
            for name, expected in one[
                "weights"
            ].items():  # Adam magnifies the smallest gradients, here and there
                difference = (got["weights"][name] - expected).abs()
                assert float(difference.mean()) <= 1e-4 * float(expected.abs().mean()) + 1e-4, (family, name)
                assert float(difference.max()) <= STEPS * LR, (family, name)


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    check(["gpt2"], 2, tmp_path)


@pytest.mark.slow
def test_every_family_trains_on_two_ranks_as_in_one_process(tmp_path: Path) -> None:
    check([family for family in FAMILIES if family != "gpt2"], 2, tmp_path)


@pytest.mark.slow
def test_four_ranks_train_as_one_process(tmp_path: Path) -> None:
    check(FIVE, 4, tmp_path)


def around(rank: int) -> dict[str, Any]:
    """What surrounds training: state dicts, sizes, bytes, and what is refused."""
    model, whole_one = model_of("llama"), model_of("llama")
    plan = find(model, (), example(), 2)
    shared = SharedLayers(model, plan)
    state = {name: tensor.clone() for name, tensor in shared.whole_state_dict().items()}
    same = all(torch.equal(state[name], tensor) for name, tensor in whole_one.state_dict().items())
    other = {name: tensor + 1 for name, tensor in state.items()}
    shared.load_whole_state_dict(other)
    back = shared.whole_state_dict()
    with counting_collectives() as counted:
        loss_of(model)[0].backward()
    refused = []
    torch.manual_seed(rank)
    own = nn.Linear(4, 4)
    for make in (
        lambda: shared.load_whole_state_dict({}),
        lambda: SharedLayers(model, plan),
        lambda: SharedLayers(model_of("llama"), find(model_of("llama"), (), example(), 4)),
        lambda: SharedLayers(own, find(own, (torch.ones(2, 4),), {}, 2)),
    ):
        try:
            make()
        except (ModelError, ConfigError) as error:
            refused.append(error.what)
    meta = model_of("llama").to("meta")
    later = SharedLayers(meta, plan)
    later.allocate("cpu")
    later.load_whole_state_dict(state)
    with torch.no_grad():
        meta.model.rotary_emb.inv_freq = whole_one.model.rotary_emb.inv_freq  # type: ignore[union-attr]
        from_meta = float(loss_of(meta)[0])
    return {
        "same": same,
        "back": all(torch.equal(back[name], other[name]) for name in other),
        "rows": model.get_submodule("model.layers.0.self_attn.k_proj").weight.shape[0],
        "calls": [one.operation for one in counted.calls],
        "refused": refused,
        "loss": (float(loss_of(whole_one)[0]), from_meta),
    }


@pytest.mark.slow
def test_whole_states_collectives_and_what_is_refused(tmp_path: Path) -> None:
    for found in spawn(2, around, tmp_path):
        assert found["same"]
        assert found["back"]
        assert found["rows"] == 8
        # Words, two sums of each of two blocks; backward two of each, and one of what the head reads.
        assert found["calls"].count("all-reduce") == (1 + 4) + (4 + 1)
        assert found["calls"].count("all-gather") == 1
        assert found["refused"] == [
            "the state dict is of another model",
            "the plan is of another model",
            "the plan is for another number of ranks",
            "ranks that share layers begin with different models",
        ]
        assert found["loss"][1] == pytest.approx(found["loss"][0], rel=1e-6)
