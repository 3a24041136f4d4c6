"""Making activations again in backward: no number changes, less is kept, and nothing more runs than must."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from test_execute import batch
from test_proof import ARCHITECTURE, UNTIED, realised
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.config.activations import LEVELS, Activations
from scrimp.data import Batch
from scrimp.errors import PlanError, TrainingError
from scrimp.gemm import observing
from scrimp.runtime import Executable, prove

STARTS = torch.tensor([0, 40, 64, 100, 128], dtype=torch.int32)
PRECISIONS = [
    ("fp32", "fp32"),
    ("bf16", "fp32"),
    ("bf16", "bf16"),
    ("fp8", "fp32"),
    ("nvfp4,head=fp8", "bf16"),
    ("nvfp4,*.wgrad=bf16,*.saved=fp8", "fp32"),
    ("fp8,*.mlp.down.saved=recompute,blocks.0.*=bf16", "bf16"),
]


def set_level(executable: Executable, level: str) -> None:
    for block in executable.model.blocks:
        block.activations = Activations.parse(level)


def passed(executable: Executable, starts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of two micro-batches."""
    executable.model.zero_grad()
    losses = []
    for micro_batch in range(2):
        executable.begin(3, 128 * micro_batch)
        total = executable.loss(Batch.of(*batch(), starts)).total
        total.backward()
        losses.append(total.detach())
    return torch.stack(losses), {
        name: p.grad for name, p in executable.model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole rows", "documents"])
@pytest.mark.parametrize(("precision", "parameters"), PRECISIONS)
@pytest.mark.every(18)
def test_no_level_changes_a_number(precision: str, parameters: str, starts: Tensor | None) -> None:
    architecture = UNTIED if "nvfp4" in precision else ARCHITECTURE
    _, executable = realised(precision, parameters, architecture)
    loss, expected = passed(executable, starts)
    assert set(expected) == {name for name, _ in executable.model.named_parameters()}
    for level in LEVELS[1:]:
        set_level(executable, level)
        found_loss, found = passed(executable, starts)
        assert torch.equal(loss, found_loss), level
        for name, grad in expected.items():
            assert torch.equal(found[name], grad), (level, name)


@pytest.mark.parametrize("family", ["olmo2", "gemma3_text"])
@pytest.mark.parametrize(("precision", "parameters"), [("bf16", "fp32"), ("nvfp4", "bf16")])
@pytest.mark.every(6)
def test_no_level_changes_a_number_of_another_kind(family: str, precision: str, parameters: str) -> None:
    architecture = dataclasses.replace(
        UNTIED, family=family, qk_norm=True, sliding_window=None if family == "olmo2" else 16
    )
    _, executable = realised(precision, parameters, architecture)
    loss, expected = passed(executable, STARTS)
    for level in LEVELS[1:]:
        set_level(executable, level)
        found_loss, found = passed(executable, STARTS)
        assert torch.equal(loss, found_loss), level
        assert all(torch.equal(found[name], grad) for name, grad in expected.items()), level


@pytest.mark.parametrize(
    ("precision", "parameters", "share"),
    [
        ("fp32", "fp32", None),
        ("fp8,*.mlp.down.A.saved=recompute", "bf16", None),
        ("fp32", "fp32", 0.1),
        ("bf16", "fp32", 0.1),
    ],
)
@pytest.mark.every(3)
def test_no_level_changes_a_number_of_factors(precision: str, parameters: str, share: float | None) -> None:
    architecture = dataclasses.replace(ARCHITECTURE, rank=8, sparse_share=share)
    _, executable = realised(precision, parameters, architecture)
    loss, expected = passed(executable, STARTS)
    for level in LEVELS[1:]:
        set_level(executable, level)
        found_loss, found = passed(executable, STARTS)
        assert torch.equal(loss, found_loss), level
        assert all(torch.equal(found[name], grad) for name, grad in expected.items()), level


def test_blocks_may_differ() -> None:
    _, executable = realised("nvfp4", "fp32", UNTIED)
    loss, expected = passed(executable, None)
    for block, level in zip(executable.model.blocks, ("qkv", "norms"), strict=True):
        block.activations = Activations(level)
    found_loss, found = passed(executable, None)
    assert torch.equal(loss, found_loss)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def kept_bytes(executable: Executable) -> int:
    """Bytes of all storages that autograd holds between the passes, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in executable.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = executable.loss(Batch.of(*batch())).total
    total.backward()
    return sum(kept.values())


@pytest.mark.parametrize("precision", ["fp32", "nvfp4,*.saved=bf16"])
def test_each_level_keeps_less_than_the_one_before(precision: str) -> None:
    """Selective checkpointing stores its results beside autograd: `qkv` is measured in test_memory_trace."""
    _, executable = realised(precision, "fp32", ARCHITECTURE)
    kept = []
    for level in (level for level in LEVELS if level != "qkv"):
        set_level(executable, level)
        kept.append(kept_bytes(executable))
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)


class Products(TorchDispatchMode):
    """Counts matrix products and attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"):
            self.counts["attention" if "attention" in name else "product"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("level", "products", "attention"),
    [
        ("keep", 0, 0),
        ("swiglu", 0, 0),
        ("norms", 0, 0),
        ("mlp", 1, 0),
        ("qkv", 2, 0),
        ("attention", 2, 1),
        ("block", 3, 1),
    ],
)
def test_only_what_is_read_runs_again(level: str, products: int, attention: int) -> None:
    """The last product of a part is read by nobody: down and, but for the whole block, out do not run again."""
    _, executable = realised("fp32", "fp32", UNTIED)
    with Products() as plain:
        executable.loss(Batch.of(*batch())).total.backward()
    set_level(executable, level)
    with Products() as found:
        executable.loss(Batch.of(*batch())).total.backward()
    blocks = len(executable.model.blocks)
    assert found.counts["product"] - plain.counts["product"] == products * blocks
    assert found.counts["attention"] == (1 + attention) * plain.counts["attention"] > 0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("level", ["norms", "mlp", "block"])
def test_planned_products_that_nobody_reads_do_not_run_again(level: str, compiled: bool) -> None:
    _, executable = realised("nvfp4", "fp32", UNTIED)
    set_level(executable, level)
    if compiled:
        torch._dynamo.reset()
        for block in executable.model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    ran: Counter[tuple[str, str]] = Counter()
    with observing(lambda execution: ran.update([(execution.layer, execution.gemm)])):
        executable.loss(Batch.of(*batch())).total.backward()
    runs = {"norms": (1, 1, 1), "mlp": (1, 1, 2), "block": (2, 2, 2)}[level]
    for layer, number in zip(("attention.qkv", "attention.out", "mlp.gate_up"), runs, strict=True):
        assert ran[f"blocks.0.{layer}", "fprop"] == number, layer
    assert ran["blocks.0.mlp.down", "fprop"] == 1


@pytest.mark.parametrize("precision", ["bf16", "fp8,*.mlp.down.saved=recompute"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.every(7)
def test_the_proof_holds_at_every_level(precision: str, level: str) -> None:
    plan, executable = realised(precision, "fp32", UNTIED)
    set_level(executable, level)
    prove(executable, plan)
    # It still sees a lie: what runs again is not what hides it.
    lie = dataclasses.replace(plan.gemms["blocks.1.attention.qkv"], fprop="nvfp4")
    with pytest.raises(TrainingError, match="not those of the plan"):
        prove(executable, dataclasses.replace(plan, gemms=plan.gemms | {"blocks.1.attention.qkv": lie}))


def test_evaluation_keeps_nothing_and_says_the_same() -> None:
    _, executable = realised("fp8", "fp32", UNTIED)
    with torch.no_grad():
        expected = executable.loss(Batch.of(*batch())).total
        set_level(executable, "block")
        assert torch.equal(executable.loss(Batch.of(*batch())).total, expected)


def test_names_of_choices() -> None:
    for text in ("keep", "qkv", "block+offload"):
        assert str(Activations.parse(text)) == text
    with pytest.raises(PlanError, match="keep, swiglu, norms"):
        Activations.parse("blocks")
    assert Activations("mlp").recomputes("swiglu")
    assert not Activations("mlp").recomputes("qkv")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "nvfp4", "fp8,*.mlp.down.saved=recompute"])
def test_compiled_blocks_recompute_too(precision: str) -> None:
    _, kept = realised(precision, "fp32", UNTIED)
    expected: tuple[Tensor, dict[str, Tensor]] | None = None
    for level in LEVELS:
        torch._dynamo.reset()
        _, executable = realised(precision, "fp32", UNTIED)
        set_level(executable, level)
        for block in executable.model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        found = passed(executable, None)
        expected = expected or found
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items()), level
    assert expected is not None
    torch.testing.assert_close(expected[0], passed(kept, None)[0])
