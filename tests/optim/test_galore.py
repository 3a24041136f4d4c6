"""GaLore and Fira in a model: the published updates of every map, resumed bit for bit, bytes predicted, rules."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from allocator import allocator_peak
from gradients import give_gradients, take_steps
from low_rank_reference import published
from states import states_of
from torch import Tensor, nn

from scrimp.config import Architecture, OptimizerConfig
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.optim.galore import GaLore, memory
from scrimp.profiler.memory_trace import TracedStep
from scrimp.statistics.sensitivity import STEP, sensitivity
from scrimp.training.checkpoint import CheckpointStore

LLAMA = Architecture(
    family="llama",
    vocab_size=96,
    num_layers=2,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    ffn_width=200,
    context=64,
)
QWEN2 = dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True)
RANK, EVERY, SCALE, LR, DECAY = 40, 2, 0.25, 0.01, 0.1
"""Keys and values have 32 rows: they are updated in full."""
SETTINGS = {
    name: OptimizerConfig(
        name=name,
        master_weights=False,
        weight_decay=DECAY,
        rank=RANK,
        refresh_every=EVERY,
        low_rank_scale=SCALE,
    )
    for name in ("galore", "fira")
}
STACKED = {"attention.qkv.weight": (64, 32, 32), "mlp.gate_up.weight": (200, 200)}
"""Rows of q, k and v, of gate and up, by hand."""
both = pytest.mark.parametrize("name", ["galore", "fira"])


def made(
    architecture: Architecture, settings: OptimizerConfig, dtype: torch.dtype = torch.float32
) -> tuple[Model, GaLore]:
    model = build_model(architecture, dtype=dtype)
    initialise(model, 0)
    return model, GaLore(dict(model.named_parameters()), settings, model.spec, seed=3)


def by_hand(settings: OptimizerConfig, weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """A map after these gradients, in float64."""
    found, given = weight.double(), [g.double() for g in gradients]
    if min(weight.shape) <= RANK:
        one = nn.Parameter(torch.zeros_like(found))
        adam, updates = torch.optim.Adam([one], lr=1.0, betas=(settings.beta1, settings.beta2)), []
        for g in given:
            before, one.grad = one.detach().clone(), g
            adam.step()
            updates.append(before - one.detach())
    else:
        numbers = settings.beta1, settings.beta2, settings.eps
        made, _ = published([g.numpy() for g in given], RANK, EVERY, *numbers, fira=settings.name == "fira")
        updates = [torch.from_numpy(np.ascontiguousarray(one)) for one in made]
    for update in updates:
        found = (1 - LR * DECAY) * found - LR * SCALE * update
    return found


@both
@pytest.mark.parametrize("architecture", [LLAMA, QWEN2], ids=["llama", "qwen2"])
def test_each_map_moves_as_published_and_the_rest_by_torchs_adamw(
    architecture: Architecture, name: str
) -> None:
    settings, steps = SETTINGS[name], 3
    model, optimizer = made(architecture, settings)
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    reference = build_model(architecture, dtype=torch.float32)
    reference.load_state_dict(start)
    rest = {k: p for k, p in reference.named_parameters() if p.ndim == 1 or not k.startswith("blocks.")}
    groups = [
        {"params": [p for p in rest.values() if (p.ndim == 2) == decayed], "weight_decay": DECAY * decayed}
        for decayed in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(settings.beta1, settings.beta2), fused=True)
    seen: dict[str, list[Tensor]] = {key: [] for key in start}
    for step in range(steps):
        give_gradients(model, step)
        for key, gradient in optimizer.gradients().items():
            seen[key].append(gradient.clone())
            reference.get_parameter(key).grad = gradient.clone()
        optimizer.step(LR)
        optimizer.zero_grad()
        adamw.step()
    for key, parameter in model.named_parameters():
        if key in rest:
            assert torch.equal(parameter, rest[key]), key
            continue
        sizes = STACKED.get(key.split(".", 2)[2], (len(parameter),))
        maps = zip(
            start[key].split(sizes), *(g.split(sizes) for g in seen[key]), parameter.split(sizes), strict=True
        )
        for before, *gradients, after in maps:
            expected = by_hand(settings, before, gradients)
            torch.testing.assert_close(after.detach().double(), expected, rtol=0, atol=2e-6)


@both
def test_masters_move_as_fp32_weights_do_and_parameters_are_these_rounded(name: str) -> None:
    model, optimizer = made(LLAMA, dataclasses.replace(SETTINGS[name], master_weights=True), torch.bfloat16)
    plain = build_model(LLAMA, dtype=torch.float32)
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        mine.data = theirs.detach().float()
    reference = GaLore(dict(plain.named_parameters()), SETTINGS[name], plain.spec)
    for step in range(3):
        give_gradients(model, step)
        for key, gradient in optimizer.gradients().items():
            plain.get_parameter(key).grad = gradient.clone()
        for one in (optimizer, reference):
            one.step(LR)
            one.zero_grad()
    masters = states_of(optimizer)
    for key, parameter in plain.named_parameters():
        assert torch.equal(masters[f"{key}.master"], parameter), key
        assert torch.equal(model.get_parameter(key), parameter.bfloat16())


@both
@pytest.mark.parametrize("at", [3, 4], ids=["between two projectors", "at a new projector"])
def test_a_resumed_run_continues_bit_for_bit(name: str, at: int, tmp_path: Path) -> None:
    straight, optimizer = made(LLAMA, SETTINGS[name])
    resumed, again = made(LLAMA, SETTINGS[name])

    def state(model: Model, one: GaLore) -> dict[str, Tensor]:
        return states_of(one) | {key: p.detach() for key, p in model.named_parameters()}

    before = list(state(straight, optimizer))
    take_steps(straight, optimizer, range(at), LR)
    store = CheckpointStore(tmp_path, keep_last=1, keep_every=0)
    store.save(1, state(straight, optimizer), {}, {}, wait=True)
    store.at(1).load(state(resumed, again))
    again.restore_updates(optimizer.num_updates)
    for model, one in ((straight, optimizer), (resumed, again)):
        take_steps(model, one, range(at, at + 3), LR)
    assert before == list(state(straight, optimizer))
    found = state(resumed, again)
    for key, tensor in state(straight, optimizer).items():
        assert torch.equal(tensor, found[key]), key


def test_projectors_are_made_anew_every_so_many_updates_alone() -> None:
    model, optimizer = made(LLAMA, dataclasses.replace(SETTINGS["galore"], refresh_every=3))
    key, seen = "blocks.0.mlp.down.weight.projector", []
    for step in range(7):
        take_steps(model, optimizer, range(step, step + 1), LR)
        seen.append(states_of(optimizer)[key].clone())
    assert [torch.equal(a, b) for a, b in itertools.pairwise(seen)] == [True, True, False] * 2


WIDE = dataclasses.replace(LLAMA, width=192, num_heads=6, head_size=32, ffn_width=512, vocab_size=1000)


def hand_counted(rank: int, *, fira: bool, master: bool) -> int:
    """Bytes of the states of `WIDE`."""
    found = 0
    for rows, columns in [(192, 192), (64, 192), (64, 192), (192, 192), (512, 192), (512, 192), (192, 512)]:
        short, long = min(rows, columns), max(rows, columns)
        found += 2 * short * long if rank >= short else short * rank + 2 * rank * long + fira
        found += rows * columns * master
    rest = 2 * 1000 * 192 + 2 * 2 * 192 + 192  # embedding, head, norms
    return 4 * (2 * found + (2 + master) * rest)


@both
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("rank", [48, 100])
@pytest.mark.every(3)
def test_the_account_foretells_states_and_the_peak_of_the_update(rank: int, master: bool, name: str) -> None:
    dtype, format_ = (torch.bfloat16, "bf16") if master else (torch.float32, "fp32")
    settings = dataclasses.replace(SETTINGS[name], master_weights=master, rank=rank, refresh_every=1)
    costs = TracedStep(
        WIDE,
        precision=format_,
        parameters=format_,
        optimizer=memory(WIDE, settings, format_),
        micro_batch=1,
        sequence=64,
        loss_chunk=0,
    ).costs()
    model, optimizer = made(WIDE, settings, dtype)
    held = sum(tensor.nbytes for tensor in states_of(optimizer).values())
    assert held == hand_counted(rank, fira=name == "fira", master=master)
    assert costs.ends.optimizer + sum(costs.classes[number].optimizer for number in costs.blocks) == held
    take_steps(model, optimizer, range(1), LR)
    give_gradients(model, 1)
    real = allocator_peak(lambda: optimizer.step(LR))
    assert real <= costs.optimizer_peak <= 1.02 * real


@both
def test_the_rule_is_what_the_next_step_makes_of_a_gradient(name: str) -> None:
    model, optimizer = made(LLAMA, dataclasses.replace(SETTINGS[name], refresh_every=100, weight_decay=0.0))
    for step in range(3):
        give_gradients(model, step)
        weight = model.get_parameter("blocks.0.attention.qkv.weight")
        rule, gradient = optimizer.rule("blocks.0.attention.qkv.weight"), weight.grad
        assert gradient is not None
        states = {key: one.clone() for key, one in states_of(optimizer).items()}
        expected, before = rule.direction(gradient), weight.detach().clone()
        assert all(torch.equal(one, states[key]) for key, one in states_of(optimizer).items())
        optimizer.step(0.5)
        optimizer.zero_grad()
        torch.testing.assert_close((before - weight.detach()) / 0.5, expected, rtol=0, atol=1e-6)


@both
def test_the_sensitivity_is_that_of_a_brute_force_perturbation(name: str) -> None:
    """The update by the same history with a disturbed last gradient, by the published formulas."""
    model, optimizer = made(LLAMA, dataclasses.replace(SETTINGS[name], refresh_every=100))
    key = "blocks.0.mlp.down.weight"
    history = []
    for step in range(3):
        give_gradients(model, step)
        gradient = model.get_parameter(key).grad
        assert gradient is not None
        history.append(gradient.double().numpy().copy())
        optimizer.step(LR)
        optimizer.zero_grad()
    give_gradients(model, 3)
    last = model.get_parameter(key).grad
    assert last is not None

    def moved(gradient: Tensor) -> Tensor:
        settings = SETTINGS[name]
        numbers = settings.beta1, settings.beta2, settings.eps
        given = [*history, gradient.numpy()]
        made, _ = published(given, RANK, 100, *numbers, fira=name == "fira")
        return SCALE * torch.from_numpy(np.ascontiguousarray(made[-1]))

    noise = torch.randn(last.shape, generator=torch.Generator().manual_seed(7)).double()
    size = STEP * float(last.square().mean().sqrt())
    change = moved(last.double() + size * noise) - moved(last.double())
    found = sensitivity(optimizer.rule(key), last, torch.Generator().manual_seed(7))
    assert found == pytest.approx(float(change.square().mean().sqrt()) / size, rel=1e-3)
