"""Live bytes that the tracker counts against those of torch's own profiler, and of fake tensors."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from allocator import allocator_peak
from real_steps import RealStep, Setting
from test_peaks import FORMATS, LLAMA, TIED, in_products
from torch._subclasses.fake_tensor import FakeTensorMode

from scrimp.formats import Noise
from scrimp.formats.grouping import ends_alone
from scrimp.gemm.backends import NumbaBackend
from scrimp.gemm.problem import AXES, Use, operands_of
from scrimp.models.flash import Gpu
from scrimp.precision import Gemm
from scrimp.profiler.memory_trace import StorageTracker
from scrimp.profiler.memory_trace.remembered import RememberedBackend
from scrimp.profiler.memory_trace.workspace import WorkspaceRule, cpu_workspace, cuda_workspace


@pytest.mark.parametrize(
    "setting",
    [
        Setting(LLAMA, sequence=256, micro_batches=2),
        Setting(LLAMA, sequence=256, activations=("mlp",), **FORMATS["autocast"]),
        Setting(LLAMA, sequence=128, rules="fp8", **FORMATS["bf16"]),
        Setting(TIED, sequence=64, loss_chunk=32),
    ],
    ids=["fp32", "autocast", "fp8", "tied"],
)
@pytest.mark.every(4)
def test_a_real_step_peaks_where_the_allocator_does(setting: Setting) -> None:
    step = RealStep(setting)
    step()  # tables that are made once
    with StorageTracker(workspace=cpu_workspace) as tracker:
        step()
    gc.collect()
    real, room = allocator_peak(step), in_products(setting)
    assert (1 - 1e-4) * real <= tracker.peak <= (1 + 1e-4) * real + room
    assert tracker.live == 0


def test_only_new_storages_count_and_only_as_long_as_they_live() -> None:
    outside = torch.ones(1000)
    with StorageTracker(granule=512) as tracker:
        view = outside[10:].add_(1)
        assert (tracker.live, tracker.peak) == (0, 0)
        first = torch.empty(100)
        second = first.view(10, 10).t()
        assert tracker.live == 512
        third = view + 1
        assert tracker.live == 512 + 4096
        del first, third
        assert (tracker.live, tracker.peak) == (512, 512 + 4096)
        tracker.reset_peak()
        assert tracker.peak == 512
        del second
    assert tracker.live == 0


def test_a_measurement_inside_does_not_forget_the_peak_before() -> None:
    with StorageTracker() as tracker:
        torch.empty(1000)
        kept = torch.empty(10)
        with tracker.measuring() as measured:
            torch.empty(100)
        assert (measured.peak, tracker.peak) == (400, 4000)
        tracker.touch(8000)
    assert tracker.peak == 8000 + kept.nbytes


def hidden_bytes(run: object) -> int:
    """What a function allocates at most beside its result."""
    results: list[object] = []
    peak = allocator_peak(lambda: results.append(run()))  # type: ignore[operator]
    return peak - sum(t.nbytes for t in results[0] if isinstance(t, torch.Tensor))  # type: ignore[attr-defined]


def query_and_key(dtype: torch.dtype, rows: int, heads: int, length: int, size: int) -> list[torch.Tensor]:
    """As a block has them: two query heads per key, side by side by token."""
    qk = torch.randn(rows, length, heads + heads // 2, size).to(dtype).transpose(1, 2)
    return list(qk.split([heads, heads // 2], dim=1))


@pytest.mark.parametrize("shape", [(1, 2, 30, 32), (2, 4, 65, 33), (1, 2, 256, 32), (2, 8, 1025, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_of_attention(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    q, k = query_and_key(dtype, *shape)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert cpu_workspace(flash, (q, k, k, 0.0, True), {}) == hidden_bytes(lambda: flash(q, k, k, 0.0, True))


@pytest.mark.parametrize("shape", [(2, 4, 65, 33), (1, 2, 256, 32), (2, 8, 1025, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_of_attentions_backward_pass(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    torch.set_num_threads(1)  # the profiler sees the products of one
    q, k = query_and_key(dtype, *shape)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, True)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    arguments = torch.ones_like(out), q, k, k, out, sums, 0.0, True
    hidden = hidden_bytes(lambda: flash(*arguments))
    assert hidden <= cpu_workspace(flash, arguments, {}) <= 1.6 * hidden


@pytest.mark.parametrize("rule", [cpu_workspace, cuda_workspace(Gpu())])
def test_workspace_of_a_softmax_that_knows_empty_rows(rule: WorkspaceRule) -> None:
    scores, softmax = torch.randn(2, 4, 96, 128), torch.ops.aten._safe_softmax.default
    hidden = hidden_bytes(lambda: (softmax(scores, -1),))
    assert hidden <= rule(softmax, (scores, -1), {}) <= hidden + 3 * 512


@pytest.mark.parametrize("rows", [3, 64, 193])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_workspace_of_eigenvectors(rows: int, dtype: torch.dtype) -> None:
    matrix, eigh = torch.randn(rows, rows, dtype=dtype), torch.ops.aten._linalg_eigh.default
    hidden = hidden_bytes(lambda: tuple(torch.linalg.eigh(matrix)))
    assert hidden <= cpu_workspace(eigh, (matrix,), {}) <= hidden + 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_workspace_of_what_is_scattered_and_gathered(dtype: torch.dtype) -> None:
    whole, values, aten = torch.zeros(70, 33, dtype=dtype), torch.ones(70, 5, dtype=dtype), torch.ops.aten
    columns = torch.arange(5).expand(70, 5).contiguous()
    for operator, more in (
        (aten.scatter_.src, (values,)),
        (aten.scatter_.value, (1.0,)),
        (aten.scatter_add_.default, (values,)),
        (aten.scatter.src, (values,)),
        (aten.scatter.value, (1.0,)),
        (aten.scatter_add.default, (values,)),
        (aten.gather.default, ()),
    ):
        arguments = whole, 1, columns, *more
        peak = allocator_peak(lambda run=operator, given=arguments: run(*given))
        result = operator(*arguments)
        made = 0 if result is whole else result.nbytes
        assert cpu_workspace(operator, arguments, {}) == peak - made, operator


@pytest.mark.parametrize("gemm", ["fprop", "wgrad"])
def test_many_blocks_in_a_sum_take_what_a_trace_of_three_says(
    gemm: Gemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumbaBackend, "multiplies_bf16_fast", lambda self, device: True)
    backend, uses = NumbaBackend(), zip(operands_of(gemm, "fp8"), AXES[gemm], strict=True)
    (left, right), found = [Use(operand, axis, Noise()) for operand, axis in uses], []
    shapes = {"fprop": ((4096, 1280), (32, 1280)), "wgrad": ((1280, 4096), (1280, 32))}[gemm]
    for is_traced in (True, False):
        with contextlib.ExitStack() as modes:
            if is_traced:
                modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                modes.enter_context(ends_alone())
            a, b = (torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)
            operands = backend.prepare(a, left), backend.prepare(b, right)
            with StorageTracker(workspace=cpu_workspace) as tracker:
                backend.multiply(gemm, *operands, torch.bfloat16)
            found.append(tracker.peak)
    assert found[0] == found[1]


def test_workspace_of_mixed_widths() -> None:
    wide, narrow = torch.ones(64, 64), torch.ones(64, 64, dtype=torch.bfloat16)
    add, norm = torch.ops.aten.add.Tensor, torch.ops.aten._foreach_norm.Scalar
    assert cpu_workspace(add, (wide, narrow), {}) == hidden_bytes(lambda: (wide + narrow,)) == wide.nbytes
    found = hidden_bytes(lambda: torch._foreach_norm([narrow, narrow], 2, dtype=torch.float32))
    assert cpu_workspace(norm, ([narrow, narrow], 2), {"dtype": torch.float32}) == wide.nbytes
    assert found == pytest.approx(wide.nbytes, abs=64)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "mxfp8"])
@pytest.mark.every(3)
def test_a_remembered_quantization_takes_the_same_bytes(recipe: str) -> None:
    operand = operands_of("wgrad", recipe)[1]
    use = Use(operand, AXES["wgrad"][1], Noise())
    remembered = RememberedBackend()
    NumbaBackend().prepare(torch.ones(16, 16), use)  # tables that are made once
    found = []
    for backend in (NumbaBackend(), remembered, remembered):
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(384, 4096, dtype=torch.bfloat16)
            with StorageTracker() as tracker:
                remembered.tracker = tracker
                kept = backend.prepare(x, use), backend.store(x, use)
                loaded = backend.load(kept[1])
                found.append((tracker.live, tracker.peak))
                del kept, loaded
    assert found[0] == pytest.approx(found[1], abs=16)  # numbers that parts share
    assert found[1] == found[2]
