"""Blocks that the CPU updates: the numbers of a resident run."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_link import LateLink
from losses import next_token_loss
from property_tests import examples
from states import states_of
from test_streaming import ARCHITECTURE, CPU, FORMATS
from torch import Tensor

from scrimp.config import OptimizerConfig
from scrimp.errors import PlanError
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.optim import AdamW, StreamedAdamW
from scrimp.optim.cpu_update import CpuUpdates
from scrimp.optim.streaming import Homes
from scrimp.runtime.memory import BlockMemory, HostArena, HostLink, HostWeights

LR = 1e-2
MADE: list[Made] = []
FP32_8BIT = {"fp32 8bit": (torch.float32, dataclasses.replace(FORMATS["fp32"][1], moments="8bit"))}
MASTERS_8BIT = {"masters 8bit": (torch.bfloat16, dataclasses.replace(FORMATS["masters"][1], moments="8bit"))}
ALL_FORMATS = FORMATS | FP32_8BIT | MASTERS_8BIT


@dataclasses.dataclass
class Made:
    """A model and its optimizer."""

    dtype: torch.dtype
    train: OptimizerConfig
    cpu: Iterable[int] | None = None
    """Blocks that the CPU updates; None: everything is resident."""
    weights: Iterable[int] = ()
    visiting: Iterable[int] = ()

    def __post_init__(self) -> None:
        MADE.append(self)
        self.model = build_model(ARCHITECTURE, dtype=self.dtype)
        initialise(self.model, 0)
        self.memory: BlockMemory | None = None
        parameters = dict(self.model.named_parameters())
        if self.cpu is None:
            self.optimizer = AdamW(parameters, self.train, seed=7)
            return
        self.arena = arena = HostArena(16 << 20, CPU, poisons=True)
        link = LateLink(CPU)
        self.host_weights = HostWeights(
            {i: list(self.model.blocks[i].parameters()) for i in self.weights}, arena, link
        )
        cpu = frozenset(self.cpu)
        homes = Homes(arena, link, block_of, self.host_weights, cpu, frozenset(self.visiting), cpu)
        streamed = StreamedAdamW(parameters, self.train, homes, seed=7)
        self.optimizer = streamed
        self.memory = BlockMemory(4, weights=self.host_weights, gradients=streamed.host_gradients)
        self.model.run_block = self.memory

    def passes(self, number: int, count: int, scale: float = 1.0) -> None:
        """The micro-batches of a step."""
        generator = torch.Generator().manual_seed(number)
        for _ in range(count):
            tokens = torch.randint(64, (2, 17), generator=generator)
            (next_token_loss(self.model, tokens[:, :-1], tokens[:, 1:]).total * (scale / 64)).backward()
            if self.memory is not None:
                self.memory.end_backward()

    def step(self, number: int, count: int = 2, *, clip: float = 0.05, scale: float = 1.0) -> float:
        """As the training loop does it: a step whose norm is not finite is skipped."""
        self.passes(number, count, scale)
        norm = self.optimizer.gradient_norm()
        if torch.tensor(norm).isfinite():
            self.optimizer.clip(norm, clip)
            self.optimizer.step(LR)
        self.optimizer.zero_grad()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Copies of weights and states, where they live."""
        home = {} if self.memory is None else self.host_weights.at_home()
        found = {name: home.get(p, p.detach()) for name, p in self.model.named_parameters()}
        return {name: t.clone() for name, t in (*found.items(), *states_of(self.optimizer).items())}


def block_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


def assert_same(found: Made, expected: Made) -> None:
    states = found.state(), expected.state()
    assert list(states[0]) == list(states[1])
    for name, tensor in states[1].items():
        assert torch.equal(states[0][name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture(autouse=True)
def no_thread_outlives_its_optimizer() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().optimizer.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("scrimp-update")]


@pytest.mark.parametrize("clip", [0.05, 0.0])
@pytest.mark.parametrize("format_", ALL_FORMATS)
@pytest.mark.every(5)
def test_the_cpu_updates_bit_for_bit(format_: str, clip: float) -> None:
    plain = Made(*ALL_FORMATS[format_])
    made = Made(*ALL_FORMATS[format_], cpu=range(4))
    for number, count in enumerate((1, 3, 1)):
        norms = [one.step(number, count, clip=clip) for one in (plain, made)]
        assert norms[0] == norms[1] > 0.05  # the norm above which it clips
    assert_same(made, plain)


@pytest.mark.parametrize(
    ("cpu", "weights", "visiting"),
    [(range(4), range(4), ()), ((2, 3), (0, 1, 2), (0,)), ((1,), (1, 3), (2, 3)), ((3,), (), ())],
)
@pytest.mark.parametrize("format_", ["masters", "bf16"])
@pytest.mark.every(3)
def test_any_mixture_with_visiting_states_and_weights_on_the_host_is_bit_equal(
    format_: str, cpu: Iterable[int], weights: Iterable[int], visiting: Iterable[int]
) -> None:
    plain = Made(*FORMATS[format_])
    made = Made(*FORMATS[format_], cpu=cpu, weights=weights, visiting=visiting)
    for number in range(2):
        assert plain.step(number) == made.step(number)
    assert_same(made, plain)


@examples(12)
@given(
    format_=st.sampled_from(sorted(ALL_FORMATS)),
    scales=st.lists(st.sampled_from((1.0, 0.2, 0.01, float("inf"), float("nan"))), min_size=2, max_size=4),
)
@pytest.mark.slow
def test_a_clip_that_is_sometimes_hit_and_gradients_that_are_not_finite_change_nothing(
    format_: str, scales: list[float]
) -> None:
    """Norms are around 1 times the scale: clipped, not clipped, skipped."""
    plain = Made(*ALL_FORMATS[format_])
    made = Made(*ALL_FORMATS[format_], cpu=range(4), weights=(0, 3))
    for number, scale in enumerate(scales):
        norms = [one.step(number, clip=0.1, scale=scale) for one in (plain, made)]
        assert norms[0] == norms[1] or all(norm != norm for norm in norms)
        assert_same(made, plain)


@pytest.mark.parametrize("format_", ["fp32", "masters", "8bit"])
@pytest.mark.every(3)
def test_a_run_goes_on_from_saved_tensors(format_: str) -> None:
    """Saved by a resident optimizer, loaded by one on the CPU, and the other way round."""
    there = {"cpu": range(4), "weights": (0, 2)}
    for first, second in itertools.permutations(({}, there)):
        whole, resumed = Made(*FORMATS[format_], **first), Made(*FORMATS[format_], **second)  # type: ignore[arg-type]
        for number in range(2):
            whole.step(number)
        saved = whole.state()
        home = {} if resumed.memory is None else resumed.host_weights.at_home()
        for name, p in resumed.model.named_parameters():
            home.get(p, p.detach()).copy_(saved[name])
        for name, tensor in states_of(resumed.optimizer).items():
            tensor.copy_(saved[name])
        resumed.optimizer.restore_updates(2)
        assert whole.step(2) == resumed.step(2)
        assert_same(resumed, whole)


def test_what_fails_in_the_thread_fails_the_step_and_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made(*FORMATS["fp32"], cpu=range(4))
    update = StreamedAdamW._update_on_cpu

    def failing(self: StreamedAdamW, block: int, *rest: object) -> None:
        update(self, block, *rest)  # type: ignore[arg-type]
        if block == 1:
            raise ArithmeticError("block 1")

    monkeypatch.setattr(StreamedAdamW, "_update_on_cpu", failing)
    made.passes(0, 1)
    with pytest.raises(ArithmeticError, match="block 1"):
        made.optimizer.step(LR)
    assert isinstance(made.optimizer, StreamedAdamW)
    assert not made.optimizer._cpu._begun


def test_blocks_are_updated_in_order_one_at_a_time_and_what_has_not_begun_never_does() -> None:
    updates, ran, go, runs = CpuUpdates(range(4)), list[int](), threading.Event(), threading.Event()

    def update(block: int) -> None:
        ran.append(block)
        if block == 1:
            runs.set()
            go.wait(10)

    for block in range(4):
        updates.begin(block, lambda block=block: update(block))
    updates.finish(0)
    assert runs.wait(10)
    waiting = [updates._begun[block] for block in (2, 3)]

    def go_on_once_they_are_cancelled() -> None:
        while not all(one.cancelled() for one in waiting):
            time.sleep(0.001)
        go.set()

    threading.Thread(target=go_on_once_they_are_cancelled, daemon=True).start()
    updates.stop()
    assert ran == [0, 1]
    updates.close()


def test_the_arena_holds_gradients_weights_and_states() -> None:
    made = Made(*FORMATS["masters"], cpu=(2, 3))
    made.step(0)
    parameters = [p.numel() for block in made.model.blocks[2:] for p in block.parameters()]
    # gradients and masters in fp32, moments in fp32, weights in bf16
    sizes = [-(-count * size // 512) * 512 for count in parameters for size in (4, 4, 4, 4, 2)]
    assert made.arena.peak == sum(sizes)


def test_states_on_the_cpu_without_gradients_there_are_refused() -> None:
    arena, link = HostArena(1 << 20, CPU), HostLink(CPU)
    with pytest.raises(PlanError, match="gradients"):
        Homes(
            arena,
            link,
            block_of,
            HostWeights({}, arena, link),
            frozenset({1}),
            frozenset(),
            frozenset({0, 1}),
        )
