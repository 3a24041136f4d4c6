"""A run that is measured goes on, bit for bit, as one that is not; also when measuring fails half-way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import Batch, Bench, MlpModel, batch, bench, decoder, losses
from states import states_of
from torch import Tensor, nn

from scrimp.config import OptimizerConfig
from scrimp.errors import TrainingError
from scrimp.gemm import LinearPrecision
from scrimp.optim import AdamW
from scrimp.statistics import GAINS, Subject, collect, untouched

FORMATS = ("bf16", "fp8", "fp4")


class Stateful(MlpModel):
    """Keeps books in its forward pass: a counter, and a buffer that is made when it is first needed."""

    def __init__(self, **switches: Any) -> None:
        super().__init__(**switches)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", None)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.cache = tokens.clone() if self.cache is None else self.cache + 1
        return super().forward(tokens)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": decoder,
    "tied, with biases": lambda: decoder(tied_embeddings=True, qkv_bias=True),
    "dropout": lambda: MlpModel(dropout=0.3),
    "batch norm": lambda: MlpModel(batch_norm=True),
    "checkpointed": lambda: MlpModel(checkpointed=True, inner_dropout=0.3),
    "buffers of its own": Stateful,
}


def made_bench(name: str) -> Bench:
    """In the middle of a run: quantized, with earlier gradients, in a mode of its own."""
    torch.manual_seed(5)
    made = bench(MODELS[name](), steps=2)
    made.planned.replan(LinearPrecision("fp8", "fp4", "nvfp4", "fp8"))
    made.train(1, first=2)
    next(made.model.children()).eval()
    made.planned.clock.begin(17, 3)
    return made


def state(made: Bench) -> dict[str, Any]:
    """All that training depends on."""
    model = made.model
    found: dict[str, Any] = {f"weight {n}": p.detach().clone() for n, p in model.named_parameters()}
    found |= {
        f"gradient {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
    }
    found |= {
        f"buffer {n}.{key}": None if value is None else value.clone()
        for n, m in model.named_modules()
        for key, value in m._buffers.items()
    }
    found |= {f"mode {n}": m.training for n, m in model.named_modules()}
    found |= {f"hooks {n}": hooks(m) for n, m in model.named_modules()}
    found |= {f"parameter hooks {n}": len(p._backward_hooks or ()) for n, p in model.named_parameters()}
    found |= {f"precision {n}": layer.precision for n, layer in made.planned.layers.items()}
    found |= {"clock": made.planned.clock.now, "clock is set": made.planned.clock.is_set}
    return found | {"random": torch.get_rng_state(), "optimizer": copy.deepcopy(made.optimizer.state_dict())}


def hooks(module: nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [len(getattr(module, kind)) for kind in kinds]


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Bit for bit, whatever is inside."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where} {key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert one == other, where


@pytest.mark.parametrize(
    ("name", "gains"), [*((name, "auto") for name in MODELS), *(("decoder", gains) for gains in GAINS)]
)
@pytest.mark.every(10)
def test_measuring_leaves_everything_as_it_was(name: str, gains: str) -> None:
    made = made_bench(name)
    for parameter in made.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = state(made)
    gradients = {n: p.grad for n, p in made.model.named_parameters()}
    made.collect(500, FORMATS, gains=gains)
    assert_same(before, state(made))
    assert all(p.grad is gradients[n] for n, p in made.model.named_parameters())


def failing(made: Bench, after: int) -> Callable[[Batch], Iterator[Tensor]]:
    """Losses that raise in the middle of some pass."""
    count = 0

    def make(micro_batches: Batch) -> Iterator[Tensor]:
        nonlocal count
        for loss in made.losses(micro_batches):
            count += 1
            if count > after:
                raise RuntimeError("out of something")
            yield loss

    return make


@pytest.mark.parametrize("after", [0, 1, 2, 4, 9, 13])
@pytest.mark.every(5)
def test_a_failure_in_any_pass_leaves_everything_as_it_was(after: int) -> None:
    made = made_bench("decoder")
    before = state(made)
    with pytest.raises(RuntimeError, match="out of something"):
        collect(made.subject(failing(made, after)), [batch(500)], FORMATS)
    assert_same(before, state(made))


def test_a_failure_inside_backward_leaves_everything_as_it_was() -> None:
    made = made_bench("checkpointed")
    before = state(made)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise RuntimeError("backward broke")

    def make(micro_batches: Batch) -> Iterator[Tensor]:
        first, second = made.losses(micro_batches)
        yield first
        yield Broken.apply(second)

    with pytest.raises(RuntimeError, match="backward broke"):
        collect(made.subject(make), [batch(500)], FORMATS)
    assert_same(before, state(made))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(6)
def test_training_goes_on_as_if_nothing_had_been_measured(name: str) -> None:
    found = []
    for measures in (False, True):
        made = made_bench(name)
        if measures:
            made.collect(500, FORMATS)
            collect(made.subject(), [batch(501), batch(502)], FORMATS)
        found.append((made.train(3, first=20), state(made)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("after", [None, 2, 6])
@pytest.mark.every(4)
def test_an_optimizer_with_master_weights_is_left_alone(after: int | None) -> None:
    found = []
    for measures in (False, True):
        model = decoder().to(torch.bfloat16)
        made = bench(model, compute="bf16")
        train = OptimizerConfig(
            master_weights=True, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip=1.0
        )
        optimizer = AdamW(dict(model.named_parameters()), train)

        def step(number: int, model: nn.Module = model, optimizer: AdamW = optimizer) -> float:
            total = 0.0
            for loss in losses(model, batch(number)):
                loss.backward()
                total += float(loss.detach())
            optimizer.clip(optimizer.gradient_norm(), 1.0)
            optimizer.step(1e-3)
            optimizer.zero_grad()
            return total

        history = [step(0), step(1)]
        if measures:
            make = (lambda made: made.losses)(made) if after is None else failing(made, after)
            subject = Subject(model, made.planned, optimizer, make, "bf16")
            if after is None:
                assert not collect(subject, [batch(500)], FORMATS).unusable()
            else:
                with pytest.raises(RuntimeError, match="out of something"):
                    collect(subject, [batch(500)], FORMATS)
            assert optimizer.gradients() == {}
        history += [step(2), step(3), step(4)]
        found.append((history, {n: t.clone() for n, t in states_of(optimizer).items()}))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


def test_the_context_puts_back_whatever_is_done_inside() -> None:
    made = made_bench("buffers of its own")
    before, model = state(made), made.model

    def meddle() -> None:
        with untouched(model, made.planned):
            made.planned.replan(LinearPrecision.of("fp32"))
            model.eval()
            made.planned.clock.begin(99, 9)
            torch.manual_seed(1)
            model.calls = torch.tensor(7)
            model.cache = None
            model.register_buffer("another", torch.ones(3))
            for parameter in model.parameters():
                assert parameter.grad is None
                parameter.grad = torch.zeros_like(parameter)
            raise TrainingError("stop")

    with pytest.raises(TrainingError):
        meddle()
    assert_same(before, state(made))
