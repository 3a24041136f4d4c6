"""Muon and AdamW together: torch's own optimizers on separate maps, resumed bit for bit, its bytes predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from allocator import allocator_peak
from gradients import give_gradients, take_steps
from states import states_of
from torch import Tensor, nn

from scrimp.config import Architecture, OptimizerConfig
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.optim.muon import Muon, memory
from scrimp.optim.shared_maps import stacked_rows
from scrimp.profiler.memory_trace import TracedStep
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
SETTINGS = OptimizerConfig(name="muon", master_weights=False, weight_decay=0.1, momentum=0.9)
MASTERS = dataclasses.replace(SETTINGS, master_weights=True)
LR = 0.01
STACKED = {"attention.qkv.weight": (64, 32, 32), "mlp.gate_up.weight": (200, 200)}
"""Rows of q, k and v, of gate and up, by hand."""


def made(architecture: Architecture, dtype: torch.dtype, settings: OptimizerConfig) -> tuple[Model, Muon]:
    model = build_model(architecture, dtype=dtype)
    initialise(model, 0)
    return model, Muon(dict(model.named_parameters()), settings, model.spec, seed=3)


def by_torch(architecture: Architecture, steps: int) -> dict[str, Tensor]:
    """Weights after steps of torch's optimizers, every map a parameter of its own."""
    model = build_model(architecture, dtype=torch.float32)
    initialise(model, 0)
    maps, rest = dict[str, list[nn.Parameter]](), dict[str, nn.Parameter]()
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.ndim == 2:
            rows = STACKED.get(name.split(".", 2)[2], (len(parameter),))
            maps[name] = [nn.Parameter(part.clone()) for part in parameter.detach().split(list(rows))]
        else:
            rest[name] = parameter
    muon = torch.optim.Muon(
        [part for parts in maps.values() for part in parts],
        weight_decay=0.1,
        momentum=0.9,
        lr=LR,
        adjust_lr_fn="match_rms_adamw",
    )
    groups = [
        {"params": [p for p in rest.values() if (p.ndim == 2) == decayed], "weight_decay": 0.1 * decayed}
        for decayed in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(SETTINGS.beta1, SETTINGS.beta2), fused=True)
    for step in range(steps):
        model.zero_grad()
        give_gradients(model, step)
        for name, parts in maps.items():
            whole = model.get_parameter(name).grad
            assert whole is not None
            for part, gradient in zip(parts, whole.split([len(p) for p in parts]), strict=True):
                part.grad = gradient.clone()
        muon.step()
        adamw.step()
    return {name: torch.cat([p.detach() for p in parts]) for name, parts in maps.items()} | rest


@pytest.mark.parametrize("architecture", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.every(2)
def test_each_map_is_moved_by_torchs_muon_and_the_rest_by_torchs_adamw(architecture: Architecture) -> None:
    model, optimizer = made(architecture, torch.float32, SETTINGS)
    take_steps(model, optimizer, range(3), LR)
    expected = by_torch(architecture, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_masters_move_as_fp32_weights_do_and_parameters_are_these_rounded() -> None:
    model, optimizer = made(LLAMA, torch.bfloat16, MASTERS)
    plain = build_model(LLAMA, dtype=torch.float32)
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        mine.data = theirs.detach().float()
    reference = Muon(dict(plain.named_parameters()), SETTINGS, plain.spec)
    for step in range(3):
        give_gradients(model, step)
        for name, gradient in optimizer.gradients().items():
            plain.get_parameter(name).grad = gradient.clone()
        for one in (optimizer, reference):
            one.step(LR)
            one.zero_grad()
    masters = states_of(optimizer)
    for name, parameter in plain.named_parameters():
        assert torch.equal(masters[f"{name}.master"], parameter), name
        assert torch.equal(model.get_parameter(name), parameter.bfloat16())


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.every(2)
def test_a_resumed_run_continues_bit_for_bit(master: bool, tmp_path: Path) -> None:
    dtype, settings = (torch.bfloat16, MASTERS) if master else (torch.float32, SETTINGS)
    settings = dataclasses.replace(settings, moments="8bit")  # AdamW's part rounds with noise
    straight, optimizer = made(LLAMA, dtype, settings)
    resumed, again = made(LLAMA, dtype, settings)

    def state(model: Model, one: Muon) -> dict[str, Tensor]:
        return states_of(one) | {name: p.detach() for name, p in model.named_parameters()}

    before = list(state(straight, optimizer))
    take_steps(straight, optimizer, range(2), LR)
    store = CheckpointStore(tmp_path, keep_last=1, keep_every=0)
    store.save(1, state(straight, optimizer), {}, {}, wait=True)
    store.at(1).load(state(resumed, again))
    again.restore_updates(optimizer.num_updates)
    for model, one in ((straight, optimizer), (resumed, again)):
        take_steps(model, one, range(2, 4), LR)
    assert before == list(state(straight, optimizer))
    found = state(resumed, again)
    for name, tensor in state(straight, optimizer).items():
        assert torch.equal(tensor, found[name]), name


def test_embedding_head_norms_and_biases_are_adamws() -> None:
    spec = build_model(QWEN2, device="meta").spec
    names = dict(build_model(QWEN2, device="meta").named_parameters())
    theirs = {name for name in names if stacked_rows(spec, name) is None}
    assert theirs == {name for name, p in names.items() if p.ndim < 2 or not name.startswith("blocks.")}
    assert "embedding.weight" in theirs


WIDE = dataclasses.replace(LLAMA, width=192, num_heads=6, head_size=32, ffn_width=512, vocab_size=1000)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bounds of what oneDNN packs for products in bf16 are tight on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.slow
def test_the_account_foretells_states_and_the_peak_of_the_update(master: bool, moments: str) -> None:
    dtype, format_ = (torch.bfloat16, "bf16") if master else (torch.float32, "fp32")
    settings = dataclasses.replace(MASTERS if master else SETTINGS, moments=moments)  # type: ignore[arg-type]
    costs = TracedStep(
        WIDE,
        precision=format_,
        parameters=format_,
        optimizer=memory(WIDE, settings, format_),
        micro_batch=1,
        sequence=64,
        loss_chunk=0,
    ).costs()
    model, optimizer = made(WIDE, dtype, settings)
    held = sum(tensor.nbytes for _, tensor in states_of(optimizer).items())
    assert costs.ends.optimizer + sum(costs.classes[number].optimizer for number in costs.blocks) == held
    take_steps(model, optimizer, range(1), LR)
    give_gradients(model, 1)
    real = allocator_peak(lambda: optimizer.step(LR))
    assert real <= costs.optimizer_peak <= 1.02 * real
