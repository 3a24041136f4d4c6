"""AdamW with states, gradients and weights on the host: bit for bit the resident one, and resumable."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from late_link import LateLink
from losses import next_token_loss
from states import states_of
from torch import Tensor

from scrimp.config import Architecture, OptimizerConfig
from scrimp.errors import PlanError
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.optim import AdamW, StreamedAdamW
from scrimp.optim.streaming import Homes
from scrimp.runtime.memory import BlockMemory, HostArena, HostWeights

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=64,
    num_layers=4,
    width=32,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    ffn_width=64,
    context=32,
)
CPU = torch.device("cpu")
TRAIN = OptimizerConfig(clip=0.05, weight_decay=0.1, master_weights=False, moments="fp32")
FORMATS = {
    "fp32": (torch.float32, TRAIN),
    "masters": (torch.bfloat16, dataclasses.replace(TRAIN, master_weights=True)),
    "bf16": (torch.bfloat16, dataclasses.replace(TRAIN, moments="bf16")),
    "8bit": (torch.bfloat16, dataclasses.replace(TRAIN, moments="8bit")),
}
MIXTURES = {
    "optimizer": ((), (), range(4)),
    "gradients": ((), range(4), ()),
    "weights": (range(4), (), ()),
    "all": (range(4), range(4), range(4)),
    "some": ((0, 1), (2, 3), (1, 3)),
}


def make(dtype: torch.dtype, train: OptimizerConfig, mixture: str | None) -> tuple[Model, AdamW, Any]:
    model = build_model(ARCHITECTURE, dtype=dtype)
    initialise(model, 0)
    if mixture is None:
        return model, AdamW(dict(model.named_parameters()), train, seed=7), None
    weights, gradients, optimizer = MIXTURES[mixture]
    arena, link = HostArena(16 << 20, CPU, poisons=True), LateLink(CPU)
    host_weights = HostWeights({i: list(model.blocks[i].parameters()) for i in weights}, arena, link)

    def block_of(name: str) -> int | None:
        return int(name.split(".")[1]) if name.startswith("blocks.") else None

    homes = Homes(arena, link, block_of, host_weights, frozenset(gradients), frozenset(optimizer))
    streamed = StreamedAdamW(dict(model.named_parameters()), train, homes, seed=7)
    memory = BlockMemory(4, weights=host_weights, gradients=streamed.host_gradients)
    model.run_block = memory
    return model, streamed, memory


def step(model: Model, optimizer: AdamW, memory: Any, number: int) -> float:
    """One step of two micro-batches; the gradients' norm."""
    generator = torch.Generator().manual_seed(number)
    for _ in range(2):
        tokens = torch.randint(64, (2, 17), generator=generator)
        next_token_loss(model, tokens[:, :-1], tokens[:, 1:]).total.div(64).backward()
        if memory is not None:
            memory.end_backward()
    norm = optimizer.gradient_norm()
    optimizer.clip(norm, 0.05)
    optimizer.step(1e-2)
    optimizer.zero_grad()
    return norm


def weights_of(model: Model, memory: Any) -> dict[str, Tensor]:
    home = {} if memory is None else memory.weights.at_home()
    return {name: home.get(p, p.detach()).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.every(8)
def test_streamed_states_are_updated_bit_for_bit(format_: str, mixture: str) -> None:
    plain, streamed = (make(*FORMATS[format_], which) for which in (None, mixture))
    for number in range(3):
        norms = [step(*made, number) for made in (plain, streamed)]
        assert norms[0] == norms[1]
        assert norms[0] > 0.05  # clipping takes part
    expected, found = states_of(plain[1]), states_of(streamed[1])
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for name, tensor in weights_of(plain[0], None).items():
        assert torch.equal(weights_of(streamed[0], streamed[2])[name], tensor), name


def test_the_first_two_blocks_come_before_what_lives_on_the_device_is_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, streamed, memory = make(*FORMATS["fp32"], "optimizer")
    assert isinstance(streamed, StreamedAdamW)
    link, update, fetched = streamed._homes.link, streamed._update_names, []

    def watched(names: list[str], lr: float) -> None:
        fetched.append(link.bytes_fetched)
        update(names, lr)

    monkeypatch.setattr(streamed, "_update_names", watched)
    step(model, streamed, memory, 0)
    block = 2 * sum(p.nbytes for p in model.blocks[0].parameters())
    assert fetched == [2 * block, 2 * block, 3 * block, 4 * block, 4 * block]


@pytest.mark.parametrize("format_", ["masters", "8bit"])
@pytest.mark.every(2)
def test_a_run_goes_on_from_saved_tensors(format_: str) -> None:
    """Saved by a resident optimizer, loaded by one with everything on the host, and the other way round."""
    for first, second in itertools.permutations((None, "all")):
        whole = make(*FORMATS[format_], first)
        for number in range(2):
            step(*whole, number)
        resumed = make(*FORMATS[format_], second)
        for name, tensor in states_of(resumed[1]).items():
            tensor.copy_(states_of(whole[1])[name])
        home = {} if resumed[2] is None else resumed[2].weights.at_home()
        for name, p in resumed[0].named_parameters():
            home.get(p, p.detach()).copy_(weights_of(whole[0], whole[2])[name])
        resumed[1].restore_updates(2)
        assert step(*whole, 2) == step(*resumed, 2)
        expected, found = weights_of(whole[0], whole[2]), weights_of(resumed[0], resumed[2])
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_skipped_step_leaves_no_gradient_behind() -> None:
    plain, streamed = (make(*FORMATS["fp32"], which) for which in (None, "all"))
    for model, optimizer, memory in (plain, streamed):
        tokens = torch.arange(34).view(2, 17)
        next_token_loss(model, tokens[:, :-1], tokens[:, 1:]).total.backward()
        if memory is not None:
            memory.end_backward()
        optimizer.gradient_norm()
        optimizer.zero_grad()
    assert step(*plain, 0) == step(*streamed, 0)


def test_statistics_are_refused_by_name() -> None:
    _, optimizer, _ = make(*FORMATS["fp32"], "optimizer")
    with pytest.raises(PlanError, match=r"memory\.optimizer"):
        optimizer.rule("blocks.0.mlp.down.weight")
