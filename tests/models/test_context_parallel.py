"""Rows shared by ranks on gloo: whole models against one process, attention against float64, bytes against formulas."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoder_reference import FAMILIES, LLAMA, filled
from distributed import spawn
from late_link import LateLink
from test_tiles import drawn, exactly
from torch import Tensor

from scrimp.config.activations import ALL_ACTIVATIONS, Activations
from scrimp.data import IGNORED, Batch
from scrimp.errors import ConfigError, DeviceError, ModelError
from scrimp.models import spec_of
from scrimp.models.compiled import compile_blocks
from scrimp.models.context_parallel import (
    ContextParallel,
    Division,
    Ring,
    heads_of_rank,
    ring_attention,
    ring_bytes,
    ulysses_bytes,
)
from scrimp.models.model import Model
from scrimp.objectives.next_token import NEXT_TOKEN
from scrimp.runtime.memory import ActivationOffload, BlockMemory, HostArena

CPU = torch.device("cpu")
LENGTH = 32
WHOLE = None
PACKED = ([0, 3, 30, 32, 33, 64], [0, 17, 32, 64])
"""Documents of two micro-batches of two rows."""
Trained = list[tuple[dict[str, Tensor], list[int]]]
"""By case: the loss and all gradients, and the bytes that a rank sent, message by message."""
Attended = list[tuple[list[Tensor], list[int]]]
"""By kind of attention: out, dq, dk and dv, and these bytes."""


@dataclass(frozen=True)
class Case:
    """A model, and how its rows are shared."""

    method: str
    family: str = "llama"
    documents: tuple[list[int], ...] | None = PACKED
    level: str = "keep"
    compiled: bool = False
    bf16: bool = False

    def __str__(self) -> str:
        return f"{self.method}-{self.family}-{'packed' if self.documents else 'whole'}-{self.level}"


def batches(case: Case) -> list[Batch]:
    """Two micro-batches of two rows, some targets of which count nothing."""
    found = []
    for index in range(2):
        tokens = torch.randint(
            0, LLAMA.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(index)
        )
        targets = tokens[:, 1:].clone()
        targets[:, 5:9] = IGNORED
        starts = None if case.documents is None else torch.tensor(case.documents[index], dtype=torch.int32)
        found.append(Batch.of(tokens[:, :-1], targets, starts))
    return found


def model_of(case: Case) -> Model:
    model = filled(FAMILIES[case.family])
    activations = Activations.parse(case.level)
    for block in model.each_block():
        block.activations = activations
    if activations.is_offloaded:
        arena, count = HostArena(2**23, CPU, poisons=True), len(model.blocks)
        offload = ActivationOffload(arena, LateLink(CPU), num_blocks=count, keep_last=False, min_bytes=64)
        model.run_block = BlockMemory(count, offload=offload, leaving=frozenset(range(count)))
    if case.compiled:
        compile_blocks(model)
    return model


def passed(model: Model, parts: list[Batch], bf16: bool = False) -> dict[str, Tensor]:
    """The loss and all gradients, summed over micro-batches."""
    losses = []
    for part in parts:
        with torch.autocast("cpu", enabled=bf16):
            total = NEXT_TOKEN.loss(model, part).total
        total.backward()
        if isinstance(model.run_block, BlockMemory):
            model.run_block.end_backward()
        losses.append(total.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": torch.stack(losses).sum(), **gradients}


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """Bytes of everything that this rank sends to others, message by message."""
    sent: list[int] = []
    batch, exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def counted_batch(operations: list[Any]) -> Any:
        sent.extend(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return batch(operations)

    def counted_exchange(found: Tensor, x: Tensor, *arguments: Any, **more: Any) -> Any:
        size = dist.get_world_size(more["group"])
        sent.append(x.nbytes // size * (size - 1))
        return exchange(found, x, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counted_batch)
        patch.setattr(dist, "all_to_all_single", counted_exchange)
        yield sent


def train_parts(rank: int, cases: Sequence[Case]) -> Trained:
    """What a rank finds for its part of the rows, and the bytes that it sent."""
    found = []
    for case in cases:
        model = model_of(case)
        model.context_parallel = parallel = ContextParallel(case.method)  # type: ignore[arg-type]
        positions = parallel.division(LENGTH).positions(rank)
        with counting() as sent:
            found.append((passed(model, [one.at(positions) for one in batches(case)], case.bf16), sent))
    return found


def summed(ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in ranks]).sum(0) for name in ranks[0]}


def assert_parity(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, expected in right.items():
        error = (found[name] - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max() + 1e-7, (name, error)


def check(world: int, cases: Sequence[Case], folder: Path) -> list[Trained]:
    """Train on so many ranks and in one process, and compare; what each rank found."""
    ranks = spawn(world, train_parts, folder, cases)
    check_training(cases, ranks)
    return ranks


def check_training(cases: Sequence[Case], ranks: Sequence[Trained]) -> None:
    """Compare what each rank found with one process."""
    for index, case in enumerate(cases):
        right = passed(model_of(replace(case, compiled=False, level="keep")), batches(case), case.bf16)
        results = summed([rank[index][0] for rank in ranks])
        if case.bf16:
            exact = passed(model_of(case), batches(case))
            for name, expected in right.items():
                # How far one number is rounded is luck; a ring turns heads by operators, which round more often.
                rounding = 1e-3 * exact[name] if name == "loss" else 1.5 * (expected - exact[name]).norm()
                assert (results[name] - exact[name]).norm() < rounding, (str(case), name)
        else:
            assert_parity(results, right)


COVERING = [
    Case("zigzag"),
    Case("zigzag", "mistral", WHOLE),
    Case("striped", "mistral"),
    Case("striped", "qwen3", WHOLE),
    Case("ulysses", "mistral"),
    Case("zigzag", level="qkv"),
]
METHODS = ("zigzag", "striped", "contiguous", "ulysses")
MATRIX = [
    Case(method, family, documents)
    for method, family, documents in itertools.product(METHODS, FAMILIES, (PACKED, WHOLE))
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_method_family_and_document_layout_trains_as_one_process(world: int, tmp_path: Path) -> None:
    check(world, MATRIX, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["zigzag", "ulysses"])
def test_compiled_blocks_train_as_one_process(method: str, tmp_path: Path) -> None:
    cases = [Case(method, "mistral", compiled=True, level=level) for level in ("keep", "qkv")]
    check(2, cases, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_compiled_ring_breaks_no_graph_and_compiles_once_for_any_documents() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = model_of(Case("zigzag", "mistral", compiled=True, level="qkv"))
    model.context_parallel = ContextParallel("zigzag")
    for documents in (PACKED, [[0, 32, 64], [0, 1, 2, 3, 32, 64]]):
        passed(model, batches(Case("zigzag", documents=tuple(documents))))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_bf16_stays_within_its_rounding(tmp_path: Path) -> None:
    check(2, [Case(method, "mistral", bf16=True) for method in METHODS], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["zigzag", "ulysses"])
def test_recomputation_changes_no_bit_and_a_ring_that_keeps_attention_sends_nothing_again(
    method: str, tmp_path: Path
) -> None:
    cases = [Case(method, "mistral", level=level) for level in ALL_ACTIVATIONS]
    for results in check(2, cases, tmp_path):
        (kept, sent), *others = results
        for case, (found, bytes_sent) in zip(cases[1:], others, strict=True):
            assert all(torch.equal(found[name], kept[name]) for name in kept), case
            level = Activations.parse(case.level).level
            runs_again = level in ("attention", "block") or (level, method) == ("qkv", "ulysses")
            assert (sum(bytes_sent) > sum(sent)) == runs_again, case


ATTENTION = [
    *(
        ("zigzag", window, bounds, True)
        for window in (None, 7)
        for bounds in ((0, 32, 64), (0, 3, 30, 32, 33, 64))
    ),
    ("striped", 7, (0, 3, 30, 32, 33, 64), True),
    ("contiguous", None, (0, 3, 30, 32, 33, 64), True),
    ("contiguous", None, (0, 32, 64), False),
    ("striped", None, (0, 3, 30, 32, 33, 64), False),
    ("zigzag", None, (0, 20, 32, 64), False),
]
"""Scheme, window, documents, causal."""


def attend_parts(rank: int) -> Attended:
    """out, dq, dk, dv of a rank, and the bytes that it sent."""
    found = []
    for scheme, window, bounds, causal in ATTENTION:
        ring = Ring(None, scheme, window=window, causal=causal)  # type: ignore[arg-type]
        division = Division(ring.scheme, LENGTH, ring.size)
        q, k, v, grad = (division.cut(x, rank).requires_grad_() for x in drawn(2, LENGTH))
        with counting() as sent:
            out = ring_attention(q, torch.stack([k, v]), ring, torch.tensor(bounds, dtype=torch.int32))
            gradients = torch.autograd.grad(out, (q, k, v), grad)
        found.append(([out.detach(), *gradients], sent))
    return found


def check_attention(ranks: Sequence[Attended]) -> None:
    """Compare what each rank found with float64, and what it sent with the formula."""
    world = len(ranks)
    expected = ring_bytes(world, rows=2, part=LENGTH // world, kv_heads=2, head_size=8, itemsize=4)
    for index, (scheme, window, bounds, causal) in enumerate(ATTENTION):
        division = Division(scheme, LENGTH, world)  # type: ignore[arg-type]
        right = exactly(division, bounds, window, causal, drawn(2, LENGTH))
        for one, exact in zip(zip(*(rank[index][0] for rank in ranks), strict=True), right, strict=True):
            torch.testing.assert_close(division.joined(one).double(), exact, atol=1e-5, rtol=1e-5)
        for rank in ranks:
            sent = rank[index][1]
            assert (sum(sent[: world - 1]), sum(sent[world - 1 :])) == expected


def exchange_parts(rank: int) -> list[int]:
    """Bytes that Ulysses sends in a forward and a backward pass of one block of each family."""
    found = []
    for attends in EXCHANGED:
        exchange = ContextParallel("ulysses").ulysses(attends, CPU)
        heads = attends.num_heads + 2 * attends.num_kv_heads
        qkv = torch.randn(2, LENGTH // exchange.size, heads, attends.head_size, requires_grad=True)
        with counting() as sent:
            there = exchange.to_heads(qkv)
            assert there.shape[1] == LENGTH
            exchange.to_tokens(there[:, :, : exchange.attends.num_heads]).sum().backward()
        found.append(sum(sent))
    return found


EXCHANGED = [spec_of(FAMILIES[family]).block(0).attention for family in ("llama", "qwen3")]


def check_exchange(ranks: Sequence[list[int]]) -> None:
    """Compare what each rank sent with the formula."""
    for attends, counts in zip(EXCHANGED, zip(*ranks, strict=True), strict=True):
        part = LENGTH // len(ranks)
        assert set(counts) == {2 * ulysses_bytes(attends, len(ranks), rows=2, part=part, itemsize=4)}


def attend_and_exchange(rank: int) -> tuple[Attended, list[int]]:
    return attend_parts(rank), exchange_parts(rank)


def all_of_it(rank: int) -> tuple[Trained, Attended, list[int]]:
    return train_parts(rank, COVERING), *attend_and_exchange(rank)


@pytest.mark.slow
def test_ranks_that_share_rows_train_as_one_process_and_attend_as_float64(tmp_path: Path) -> None:
    trained, attended, exchanged = zip(*spawn(2, all_of_it, tmp_path), strict=True)
    check_training(COVERING, trained)
    check_attention(attended)
    check_exchange(exchanged)


@pytest.mark.slow
def test_four_ranks_attend_as_float64_and_send_what_formulas_say(tmp_path: Path) -> None:
    attended, exchanged = zip(*spawn(4, attend_and_exchange, tmp_path), strict=True)
    check_attention(attended)
    check_exchange(exchanged)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", METHODS)
def test_one_rank_alone_sends_nothing_and_trains_alike(method: str) -> None:
    case = Case(method, "mistral")
    model = model_of(case)
    model.context_parallel = ContextParallel(method)  # type: ignore[arg-type]
    with counting() as sent:
        found = passed(model, batches(case))
    assert_parity(found, passed(model_of(case), batches(case)))
    assert sum(sent) == 0
    assert ring_bytes(1, rows=2, part=LENGTH, kv_heads=2, head_size=8, itemsize=4) == (0, 0)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_carried_out_is_refused_by_name() -> None:
    attends = spec_of(LLAMA).block(0).attention
    cuda = torch.device("cuda" if torch.cuda.is_available() else "meta")
    ring = ContextParallel("zigzag")
    with pytest.raises(ConfigError, match="does not divide"):
        ring.check(attends, 33, device=CPU, dtype=torch.float32)
    with pytest.raises(DeviceError, match="heads of 8 in float32"):
        ring.check(attends, 32, device=cuda, dtype=torch.float32)
    with pytest.raises(ConfigError, match="attention heads do not divide"):
        heads_of_rank(attends, 3)
    with pytest.raises(ConfigError, match="key heads do not divide"):
        heads_of_rank(replace(attends, num_heads=12, num_kv_heads=6), 4)
    assert heads_of_rank(attends, 4) == replace(attends, num_heads=1, num_kv_heads=1)
    model = filled(LLAMA)
    model.context_parallel = ring
    with pytest.raises(ModelError, match="longer than the model's context"):
        model(torch.zeros(1, 66, dtype=torch.int64))
    with pytest.raises(ConfigError, match="does not divide"):
        model(torch.zeros(1, 33, dtype=torch.int64))
