"""The optimizer against torch's own AdamW and against float64 arithmetic."""

import dataclasses
from pathlib import Path

import pytest
import torch
from states import states_of
from torch import Tensor, nn

from scrimp.config import Architecture, OptimizerConfig
from scrimp.errors import CheckpointError, ConfigError
from scrimp.models.model import build_model
from scrimp.optim import AdamW, MomentFormat
from scrimp.optim.adamw_run import memory
from scrimp.profiler.memory_trace import TracedStep
from scrimp.training.checkpoint import Checkpoint, CheckpointStore

TRAIN = OptimizerConfig(master_weights=False, weight_decay=0.1, beta1=0.9, beta2=0.95)
KINDS: dict[str, tuple[torch.dtype, bool, MomentFormat]] = {
    f"{dtype}{'+master' * master}, {moments}": (getattr(torch, dtype), master, moments)
    for dtype, master in (("float32", False), ("bfloat16", True), ("bfloat16", False))
    for moments in ("fp32", "bf16", "8bit")
}


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    matrix, wide = (torch.randn(shape, generator=generator).to(dtype) for shape in ((8, 8), (5, 300)))
    norm = torch.ones(8, dtype=dtype)
    return {"weight": nn.Parameter(matrix), "norm": nn.Parameter(norm), "wide": nn.Parameter(wide)}


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    loss = sum(
        (p.float() * torch.sin(torch.arange(p.numel()) + step).view_as(p)).sum() for p in named.values()
    )
    loss.backward()


def trained(optimizer: AdamW, named: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for micro_batch in range(2):
            set_gradients(named, 2 * step + micro_batch)
        optimizer.step(0.01)
        optimizer.zero_grad()


def state_of(optimizer: AdamW, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return states_of(optimizer) | {name: p.detach() for name, p in named.items()}


def saved(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    store = CheckpointStore(folder, keep_last=1, keep_every=0)
    store.save(1, tensors, {}, {}, wait=True)
    return store.at(1)


def settings(kind: str) -> tuple[torch.dtype, OptimizerConfig]:
    dtype, master, moments = KINDS[kind]
    return dtype, dataclasses.replace(TRAIN, master_weights=master, moments=moments)


@pytest.mark.parametrize("master", [False, True])
def test_fp32_and_master_weights_are_updated_by_torchs_fused_adamw_bit_for_bit(master: bool) -> None:
    ours = parameters(torch.bfloat16 if master else torch.float32)
    theirs = {name: nn.Parameter(p.detach().float()) for name, p in ours.items()}
    optimizer = AdamW(ours, dataclasses.replace(TRAIN, master_weights=master))
    groups = [
        {"params": [theirs["weight"], theirs["wide"]], "weight_decay": 0.1},
        {"params": [theirs["norm"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
    for step in range(5):
        set_gradients(ours, step)
        for name, gradient in optimizer.gradients().items():
            theirs[name].grad = gradient.clone()
        optimizer.step(0.01)
        optimizer.zero_grad()
        reference.step()
    state = states_of(optimizer)
    for name, p in theirs.items():
        assert torch.equal(state[f"{name}.master"] if master else ours[name], p)
        assert torch.equal(ours[name], p.to(ours[name].dtype))
        assert torch.equal(state[f"{name}.exp_avg_sq"], reference.state[p]["exp_avg_sq"])


def test_without_masters_bf16_weights_keep_small_updates_on_average() -> None:
    named = {"matrix": nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))}
    optimizer = AdamW(named, dataclasses.replace(TRAIN, weight_decay=0.0))
    for _ in range(100):
        named["matrix"].sum().backward()
        optimizer.step(1e-4)
        optimizer.zero_grad()
    # A step below 1 is 2^-8: to nearest, not one of these would count.
    assert float(1 - named["matrix"].detach().double().mean()) == pytest.approx(0.01, rel=0.03)


def test_master_weights_keep_updates_that_bf16_would_lose() -> None:
    named = parameters(torch.bfloat16)
    start = named["norm"].float().clone()
    optimizer = AdamW(named, dataclasses.replace(TRAIN, master_weights=True))
    for _ in range(100):
        named["norm"].sum().backward()
        optimizer.step(1e-4)
        optimizer.zero_grad()
    master = states_of(optimizer)["norm.master"]
    torch.testing.assert_close(master, start - 0.01, rtol=0, atol=1e-5)
    assert torch.equal(named["norm"], master.bfloat16())


def test_bf16_gradients_of_micro_batches_are_summed_in_fp32() -> None:
    named = parameters(torch.bfloat16)
    optimizer = AdamW(named, dataclasses.replace(TRAIN, master_weights=True))
    for value in (1.0, *([2.0**-9] * 8)):
        (named["norm"].float() * value).sum().backward()
        assert named["norm"].grad is None
    # In bf16, 1 + 2^-9 is 1: all eight small gradients would have vanished.
    expected = (8 * (1.0 + 8 * 2.0**-9) ** 2) ** 0.5
    assert optimizer.gradient_norm() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clipped_step_is_that_of_gradients_that_are_scaled_by_hand(kind: str) -> None:
    """And of all of them, whatever the update reads; what is below the limit, or has none, stays as it is."""
    dtype, config = settings(kind)
    found = []
    for by_hand in (False, True):
        named = parameters(dtype)
        optimizer = AdamW(named, config, seed=3)
        for step in range(2):
            set_gradients(named, step)
            norm = optimizer.gradient_norm()
            optimizer.clip(norm, 2 * norm)
            optimizer.clip(norm, 0.0)
            if by_hand:
                for gradient in optimizer.gradients().values():
                    gradient.mul_(norm / 4 / norm)
                assert optimizer.gradient_norm() == pytest.approx(norm / 4, rel=1e-2)
            else:
                optimizer.clip(norm, norm / 4)
            optimizer.step(0.01)
            optimizer.zero_grad()
        set_gradients(named, 2)
        optimizer.step(0.01)  # of a norm that is not clipped
        found.append(state_of(optimizer, named))
    for name, tensor in found[1].items():
        assert torch.equal(found[0][name], tensor), name


def test_without_masters_sums_of_micro_batches_are_right_on_average() -> None:
    named = {"matrix": nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))}
    optimizer = AdamW(named, TRAIN)
    for value in (1.0, *([2.0**-9] * 64)):
        (named["matrix"].float() * value).sum().backward()
    total = optimizer.gradients()["matrix"]
    assert total.dtype == torch.bfloat16
    # Each 2^-9 is a quarter of bf16's step above 1: to nearest, the sum would be 1. Were noise used again from one
    # micro-batch to the next, the same quarter of the elements would move each time, by 64 steps.
    assert float(total.double().mean()) == pytest.approx(1.125, abs=5 * 0.03 / 64)
    assert float(total.double().max()) < 1.3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2)
def test_a_resumed_run_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    dtype, train = settings(kind)
    straight, resumed = parameters(dtype), parameters(dtype)
    optimizer, again = AdamW(straight, train, seed=5), AdamW(resumed, train, seed=5)
    trained(optimizer, straight, range(3))
    saved(tmp_path, state_of(optimizer, straight)).load(state_of(again, resumed))
    again.restore_updates(optimizer.num_updates)
    for one, named in ((optimizer, straight), (again, resumed)):
        trained(one, named, range(3, 6))
    found = state_of(again, resumed)
    for name, tensor in state_of(optimizer, straight).items():
        assert torch.equal(tensor, found[name]), name


def test_noise_depends_on_the_seed_the_update_and_the_name() -> None:
    def run(seed: int, updates: int, name: str = "a") -> Tensor:
        generator = torch.Generator().manual_seed(0)
        named = {name: nn.Parameter(torch.randn(64, 64, generator=generator).bfloat16())}
        optimizer = AdamW(named, dataclasses.replace(TRAIN, beta1=0.0, beta2=0.0), seed=seed)
        optimizer.restore_updates(updates)
        named[name].sum().backward()
        optimizer.step(1e-4)
        return named[name].detach()

    assert torch.equal(run(1, 4), run(1, 4))
    assert not torch.equal(run(1, 4), run(2, 4))
    assert not torch.equal(run(1, 4), run(1, 5))
    assert not torch.equal(run(1, 4), run(1, 4, "b"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_parameters_changes_no_bit(kind: str) -> None:
    dtype, train = settings(kind)
    one, other = parameters(dtype), dict(reversed(parameters(dtype).items()))
    first, second = AdamW(one, train), AdamW(other, train)
    trained(first, one, range(3))
    trained(second, other, range(3))
    found = state_of(second, other)
    assert all(torch.equal(tensor, found[name]) for name, tensor in state_of(first, one).items())


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_read_the_moments_of_every_format(kind: str) -> None:
    dtype, train = settings(kind)
    named = parameters(dtype)
    optimizer = AdamW(named, train)
    plain_named = parameters(torch.float32)
    plain = AdamW(plain_named, TRAIN)
    for step in range(4):
        set_gradients(named, step)
        for name, gradient in optimizer.gradients().items():
            plain_named[name].grad = gradient.float()
        optimizer.step(0.001)
        plain.step(0.001)
        optimizer.zero_grad()
    for name in named:
        found, wanted = optimizer.rule(name), plain.rule(name)
        assert found.updates == 4
        for moment in ("exp_avg", "exp_avg_sq"):
            a, b = getattr(found, moment).float(), getattr(wanted, moment)
            assert a.shape == b.shape
            assert float((a - b).norm() / b.norm()) < (1e-6 if KINDS[kind][2] == "fp32" else 0.1)


SMALL = Architecture(
    family="llama",
    vocab_size=96,
    num_layers=2,
    width=72,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    ffn_width=200,
    context=64,
)
ARCHITECTURES = {
    "llama": SMALL,
    "qwen2": dataclasses.replace(SMALL, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": dataclasses.replace(SMALL, family="qwen3", qk_norm=True),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(28)
def test_the_account_knows_the_bytes_of_the_state(kind: str, architecture: Architecture) -> None:
    dtype, train = settings(kind)
    optimizer = AdamW(dict(build_model(architecture, dtype=dtype).named_parameters()), train)
    format_ = "fp32" if dtype == torch.float32 else "bf16"
    costs = TracedStep(
        architecture,
        precision="bf16",
        parameters=format_,
        optimizer=memory(architecture, train, format_),
        micro_batch=1,
        sequence=64,
        loss_chunk=0,
    ).costs()
    traced = costs.ends.optimizer + sum(costs.classes[number].optimizer for number in costs.blocks)
    assert traced == sum(tensor.nbytes for _, tensor in states_of(optimizer).items())


def test_a_checkpoint_of_another_format_is_refused_by_the_tensor(tmp_path: Path) -> None:
    named = parameters(torch.float32)
    checkpoint = saved(tmp_path, states_of(AdamW(named, dataclasses.replace(TRAIN, moments="8bit"))))
    with pytest.raises(CheckpointError, match="exp_avg"):
        checkpoint.load(states_of(AdamW(named, TRAIN)))


def test_parameters_of_other_types_are_refused_by_name() -> None:
    named = {"norm": nn.Parameter(torch.ones(3)), "half": nn.Parameter(torch.ones(3, 3).half())}
    with pytest.raises(ConfigError, match=r"cannot train half.*float16"):
        AdamW(named, TRAIN)
