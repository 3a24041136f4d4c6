"""Numba's kernels give the reference's numbers, bit for bit: values, codes, and what codes stand for."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scrimp.formats import Noise, scales
from scrimp.gemm.backends import BACKENDS, ReferenceBackend, block_sums
from scrimp.gemm.backends.reference import ReferenceOperand
from scrimp.gemm.problem import AXES, Use
from scrimp.gemm.select import BackendSelection
from scrimp.precision import RECIPES, Operand, lookup_element, lookup_scaling

pytest.importorskip("numba", reason="an extra of its own: pip install scrimp[numba]")
from scrimp.gemm import cpu_passes

NUMBA, REFERENCE = BACKENDS["numba"], BACKENDS["reference"]
CPU = torch.device("cpu")
OPERANDS = sorted(
    {one for recipe in RECIPES.values() for gemm in ("fprop", "dgrad", "wgrad") if (pair := recipe.gemm(gemm))
     for one in (pair.a, pair.b)},
    key=repr,
)  # fmt: skip
SPECIAL = (0.0, -0.0, 1e-42, -1e-38, 3.4e38, 2.0**-126, 448.0, -6.0)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit for bit, but for which NaN it is."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.itemsize == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    numbers = (one.masked_fill(one.isnan(), 0.0).view(bits) for one in (a, b))
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(*numbers)


def assert_same_operand(a: ReferenceOperand, b: ReferenceOperand) -> None:
    assert a.is_exact_in_bf16 == b.is_exact_in_bf16
    ours, theirs = a.quantized, b.quantized
    assert same(ours.values, theirs.values)
    assert same(ours.outer, theirs.outer)
    assert same(ours.inner, theirs.inner)
    assert (ours.rest is None) == (theirs.rest is None)
    if ours.rest is not None and theirs.rest is not None:
        assert same(ours.rest.values, theirs.rest.values)
        assert same(ours.rest.inner, theirs.rest.inner)


@pytest.fixture
def bf16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceBackend, "multiplies_bf16_fast", lambda self, device: True)


@given(
    operand=st.sampled_from(OPERANDS),
    axis=st.sampled_from([-1, -2]),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1.0, 1e-30, 3e-39, 1e30]),
    key=st.integers(0, 2**64 - 1),
    special=st.lists(st.sampled_from(SPECIAL), max_size=4),
)
def test_values_and_codes_are_the_references(
    operand: Operand,
    axis: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    scale: float,
    key: int,
    special: list[float],
) -> None:
    generator = torch.Generator().manual_seed(key % 2**63)
    x = torch.randn(rows, columns, generator=generator) * scale
    for number, value in enumerate(special):
        x.view(-1)[number * 7919 % x.numel()] = value
    x, use = x.to(dtype), Use(operand, axis, Noise(key, first_row=3, first_column=5))
    with pytest.MonkeyPatch.context() as patch:
        for fast in (False, True):
            patch.setattr(ReferenceBackend, "multiplies_bf16_fast", lambda self, device, fast=fast: fast)
            assert_same_operand(NUMBA.prepare(x, use), REFERENCE.prepare(x, use))
    ours, theirs = NUMBA.store(x, use), REFERENCE.store(x, use)
    assert same(ours.payload, theirs.payload)
    assert same(ours.scales, theirs.scales)
    assert same(ours.tensor_scale, theirs.tensor_scale)
    assert_same_operand(NUMBA.load(ours), REFERENCE.load(theirs))


@pytest.mark.parametrize("no_clip", [False, True])
@pytest.mark.parametrize(
    ("scaling", "element"), [("tile", "e4m3"), ("mx", "e2m1"), ("mx", "e5m2"), ("nvfp4", "e2m1")]
)
def test_scales_are_the_rules_for_any_magnitude(scaling: str, element: str, no_clip: bool) -> None:
    """Random bits of 131,072 magnitudes, subnormal, infinite and NaN ones among them."""
    generator = torch.Generator().manual_seed(9)
    amax = torch.randint(0, 0x7FC00001, (256, 512), dtype=torch.int32, generator=generator).view(
        torch.float32
    )
    amax[:2, :4] = torch.tensor([0.0, 1e-45, torch.inf, torch.nan])
    kind, entry = lookup_scaling(scaling), lookup_element(element)
    for tensor_scale in [3.7e-3, 2.0**-126, 1e-33, 1e33] if kind.has_tensor_scale else [None]:
        whole = None if tensor_scale is None else torch.tensor(tensor_scale)
        lift = 1.0 if whole is None else scales.lift_of(whole).item()
        ours = cpu_passes.scales_of(amax, kind, entry, whole, lift=lift, no_clip=no_clip)
        theirs = scales.scales_of(amax, kind, entry, whole, no_clip=no_clip)
        for name in ("stored", "decode", "encode"):
            assert same(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [name for name, one in RECIPES.items() if one.bits < 16])
@pytest.mark.every(5)
def test_products_are_the_references(
    recipe: str, gemm: str, out: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(7)
    y, x, w = (torch.randn(size, generator=generator).bfloat16() for size in ((96, 40), (96, 176), (40, 176)))
    pair, (first, second) = (
        RECIPES[recipe].gemm(gemm),
        {"fprop": (x, w), "dgrad": (y, w), "wgrad": (y, x)}[gemm],
    )
    assert pair is not None
    axes, noise = AXES[gemm], Noise(3)
    for fast in (False, True):
        monkeypatch.setattr(ReferenceBackend, "multiplies_bf16_fast", lambda self, device, fast=fast: fast)
        for is_kept in (False, True):
            found = []
            for backend in (NUMBA, REFERENCE):
                a = backend.prepare(first, Use(pair.a, axes[0], noise))
                use = Use(pair.b, axes[1], noise)
                b = (
                    backend.load(backend.store(second, use))
                    if is_kept and pair.b
                    else backend.prepare(second, use)
                )
                found.append(backend.multiply(gemm, a, b, out))
            assert same(*found)
            assert found[0].dtype == out


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_chunks_of_rows_are_the_references(
    gemm: str, bf16_is_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of 700 summed numbers: six products of each chunk, the last one ragged, four and two added at once."""
    generator = torch.Generator().manual_seed(5)
    sizes = {
        "fprop": ((200, 700), (300, 700)),
        "dgrad": ((200, 700), (700, 300)),
        "wgrad": ((700, 200), (700, 300)),
    }
    first, second = (torch.randn(size, generator=generator).bfloat16() for size in sizes[gemm])
    pair, axes = RECIPES["fp8"].gemm(gemm), AXES[gemm]
    assert pair is not None
    uses = [Use(operand, axis, Noise(3)) for operand, axis in zip((pair.a, pair.b), axes, strict=True)]
    ours, theirs = (
        [backend.prepare(x, use) for x, use in zip((first, second), uses, strict=True)]
        for backend in (NUMBA, REFERENCE)
    )
    whole = REFERENCE.multiply(gemm, *theirs, torch.bfloat16)
    for numbers in (300 * 70, 1):
        monkeypatch.setattr(block_sums, "CHUNK_NUMBERS", {"cpu": numbers})
        found = NUMBA.multiply(gemm, *ours, torch.bfloat16)
        assert same(found, REFERENCE.multiply(gemm, *theirs, torch.bfloat16))
        # torch adds up products of few rows in another order.
        assert (found.double() - whole.double()).norm() < 4e-3 * whole.double().norm()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("operand", "axis"), itertools.product(OPERANDS, (-1, -2)), ids=str)
@pytest.mark.every(5)
def test_what_is_not_finite_is_seen_where_the_reference_sees_it(
    operand: Operand, axis: int, bad: float, bf16_is_fast: None
) -> None:
    x = torch.randn(40, 200, generator=torch.Generator().manual_seed(1))
    x[17, 150] = bad
    use = Use(operand, axis, Noise(4))
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_operand(NUMBA.prepare(x.to(dtype), use), REFERENCE.prepare(x.to(dtype), use))
    loaded = [one.load(one.store(x, use)).quantized.dequantize() for one in (NUMBA, REFERENCE)]
    assert same(*loaded)


def test_threads_change_nothing() -> None:
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    try:
        for operand, axis in itertools.product(OPERANDS, (-1, -2)):
            found = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                found.append(NUMBA.prepare(x, Use(operand, axis, Noise(6))))
            assert_same_operand(found[0], found[1])
            assert_same_operand(found[0], found[2])
    finally:
        torch.set_num_threads(threads)


def test_what_the_kernels_do_not_take_goes_through_the_reference() -> None:
    better = Use(Operand("e2m1", "nvfp4", four_over_six=True), -1, Noise())
    plain, tiles = Use(None, -1, Noise()), Use(Operand("e4m3", "tile"), -1, Noise())
    x = torch.randn(8, 32)
    for tensor, use in ((x, better), (x, plain), (x.double(), tiles), (x.half(), tiles), (x[:0], tiles)):
        assert_same_operand(NUMBA.prepare(tensor, use), REFERENCE.prepare(tensor, use))


def test_it_runs_what_is_quantized_on_a_cpu_and_nothing_else() -> None:
    from scrimp.gemm.problem import Shape

    selection, shape = BackendSelection(CPU), Shape(64, 32, 48)
    chosen = {name: selection.choose(name, "wgrad", (shape,)).name for name in RECIPES}
    assert chosen == {name: "numba" if RECIPES[name].bits < 16 else "reference" for name in RECIPES}
    assert "for CPUs" in str(NUMBA.refusal("fprop", "fp8", shape, torch.device("cuda")))


def test_storage_may_still_be_freed_by_resizing_as_fsdp_frees_weights() -> None:
    weight = torch.nn.Parameter(torch.randn(32, 64))
    NUMBA.store(weight, Use(Operand("e4m3", "tile"), -1, Noise()))
    NUMBA.prepare(weight, Use(Operand("e4m3", "block"), -2, Noise()))
    weight.untyped_storage().resize_(0)
    assert weight.untyped_storage().nbytes() == 0


@pytest.mark.slow
def test_processes_that_compile_at_once_wait_for_each_other(tmp_path: Path) -> None:
    """Each with types of its own, into one empty cache; a further process reads what they wrote."""
    source = (
        "import torch; from scrimp.gemm.backends import BACKENDS; from scrimp.gemm.problem import Use\n"
        "from scrimp.formats import Noise; from scrimp.precision import Operand; import sys\n"
        "for kind in sys.argv[1:]:\n"
        "    use = Use(Operand('e4m3', 'tile'), -1, Noise())\n"
        "    BACKENDS['numba'].prepare(torch.ones(8, 128, dtype=getattr(torch, kind)), use)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def begin(*kinds: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", source, *kinds]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    for processes in ([begin("float32"), begin("bfloat16")], [begin("float32", "bfloat16")]):
        for one in processes:
            _, said = one.communicate(timeout=240)
            assert one.returncode == 0, said
    assert list((tmp_path / "scrimp" / "numba").iterdir())
